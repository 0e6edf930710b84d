"""The outbox's table in a database: takes the rows to relay, and stores the outcome of each row.

A connection is in autocommit mode, and transactions are written out, so that any DB-API driver will do. PostgreSQL and
MySQL lock the rows that a relay takes (FOR UPDATE SKIP LOCKED) for the length of one step, and give them to another
relay when the first one's connection ends. SQLite locks no rows, and a step must not hold up the program's writes: a
file beside the database lets in one relay alone.
"""

import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from hadelay.errors import ConfigError
from hadelay.outbox.rows import COLUMNS, MAX_BODY, Row
from hadelay.outbox.tables import CHANNEL, TABLE, Dialect, create

_SCHEMES: dict[str, Dialect] = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
#: Limit of the stored text of a refusal, in characters.
_LONGEST = 1_000
#: Time in seconds after which the database ends the connection of a relay that is gone or stuck, which frees the rows
#: that it took.
HOLD_S = 60
#: Limit, in bytes, of the bodies and options of all rows of one step: the relay has them in memory, and must publish
#: them within HOLD_S.
STEP_BYTES = 8 << 20
#: Limit of the wait before the next try of a row, in ms. A row whose next try is later was written with a wrong clock,
#: and is taken at once.
LATEST_MS = 600_000
#: Columns whose values, written by programs, may be large.
_LARGE = ("body", "body_bytes", "options")
#: Time in seconds for which SQLite waits for the end of another program's transaction.
_BUSY_S = 10.0


class Refused(NamedTuple):
    """A row that the cluster refused for good; `hadelay outbox retry` tries the row again."""

    id: int
    action: str
    topic: str
    message_key: str | None
    created_ms: int
    refusal: str


class Status(NamedTuple):
    #: Number of rows that wait for the relay, including rows to try again.
    waiting: int
    #: Number of waiting rows whose last try failed.
    retrying: int
    #: Age of the oldest waiting row, in ms.
    oldest_ms: int
    #: Number of rows that the cluster refused for good.
    refused: int


class Outcome(NamedTuple):
    """Outcomes of the rows of one step, for `Database.settle`."""

    #: Ids of the finished rows, to be deleted.
    done: list[int]
    #: Rows to try again: id, and time of the next try in Unix ms.
    later: list[tuple[int, int]]
    #: Rows that the cluster refused: id and reason.
    refused: list[tuple[int, str]]
    #: Finished cancels: id, topic and key. Older refused rows with this key are deleted, too: a retry must not publish
    #: a cancelled message.
    cancels: list[tuple[int, str, str]]


#: SQL statements that set up a new connection.
_SESSION: dict[Dialect, tuple[str, ...]] = {
    "postgresql": (
        f"set idle_in_transaction_session_timeout = '{HOLD_S}s'",
        # The database's default isolation may be stricter, and then steps of two relays would abort each other.
        "set session characteristics as transaction isolation level read committed, read write",
        f"listen {CHANNEL}",
    ),
    "mysql": ("set session transaction isolation level read committed", f"set session wait_timeout = {HOLD_S}"),
    "sqlite": (),
}


class Database:
    """A connection to the outbox's database, for one thread."""

    def __init__(self, dialect: Dialect, connection: Any, lock: int | None = None) -> None:
        """connection: from a DB-API driver, in autocommit mode. lock: file descriptor from `lock_file`; `close` closes
        it."""
        self.dialect = dialect
        self.connection = connection
        self._lock = lock
        self._mark = "?" if dialect == "sqlite" else "%s"
        #: Whether a transaction is open.
        self._open = False
        if dialect == "sqlite":
            # SQLite stores texts that are not UTF-8: decode them without an error, so that one such row does not stop
            # the relay.
            connection.text_factory = lambda data: data.decode(errors="surrogateescape")
        try:
            for statement in _SESSION[dialect]:
                self._run(statement)
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float) -> None:
        """Wait until PostgreSQL notifies of new rows (with psycopg 3), at most `seconds`. With other databases, sleep
        for `seconds`."""
        notifies = getattr(self.connection, "notifies", None)
        if not callable(notifies):
            time.sleep(seconds)
            return
        # Exhaust the iterator, which takes all notifications that have arrived: otherwise a busy relay would query the
        # table once per notification.
        for _ in notifies(timeout=seconds, stop_after=1):
            pass

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.connection.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def create(self) -> None:
        """Create the table. Raises the driver's error if the table exists."""
        for statement in create(self.dialect):
            self._run(statement)

    def take(self, now_ms: int, limit: int) -> list[Row]:
        """Take up to `limit` rows of up to STEP_BYTES, the oldest first. Of the rows with one key, only the oldest is
        taken, so that changes of a message take effect in the order in which the program wrote them. Call `settle` or
        `leave` afterwards."""
        if self.dialect != "sqlite":
            self._run("begin")
            self._open = True
        locking = "" if self.dialect == "sqlite" else " for update skip locked"
        size = " + ".join(f"coalesce({self._bytes_of(column)}, 0)" for column in _LARGE)
        found = self._run(
            f"select id, {size} from {TABLE} r where refusal is null"
            f" and (retry_ms <= {self._mark} or retry_ms > {self._mark})"
            f" and (message_key is null or not exists (select 1 from {TABLE} e where e.topic = r.topic"
            f" and e.message_key = r.message_key and e.id < r.id and e.refusal is null))"
            f" order by id limit {self._mark}{locking}",
            (now_ms, now_ms + LATEST_MS, limit),
        )
        ids, left = list[int](), STEP_BYTES
        for id, row_bytes in found:
            left -= row_bytes if row_bytes <= MAX_BODY else 0
            if left < 0 and ids:
                break
            ids.append(id)
        if not ids:
            return []
        # Do not fetch bodies that are too large: the relay refuses such a row, and the refusal only needs the size.
        wanted = ", ".join(f"case when {size} <= {MAX_BODY} then {c} end" if c in _LARGE else c for c in COLUMNS)
        marks = ", ".join([self._mark] * len(ids))
        rows = self._run(f"select {wanted}, {size} from {TABLE} where id in ({marks}) order by id", ids)
        return [Row(*row) for row in rows]

    def _bytes_of(self, column: str) -> str:
        return f"length(cast({column} as blob))" if self.dialect == "sqlite" else f"octet_length({column})"

    def settle(self, outcome: Outcome) -> None:
        """Store the outcomes of the taken rows in the table, and commit."""
        if not self._open:
            self._run("begin immediate" if self.dialect == "sqlite" else "begin")
            self._open = True
        self._many(f"delete from {TABLE} where id = {self._mark}", [(id,) for id in outcome.done])
        self._many(
            f"update {TABLE} set tries = tries + 1, retry_ms = {self._mark} where id = {self._mark}",
            [(retry_ms, id) for id, retry_ms in outcome.later],
        )
        self._many(
            f"update {TABLE} set tries = tries + 1, refusal = {self._mark} where id = {self._mark}",
            [(text[:_LONGEST].replace("\0", "�"), id) for id, text in outcome.refused],
        )
        self._many(
            f"delete from {TABLE} where id < {self._mark} and topic = {self._mark} and message_key = {self._mark}",
            outcome.cancels,
        )
        self._run("commit")
        self._open = False

    def leave(self) -> None:
        """Give back the taken rows unchanged: another step or relay may take them."""
        if self._open:
            self._open = False
            self._run("rollback")

    def status(self, now_ms: int) -> Status:
        waiting, retrying, oldest_ms, refused = self._run(
            "select coalesce(sum(case when refusal is null then 1 else 0 end), 0),"
            " coalesce(sum(case when refusal is null and tries > 0 then 1 else 0 end), 0),"
            " min(case when refusal is null then created_ms end),"
            f" coalesce(sum(case when refusal is null then 0 else 1 end), 0) from {TABLE}"
        )[0]
        age_ms = max(0, now_ms - int(oldest_ms)) if oldest_ms is not None else 0
        return Status(int(waiting), int(retrying), age_ms, int(refused))

    def refused(self, limit: int) -> list[Refused]:
        rows = self._run(
            f"select {', '.join(Refused._fields)} from {TABLE} where refusal is not null order by id"
            f" limit {self._mark}",
            (limit,),
        )
        shown: Iterator[list[Any]] = (
            [v.encode(errors="replace").decode() if isinstance(v, str) else v for v in row] for row in rows
        )
        return [Refused(*row) for row in shown]

    def retry(self) -> int:
        """Make all refused rows wait again, under new Idempotency-Keys: the cluster remembers a refusal under the old
        key. Returns the number of rows."""
        fresh = {"postgresql": "gen_random_uuid()::text", "mysql": "uuid()", "sqlite": "lower(hex(randomblob(16)))"}
        cursor = self.connection.cursor()
        try:
            cursor.execute(
                f"update {TABLE} set refusal = null, retry_ms = 0, request = {fresh[self.dialect]}"
                " where refusal is not null"
            )
            return cast(int, cursor.rowcount)
        finally:
            cursor.close()

    def _run(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        cursor = self.connection.cursor()
        try:
            cursor.execute(statement, values) if values else cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            cursor.close()

    def _many(self, statement: str, values: list[tuple[Any, ...]]) -> None:
        if values:
            cursor = self.connection.cursor()
            try:
                cursor.executemany(statement, values)
            finally:
                cursor.close()


def connect(url: str, *, relay: bool = False) -> Database:
    """Connect to postgresql://…, mysql://… (also mariadb://…) or sqlite:///FILE. The name of a driver in the scheme, as
    in SQLAlchemy's postgresql+psycopg://, is ignored. relay: lock an SQLite file against other relays.

    ConfigError if the URL or its driver is wrong; errors of the driver if there is no connection.
    """
    scheme, _, rest = url.partition("://")
    dialect = _SCHEMES.get(scheme.partition("+")[0])
    if dialect is None or not rest:
        raise ConfigError("the outbox needs a URL such as postgresql://USER@HOST/NAME, mysql://… or sqlite:///FILE")
    try:
        if dialect == "postgresql":
            return Database(dialect, _postgresql(f"postgresql://{rest}"))
        if dialect == "mysql":
            return Database(dialect, _mysql(f"mysql://{rest}"))
    except ModuleNotFoundError as error:
        raise ConfigError(f"this outbox needs {error.name}: pip install 'hadelay[outbox-{dialect}]'") from None
    path = unquote(rest.partition("?")[0]).removeprefix("/")
    if not os.path.isfile(path):
        raise ConfigError(
            f"no SQLite database at {path or 'the empty path'}: use sqlite:///app.db, or sqlite:////srv/app.db"
        )
    lock = lock_file(path) if relay else None
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    return Database(dialect, connection, lock)


def lock_file(path: str) -> int:
    """Lock the SQLite database at `path` against other relays, until the returned file descriptor is closed.
    ConfigError if another relay has the lock."""
    lock = os.open(f"{path}-outbox", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"another relay works on {path}; SQLite allows only one at a time") from None
    return lock


def _postgresql(url: str) -> Any:
    import psycopg

    return psycopg.connect(
        url,
        autocommit=True,
        connect_timeout=10,
        application_name="hadelay outbox",
        # With these settings, a vanished server is noticed within a minute.
        keepalives_idle=20,
        keepalives_interval=10,
        keepalives_count=3,
        tcp_user_timeout=HOLD_S * 1000,
    )


def _mysql(url: str) -> Any:
    import pymysql

    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    if unknown := min(query.keys() - {"ssl_ca"}, default=""):
        raise ConfigError(
            f"mysql://…?{unknown}: unknown option; the only one is ssl_ca=FILE, the server's CA certificate"
        )
    return pymysql.connect(
        host=parts.hostname or "127.0.0.1",
        port=parts.port or 3306,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=unquote(parts.path.lstrip("/")),
        autocommit=True,
        charset="utf8mb4",
        connect_timeout=10,
        read_timeout=HOLD_S,
        write_timeout=HOLD_S,
        ssl_ca=query.get("ssl_ca"),
        ssl_verify_cert=True if query else None,
        ssl_verify_identity=True if query else None,
    )
