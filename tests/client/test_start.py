"""What `import hadelay` costs a program that only publishes."""

from __future__ import annotations

import subprocess
import sys

#: Packages of nodes, and aiohttp, which takes most of a start: it is loaded with the first client.
_ABSENT = ("numpy", "lmdb", "pyroaring", "uvloop", "aiohttp", "hadelay.server", "hadelay.ledger", "hadelay.storage")
_PROGRAM = f"""
import sys, time
before = time.process_time()
from hadelay import AsyncClient, AsyncMessage, Client, HadelayError, Message, Put, Receipt, SyncMessage
took_s = time.process_time() - before
early = [name for name in {_ABSENT!r} if name in sys.modules]
Client("http://127.0.0.1:8400").close()
late = [name for name in {_ABSENT!r} if name in sys.modules]
print(took_s, ",".join(early), ",".join(late), sep=";")
"""
#: Limit of the processor time of the imports, in seconds.
_START_S = 0.15


def test_the_client_starts_without_what_nodes_need() -> None:
    took_s = []
    for _ in range(5):  # the best of some: a busy machine adds to each
        done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
        took, early, late = done.stdout.strip().split(";")
        took_s.append(float(took))
        assert early == ""
        assert late == "aiohttp"
    assert min(took_s) < _START_S
