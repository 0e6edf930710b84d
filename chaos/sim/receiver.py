"""The receiver of a webhook in the simulated world, and the HTTP calls that lead to it.

A call is a hand-out: what is promised of those holds for it (chaos/sim/promises.py), and two promises more: a message
has one call at a time, and none before the time of a Retry-After.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from chaos.sim.door import Served
from chaos.sim.history import HandOut, number_of
from chaos.sim.machines import Process
from hadelay.model import decode_id
from hadelay.server.webhooks.calls import ALERT_TYPE, CallRequest, Done, Reply
from hadelay.server.webhooks.pool import CONSUMER
from hadelay.server.webhooks.queues import CallJob

#: Share of runs in which the administrator's topic has a webhook.
HOOKED = 0.25
#: Webhook setting of the administrator's topic.
SETTINGS: dict[str, Any] = {"url": "https://receiver.example/jobs", "timeout_ms": 800}
#: Alert setting of the administrator's topic.
ALERT: dict[str, Any] = {"url": "https://receiver.example/deaths"}
#: Retry-After in answers, in ms: longer than the topic's backoff, shorter than the rest of a lease after a call.
RETRY_AFTER_MS = 1_500
#: Behaviours of the receiver while it is unreliable, with weights: HTTP status, no answer (silence), or connection
#: refused.
_REACTIONS = {"200": 0.3, "200 late": 0.2, "500": 0.1, "429": 0.2, "silence": 0.1, "refused": 0.1}


class Receiver:
    """Receiver of webhook calls. In the drain (`good`: the end of the run, without faults), it accepts every call at
    once."""

    def __init__(self, cluster: Served, fails: Callable[[bytes], bool]) -> None:
        """fails: whether every consumer fails to process the message with this body."""
        self.cluster, self.world, self.history = cluster, cluster.world, cluster.history
        self.random = random.Random(f"{cluster.seed} receiver")
        self.good, self._fails = False, fails
        #: Lease (term, seq, position) → call made with this lease.
        self._calls: dict[tuple[int, int, int], HandOut] = {}
        #: Alerts that the receiver took: (number of the first death, number after the last death, deaths that the alert
        #: counts).
        self.alerts: list[tuple[int, int, int]] = []

    def reaction(self, body: bytes) -> str:
        if self.good:
            return "200"
        if self._fails(body):
            return "500"
        return self.random.choices(list(_REACTIONS), list(_REACTIONS.values()))[0]

    def called(self, process: Process, request: CallRequest, job: CallJob) -> HandOut:
        """Record a webhook call that arrived."""
        node, headers = process.node, request.headers
        assert node is not None
        (term, seq, position, _, _), now = job.lease, self.world.now
        mono = process.runtime.monotonic()
        now_ms, grant = node.clock.read(mono), node.ledger.grants.get((term, seq))
        until_ms = now_ms + round((job.ends - mono) * 1000)
        if grant is not None:
            until_ms = int(grant.rows["until_ms"][position])
        tags = headers.get("hadelay-tags", "")
        call = self._calls[term, seq, position] = HandOut(
            id=decode_id(headers["webhook-id"]), attempt=int(headers["hadelay-attempt"]), term=term, seq=seq,
            position=position, lease="", node=node.name, consumer=CONSUMER, request_id=b"%d.%d" % (term, seq),
            answered=now, now_ms=now_ms, until_ms=until_ms, deliver_at_ms=job.deliver_at_ms,
            redelivered="hadelay-redelivered" in headers, leading=term, body=request.body,
            tags=tuple(tags.split(",")) if tags else (), received=now, ended=now + request.timeout_s,
        )  # fmt: skip
        self.history.hand_outs.append(call)
        self.history.count("handed out")
        what = f"message {number_of(call.body)}, attempt {call.attempt}"
        self.history.note(now, CONSUMER, f"{node.name} calls about {what}, grant {term}.{seq}", frozenset({call.id}))
        return call

    def answer(self, call: HandOut, status: str) -> None:
        call.ended = self.world.now
        if status == "200":
            call.ack_invoked = self.world.now
        self.history.note(self.world.now, CONSUMER, f"answers {status}", frozenset({call.id}))

    def settled(self, lease: tuple[int, int, int]) -> None:
        """Note that an ack of this lease is committed."""
        call = self._calls.get(lease)
        if call is not None and call.acked is None:
            call.acked = self.world.now


class Caller:
    """HTTP caller of one process: its method `call` makes a webhook call (webhooks.calls.Call), without effect once the
    process has ended."""

    def __init__(self, receiver: Receiver, process: Process) -> None:
        self.receiver, self.process, self.door = receiver, process, receiver.cluster.door

    def call(self, request: CallRequest, done: Done) -> None:
        if request.headers["ce-type"] == ALERT_TYPE:
            self._alert(request, done)
            return
        assert isinstance(done, partial)
        (job,) = (one for one in done.args if isinstance(one, CallJob))
        receiver, world, runtime = self.receiver, self.receiver.world, self.process.runtime
        began, reaction, over = world.now, receiver.reaction(request.body), False
        receiver.history.count(f"webhook {reaction}")
        call = receiver.called(self.process, request, job) if reaction != "refused" else None

        def end(status: int, reason: str, retry_after_ms: int | None = None) -> None:
            """End the call: pass the reply to the node."""
            nonlocal over
            if not over:
                over = True
                if call is not None and reason:
                    call.nack_invoked, call.retry_after_ms = world.now, retry_after_ms or 0
                done(Reply(status, reason, retry_after_ms, world.now - began))

        runtime.call_later(request.timeout_s, end, 0, "timeout")
        if call is None:
            self._travel(end, 0, "connection refused")
        elif reaction != "silence":
            handling_s = receiver.random.uniform(*((0.1, 0.75) if reaction == "200 late" else (0.001, 0.03)))
            world.after(handling_s, self._answer, call, reaction[:3], end)

    def _alert(self, request: CallRequest, done: Done) -> None:
        """Handle the call of an alert: accept it or, while the receiver is unreliable, sometimes refuse it; answer
        after a delay in any case."""
        receiver, world = self.receiver, self.receiver.world
        failed = not receiver.good and receiver.random.random() < 0.1
        seconds = receiver.random.uniform(0.01, 0.6)

        def arrive() -> None:
            lost = receiver.cluster.lost_answers and receiver.random.random() < receiver.cluster.lost_answers
            if not failed:
                began, upto = map(int, request.headers["webhook-id"].split("-")[-2:])
                receiver.alerts.append((began, upto, json.loads(request.body)["died"]))
                receiver.history.count("alert")
            reply = Reply(500, "HTTP 500", None, seconds) if failed or lost else Reply(200, "", None, seconds)
            world.after(self.door.latency(), done, reply, owner=self.process.runtime)

        world.after(seconds, arrive)

    def _answer(self, call: HandOut, status: str, end: Callable[..., None]) -> None:
        self.receiver.answer(call, status)
        lost = self.receiver.cluster.lost_answers
        if lost and self.receiver.random.random() < lost:
            self._travel(end, 0, "connection closed")
        else:
            reason = "" if status == "200" else f"HTTP {status}"
            self._travel(end, int(status), reason, RETRY_AFTER_MS if status == "429" else None)

    def _travel(self, end: Callable[..., None], *answer: object) -> None:
        self.receiver.world.after(self.door.latency(), end, *answer, owner=self.process.runtime)
