"""Write requirements.lock: every package by version and sha256, from whatever index pip is configured with.

`make lock`. The lock names no address: a hash is the same wherever a file is fetched from. Listed are the source
archive and the wheels for CPython 3.11 or newer on Linux (x86_64, aarch64) and for any platform, so that an index that
lacks one of them still serves. pip itself says which files exist: it logs every link it considers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEEL = re.compile(r"-(py3|py2\.py3|cp3\d+)-(none|abi3|cp31[1-9])-(any|(manylinux|musllinux)\S*(x86_64|aarch64))\.whl$")
LINK = re.compile(r"(?:^|[\s/])(?P<file>[^\s/#]+\.(?:whl|tar\.gz|zip))#sha256=(?P<hash>[0-9a-f]{64})")


def pip(*args: str) -> str:
    return subprocess.run([sys.executable, "-m", "pip", *args], check=True, capture_output=True, text=True).stdout


def wanted() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [
        *project["project"]["dependencies"],
        *project["dependency-groups"]["dev"],
        *project["build-system"]["requires"],
    ]


def resolve(requirements: list[str]) -> dict[str, str]:
    report = json.loads(pip("install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", *requirements))
    found = (item["metadata"] for item in report["install"])
    return {
        re.sub(r"[-_.]+", "-", m["name"]).lower(): m["version"] for m in sorted(found, key=lambda m: m["name"].lower())
    }


def hashes(name: str, version: str) -> list[str]:
    with tempfile.TemporaryDirectory() as directory:
        log = pip("download", "--no-deps", "--no-cache-dir", "-vvv", "--dest", directory, f"{name}=={version}")
    stem = re.compile(
        re.escape(name).replace(r"\-", "[-_.]+") + "-" + re.escape(version) + r"(-|\.tar\.gz$|\.zip$)", re.I
    )
    files = {m["file"]: m["hash"] for m in LINK.finditer(log) if stem.match(m["file"])}
    kept = {digest for file, digest in files.items() if WHEEL.search(file) or not file.endswith(".whl")}
    if not kept:
        raise SystemExit(f"no usable file of {name} {version} at the configured index")
    return sorted(kept)


def main() -> None:
    lines = ["# Made by `make lock`. Install: pip install --require-hashes -r requirements.lock"]
    for name, version in resolve(wanted()).items():
        print(name, version, file=sys.stderr)
        lines.append(" \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{h}" for h in hashes(name, version))]))
    (ROOT / "requirements.lock").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
