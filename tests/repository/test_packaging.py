"""The locks and the metadata agree, and no lock names an address."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from hadelay.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: A lock for each, after the first. Where its packages stand in the first, they are not repeated.
GROUPS = ("browser", "frameworks", "spark", "site")
LOCKS = [
    (ROOT / name).read_text() for name in ("requirements.lock", *(f"requirements-{group}.lock" for group in GROUPS))
]


#: A machine without a browser tests the rest.
NO_BROWSER = "make browser || echo 'no browser: its tests are skipped'"


def test_what_is_required_is_locked_within_its_bounds() -> None:
    first, *others = (dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.M)) for lock in LOCKS)
    groups = PROJECT["dependency-groups"]
    wanted = [*PROJECT["project"]["dependencies"], *groups["dev"], *PROJECT["build-system"]["requires"]]
    for locked, requirements in ((first, wanted), *zip(others, map(groups.get, GROUPS), strict=True)):
        for requirement in map(Requirement, requirements):
            assert requirement.specifier.contains((first | locked)[requirement.name]), requirement
    second = others[GROUPS.index("spark")]
    extra = map(Requirement, PROJECT["project"]["optional-dependencies"]["spark"])
    assert all(requirement.specifier.contains((first | second)[requirement.name]) for requirement in extra)


def test_every_package_has_hashes_and_no_address() -> None:
    for lock in LOCKS:
        packages = re.split(r"^(?=[a-z0-9-]+==)", lock, flags=re.M)[1:]
        assert all("--hash=sha256:" in package for package in packages)
        assert "://" not in lock
        assert "index" not in lock


def test_one_version() -> None:
    assert PROJECT["project"]["version"] == VERSION


def test_ci_runs_exactly_what_a_newcomer_runs() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^(?:exec )?(make .*)$", script, re.M) == [NO_BROWSER, "make test"]
