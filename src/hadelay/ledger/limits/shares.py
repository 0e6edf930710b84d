"""Shares: limits that keep one token from using up a table that all tenants share (ADR 265).

A row of a shared table counts for the name of the token whose request made the row. Tokens of one name may make a part
of the table's rows, their share, and the last tenth of a table is kept for tokens with the scope `admin` for the whole
cluster. These have no share, and neither do requests without a token: a cluster without tokens has only the limits.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from hadelay.codec.wire import cut_name
from hadelay.ledger.state import Ledger
from hadelay.rights import Rights, Token


class Table(NamedTuple):
    name: str
    #: Name of the table's rows in error messages.
    rows: str
    #: Fraction of the limit that tokens of one name may use.
    share: float
    #: Fraction of the limit that is kept for admin tokens.
    kept: float
    #: Advice to users in error messages, once no row is left.
    advice: str


_TENTH = 0.1
TOPICS = Table(
    "topics",
    "topics, with the deleted ones",
    0.25,
    _TENTH,
    "use topics that exist, or ask an admin to create this one",
)
SCHEDULES = Table("schedules", "schedules", 0.25, _TENTH, "delete some, or ask an admin to make this one")
SCHEDULE_BYTES = Table(
    "schedule_bytes", "bytes of messages of schedules", 0.25, _TENTH, "delete some, or ask an admin to make this one"
)
JOBS = Table("jobs", "running jobs", 0.25, _TENTH, "wait, or stop one")
BATCHES = Table("batches", "batches", 0.25, _TENTH, "wait until some are forgotten, 7 days after their end")
#: Keys with `unique_for`, and Idempotency-Keys. Tokens of one name may use a larger part of the Idempotency-Keys: these
#: end soon, and a full table forgets the oldest. A refusal of keys is a RowCode, so the user gets no advice.
UNIQUE = Table("unique_keys", "keys with unique_for", 0.5, _TENTH, "")
KEYS = Table("keys", "idempotency keys", 0.75, 0.0, "")
#: Idempotency-Keys of the epoch before the present one: they are looked up, too (ledger/messages/idempotency.py).
KEYS_BEFORE = KEYS._replace(name="keys_before")


def admin_names(tokens: Iterable[Token]) -> frozenset[str]:
    """Names of tokens that all have the scope admin for the whole cluster."""
    names = {True: set[str](), False: set[str]()}
    for token in tokens:
        names[Rights(token.scopes).may("admin", None)].add(cut_name(token.name))
    return frozenset(names[True] - names[False])


def is_bounded(ledger: Ledger) -> bool:
    """Whether shares limit the present request. They do not limit admin tokens, nor requests without a token."""
    return bool(ledger.by) and ledger.by not in ledger.admins


def made_by(ledger: Ledger, table: Table) -> int:
    """Number of rows of the table that tokens with the name of the present request's token made."""
    return ledger.made[table.name][ledger.by] if table.name in ledger.made else 0


def room(ledger: Ledger, table: Table, used: int, limit: int, mine: int | None = None) -> int:
    """Number of rows of the table that the present request may still make. used: number of rows in the table. mine:
    number of rows that tokens with the request's token name made; None: the number that the ledger counted."""
    left = limit - used
    if is_bounded(ledger):
        mine = made_by(ledger, table) if mine is None else mine
        left = min(left, limit - int(limit * table.kept) - used, max(int(limit * table.share), 1) - mine)
    return left


def refusal(ledger: Ledger, table: Table, used: int, limit: int, *, mine: int | None = None, amount: int = 1) -> str:
    """Explain why the present request may not add `amount` rows to the table; "" if it may. See `room`."""
    if not amount or room(ledger, table, used, limit, mine) >= amount:
        return ""
    if used + amount > limit:
        return f"there are {used:,} {table.rows}, and the limit is {limit:,}: {table.advice}"
    mine, share = made_by(ledger, table) if mine is None else mine, max(int(limit * table.share), 1)
    if mine + amount > share:
        return (
            f"the token {ledger.by!r} has {mine:,} of the {limit:,} {table.rows}, and one token's share is {share:,}: "
            f"{table.advice}"
        )
    return (
        f"there are {used:,} {table.rows}, and the last {int(limit * table.kept):,} of {limit:,} are kept for tokens "
        f"with the scope admin: {table.advice}"
    )


def took(ledger: Ledger, table: Table, amount: int = 1) -> None:
    """Count rows that the present request made, for the share of its token."""
    if ledger.by and amount:
        ledger.made.setdefault(table.name, Counter())[ledger.by] += amount


def gave_back(ledger: Ledger, table: Table, by: str, amount: int = 1) -> None:
    """Subtract deleted rows from the count of the tokens with this name, which had made the rows."""
    made = ledger.made.get(table.name, Counter())
    if made[by] > amount:
        made[by] -= amount
    else:
        made.pop(by, None)


def begin_epoch(ledger: Ledger) -> None:
    """Begin to count the rows of a new table of Idempotency-Keys; the counts so far become those of the previous
    table."""
    ledger.made.pop(KEYS_BEFORE.name, None)
    if KEYS.name in ledger.made:
        ledger.made[KEYS_BEFORE.name] = ledger.made.pop(KEYS.name)
