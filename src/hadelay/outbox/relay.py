"""The relay: publishes the rows of an outbox, and deletes each row after the cluster's answer.

A step takes rows, sends them in one batch, each under its own Idempotency-Key, and writes down the answers. A relay
that is killed in between leaves its rows in the table: the next one sends them again, and the cluster answers as it did
the first time, for as long as it remembers keys (limits.idempotency_window_ms, an hour).
"""

import contextlib
import logging
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hadelay.client import Client
from hadelay.client.apart import put_apart
from hadelay.client.putoptions import Put
from hadelay.errors import Conflict, Forbidden, HadelayError, NotFound, Unauthorized
from hadelay.healthpage import served
from hadelay.outbox.database import LATEST_MS, Database, Outcome, Status
from hadelay.outbox.health import Health
from hadelay.outbox.rows import Row, check_texts, put_of

log = logging.getLogger("hadelay.outbox")

#: Limit of the rows that one step takes.
BATCH = 500
#: Interval, in seconds, of looking for new rows while the database sends no notification of new rows.
POLL_S = 1.0
#: Interval, in seconds, of counting the rows for health and metrics.
_TELL_S = 5.0
#: Limit, in seconds, of the time for the cancels and reschedules of one step, and again for its publishes if they are
#: sent one by one; the rest is left to the next step. Twice this limit plus the client's timeout must be less than
#: HOLD_S of outbox/database.py.
_BY_KEY_S = 15.0
#: First and longest wait, in seconds, before a row is tried again, or before the next step after an error. Each wait is
#: twice the previous one.
_FIRST_S, _LONGEST_S = 0.5, 60.0


class Step(NamedTuple):
    """Result of a step: numbers of rows by outcome."""

    done: int
    #: Cancels and reschedules that found no pending message; counted in `done`, too.
    missed: int
    later: int
    refused: int

    @property
    def taken(self) -> int:
        return self.done + self.later + self.refused


class Relay:
    """Relays one outbox to one cluster. Belongs to one thread."""

    def __init__(self, connect: Callable[[], Database], client: Client, *, batch: int = BATCH) -> None:
        """connect: opens a connection to the database; called again after an error of the database."""
        self._connect = connect
        self._client = client
        self._batch = batch
        self.health = Health()
        self._database: Database | None = None
        #: Number of relayed rows since the start by outcome (done, missed, later, refused), and number of failed steps
        #: (`failed`).
        self.counts = Counter[str]()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def step(self) -> Step:
        """Take one batch of waiting rows, and publish, cancel or reschedule as they say.

        Raises what ends a whole step: errors of the driver, and the client's if no node answers or the token is wrong.
        Rows stay as they were then.
        """
        database = self._opened()
        try:
            rows = database.take(_now_ms(), self._batch)
            if not rows:
                database.leave()
                return Step(0, 0, 0, 0)
            outcome, missed = self._relay(rows)
            database.settle(outcome)
        except HadelayError:
            database.leave()
            raise
        except BaseException:
            # The connection may be broken, or within a transaction: the next step opens a new one.
            self.close()
            raise
        step = Step(len(outcome.done), missed, len(outcome.later), len(outcome.refused))
        self.counts.update(step._asdict())
        return step

    def drain(self) -> Step:
        """Relay until only refused rows and rows that wait for their next try are left; for tests and small programs.
        Raises the same errors as `step`."""
        total = Step(0, 0, 0, 0)
        while (step := self.step()).taken:
            total = Step(*(a + b for a, b in zip(total, step, strict=True)))
        return total

    def status(self) -> Status:
        return self._opened().status(_now_ms())

    def run(self, stop: threading.Event) -> None:
        """Relay until `stop` is set. Errors are logged, and followed by a wait that grows to a minute."""
        failures, said = 0, -_TELL_S
        while not stop.is_set():
            try:
                idle = self.step().taken == 0
                if time.monotonic() > said + _TELL_S:
                    self.health.say(self.status(), self.counts)
                    said = time.monotonic()
                if idle:
                    self._opened().wait(POLL_S)
                if failures:
                    log.info("the outbox is relayed again")
                failures = 0
            except Exception as error:
                self.counts["failed"] += 1
                self._tell_failed(error)
                # Close the connection even if the database works: MySQL ends a connection that is idle for a minute.
                self.close()
                wait_s = _backoff_s(failures)
                log.warning(
                    "the outbox is not relayed: %s: %s; next try in %.1f s", type(error).__name__, error, wait_s
                )
                failures += 1
                stop.wait(wait_s)
        self.close()

    def _tell_failed(self, error: Exception) -> None:
        """Update the metrics after a failed step, too: operators read them while no step succeeds."""
        status = None
        if isinstance(error, HadelayError):  # the cluster has failed: read the numbers of rows if the database answers
            with contextlib.suppress(Exception):
                status = self.status()
        self.health.say(status, self.counts)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the relay runs in a thread of this process: for tests and small programs."""
        stop = threading.Event()
        thread = threading.Thread(target=self.run, args=(stop,), name="hadelay outbox", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _opened(self) -> Database:
        if self._database is None:
            self._database = self._connect()
        return self._database

    def _relay(self, rows: list[Row]) -> tuple[Outcome, int]:
        outcome, missed = Outcome([], [], [], []), 0
        puts: list[tuple[Row, Put]] = []
        until = time.monotonic() + _BY_KEY_S
        for row in rows:
            try:
                check_texts(row)
                if row.action == "put":
                    puts.append((row, put_of(row)))
                elif time.monotonic() < until:
                    missed += not self._by_key(row)
                    outcome.done.append(row.id)
                    if row.action == "cancel" and row.message_key is not None:
                        outcome.cancels.append((row.id, row.topic, row.message_key))
            except (HadelayError, ValueError, TypeError, RecursionError) as error:
                _judge(outcome, row, error)
        results = put_apart(self._client, [put for _, put in puts], _BY_KEY_S)
        for (row, _), result in zip(puts, results, strict=False):  # rows without a result are left to the next step
            _judge(outcome, row, result)
        return outcome, missed

    def _by_key(self, row: Row) -> bool:
        """Cancel or reschedule the row's message. False if no message with the key is pending."""
        if not row.message_key:
            raise ValueError(f"to {row.action} a message, the row needs its message_key")
        try:
            if row.action == "cancel":
                self._client.cancel(topic=row.topic, key=row.message_key)
            elif row.due_ms is None:
                raise ValueError("to reschedule a message, the row needs due_ms")
            else:
                self._client.reschedule(topic=row.topic, key=row.message_key, at=row.due_ms)
        except (NotFound, Conflict) as error:
            log.info("row %d, %s of %s/%s: %s", row.id, row.action, row.topic, row.message_key, error)
            return False
        return True


def run_until_signal(relay: Relay, health: str | None) -> None:
    """Run the relay until SIGTERM or SIGINT; the step in progress is finished first. health: HOST:PORT for /healthz and
    /metrics."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with served(relay.health.page, health) if health else contextlib.nullcontext():
        relay.run(stop)


def _judge(outcome: Outcome, row: Row, result: object) -> None:
    """Add the row to the list for its result in `outcome`: done, later or refused. Raises errors that concern all rows,
    such as an unreachable cluster or an invalid token."""
    if not isinstance(result, Exception):
        outcome.done.append(row.id)
    elif isinstance(result, HadelayError) and not _final(result):
        if not result.of_a_node or isinstance(result, Unauthorized):
            raise result
        wait_ms = min(LATEST_MS, max(result.retry_after_ms or 0, round(_backoff_s(row.tries) * 1000)))
        outcome.later.append((row.id, _now_ms() + wait_ms))
        log.info("row %d, topic %s: %s; next try in %d ms", row.id, row.topic, result, wait_ms)
    else:
        outcome.refused.append((row.id, f"{type(result).__name__}: {result}"))
        log.error("row %d, topic %s, is refused: %s", row.id, row.topic, result)


def _final(error: HadelayError) -> bool:
    """Whether the cluster would refuse the row again. True for Forbidden, too: the token may get the missing right, but
    the cluster remembers the refusal under the row's Idempotency-Key."""
    return isinstance(error, Forbidden) or (
        error.of_a_node and not error.retryable and error.outcome_known and not isinstance(error, Unauthorized)
    )


def _backoff_s(failures: int) -> float:
    return min(_LONGEST_S, _FIRST_S * float(1 << min(failures, 10))) * random.uniform(0.75, 1.25)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
