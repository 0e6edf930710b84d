"""The blocking client when nobody closes it, when its process forks, and when the system has no thread for it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from hadelay.client import Client
from hadelay.errors import HadelayError


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_client_survives_a_fork(url: str) -> None:
    client = Client(url)
    client.put("a")
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if client.put("a").id else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.put("a")
    client.close()


@pytest.mark.parametrize(
    "script",
    [
        """
kept = Client(url)
threads = [threading.Thread(target=lambda: Client(url).put("a")) for _ in range(3)]
[thread.start() for thread in threads]
kept.put("a")
next(Client(url).messages("a"))
if child := os.fork():
    code = os.waitpid(child, 0)[1]
kept.put("a")
sys.exit(code if child else 0)
""",
        """
kept = Client(url)
kept.put("a")
left = kept.consume("a", wait="1s")
next(left)
""",
        """
kept = Client(url)
kept.put("a")
(message,) = itertools.islice(Client(url).consume("a", wait="1s"), 1)
message.ack()
""",
        """
async def unanswered(*args, **options):
    await asyncio.Event().wait()
AsyncClient.nack = unanswered
kept, begun, ending = Client(url), threading.Event(), threading.Event()
kept.put_many([Put(topic="a")] * 2)
def work():
    for message in kept.consume("a", wait="1s"):
        begun.set()
        ending.wait()
        break
threading.Thread(target=work, daemon=True).start()
begun.wait()
atexit.register(threading.Timer(0.2, ending.set).start)
""",
    ],
    ids=["threads and a fork", "a loop", "a message outlives its client", "a loop that gives back in vain"],
)
def test_an_unclosed_client_ends_silently(url: str, script: str) -> None:
    text = f"""
import asyncio, atexit, itertools, os, sys, threading
from hadelay import AsyncClient, Client
from hadelay.client import Put
url = {url!r}
{script}"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "script",
    [
        """
def work():
    threading.main_thread().join()
    client.put("a", "x")
    client.put("a", b"x" * (1 << 20))
    # A reconnect, long after: neither the connection nor the address is remembered.
    session = client._async()._transport._session
    asyncio.run_coroutine_threadsafe(session.connector.close(), loop()).result()
    client._async()._transport._session = None
    (message, *_) = client.receive("a", wait="5s")
    print(message.ack())
threading.Thread(target=work).start()
""",
        """
client.put("a", "x")
@atexit.register
def work():
    print(client.receive("a", wait="5s")[0].ack())
""",
        """
async def main():
    async with AsyncClient(url) as other:
        await other.put("a", "x")
        print(await (await other.receive("a", wait="5s"))[0].ack())
def work():
    threading.main_thread().join()
    asyncio.run(main())
threading.Thread(target=work).start()
""",
        """
def refuse(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")
client.put("a", "x")
@atexit.register
def work():
    threading.Thread.start = refuse
    print(Client(url).receive("a", wait="5s")[0].ack())
""",
    ],
    ids=["a thread", "at exit", "an event loop in a thread", "without a new thread"],
)
def test_host_names_are_found_when_the_main_thread_has_ended(url: str, script: str) -> None:
    text = f"""
import asyncio, atexit, threading
from hadelay import AsyncClient, Client
from hadelay.client.background import loop
url = {url!r}
client = Client(url, timeout=20)
{script}"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "acked\n", "")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".example", "..", "%zz"])
def test_a_name_that_nobody_knows_is_named(host: str) -> None:
    with Client(f"http://{host}:8400", timeout=1) as client, pytest.raises(HadelayError) as caught:
        client.put("a")
    assert host in str(caught.value)
    assert caught.value.outcome_known


def test_the_child_of_a_fork_leaves_a_message_to_its_parent(url: str) -> None:
    text = f"""
import os, sys
from hadelay import Client
client = Client({url!r})
client.put("a")
for message in client.consume("a", wait="1s"):
    with message:
        child = os.fork()
        if not child:
            try:
                message.ack()
            except RuntimeError:
                sys.exit(7)
    break
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
client.close()
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr
    with Client(url) as client:
        assert client.topic("a").leased == client.topic("a").ready == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # uvloop's loop that never ran
def test_a_thread_that_could_not_be_started_is_tried_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadelay.client.background._background", None)
    with monkeypatch.context() as patched, Client(url) as client:
        patched.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="new thread"):
            client.put("a")
        patched.undo()
        assert client.put("a").topic == "a"
    gc.collect()


def test_the_end_of_the_event_loop_gives_back_what_nobody_took(url: str) -> None:
    """Without a close: the loop cancels every task, and waits for no task that begins later."""
    text = f"""
import asyncio
from hadelay import AsyncClient
from hadelay.client import Put
async def main():
    client = AsyncClient({url!r})
    await client.put_many([Put(topic="a")] * 5)
    consumer = client.consume("a", concurrency=5, wait=20)
    await anext(consumer)
    while len(consumer.unsettled) < 5:
        await asyncio.sleep(0.001)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    with Client(url) as client:
        assert client.topic("a").leased == 1
