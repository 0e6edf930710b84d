"""Run pytest on Celery's integration tests, with broker and results on a node. Arguments: those of pytest."""

import os
import subprocess
import sys

from hadelay.testing import LocalNode


def main() -> int:
    with LocalNode() as node:
        url = f"hadelay://{node.url.removeprefix('http://')}/suite"
        plugins = ("-p", "hadelay.celery", "-p", "celery.contrib.pytest")
        env = {**os.environ, "TEST_BROKER": url, "TEST_BACKEND": url, "WORKER_LOGLEVEL": "INFO"}
        return subprocess.call([sys.executable, "-m", "pytest", *plugins, *sys.argv[1:]], env=env)


if __name__ == "__main__":
    sys.exit(main())
