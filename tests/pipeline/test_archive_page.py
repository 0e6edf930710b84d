"""The page "Read the archive with DuckDB, Polars or SQL": its examples run on an archive, and agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline import test_archive

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "archive-queries.md"
#: What became of the messages of hour 18 in test_archive.settled.
OUTCOMES = [("t", "acked", 9), ("t", "cancelled", 1)]


@pytest.fixture
def archived(tmp_path: Path) -> Path:
    """An archive, with an hour that a killed run has left without a manifest."""
    test_archive.run(test_archive.settled(tmp_path), tmp_path)
    for kind in ("messages", "events"):
        (source,) = (tmp_path / "out" / kind / "hour=2026112018").iterdir()
        unfinished = tmp_path / "out" / kind / "hour=2026112017"
        unfinished.mkdir()
        (unfinished / source.name).write_bytes(source.read_bytes())
    return tmp_path / "out"


def blocks(heading: str, language: str, archive: Path) -> list[str]:
    (section,) = (part for part in re.split(r"^## ", PAGE.read_text(), flags=re.M) if part.startswith(heading + "\n"))
    found = re.findall(rf"^```{language}\n(.*?)^```$", section, re.M | re.S)
    assert found
    return [block.replace("/srv/archive", str(archive)) for block in found]


def test_duckdb(archived: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    with duckdb.connect() as session:
        views, *queries = blocks("DuckDB", "sql", archived)
        session.execute(views)
        outcomes, lateness, consumers, history = ([*session.execute(query).fetchall()] for query in queries)
    assert outcomes == OUTCOMES
    assert lateness == [("t", 9, [0, 0], 0)]
    assert [row[:3] for row in consumers] == [("t", "c", 9)]
    assert [row[3] for row in history] == ["leased", "acked"]


def test_polars(archived: Path) -> None:
    pytest.importorskip("polars", reason="polars is not installed: it has 170 MB")
    assert printed(*blocks("Polars", "py", archived)).rows() == OUTCOMES


def test_pyarrow(archived: Path) -> None:
    (block,) = blocks("pyarrow and pandas", "py", archived)
    assert [tuple(row.values()) for row in printed(block).to_pylist()] == OUTCOMES


def printed(program: str) -> Any:
    """The value of the variable `outcomes` after the program."""
    names: dict[str, Any] = {}
    exec(program, names)
    return names["outcomes"]


def test_spark_sql(spark: Any, archived: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("Spark SQL", "pyspark", archived)
    key = "spark.sql.sources.partitionColumnTypeInference.enabled"
    before = spark.conf.get(key)
    try:
        exec(block, {})
    finally:
        spark.conf.set(key, before)
    shown = re.findall(r"^\| *t\| *(\w+)\| *(\d+)\|$", capsys.readouterr().out, re.M)
    assert shown == [("acked", "9"), ("cancelled", "1")]
