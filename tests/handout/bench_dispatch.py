"""What handing out costs per message, on the real files: python -m tests.handout.bench_dispatch [messages]

Not a test. One thread does everything a leader's core does: walking, sorting, matching, encoding, applying, and
putting deliveries together; no network, no journal, no HTTP.
"""

from __future__ import annotations

import sys
import tempfile
import time

from hadelay.codec.commandtypes import Command
from hadelay.handout import scans
from hadelay.ledger.apply import apply_entry
from hadelay.platform.disk import Disk
from hadelay.storage.hours import DiskHourStore
from tests.handout import desk as desk_module
from tests.handout.desk import START_HOUR, START_MS, Desk

_spent: dict[str, float] = {}


def timed(label: str, fn):  # type: ignore[no-untyped-def]
    def wrapper(*args, **kwargs):  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        try:
            return fn(*args, **kwargs)
        finally:
            _spent[label] = _spent.get(label, 0.0) + time.perf_counter() - start

    return wrapper


def new_desk(directory: str, **how: object) -> Desk:
    desk = Desk(store=DiskHourStore(Disk(), directory, 0), checking=False, commit_ms=1, **how)  # type: ignore[arg-type]
    desk.store.set_clock(START_HOUR)
    desk.lead()
    return desk


def report(label: str, count: int, seconds: float) -> None:
    print(f"{label:58s} {seconds * 1e6 / count:7.2f} µs/message  {count / seconds:10,.0f}/s")


def one_second(count: int, size: int) -> None:
    """`count` messages due in one second, `size` at a time to waiting consumers."""
    with tempfile.TemporaryDirectory() as directory:
        desk = new_desk(directory)
        desk.publish_many(count, at=30_000, spread_ms=1_000)
        desk_module.apply_entry = timed("apply", apply_entry)
        _spent.clear()
        start = time.perf_counter()
        desk.run_to(29_900)
        loaded = time.perf_counter()
        for _ in range(8):
            desk.consume(max=size, ack=False)
        desk.until(lambda: desk.delivery.handed_out >= count)
        end = time.perf_counter()
        report(f"{count:,} in one second: preload", count, loaded - start)
        report(f"  handed out {size} at a time, without apply", count, end - loaded - _spent["apply"])
        report("  apply of the grants", count, _spent["apply"])
        late = max(r.at for r in desk.received) - 31_000
        grants = desk.kinds().count(Command.GRANT)
        print(f"  grants {grants:,}, the last one {late:.0f} ms after the end of the second (simulated)")


def steady(rate: int, seconds: int) -> None:
    """`rate` per second, one by one, to consumers that ask for up to 100."""
    with tempfile.TemporaryDirectory() as directory:
        desk = new_desk(directory)
        desk.publish_many(rate * seconds, at=12_000, spread_ms=seconds * 1000)
        for _ in range(8):
            desk.consume(ack=False)
        desk_module.apply_entry = timed("apply", apply_entry)
        _spent.clear()
        start = time.perf_counter()
        desk.run_to(12_000 + seconds * 1000 + 100)
        spent = time.perf_counter() - start
        count = desk.delivery.handed_out
        report(f"{rate:,}/s one by one: dispatch", count, spent - _spent["apply"])
        report("  apply", count, _spent["apply"])
        counts = desk.delivery.lateness.counts
        print(f"  lateness in ms (simulated 1 ms commit): {counts}, grants {desk.kinds().count(Command.GRANT):,}")


def filed_near(count: int) -> None:
    """Publishes that fall due within the loaded seconds: the price in apply."""
    with tempfile.TemporaryDirectory() as directory:
        desk = new_desk(directory)
        desk.publish("first")
        desk.run(1)
        core = desk.ledger.listener
        core.on_filed = timed("on_filed", core.on_filed)  # type: ignore[method-assign]
        _spent.clear()
        for batch in range(count // 1000):
            desk.publish_many(1_000, at=2_000 + batch, spread_ms=5_000)
        report("on_filed, due within 5 s, 1,000 at a time", count, _spent["on_filed"])
        _spent.clear()
        for n in range(2_000):
            desk.publish_many(10, at=2_000 + n, spread_ms=3_000)
        report("on_filed, due within 3 s, 10 at a time", 20_000, _spent["on_filed"])


def blocked(count: int, others: int, *, taken_over: bool) -> None:
    """A message group with `count` due messages, of which one may be handed out, in front of `others` in the same
    second."""
    with tempfile.TemporaryDirectory() as directory:
        desk = new_desk(directory)
        desk.put(group_concurrency=1, max_attempts=100)
        desk.publish_many(count, at=30_000, spread_ms=500, group=7)
        desk.publish_many(others, at=30_500, spread_ms=400)
        if taken_over:
            desk.depose()
            desk.run_to(32_000)
            desk.new_leader()
        start = time.perf_counter()
        desk.run_to(29_900)
        loaded = time.perf_counter()
        for _ in range(8):
            desk.consume(max=100, ack=False)
        desk.until(lambda: desk.delivery.handed_out >= others + 1)
        label = f"{others:,} behind {count:,} blocked" + (", after a take-over" if taken_over else "")
        report(f"{label}: preload", count + others, loaded - start)
        report(f"{label}: handed out", others, time.perf_counter() - loaded)
        assert desk.delivery.ready_counts() == {}


def take_over(count: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        desk = new_desk(directory)
        desk.publish_many(count, topic="nobody", at=1_000, spread_ms=60_000)
        desk.run_to(62_000)
        desk.depose()
        start = time.perf_counter()
        desk.new_leader()
        desk.poll()
        desk.publish("now")
        turns = 0
        while not desk.delivery.handed_out:
            desk.delivery._turn()
            desk.unstick()
            turns += 1
        spent = time.perf_counter() - start
        print(f"take-over with {count:,} overdue: next hand-out after {spent * 1e3:.0f} ms of work, {turns} turns")
        core = desk.core
        start = time.perf_counter()
        while core.busy:
            core.work()
        report("  looking through the rest of the past", count, time.perf_counter() - start)
        start = time.perf_counter()
        slices = 0
        desk.run(2_000)
        core.advance(START_MS + int(desk.now))
        while not core.scans.sweep():
            slices += 1
        report(f"  one round of the sweeper ({slices} slices)", count, time.perf_counter() - start)
        assert desk.delivery.sweeper_found == 0
        start = time.perf_counter()
        for _ in range(8):
            desk.consume("nobody", ack=False, max=1000)
        desk.until(lambda: desk.delivery.handed_out >= count)
        report("  draining it, windows refilled from the index", count, time.perf_counter() - start)


if __name__ == "__main__":
    messages = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(f"slice {scans.SLICE}")
    one_second(messages, 100)
    one_second(messages, 1_000)
    steady(2_000, 10)
    filed_near(100_000)
    blocked(1_000_000, 100_000, taken_over=False)
    blocked(1_000_000, 100_000, taken_over=True)
    take_over(1_000_000)
