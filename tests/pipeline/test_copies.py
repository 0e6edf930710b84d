"""Copies: what they tell of their time, and what is sound in them or not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from hadelay.cli.app import run as cli
from hadelay.codec import commands
from hadelay.codec.formats import DISPATCH
from hadelay.errors import BadRequest, DamagedFile
from hadelay.model import Event
from hadelay.pipeline import reconcile
from hadelay.pipeline.jobs import ReconcileOptions
from hadelay.pipeline.schema import Options
from hadelay.pipeline.session import error_of
from tests.ledger.test_subscriptions import subscribed
from tests.ledger.world import START_MS, World
from tests.pipeline.support import HOUR, MINUTE, message, options, write
from tests.pipeline.test_archive import event, lines, settled
from tests.pipeline.test_batches import NAME


def judged(world: World, directory: Path) -> int:
    return reconcile.run(None, ReconcileOptions(options(world, directory))).messages


def test_a_copy_for_a_subscription_that_moved_and_came_back_is_sound(tmp_path: Path) -> None:
    world = World()
    subscribed(world, "billing")
    (first,) = world.ids(message("orders", 10 * MINUTE))
    for due in (2 * HOUR, 20 * MINUTE):
        world.one(commands.encode_reschedule("n1", START_MS + due, False, [first + 1]))
    assert judged(world, write(world, tmp_path)) == 2


def test_the_time_is_that_of_the_checkpoint_and_a_bare_copy_needs_it_as_an_option(tmp_path: Path) -> None:
    world = settled(tmp_path)
    with pytest.raises(BadRequest, match=r"a copy without a checkpoint .* does not tell its time.*set --as-of"):
        reconcile.run(None, ReconcileOptions(Options(path=str(tmp_path))))
    write(world, tmp_path, checkpoint=True)
    assert reconcile.run(None, ReconcileOptions(Options(path=str(tmp_path)))).as_of_ms == START_MS + world.now


def test_rows_that_cannot_be_of_the_hour_are_named_in_a_bare_copy(tmp_path: Path) -> None:
    world = settled(tmp_path)
    lines(tmp_path / "hours" / f"{NAME}.dsp", event(0, event=2))
    with pytest.raises(DamagedFile, match=rf"{NAME}\.dsp, offset 0: .* acked: entry 0 was never leased"):
        judged(world, tmp_path)
    settled(tmp_path)
    for suffix in ("idx", "dsp", "log"):
        shutil.copy(tmp_path / "hours" / f"2026112019.{suffix}", tmp_path / "hours" / f"{NAME}.{suffix}")
    with pytest.raises(DamagedFile, match=rf"{NAME}\.idx, offset 0: .* and filed earlier"):
        judged(world, tmp_path)


def test_events_that_go_back_in_time_are_named_in_a_bare_copy(tmp_path: Path) -> None:
    """As an ack before its lease, of which each row verifies."""
    world = settled(tmp_path)
    path = tmp_path / "hours" / f"{NAME}.dsp"
    events = np.frombuffer(path.read_bytes(), DISPATCH)
    first = int(np.flatnonzero(events["event"] == Event.ACKED)[0])
    lines(path, event(first, at_ms=int(events["at_ms"][first]) - 1))
    said = rf"{NAME}\.dsp, offset {32 * first}: hour {NAME}, event {first}: its time is 2026-11-20T18:00:59\.999"
    with pytest.raises(DamagedFile, match=f"{said}, and the event before it is of 2026-11-20T18:01:00"):
        judged(world, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        ".DS_Store", f"{NAME}.idx.bak", f"{NAME} (copy).idx", f"{NAME}.idx~", f"{NAME}.IDX", NAME, f"x{NAME}.idx",
        f"dead-{NAME}-2.dsp", "2026113299.idx", "99999999999.log", "２０２６112018.idx", "2026112020.idx/", "x.log/",
    ],
)  # fmt: skip
@pytest.mark.parametrize("checkpoint", [False, True])
def test_foreign_names_in_a_copy_are_passed_over(tmp_path: Path, name: str, checkpoint: bool) -> None:
    world = settled(tmp_path)
    write(world, tmp_path, checkpoint=checkpoint)
    before = reconcile.run(None, ReconcileOptions(options(world, tmp_path)))
    path = tmp_path / "hours" / name
    path.mkdir() if name.endswith("/") else path.write_bytes(b"junk" * 40)
    assert reconcile.run(None, ReconcileOptions(options(world, tmp_path))) == before


def test_a_name_that_is_not_utf_8_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = settled(tmp_path)
    Path(os.fsdecode(bytes(tmp_path / "hours") + b"/caf\xe9.idx")).touch()
    words = ["--as-of", str(options(world, tmp_path).as_of), "--out", str(tmp_path / "out"), "--master", "none"]
    assert cli(["pipeline", "archive", "--path", str(tmp_path), *words]) == 2
    assert r"the name 'caf\xe9.idx' of a file is not UTF-8: rename it" in capsys.readouterr().err


def test_a_damaged_hour_is_named_as_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = settled(tmp_path)
    lines(tmp_path / "hours" / f"{NAME}.dsp", event(1, event=77))
    words = ["pipeline", "archive", "--path", str(tmp_path), "--as-of", str(options(world, tmp_path).as_of)]
    assert cli([*words, "--out", str(tmp_path / "out"), "--master", "none", "-o", "json"]) == 1
    found = json.loads(capsys.readouterr().err)
    assert (found["type"], f"hours/{NAME}.dsp, offset 32" in found["detail"]) == ("damaged-file", True)
    again = error_of(DamagedFile, "/a, b, offset 7: it is wrong")
    assert (again.path, again.offset, again.what, again.detail) == ("/a, b", 7, "it is wrong", str(again))


@pytest.mark.parametrize("job", ["lateness", "load", "forecast", "reconcile"])
def test_a_topic_or_a_range_that_does_not_exist_is_no_success(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["pipeline", job, "--master", "none", "--path", str(write(settled(tmp_path), tmp_path, checkpoint=True))]
    assert cli([*words, "--topics", "t,nosuch"]) == 3
    assert "there is no topic nosuch" in capsys.readouterr().err
    assert cli([*words, "--hour-from", "2027010100"]) == 3
    assert "no hour is in this range; the first hour is 2026112018" in capsys.readouterr().err


def test_an_archive_without_the_asked_hours_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(write(settled(tmp_path), tmp_path, checkpoint=True))
    words = ["pipeline", "archive", "--master", "none", "--out", str(tmp_path / "out")]
    assert cli([*words, "--audit"]) == 3
    assert "is not an archive" in capsys.readouterr().err
    empty = ["--hour-from", "2027010100"]
    assert cli([*words, "--path", source, *empty]) == 3
    assert "no hour is in this range; the first hour is 2026112018" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli([*words, "--path", source]) == 0
    assert cli([*words, "--audit"]) == 0
    assert cli([*words, "--audit", *empty]) == 3
    assert "no archived hour is in this range; the first is 2026112018, the last 2026112018" in capsys.readouterr().err


def test_hours_open_long_after_their_end_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = settled(tmp_path)
    for late in (False, True):
        world.now = 5 * HOUR if late else world.now
        as_of = str(options(world, tmp_path).as_of)
        words = ["pipeline", "archive", "--master", "none", "--path", str(tmp_path), "--as-of", as_of]
        assert cli([*words, "--hour-to", "2026112019", "--out", str(tmp_path / "out")]) == 0
        reported = "1 hours ended more than 2 hours ago and are still open" in capsys.readouterr().err
        assert reported == late
