"""Beyond one process: a Spark master and two workers, which have nothing of hadelay but what is shipped to them, run
what the page says. Three minutes of a core: `make spark-cluster`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.freeports import free_ports
from hadelay import Client
from hadelay.pipeline import reconcile, session
from hadelay.pipeline.jobs import ReconcileOptions
from hadelay.pipeline.schema import parse_options
from tests.cli.support import cluster, environment
from tests.pipeline import test_archive

ASKED = "HADELAY_SPARK_CLUSTER"
pytestmark = [
    pytest.mark.skipif(ASKED not in os.environ, reason=f"minutes of a core: make spark-cluster, or {ASKED}=1"),
    pytest.mark.processes,
    pytest.mark.timeout(1800),
]
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "spark-cluster.md"
COUNT = 50
#: For a JVM that does little, and not for long.
_CHEAP = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


def commands(heading: str) -> list[str]:
    """Of the section's sh blocks, one each; a line that ends with a backslash goes on."""
    section = re.split(r"^## ", PAGE.read_text(), flags=re.M)
    (text,) = (part for part in section if part.startswith(heading))
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)).replace("\\\n", " ")
    return [line.partition("     #")[0].strip() for line in blocks.splitlines() if line]


def script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


class Location:
    """A directory to work in, and how commands of the page run in it."""

    def __init__(self, directory: Path) -> None:
        spark = Path(pytest.importorskip("pyspark").__file__).parent
        if (java := session.find_java()) is None:
            pytest.skip(session.no_java())
        self.directory, self.port = directory, str(free_ports(1))
        script(directory / "here" / "python3", f'exec "{sys.executable}" "$@"')
        script(directory / "here" / "pip", f'exec "{sys.executable}" -m pip "$@"')
        script(directory / "here" / "hadelay", f'exec "{sys.executable}" -m hadelay "$@"')
        # A Python with nothing in it: -S leaves out what is installed.
        script(directory / "there" / "python3", f'exec "{sys._base_executable}" -S "$@"')  # type: ignore[attr-defined]
        (directory / "conf").mkdir()
        settings = {
            "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "2", "spark.ui.port": "0",
            "spark.master.rest.enabled": "false",
            **{f"spark.{side}.extraJavaOptions": _CHEAP for side in ("driver", "executor")},
            # The wheel alone needs workers that have the rest; --conf says otherwise for the archive.
            "spark.executorEnv.PYTHONPATH": str(Path(pytest.importorskip("pyarrow").__file__).parent.parent),
        }  # fmt: skip
        lines = "".join(f"{name} {value}\n" for name, value in settings.items())
        (directory / "conf" / "spark-defaults.conf").write_text(lines)
        self.common = environment(
            JAVA_HOME=java[0], SPARK_HOME=str(spark), SPARK_CONF_DIR=str(directory / "conf"), SPARK_LOCAL_IP="127.0.0.1"
        )
        self.bin = f"{spark}/bin:/usr/bin:/bin"

    def run(self, command: str, **replaced: str) -> subprocess.CompletedProcess[str]:
        for old, new in {"7077": self.port, **replaced}.items():
            command = command.replace(old, new)
        variables = {**self.common, "PATH": f"{self.directory}/here:{self.bin}", "HADELAY_OUTPUT": "json"}
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.directory, capture_output=True, text=True, timeout=600, env=variables
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        return done

    @contextlib.contextmanager
    def background(self, command: str) -> Iterator[None]:
        command = command.replace("7077", self.port).removesuffix("&")
        variables = {
            **self.common, "PATH": f"{self.directory}/there:{self.bin}", "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_MASTER_WEBUI_PORT": "0", "SPARK_WORKER_WEBUI_PORT": "0",
            "SPARK_DAEMON_JAVA_OPTS": _CHEAP,
        }  # fmt: skip
        del variables["PYTHONPATH"]
        with open(self.directory / "cluster.log", "ab") as log:
            process = subprocess.Popen(
                shlex.split(command), cwd=self.directory, stdout=log, stderr=log, env=variables, start_new_session=True
            )
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Location]:
    """With a master and two workers."""
    found = Location(tmp_path_factory.mktemp("standalone"))
    master, worker = commands("Standalone")[:2]
    with contextlib.ExitStack() as running:
        for command in (master, worker, worker):
            running.enter_context(found.background(command))
        yield found


def reported(done: subprocess.CompletedProcess[str]) -> Any:
    """Of JSON; spark-submit gives what was said on stderr with it."""
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def test_the_page_runs_on_two_workers_that_have_nothing_else(place: Location, tmp_path: Path) -> None:
    pack, job, wheel, rename = commands("What to ship")
    archive, schedule, reconciled = commands("Standalone")[2:]
    packed = reported(place.run(pack))
    assert {"hadelay", "pyarrow", "numpy"} <= packed["packages"].keys()
    place.run(job)
    # Made from a copy: a build leaves files beside its sources.
    copy = tmp_path / "hadelay"
    here = shlex.join(map(str, [ROOT / "src", ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]))
    place.run(f"mkdir {copy} && cp -r {here} {copy}")
    place.run(wheel, **{" hadelay": f" --no-build-isolation --quiet {copy}"})
    place.run(rename)

    # Hours of a directory, as one process archives them.
    world = test_archive.settled(tmp_path)
    test_archive.run(world, tmp_path)
    found = reported(place.run(archive, **{"/srv/n1": str(tmp_path)}))
    assert [hour["status"] for hour in found["hours"]][:1] == ["archived"]
    os.rename(place.directory / "archive", place.directory / "out")
    assert test_archive.contents(place.directory) == test_archive.contents(tmp_path)

    # Rows into a cluster, and what it has, from its nodes.
    rows = "".join(f"{n},2h,note {n}\n" for n in range(COUNT))
    (place.directory / "orders.csv").write_text(f"order,due,note\n{rows}")
    with cluster(tmp_path / "nodes") as dev, Client(dev.servers) as client:
        nodes = {"http://127.0.0.1:8400": dev.servers}
        found = reported(place.run(schedule, **nodes))
        assert (found["rows"], found["published"]) == (COUNT, COUNT)
        assert client.topic("reminders").scheduled == COUNT
        found = reported(place.run(reconciled, **nodes))
        here_too = reconcile.run(None, ReconcileOptions(parse_options({"endpoint": dev.servers})))
        assert found["table"] == here_too.table
        assert found["verdicts"]["pending"] == COUNT
    executors = {path.parent.name for path in (place.directory / "work").glob("app-*/*/stderr")}
    assert executors >= {"0", "1"}
