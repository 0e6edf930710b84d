"""`python tools/release_data.py VERSION`: keep a small data directory as this version writes it.

What tests/released/ opens with every later version. A node of its own is filled with a bit of everything, checkpointed
by a clean stop, filled a little more and killed, so that the journal holds what the checkpoint does not. Run it once
per release, before the formats change.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from hadelay import Client  # noqa: E402
from tests.released.node import TOPICS, running  # noqa: E402


def main(version: str) -> int:
    target = ROOT / "tests" / "released" / f"data-{version}.tar.xz"
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "data"
        with running(directory, init=True) as (url, _), Client(url) as client:
            _fill(client, "first")
        with running(directory, kill=True) as (url, _), Client(url) as client:
            _fill(client, "second")
            expected = _expected(client)
        (directory / "expected.json").write_text(json.dumps(expected, indent=1))
        with tarfile.open(target, "w:xz") as archive:
            archive.add(directory, "data")
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size} bytes, {len(expected)} messages")
    return 0


_ids: list[str] = []


def _fill(client: Client, word: str) -> None:
    """Waiting near and far, leased and acked, nacked, cancelled, binary, empty, with meta, in two topics."""
    for n, delay in enumerate(("20m", "3h", "40d", "700d")):
        _ids.append(client.put(TOPICS[0], f"{word} {n}".encode(), delay=delay, meta={"n": str(n)}).id)
    _ids.append(client.put(TOPICS[0], bytes(range(256)), delay="1h").id)
    _ids.append(client.put(TOPICS[0], b"", delay="2h").id)
    cancelled = client.put(TOPICS[0], b"never", delay="5h").id
    client.cancel(cancelled)
    _ids.append(cancelled)
    for n in range(3):
        _ids.append(client.put(TOPICS[1], f"{word} now {n}".encode()).id)
    acked, nacked, _leased = client.receive(TOPICS[1], max=3, wait="5s", lease="12h")
    client.ack(acked.lease)
    client.nack(nacked.lease, delay="6h")


def _expected(client: Client) -> dict[str, Any]:
    found = {}
    for message_id in _ids:
        view = client.get(message_id, body=True)
        found[message_id] = {
            "topic": view.topic,
            "state": view.state,
            "attempt": view.attempt,
            "meta": view.meta,
            "body": (view.body or b"").hex(),
            "events": [event.event for event in view.history],
        }
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(subprocess.list2cmdline(["usage: python", "tools/release_data.py", "VERSION"]))
    sys.exit(main(sys.argv[1]))
