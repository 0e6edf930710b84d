"""The helpers that run what is due inside a test: `testing.worker` of each adapter, and the pages' tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import celery
import dramatiq
import pytest
from celery import Celery, chain
from dramatiq.errors import QueueJoinTimeout

from hadelay.celery.testing import worker as celery_worker
from hadelay.dramatiq import HadelayBroker as DramatiqBroker
from hadelay.dramatiq.testing import worker as dramatiq_worker
from hadelay.taskiq import HadelayBroker, HadelayResultBackend
from hadelay.taskiq.testing import worker as taskiq_worker
from hadelay.testing import LocalNode
from tests.frameworks.support import DOCS
from tests.system.cluster import environment

#: The apps of these tests name this address, at which nothing listens.
NOWHERE = "127.0.0.1:1"


def written(page: str, directory: Path, django_version: int = 6) -> None:
    """Write the files of a page's `py` blocks, as they are."""
    for block in re.findall(r"^```py\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S):
        head, _, text = block.partition("\n")
        path = directory / head.removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(text if django_version >= 6 else text.replace("django.tasks", "django_tasks"))


def ran(directory: Path, *words: str, **variables: str) -> str:
    env = {**os.environ, **environment(), "PYTHONPATH": f"{environment()['PYTHONPATH']}:{directory}", **variables}
    done = subprocess.run(
        [sys.executable, *words], cwd=directory, env=env, capture_output=True, text=True, timeout=100
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("page", ["celery.md", "dramatiq.md", "taskiq.md"])
def test_the_tests_of_the_pages(page: str, tmp_path: Path) -> None:
    written(page, tmp_path)
    words = ("-m", "pytest", "-q", "-p", "hadelay.testing.plugin", "-p", "no:cacheprovider", "test_shop.py")
    assert "1 passed" in ran(tmp_path, *words)


def test_the_tests_of_the_page_of_django(tmp_path: Path) -> None:
    django = pytest.importorskip("django")
    apps = [] if django.VERSION >= (6, 0) else ["django_tasks"]
    (tmp_path / "settings.py").write_text(
        f"SECRET_KEY = 'x'\nUSE_TZ = True\nINSTALLED_APPS = {apps} + ['django.contrib.contenttypes', 'shop']\n"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}}\n"
    )
    written("django.md", tmp_path, django.VERSION[0])
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "errors.py").write_text("class Busy(Exception): ...\n")
    manage = ("-m", "django", "test", "shop")
    assert "Ran 1 test" in ran(tmp_path, *manage, DJANGO_SETTINGS_MODULE="settings")
    (tmp_path / "shop" / "tests.py").write_text(
        "from django.test import SimpleTestCase\n"
        "from django.core.exceptions import ImproperlyConfigured\n"
        "from shop.tasks import cancel, remind\n"
        "class Tests(SimpleTestCase):\n"
        "    def test_nothing_is_published(self):\n"
        "        with self.assertRaisesMessage(ImproperlyConfigured, 'a test may not publish into the cluster'):\n"
        "            remind.enqueue(1)\n"
    )
    assert "Ran 1 test" in ran(tmp_path, *manage, DJANGO_SETTINGS_MODULE="settings")
    (tmp_path / "shop" / "tests.py").write_text(
        "from django.test import TestCase\n"
        "from shop.orders import place\n"
        "class Tests(TestCase):\n"
        "    def test_all_run_at_once(self):\n"
        "        with self.captureOnCommitCallbacks(execute=True):\n"
        "            place(4711)\n"
    )
    found = ran(tmp_path, *manage, DJANGO_SETTINGS_MODULE="test_settings")
    assert "remind the customer of order 4711" in found


def test_celery(hadelay: LocalNode) -> None:
    app = Celery("due", broker=f"hadelay://{NOWHERE}/due", backend="hadelay://")
    tries: list[int] = []

    @app.task(name="flaky", bind=True, max_retries=2)
    def flaky(self: object) -> int:
        tries.append(self.request.retries)  # type: ignore[attr-defined]
        if len(tries) < 3:
            raise self.retry(countdown=60)  # type: ignore[attr-defined]
        return len(tries)

    @app.task(name="add")
    def add(a: int, b: int) -> int:
        return a + b

    with celery_worker(app, hadelay) as here:
        hadelay.clock.advance("30d")
        result = flaky.apply_async(countdown=5)
        assert here.run_due() == 0
        hadelay.clock.advance("5s")
        assert here.run_due() == 1
        for _ in range(2):
            assert here.run_due() == 0, "a countdown is from the node's time"
            hadelay.clock.advance("60s")
            assert here.run_due() == 1
        assert (result.get(timeout=5), tries) == (3, [0, 1, 2])
        chained = chain(add.s(1, 1), add.s(10)).apply_async()
        assert here.run_due() == 2
        assert chained.get(timeout=5) == 12
        gone = add.apply_async((1, 1), expires=60)
        hadelay.clock.advance("61s")
        assert here.run_due() == 0
        assert gone.state == "PENDING"
    assert abs((app.now() - datetime.now(UTC)).total_seconds()) < 60, "the app has its own time again"
    app.close()
    celery._state._set_current_app(None)


def test_dramatiq(hadelay: LocalNode) -> None:
    broker, tries = DramatiqBroker(f"http://{NOWHERE}", prefix="due."), list[int]()

    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=60_000, max_backoff=120_000)
    def flaky(number: int) -> None:
        tries.append(number)
        raise ConnectionError("gone")

    with dramatiq_worker(broker, hadelay) as here:
        flaky.send_with_options(args=(1,), delay=5_000)
        assert here.run_due() == 0
        with pytest.raises(QueueJoinTimeout, match="the queue default has 1 messages after 50 ms"):
            broker.join("default", interval=10, timeout=50)
        hadelay.clock.advance("5s")
        assert here.run_due() == 1
        hadelay.clock.advance("2m")
        assert here.run_due() == 1
        assert tries == [1, 1]
        broker.join("default", timeout=5_000)
        broker.join("no-such-queue", timeout=1)
    broker.close()


async def test_taskiq(hadelay: LocalNode) -> None:
    broker = HadelayBroker(f"http://{NOWHERE}")
    broker = broker.with_result_backend(HadelayResultBackend(broker))

    @broker.task
    async def double(number: int) -> int:
        if number > 1:
            await double.kiq(number - 1)
        return number * 2

    async with taskiq_worker(broker, hadelay) as here:
        call = await double.kicker().with_labels(delay=60).kiq(3)
        assert await here.run_due() == 0
        hadelay.clock.advance("1m")
        assert await here.run_due() == 3
        assert (await call.get_result()).return_value == 6
    await broker.shutdown()
