"""What is refused when a webhook or an alert is set: 400 what can't be meant, 422 where it may not lead.

Only a first look, by this node's configuration, so that mistakes are told to who makes them; what counts is the check
of each connection (guard.py). A name that nobody knows yet is fine: it may be known when the first message is due.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import urlsplit

from hadelay.errors import BadRequest, Impossible
from hadelay.server.webhooks.guard import Guard
from hadelay.server.webhooks.signing import secret_problem
from hadelay.settings.topic import url_problem

#: A name server may take this long; then the name is as good as unknown.
_RESOLVE_S = 2.0


async def check_settings(guard: Guard, config: dict[str, Any]) -> None:
    """Of a topic's settings those about calls. Raises BadRequest or Impossible."""
    for name in ("webhook", "alert"):
        part = config.get(name)
        if not isinstance(part, dict):
            continue
        for secret in (*(part.get("secrets") or ()), *([part["secret"]] if "secret" in part else ())):
            if isinstance(secret, str) and "****" not in secret and (wrong := secret_problem(secret)):
                raise BadRequest(f"{name}: {wrong}")
        if (url := part.get("url")) is not None and not url_problem(url):
            if problem := guard.literal_problem(url):
                raise Impossible(f"{name}.url: {problem}")
            await _resolve(guard, url, f"{name}.url")


async def _resolve(guard: Guard, url: str, name: str) -> None:
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    try:
        asked = loop.getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_STREAM)
        found = await asyncio.wait_for(asked, _RESOLVE_S)
    except (OSError, TimeoutError, UnicodeError):
        return
    if found and not any(guard.permits(str(address[0])) for *_, address in found):
        raise Impossible(
            f"{name}: {parts.hostname} has private addresses only; webhooks call public ones, unless [webhooks] allow "
            "in the nodes' configuration names the network"
        )
