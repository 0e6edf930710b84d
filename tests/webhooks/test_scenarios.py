"""Runs tests/webhooks/scenarios/*.txt: what happens, `----`, and which calls were made, at which second.

    pytest tests/webhooks --rewrite      accepts what happens now; then read the diff

Lines: `topic T url=… timeout=… attempts=… backoff=…,… concurrency=… per_message=yes alert=… ` · `receiver URL answers…`
(`200`, `503/5000`: Retry-After in ms, `hang`, `connection_refused`; the last one for ever) ·
`publish a b … topic=T delay=… callback=…` · `run SECONDS` · `state a b …` · `topic_state T` · `resume T` · `kill` (the
leader) · `transfer`. Times are ms but for `run`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaos.sim.cluster import SimCluster
from tests.scale import LONG
from tests.scenarios import check
from tests.webhooks.world import Call, World

#: An hour of simulated seconds takes half a minute.
HOURS = ("retry_after",)
FILES = [one for one in sorted((Path(__file__).parent / "scenarios").glob("*.txt")) if LONG or one.stem not in HOURS]


class Player:
    def __init__(self) -> None:
        self.world = World(SimCluster(1))
        self.ids: dict[str, int] = {}
        self.reported = 0

    def play(self, line: str) -> list[str]:
        verb, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word and "://" not in word.split("=")[0])
        names = [word for word in words if word.split("=", 1)[0] not in options]
        said = getattr(self, f"do_{verb}")(names, options) or []
        return [*self._calls(), *said]

    def _calls(self) -> list[str]:
        said = []
        calls, waiting = self.world.calls[self.reported :], []
        for call in calls:
            if call.answer is None and self.world.cluster.process(call.node) is not None:
                waiting.append(call)
            else:
                said.append((call.at, f"{self._at(call)} {self._what(call)}"))
        self.world.calls[self.reported :] = waiting
        return [line for _, line in sorted(said)]

    def _at(self, call: Call) -> str:
        return f"{call.at - self.world.began:.1f}"

    def _what(self, call: Call) -> str:
        answer = call.answer
        came = "nobody heard the answer" if answer is None else answer.reason or str(answer.status)
        if call.request.headers["ce-type"] == "hadelay.messages.died":
            body = msgspec.json.decode(call.request.body)
            named = [name for name, one in self.ids.items() if one in map(self._number, body["ids"])]
            return f"{call.url} {body['died']} died: {' '.join(named)} → {came}"
        name = next(name for name, one in self.ids.items() if one == call.id)
        again = ", redelivered" if "hadelay-redelivered" in call.request.headers else ""
        attempt = f" (attempt {call.attempt}{again})" if call.attempt > 1 or again else ""
        return f"{call.url} {name}{attempt} → {came}"

    @staticmethod
    def _number(text: str) -> int:
        from hadelay.model import decode_id

        return decode_id(text)

    def do_topic(self, names: list[str], options: dict[str, str]) -> None:
        config: dict[str, Any] = {}
        if "url" in options:
            config["webhook"] = {"url": options["url"], "timeout_ms": int(options.get("timeout", "5000"))}
            if "per_message" in options:
                config["webhook"]["allow_per_message"] = True
        if "backoff" in options:
            config["backoff"] = [int(one) for one in options["backoff"].split(",")]
        if "attempts" in options:
            config["max_attempts"] = int(options["attempts"])
        if "concurrency" in options:
            config["concurrency"] = int(options["concurrency"])
        if "alert" in options:
            config["alert"] = {"url": options["alert"]}
        self.world.put(names[0], **config)

    def do_receiver(self, names: list[str], options: dict[str, str]) -> None:
        self.world.script[names[0]] = names[1:]

    def do_publish(self, names: list[str], options: dict[str, str]) -> None:
        found = self.world.publish(
            options["topic"], *(name.encode() for name in names),
            delay_ms=int(options.get("delay", "0")), callback=options.get("callback"),
        )  # fmt: skip
        self.ids.update(zip(names, found, strict=True))

    def do_run(self, names: list[str], options: dict[str, str]) -> None:
        self.world.run(float(names[0]))

    def do_state(self, names: list[str], options: dict[str, str]) -> list[str]:
        return [f"{name}: {self.world.state(self.ids[name])}" for name in names]

    def do_topic_state(self, names: list[str], options: dict[str, str]) -> list[str]:
        topic = self.world.settle().ledger.topic(names[0])
        assert topic is not None
        paused = f", paused: {topic.settings.paused_reason}" if topic.settings.paused else ""
        return [f"{names[0]}: {topic.waiting} wait, {topic.leased} leased, {topic.dead} dead{paused}"]

    def do_resume(self, names: list[str], options: dict[str, str]) -> None:
        self.world.put(names[0], paused=None, paused_reason=None)

    def do_kill(self, names: list[str], options: dict[str, str]) -> None:
        self.world.cluster.kill(self.world.settle().name)

    def do_transfer(self, names: list[str], options: dict[str, str]) -> None:
        over: list[object] = []
        self.world.settle().leadership.transfer(None, over.append)
        self.world.until(lambda: over)
        assert over == [None]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, Player(), request)
