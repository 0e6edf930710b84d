"""Check of the promise about the delay of topics (setting `delay`).

D1  A message without a time of its own is due after the delay that its topic has in the log entry of the publish. A
    model, which shares no code with the ledger, follows the log.
"""

from collections.abc import Callable
from typing import Any

from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.publishcommand import RELATIVE
from hadelay.codec.results import Done, PublishResult, RowCode
from hadelay.ledger.state import Ledger

TOPIC = "later"


class OwnDelays:
    """Model of the delays of topics, and check D1 of each committed publish."""

    def __init__(self, decide: Callable[..., None]) -> None:
        """decide: counts a checked case of a promise and notes a violation, see `Machines.decide`."""
        self._decide = decide
        #: Name of a topic → its delay in ms; None until the first entry.
        self._delays: dict[str, int] | None = None

    def begin(self, ledger: Ledger) -> None:
        """Before the first entry: take over the topics' delays, which a restored cluster already has."""
        if self._delays is None:
            self._delays = {topic.name: topic.config.get("delay_ms") or 0 for topic in ledger.topics.all}

    def committed(self, kind: int, body: memoryview, result: Any, now_ms: int) -> None:
        """Update the model by a command that was just applied, and check D1. now_ms: cluster time of the command's
        entry."""
        if self._delays is None:
            return
        if kind == Command.AUDITED and isinstance(result, Done):
            audited = decode(kind, body)
            kind, body = audited.kind, audited.body
        if kind == Command.TOPIC_PUT and isinstance(result, Done):
            put = decode(kind, body)
            if "delay_ms" in put.config:
                self._delays[put.topic] = put.config["delay_ms"] or 0
        elif kind == Command.TOPIC_DELETE and isinstance(result, Done):
            self._delays.pop(decode(kind, body).topic, None)
        elif kind == Command.PUBLISH and isinstance(result, PublishResult):
            self._published(decode(kind, body), result, now_ms)

    def _published(self, command: Any, result: PublishResult, now_ms: int) -> None:
        assert self._delays is not None
        limited = {int(row["row"]) for row in command.client_keys if row["max_wait_ms"] > 0}
        for row, (when_ms, flags, number) in enumerate(command.rows[["when_ms", "flags", "topic"]].tolist()):
            own = flags & RELATIVE and when_ms < 0
            if not own or row in limited or result.codes[row] != RowCode.OK or result.duplicate[row]:
                continue
            name, due_ms = command.topics[number], int(result.deliver_at_ms[row])
            delay_ms = self._delays.get(name, 0)
            text = f"a message of {name}, whose delay is {delay_ms} ms, is due in {due_ms - now_ms} ms"
            self._decide("D1 delays", due_ms != now_ms + delay_ms, text, int(result.ids[row]))
