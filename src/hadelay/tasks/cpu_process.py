"""A process that runs tasks with `cpu=True`: `python -m hadelay.tasks.cpu_process FD MODULE:APP`."""

import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from hadelay.tasks.app import App
from hadelay.tasks.attempt import CURRENT, Attempt
from hadelay.tasks.channel import send
from hadelay.tasks.cpu import Reply, Work
from hadelay.tasks.load import load
from hadelay.tasks.outcomes import Outcome, done, outcome_of


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C: the worker decides when this process ends
    worker = socket.socket(fileno=int(sys.argv[1]))
    logging.basicConfig(level=logging.INFO)
    app = load(sys.argv[2])
    works: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(worker, works), daemon=True).start()
    while True:
        work = msgspec.json.decode(works.get(), type=Work)
        send(worker, Reply(outcome=_run(app, work, lambda text: send(worker, Reply(progress=text)))))


def _read(worker: socket.socket, works: "queue.SimpleQueue[bytes]") -> None:
    """Thread that reads calls. When the worker has ended, the thread ends this process, even in the middle of a
    function: the function's message goes to another worker."""
    for line in worker.makefile("rb"):
        works.put(line)
    os._exit(1)


def _run(app: App, work: Work, tell: Callable[[str], None]) -> Outcome:
    task = app.tasks[work.call.task]
    deadline = None if work.deadline_ms is None else datetime.fromtimestamp(work.deadline_ms / 1000, UTC)
    attempt = Attempt(
        task=task.name,
        id=work.id,
        topic=work.topic,
        key=work.key,
        number=work.number,
        counted=work.counted,
        deadline=deadline,
        meta=work.meta,
        _tell=tell,
    )
    token = CURRENT.set(attempt)
    try:
        bound = task.arguments.decode(work.call.args)
        return done(task.function(*bound.args, **bound.kwargs), task.rules)
    except Exception as error:
        return outcome_of(error, task.rules, work.counted)
    finally:
        CURRENT.reset(token)


if __name__ == "__main__":
    main()
