"""`python -m tests.fuzz [--seconds N] [TARGET …]`: change inputs, keep those that run new lines, stop at what breaks.

A coverage-guided loop in one process. Inputs that reach lines which no kept one reached are added to tests/fuzz/corpus,
one file of hex lines per target, which `make test` replays. An input that raises what is not declared, takes longer
than a second, or wants more than 2 GiB is printed, and kept too.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tools.coverage import Watch

CORPUS = Path(__file__).resolve().parent / "corpus"
PACKAGES = (
    "codec",
    "ledger",
    "timing",
    "storage",
    "raft",
    "server",
    "http",
    "http/forwarding",
    "pipeline",
    "cli",
    "client",
    ".",
    "../../chaos",
)
SLOW_S = 1.0
_LARGEST = 3_000
_WORDS = (
    b"\0", b"\xff", b"\x7f", b"\x80", b"\xff\xff", b"\xff" * 4, b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f",
    b"\1\0\0\0",
    b"\xc0", b"\xc1", b"\xc7", b"\xdd\xff\xff\xff\xff", b"\x91", b"\x81", b"\xcb\x7f\xf0" + bytes(6), b"[", b"{", b'"',
    b"null", b"1e999", b"-1", b"\xed\xa0\x80", b"=", b",", b":",
)  # fmt: skip


class Slow(BaseException):
    """It takes too long."""


def changed(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(9):
            case 0 | 1 if at < len(raw):
                raw[at] ^= 1 << rng.randrange(8)
            case 2 if at < len(raw):
                raw[at] = rng.randrange(256)
            case 3:
                word = rng.choice(_WORDS)
                raw[at : at + len(word) * rng.randrange(2)] = word
            case 4:
                del raw[at : at + rng.choice((1, 2, 8, 1 << 20))]
            case 5:
                raw[at:at] = raw[at : at + rng.randrange(1, 64)] * rng.choice((1, 1, 3, 200))
            case 6:
                raw[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case 7:
                other = rng.choice(others)
                start = rng.randrange(len(other) + 1)
                raw[at : at + rng.randrange(64)] = other[start : start + rng.randrange(1, 200)]
            case _ if at < len(raw):
                raw[at] = (raw[at] + rng.choice((-1, 1))) & 0xFF
    return bytes(raw[:_LARGEST])


def read(name: str) -> list[bytes]:
    path = CORPUS / f"{name}.txt"
    return [bytes.fromhex(line) for line in path.read_text().split("\n") if line] if path.exists() else []


def attempt(target: Any, data: bytes) -> str:
    """What is wrong, if anything."""
    try:
        target.run(data)
    except target.declared:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _late(*_: object) -> None:
    raise Slow


class Fuzzer:
    def __init__(self, name: str, target: Any, watch: Watch, rng: random.Random) -> None:
        self.name, self.target, self.watch, self.random = name, target, watch, rng
        #: A byte per line: 1 once it was run.
        self.seen = 0
        self.kept = read(name)
        self.queue = [*target.samples()]
        self.runs = 0
        self.broken: dict[str, bytes] = {}
        for data in [*self.queue, *self.kept]:
            self.run(data)
        self.queue += self.kept

    def run(self, data: bytes) -> bool:
        """True if lines were run that never were before."""
        flat = self.watch.flat
        flat[:] = bytes(len(flat))
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, SLOW_S)
            wrong = attempt(self.target, data)
        except Slow:
            wrong = "takes too long"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self.runs += 1
        if wrong and wrong.split(":")[0] not in self.broken:
            self.broken[wrong.split(":")[0]] = data
            print(f"{self.name}: {wrong[:300]}\n    {data.hex()[:2000]}", flush=True)
            self.keep(data)
        before = self.seen
        self.seen |= int.from_bytes(flat, "little")
        return self.seen != before

    def keep(self, data: bytes) -> None:
        CORPUS.mkdir(exist_ok=True)
        if data not in self.kept:
            self.kept.append(data)
            (CORPUS / f"{self.name}.txt").write_text("".join(f"{one.hex()}\n" for one in self.kept))

    def go(self, seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            for _ in range(50):
                data = changed(self.random, self.random.choice(self.queue), self.queue)
                if self.run(data):
                    self.queue.append(data)
                    self.keep(data)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=float, default=10.0, help="of computing, per target")
    parser.add_argument("--seed", type=int, default=0, help="0: by the time")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    signal.signal(signal.SIGVTALRM, _late)
    logging.disable(logging.CRITICAL)
    watch = Watch(PACKAGES)
    watch.start()
    from tests.fuzz.targets import TARGETS

    gc.freeze()
    broken = 0
    for name in options.targets or TARGETS:
        fuzzer = Fuzzer(name, TARGETS[name], watch, random.Random(options.seed or time.time_ns()))
        fuzzer.go(options.seconds)
        lines = fuzzer.seen.bit_count()
        size = sum(map(len, fuzzer.kept))
        print(f"{name}: {fuzzer.runs} runs, {lines} lines, {len(fuzzer.kept)} inputs of {size} bytes kept", flush=True)
        broken += len(fuzzer.broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
