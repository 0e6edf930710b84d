"""One run: start, load, break, heal, drain, compare. Whatever happens, what was broken is healed on the way out."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from chaos import faults
from chaos.cluster import Cluster
from chaos.history import History
from chaos.load import Traffic
from chaos.scenario import KINDS, Fault, Mistake, Scenario, rounds
from hadelay.errors import HadelayError

_FOUNDED_S, _DRAIN_S, _REPLICAS_S = 60.0, 60.0, 60.0
_WATCH_S, _PROBE_S, _LOOK_S = 0.1, 0.025, 0.05
_PROBING_S, _DRAIN_LOOK_S = 20.0, 0.5
#: Not asked one by one for more than this: a run that loses more needs no more to be told.
_ASKED_FOR = 1_000
Say = Callable[[str], None]


class Run:
    def __init__(self, scenario: Scenario, seed: int, cluster: Cluster, history: History, say: Say) -> None:
        self.scenario, self.seed, self.cluster, self.history, self.say = scenario, seed, cluster, history, say
        began = time.monotonic()
        history.clock = lambda: round(time.monotonic() - began, 6)
        self.traffic = Traffic(list(cluster.urls.values()), scenario.load, history, seed)
        self.draw = random.Random(seed)
        self.leader: str | None = None
        self._term = -1
        #: Nodes that a fault holds, and those that are wiped or not yet ready again after it.
        self._busy: set[str] = set()
        self._hollow: set[str] = set()
        #: Nodes that a fault of the disk holds: these may end by themselves.
        self._may_end: set[str] = set()
        self._down: set[str] = set()

    async def all(self, kinds: list[str]) -> None:
        """Raises CancelledError when interrupted; by then everything is healed."""
        timeout = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=timeout) as self._http:
            watch = asyncio.ensure_future(self._watch())
            try:
                await self._found()
                await self.traffic.start()
                await self._break(kinds)
                await self._settle()
            finally:
                watch.cancel()
                await self.traffic.close()
                await asyncio.gather(watch, return_exceptions=True)

    # looking

    async def _get(self, name: str, path: str) -> tuple[int, Any]:
        async with self._http.get(self.cluster.urls[name] + path) as answer:
            return answer.status, await answer.json(content_type=None)

    async def _ready(self, name: str) -> bool:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return (await self._get(name, "/readyz"))[0] == 200
        return False

    async def _not_ready(self) -> list[str]:
        ready = await asyncio.gather(*map(self._ready, self.cluster.names))
        return [name for name, fine in zip(self.cluster.names, ready, strict=True) if not fine]

    async def _watch(self) -> None:
        """Who leads, and who ended by itself (and is started again, as a service manager does)."""
        while True:
            for name in self.cluster.names:
                code = self.cluster.ended(name)
                if code is None:
                    self._down.discard(name)
                elif name not in self._down and (name not in self._busy or self._may_have_ended(name, code)):
                    self._down.add(name)
                    self.say(f"{self.history.clock():7.1f} s  {name} ended by itself, exit code {code}")
                    may = name in self._may_end
                    self.history.record("ended", t=self.history.clock(), node=name, code=code, may=may)
                if code is not None and name not in self._busy:
                    self.cluster.do("start", name)
            await asyncio.gather(*map(self._look, self.cluster.names))
            await asyncio.sleep(_WATCH_S)

    def _may_have_ended(self, name: str, code: int) -> bool:
        """By itself, that is: a power cut kills the process too."""
        return name in self._may_end and code != -signal.SIGKILL

    async def _look(self, name: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError):
            status, said = await self._get(name, "/v1/cluster?stale=true")
            if status == 200 and said["leader"] and said["term"] > self._term:
                self._term, self.leader = said["term"], said["leader"]
                self.history.record("leader", t=self.history.clock(), node=self.leader, term=self._term)

    async def _found(self) -> None:
        end = time.monotonic() + _FOUNDED_S
        while (waiting := await self._not_ready()) or self.leader is None:
            if time.monotonic() > end:
                raise Mistake(f"{', '.join(waiting) or 'no leader'}: not ready within {_FOUNDED_S:.0f} s")
            if any(self.cluster.ended(name) is not None for name in self.cluster.names):
                raise Mistake(f"a node ended before it was ready: see {waiting[0]}.log")
            await asyncio.sleep(_LOOK_S)
        self.cluster.founded()

    # breaking

    async def _break(self, kinds: list[str]) -> None:
        clocks = len(self.cluster.names) if self.cluster.slow else 1
        self.history.record("load", t=self.history.clock(), clocks=clocks)
        end = self.history.clock() + self.scenario.seconds
        for pause_s, together in rounds(self.scenario, self.seed, kinds):
            if self.scenario.rotation and self.history.clock() + pause_s >= end:
                break
            await asyncio.sleep(pause_s)
            await asyncio.gather(*map(self._strike, together))
            await self._recovered()
        await asyncio.sleep(max(0.0, end - self.history.clock()))

    async def _strike(self, fault: Fault) -> None:
        nodes = faults.choose(fault, self.cluster.names, self.leader, self._busy, self.draw)
        if KINDS[fault.kind].few:
            room = (len(self.cluster.names) - 1) // 2 - len(self._hollow)
            nodes = nodes[: max(0, room)]
        if not nodes:
            return
        deposed = fault.kind in faults.DEPOSING and self.leader in nodes
        self._busy.update(nodes)
        if fault.kind in faults.MAY_END:
            self._may_end.update(nodes)
        if fault.kind == "wipe":
            self._hollow.update(nodes)
        self.say(f"{self.history.clock():7.1f} s  {fault.kind} {' '.join(nodes)} for {fault.seconds:.1f} s")
        names = self.cluster.names
        began = self.history.clock()
        self.history.record("fault", t=began, kind=fault.kind, nodes=nodes, all=names, deposed=deposed)
        probe = None
        held = faults.strike(self.cluster, nodes, fault)
        try:
            await self._do(held.__enter__)
            others = [name for name in names if name not in self._busy]
            if deposed and len(others) > len(names) // 2:  # they were all ready: see _recovered
                probe = self.traffic.spawn(self._probe(fault.kind, others))
            if not KINDS[fault.kind].brief:
                await asyncio.sleep(fault.seconds)
        finally:
            await self._do(lambda: held.__exit__(None, None, None))
            self.history.record("healed", t=self.history.clock(), kind=fault.kind, nodes=nodes, began=began)
            self._busy.difference_update(nodes)
        if probe is not None:
            await asyncio.wait([probe], timeout=_PROBING_S)

    async def _do(self, step: Callable[[], Any]) -> None:
        """A step of a fault, to its end, also when this is cancelled meanwhile."""
        if not self.cluster.slow:
            step()
            return
        work = asyncio.ensure_future(asyncio.to_thread(step))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    async def _probe(self, kind: str, others: list[str]) -> None:
        """How long until the other nodes store a message again."""
        began = self.history.clock()
        clients = [self.traffic.client([self.cluster.urls[name]]) for name in others]
        asking: set[asyncio.Task[bool]] = set()
        for turn in range(int(_PROBING_S / _PROBE_S)):
            asking.add(self.traffic.spawn(self.traffic.put_one(clients[turn % len(clients)], timeout_s=0.5)))
            done, asking = await asyncio.wait(asking, timeout=_PROBE_S, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() for task in done if not task.cancelled()):
                break
            await asyncio.sleep(max(0.0, began + (turn + 1) * _PROBE_S - self.history.clock()))
        took_s = self.history.clock() - began
        self.history.record("failover", t=self.history.clock(), kind=kind, s=took_s)
        limit_s = self.scenario.limits.failover_s
        if limit_s and took_s > limit_s:
            why = f"nobody stored anything for {took_s:.2f} s after {kind} of the leader (limits.failover_s)"
            self.history.record("not-recovered", t=self.history.clock(), s=took_s, why=why)

    async def _recovered(self) -> None:
        """Nothing holds any node; every one is ready again, or has been waited for long enough."""
        began = self.history.clock()
        while True:
            waiting = await self._not_ready()
            took_s = self.history.clock() - began
            if not waiting:
                break
            if took_s > self.scenario.limits.recovery_s:
                why = f"{', '.join(waiting)} not ready"
                self.history.record("not-recovered", t=self.history.clock(), s=took_s, why=why)
                self.say(f"{self.history.clock():7.1f} s  {why} {took_s:.1f} s after healing")
                break
            await asyncio.sleep(_LOOK_S)
        self._may_end.clear()
        self._hollow &= set(waiting)
        self.history.record("recovered", t=self.history.clock(), s=took_s)

    # the end

    async def _settle(self) -> None:
        self.say(f"{self.history.clock():7.1f} s  healed; what is owed is handed out")
        self.traffic.draining = True
        await self.traffic.no_more()
        await self._recovered()
        end = self.history.clock() + self.scenario.load.delay_s[1] + 2 * self.scenario.load.lease_s + _DRAIN_S
        while self._owed() and self.history.clock() < end:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_LOOK_S)
        self.history.record("drained", t=self.history.clock())
        client = self.traffic.client()
        for message_id in sorted(self._owed())[:_ASKED_FOR]:
            try:
                state: str = (await client.get(message_id)).state
            except HadelayError as error:
                state = f"not found: {error}"
            self.history.record("asked-for", t=self.history.clock(), id=message_id, state=state)
        await asyncio.to_thread(self._compare)

    def _owed(self) -> set[str]:
        """Stored, not cancelled, and not yet handed out."""
        stored = {put.id for put in self.history.puts.values() if put.id is not None and put.cancel_asked is None}
        return stored - {given.id for given in self.history.given}

    def _compare(self) -> None:
        servers = next(iter(self.cluster.urls.values()))
        command = [sys.executable, "-m", "hadelay", "check", "replicas", "--servers", servers, "--timeout", "30"]
        # In a session of its own: Ctrl-C is ours to handle.
        done = subprocess.run(command, capture_output=True, text=True, timeout=_REPLICAS_S, start_new_session=True)
        said = (done.stdout + done.stderr).strip()
        self.history.record("replicas", t=self.history.clock(), code=done.returncode, said=said)
