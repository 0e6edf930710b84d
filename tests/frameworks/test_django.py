"""Django's tasks on three nodes, with `manage.py hadelay_worker`."""

from __future__ import annotations

import asyncio
import importlib
import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hadelay import Client
from tests.frameworks.support import HERE, PATH, Running, survives, write_page
from tests.system.cluster import Cluster, until

django = pytest.importorskip("django")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
SITE = HERE / "site"
APPS = ["django_tasks"] if django.VERSION < (6, 0) else []


@pytest.fixture(scope="module")
def shop(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The tasks of the project, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SITE)
        patch.setenv("DJANGO_SETTINGS_MODULE", "bookshop.settings")
        patch.setenv("HADELAY_SERVERS", ",".join(cluster.urls.values()))
        patch.setenv("OUT", str(tmp_path_factory.mktemp("site") / "out"))
        django.setup()
        tasks = importlib.import_module("bookshop.tasks")
        yield tasks
        for backend in backends().all():
            backend.client.close()


def backends() -> Any:
    return importlib.import_module("hadelay.django.compat").task_backends


def work(running: Running, *words: object) -> subprocess.Popen[bytes]:
    return running.start(["manage.py", "hadelay_worker", *words], cwd=SITE)


def ended(result: Any) -> Any:
    """The result, when its task is finished."""

    def finished() -> bool:
        result.refresh()
        return bool(result.is_finished)

    until(finished, f"{result.task.name} ends")
    return result


async def test_results(shop: Any, running: Running) -> None:
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    later = shop.add.using(run_after=due).enqueue(40, 2)
    first = shop.add.enqueue(1, b=2)
    mail = await shop.mail.aenqueue("ada")
    assert (first.status, first.attempts, later.task.run_after) == ("READY", 0, due)
    flaky, snoozes = shop.flaky.enqueue(2), shop.snoozes.enqueue()
    failing = [shop.broken.enqueue(), shop.hopeless.enqueue(), shop.large.enqueue(), shop.flaky.enqueue(9)]
    for priority, word in ((-1, "low"), (0, "normal"), (100, "high")):
        for number in range(2):
            shop.say_it.using(backend="once", priority=priority).enqueue(f"{word}{number}")
    work(running)
    once = work(running, "--backend", "once", "--concurrency", "1")
    assert await asyncio.to_thread(lambda: ended(first).return_value) == 3
    assert first.started_at >= first.enqueued_at
    assert first.finished_at >= first.started_at
    assert await asyncio.to_thread(lambda: ended(flaky).return_value) == 3
    assert [error.exception_class for error in flaky.errors] == [ConnectionResetError] * 2
    assert flaky.attempts == 3
    assert await asyncio.to_thread(lambda: ended(snoozes).return_value) == 2
    assert (snoozes.attempts, snoozes.errors) == (1, [])
    for result in failing:
        await asyncio.to_thread(ended, result)
        assert result.status == "FAILED"
    broken, hopeless, large, given_up = failing
    assert [(error.exception_class, error.traceback) for error in broken.errors] == [
        (ValueError, "builtins.ValueError: no such customer")
    ]
    assert hopeless.errors[0].exception_class_path == "hadelay.tasks.outcomes.Dead"
    assert "the result has 100002 bytes of JSON" in large.errors[-1].traceback
    assert given_up.attempts == 3
    await mail.arefresh()
    assert mail.return_value == {"sent": "ada"}
    found = await shop.mail.aget_result(mail.id)
    assert (found.args, found.task.queue_name, found.task.priority) == (["ada"], "mail and more", 7)
    await asyncio.to_thread(ended, later)
    assert later.started_at >= due
    assert later.return_value == 42
    # Connections that a task left are closed; both tasks ran in the one thread of this worker.
    queries = [shop.query.using(backend="once").enqueue() for _ in range(2)]
    assert [await asyncio.to_thread(lambda q=q: ended(q).return_value) for q in queries] == [True, True]
    assert [word for (word,) in running.lines("said")] == ["high0", "high1", "normal0", "normal1", "low0", "low1"]
    once.terminate()
    assert once.wait(20) == 0
    log = running.log.read_text()
    assert "ValueError: no such customer" in log


def test_unknown_results(shop: Any) -> None:
    exceptions = importlib.import_module("hadelay.django.compat")
    for unknown in ("nonsense", "0190d2b4e0c0000000000000"):
        with pytest.raises(exceptions.TaskResultDoesNotExist):
            shop.add.get_result(unknown)
    other = backends()["default"].client.put("django.default", b"not a task", delay="1h").id
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        shop.add.get_result(other)
    backends()["default"].client.cancel(other)


def test_transactions(shop: Any) -> None:
    """What docs/howto/django.md says: enqueue does not wait for the transaction, on_commit does."""
    from django.db import transaction

    client = backends()["default"].client
    soon = datetime.now(UTC) + timedelta(hours=1)
    task, results = shop.say_it.using(run_after=soon), []

    def order(fails: bool) -> None:
        with transaction.atomic():
            results.append(task.enqueue("at once"))
            transaction.on_commit(lambda: results.append(task.enqueue("on commit")))
            if fails:
                raise KeyError

    with pytest.raises(KeyError):
        order(fails=True)
    order(fails=False)
    assert [result.args for result in results] == [["at once"], ["at once"], ["on commit"]]
    # The first one would run, although its transaction was rolled back.
    assert [shop.say_it.get_result(result.id).status for result in results] == ["READY"] * 3
    for result in results:
        client.cancel(result.id)
    assert shop.say_it.get_result(results[0].id).errors[0].traceback == "the message is cancelled"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, None),
        ({"url": "x"}, "unknown field `url`"),
        ({"max_attempts": 0}, "`$.max_attempts`"),
        ({"retry": {"builtins.NoError": "1s"}, "max_attempts": 2}, 'does not define a "NoError"'),
        ({"retry": {ValueError: "1 parsec"}, "max_attempts": 2}, "1 parsec"),
        ({"retry": {ValueError: "1s"}}, "'retry' in OPTIONS has no effect"),
        ({"urls": "ftp://here"}, "ftp://here"),
        ({"prefix": "a/b"}, "`$.prefix`"),
    ],
)
def test_checks(shop: Any, options: dict[str, Any], said: str | None) -> None:
    backend = importlib.import_module("hadelay.django").HadelayBackend("default", {"OPTIONS": options})
    found = list(backend.check())
    assert len(found) == (said is not None)
    assert not said or said in str(found[0])


def test_the_command(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.core.management import CommandError, call_command

    command = importlib.import_module("hadelay.django.management.commands.hadelay_worker")
    given: dict[str, Any] = {}
    monkeypatch.setattr(command, "supervise", lambda app, **options: given.update(options, app=app) and 0)
    monkeypatch.setattr("os.environ", dict(command.os.environ))
    call_command("hadelay_worker", "--queue", "default", "--concurrency", "3")
    assert (given["app"], given["concurrency"], given["reload"]) == ("hadelay.django.worker:default", 3, False)
    assert given["topics"] == ["django-high.default", "django.default", "django-low.default"]
    with importlib.import_module("django.test").override_settings(DEBUG=True):
        call_command("hadelay_worker")
    assert given["reload"]
    assert len(set(given["topics"])) == 6
    override = importlib.import_module("django.test").override_settings
    with override(INSTALLED_APPS=[]):
        assert [found.id for found in backends()["default"].check()] == ["hadelay.W001"]
    tasks = {"default": {"BACKEND": "hadelay.django.HadelayBackend", "QUEUES": [], "OPTIONS": {}}}
    with override(TASKS=tasks):
        with pytest.raises(CommandError, match="name some with --queue"):
            call_command("hadelay_worker")
        call_command("hadelay_worker", "--queue", "any")
        assert given["topics"] == ["django-high.any", "django.any", "django-low.any"]
    tasks["default"]["OPTIONS"] = {"url": "x"}
    with override(TASKS=tasks), pytest.raises(CommandError, match="unknown field `url`"):
        call_command("hadelay_worker")
    for words in (["--backend", "none"], ["--queue", "other"]):
        with pytest.raises(CommandError, match=words[1]):
            call_command("hadelay_worker", *words)


def test_the_page(running: Running, tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text(
        f"SECRET_KEY = 'x'\nUSE_TZ = True\nINSTALLED_APPS = {APPS}\n"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}}\n"
    )
    write_page("django.md", tmp_path, running.cluster)
    (tmp_path / "shop" / "errors.py").write_text("class Busy(Exception): ...\n")
    (tmp_path / "buy.py").write_text(
        "from shop.orders import place\nfrom shop.tasks import remind\nfrom shop.waiting import wait\n"
        "place(1)\nresult = remind.enqueue(4711)\nimport time\n"
        "while not result.is_finished: time.sleep(0.05); result.refresh()\nwait(result.id)\n"
    )
    if django.VERSION < (6, 0):
        tasks = tmp_path / "shop" / "tasks.py"
        tasks.write_text(tasks.read_text().replace("from django.tasks", "from django_tasks"))
    variables = {"DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": f"{PATH}:{tmp_path}"}
    running.start(["-m", "django", "hadelay_worker"], cwd=tmp_path, **variables)
    bought = running.start(["-m", "django", "shell", "-c", "import buy"], cwd=tmp_path, **variables)
    assert bought.wait(60) == 0
    # Both tasks print at the same time, in two threads.
    until(lambda: running.log.read_text().count("remind the customer of order") == 2, "both reminders")
    log = running.log.read_text()
    assert re.search(r"^SUCCESSFUL .* 1$", log, re.M)
    assert re.search(r"^4711$", log, re.M)
    running.start(["-m", "hadelay", "work", "timetable:app"], cwd=tmp_path, **variables)
    with Client(running.servers) as client:
        until(lambda: list(client.schedules("task.timetable.")), "the worker stores the schedule")
        client.trigger("task.timetable.every_morning")
        until(lambda: running.log.read_text().count("remind the customer of order 4711") == 2, "the schedule calls")
        client.delete_schedule("task.timetable.every_morning")


def test_none_lost_none_early_none_twice_but_in_killed_hands(shop: Any, running: Running) -> None:
    def publish(number: int, due: float) -> None:
        shop.hello.using(run_after=datetime.fromtimestamp(due, UTC)).enqueue(number, due)

    survives(running, partial(work, running, "--concurrency", "5", "--lease", "4s"), publish, hands=5)
