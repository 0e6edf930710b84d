"""Runs tests/handout/scenarios/*.txt: what happens, `----`, and what consumers got, at which millisecond.

    pytest tests/handout --rewrite      accepts what happens now; then read the diff

Times count from 18:00:00, in ms (`1500`), or as h:mm:ss.ms. Lines: `with sync=interval window=100 commit=2 start=…`
(first) · `lead` · `fall lost=1` (what was proposed never commits) · `run 100` · `to 2500` ·
`publish a b in=5000|at=… topic=… tags=x,y` · `poll P topics=a,b max=… wait=… lease=… consumer=… request=…
tags=x,y any=z` · `hangup P` · `put t rate=5 paused=true …` (JSON values; null takes back) · `limited` (how often) ·
`ack|nack P a b … in=…` · `extend P lease=…` · `cancel a` · `stick` · `unstick` · `hold` · `resume` · `cursor` ·
`ready` · `forget T` (as a bug would) · `swept` · `log` (what was committed since the last `log`)
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hadelay.codec.results import CancelOutcome, LeaseOutcome
from tests.handout.desk import START_HOUR, START_MS, Desk, Received
from tests.scenarios import check

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


def ms_of(text: str) -> int:
    if ":" not in text:
        return int(text)
    hours, minutes, seconds = text.split(":")
    return (int(hours) * 60 + int(minutes)) * 60_000 + round(float(seconds) * 1000)


def words_of(text: str | None) -> list[str]:
    return text.split(",") if text else []


class Player:
    def __init__(self) -> None:
        self.desk: Desk | None = None
        self.polls: dict[int, str] = {}
        self.answers: dict[str, Received] = {}
        self.seen = 0
        self.logged = 0

    def play(self, line: str) -> list[str]:
        verb, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        if verb == "with":
            self.desk = Desk(
                sync=options.get("sync", "commit"), window=int(options.get("window", "65536")),
                commit_ms=float(options.get("commit", "2")), start_ms=ms_of(options.get("start", "0")),
            )  # fmt: skip
            return []
        if self.desk is None:
            self.desk = Desk()
        said = getattr(self, f"do_{verb}")(self.desk, names, options) or []
        return [*said, *self._answered(self.desk)]

    def _answered(self, desk: Desk) -> list[str]:
        said = []
        for received in desk.received[self.seen :]:
            name = self.polls[id(received.poll)]
            self.answers[name] = received
            said.append(f"{int(received.at + 1e-6)} {name}: {self._what(received)}")
        self.seen = len(desk.received)
        return said

    def _what(self, received: Received) -> str:
        d = received.delivery
        if d is None:
            return type(received.error).__name__
        if not received.names:
            return "nothing"
        said = []
        for n, name in enumerate(received.names):
            notes = [f"attempt {d.attempts[n]}"] if d.attempts[n] > 1 else []
            notes += ["redelivered"] if d.redelivered[n] else []
            said.append(f"{name} ({', '.join(notes)})" if notes else name)
        return " ".join(said) + f", until {int(d.until_ms[0]) - START_MS}"

    def do_lead(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        if desk.term == 1:
            desk.lead()
        else:
            desk.new_leader(clock_behind_ms=int(options.get("behind", "0")))

    def do_fall(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        desk.depose()
        if "lost" in options:
            desk.forget_waiting()

    def do_run(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        desk.run(ms_of(names[0]))

    def do_to(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        desk.run_to(ms_of(names[0]))

    def do_publish(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        at = ms_of(options["at"]) if "at" in options else None
        topic, tags = options.get("topic", "t"), words_of(options.get("tags"))
        desk.publish(*names, topic=topic, at=at, delay=ms_of(options.get("in", "0")), tags=tags)

    def do_put(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        desk.put(names[0], **{name: json.loads(value) for name, value in options.items()})

    def do_limited(self, desk: Desk, names: list[str], options: dict[str, str]) -> list[str]:
        counts = desk.core.turns.throttled
        return [" ".join(f"{count}×{cause}" for cause, count in sorted(counts.items())) or "never"]

    def do_poll(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        poll = desk.poll(
            *options.get("topics", "t").split(","),
            max=int(options.get("max", "10")),
            wait=ms_of(options.get("wait", "60000")),
            lease=ms_of(options.get("lease", "30000")),
            consumer=options.get("consumer", ""),
            request=options.get("request", "").encode(),
            tags=words_of(options.get("tags")),
            any_tags=words_of(options.get("any")),
        )
        self.polls[id(poll)] = names[0]
        self.named = {**getattr(self, "named", {}), names[0]: poll}
        desk.run(0.01)

    def do_hangup(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        desk.delivery.cancel_poll(self.named[names[0]])

    def do_ack(self, desk: Desk, names: list[str], options: dict[str, str]) -> list[str]:
        return [" ".join(LeaseOutcome(o).name.lower() for o in desk.ack(self.answers[names[0]], *names[1:]))]

    def do_nack(self, desk: Desk, names: list[str], options: dict[str, str]) -> list[str]:
        outcomes = desk.nack(self.answers[names[0]], *names[1:], delay=int(options.get("in", "-1")))
        return [" ".join(LeaseOutcome(o).name.lower() for o in outcomes)]

    def do_extend(self, desk: Desk, names: list[str], options: dict[str, str]) -> list[str]:
        outcomes = desk.extend(self.answers[names[0]], int(options["lease"]))
        return [" ".join(LeaseOutcome(o).name.lower() for o in outcomes)]

    def do_cancel(self, desk: Desk, names: list[str], options: dict[str, str]) -> list[str]:
        return [" ".join(CancelOutcome(o).name.lower() for o in desk.cancel(*names))]

    def do_stick(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        desk.stuck = True

    def do_unstick(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        desk.unstick()

    def do_hold(self, desk: Desk, names: list[str], options: dict[str, str]) -> list[str]:
        leased: list[int] = []
        desk.delivery.hold(lambda: leased.append(int(desk.now)))
        desk.run(50)
        return [f"{leased[0]} held" if leased else "not held"]

    def do_resume(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        desk.delivery.resume()

    def do_cursor(self, desk: Desk, names: list[str], options: dict[str, str]) -> list[str]:
        hour, second, local = desk.ledger.cursor
        return [f"hour {hour - START_HOUR}, second {second}, localIndex {local}" if hour else "none"]

    def do_ready(self, desk: Desk, names: list[str], options: dict[str, str]) -> list[str]:
        counts = desk.delivery.ready_counts().items()
        return [f"{desk.ledger.topics[number].name}: {count}" for number, (count, _) in counts] or ["none"]

    def do_forget(self, desk: Desk, names: list[str], options: dict[str, str]) -> None:
        """As a bug would: the windows of this topic."""
        core = desk.core
        topic = desk.ledger.known_topic(names[0])
        for window in core.windows.topic(topic.number).windows():  # type: ignore[union-attr]
            core.windows.size -= len(window.entries)
            window.entries.clear()

    def do_swept(self, desk: Desk, names: list[str], options: dict[str, str]) -> list[str]:
        return [f"{desk.delivery.sweeper_found} forgotten"]

    def do_log(self, desk: Desk, names: list[str], options: dict[str, str]) -> list[str]:
        kinds = [kind.name.lower() for _, kind in desk.log[self.logged :]]
        self.logged = len(desk.log)
        return [" ".join(f"{kinds.count(kind)}×{kind}" for kind in dict.fromkeys(kinds)) or "nothing"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, Player(), request)
