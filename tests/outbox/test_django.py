"""The outbox with Django: its migration, its functions, and the relay of manage.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hadelay.testing import LocalNode
from tests.outbox.conftest import empty
from tests.system.cluster import environment

pytest.importorskip("django")

#: Names of the modules of the settings and of the tasks.
MODULE, TASKS_MODULE = "shopsettings", "shoptasks"
SETTINGS = """
import os
SECRET_KEY = "for tests"
USE_TZ = True
INSTALLED_APPS = ["hadelay.django.outbox", "hadelay.django"]
TASKS = {"default": {"BACKEND": "hadelay.django.HadelayBackend", "QUEUES": [], "OPTIONS": {"outbox": True}}}
CELERY = {"broker_url": "hadelay://127.0.0.1:9/shop", "broker_transport_options": {
    "outbox": "hadelay.django.outbox:write", "timeout": 1}}
DATABASES = {"default": %s}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""
TASKS = """
from hadelay.django.compat import task

@task()
def add(a, b):
    return a + b
"""
PROGRAM = """
import django
from datetime import timedelta
django.setup()
from hadelay import Put
from django.core.management import call_command
from django.db import transaction
from hadelay.django import outbox

call_command("migrate", verbosity=0)
call_command("makemigrations", check=True, dry_run=True, verbosity=0)
with transaction.atomic():
    outbox.publish("django", {"order": 1}, delay=timedelta(minutes=15), key="one")
    outbox.publish(Put(topic="django", body=b"\\x00two", delay="15m", key="two"))
try:
    with transaction.atomic():
        outbox.publish("django", "never", key="never")
        raise KeyError
except KeyError:
    pass
with transaction.atomic():
    outbox.cancel("django", "two")
    outbox.reschedule("django", "one", delay="3h")
call_command("hadelay_outbox", once=True)
assert not outbox.models.OutboxRow.objects.exists()

# Tasks of Django, and of Celery while no node answers.
from django.conf import settings
import hadelay.celery
from celery import Celery
from shoptasks import add as call

app = Celery("shop", set_as_current=False)
app.conf.update(settings.CELERY)

@app.task(name="later")
def later(): ...

try:
    with transaction.atomic():
        call.enqueue(1, b=2)
        later.apply_async(task_id="lost")
        raise KeyError
except KeyError:
    pass
with transaction.atomic():
    result = call.enqueue(1, b=2)
    later.apply_async(task_id="celery-1", countdown=3600)
call_command("hadelay_outbox", once=True)
found = call.get_result(result.id)
assert (found.id, found.status, found.args, found.kwargs) == (result.id, "READY", [1], {"b": 2}), found
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_transactions(kind: str, request: pytest.FixtureRequest, tmp_path: Path, node: LocalNode) -> None:
    url = empty(kind, request, tmp_path)
    if kind == "sqlite":
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": url.removeprefix("sqlite:///")}
    else:
        host, _, name = url.removeprefix("postgresql://shop@").partition("/")
        database = {
            "ENGINE": "django.db.backends.postgresql", "NAME": name, "USER": "shop",
            "HOST": host.partition(":")[0], "PORT": host.partition(":")[2],
        }  # fmt: skip
    (tmp_path / f"{MODULE}.py").write_text(SETTINGS % repr(database))
    (tmp_path / f"{TASKS_MODULE}.py").write_text(TASKS)
    variables = environment()
    variables["PYTHONPATH"] += os.pathsep + str(tmp_path)
    variables |= {"DJANGO_SETTINGS_MODULE": MODULE, "HADELAY_SERVERS": node.url}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    assert ran.stdout == "4 relayed, 0 to try again, 0 refused\n2 relayed, 0 to try again, 0 refused\n"
    assert [message.key for message in node.client.messages("shop.celery")] == ["celery-1"]
    node.client.cancel(topic="shop.celery", key="celery-1")
    found = {key: node.client.get(topic="django", key=key) for key in ("one", "two")}
    assert {key: message.state for key, message in found.items()} == {"one": "scheduled", "two": "cancelled"}
    assert (found["one"].deliver_at - found["one"].published_at).total_seconds() > 10_000
    node.client.cancel(topic="django", key="one")
