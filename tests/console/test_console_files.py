"""Files of others in the console are what their table says."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

STATIC = Path(__file__).resolve().parents[2] / "src/hadelay/console/static"
OURS = {"charts.js", "keys.js", "console.css", "console.js", "icon.svg", "VENDORED.md"}


def test_files_of_others_are_unchanged_and_licensed() -> None:
    rows = re.findall(
        r"^\| (\S+) \| (\S+) \| (\S+) \| .*in (\S+) \| `(\w{64})` \|$", (STATIC / "VENDORED.md").read_text(), re.M
    )
    assert {name: hashlib.sha256((STATIC / name).read_bytes()).hexdigest() for name, *_ in rows} == {
        name: digest for name, *_, digest in rows
    }
    licences = {licence for *_, licence, _ in rows}
    assert all("ermission" in (STATIC / licence).read_text() for licence in licences)
    assert {path.name for path in STATIC.iterdir()} == {row[0] for row in rows} | licences | OURS
