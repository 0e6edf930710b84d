"""The hours whose messages are loaded next are read from mapped files, also when no entry has moved the clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from hadelay.model import HOUR_MS
from hadelay.platform.disk import Disk
from hadelay.storage.hours import DiskHourStore
from tests.handout.desk import START_HOUR, Desk


@pytest.mark.parametrize("night", ["one leader", "a leader that takes over"])
def test_a_burst_after_an_idle_night_is_read_from_mapped_files(tmp_path: Path, night: str) -> None:
    store = DiskHourStore(Disk(), str(tmp_path), 0)
    desk = Desk(store=store, checking=False)
    store.set_clock(START_HOUR)
    desk.lead()
    burst = desk.publish_many(2_000, at=9 * HOUR_MS + 1_000, spread_ms=900)
    desk.run_to(60_000)
    assert not store.mapped(START_HOUR + 9)
    unmapped: list[int] = []
    follow = store.entries

    def entries(hour: int, *args: object, **how: object) -> object:
        if not store.mapped(hour):
            unmapped.append(hour)
        return follow(hour, *args, **how)  # type: ignore[arg-type]

    store.entries = entries  # type: ignore[method-assign,assignment]
    if night == "one leader":
        desk.run_to(9 * HOUR_MS + 500)
    else:
        desk.depose()
        desk.run_to(9 * HOUR_MS + 500)
        desk.new_leader()
        desk.run(1)
    assert desk.ledger.now_hour == START_HOUR, "no entry moved the clock"
    assert store.mapped(START_HOUR + 9)
    desk.consume()
    desk.run_to(9 * HOUR_MS + 3_000)
    assert sorted(desk.delivered()) == sorted(map(desk.name_of, burst))
    assert not unmapped
    store.close()
