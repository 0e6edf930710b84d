"""The result backend: the ack of a message carries its result."""

import time
from typing import Any

import msgspec
from dramatiq.results import ResultBackend, ResultFailure, ResultMissing, ResultTimeout
from dramatiq.results.backend import DEFAULT_TIMEOUT
from dramatiq.results.result import wrap_exception
from msgspec import UNSET

from hadelay.client import exactjson
from hadelay.client.background import wait
from hadelay.client.queues import last_of
from hadelay.dramatiq.broker import HadelayBroker, Leased
from hadelay.errors import NotFound
from hadelay.model import MAX_RESULT

#: Limit, in seconds, of the time that one request waits for a result.
_LONG_POLL_S = 20.0
#: First and longest pause, in seconds, before the next look-up of a message that is not published yet.
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class HadelayBackend(ResultBackend):
    """Result backend. Results are JSON of at most 64 KiB, and are kept with the messages of a broker: for the topic's
    retention, or for 24 h if the topic has none. `result_ttl` has no effect."""

    def __init__(self, broker: HadelayBroker) -> None:
        super().__init__()
        self._broker = broker

    def store_result(self, message: Leased, result: Any, ttl: int) -> None:
        """Store a result, for the ack to take along. Stores an error instead if the result is no JSON or is too
        large."""
        try:
            encoded = exactjson.encode(result, "result")
            if len(encoded) > MAX_RESULT:
                raise ValueError(f"the result has {len(encoded)} bytes of JSON; at most {MAX_RESULT} are kept")
        except (ValueError, TypeError) as error:
            encoded = msgspec.json.encode(wrap_exception(error))
        message.result = encoded

    def store_exception(self, message: Leased, exception: Exception, ttl: int) -> None:
        """Store nothing: the dead letter has class and text of the exception."""

    def get_result(self, message: Any, *, block: bool = False, timeout: int | None = None) -> Any:
        """Get the result of a message. block: wait for it, also if the message is not published yet, such as the last
        one of a pipeline. timeout: in milliseconds. Raises ResultMissing, ResultTimeout, or ResultFailure if the
        message failed, was cancelled or expired."""
        until = time.monotonic() + (DEFAULT_TIMEOUT if timeout is None else timeout) / 1000
        client, topic = self._broker.client, self._broker.topic(message.queue_name)
        pause_s = _PAUSE_S
        while True:
            try:
                found = wait(last_of(client._async(), topic, message.message_id))
            except NotFound:
                if not block:
                    raise ResultMissing(message) from None
                if (left_s := until - time.monotonic()) <= 0:
                    raise ResultTimeout(message) from None
                time.sleep(min(pause_s, left_s))
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
                continue
            if found.result is not UNSET:
                return self.unwrap_result(found.result)
            if found.state in ("dead", "cancelled", "expired"):
                reasons = [event.reason for event in found.history if event.reason]
                kind, _, text = (reasons[-1] if reasons else found.state).partition(": ")
                raise ResultFailure(f"actor raised {kind}: {text}", kind, text)
            if found.state == "acked" or not block:
                raise ResultMissing(message)
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise ResultTimeout(message)
            client.get(found.id, wait=min(left_s, _LONG_POLL_S))
