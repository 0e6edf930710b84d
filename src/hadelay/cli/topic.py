"""`hadelay topic`: list, get, put, delete."""

from __future__ import annotations

from hadelay.cli.output import Remote, show
from hadelay.cli.remote import call, segment

_COLUMNS = ("topic", "scheduled", "ready", "leased", "dead", "oldest_ready_age_ms", "lateness", "bytes")


def list_(*, remote: Remote | None = None) -> None:
    """Every topic with its counts."""
    remote = remote or Remote()
    show(call(remote, "GET", "/v1/topics")["topics"], remote, _COLUMNS)


def get(topic: str, /, *, remote: Remote | None = None) -> None:
    """One topic: its configuration and counts.

    Parameters
    ----------
    topic
        Its name.
    """
    remote = remote or Remote()
    show(call(remote, "GET", f"/v1/topics/{segment(topic)}"), remote)


def put(topic: str, /, *, lease: str | None = None, remote: Remote | None = None) -> None:
    """Create a topic, or configure one that is there.

    Parameters
    ----------
    topic
        A-Z a-z 0-9 . _ - and at most 128 of them.
    lease
        How long a consumer holds a message when it does not say: 30s, 5m.
    """
    remote = remote or Remote()
    wish = {} if lease is None else {"lease": lease}
    show(call(remote, "PUT", f"/v1/topics/{segment(topic)}", wish), remote)


def delete(topic: str, /, *, force: bool = False, remote: Remote | None = None) -> None:
    """Delete a topic that has nothing pending.

    Parameters
    ----------
    topic
        Its name.
    force
        Cancel what is pending.
    """
    remote = remote or Remote()
    call(remote, "DELETE", f"/v1/topics/{segment(topic)}", query={"force": "true" if force else None})
    show({"topic": topic, "deleted": True}, remote)
