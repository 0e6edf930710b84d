"""The lock and the metadata agree, and the lock names no address."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from hadelay.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()


def test_what_is_required_is_locked_within_its_bounds() -> None:
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", LOCK, re.M))
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    for requirement in map(Requirement, [*wanted, *PROJECT["build-system"]["requires"]]):
        assert requirement.specifier.contains(locked[requirement.name]), requirement


def test_every_package_has_hashes_and_no_address() -> None:
    packages = re.split(r"^(?=[a-z0-9-]+==)", LOCK, flags=re.M)[1:]
    assert all("--hash=sha256:" in package for package in packages)
    assert "://" not in LOCK
    assert "index" not in LOCK


def test_one_version() -> None:
    assert PROJECT["project"]["version"] == VERSION


def test_ci_runs_exactly_what_a_newcomer_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^(?:exec )?(make .*)$", script, re.M) == ["make test"]
