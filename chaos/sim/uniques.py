"""Publishers of one message per key and period (unique_for) in the simulated world, and the check of that promise.

U1  Within the period of a key one message is stored; a publish is dropped only within the period, for the message that
    began it, or for a pending message with the key. A model, which shares no code with the ledger, follows the log.
"""

import random
from collections.abc import Callable
from typing import Any

from chaos.sim.door import Client
from hadelay.api.service import Actor, PublishDone, ReceiveRequest, answered
from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.meta import Meta, pack
from hadelay.codec.results import PublishResult, RowCode
from hadelay.errors import HadelayError
from hadelay.ledger.describe import describe
from hadelay.ledger.state import Ledger
from hadelay.ledger.unique import PERIOD, UNIQ
from hadelay.model import KEEP, PENDING, REPLACE, Draft
from hadelay.server.service.node import NodeService

TOPIC = "once"
#: Share of runs with such publishers, number of their keys, and their periods in ms.
USED, _KEYS, _PERIODS_MS = 0.3, 3, (200, 1_000, 2_500)
_EXPIRES_MS = 60_000


class UniqueClient(Client):
    """Publishes and consumes. In the drain (`good`: the end of the run, without faults), only consumes."""

    def start(self) -> None:
        self.stopped = random.Random(f"{self.cluster.seed} uniques").random() >= USED
        #: Whether the topic has its settings.
        self.made = False
        if not self.stopped:
            self._next()

    def _make(self) -> None:
        """Let the topic end when it is unused, which takes a suspension of all machines, or the hours at the end."""

        def replied(result: Any, error: HadelayError | None) -> None:
            self.made |= error is None

        config = {"expires_after_ms": _EXPIRES_MS}
        self.ask(lambda service: service.topics.put_topic(TOPIC, config, Actor()), replied)

    def _next(self) -> None:
        self.world.after(0.3 if self.good else self.random.expovariate(1 / 0.12), self._act)

    def _act(self) -> None:
        if self.stopped:
            return
        part = self.next_act()
        if not self.made:
            self._make()
        elif self.good or self.random.random() < 0.4:
            self._take()
        elif self.cluster.parts.take(part):
            self._publish()
        self._next()

    def _publish(self) -> None:
        """Publish one to three messages, at times some of them without unique_for, or to replace a pending one."""
        rng, drafts = self.random, []
        for _ in range(rng.choice((1, 1, 1, 3))):
            key, plain = f"o{rng.randrange(_KEYS)}", rng.random() < 0.2
            mode = rng.choice((KEEP, REPLACE)) if plain else KEEP
            unique_ms = 0 if plain else rng.choice(_PERIODS_MS)
            due_ms, meta = rng.choice((0, 0, 400)), pack(Meta(key=key))
            drafts.append(
                Draft(TOPIC, due_ms, True, 0, 0, meta, b"once", None, key.encode(), mode, unique_ms=unique_ms)
            )
        idem = f"{self.name}.{self.acts}".encode() if rng.random() < 0.3 else None
        self._send(drafts, idem, 3)

    def _send(self, drafts: list[Draft], idem: bytes | None, tries: int) -> None:
        async def publish(service: NodeService) -> int:
            def begin(done: PublishDone) -> None:
                service.publish(drafts, idem, done)

            return len((await answered(begin)).duplicates)

        def replied(dropped: int | None, error: HadelayError | None) -> None:
            self.note(f"publish of {[d.key for d in drafts]}: {error.type if error else f'{dropped} dropped'}")
            if error is None:
                self.history.count("unique publishes dropped", dropped or 0)
            if error is not None and idem is not None and tries and not self.stopped:
                self.world.after(0.2, self._send, drafts, idem, tries - 1)

        self.ask(publish, replied)

    def _take(self) -> None:
        poll = ReceiveRequest([TOPIC], self.name, b"%d" % int(self.world.now * 1000), 20, 0, 900)

        async def take(service: NodeService) -> int:
            if not (await service.cluster.find_leader()).here:
                return 0
            handed = await service.consume.receive(poll)
            handed.answered()
            if handed.messages:
                await service.consume.settle("ack", [message.lease for message in handed.messages], None)
            return len(handed.messages)

        def replied(taken: int | None, error: HadelayError | None) -> None:
            self.history.count("unique messages taken", taken or 0)

        self.ask(take, replied)


class Uniques:
    """Model of the periods, and check U1 of each committed publish with a unique_for."""

    def __init__(self, decide: Callable[..., None]) -> None:
        """decide: as of `Machines.decide`."""
        self._decide = decide
        #: Topic's number and lives, and hash of a key → (id, end in Unix ms) of the key's last period; None until the
        #: first entry.
        self._periods: dict[bytes, tuple[int, int]] | None = None

    def begin(self, ledger: Ledger) -> None:
        """Take over the periods that the cluster had when it was restored."""
        if self._periods is None:
            known = ((key, PERIOD.unpack(value)) for key, value in ledger.tables.range(UNIQ, limit=1 << 20))
            self._periods = {key: (first_id, until_ms) for key, (first_id, _, until_ms) in known}

    def committed(self, body: memoryview, result: Any, ledger: Ledger) -> None:
        """A PUBLISH2 was applied, and `ledger` is the state after its entry."""
        command = decode(Command.PUBLISH2, body)
        if not isinstance(result, PublishResult) or self._periods is None:
            return
        hashes = dict(zip(command.client_keys["row"].tolist(), command.client_keys["hash"], strict=True))
        covered: set[int] = set()
        for key in command.keys:
            covered.update(range(int(key["first"]), int(key["first"]) + int(key["count"])))
        for row, for_ms in zip(command.uniques["row"].tolist(), command.uniques["for_ms"].tolist(), strict=True):
            topic = ledger.known_topic(command.topics[int(command.rows["topic"][row])])
            if result.codes[row] != RowCode.OK or topic is None:
                continue
            key = topic.number.to_bytes(4, "big") + topic.lives.to_bytes(2, "big") + hashes[row].tobytes()
            first_id, until_ms = self._periods.get(key, (0, 0))
            within, found = until_ms > ledger.now_ms, int(result.ids[row])
            if not result.duplicate[row]:
                text = f"{found:x} is stored in the period of {first_id:x}, which lasts {until_ms - ledger.now_ms} ms"
                self._decide("U1 unique, stored", within, text, found, first_id)
                self._periods[key] = (found, ledger.now_ms + for_ms)
            elif row not in covered:
                wrong = found != first_id if within else not _was_pending(ledger, found)
                text = f"a publish is dropped for {found:x}; the period of {first_id:x} ended at {until_ms}"
                self._decide("U1 unique, dropped", wrong, text, found, first_id)


def _was_pending(ledger: Ledger, message_id: int) -> bool:
    """Whether the message was pending before the last entry: it is, or it ended at the time of that entry."""
    known = describe(ledger, message_id)
    return known is not None and (known.state in PENDING or known.history[-1].at_ms == ledger.now_ms)
