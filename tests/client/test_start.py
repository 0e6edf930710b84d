"""What `import hadelay` costs a program that only publishes."""

from __future__ import annotations

import subprocess
import sys

#: Packages of nodes, and aiohttp, which takes most of a start: it is loaded with the first client.
_ABSENT = ("numpy", "lmdb", "pyroaring", "uvloop", "aiohttp", "hadelay.server", "hadelay.ledger", "hadelay.storage")
_PROGRAM = f"""
import sys
from hadelay import AsyncClient, AsyncMessage, Client, HadelayError, Message, Put, Receipt, SyncMessage
early = [name for name in {_ABSENT!r} if name in sys.modules]
Client("http://127.0.0.1:8400").close()
late = [name for name in {_ABSENT!r} if name in sys.modules]
print(",".join(early), ",".join(late), sep=";")
"""


def test_the_client_starts_without_what_nodes_need() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip().split(";") == ["", "aiohttp"]
