"""Runs tests/ledger/scenarios/*.txt: commands, `----`, and what is answered. They read as documentation of apply.

    pytest tests/ledger --rewrite      accepts what is answered now; then read the diff

Lines: `at 18:00:05.5` · `term 2` · `publish A B in=5s|on=19:00:00 topic=… key=… request=… body=…` ·
`grant G A B lease=30s consumer=… request=…` · `handout G A` (a grant that was never replicated) ·
`ack|nack|extend G:A … in=… lease=…` (without :A, all of G) · `expire G` · `cancel A` · `get A` · `topic t` ·
`put t lease=30s` · `delete t force=1` ·
`publish A client=K mode=keep|replace|reject wait=1h` · `cancel client=K` · `reschedule A|client=K in=5s|on=19:00:00` ·
`list t state=scheduled,dead from=… to=… tag=… limit=…` · `client K` (whose key it is) ·
`tables key place` (how many rows) ·
`sweep|carry|retire [hour] limit=…` · `hours` ·
`settings key=value` · `restart`
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.meta import mask_of
from hadelay.codec.publishcommand import hash_client_key
from hadelay.codec.results import CancelOutcome, JobResult, LeaseOutcome, Refused, RowCode, TargetOutcome
from hadelay.ledger.messages.keys import find_key
from hadelay.ledger.state import Ledger
from hadelay.ledger.views.describe import describe
from hadelay.ledger.views.listing import ListPage, ListQuery, listing
from hadelay.model import DEAD_HOURS, FIRST, HOUR_MS, PENDING, State
from tests.ledger.world import START_HOUR, START_MS, World, draft, leases
from tests.scenarios import check

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": HOUR_MS, "d": 24 * HOUR_MS}


def ms_of(text: str) -> int:
    unit = next(u for u in ("ms", "s", "m", "h", "d") if text.endswith(u))
    return round(float(text.removesuffix(unit)) * _UNITS[unit])


def clock_of(text: str) -> int:
    """ms since the start: `18:00:05.500`, or `+2d 18:00:05` for another day."""
    days = 0
    if text.startswith("+"):
        day, text = text.split("/")
        days = int(day[1:-1])
    hours, minutes, seconds = text.split(":")
    at = (int(hours) * 3600 + int(minutes) * 60) * 1000 + round(float(seconds) * 1000)
    return at + days * 24 * HOUR_MS - 18 * HOUR_MS


def clock(at_ms: int) -> str:
    since_midnight = at_ms - START_MS + 18 * HOUR_MS
    days, ms = divmod(since_midnight, 24 * HOUR_MS)
    text = f"{ms // HOUR_MS:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}"
    text += f".{ms % 1000:03}" if ms % 1000 else ""
    return f"+{days}d/{text}" if days else text


def hour_text(hour: int) -> str:
    return f"hour {hour - START_HOUR:+}" if hour < DEAD_HOURS else f"dead hour {hour - DEAD_HOURS - START_HOUR:+}"


def _page(ledger: Ledger, query: ListQuery, now_ms: int) -> ListPage:
    steps = listing(ledger, query, now_ms)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class Player:
    def __init__(self) -> None:
        self.world = World()
        self.names: dict[str, int] = {}  # of messages
        self.grants: dict[str, dict[str, tuple[int, int, int, int, int]]] = {}

    def play(self, line: str) -> list[str]:
        verb, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        names = [word for word in words if "=" not in word]
        method: Callable[[list[str], dict[str, str]], list[str] | str] = getattr(self, f"do_{verb}")
        said = method(names, options)
        return [said] if isinstance(said, str) else said

    def called(self, message_id: int) -> str:
        return next((name for name, known in self.names.items() if known == message_id), "?")

    def do_at(self, names: list[str], options: dict[str, str]) -> list[str]:
        self.world.now = clock_of(names[0])
        return []

    def do_term(self, names: list[str], options: dict[str, str]) -> list[str]:
        self.world.term = int(names[0])
        return []

    def do_publish(self, names: list[str], options: dict[str, str]) -> list[str]:
        topic, body = options.get("topic", "t"), options.get("body", "x").encode()
        key = options["key"].encode() if "key" in options else None
        at = clock_of(options["on"]) if "on" in options else None
        in_ms = ms_of(options.get("in", "0s"))
        drafts = [draft(topic, in_ms, body, idem=key, at=at) for _ in names]
        if "tag" in options:
            drafts = [replace(d, tag_mask=mask_of(options["tag"].split(","))) for d in drafts]
        if "client" in options:
            mode = ("keep", "replace", "reject").index(options.get("mode", "keep"))
            wait_ms = ms_of(options.get("wait", "0s"))
            client = options["client"].encode()
            drafts = [replace(d, key=client, on_conflict=mode, max_wait_ms=wait_ms) for d in drafts]
        request = options["request"].encode() if "request" in options else None
        result = self.world.publish(*drafts, key=request)
        said = []
        for n, name in enumerate(names):
            message_id, code = int(result.ids[n]), RowCode(result.codes[n])
            other = 0 if result.others is None else int(result.others[n])
            if code:
                said.append(f"{name}: refused, {code.name.lower()}" + (f" {self.called(other)}" if other else ""))
            elif result.duplicate[n]:
                said.append(f"{name}: duplicate of {self.called(message_id)}")
            else:
                self.names[name] = message_id
                said.append(f"{name}: {clock(int(result.deliver_at_ms[n]))}")
            if other and not code:
                said[-1] += f", replaced {self.called(other)}"
        return said

    def do_grant(self, names: list[str], options: dict[str, str]) -> list[str] | str:
        label, *messages = names
        ids = [self.names[name] for name in messages]
        places = [self.world.place(i) for i in ids]
        result = self.world.grant(
            *ids,
            lease_ms=ms_of(options.get("lease", "30s")),
            consumer=options.get("consumer", "c"),
            request_id=options.get("request", "").encode(),
        )
        if result.existing:
            return f"{label}: still held, {result.existing[0]}/{result.existing[1]}"
        self.grants[label] = {name: (result.term, result.seq, n, *places[n]) for n, name in enumerate(messages)}
        return [
            f"{name}: attempt {result.attempts[n]}, until {clock(result.until_ms)}"
            if result.granted[n]
            else f"{name}: no"
            for n, name in enumerate(messages)
        ]

    def do_handout(self, names: list[str], options: dict[str, str]) -> list[str]:
        """Interval mode: handed out, and the leader fell before the grant was replicated."""
        label, *messages = names
        self.world.seq += 1
        self.grants[label] = {
            name: (self.world.term, self.world.seq, n, *self.world.place(self.names[name]))
            for n, name in enumerate(messages)
        }
        return []

    def _leases(self, names: list[str]) -> tuple[list[str], Any]:
        chosen: list[tuple[str, tuple[int, int, int, int, int]]] = []
        for name in names:
            label, _, message = name.partition(":")
            grant = self.grants[label]
            chosen += [(f"{label}:{m}", lease) for m, lease in grant.items() if message in ("", m)]
        return [name for name, _ in chosen], leases(*(lease for _, lease in chosen))

    def _settle(self, names: list[str], done: str, apply: Callable[[Any], list[int] | Refused]) -> list[str] | str:
        called, rows = self._leases(names)
        outcomes = apply(rows)
        if isinstance(outcomes, Refused):
            return self._said(outcomes)
        words = {
            LeaseOutcome.DONE: done,
            LeaseOutcome.ALREADY_ACKED: "already_acked",
            LeaseOutcome.LEASE_LOST: "lease_lost",
        }
        return [f"{name}: {words[LeaseOutcome(o)]}" for name, o in zip(called, outcomes, strict=True)]

    def do_ack(self, names: list[str], options: dict[str, str]) -> list[str] | str:
        return self._settle(names, "acked", self.world.ack)

    def do_nack(self, names: list[str], options: dict[str, str]) -> list[str] | str:
        delay = ms_of(options["in"]) if "in" in options else -1
        return self._settle(names, "nacked", lambda rows: self.world.nack(rows, delay))

    def do_extend(self, names: list[str], options: dict[str, str]) -> list[str] | str:
        return self._settle(names, "extended", lambda rows: self.world.extend(rows, ms_of(options["lease"])))

    def do_expire(self, names: list[str], options: dict[str, str]) -> str:
        keys = [next(iter(self.grants[label].values()))[:2] for label in names]
        result = self.world.expire(*keys)
        return f"returned {result.returned}" + (", some still held" if result.remaining else "")

    def do_cancel(self, names: list[str], options: dict[str, str]) -> list[str]:
        outcomes = self.world.one(commands.encode_cancel("n1", **self._targets(names, options))).outcomes.tolist()
        return [f"{n}: {CancelOutcome(o).name.lower()}" for n, o in zip(names or ["it"], outcomes, strict=True)]

    def _targets(self, names: list[str], options: dict[str, str]) -> dict[str, Any]:
        if "client" in options:
            return {"keys": [(options.get("topic", "t"), options["client"].encode())]}
        return {"ids": [self.names[name] for name in names]}

    def do_reschedule(self, names: list[str], options: dict[str, str]) -> list[str]:
        relative = "on" not in options
        when_ms = ms_of(options["in"]) if relative else START_MS + clock_of(options["on"])
        command = commands.encode_reschedule("n1", when_ms, relative, **self._targets(names, options))
        result = self.world.one(command)
        said = []
        for name, outcome, at in zip(names or [""], result.outcomes, result.deliver_at_ms.tolist(), strict=True):
            name = name or self.called(int(result.ids[0]))
            said.append(f"{name}: " + (TargetOutcome(outcome).name.lower() if outcome else clock(at)))
        return said

    def do_client(self, names: list[str], options: dict[str, str]) -> str:
        found = find_key(self.world.ledger, options.get("topic", "t"), hash_client_key(names[0].encode()))
        return "none" if found is None else self.called(found)

    def do_tables(self, names: list[str], options: dict[str, str]) -> str:
        rows = self.world.tables.rows
        return ", ".join(f"{table} {len(rows.get(table.encode(), {}))}" for table in names)

    def do_get(self, names: list[str], options: dict[str, str]) -> list[str]:
        said = []
        for name in names:
            found = describe(self.world.ledger, self.names[name], START_MS + self.world.now)
            if found is None:
                said.append(f"{name}: gone")
                continue
            where = hour_text(found.hour) if found.hour != START_HOUR else "hour 0"
            said.append(
                f"{name}: {found.state}, due {clock(found.deliver_at_ms)}, attempt {found.attempt}, "
                f"{where}, entry {found.index}"
            )
            for event in found.history:
                by = " ".join(filter(None, (event.consumer, f"at {event.node}" if event.node else "")))
                said.append(f"  {clock(event.at_ms)} {event.event.name.lower()} {event.attempt} {by}".rstrip())
        return said

    def do_list(self, names: list[str], options: dict[str, str]) -> list[str]:
        """In due order, page after page, as a client asks for it."""
        topic = self.world.ledger.topic(names[0])
        assert topic is not None
        wanted = options.get("state", "pending")
        states = PENDING if wanted == "pending" else frozenset(map(State, wanted.split(",")))
        start, end = (START_MS + clock_of(options[at]) if at in options else None for at in ("from", "to"))
        query = ListQuery(
            topic.number, states, start or 0, end or 1 << 50, mask_of([options["tag"]]) if "tag" in options else 0,
            FIRST, int(options.get("limit", 100)),
        )  # fmt: skip
        said, after = [], FIRST
        while after is not None:
            page = _page(self.world.ledger, query._replace(after=after), START_MS + self.world.now)
            rows = zip(page.rows["first_id"].tolist(), page.rows["deliver_at_ms"].tolist(), page.states, strict=True)
            listed = ", ".join(f"{self.called(i)} {state} {clock(at_ms)}" for i, at_ms, state in rows)
            said.append(listed or "nothing")
            after = page.after
        return said

    def do_topic(self, names: list[str], options: dict[str, str]) -> str:
        topic = self.world.ledger.topic(names[0])
        if topic is None:
            return "none"
        text = f"waiting {topic.waiting}, leased {topic.leased}, published {topic.published}, config {topic.config}"
        return text + (f", doomed {topic.tombstoned}" if topic.tombstoned else "")

    def do_put(self, names: list[str], options: dict[str, str]) -> str:
        config: dict[str, Any] = {}
        for key, value in options.items():
            plain = value[0].isdigit() or value in ("true", "false", "null")
            config["lease_ms" if key == "lease" else key] = (
                ms_of(value) if key == "lease" else json.loads(value) if plain else value
            )
        return self._said(self.world.one(commands.encode_topic_put(names[0], config)))

    def do_delete(self, names: list[str], options: dict[str, str]) -> str:
        return self._said(self.world.one(commands.encode_topic_delete(names[0], "force" in options)))

    def do_purge(self, names: list[str], options: dict[str, str]) -> str:
        return self._said(self.world.one(commands.encode_purge(names[0], int(options.get("states", "7")))))

    def do_sweep(self, names: list[str], options: dict[str, str]) -> str:
        return self._said(self.world.maintain(Job.SWEEP, limit=int(options.get("limit", 1000))))

    def do_carry(self, names: list[str], options: dict[str, str]) -> str:
        hour = START_HOUR + int(names[0])
        return self._said(self.world.maintain(Job.ROLL_FORWARD, hour, int(options.get("limit", 1000))))

    def do_retire(self, names: list[str], options: dict[str, str]) -> str:
        hour = START_HOUR + int(names[0])
        return self._said(self.world.maintain(Job.RETIRE, hour, int(options.get("limit", 1000))))

    def do_settings(self, names: list[str], options: dict[str, str]) -> str:
        values: dict[str, Any] = {k: v == "true" if v in ("true", "false") else int(v) for k, v in options.items()}
        return self._said(self.world.one(commands.encode_settings(values)))

    def do_hours(self, names: list[str], options: dict[str, str]) -> list[str]:
        said = []
        for hour in self.world.store.hours():
            state = self.world.ledger.hours.get(hour)
            ended = {e.name.lower(): len(b) for e, b in sorted(state.others.items())} if state else {}
            acked = len(state.settled) - sum(ended.values()) if state else 0
            parts = [f"{n} {what}" for what, n in ({"acked": acked} | ended).items() if n]
            still = np.flatnonzero(state.open_seconds) if state and state.open_seconds is not None else ()
            entries, still_open = self.world.store.count(hour), self.world.ledger.open_entries(hour)
            text = f"{hour_text(hour)}: {entries} entries, {still_open} open"
            text += "".join(f", {part}" for part in parts)
            said.append(text + (f"; oldest open second {still[0]}" if len(still) else ""))
        return said

    def do_restart(self, names: list[str], options: dict[str, str]) -> list[str]:
        self.world.restart()
        return []

    def _said(self, result: Any) -> str:
        if isinstance(result, Refused):
            return f"refused, {result.code}"
        if isinstance(result, JobResult):
            return f"{result.count}" + (", done" if result.done else ", more to do")
        return "changed" if result.changed else "as it was"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, Player(), request)
