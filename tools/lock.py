"""Write requirements.lock: every package by version and sha256, from whatever index pip is configured with.

`make lock`. The lock names no address: a hash is the same wherever a file is fetched from. Listed are the source
archive and the wheels for CPython 3.11 or newer on Linux (x86_64, aarch64) and for any platform, so that an index that
lacks one of them still serves. pip itself says which files exist, by what it looks packages up with: that is not
public, and has been the same from pip 22 on; nothing public tells the hashes of all files.

requirements-browser.lock has what only tests in a browser need, requirements-frameworks.lock what tests with Celery,
Django and the like need, requirements-spark.lock what only tests on Spark need, half a gigabyte, and
requirements-site.lock what `make site` needs. Each is installed when it is needed, after the first alone: a package
that two of them need stands in both, with one version. PySpark is built with setuptools of the first.

Below its hashes, each package names the packages that it needs, so that a test can follow them without an index.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
WHEEL = re.compile(r"-(py3|py2\.py3|cp3\d+)-(none|abi3|cp31[1-9])-(any|(manylinux|musllinux)\S*(x86_64|aarch64))\.whl$")
FIRST = "requirements.lock"
#: Dependency groups with a lock of their own, which is installed after the first.
GROUPS = ("browser", "frameworks", "spark", "site")


def pip(*args: str) -> str:
    return subprocess.run([sys.executable, "-m", "pip", *args], check=True, capture_output=True, text=True).stdout


def wanted() -> dict[str, list[str]]:
    """file → requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    server = project["project"]["optional-dependencies"]["server"]
    first = [*project["project"]["dependencies"], *server, *groups["dev"], *project["build-system"]["requires"]]
    return {FIRST: first} | {f"requirements-{group}.lock": groups[group] for group in GROUPS}


def resolve(requirements: list[str], versions: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """name → metadata of all packages that the requirements need; of a package in `versions`, that version."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in versions.items())
        constraints.flush()
        options = ("--quiet", "--dry-run", "--ignore-installed", "--constraint", constraints.name, "--report", "-")
        report = json.loads(pip("install", *options, *requirements))
    found = [item["metadata"] for item in report["install"]]
    return {canonicalize_name(m["name"]): m for m in sorted(found, key=lambda m: m["name"].lower())}


def needs(name: str, requires: Mapping[str, Iterable[str]], extras: Iterable[str] = ()) -> set[str]:
    """Names of the packages that package `name` needs in this environment. `requires`: package → its requirements."""
    found = set()
    for requirement in map(Requirement, requires.get(name, ())):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras)):
            needed = canonicalize_name(requirement.name)
            found |= {needed} | (needs(needed, requires, requirement.extras) if requirement.extras else set())
    return found


def files(name: str) -> dict[str, str]:
    """file → sha256, of all versions."""
    from pip._internal.commands import create_command
    from pip._internal.index.collector import parse_links
    from pip._internal.models.link import Link

    command: Any = create_command("download")
    options, _ = command.parse_args([name])
    with command.main_context():
        collector = command._build_package_finder(options, command.get_default_session(options))._link_collector
        pages = map(collector.fetch_response, map(Link, collector.search_scope.get_index_urls_locations(name)))
        links = [link for page in pages if page is not None for link in parse_links(page)]
        return {link.filename: link.hash for link in links if link.hash and link.hash_name == "sha256"}


def hashes(name: str, version: str) -> list[str]:
    stem = re.compile(
        re.escape(name).replace(r"\-", "[-_.]+") + "-" + re.escape(version) + r"(-|\.tar\.gz$|\.zip$)", re.I
    )
    usable = re.compile(rf"{WHEEL.pattern}|\.tar\.gz$|\.zip$")
    kept = {digest for file, digest in files(name).items() if stem.match(file) and usable.search(file)}
    if not kept:
        raise SystemExit(f"no usable file of {name} {version} at the configured index")
    return sorted(kept)


def entry(name: str, version: str, digests: Iterable[str], needed: Iterable[str]) -> str:
    """A package of a lock."""
    lines = " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in digests)])
    return "\n    # needs ".join([lines, *([" ".join(sorted(needed))] if needed else [])])


def main() -> None:
    first: set[str] = set()
    locked: dict[str, str] = {}
    for path, requirements in wanted().items():
        found = resolve(requirements, locked)
        requires = {name: metadata.get("requires_dist", ()) for name, metadata in found.items()}
        lines = [f"# Made by `make lock`. Install: pip install --require-hashes -r {path}"]
        for name in found.keys() - first:
            version = locked[name] = found[name]["version"]
            print(name, version, file=sys.stderr)
            lines.append(entry(name, version, hashes(name, version), needs(name, requires)))
        (ROOT / path).write_text("\n".join([lines[0], *sorted(lines[1:])]) + "\n")
        first = first or set(found)


if __name__ == "__main__":
    main()
