"""`python -m bench delays`: the judge sees each violation, and every contender is complete. Nothing is timed."""

from __future__ import annotations

import ast
import inspect
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from bench.delays import contenders, roles
from bench.delays.command import main
from bench.delays.contender import Client, Contender, Message, Received
from bench.delays.contenders import CONTENDERS
from bench.delays.field import HERE, ROOT
from bench.delays.history import Event, Reader, Writer, read
from bench.delays.judge import causes, judge
from bench.delays.page import IMAGES, PAGE, RESULTS, compact, drawn_names, page
from bench.delays.plan import VARIABLE, Load, Plan, plan, writer
from bench.delays.summary import losses, median, ratio
from bench.delays.workloads import WORKLOADS
from tests.system.cluster import until

QUIET_S = 10.0


def kept() -> list[Event]:
    """A run without a violation: ten messages, one of unknown outcome, one cancelled, one redelivered after a kill."""
    events: list[Event] = []
    for n in range(10):
        due, ok = 1000 + 100 * n, None if n == 3 else 20.0
        events.append({"e": "pub", "ids": [f"m{n}"], "due": [due], "at": 20.0, "ok": ok})
        if n not in (3, 4):
            events.append({"e": "got", "ids": [f"m{n}"], "at": due + 5.0, "pid": 7})
            events += [{"e": "done", "ids": [f"m{n}"], "at": due + 6.0, "pid": 7}] if n != 9 else []
    events.append({"e": "cancel", "ids": ["m4"], "at": 30.0, "ok": 29.0})
    events.append({"e": "fault", "what": "worker", "pids": [7], "at": 1950.0})
    events.append({"e": "got", "ids": ["m9"], "at": 2400.0, "pid": 8})
    return [*events, {"e": "end", "at": 60_000.0}]


def got(id: str, at: float, pid: int = 8) -> Callable[[list[Event]], None]:
    return lambda events: events.append({"e": "got", "ids": [id], "at": at, "pid": pid})


def no_hand_out(events: list[Event]) -> None:
    events[:] = [event for event in events if not (event["e"] == "got" and event["ids"] == ["m5"])]


def test_a_run_without_violation() -> None:
    found = judge(kept(), QUIET_S)
    assert (found.published, found.unsure, found.delivered, found.redelivered) == (9, 1, 8, 1)
    assert not +causes(found)
    assert found.late_ms == [5.0] * 8
    assert found.gap_s == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("kind", "who", "plant"),
    [
        ("lost", "m5", no_hand_out),
        # The worker that has it is killed, and nobody gets it again.
        ("lost", "m9", lambda events: events.remove(next(e for e in events if e.get("pid") == 8))),
        ("early", "m3", got("m3", 1299.0)),
        ("doubled", "m0", got("m0", 1500.0)),
        # The same worker gets it again, as after a visibility timeout that ended while it worked.
        ("doubled", "m1", got("m1", 1500.0, pid=7)),
        ("uncancelled", "m4", got("m4", 1500.0)),
        ("unknown", "m77", got("m77", 1500.0)),
    ],
)
def test_the_judge_sees_each_kind_of_violation(kind: str, who: str, plant: Callable[[list[Event]], None]) -> None:
    events = kept()
    plant(events)
    found = judge(events, QUIET_S)
    assert +causes(found) == {kind: 1}
    assert getattr(found, kind) == [who]
    assert found.early_ms == (1.0 if kind == "early" else 0.0)


def test_the_judge_sees_what_is_late_and_the_gap_before_it() -> None:
    events = kept()
    next(event for event in events if event["e"] == "got" and event["ids"] == ["m8"])["at"] = 9000.0
    found = judge(events, QUIET_S)
    assert (found.late(0.5), found.late(1), found.last_ms) == (5.0, 7200.0, 9000.0)
    assert found.gap_s == pytest.approx(9.0 - 1.905)


def test_messages_that_still_come_when_the_run_ends_are_unfinished_and_not_lost() -> None:
    events = kept()
    no_hand_out(events)
    events[-1]["at"] = 8100.0
    found = judge(events, quiet_s=6.0)
    assert (found.unfinished, found.lost) == (1, [])


def test_a_message_that_is_due_after_the_run_is_not_lost() -> None:
    events = [*kept(), {"e": "pub", "ids": ["m10"], "due": [90_000_000], "at": 20.0, "ok": 20.0}]
    assert not +causes(judge(events, QUIET_S))


def test_the_time_after_a_kill_is_that_of_a_message_due_after_it() -> None:
    events = [*kept(), {"e": "fault", "what": "server", "pids": [1], "at": 1150.0}]
    assert judge(events, QUIET_S).after_kill_s == pytest.approx([0.055])


def test_the_history_of_a_killed_process_is_read_without_its_torn_line(tmp_path: Path) -> None:
    writer = Writer(tmp_path, "work")
    writer.got(["m0", "m1"])
    with next(tmp_path.iterdir()).open("ab") as file:
        file.write(b'{"e": "got", "ids": ["m')
    assert [event["ids"] for event in read(tmp_path)] == [["m0", "m1"]]
    reader = Reader(tmp_path)
    assert len(list(reader.new())) == 1
    assert list(reader.new()) == []


class Faulty(Contender):
    """Keeps messages in this process; loses m7, and hands out m3 early and m5 twice."""

    waiting: ClassVar[dict[str, int]] = {}
    given: ClassVar[set[str]] = set()

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def kill(self) -> list[int]:
        return []

    def restart(self) -> None: ...

    def servers(self) -> list[int]:
        return []

    def connect(self) -> Client:
        return FaultyClient()


class FaultyClient(Client):
    def publish(self, messages: Sequence[Message]) -> None:
        Faulty.waiting.update({m.id: m.due_ms for m in messages if m.id != "m00000007"})

    def receive(self, most: int, wait_s: float) -> list[Received]:
        time.sleep(0.001)
        now = time.time() * 1000
        due = [id for id, when in Faulty.waiting.items() if now >= when or id == "m00000003"]
        return [Received(id) for id in due[:most]]

    def ack(self, received: Sequence[Received]) -> None:
        for one in received:
            if one.id != "m00000005" or one.id in Faulty.given:
                del Faulty.waiting[one.id]
            Faulty.given.add(one.id)


def test_producers_and_workers_write_what_a_faulty_system_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "faulty", Faulty)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plan"))
    plan.cache_clear()
    writer.cache_clear()
    Plan("faulty", str(tmp_path), 1, 5.0, str(tmp_path), Load("once", count=20, span_s=0.5), batch=4).save(
        tmp_path / "plan"
    )
    stop = threading.Event()
    worker = threading.Thread(target=roles._work, args=(contenders.contender_of(plan()), stop))
    worker.start()
    try:
        roles.produce()
        until(lambda: Faulty.given and not Faulty.waiting, "everything but the lost message is acked")
    finally:
        stop.set()
        worker.join()
    Writer(tmp_path, "test").write("end", at=time.time() * 1000 + 60_000)
    found = judge(read(tmp_path), QUIET_S)
    assert (found.lost, found.early, found.doubled) == (["m00000007"], ["m00000003"], ["m00000005"])
    assert (found.published, found.delivered) == (20, 19)


# --- contenders ---


def modules() -> list[str]:
    return [path.stem for path in (HERE / "contenders").glob("*.py") if path.stem != "__init__"]


def test_every_module_of_a_contender_is_registered() -> None:
    registered = {one.__module__.rpartition(".")[2] for one in CONTENDERS.values()}
    assert registered == set(modules())
    assert {"hadelay", "redis-always", "postgres"} <= CONTENDERS.keys()


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_is_complete(name: str, tmp_path: Path) -> None:
    """It implements the interface, says its set-up and durability, and starts nothing before it is told to."""
    kind = CONTENDERS[name]
    one = kind(tmp_path, 18_000, 5.0)
    assert one.name == name
    assert one.setup
    assert one.durability
    assert isinstance(kind.missing(), str)
    source = inspect.getmodule(kind)
    assert source is not None
    clients = [c for c in vars(source).values() if isinstance(c, type) and issubclass(c, Client) and c is not Client]
    inherited = [c for c in vars(inspect.getmodule(kind.connect)).values() if isinstance(c, type) and c not in clients]
    clients += [c for c in inherited if issubclass(c, Client) and c is not Client]
    assert clients
    for client in clients:
        assert not inspect.isabstract(client)
    if kind.worker is Contender.worker:
        assert any(client.receive is not Client.receive and client.ack is not Client.ack for client in clients)
    elif not kind.missing():
        assert one.worker()
    if kind.cancels:
        assert any(client.cancel is not Client.cancel for client in clients)


@pytest.mark.parametrize("module", modules())
def test_a_library_is_imported_where_it_is_used(module: str) -> None:
    """The harness runs without the contenders' libraries, so no module imports one at its top."""
    tree = ast.parse((HERE / "contenders" / f"{module}.py").read_text())
    tops = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {(n.module or "") if isinstance(n, ast.ImportFrom) else n.names[0].name for n in tops}
    libraries = {library for kind in CONTENDERS.values() for library in kind.modules}
    assert not {name.partition(".")[0] for name in names} & libraries


def test_every_library_is_pinned() -> None:
    lines = (HERE / "requirements.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].replace("-", "_") for line in lines if "==" in line}
    assert all("==" in line or line.startswith("#") for line in lines)
    distributions = {"nats": "nats_py"}
    wanted = {library for kind in CONTENDERS.values() for library in kind.modules}
    assert {distributions.get(library, library) for library in wanted} <= pinned


def test_only_contenders_that_are_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(CONTENDERS["redis-always"], "missing", lambda: "redis is not installed")
    with pytest.raises(SystemExit, match="2"):
        main(["--quick", "redis-always"])
    assert "redis-always: redis is not installed" in capsys.readouterr().err


def test_a_plan_survives_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Plan("redis-always", str(tmp_path), 1, 5.0, str(tmp_path), Load("steady", rate=10))
    made.save(tmp_path / "plan")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plan"))
    plan.cache_clear()
    assert plan() == made
    assert len(Message("m1", 5).body()) == 200


# --- the page ---


def results(**figures: list[dict[str, float]]) -> dict[str, Any]:
    runs = [
        {"contender": name, "workload": "burst", "round": n, "figures": each, "late_ms": [], "error": "", "load": 1.0}
        for name, rounds in figures.items()
        for n, each in enumerate(rounds)
    ]
    return {"runs": runs, "contenders": {name: {} for name in figures}, "left_out": {}, "sizes": {}}


def test_ratios_are_taken_within_a_round_and_violations_are_not_averaged_away() -> None:
    said = results(
        hadelay=[{"drained": 2.0, "lost": 0}, {"drained": 20.0, "lost": 0}, {"drained": 2.0, "lost": 0}],
        other=[{"drained": 1.0, "lost": 0}, {"drained": 10.0, "lost": 3}, {"drained": 4.0, "lost": 0}],
    )
    assert ratio(said, "burst", "other", "drained") == 0.5
    assert median(said, "burst", "other", "drained") == 4.0
    assert median(said, "burst", "other", "lost") == 3
    assert losses(said) == []
    said["runs"][-1]["figures"]["drained"] = 0.5
    assert "hadelay 2 s, other 1 s; 1 of 1" in losses(said)[0]


def test_the_page_is_what_its_results_say() -> None:
    text = RESULTS.read_text()
    said = json.loads(text)
    assert compact(said) == text
    assert page(said, drawn_names(ROOT / IMAGES)) == (ROOT / PAGE).read_text()


def test_the_readme_names_every_contender_and_workload() -> None:
    text = (ROOT / "bench" / "README.md").read_text()
    assert [name for name in CONTENDERS if f"`{name}`" not in text] == []
    assert [what.letter for what in WORKLOADS.values() if f"({what.letter})" not in text] == []
    assert contenders.__doc__
