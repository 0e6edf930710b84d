"""hadelay: a replicated cluster that keeps delay messages and hands them out on time.

`hadelay.Client` and `hadelay.AsyncClient` talk to one. Both are imported when first used, so that the command line
does not pay for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hadelay.version import VERSION as __version__

if TYPE_CHECKING:
    from hadelay.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("AsyncClient", "Client"):
        import hadelay.client

        return getattr(hadelay.client, name)
    raise AttributeError(f"module 'hadelay' has no attribute {name!r}")
