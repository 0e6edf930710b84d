"""The node link, fed with random and with mutated bytes: no process ends, and nothing that nobody sent is taken.

On the wire a checksum ends the connection at the first byte that is another (and TLS before that). Behind it stands
the case that no checksum catches, a member that sends nonsense: its frames are mutated after the checksum. Seeds are
fixed, so a run that fails fails again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import pytest

from chaos.sim.cluster import SimCluster
from hadelay.model import Draft
from hadelay.platform import strangers, tcp
from hadelay.platform.hello import HELLO, PROTOCOL, VERSION, packed
from hadelay.platform.tcp import AsyncioNetwork
from hadelay.raft import messages
from tests.raft.test_tcp import until
from tests.security.conftest import Pki
from tests.security.test_node_link import on_uvloop, pair
from tests.server.test_lost_disks import wait_for_leader


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut off, repeated, swapped for others; or all of them new."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(raw)) if raw else 0
        match rng.randrange(6):
            case 0 | 1 if raw:
                raw[at] ^= 1 << rng.randrange(8)
            case 2 if raw:
                raw[at] = rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xFF))
            case 3:
                del raw[at:]
            case 4:
                raw[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
            case _:
                raw[at:at] = raw[at : at + rng.randrange(1, 64)]
    return bytes(raw) if rng.random() < 0.95 else rng.randbytes(rng.randrange(200))


class Middle:
    """Between n2, which dials, and n1: changes one byte of what it carries, when `spoil` says so."""

    def __init__(self, network: AsyncioNetwork) -> None:
        self.target = network.peers["n1"]
        self.spoil: Callable[[bytes], bytes] = lambda data: data

    async def start(self, network: AsyncioNetwork) -> None:
        self.server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        network.peers["n1"] = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.target.split(":")
        there = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._copy(reader, there[1]), self._copy(there[0], writer), return_exceptions=True)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(self.spoil(data))
                await writer.drain()
        finally:
            writer.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_a_byte_changed_on_the_way_ends_the_connection(
    pki: Pki, encrypted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp, "_REFUSED_RETRY_S", 0.02)
    monkeypatch.setattr(tcp, "_FRAME_TIMEOUT_S", 0.1)
    monkeypatch.setattr(strangers, "HELLO_TIMEOUT_S", 0.5)
    caplog.set_level(logging.CRITICAL)

    @on_uvloop
    async def run() -> None:
        certificates = [pki.mutual(name) if encrypted else None for name in ("n1", "n2")]
        rng = random.Random(7)
        async with pair(*certificates, through=Middle) as (one, left, two, right):
            middle = two.middle  # type: ignore[attr-defined]
            spoiled = 0

            def spoil(data: bytes) -> bytes:
                nonlocal spoiled
                if rng.random() < 0.7:
                    return data
                spoiled += 1
                raw = bytearray(data)
                raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
                return bytes(raw)

            for number in range(25):
                middle.spoil = lambda data: data
                await until(lambda: "n2" in one._up and "n1" in two._up)
                middle.spoil = spoil
                for n in range(3):
                    two.send("n1", b"from n2 %d.%d " % (number, n) * rng.choice((1, 100, 5_000)))
                    one.send("n2", b"from n1 %d.%d " % (number, n))
                await asyncio.sleep(0.002)
            assert spoiled > 5
            for inbox, words in ((left, b"from n2 "), (right, b"from n1 ")):
                assert inbox.frames
                for _, frame in inbox.frames:
                    first = frame[: frame.index(b" ", 8) + 1]
                    assert first.startswith(words)
                    assert frame == first * (len(frame) // len(first)), "whole, and as it was sent"
            middle.server.close()

    run()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_strangers_bytes_disturb_nobody(
    pki: Pki, encrypted: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(strangers, "HELLO_TIMEOUT_S", 0.2)
    caplog.set_level(logging.CRITICAL)

    @on_uvloop
    async def run() -> None:
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        certificates = [pki.mutual(name) if encrypted else None for name in ("n1", "n2")]
        rng = random.Random(3)
        hello = packed(messages.encode(HELLO, PROTOCOL, VERSION, "test", 0, "n9", 1))
        async with pair(*certificates) as (one, left, _, _):
            await until(lambda: left.up)
            host, port = one.listen.split(":")

            async def talk(data: bytes) -> None:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                try:
                    async with asyncio.timeout(5):
                        while await reader.read(1 << 16):
                            pass
                except ConnectionError:
                    pass
                writer.close()

            for _ in range(12):
                inputs = [mutated(rng, hello) for _ in range(6)]
                inputs += [packed(mutated(rng, hello[8:])) for _ in range(6)]
                inputs += [rng.randbytes(rng.randrange(400)) for _ in range(6)]
                await asyncio.gather(*map(talk, inputs))
            assert left.up == ["n2"], "the link that was there is there"
            assert not left.frames
            assert not failures

    run()


#: How a node stops on purpose, when a member of its cluster says what cannot be: two leaders of one term, another past.
#: And what it may do when a member says that there is a later term: ask for votes soon after a heartbeat.
ON_PURPOSE = ("claims to lead term", "differs from the cluster's", "asks for votes in term")


@pytest.mark.parametrize("seed", range(4))
def test_a_member_that_sends_nonsense_ends_nobody(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SimCluster(seed, restart=False)
    corpus: list[tuple[str, str, bytes]] = []
    carry = cluster.net.carry

    def record(connection: object, a: str, b: str, data: bytes, urgent: bool) -> None:
        corpus.append((a, b, data))
        carry(connection, a, b, data, urgent)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster.net, "carry", record)
    cluster.start_all()
    wait_for_leader(cluster)
    cluster.world.run_for(1.0)
    answers: list[object] = []

    def publish(count: int) -> None:
        for node in cluster.nodes():
            for n in range(count):
                draft = Draft("orders", 600_000 + n, True, 0, 0, b"", b"%d" % n)
                node.publishing.publish([draft], None, lambda result, error: answers.append(error or result))

    publish(5)
    cluster.world.run_for(1.0)
    assert len(answers) == 15
    corpus = [(a, b, data) for a, b, data in corpus if len(data) < 20_000]
    by_kind: dict[int, list[tuple[str, str, bytes]]] = {}
    for item in corpus:
        by_kind.setdefault(item[2][0], []).append(item)
    rng = random.Random(seed)
    for number in range(1_500):
        a, b, data = rng.choice(by_kind[rng.choice(sorted(by_kind))])
        process = cluster.process(b)
        if process is None or process.node is None:
            continue
        process.node.raft.frame(a, mutated(rng, data) or b"\0")
        if number % 50 == 0:
            cluster.world.run_for(0.2)
    wrong = [v for v in cluster.violations if not any(words in str(v) for words in ON_PURPOSE)]
    assert not wrong, wrong
    # A member may publish what it likes, so there may be topics with other names.
    assert all("orders" in {topic.name for topic in node.ledger.topics.all} for node in cluster.nodes())
