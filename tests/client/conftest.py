from __future__ import annotations

from tests.http.conftest import make_node, node

__all__ = ["make_node", "node"]
