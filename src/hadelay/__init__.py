"""hadelay: a replicated cluster that keeps delay messages and hands them out on time.

`AsyncClient` and `Client` are what users import; they are loaded when first named, so that `import hadelay.…` of a
node, a tool or a reader of files does not pay for them.
"""

from typing import TYPE_CHECKING, Any

from hadelay.version import VERSION as __version__

if TYPE_CHECKING:
    from hadelay.client import AsyncClient, AsyncMessage, Client, Message, Put, Receipt, SyncMessage
    from hadelay.errors import HadelayError

__all__ = [
    "AsyncClient", "AsyncMessage", "Client", "HadelayError", "Message", "Put", "Receipt", "SyncMessage", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hadelay' has no attribute {name!r}")
    if name == "HadelayError":
        from hadelay.errors import HadelayError

        return HadelayError
    import hadelay.client

    return getattr(hadelay.client, name)
