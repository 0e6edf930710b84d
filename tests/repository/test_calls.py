"""One publish, one delivery and one ack pass through few files and few calls of ours: who reads the way of a message
must read them all, and each costs time.

A real node of one member runs on a clock that stands still, so that no heartbeat, tick or patrol runs beside.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import pytest

import hadelay
from hadelay.platform.runtime import Ended
from hadelay.testing import node as testing
from hadelay.testing.clock import ShiftedLoop, ShiftedRuntime

T = TypeVar("T")
#: Delay of each message, and the last part of the delay, in which the message is delivered, in seconds.
DELAY_S, LAST_S = 3_600.0, 1.0
#: Time, in seconds, by which the message before it is due earlier: nothing of it is left to do in the last part.
EARLIER_S = 20.0
#: Time, in seconds, in which the cursor of the message before it is committed; its interval is 50 ms.
CURSOR_S = 0.5
#: Time, in seconds, for which the clock moves beyond the due time: clocks of a node round to milliseconds.
MARGIN_S = 0.01
#: Number of messages that are measured, after one that fills caches and opens connections.
COUNT = 5
#: Roots of calls that have no part in a message, by their beginnings: timers that fire in the last part of the delay,
#: and what they began, such as a checkpoint.
TIMERS = (
    "Elections._fire", "RaftNode._housekeeping", "RaftNode.call_later", "Replication._beat", "http/metrics.py:",
    "http/stalls.py:", "server/attention.py:", "server/patrol.py:", "server/peers.py:",
    "storage/store.py:Storage._write_frozen", "storage/store.py:Storage.checkpoint",
    "raft/journalsync.py:JournalSync._leave_mark",
)  # fmt: skip
SOURCE = f"{Path(hadelay.__file__).parent}/"


class Limits(NamedTuple):
    files: int
    calls: int


#: Limits of one publish, of one delivery from the due time to the end of the answer, and of one ack: present figures
#: and some calls more. Lower a limit when the way becomes shorter.
LIMITS = {"publish": Limits(66, 264), "delivery": Limits(76, 512), "ack": Limits(56, 228)}


class StillLoop(ShiftedLoop):
    """An event loop whose time stands still from the first `move` on."""

    now_s: float | None = None
    #: Unix time at which the loop's time would be 0, in ms.
    origin_ms = 0

    def time(self) -> float:
        return super().time() if self.now_s is None else self.now_s

    def move(self, seconds: float) -> None:
        if self.now_s is None:
            self.origin_ms = time.time_ns() // 1_000_000 - round(self.time() * 1000)
        self.now_s = self.time() + seconds


class Calls:
    """A profile function that counts calls of functions of hadelay: root → file and name → count. A root is a function
    that the event loop calls."""

    def __init__(self) -> None:
        self.by: dict[str, Counter[tuple[str, str]]] = {}
        self._depth = 0
        self._root = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(SOURCE):
            return
        if event == "return":
            self._depth = max(self._depth - 1, 0)
            return
        file, name = path.removeprefix(SOURCE), frame.f_code.co_qualname
        if not self._depth:
            # An event of Raft is named by the step that handles it.
            self._root = getattr(frame.f_locals.get("step"), "__qualname__", f"{file}:{name}")
        self._depth += 1
        self.by.setdefault(self._root, Counter())[file, name] += 1

    def total(self) -> Counter[tuple[str, str]]:
        return sum(
            (found for root, found in self.by.items() if not root.startswith(TIMERS)), Counter[tuple[str, str]]()
        )

    def figures(self) -> Limits:
        total = self.total()
        return Limits(len({file for file, _ in total}), total.total())


class OneThread(ShiftedRuntime):
    """A runtime that runs jobs of threads on the event loop: the number of calls does not depend on who comes first."""

    def wall_ms(self) -> int:
        loop = self.loop
        assert isinstance(loop, StillLoop)
        return super().wall_ms() if loop.now_s is None else loop.origin_ms + round(loop.now_s * 1000)

    def in_thread(self, lane: str, fn: Callable[[], Any], done: Ended, *, brief: bool = False) -> None:
        def run() -> None:
            result, error = None, None
            try:
                result = fn()
            except Exception as raised:
                error = raised
            done(result, error)

        self.loop.call_soon(run)


class Way:
    """A node whose event loop is profiled during each step of a message."""

    def __init__(self, node: testing.LocalNode) -> None:
        loop = node._loop
        assert isinstance(loop, StillLoop)
        self.node, self.loop = node, loop
        self.found: dict[str, list[Calls]] = {"publish": [], "delivery": [], "ack": []}
        self.move(0.0)

    def on_loop(self, act: Callable[[], object] = bool) -> None:
        """Run `act` on the node's event loop, after all that is ready there; returns when it has run."""
        ran = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (act(), ran.set()))
        assert ran.wait(30)

    def move(self, seconds: float) -> None:
        """Move the time, which stands still afterwards, and run the timers that are due then."""
        self.on_loop(lambda: self.loop.move(seconds))
        self.settle()

    def settle(self) -> None:
        for _ in range(20):
            self.on_loop()

    def step(self, name: str, act: Callable[[], T]) -> T:
        self.settle()
        calls = Calls()
        self.on_loop(lambda: sys.setprofile(calls))
        result = act()
        self.settle()
        self.on_loop(lambda: sys.setprofile(None))
        self.found[name].append(calls)
        return result

    def one(self) -> None:
        """Publish, receive and ack one message. The consumer waits before the message is due. Another message, which is
        due somewhat earlier, opens the files of the hour and begins the epoch of Idempotency-Keys: a message in a
        thousand does that."""
        client = self.node.client
        client.put("others", b"x", delay=DELAY_S - EARLIER_S)
        self.step("publish", lambda: client.put("orders", b"x", delay=DELAY_S))
        self.move(DELAY_S - LAST_S - CURSOR_S)
        self.move(CURSOR_S)
        with ThreadPoolExecutor(1) as consumer:
            received = consumer.submit(lambda: client.receive("orders", wait=2 * LAST_S))
            while not self.node._node.delivery.waiting_polls():
                self.on_loop()
            (message,) = self.step("delivery", lambda: (self.move(LAST_S + MARGIN_S), received.result(30))[1])
        self.step("ack", message.ack)

    def figures(self) -> dict[str, Limits]:
        """Medians of the figures of each step, without the first message: it fills caches and opens connections."""
        found = {name: [calls.figures() for calls in steps[1:]] for name, steps in self.found.items()}
        return {
            name: Limits(median_low(one.files for one in all_), median_low(one.calls for one in all_))
            for name, all_ in found.items()
        }


@pytest.fixture(scope="module")
def way() -> Iterator[Way]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "ShiftedLoop", StillLoop)
        patch.setattr(testing, "ShiftedRuntime", OneThread)
        with testing.LocalNode() as node:
            way = Way(node)
            for _ in range(1 + COUNT):
                way.one()
            yield way
            way.on_loop(lambda: setattr(way.loop, "now_s", None))


@pytest.mark.parametrize("step", ["publish", "delivery", "ack"])
def test_a_message_passes_few_files_and_calls(way: Way, step: str) -> None:
    found, limits, last = way.figures()[step], LIMITS[step], way.found[step][-1].total()
    files = sorted({file for file, _ in last})
    assert found.files <= limits.files, f"{step}: {found.files} files: {files}"
    assert found.calls <= limits.calls, f"{step}: {found.calls} calls: {last.most_common()}"


def test_calls_are_counted_below_their_root(way: Way) -> None:
    calls, node = Calls(), way.node._node
    way.on_loop(lambda: sys.setprofile(calls))
    way.on_loop(node.delivery.waiting_polls)
    way.on_loop(lambda: sys.setprofile(None))
    ((root, found),) = calls.by.items()
    assert root == "server/delivery/loop.py:DeliveryLoop.waiting_polls"
    assert found["server/delivery/loop.py", "DeliveryLoop.waiting_polls"] == 1
