"""What every released version wrote, this one reads: messages, their states, bodies and histories."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from hadelay import Client
from tests.released.node import running
from tests.system.cluster import hadelay

KEPT = sorted(Path(__file__).parent.glob("data-*.tar.xz"))


def test_something_is_kept() -> None:
    assert KEPT


def unpacked(archive: Path, to: Path) -> Path:
    with tarfile.open(archive) as packed:
        # Debian 12 has Python 3.11.2, which knows no filters; Python 3.14 asks for one.
        packed.extractall(to, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # type: ignore[arg-type]
    return to / "data"


@pytest.mark.processes
@pytest.mark.parametrize("archive", KEPT, ids=[path.name for path in KEPT])
def test_a_node_goes_on_with_it(archive: Path, tmp_path: Path) -> None:
    directory = unpacked(archive, tmp_path)
    expected = json.loads((directory / "expected.json").read_text())
    written = {path: path.read_bytes().rstrip(b"\0") for path in directory.rglob("*") if path.suffix in _KINDS}
    with running(directory) as (url, _), Client(url) as client:
        for message_id, was in expected.items():
            view = client.get(message_id, body=True)
            assert (view.topic, view.meta, (view.body or b"").hex()) == (was["topic"], was["meta"], was["body"])
            assert [event.event for event in view.history][: len(was["events"])] == was["events"]
            assert view.state in _reachable(was["state"])
        receipt = client.put("orders", b"and on it goes", delay="1h")
        assert client.get(receipt.id).state == "scheduled"
    # What the journal held beyond the checkpoint was applied again: to the same bytes.
    for path, before in written.items():
        assert path.read_bytes().startswith(before), path.name


_KINDS = (".log", ".idx", ".dsp")


def _reachable(state: str) -> set[str]:
    """What time alone may have made of it."""
    if state in ("scheduled", "leased"):
        return {state, "scheduled", "ready"}
    return {state}


@pytest.mark.processes
@pytest.mark.parametrize("archive", KEPT, ids=[path.name for path in KEPT])
def test_every_file_can_be_inspected(archive: Path, tmp_path: Path) -> None:
    files = [path for path in unpacked(archive, tmp_path).rglob("*") if path.is_file() and path.stat().st_size]
    files = [path for path in files if not path.name.endswith(("-lock", ".json", "spare"))]
    assert {path.suffix for path in files} >= {".log", ".idx", ".dsp", ".seg", ".mdb"}
    for path in files:
        reported = hadelay("inspect", path, "-o", "json")
        assert reported.returncode == 0, f"{path.name}: {reported.stderr}"
