"""Processes of a run: `python -m bench.delays.roles prepare|produce|work`, with the plan in a file that the environment
names. They write the history."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.delays.contender import Client, Contender, Message
from bench.delays.contenders import contender_of
from bench.delays.history import now_ms, read
from bench.delays.plan import Load, plan, writer

#: Due time of messages that only measure the publish rate, from now on, in seconds: after the run.
_AFTER_RUN_S = 86_400
_WEEK_S = 7 * 86_400
#: Least number of messages of one publish at a steady rate; at most 20 publishes per second of each producer.
_LEAST = 10
#: Pause before a new connection after one failed, and the time in which `prepare` has to succeed, in seconds.
_PAUSE_S, _PREPARE_S = 0.1, 30.0


def _complain(error: Exception) -> None:
    print(f"{time.strftime('%H:%M:%S')} {type(error).__name__}: {error}", file=sys.stderr, flush=True)


# --- producers ---


class Producer:
    """One thread with its own connection. `publish` notes acknowledged messages, and those whose outcome is unknown."""

    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._client: Client | None = None
        self.published = 0

    def connect(self) -> Client | None:
        """The connection; None if there is no server now."""
        try:
            if self._client is None:
                self._client = self._contender.connect()
        except Exception as error:  # of any library
            _complain(error)
            time.sleep(_PAUSE_S)
        return self._client

    def publish(self, messages: Sequence[Message]) -> None:
        ok, ids = None, [message.id for message in messages]
        client = self.connect()
        if client is None:
            return  # nothing was sent, so nothing is noted
        try:
            client.publish(messages)
            ok = now_ms()
            self.published += len(ids)
        except Exception as error:
            self._reconnect(error)
        writer("produce").write("pub", ids=ids, due=[message.due_ms for message in messages], ok=ok)

    def cancel(self, ids: Sequence[str]) -> int:
        ok, cancelled = None, 0
        if self._client is None:
            return 0
        try:
            cancelled = self._client.cancel(ids)
            ok = now_ms() if cancelled == len(ids) else None
        except Exception as error:
            self._reconnect(error)
        writer("produce").write("cancel", ids=list(ids), ok=ok)
        return cancelled

    def _reconnect(self, error: Exception) -> None:
        _complain(error)
        if self._client is not None:
            with contextlib.suppress(Exception):
                self._client.close()
        self._client = None
        time.sleep(_PAUSE_S)


class Ids:
    def __init__(self) -> None:
        self._numbers, self._lock = itertools.count(), threading.Lock()

    def take(self, count: int) -> list[str]:
        with self._lock:
            return [f"m{next(self._numbers):08d}" for _ in range(count)]


def produce() -> None:
    load, contender = plan().load, contender_of(plan())
    ids, producers = Ids(), [Producer(contender) for _ in range(plan().producers)]
    how = {"steady": _steady, "burst": _burst, "pending": _pending, "once": _once}[load.kind]
    _all(producers, Producer.connect)
    began = time.monotonic()
    how(load, ids, producers)
    if load.kind in ("steady", "once"):
        count = sum(producer.published for producer in producers)
        writer("produce").write("loaded", count=count, seconds=time.monotonic() - began)


def _all(producers: Sequence[Producer], run: Callable[[Producer], object]) -> None:
    threads = [threading.Thread(target=run, args=(producer,), daemon=True) for producer in producers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _steady(load: Load, ids: Ids, producers: Sequence[Producer]) -> None:
    count = max(_LEAST, round(load.rate * 0.05 / len(producers)))
    tick_s = count * len(producers) / load.rate
    began, stop = time.monotonic(), threading.Event()
    threading.Thread(target=_wait_for_end, args=(stop,), daemon=True).start()
    cancels = load.cancel_every and contender_of(plan()).cancels

    def run(producer: Producer) -> None:
        for step in itertools.count():
            time.sleep(max(0.0, began + step * tick_s - time.monotonic()))
            if stop.is_set() or time.monotonic() - began >= load.seconds:
                return
            messages = [Message(id, int(now_ms() + random.uniform(1, load.span_s) * 1000)) for id in ids.take(count)]
            producer.publish(messages)
            if cancels:
                # Only what is due later than a cancellation takes: one that comes too late proves nothing.
                later = [m.id for m in messages if int(m.id[1:]) % load.cancel_every == 0]
                late = {m.id for m in messages if m.due_ms < now_ms() + 3000}
                if later := [id for id in later if id not in late]:
                    producer.cancel(later)

    _all(producers, run)


def _wait_for_end(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def _fill(count: int, ids: Ids, producers: Sequence[Producer], due: Callable[[], int], until: float) -> float:
    """Publish `count` messages, or stop at `until`; returns the seconds that it took."""
    left, lock, began = itertools.count(count, -plan().batch), threading.Lock(), time.monotonic()

    def run(producer: Producer) -> None:
        while time.monotonic() < until:
            with lock:
                some = min(plan().batch, next(left))
            if some <= 0:
                return
            producer.publish([Message(id, due()) for id in ids.take(some)])

    _all(producers, run)
    return time.monotonic() - began


def _burst(load: Load, ids: Ids, producers: Sequence[Producer]) -> None:
    probe = max(200, load.count // 50)
    after = int(now_ms()) + _AFTER_RUN_S * 1000
    seconds = _fill(probe, ids, producers, lambda: after, float("inf"))
    second = int(now_ms() + seconds / probe * load.count * 1500) + 5000
    took = _fill(load.count, ids, producers, lambda: second + random.randrange(1000), float("inf"))
    writer("produce").write("loaded", count=load.count, seconds=took, second=second, in_time=now_ms() < second)


def _pending(load: Load, ids: Ids, producers: Sequence[Producer]) -> None:
    """Fill; then wait for the harness to close standard input, and cancel."""
    first = int(now_ms()) + _AFTER_RUN_S * 1000
    until = time.monotonic() + load.seconds
    seconds = _fill(load.count, ids, producers, lambda: first + random.randrange(_WEEK_S * 1000), until)
    count = sum(producer.published for producer in producers)
    writer("produce").write("loaded", count=count, seconds=seconds)
    sys.stdin.read()
    if contender_of(plan()).cancels:
        _cancel(load.cancel, producers)


def _cancel(count: int, producers: Sequence[Producer]) -> None:
    """One call per key from each producer, about its own messages: some contenders need what a publish returned."""
    published = [e["ids"] for e in read(Path(plan().history)) if e["e"] == "pub" and e["ok"] is not None]
    left = iter(random.sample([id for ids in published for id in ids], min(count, sum(map(len, published)))))
    lock, cancelled, began = threading.Lock(), itertools.count(), time.monotonic()

    def run(producer: Producer) -> None:
        while True:
            with lock:
                id = next(left, None)
            if id is None:
                return
            for _ in range(producer.cancel([id])):
                next(cancelled)

    _all(producers, run)
    writer("produce").write("cancelled", count=next(cancelled), seconds=time.monotonic() - began)


def _once(load: Load, ids: Ids, producers: Sequence[Producer]) -> None:
    due = int(now_ms() + load.span_s * 1000)
    _fill(load.count, ids, producers, lambda: due, float("inf"))


# --- workers ---


def work() -> None:
    """Receive and ack in some threads until SIGTERM."""
    stop, contender = threading.Event(), contender_of(plan())
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threads = [threading.Thread(target=_work, args=(contender, stop), daemon=True) for _ in range(plan().threads)]
    for thread in threads:
        thread.start()
    stop.wait()
    for thread in threads:
        thread.join(3)


def _work(contender: Contender, stop: threading.Event) -> None:
    in_hand = 0
    client: Client | None = None
    while not stop.is_set():
        try:
            if client is None:
                client = contender.connect()
            received = client.receive(plan().batch, 1.0)
            if not received:
                continue
            ids = [one.id for one in received]
            writer("work").got(ids)
            if plan().hold:
                in_hand += len(ids)
                while in_hand >= plan().hold:
                    time.sleep(1)
                continue
            client.ack(received)
            writer("work").done(ids)
        except Exception as error:  # of any library, as its server dies
            _complain(error)
            if client is not None:
                with contextlib.suppress(Exception):
                    client.close()
            client = None
            time.sleep(_PAUSE_S)


def prepare() -> None:
    until = time.monotonic() + _PREPARE_S
    while True:
        try:
            return contender_of(plan()).prepare()
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    {"prepare": prepare, "produce": produce, "work": work}[sys.argv[1]]()
