"""Paths, queries and redirects of the HTTP API, for the client and the command line."""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from hadelay.errors import Forbidden


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


def relayed(target: str) -> str:
    """Add to `target` the query that makes a follower relay the request to the leader instead of redirecting it."""
    return f"{target}{'&' if '?' in target else '?'}redirect=false"


def encrypted_too(url: str, location: str) -> str:
    """Return `location`, to which `url` redirects. Forbidden if it leads from https to an unencrypted URL."""
    if url.startswith("https:") and not location.startswith("https:"):
        raise Forbidden(
            f"{url} redirects to {location[:200]}, which is not encrypted: set http.advertise there to https://"
        )
    return location


def reachable(advertised: Iterable[str], given: Iterable[str], token: str) -> list[str]:
    """Addresses of nodes to ask: those that nodes advertise, then those that the user gave. With a token, and an
    address of https among the given ones, unencrypted addresses that nodes advertise are left out."""
    own = list(given)
    encrypted = bool(token) and any(url.startswith("https:") for url in own)
    found = (url.rstrip("/") for url in advertised if url and (not encrypted or url.startswith("https:")))
    return list(dict.fromkeys([*found, *own]))
