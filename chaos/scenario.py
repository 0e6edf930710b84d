"""A scenario: a TOML file with cluster, load, faults and duration. docs/howto/chaos.md explains each key. An error
names line and key."""

import difflib
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct, field

from chaos.sim.failpoints import POINTS, step_of
from hadelay.errors import ConfigError
from hadelay.settings.load import line_of, read_toml

HERE = Path(__file__).resolve().parent / "scenarios"
#: Value of a crash's `at` that stands for every crash point, one after another, in an order drawn by the seed.
EACH = "each"
#: Values of a fault's `target`; the name of a node is allowed too.
TARGETS = ("leader", "follower", "random", "minority", "majority", "all")
T = TypeVar("T")


class Mistake(Exception):
    """Mistake in a scenario, a cluster file or the installation, found before anything starts. Exit code 2."""


class ClusterPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nodes: int = 3
    #: Number of shards (chaos.shards): clusters of `nodes` nodes each, with one shard map. Several shards cannot have
    #: faults of networks and disks.
    shards: int = 1
    sync: Literal["commit", "interval"] = "commit"
    #: Settings of every node, as key=value; they override the settings that chaos itself makes.
    settings: list[str] = field(default_factory=list)
    #: Size, in MiB, of each node's own disk, which it has only if a fault needs one.
    disk_mib: int = 512
    #: Name of a deliberate bug in every node (chaos.sim.mutations), to see whether the run notices the bug; "": none.
    mutation: str = ""


class Load(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Messages per second of all publishers together.
    rate: int = 200
    publishers: int = 4
    #: Messages per request of every other publisher; the others send single messages.
    batch: int = 20
    delay_s: tuple[float, float] = (0.0, 4.0)
    payload_bytes: tuple[int, int] = (0, 256)
    topics: int = 2
    consumers: int = 6
    lease_s: float = 3.0
    #: Shortest and longest TTL of messages with a TTL, in seconds after the due time.
    ttl_s: tuple[float, float] = (0.3, 2.0)
    #: Number of attempts allowed in the topic with a limit of attempts.
    attempts: int = 2
    #: Shares, 0 to 1. Messages: keyed (client key), tagged, expiring (with a TTL; half have no consumers), limited (in
    #: the topic with a limit of attempts), repeated (published twice under one idempotency key), cancelled,
    #: rescheduled, nacked, forgotten (received, never settled), extended (lease). Consumers: filtered (by tags).
    #: Receives: hung_up (closed early).
    keyed: float = 0.2
    tagged: float = 0.3
    expiring: float = 0.1
    limited: float = 0.05
    repeated: float = 0.1
    cancelled: float = 0.03
    rescheduled: float = 0.05
    nacked: float = 0.05
    forgotten: float = 0.03
    extended: float = 0.05
    filtered: float = 0.34
    hung_up: float = 0.05


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str
    target: str = "leader"
    #: Seconds from the end of the previous fault, when every node is ready again, to this fault.
    after: float = 1.0
    #: True: start together with the previous fault.
    along: bool = False
    #: Duration of the fault, in seconds.
    seconds: float = 1.5
    ms: int | None = None
    percent: int | None = None
    kbit: int | None = None
    #: Name of a crash's crash point (chaos.sim.failpoints), or EACH; `seconds` then limits the wait for the crash.
    at: str | None = None

    @property
    def reached(self) -> str:
        """Kind of the node that reaches the crash point (one of failpoints.Reached); "" without a crash point."""
        return step_of(self.at).reached if self.at and self.at != EACH else ""

    @property
    def hollow(self) -> bool:
        """True if the node loses its data, or may have to be emptied."""
        return KINDS[self.kind].hollow or self.reached == "empty" or self.at == EACH

    @property
    def few(self) -> bool:
        return KINDS[self.kind].few or self.hollow

    def amount(self) -> int:
        return next(value for value in (self.ms, self.percent, self.kbit, 0) if value is not None)


class Rotation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults drawn by the seed, one round after another, until the time is over."""

    #: Kinds of faults to draw from; "any" stands for every kind that works on this machine.
    kinds: list[str]
    targets: list[str] = field(default_factory=lambda: ["leader", "leader", "follower", "majority", "all"])
    seconds: tuple[float, float] = (0.3, 3.0)
    #: Shortest and longest pause, in seconds, between the end of one round and the start of the next.
    after: tuple[float, float] = (0.5, 4.0)
    #: Limit of faults in one round.
    together: int = 2
    #: Fixed faults that are mixed with the drawn faults: each fixed fault occurs as often as each kind in `kinds`. The
    #: keys `after` and `along` of a fixed fault have no effect.
    also: list[Fault] = field(default_factory=list)


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Limit of the time from the end of a round until every node is ready, in seconds; plus 10 s per 100 MB on the
    #: fullest node's disk.
    recovery_s: float = 30.0
    #: Limit, in seconds, of the time from the end of all delays and leases until every due message is settled.
    drain_s: float = 60.0
    #: Limit of the failover time, in seconds; 0: no limit, the time is only reported.
    failover_s: float = 0.0
    #: Limit of a message's lateness, in seconds; time in which faults may have delayed the message is not counted.
    late_s: float = 3.0


class Watch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of each node's growth in the second half of the load (chaos.flat). journal_mib limits the journal's size,
    not its growth: a journal grows to a fixed size first, which takes long at moderate load."""

    every_s: float = 5.0
    anonymous_mib: float = 8.0
    descriptors: float = 5.0
    journal_mib: float = 340.0
    bytes_per_message: float = 16.0
    #: Limit of the growth of the median lateness, in milliseconds.
    late_ms: float = 25.0


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: str = ""
    seconds: float = 20.0
    seed: int = 1
    cluster: ClusterPart = ClusterPart()
    load: Load = Load()
    limits: Limits = Limits()
    faults: list[Fault] = field(default_factory=list)
    rotation: Rotation | None = None
    watch: Watch | None = None

    def kinds(self) -> set[str]:
        drawn = set(self.rotation.kinds if self.rotation else ())
        if "any" in drawn:
            return {fault.kind for fault in self.faults} | drawn
        return {fault.kind for _, fault in self.named()} | drawn

    def named(self) -> Iterator[tuple[str, Fault]]:
        """Faults that the scenario lists, each with its key in the scenario file."""
        yield from ((f"faults[{i}]", fault) for i, fault in enumerate(self.faults))
        if self.rotation:
            yield from ((f"rotation.also[{i}]", fault) for i, fault in enumerate(self.rotation.also))


class Kind(Struct, frozen=True):
    """A kind of fault: its needs, and the limits of its use."""

    help: str
    #: Requirements of this kind of fault: "root" (run as root), "netem" (netem in the kernel), or names of programs in
    #: tools._COMMANDS.
    needs: tuple[str, ...] = ()
    #: Key in the scenario that states the fault's strength, and its default; None: the kind has no strength.
    amount: tuple[str, int] | None = None
    #: True: the fault never hits more than a minority of the nodes, because no promise covers more.
    few: bool = False
    #: True: the fault makes the node lose its data, or may require that the node's data is deleted.
    hollow: bool = False
    #: True: no other fault runs at the same time, since the promises hold only while other nodes have the data.
    alone: bool = False
    #: True: the fault is over at once, and needs no healing.
    brief: bool = False


KINDS: dict[str, Kind] = {
    "kill": Kind("SIGKILL; started again"),
    "stop": Kind("SIGTERM, a clean end; started again"),
    "pause": Kind("SIGSTOP; SIGCONT"),
    "wipe": Kind("SIGKILL and an empty disk; started again", hollow=True),
    "rot": Kind("SIGKILL, and bits of the node's files flip; started again", hollow=True, alone=True),
    "old-copy": Kind("the node's files are as they were when the fault began", hollow=True, alone=True),
    "crash": Kind("the node ends itself at a crash point of its code; started again"),
    "starve": Kind("the node runs for only a tenth of the time"),
    "few-files": Kind("the node can open no file and no connection; it may end, and is started again"),
    "transfer": Kind("leadership is handed to another node", brief=True),
    "cut": Kind("no packets between the node and the other nodes", ("root", "ip", "nft")),
    "deaf": Kind("no packets from the other nodes to the node", ("root", "ip", "nft")),
    "mute": Kind("no packets from the node to the other nodes", ("root", "ip", "nft")),
    "loss": Kind("this share of the packets from other nodes is lost", ("root", "ip", "nft"), ("percent", 20)),
    "reset": Kind("the node's connections to other nodes are reset, and refused", ("root", "ip", "nft")),
    "flap": Kind("the node is cut off and connected again, five times a second", ("root", "ip", "nft")),
    "delay": Kind("the node's packets leave this much later", ("root", "ip", "tc", "netem"), ("ms", 50)),
    "slow-link": Kind("the node's packets leave at this rate", ("root", "ip", "tc"), ("kbit", 1000)),
    "slow-sync": Kind("every sync takes this much longer", ("cc",), ("ms", 50)),
    "fail-sync": Kind("syncs fail with EIO; started again", ("cc",), few=True),
    "clock": Kind("the wall clock jumps by this much, and back in the end", ("cc",), ("ms", 3_600_000), few=True),
    "strobe": Kind("the wall clock jumps this far and back, 20 times a second", ("cc",), ("ms", 3_600_000), few=True),
    "full-disk": Kind("no byte is left on the node's disk", ("root", "mkfs")),
    "stalled-disk": Kind("every write to the node's disk waits", ("root", "mkfs")),
    "power-cut": Kind("data that were not synced are gone; started again", ("root", "mkfs")),
}


def find(name: str) -> Path:
    """Path of a scenario file, given as a path or as the name of a shipped scenario."""
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        path = HERE / f"{name}.toml"
    if not path.exists():
        raise Mistake(f"no scenario {name}: name a file, or one of {', '.join(sorted(p.stem for p in HERE.glob('*')))}")
    return path


def load(path: Path) -> Scenario:
    """Read a scenario. Raises Mistake with line and key."""
    found, lines = read_struct(path, Scenario)
    if complaints := [f"{path}:{line_of(lines, key)}: {key}: {what}" for key, what in _problems(found)]:
        raise Mistake("\n".join(complaints))
    return found


def _problems(scenario: Scenario) -> Iterator[tuple[str, str]]:
    if not 1 <= scenario.cluster.nodes <= 9:
        yield "cluster.nodes", f"{scenario.cluster.nodes}: expected 1 to 9"
    if not 1 <= scenario.cluster.shards <= 4:
        yield "cluster.shards", f"{scenario.cluster.shards}: expected 1 to 4"
    if scenario.cluster.shards > 1:
        alone = sorted(kind for kind in scenario.kinds() if kind not in KINDS or {"ip", "mkfs"} & {*KINDS[kind].needs})
        yield from (("cluster.shards", f"several shards cannot have the fault {kind}") for kind in alone)
    if scenario.cluster.disk_mib < 128:
        yield "cluster.disk_mib", "less than 128 is full from the beginning"
    for where, fault in scenario.named():
        kind = KINDS.get(fault.kind)
        if kind is None:
            yield f"{where}.kind", unknown(fault.kind, KINDS)
            continue
        points = (*POINTS, EACH) if where.startswith("faults") else POINTS
        if fault.at is not None and fault.at not in points:
            yield f"{where}.at", unknown(fault.at, points)
        elif (fault.kind == "crash") != (fault.at is not None):
            yield f"{where}.{'at' if fault.at else 'kind'}", "a crash is `at` a point, and nothing else is"
        elif fault.few and fault.target in ("majority", "all"):
            yield f"{where}.target", f"{fault.kind} of {fault.target} breaks what no cluster promises"
        for name in ("ms", "percent", "kbit"):
            if getattr(fault, name) is not None and (kind.amount is None or kind.amount[0] != name):
                yield f"{where}.{name}", f"{fault.kind} takes {kind.amount[0] if kind.amount else 'no amount'}"
    if scenario.rotation:
        lists = (("kinds", scenario.rotation.kinds, (*KINDS, "any")), ("targets", scenario.rotation.targets, TARGETS))
        for key, given, known in lists:
            yield from ((f"rotation.{key}", unknown(name, known)) for name in given if name not in known)
    for part, names in (
        (scenario.load, ("delay_s", "payload_bytes", "ttl_s")),
        (scenario.rotation, ("seconds", "after")),
    ):
        for name in names if part else ():
            if not 0 <= getattr(part, name)[0] <= getattr(part, name)[1]:
                yield f"{'load' if part is scenario.load else 'rotation'}.{name}", "expected [least, most]"
    for name in ("rate", "publishers", "batch", "topics", "consumers", "lease_s", "attempts"):
        if getattr(scenario.load, name) <= 0:
            yield f"load.{name}", "must be more than 0"
    if scenario.watch and scenario.watch.every_s < 0.1:
        yield "watch.every_s", f"{scenario.watch.every_s}: at least 0.1"


def listed(scenario: Scenario, seed: int) -> Iterator[Fault]:
    """Faults listed in the scenario; a crash at EACH becomes one crash per crash point."""
    for fault in scenario.faults:
        points = random.Random(seed).sample(POINTS, len(POINTS)) if fault.at == EACH else [fault.at]
        yield from (msgspec.structs.replace(fault, at=point) for point in points)


def rounds(scenario: Scenario, seed: int, works: list[str]) -> Iterator[tuple[float, list[Fault]]]:
    """Rounds of faults, as (pause in seconds, faults): first the listed faults, then those drawn for the rotation,
    without end. Equal seeds give equal rounds."""
    together: list[Fault] = []
    for fault in map(_with_amount, listed(scenario, seed)):
        if together and not fault.along:
            yield together[0].after, together
            together = []
        together.append(fault)
    if together:
        yield together[0].after, together
    rotation, draw = scenario.rotation, random.Random(seed)
    if rotation is None:
        return
    drawn = works if "any" in rotation.kinds else rotation.kinds
    also = [fault for fault in rotation.also if fault.kind in works]
    turns: Iterator[str | Fault] = _turns([*drawn, *also], draw)
    points = _turns(POINTS, draw)
    while True:
        together = []
        for _ in range(draw.randint(1, rotation.together)):
            fault = _drawn(next(turns), rotation, draw, points)
            if KINDS[fault.kind].alone and together:
                yield draw.uniform(*rotation.after), together
                together = []
            together.append(_with_amount(fault))
            if KINDS[fault.kind].alone:
                break
        yield draw.uniform(*rotation.after), together


def _drawn(given: str | Fault, rotation: Rotation, draw: random.Random, points: Iterator[str]) -> Fault:
    if isinstance(given, Fault):
        return given
    target = draw.choice(rotation.targets)
    at = next(points) if given == "crash" else None
    fault = Fault(kind=given, target=target, seconds=draw.uniform(*rotation.seconds), at=at)
    return msgspec.structs.replace(fault, target="random") if fault.few and target in ("majority", "all") else fault


def _turns(all_of_them: Sequence[T], draw: random.Random) -> Iterator[T]:
    """Repeat a sequence without end, shuffled anew each time. Independent random draws would hardly reach some of its
    items."""
    while True:
        yield from draw.sample(all_of_them, len(all_of_them))


def _with_amount(fault: Fault) -> Fault:
    amount = KINDS[fault.kind].amount
    if amount is None or getattr(fault, amount[0]) is not None:
        return fault
    return msgspec.structs.replace(fault, **{amount[0]: amount[1]})


def read_struct(path: Path, kind: type[T]) -> tuple[T, dict[str, int]]:
    """Read a TOML file: its content as a struct, and the line number of each dotted key. Raises Mistake."""
    try:
        tree, lines = read_toml(path)
    except ConfigError as error:
        raise Mistake(str(error)) from error
    try:
        return msgspec.convert(tree, kind), lines
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at ")
        key = at.strip("`").removeprefix("$").removeprefix(".").replace("[...]", "")
        if name := re.search(r"unknown field `(.*)`", what):
            key = f"{key}.{name[1]}".lstrip(".")
            # The error of msgspec does not name the key of a table in a dict: search the file for the name of the
            # unknown field.
            key = next((k for k in lines if k.rpartition(".")[2] == name[1]), key) if key not in lines else key
            what = unknown(name[1], _table_at(kind, key.split(".")[:-1]).__struct_fields__)
        raise Mistake(f"{path}:{line_of(lines, key)}: {key or path.name}: {what}") from error


def _table_at(kind: Any, path: list[str]) -> Any:
    """Struct type of the TOML table at a dotted path. kind: struct type of the whole file."""
    for part in path:
        fields = {item.name: item.type for item in msgspec.structs.fields(kind)}
        if inner := fields.get(part.partition("[")[0]):
            options = (inner, *getattr(inner, "__args__", ()))
            kind = next(one for one in options if isinstance(one, type) and issubclass(one, Struct))
    return kind


def unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"{name!r} is unknown; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}")
