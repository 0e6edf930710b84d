"""Run a scenario: start the cluster and its load, inject and heal faults, drain the topics, compare the nodes."""

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from http import HTTPStatus
from http.client import HTTPException
from itertools import cycle
from typing import Any

import aiohttp
import msgspec

from chaos import faults, flat
from chaos.checkers import COUNTED, PENDING
from chaos.cluster import Cluster
from chaos.history import History
from chaos.load import Traffic
from chaos.scenario import KINDS, Fault, Mistake, Scenario, listed, rounds
from chaos.tools import authorization
from hadelay.client import AsyncClient

_FOUNDED_S, _REPLICAS_S = 60.0, 60.0
_WATCH_S, _PROBE_S, _LOOK_S = 0.1, 0.025, 0.05
_PROBING_S, _DRAIN_LOOK_S = 20.0, 0.5
_MOMENT_S, _COUNT_S = 0.2, 10.0
#: Pause of the chaos process, in seconds, that counts as a stall of the whole machine.
_STALL_S = 0.25
#: Slowest rate, in bytes per second, at which a node with an empty disk may fetch its data.
_FETCHED = 10_000_000
#: Exit code of a node that ends itself after a fatal error.
_FATAL = 70
#: While the run drains: limit of messages looked up per round, and limit of concurrent look-ups. Slow consumers leave
#: thousands of messages that expired: all of them have to be looked up before the drain ends.
_AT_A_LOOK, _TOGETHER = 1_000, 32
#: Limit of messages looked up after the drain: if a run loses more messages, a longer list does not help. Messages that
#: were not looked up count as lost, and a busy machine leaves thousands that have expired.
_ASKED_FOR = 10_000
Say = Callable[[str], None]


class Run:
    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        cluster: Cluster,
        history: History,
        say: Say,
        traffic: Traffic | None = None,
    ) -> None:
        self.scenario, self.seed, self.cluster, self.history, self.say = scenario, seed, cluster, history, say
        began = time.monotonic()
        history.clock = lambda: round(time.monotonic() - began, 6)
        self.traffic = traffic or Traffic(list(cluster.urls.values()), scenario.load, history, seed, cluster)
        self.draw = random.Random(seed)
        self.leader: str | None = None
        self._term = -1
        #: Number of processes that each node has had. Raft term and applied index never go back within one process.
        self._lives = dict.fromkeys(cluster.names, 0)
        #: `_busy`: nodes with a fault in force. `_hollow`: nodes that lost their data in a fault, until they are ready
        #: again.
        self._busy: set[str] = set()
        self._hollow: set[str] = set()
        #: `_few`: nodes with a fault of a kind that may hit only a minority of the nodes. `_lame`: nodes that were not
        #: ready in time after the latest faults.
        self._few: set[str] = set()
        self._lame: set[str] = set()
        #: Nodes with a disk fault: these may end by themselves.
        self._may_end: set[str] = set()
        #: `_suspect`: nodes whose files have flipped bits or were restored from an old copy; if such a node refuses its
        #: files, chaos empties its directory. `_rotten`: nodes with flipped bits, which a node may find much later.
        self._suspect: set[str] = set()
        self._rotten: set[str] = set()
        #: Nodes with an armed crash point; a node may reach the point after chaos has stopped waiting.
        self._armed: set[str] = set()
        self._down: set[str] = set()

    async def all(self, kinds: list[str]) -> None:
        """Do the whole run. Raises CancelledError when interrupted; all faults are healed by then."""
        timeout = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=timeout, headers=authorization()) as self._http:
            watch = asyncio.gather(self._watch(), self._pulse())
            try:
                await self._found()
                await self.traffic.start()
                sampling = self.traffic.spawn(self._sample())
                await self._break(kinds)
                sampling.cancel()
                await self._settle()
            finally:
                watch.cancel()
                await self.traffic.close()
                await asyncio.gather(watch, return_exceptions=True)

    async def _get(self, name: str, path: str) -> tuple[int, Any]:
        async with self._http.get(self.cluster.urls[name] + path) as answer:
            return answer.status, await answer.json(content_type=None)

    async def _missing(self, name: str) -> str:
        """Reason why the node is not ready; "" if it is."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError):
            status, health = await self._get(name, "/readyz")
            bad = [f"{check['name']}: {check['detail']}" for check in health["checks"] if not check["ok"]]
            return "" if status == HTTPStatus.OK else "; ".join(bad)
        return "no answer"

    async def _not_ready(self) -> dict[str, str]:
        missing = await asyncio.gather(*map(self._missing, self.cluster.names))
        return {name: why for name, why in zip(self.cluster.names, missing, strict=True) if why}

    async def _watch(self) -> None:
        """Record new leaders, and nodes that ended by themselves; restart such a node, as a service manager does."""
        while True:
            for name in self.cluster.names:
                code = self.cluster.ended(name)
                if code is None:
                    self._down.discard(name)
                elif name not in self._down and (name not in self._busy or self._may_have_ended(name, code)):
                    self._down.add(name)
                    self.say(f"{self.history.clock():7.1f} s  {name} ended by itself, exit code {code}")
                    may = name in self._may_end | self._suspect
                    may |= name in self._armed and code == -signal.SIGKILL
                    self.history.record("ended", t=self.history.clock(), node=name, code=code, may=may)
                if code is not None and name not in self._busy:
                    self._lives[name] += 1
                    if name in self._suspect and code not in (0, -signal.SIGKILL):
                        self._hollow.add(name)
                        if code != _FATAL:  # the node refused to start: empty its directory, as its error advises
                            self._forget(name)
                            self.cluster.do("empty", name)
                    self.cluster.do("start", name)
            await asyncio.gather(*map(self._look, self.cluster.names))
            await asyncio.sleep(_WATCH_S)

    def _may_have_ended(self, name: str, code: int) -> bool:
        """True if a node with a disk fault may have ended by itself; a SIGKILL is from chaos, for a power cut."""
        return name in self._may_end and code != -signal.SIGKILL

    async def _look(self, name: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError):
            asked = self._lives[name]
            status, said = await self._get(name, "/v1/cluster?stale=true")
            if status != 200:
                return
            # Record no process number while a fault hits the node, or if one began meanwhile: the status may come from
            # an earlier process of the node.
            unsure = name in self._busy or name in self._down or self._lives[name] != asked
            life = None if unsure else asked
            now, index = self.history.clock(), int(said["applied_index"])
            self.history.record(
                "said", t=now, node=name, life=life, term=said["term"], index=index, leader=said["leader"]
            )
            if said["leader"] and said["term"] > self._term:
                self._term, self.leader = said["term"], said["leader"]
                self.history.record("leader", t=now, node=self.leader, term=self._term)

    async def _pulse(self) -> None:
        """Record stalls of this process: the machine then gave the nodes no processor time either."""
        while True:
            began = self.history.clock()
            await asyncio.sleep(_WATCH_S)
            lost_s = self.history.clock() - began - _WATCH_S
            if lost_s > _STALL_S:
                self.history.record("stall", t=self.history.clock(), s=round(lost_s, 3))

    async def _sample(self) -> None:
        """Sample the resources of each node, if the scenario watches them."""
        watch = self.scenario.watch
        if watch is None:
            return
        self.history.record("watch", t=self.history.clock(), **msgspec.structs.asdict(watch))
        at = self.history.clock()
        while True:
            at += watch.every_s
            await asyncio.sleep(max(0.0, at - self.history.clock()))
            await asyncio.gather(*map(self._sample_node, self.cluster.names))

    async def _sample_node(self, name: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            found = flat.parse(await self._scrape(name))
            if (pid := self.cluster.pid(name)) is not None:
                found["anonymous"] = flat.anonymous_bytes(pid)
            self.history.record("sample", t=self.history.clock(), node=name, **found)

    async def _found(self) -> None:
        end = time.monotonic() + _FOUNDED_S
        while (waiting := await self._not_ready()) or self.leader is None:
            if time.monotonic() > end:
                raise Mistake(f"{_words(waiting) or 'no leader'}: not ready within {_FOUNDED_S:.0f} s")
            if any(self.cluster.ended(name) is not None for name in self.cluster.names):
                raise Mistake(f"a node ended before it was ready: see {next(iter(waiting))}.log")
            await asyncio.sleep(_LOOK_S)
        self.cluster.founded()

    async def _break(self, kinds: list[str]) -> None:
        clocks = len(self.cluster.names) if self.cluster.slow else 1
        scenario, nodes = self.scenario, len(self.cluster.names)
        self.history.record(
            "load", t=self.history.clock(), clocks=clocks, late_s=scenario.limits.late_s,
            lease_s=scenario.load.lease_s, nodes=nodes, sync=scenario.cluster.sync,
        )  # fmt: skip
        points = [fault.at for fault in listed(self.scenario, self.seed) if fault.at is not None]
        self.history.record("points", t=self.history.clock(), points=points)
        end = self.history.clock() + self.scenario.seconds
        for pause_s, together in rounds(self.scenario, self.seed, kinds):
            if self.scenario.rotation and self.history.clock() + pause_s >= end:
                break
            await asyncio.sleep(pause_s)
            await self._strike_all(together)
            await self._recovered()
        for fault in listed(self.scenario, self.seed):
            if fault.at is not None and fault.at not in self.history.met():
                await self._strike(fault)  # the crash point was not reached: strike another node
                await self._recovered()
        self.history.record("passed", t=self.history.clock(), points=sorted(self.cluster.passed()))
        await asyncio.sleep(max(0.0, end - self.history.clock()))

    async def _strike_all(self, together: Iterable[Fault]) -> None:
        """Inject all faults of a round at the same time. All are healed when this returns or raises, also if one failed
        or this task is cancelled."""
        try:
            async with asyncio.TaskGroup() as strikes:
                for fault in together:
                    strikes.create_task(self._strike(fault))
        except ExceptionGroup as failed:
            mistakes = failed.subgroup(Mistake)
            if mistakes is None or len(mistakes.exceptions) < len(failed.exceptions):
                raise
            raise Mistake("\n".join(map(str, mistakes.exceptions))) from failed

    async def _strike(self, fault: Fault) -> None:
        nodes = faults.choose(fault, self.cluster.names, self.leader, self._busy, self.draw)
        if fault.few:
            # Prefer nodes with lost or damaged data: only a minority may have damage at a time.
            hollow = self._hollow | self._few | (self._rotten if fault.hollow else set())
            room = (len(self.cluster.names) - 1) // 2 - len(hollow)
            nodes = sorted(hollow - self._busy - self._hollow)[:1] if room <= 0 else nodes[:room]
        if not nodes:
            return
        deposed = fault.kind in faults.DEPOSING and self.leader in nodes
        holds = () if KINDS[fault.kind].brief else nodes
        self._busy.update(holds)
        self._few.update(nodes if fault.few else ())
        for name in nodes:
            # Count a new process of the node from now on: the fault may end the node's running process.
            self._lives[name] += 1
        if fault.kind in faults.MAY_END:
            self._may_end.update(nodes)
        if fault.hollow:
            self._hollow.update(nodes)
        self._armed.update(nodes if fault.at else ())
        if fault.kind in ("rot", "old-copy"):
            self._suspect.update(nodes)
            self._rotten.update(nodes if fault.kind == "rot" else ())
        elif fault.hollow:
            self._forget(*nodes)
        self.say(f"{self.history.clock():7.1f} s  {fault.kind} {' '.join(nodes)} for {fault.seconds:.1f} s")
        names = self.cluster.names
        began = self.history.clock()
        self.history.record("fault", t=began, kind=fault.kind, nodes=nodes, all=names, deposed=deposed)
        probe = None
        striking = faults.strike(self.cluster, nodes, fault)
        try:
            await self._do(striking.__enter__)
            await asyncio.sleep(0)  # let the other faults of the round choose their nodes first
            others = [name for name in names if name not in self._busy | self._lame]
            if deposed and len(others) > len(names) // 2:
                probe = self.traffic.spawn(self._probe(fault.kind, others, began))
            if fault.at is not None:
                await self._crashed(nodes, fault)
            elif not KINDS[fault.kind].brief:
                await asyncio.sleep(fault.seconds)
        finally:
            await self._do(lambda: striking.__exit__(None, None, None))
            self.history.record("healed", t=self.history.clock(), kind=fault.kind, nodes=nodes, began=began)
            self._busy.difference_update(holds)
            self._few.difference_update(nodes)
        if probe is not None:
            await probe

    def _forget(self, *names: str) -> None:
        """Note that these nodes have no damaged files any more: their directories are emptied."""
        self._suspect.difference_update(names)
        self._rotten.difference_update(names)

    async def _crashed(self, nodes: list[str], fault: Fault) -> None:
        """Wait until a node ended at the crash point, and then a moment longer, in which the other nodes may end there,
        too."""
        end = self.history.clock() + fault.seconds
        while self.history.clock() < end:
            if any(self.cluster.ended(name) is not None for name in nodes):
                end = min(end, self.history.clock() + _MOMENT_S)
                if all(self.cluster.ended(name) is not None for name in nodes):
                    break
            await asyncio.sleep(_LOOK_S)
        ended = [name for name in nodes if self.cluster.ended(name) == -signal.SIGKILL]
        self.history.record("crash", t=self.history.clock(), at=fault.at, nodes=ended)

    async def _do(self, step: Callable[[], Any]) -> None:
        """Run a step of a fault; if this task is cancelled, finish the step first."""
        if not self.cluster.slow:
            step()
            return
        work = asyncio.ensure_future(asyncio.to_thread(step))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            work.result()  # if the step failed, raise its error instead of the cancellation
            raise

    async def _probe(self, kind: str, others: list[str], began: float) -> None:
        """Record the failover time: from the start of a fault until the other nodes store a message again. Probes start
        while the fault is still being injected, because the nodes may recover before its injection is complete."""
        clients = [self.traffic.client([self.cluster.urls[name]]) for name in others]
        asking: set[asyncio.Task[bool]] = set()
        for client in cycle(clients):
            asked = self.history.clock()
            asking.add(self.traffic.spawn(self.traffic.put_one(client, timeout_s=0.5)))
            done, asking = await asyncio.wait(asking, timeout=_PROBE_S, return_when=asyncio.FIRST_COMPLETED)
            took_s = self.history.clock() - began
            if took_s > _PROBING_S or any(task.result() for task in done if not task.cancelled()):
                break
            await asyncio.sleep(max(0.0, asked + _PROBE_S - self.history.clock()))
        limit_s = self.scenario.limits.failover_s
        self.history.record("failover", t=self.history.clock(), kind=kind, s=took_s, limit_s=limit_s)

    async def _recovered(self) -> None:
        """Wait until no fault is in force and every node is ready, or the limit has passed."""
        began, why = self.history.clock(), ""
        while True:
            waiting = await self._not_ready()
            took_s = self.history.clock() - began
            if not waiting:
                break
            limit_s = self.scenario.limits.recovery_s
            if took_s > limit_s and took_s > limit_s + self.cluster.used_bytes() / _FETCHED:
                why = f"not ready: {_words(waiting)}"
                self.say(f"{self.history.clock():7.1f} s  {took_s:.1f} s after healing {why}")
                break
            await asyncio.sleep(_LOOK_S)
        self._may_end.clear()
        self._suspect &= self._rotten
        self._armed.clear()
        self._hollow &= set(waiting)
        self._lame = set(waiting)
        self.history.record("recovered", t=self.history.clock(), s=took_s, why=why)

    async def _settle(self) -> None:
        self.say(f"{self.history.clock():7.1f} s  healed; what is owed is handed out")
        self.traffic.draining = True
        await self.traffic.no_more()
        await self._recovered()
        load = self.scenario.load
        end = self.history.clock() + 2 * load.delay_s[1] + load.ttl_s[1] + 2 * load.lease_s
        end += self.scenario.limits.drain_s
        client = self.traffic.client()
        looked = 0
        while (owed := self._owed()) and self.history.clock() < end:
            await asyncio.sleep(_DRAIN_LOOK_S)
            # Look up other messages in each round: the first ones may be dead letters, which never leave the list.
            some = sorted(owed & self._owed())
            looked = looked if looked < len(some) else 0
            await self._ask_for_all(client, some[looked : looked + _AT_A_LOOK])
            looked += _AT_A_LOOK
        await self.traffic.finish(client)
        self.history.record("drained", t=self.history.clock())
        await self._ask_for_all(client, sorted(self._owed())[:_ASKED_FOR], at_last=True)
        await asyncio.to_thread(self._compare)
        await self._count()

    async def _ask_for_all(self, client: AsyncClient, ids: list[str], *, at_last: bool = False) -> None:
        for first in range(0, len(ids), _TOGETHER):
            await asyncio.gather(
                *(self._ask_for(client, one, at_last=at_last) for one in ids[first : first + _TOGETHER])
            )

    async def _ask_for(self, client: AsyncClient, message_id: str, *, at_last: bool = False) -> None:
        """Look up a message without a confirmed ack, and record its state if it is final. at_last: record any state,
        because no hand-out can follow."""
        state, ended_ms = await self.traffic.look_up(client, message_id)
        if at_last or state not in (*PENDING, "dead"):
            self.history.record("asked-for", t=self.history.clock(), id=message_id, state=state, ended_ms=ended_ms)

    def _owed(self) -> set[str]:
        """Ids of stored messages that nobody tried to cancel, without a confirmed ack and without a known end."""
        stored = {put.id for put in self.history.puts.values() if put.id is not None and put.cancel_asked is None}
        return stored - {given.id for given in self.history.given if given.acked is not None} - self.history.ends.keys()

    async def _count(self) -> None:
        """Record the counters of each node, once all nodes have applied the same entries."""
        end = self.history.clock() + _COUNT_S
        while True:
            found = await asyncio.gather(*map(self._metrics, self.cluster.names), return_exceptions=True)
            counts = [one for one in found if isinstance(one, dict)]
            if len(counts) == len(found) and len({one["raft_applied_index"] for one in counts}) == 1:
                break
            if self.history.clock() > end:
                self.history.record("uncounted", t=self.history.clock(), why=f"{found}")
                return
            await asyncio.sleep(_LOOK_S)
        for name, count in zip(self.cluster.names, counts, strict=True):
            ours = not self.cluster.slow
            self.history.record("counted", t=self.history.clock(), node=name, ours=ours, counts=count)

    async def _scrape(self, name: str) -> str:
        async with self._http.get(self.cluster.urls[name] + "/metrics") as answer:
            return await answer.text()

    async def _metrics(self, name: str) -> dict[str, int]:
        lines = (await self._scrape(name)).splitlines()
        values = dict(line.rpartition(" ")[::2] for line in lines if line.startswith("hadelay_"))
        return {metric: int(float(values[f"hadelay_{metric}"])) for metric in COUNTED}

    def _compare(self) -> None:
        servers = next(iter(self.cluster.urls.values()))
        command = [sys.executable, "-m", "hadelay", "check", "replicas", "--servers", servers, "--timeout", "30"]
        # Run the command in its own session: Ctrl-C is meant for chaos only.
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_REPLICAS_S, start_new_session=True)
            code, said = done.returncode, (done.stdout + done.stderr).strip()
            different = [] if self.cluster.slow else list(self._different())
        except (subprocess.TimeoutExpired, OSError, HTTPException) as error:
            code, said, different = 1, f"the nodes could not be compared: {error}", []
        self.history.record("replicas", t=self.history.clock(), by="checksums", code=code, said=said)
        for said in different:
            self.history.record("replicas", t=self.history.clock(), by="bytes", code=bool(said), said=said)

    def _different(self) -> Iterator[str]:
        """Compare each hour file of all nodes byte by byte; yields "" for equal bytes, else a text with the difference.
        Equal checksums do not prove equal bytes: every entry ends with its own CRC, so the CRC of such a file does not
        depend on the entries."""
        urls = self.cluster.urls
        hours = {name: json.loads(_fetch(f"{url}/v1/hours"))["hours"] for name, url in urls.items()}
        for hour in sorted({hour["hour"] for found in hours.values() for hour in found}):
            for kind in ("log", "idx", "dsp"):
                digests = {
                    name: sha256(_fetch(f"{url}/v1/hours/{hour}/{kind}")).hexdigest() for name, url in urls.items()
                }
                said = f"{hour}.{kind} differs: " + ", ".join(f"{name} {d[:12]}" for name, d in digests.items())
                yield said if len(set(digests.values())) > 1 else ""


def _words(waiting: dict[str, str]) -> str:
    return ", ".join(f"{name} ({why})" for name, why in waiting.items())


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_REPLICAS_S) as answer:
        content: bytes = answer.read()
    return content
