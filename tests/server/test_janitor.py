"""Hours that are over go; where an archive is demanded, not before they are in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hadelay.config import DAY, RetentionConfig
from hadelay.core.commands import encode_retire
from hadelay.model import HOUR_MS, hour_name
from hadelay.server.janitor import Janitor, archived

FIRST, SECOND = 500_000, 500_001


class Topics(dict[int, Any]):
    chores: frozenset[int] = frozenset()

    def to_sweep(self) -> bool:
        return False


def manifest(directory: Path, hour: int, text: str) -> None:
    (directory / "_manifest").mkdir(exist_ok=True)
    (directory / "_manifest" / f"{hour_name(hour)}.json").write_text(text)


def test_an_hour_goes_when_its_manifest_has_all_of_it(tmp_path: Path) -> None:
    jobs: list[tuple[Callable[[], Any], Callable[[Any, Any], None]]] = []
    state: Any = SimpleNamespace(
        store=SimpleNamespace(hours=lambda: [FIRST, SECOND], count=lambda _: 5),
        open_entries=lambda _: 0, hours={}, topics=Topics(),
    )  # fmt: skip
    runtime: Any = SimpleNamespace(
        monotonic=lambda: 0.0, in_thread=lambda _, fn, done: jobs.append((fn, done)),
        call_later=lambda *_: SimpleNamespace(cancel=lambda: None),
    )  # fmt: skip
    proposed: list[bytes] = []
    now = (SECOND + 1) * HOUR_MS + DAY

    def look(janitor: Janitor) -> None:
        janitor._look()
        while jobs:
            fn, done = jobs.pop(0)
            done(fn(), None)

    for hour, text in ((FIRST, "{"), (FIRST, json.dumps({"source": {"entries": 4}}))):
        manifest(tmp_path, hour, text)
        janitor = Janitor(
            state, runtime, lambda: now, lambda c, _: proposed.append(c), RetentionConfig(archive=str(tmp_path))
        )
        look(janitor)
        look(janitor)
        assert proposed == []
    manifest(tmp_path, SECOND, json.dumps({"source": {"entries": 5}}))
    look(janitor)
    look(janitor)
    assert proposed == [encode_retire(SECOND)]
    assert archived(str(tmp_path / "none"), [(FIRST, 5)]) == []
    janitor = Janitor(state, runtime, lambda: now, lambda c, _: proposed.append(c), RetentionConfig())
    look(janitor)
    assert proposed[1:] == [encode_retire(FIRST)]
