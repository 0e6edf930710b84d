"""Scenario files: lines that a player plays, `----`, and what it says. `pytest --rewrite` accepts what is said now."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest


class Player(Protocol):
    def play(self, line: str) -> list[str]: ...


def check(path: Path, player: Player, request: pytest.FixtureRequest) -> None:
    same(path, replay(path.read_text(), player), request)


def same(path: Path, now: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite", default=False):
        path.write_text(now)
    else:
        assert now == path.read_text()


def replay(text: str, player: Player) -> str:
    """The scenario with every answer as it is now."""
    out = []
    for block in text.strip().split("\n\n"):
        asked = block.split("\n----")[0].split("\n")
        said = [s for line in asked if line and not line.startswith("#") for s in player.play(line)]
        commands_only = all(line.startswith("#") for line in asked)
        out.append("\n".join(asked) if commands_only else "\n".join([*asked, "----", *said]))
    return "\n\n".join(out) + "\n"
