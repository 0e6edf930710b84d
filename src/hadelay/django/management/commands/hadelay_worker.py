"""Command `manage.py hadelay_worker`, which runs the tasks of one backend."""

import os
import sys
from argparse import ArgumentParser, BooleanOptionalAction
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from hadelay.django.backend import HadelayBackend
from hadelay.django.compat import task_backends
from hadelay.errors import BadRequest
from hadelay.tasks.supervisor import supervise


class Command(BaseCommand):
    help = """Run the tasks of a backend, until SIGTERM or Ctrl-C. The first signal fetches no more and lets running
    tasks finish; a second one gives them back now."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--backend", default="default", help="Alias in TASKS.")
        parser.add_argument(
            "--queue",
            action="append",
            default=[],
            help="Run this queue alone; may be given several times. The first "
            "one is preferred. Default: QUEUES of the backend.",
        )
        parser.add_argument("--concurrency", type=int, default=10, help="Threads of one process. Default: 10.")
        parser.add_argument("--processes", type=int, default=1, help="Worker processes. Default: 1.")
        parser.add_argument("--drain", default="8s", help="Time for running tasks to finish. Default: 8s.")
        parser.add_argument("--lease", default="30s", help="Lease of messages, extended while tasks run. Default: 30s.")
        parser.add_argument("--health", help="Serve /healthz and /metrics at HOST:PORT.")
        parser.add_argument(
            "--reload",
            action=BooleanOptionalAction,
            default=None,
            help="Start again when a Python file below this directory changes. Default: as DEBUG.",
        )

    def handle(self, *, backend: str, queue: list[str], reload: bool | None, **options: Any) -> None:
        if backend not in list(task_backends) or not isinstance(task_backends[backend], HadelayBackend):
            raise CommandError(f"TASKS[{backend!r}] is no hadelay.django.HadelayBackend: choose another --backend")
        if wrong := [str(found) for found in task_backends[backend].check() if found.is_serious()]:
            raise CommandError("\n".join(wrong))
        queues, known = queue or task_backends[backend].queue_names, task_backends[backend].queues
        if not queues:
            raise CommandError("QUEUES of the backend is empty, which allows all queues: name some with --queue")
        if known and (unknown := set(queues) - known):
            raise CommandError(f"--queue {min(unknown)}: QUEUES of the backend has no such queue")
        # Pass sys.path on, so that the worker processes find the same modules wherever manage.py is.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        try:
            code = supervise(
                f"hadelay.django.worker:{backend}",
                topics=task_backends[backend].topics(queues),
                reload=settings.DEBUG if reload is None else reload,
                **{name: options[name] for name in ("concurrency", "processes", "drain", "lease", "health")},
            )
        except BadRequest as error:
            raise CommandError(str(error)) from None
        if code:
            sys.exit(code)
