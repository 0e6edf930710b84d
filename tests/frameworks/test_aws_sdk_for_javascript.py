"""The programs for the AWS SDK for JavaScript in the how-tos, run by the machine's Node.js against a real node: SQS and
EventBridge Scheduler, and a signature that the SDK makes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.support import DOCS, FULL
from tests.system.cluster import Cluster

NODE = shutil.which("node")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not FULL, reason="make frameworks"),
    pytest.mark.skipif(NODE is None, reason="Node.js is not installed"),
]
PACKAGES = ("@aws-sdk/client-sqs", "@aws-sdk/client-scheduler")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("sdk")
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *PACKAGES]
    if shutil.which("npm") is None or subprocess.run(install, cwd=found, capture_output=True, check=False).returncode:
        pytest.skip("npm cannot install the AWS SDK for JavaScript")
    return found


def run(page: str, name: str, directory: Path, url: str) -> str:
    """Run a program of a page, which has no types and so is JavaScript; returns what it prints."""
    (text,) = re.findall(rf"^```ts\n// {name}\.ts\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
    (directory / f"{name}.mjs").write_text(text)
    done = subprocess.run(
        [str(NODE), f"{name}.mjs"], cwd=directory, env={**os.environ, "HADELAY_SERVER": url},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_programs_of_the_pages(directory: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster", nodes=1) as running:
        url = running.urls["n1"]
        assert run("sqs.md", "orders", directory, url) == "pay order 4711 EUR\n"
        assert run("from-redis.md", "jobs", directory, url) == "mail to jo@example.com\n"
        running.ask("n1", "PUT", "/v1/topics/reminders", {})
        arn = "arn:aws:scheduler:hadelay:000000000000:schedule/default/every-weekday"
        assert run("eventbridge-scheduler.md", "remind", directory, url) == f"{arn}\n"
        assert running.ask("n1", "GET", "/v1/schedules/aws~default~every-weekday").json["cron"] == "0 9 * * 1-5"
