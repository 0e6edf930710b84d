"""Helpers for tests of programs that use hadelay (docs/howto/testing.md): `LocalNode`, and a pytest fixture `hadelay`.

The node is imported when first named, because pytest loads this package wherever hadelay is installed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hadelay.testing.clock import Clock
    from hadelay.testing.node import LocalNode

__all__ = ["Clock", "LocalNode"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hadelay.testing' has no attribute {name!r}")
    import hadelay.testing.node

    return getattr(hadelay.testing.node, name)
