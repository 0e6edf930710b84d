"""`hadelay outbox`: relay what transactions wrote into a database's outbox (docs/howto/outbox.md)."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from typing import Annotated

from cyclopts import Parameter

from hadelay.cli.output import Limit, Printing, Remote, emit_json, note, say, table
from hadelay.client import Client
from hadelay.client.wire import ADAPTER_TIMEOUT_S
from hadelay.errors import ConfigError, HadelayError
from hadelay.outbox import Database, Relay, connect, create
from hadelay.outbox.relay import run_until_signal
from hadelay.outbox.tables import TABLE, Dialect


class _Absent(ConfigError):
    """Error: the outbox cannot be used now. Its database does not answer, refuses the user, or has no outbox table."""


Url = Annotated[
    str,
    Parameter(
        help="Database: postgresql://USER@HOST/NAME, mysql://USER@HOST/NAME or sqlite:///FILE. A password may be in "
        "the variable, which other users of this machine cannot see.",
        env_var="HADELAY_OUTBOX",
    ),
]


def run(
    url: Url,
    /,
    *,
    once: bool = False,
    health: str | None = None,
    remote: Remote = Remote(),
) -> int:
    """Publish the rows of an outbox, until SIGTERM or SIGINT. Several relays may run at once, except on SQLite.

    Args:
        once: Relay what there is, and end; exit code 1 if a row was refused or has to be tried again.
        health: Serve /healthz and /metrics at HOST:PORT.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with contextlib.suppress(_Absent):  # a database that is down may come back: the relay says so, and tries again
        _opened(url).close()
    with Client(remote.addresses(), remote.token, timeout=ADAPTER_TIMEOUT_S) as client:
        relay = Relay(lambda: _opened(url, relay=True), client)
        if not once:
            note(f"relaying the outbox to {', '.join(remote.addresses())}")
            run_until_signal(relay, health)
            return 0
        with _in_words():
            step = relay.drain()
        relay.close()
    if remote.output == "json":
        emit_json(step._asdict())
    else:
        say(f"{step.done:,} relayed, {step.later:,} to try again, {step.refused:,} refused")
    return 1 if step.later or step.refused else 0


def status(url: Url, /, *, limit: Limit = 10, printing: Printing = Printing()) -> int:
    """Show how many rows wait, how old the oldest is, and which rows the cluster refused. Exit code 1 if any is
    refused."""
    database = _opened(url)
    with contextlib.closing(database), _in_words():
        found, refused = database.status(time.time_ns() // 1_000_000), database.refused(limit or 1_000_000)
    if printing.output == "json":
        emit_json({**found._asdict(), "rows": [row._asdict() for row in refused]})
    else:
        age = f", the oldest for {found.oldest_ms / 1000:,.1f} s" if found.waiting else ""
        say(f"{found.waiting:,} wait{age}; {found.retrying:,} are tried again; {found.refused:,} are refused")
        if refused:
            table([row._asdict() for row in refused], ("id", "action", "topic", "message_key", "refusal"))
    return 1 if found.refused else 0


def retry(url: Url, /, *, printing: Printing = Printing()) -> int:
    """Try the refused rows again, for example after their topic's settings were changed."""
    database = _opened(url)
    with contextlib.closing(database), _in_words():
        count = database.retry()
    if printing.output == "json":
        emit_json({"retried": count})
    else:
        say(f"{count:,} rows wait again")
    return 0


def sql(database: Dialect, /) -> int:
    """Print the statements that create the table of an outbox, for a migration."""
    for statement in create(database):
        say(f"{statement};")
    return 0


def _opened(url: str, relay: bool = False) -> Database:
    with _in_words("no connection to the database: "):
        return connect(url, relay=relay)


@contextlib.contextmanager
def _in_words(begin: str = "") -> Iterator[None]:
    """Context that turns exceptions of a database driver into errors of one line, for the command line."""
    try:
        yield
    except (HadelayError, OSError):
        raise
    except Exception as error:
        text = begin + " ".join(str(error).split())
        if TABLE in text and ("exist" in text or "no such table" in text):
            text += ". `hadelay outbox sql` prints the statements that create the table"
        raise _Absent(text) from error
