"""`hadelay token`: bootstrap, create, list, revoke; `hadelay cluster audit`."""

from __future__ import annotations

import hashlib
import secrets

from hadelay.cli.output import Printing, Remote, Several, note, show
from hadelay.cli.remote import call
from hadelay.paths import segment

_COLUMNS = ("id", "name", "scopes", "created_at", "expires_at", "expired")
_TRAIL = ("number", "at", "token", "action", "target", "outcome", "node")


def bootstrap(*, printing: Printing = Printing()) -> None:
    """Make the token that makes the first one with the scope admin, and what a node's configuration says of it.

    Nothing is asked or told over the network: whoever can change the configuration of a node, and nobody else, can
    make the first token.
    """
    # As in http/access.py, which the command line does not import.
    token = "hadelay_" + secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    show({"token": token, "security.bootstrap_token_hash": digest}, printing)
    note("Put the hash into the configuration of a node, under [security], and start it. Then, with this token:")
    note("  HADELAY_TOKEN=… hadelay token create admin --scope admin")


def create(
    name: str, /, *, scope: Several, lifetime: str | None = None, remote: Remote = Remote(),
) -> None:  # fmt: skip
    """Make a token. It is printed once, and nobody can find it out again.

    Parameters
    ----------
    name
        Says whose it is, in the audit trail and in refusals. Two may have the same.
    scope
        publish, consume, read or admin, for everything; or for topics, such as publish:orders-*. May be repeated.
    lifetime
        It expires after 90d, 12h, …; without it, it holds until it is revoked.
    """
    wish = {"name": name, "scopes": scope} | ({} if lifetime is None else {"lifetime": lifetime})
    show(call(remote, "POST", "/v1/tokens", wish, needs="token"), remote)


def list_(*, remote: Remote = Remote()) -> None:
    """Tokens, and what they may."""
    show(call(remote, "GET", "/v1/tokens", needs="tokens")["tokens"], remote, _COLUMNS)


def revoke(token_id: str, /, *, remote: Remote = Remote()) -> None:
    """Refuse a token from now on.

    Parameters
    ----------
    token_id
        As `hadelay token list` shows it.
    """
    call(remote, "DELETE", f"/v1/tokens/{segment(token_id)}")
    show({"id": token_id, "revoked": True}, remote)


def audit(*, after: int = 0, limit: int = 1_000, remote: Remote = Remote()) -> None:
    """What was asked for that takes the scope admin, by whom, and what became of it.

    Parameters
    ----------
    after
        Only entries with a higher number.
    limit
        At most so many, the oldest first.
    """
    query = {"after": after, "limit": limit}
    show(call(remote, "GET", "/v1/audit", needs="entries", query=query)["entries"], remote, _TRAIL)
