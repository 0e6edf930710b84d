"""File descriptors of the process, divided among clients, webhooks and the node's own files.

A journal that finds no descriptor for its next segment ends the node, so client sockets never get the last ones.
"""

from __future__ import annotations

import resource

import structlog
from msgspec.structs import replace

from hadelay.errors import ConfigError
from hadelay.settings.node import Config

#: Descriptors for everything but sockets of clients and webhooks: journal, hours, LMDB, links, backups, connections
#: before HELLO on the node link (256) and spares of health routes (64).
RESERVE = 1_024
#: Reserve of a process that may open few files: the same connections and spares, and 192 for the node's own files.
_SMALL_RESERVE = 512
#: Smallest limit of open files with which a node starts: the small reserve, and some sockets for clients.
LEAST = 768

log = structlog.get_logger("hadelay")


def raise_limit() -> int:
    """Raise the limit of open files to what this process may have; returns it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard


def divide(config: Config, limit: int) -> tuple[Config, int]:
    """Divide `limit` descriptors: (configuration that fits, sockets for clients and for polls relayed to the leader).
    Lowers http.max_connections and webhooks.max_calls where it has to, and logs that. ConfigError below LEAST."""
    if limit < LEAST:
        raise ConfigError(
            f"this process may open {limit} files; a node needs {LEAST} at least, and some for each client: raise the "
            "limit (LimitNOFILE= in the systemd unit, ulimit -n in a shell, ulimits in a compose file)"
        )
    http, webhooks = config.http, config.webhooks
    left = limit - min(RESERVE, max(limit // 2, _SMALL_RESERVE))
    calls = min(webhooks.max_calls, left // 4)
    sockets = left - calls
    connections = min(http.max_connections, sockets)
    if (connections, calls) != (http.max_connections, webhooks.max_calls):
        log.warning(
            "few_descriptors",
            may_have=limit,
            needed=RESERVE + http.max_connections + webhooks.max_calls,
            max_connections=f"{connections} instead of {http.max_connections}",
            max_calls=f"{calls} instead of {webhooks.max_calls}",
        )
        config = replace(
            config, http=replace(http, max_connections=connections), webhooks=replace(webhooks, max_calls=calls)
        )
    return config, sockets
