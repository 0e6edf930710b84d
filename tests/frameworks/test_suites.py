"""Own tests of Dramatiq, kombu and Celery for brokers and results, and taskiq-pipelines, against a node.

Wheels have no tests. `DRAMATIQ_SOURCE`, `KOMBU_SOURCE` and `CELERY_SOURCE` name the unpacked source packages, of the
versions that are installed. Celery's tests take a quarter of an hour. taskiq and django-tasks have tests of their
brokers in memory alone, which take no other broker.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hadelay.taskiq import HadelayBroker, HadelayResultBackend
from hadelay.taskiq.testing import worker
from hadelay.testing import LocalNode
from tests.frameworks.support import DOCS, PATH
from tests.system.cluster import environment

SOURCE, KOMBU, CELERY = (os.environ.get(f"{name}_SOURCE", "") for name in ("DRAMATIQ", "KOMBU", "CELERY"))


@pytest.mark.skipif(not SOURCE, reason="DRAMATIQ_SOURCE names no unpacked source package of Dramatiq")
def test_the_suite_of_dramatiq(tmp_path: Path) -> None:
    """What fails is what the page lists."""
    files = ["test_actors.py", "test_composition.py", "test_results.py"]
    for file in files:
        shutil.copy(Path(SOURCE) / "tests" / file, _tests(tmp_path) / file)
    lines = "from tests_frameworks_fixtures import *\n"
    shutil.copy(Path(__file__).parent / "suites" / "fixtures.py", tmp_path / "tests_frameworks_fixtures.py")
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "common.py").write_text(lines)
    (tmp_path / "conftest.py").write_text(lines)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "--timeout=30", "tests"]
    env = {**environment(), "PYTHONPATH": f"{PATH}:{tmp_path}"}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)", done.stdout, re.M))
    listed = set(re.findall(r"`(test_\w+)`", (DOCS / "dramatiq.md").read_text()))
    assert re.search(r"\b5\d passed", done.stdout), done.stdout + done.stderr
    assert failed == listed


@pytest.mark.skipif(not KOMBU, reason="KOMBU_SOURCE names no unpacked source package of kombu")
@pytest.mark.timeout(400)
def test_the_suite_of_kombu(tmp_path: Path) -> None:
    """What fails is what the page lists."""
    shutil.copy(Path(KOMBU) / "t" / "integration" / "common.py", tmp_path / "common.py")
    shutil.copy(Path(__file__).parent / "suites" / "kombu_suite.py", tmp_path / "test_kombu_suite.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "--timeout=60"]
    env = {**environment(), "PYTHONPATH": f"{PATH}:{tmp_path}"}
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S+::Test(\w+::\w+)", done.stdout, re.M))
    text = (DOCS / "celery.md").read_text()
    listed = set(re.findall(r"`(Base\w+::test_\w+)`", text))
    assert re.search(r"\b4\d passed", done.stdout), done.stdout + done.stderr
    assert failed == listed


@pytest.mark.skipif(not CELERY, reason="CELERY_SOURCE names no unpacked source package of Celery")
@pytest.mark.timeout(3600)
def test_the_suite_of_celery(tmp_path: Path) -> None:
    """What fails is what the page lists."""
    shutil.copytree(Path(CELERY) / "t", tmp_path / "t")
    (tmp_path / "pytest.ini").write_text("[pytest]\npython_classes = test_*\n")
    words = ["-v", "-p", "no:cacheprovider", "--tb=no", "--timeout=60", "-rfE"]
    words += [f"t/integration/test_{name}.py" for name in ("canvas", "tasks", "inspect", "serialization")]
    env = {**environment(), "PYTHONPATH": f"{PATH}:{tmp_path}", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    program = str(Path(__file__).parent / "suites" / "celery_suite.py")
    done = subprocess.run(
        [sys.executable, program, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=3600
    )
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S+::(test_\w+)", done.stdout, re.M))
    section = (DOCS / "celery.md").read_text().partition("## Celery's own tests")[2]
    assert re.search(r"\b1[34]\d passed", done.stdout), done.stdout + done.stderr
    listed, slow = (set(re.findall(r"`(test_\w+)`", part)) for part in section.split("On a slow machine"))
    assert listed <= failed <= listed | slow


def _tests(directory: Path) -> Path:
    tests = directory / "tests"
    tests.mkdir(exist_ok=True)
    return tests


async def test_pipelines_of_taskiq(hadelay: LocalNode) -> None:
    pipelines = pytest.importorskip("taskiq_pipelines", reason="taskiq-pipelines is not installed")
    broker = HadelayBroker(hadelay.url).with_middlewares(pipelines.PipelineMiddleware())
    broker = broker.with_result_backend(HadelayResultBackend(broker))

    @broker.task
    async def add(number: int, more: int = 1) -> int:
        return number + more

    async with worker(broker, hadelay) as here:
        call = await pipelines.Pipeline(broker, add).call_next(add, more=5).call_next(add).kiq(1)
        assert not await call.is_ready(), "its last step is not published yet"
        assert await here.run_due() == 3
        assert (await call.wait_result(timeout=5)).return_value == 8
    await broker.shutdown()
