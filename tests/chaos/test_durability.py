"""What chaos preloads into a node knows which file of the journal is synced, and up to where."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import tools
from chaos.cluster import CONTROL_BYTES, LocalCluster
from chaos.scenario import ClusterPart, Scenario

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(tools.missing("cc")), reason="no C compiler")]
MARK = b"-the message-"
#: A node's disk, as this process sees it: each word is a step, of a file that is open from then on.
NODE = """
import os, sys
files = {}
for step in sys.argv[1:]:
    verb, _, rest = step.partition(":")
    name, _, text = rest.partition("=")
    if name not in files:
        files[name] = [os.open(name, os.O_RDWR | os.O_CREAT), 0]
    fd, at = files[name]
    if verb == "write":
        files[name][1] += os.pwritev(fd, [text.encode()], at)
    elif verb == "zero":
        os.pwrite(fd, bytes(64), 0)
    elif verb == "sync":
        try:
            os.fdatasync(fd)
        except OSError:
            pass
    elif verb == "close":
        os.close(files.pop(name)[0])
    elif verb == "fail":
        os.pwrite(fd, (5).to_bytes(4, "little"), 4)
"""
ONE, TWO = "raft/g0/0000000000000001.seg", "raft/g0/0000000000000002.seg"


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tools.build_preload(tmp_path_factory.mktemp("preload"))


@pytest.mark.parametrize(
    ("steps", "durable", "syncs"),
    [
        ([f"write:{ONE}=an entry", f"write:{ONE}={MARK.decode()}", f"sync:{ONE}"], True, 1),
        ([f"write:{ONE}={MARK.decode()}"], False, 0),
        ([f"sync:{ONE}", f"write:{ONE}={MARK.decode()}"], False, 1),
        # Of another file: what only counts syncs would be content.
        ([f"write:{ONE}=an entry", f"write:{TWO}={MARK.decode()}", f"sync:{ONE}"], False, 1),
        ([f"write:{TWO}={MARK.decode()}", "write:state.mdb=pages", "sync:state.mdb"], False, 0),
        # What comes behind it is not synced, and need not be.
        ([f"write:{ONE}={MARK.decode()}", f"sync:{ONE}", f"write:{ONE}=more"], True, 1),
        # A copy in a new segment counts as much as the old one.
        ([f"write:{ONE}={MARK.decode()}", f"sync:{ONE}", f"write:{TWO}={MARK.decode()}"], True, 1),
        # A segment is zeroed and synced before it is filled.
        ([f"zero:{ONE}", f"sync:{ONE}", f"close:{ONE}", f"write:{ONE}={MARK.decode()}"], False, 1),
        ([f"write:{ONE}={MARK.decode()}", "fail:control", f"sync:{ONE}"], False, 0),
    ],
)
def test_a_message_is_durable_when_the_file_it_is_in_was_synced_behind_it(
    tmp_path: Path, preload: Path, steps: list[str], durable: bool, syncs: int
) -> None:
    cluster = LocalCluster(Scenario(cluster=ClusterPart(nodes=1)), tmp_path, set())
    home = tmp_path / "n1"
    (home / "raft" / "g0").mkdir(parents=True)
    control = home / "control"
    control.write_bytes(bytes(CONTROL_BYTES))
    environment = dict(os.environ) | {"LD_PRELOAD": str(preload), "CHAOS_CONTROL": str(control)}
    subprocess.run([sys.executable, "-c", NODE, *steps], cwd=home, env=environment, check=True, timeout=60)
    with open(control, "rb") as file:
        cluster._pages = [mmap.mmap(file.fileno(), CONTROL_BYTES, prot=mmap.PROT_READ)]
    assert cluster.syncs() == (syncs,)
    pages = cluster.synced()
    assert cluster.unsynced(MARK, pages) == (True, [] if durable else ["n1"])
    assert cluster.unsynced(b"nobody's", pages) == (False, [])
