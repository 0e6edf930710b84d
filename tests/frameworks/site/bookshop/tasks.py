import asyncio
import time

from django.db import connection

from hadelay.django.compat import task
from hadelay.tasks import Dead, Snooze, current
from tests.frameworks.say import say


@task
def hello(number, due):
    say("hello", number, time.time() - due)


@task
def add(a, b):
    return a + b


@task(queue_name="mail and more", priority=7)
async def mail(to):
    await asyncio.sleep(0.01)
    return {"sent": to}


@task
def say_it(word):
    say("said", word)


@task(takes_context=True)
def flaky(context, times):
    say("flaky", context.attempt, time.time())
    if context.attempt <= times:
        raise ConnectionResetError("gone")
    return context.attempt


@task(backend="once")
def broken():
    raise ValueError("no such customer")


@task
def hopeless():
    raise Dead("no such order")


@task
def snoozes():
    if current().number == 1:
        raise Snooze("0.2s")
    return current().number


@task
def large():
    return "x" * 100_000


@task
def query():
    """Whether the thread's connection was closed before the task."""
    fresh = connection.connection is None
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return fresh
