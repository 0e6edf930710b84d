"""A simulated cluster whose leader calls simulated receivers: real nodes, simulated time, and answers from a script."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from chaos.sim.cluster import SimCluster
from hadelay.codec.ackparts import CallReply
from hadelay.codec.commands import encode_topic_put
from hadelay.codec.meta import Meta, pack
from hadelay.errors import HadelayError
from hadelay.ledger.views.describe import describe
from hadelay.model import Draft, decode_id
from hadelay.server.node import Node
from hadelay.server.webhooks.calls import CallRequest, Reply
from hadelay.server.webhooks.calls import Done as Called
from hadelay.server.webhooks.pool import Pool, Webhooks
from hadelay.version import FEATURE_LEVEL

ANSWER_S = 0.01


@dataclass
class Call:
    at: float
    node: str
    url: str
    request: CallRequest
    #: None: none yet, or nobody was there to hear it.
    answer: Reply | None = None
    answered: float | None = None

    @property
    def id(self) -> int:
        return decode_id(self.request.headers["webhook-id"])

    @property
    def attempt(self) -> int:
        return int(self.request.headers["hadelay-attempt"])


@dataclass
class World:
    """`script[url]`: what its receiver answers, call by call, the last one for ever; 200 when nothing is said."""

    cluster: SimCluster
    calls: list[Call] = field(default_factory=list)
    script: dict[str, list[str]] = field(default_factory=lambda: defaultdict(lambda: ["200"]))
    answer_s: Callable[[], float] = lambda: ANSWER_S
    alert_s: int = 60

    def __post_init__(self) -> None:
        self.hooks: dict[Node, Webhooks] = {}
        self.cluster.on_boot.append(self._attach)
        self.cluster.start_all()
        # Until the first leader has raised the feature level, a new cluster refuses webhooks.
        self.until(lambda: self.settle().ledger.level == FEATURE_LEVEL)
        self.began = self.cluster.world.now

    def _attach(self, node: Node) -> None:
        self.hooks[node] = Webhooks(node, Caller(self, node).call)

    def pool(self) -> Pool:
        """The leader's."""
        return self.hooks[self.settle()].pool

    @property
    def now(self) -> float:
        return self.cluster.world.now - self.began

    def run(self, seconds: float) -> None:
        self.cluster.world.run_for(seconds)

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        world = self.cluster.world
        world.run_until(world.now + seconds, lambda: bool(condition()))
        assert condition()

    def settle(self) -> Node:
        self.until(lambda: self.cluster.leader() is not None)
        leader = self.cluster.leader()
        assert leader is not None
        return leader

    def do(self, ask: Callable[[Node, Callable[..., None]], None]) -> Any:
        """Ask the leader, again and again until there is a definite answer."""
        answers: list[tuple[Any, HadelayError | None]] = []
        while not answers or answers[-1][1] is not None:
            count = len(answers)
            ask(self.settle(), lambda result, error=None: answers.append((result, error)))
            world = self.cluster.world
            world.run_until(world.now + 10, lambda before=count: len(answers) > before)  # type: ignore[misc]
        return answers[-1][0]

    def put(self, topic: str, **config: Any) -> Any:
        return self.do(lambda node, done: node.publishing.propose(encode_topic_put(topic, config), done))

    def publish(
        self, topic: str, *bodies: bytes, delay_ms: int = 0, callback: str | None = None, **meta: Any
    ) -> list[int]:
        packed = pack(Meta(cb=callback, **meta))
        drafts = [Draft(topic, delay_ms, True, 0, 0, packed, body, callback=callback is not None) for body in bodies]
        # One key: what is asked again is not stored twice.
        key = b"publish %d" % self.cluster.world.events
        receipts = self.do(lambda node, done: node.publishing.publish(drafts, key, done))
        assert not receipts.problems, receipts.problems
        return [int(one) for one in receipts.ids]

    def state(self, message_id: int) -> str:
        node = self.settle()
        found = describe(node.ledger, message_id, node.clock.read(node.runtime.monotonic()))
        return "gone" if found is None else found.state.name.lower()


class Caller:
    """Of one process: what it hears after it ended it does not hear."""

    def __init__(self, world: World, node: Node) -> None:
        self.world, self.node = world, node

    def call(self, request: CallRequest, done: Called) -> None:
        world = self.world
        call = Call(world.cluster.world.now, self.node.name, request.url, request)
        world.calls.append(call)
        script = world.script[request.url]
        said = script.pop(0) if len(script) > 1 else script[0]
        wait_s = request.timeout_s if said == "hang" else world.answer_s()
        self.node.runtime.call_later(wait_s, self._answer, call, said, wait_s, done)

    def _answer(self, call: Call, said: str, wait_s: float, done: Called) -> None:
        status, _, after = said.partition("/")
        if status.isdigit():
            reason = "" if status.startswith("2") else f"HTTP {status}"
            kept = CallReply(int(status), "text/plain", b"said", False) if call.request.keeps else None
            call.answer = Reply(int(status), reason, int(after) if after else None, wait_s, kept)
        else:
            call.answer = Reply(0, {"hang": "timeout"}.get(said, said.replace("_", " ")), None, wait_s)
        call.answered = self.world.cluster.world.now
        done(call.answer)
