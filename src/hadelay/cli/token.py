"""`hadelay token`: commands bootstrap, create, list, revoke; `hadelay cluster audit`."""

import hashlib
import secrets

from hadelay.cli.output import Printing, Remote, Several, note, show
from hadelay.cli.remote import call
from hadelay.paths import segment

_COLUMNS = ("id", "name", "scopes", "created_at", "expires_at", "expired")
_TRAIL = ("number", "at", "token", "action", "target", "outcome", "node")


def bootstrap(*, printing: Printing = Printing()) -> None:
    """Create the bootstrap token, which can only create the first token with the scope admin, and its hash.

    The command does not use the network. The hash goes into a node's configuration, so only operators who can change
    the configuration can create the first token.
    """
    # Same format as in http/access.py, which the command line does not import.
    token = "hadelay_" + secrets.token_urlsafe(32)
    digest = hashlib.sha256(token.encode()).hexdigest()
    show({"token": token, "security.bootstrap_token_hash": digest}, printing)
    note("Put the hash into the configuration of a node, under [security], and start the node. Then use the token:")
    note("  HADELAY_TOKEN=… hadelay token create admin --scope admin")


def create(
    name: str, /, *, scope: Several, lifetime: str | None = None, remote: Remote = Remote(),
) -> None:  # fmt: skip
    """Create a token and print it. The token cannot be shown again.

    Args:
        name: Name of the owner, for the audit trail and for refusals. Names need not be unique.
        scope: publish, consume, read or admin, for all topics; or limited to topics, as publish:orders-*. Repeatable.
        lifetime: Time until the token expires: 90d, 12h. Default: valid until revoked.
    """
    wish = {"name": name, "scopes": scope} | ({} if lifetime is None else {"lifetime": lifetime})
    show(call(remote, "POST", "/v1/tokens", wish, needs="token"), remote)


def list_(*, remote: Remote = Remote()) -> None:
    """List tokens and their scopes."""
    show(call(remote, "GET", "/v1/tokens", needs="tokens")["tokens"], remote, _COLUMNS)


def revoke(token_id: str, /, *, remote: Remote = Remote()) -> None:
    """Revoke a token: all requests with it are refused.

    Args:
        token_id: Id of the token, from `hadelay token list`.
    """
    call(remote, "DELETE", f"/v1/tokens/{segment(token_id)}")
    show({"id": token_id, "revoked": True}, remote)


def audit(*, after: int = 0, limit: int = 1_000, remote: Remote = Remote()) -> None:
    """Show the audit trail: requests that need the scope admin, with token and outcome.

    Args:
        after: Only entries with a higher number.
        limit: Limit of entries, oldest first.
    """
    query = {"after": after, "limit": limit}
    show(call(remote, "GET", "/v1/audit", needs="entries", query=query)["entries"], remote, _TRAIL)
