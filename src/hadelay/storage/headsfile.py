"""Encodes and decodes `.heads` files, whose data is derived from an hour's index (docs/spec/on-disk-format.md)."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import COUNTER, FORMAT_VERSION, HEAD, HEADS, HEADS_MAGIC, SECONDS_PER_HOUR
from hadelay.codec.linking import Heads, no_heads


def no_counters() -> npt.NDArray[np.void]:
    return np.zeros(0, COUNTER)


@dataclass(slots=True)
class Derived:
    """Data derived from an hour's index: heads of its first `entries` entries, and counts per topic and minute of its
    first `counted` entries. on_disk: number of entries that the `.heads` file covers."""

    heads: Heads = field(default_factory=no_heads)
    entries: int = 0
    counters: npt.NDArray[np.void] = field(default_factory=no_counters)
    counted: int = 0
    on_disk: int = 0


def encode_heads(hour: int, derived: Derived) -> bytes:
    heads = np.empty(SECONDS_PER_HOUR, HEAD)
    heads["last"], heads["count"] = derived.heads
    header = np.zeros(1, HEADS)
    header[0] = (
        HEADS_MAGIC, FORMAT_VERSION, hour, derived.entries, derived.counted, len(derived.counters), 0,
    )  # fmt: skip
    body = heads.tobytes() + derived.counters.tobytes()
    header["crc"] = crc32c(body, crc32c(header.tobytes()[:-4]))
    return header.tobytes() + body


def decode_heads(data: bytes, hour: int) -> Derived | None:
    """The content of a `.heads` file; None unless every byte verifies."""
    if len(data) < HEADS.itemsize:
        return None
    header = np.frombuffer(data, HEADS, 1)[0]
    body = data[HEADS.itemsize :]
    whole = SECONDS_PER_HOUR * HEAD.itemsize + int(header["counters"]) * COUNTER.itemsize
    if (header["magic"], header["version"], header["hour"]) != (HEADS_MAGIC, FORMAT_VERSION, hour):
        return None
    if len(body) != whole or crc32c(body, crc32c(data[: HEADS.itemsize - 4])) != header["crc"]:
        return None
    rows, entries = np.frombuffer(body, HEAD, SECONDS_PER_HOUR), int(header["entries"])
    heads = Heads(rows["last"].copy(), rows["count"].copy())
    counters = np.frombuffer(body, COUNTER, offset=SECONDS_PER_HOUR * HEAD.itemsize).copy()
    return Derived(heads, entries, counters, int(header["counted"]), on_disk=entries)
