"""Write requirements.lock: every package by version and sha256, from whatever index pip is configured with.

`make lock`. The lock names no address: a hash is the same wherever a file is fetched from. Listed are the source
archive and the wheels for CPython 3.11 or newer on Linux (x86_64, aarch64) and for any platform, so that an index that
lacks one of them still serves. pip itself says which files exist, by what it looks packages up with: that is not
public, and has been the same from pip 22 on; nothing public tells the hashes of all files.

requirements-browser.lock has what only tests in a browser need, requirements-frameworks.lock what tests with Celery,
Django and the like need, requirements-spark.lock what only tests on Spark need, half a gigabyte, and
requirements-site.lock what `make site` needs. Each is installed when it is needed, after the first, with whose
setuptools PySpark is built.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHEEL = re.compile(r"-(py3|py2\.py3|cp3\d+)-(none|abi3|cp31[1-9])-(any|(manylinux|musllinux)\S*(x86_64|aarch64))\.whl$")


def pip(*args: str) -> str:
    return subprocess.run([sys.executable, "-m", "pip", *args], check=True, capture_output=True, text=True).stdout


def wanted() -> dict[str, list[str]]:
    """file → requirements; of a later file those that are in no earlier one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    first = [*project["project"]["dependencies"], *groups["dev"], *project["build-system"]["requires"]]
    others = ("browser", "frameworks", "spark", "site")
    return {"requirements.lock": first} | {f"requirements-{group}.lock": groups[group] for group in others}


def resolve(requirements: list[str]) -> dict[str, str]:
    report = json.loads(pip("install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", *requirements))
    found = (item["metadata"] for item in report["install"])
    return {
        re.sub(r"[-_.]+", "-", m["name"]).lower(): m["version"] for m in sorted(found, key=lambda m: m["name"].lower())
    }


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


def main() -> None:
    locked: dict[str, str] = {}
    for path, requirements in wanted().items():
        known = [f"{name}=={version}" for name, version in locked.items()]
        lines = [f"# Made by `make lock`. Install: pip install --require-hashes -r {path}"]
        for name, version in resolve([*known, *requirements]).items():
            if name not in locked:
                print(name, version, file=sys.stderr)
                found = (f"--hash=sha256:{digest}" for digest in hashes(name, version))
                lines.append(" \\\n    ".join([f"{name}=={version}", *found]))
                locked[name] = version
        (ROOT / path).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
