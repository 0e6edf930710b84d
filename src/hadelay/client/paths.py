"""Paths, queries and redirects of the HTTP API, for the client and the command line."""

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlencode


def segment(text: str) -> str:
    """Encode `text` as one segment of a path. The dots of `.` and `..` are encoded, too: in a path, they mean another
    path, but earlier versions allowed them as names of topics."""
    return quote(text, safe="") if text.strip(".") or not text else text.replace(".", "%2E")


def message_path(message_id: str | None, topic: str | None, key: str | None) -> str:
    """Path of a message, named by its id, or by topic and key; ValueError otherwise."""
    if message_id is not None and topic is None and key is None:
        return f"/v1/messages/{segment(message_id)}"
    if message_id is None and topic is not None and key is not None:
        return f"/v1/topics/{segment(topic)}/keys/{segment(key)}"
    raise ValueError("name the message: by its id, or by topic and key")


def with_query(path: str, values: Mapping[str, Any]) -> str:
    """`path` with a query of these values, except None and False. True is written as `true`."""
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    given |= {name: "true" for name, value in given.items() if value is True}
    return f"{path}?{urlencode(given)}" if given else path


_TOPIC = re.compile(r"/v1/topics/([^/?]+)")


def of_shard(path: str, shard: int | None) -> str:
    """`path` with the query that names a shard. A request about leases gets no such query: a lease token has its
    shard's number."""
    if shard is None or path.startswith("/v1/leases:"):
        return path
    return f"{path}{'&' if '?' in path else '?'}shard={shard}"


def topic_of(path: str) -> str:
    """The topic in a path, percent-encoded as in the path; "" for a path without a topic."""
    found = _TOPIC.match(path)
    return found[1] if found else ""


def relayed(target: str) -> str:
    """Add to `target` the query that makes a follower relay the request to the leader instead of redirecting it."""
    return f"{target}{'&' if '?' in target else '?'}redirect=false"


def may_follow(url: str, location: str) -> bool:
    """Whether a client may follow the redirect of `url` to `location`: not from https to an unencrypted URL. Nodes
    behind a proxy that ends TLS send such redirects; the client then asks `url` to relay the request."""
    return not url.startswith("https:") or location.startswith("https:")


def reachable(advertised: Iterable[str], given: Iterable[str], token: str) -> list[str]:
    """Addresses of nodes to ask: those that nodes advertise, then those that the user gave. With a token, and an
    address of https among the given ones, unencrypted addresses that nodes advertise are left out."""
    own = list(given)
    encrypted = bool(token) and any(url.startswith("https:") for url in own)
    found = (url.rstrip("/") for url in advertised if url and (not encrypted or url.startswith("https:")))
    return list(dict.fromkeys([*found, *own]))
