"""docs/spec/raft-journal.md and node-link.md: the bytes shown there are the bytes written."""

from __future__ import annotations

import random
import re
from pathlib import Path

from chaos.sim.disk import SimDisk
from chaos.sim.runtime import SimRuntime, SimWorld
from hadelay.platform.hello import HELLO, PROTOCOL, VERSION, packed
from hadelay.raft import messages
from hadelay.raft.journal import Journal
from hadelay.storage.identity import Identity

SPEC = Path(__file__).parents[2] / "docs/spec"


def shown(name: str) -> dict[int, bytes]:
    """offset → bytes of every line of a hex dump in the page."""
    lines = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)", (SPEC / name).read_text(), re.MULTILINE)
    return {int(offset, 16): bytes.fromhex(text) for offset, text in lines}


def blocks(name: str) -> list[bytes]:
    """The bytes of every block that holds nothing but hex."""
    found = re.findall(r"^```\n((?:[0-9a-f]{2}|\s)+)```$", (SPEC / name).read_text(), re.MULTILINE)
    return [bytes.fromhex(text) for text in found]


def test_the_journal_of_the_example():
    world, disk = SimWorld(1), SimDisk(random.Random(1))
    runtime = SimRuntime(world, "n1", disk)
    journal = Journal.create(disk, "/raft", runtime, Identity("demo", 0, "n1"))
    journal.vote(1, "n1")
    journal.append(b"\x01", 2, 1)
    journal.append(b"hello", 3, 1)
    journal.kick()
    world.run_for(1.0)
    written = disk.copy()["/raft/0000000000000001.seg"]
    dump = shown("raft-journal.md")
    assert len(dump) > 15
    for offset, data in dump.items():
        assert written[offset : offset + len(data)] == data, hex(offset)
    assert not any(written[max(dump) + 1 :]), "and nothing follows"


def test_the_frames_of_the_examples():
    hello = messages.encode(HELLO, PROTOCOL, VERSION, "demo", 0, "n1", 1)
    beat = messages.encode_append(7, 0, 0, 41, 9, info=b"t")
    reply = messages.encode_append_reply(messages.OK, 7, 40, 0, 9)
    framed = [packed(frame) for frame in (hello, beat, reply)]
    assert blocks("node-link.md") == [framed[0], framed[1] + framed[2]]
