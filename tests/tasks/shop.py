"""The app that the workers of test_work.py run. Functions write lines into the file that OUT names."""

import asyncio
import os
import time
from collections.abc import Iterator

import msgspec

from hadelay.tasks import App, Dead, Snooze, current

app = App()


def say(*words: object) -> None:
    file = os.open(os.environ["OUT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (" ".join(map(str, words)) + "\n").encode())
    os.close(file)


@app.task
async def hello(number: int, due: float) -> None:
    say("hello", number, time.time() - due)


@app.task
def blocking(number: int) -> None:
    say("blocking", number, current().number, current().task)


@app.task(cpu=True)
def crunch(number: int) -> None:
    say("crunch", number, os.getpid(), current().number)


class Sum(msgspec.Struct):
    total: int


@app.task(result=True)
async def add(a: int, b: int) -> Sum:
    return Sum(a + b)


@app.task(cpu=True, result=True)
def square(a: int) -> int:
    return a * a


@app.task(result=True, max_attempts=1)
def too_large() -> str:
    return "x" * 65_536


@app.task(cpu=True, max_attempts=1)
def dies() -> None:
    os._exit(9)


@app.task(timeout="100ms", max_attempts=2, retry={TimeoutError: "50ms"})
async def slow() -> None:
    say("slow", current().number)
    await asyncio.sleep(60)


@app.task(retry={OSError: "1h", ConnectionError: ["100ms", "200ms"]}, max_attempts=3)
def flaky() -> None:
    say("flaky", time.time())
    raise ConnectionResetError("gone")


@app.task
async def hopeless() -> None:
    raise Dead("bad input")


@app.task(max_attempts=2, retry={KeyError: [0, "1h"]})
async def snoozes() -> None:
    """Its snoozes do not count: the two failures are hand-outs 3 and 4, and attempts 1 and 2 of those that count."""
    number = current().number
    say("snoozes", number, time.time())
    if number <= 2:
        raise Snooze("300ms")
    assert current().counted == number - 2
    raise KeyError(number)


@app.task
async def long(seconds: float) -> None:
    say("begins", os.getpid())
    await asyncio.sleep(seconds)
    say("ends", os.getpid())


@app.task
def long_in_thread() -> None:
    say("begins", os.getpid())
    while not current().cancelled:
        time.sleep(0.01)
    say("cancelled")


def read() -> Iterator[None]:
    """Pages that say their number; the seventh ends when a file says that its progress was seen."""
    for page in range(1, 8):
        current().progress(f"page {page} of 20 " + "é" * 100)
    while not os.path.exists(os.environ["OUT"] + ".seen"):
        yield
    say("read", current().task)


@app.task
async def read_async() -> None:
    for _ in read():
        await asyncio.sleep(0.01)


@app.task
def read_in_thread() -> None:
    for _ in read():
        time.sleep(0.01)


@app.task(cpu=True)
def read_in_process() -> None:
    for _ in read():
        time.sleep(0.01)


@app.periodic("* * * * * *", tz="Europe/Vienna", topic="ticks")
async def tick() -> None:
    say("tick", time.time())
