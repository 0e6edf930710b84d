"""Frames of the node link whose fields are msgpack (docs/spec/node-link.md): one kind byte, then an array. HELLO, the
first frame of each side, and REFUSED, the frame for refused connections."""

import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from hadelay.codec.checksums import crc32c
from hadelay.platform.strangers import MAX_HELLO, Verdict

#: Name of the protocol in HELLO. Versions from before the first release sent "hadelay-raft", and are refused.
PROTOCOL = "hadelay-link"
VERSION = 1
HELLO, REFUSED = 1, 0
#: Header of a frame: length, and CRC32C of the frame.
HEAD = struct.Struct("<II")
_NO_HELLO = "the first frame on this node link of a hadelay cluster must be HELLO"

#: Upper limit of numbers in frames, such as terms and indexes: a number below the limit can be incremented and encoded.
LIMIT = 1 << 63


class BadFrame(Exception):
    """A frame that violates docs/spec/node-link.md. The frame is ignored, and the link dropped."""


def encode(kind: int, *fields: Any) -> bytes:
    body: bytes = msgpack.packb(fields)
    return bytes((kind,)) + body


def decode(data: bytes, *types: type) -> list[Any]:
    """Decode a frame's fields. BadFrame unless fields have these types, and numbers are from 0 to below LIMIT."""
    try:
        fields = msgpack.unpackb(memoryview(data)[1:])
    except Exception as error:  # msgpack raises several types of errors
        raise BadFrame(f"frame of kind {data[0]}: {error}") from error
    if type(fields) is not list or [type(field) for field in fields] != list(types):
        raise BadFrame(f"frame of kind {data[0]}: the types of the fields are not {[t.__name__ for t in types]}")
    if any(type(field) is int and not 0 <= field < LIMIT for field in fields):
        raise BadFrame(f"frame of kind {data[0]}: a number is negative or too large")
    return fields


class Hello:
    """HELLO of this node, and the check of HELLOs from other nodes."""

    def __init__(self, name: str, *, cluster_id: str, group: int, feature_level: int, tls: bool) -> None:
        self.name, self.cluster_id, self.group, self.tls = name, cluster_id, group, tls
        #: HELLO frame with its header, ready to send.
        self.packed = packed(encode(HELLO, PROTOCOL, VERSION, cluster_id, group, name, feature_level))

    def judge(self, data: bytes, peers: Mapping[str, str]) -> tuple[Verdict, str]:
        """Judge a connection's first bytes. Returns (verdict, reason of a refusal to send to the other side, or "")."""
        looks_like_tls = data[:2] == b"\x16\x03" and data[2:3] != b"\0"
        if self.tls:
            return (Verdict.IN_TURN, "") if looks_like_tls else (Verdict.NEVER, "the other side does not use TLS")
        if looks_like_tls:
            return Verdict.NEVER, f"{self.name} does not use TLS on the node link (raft.tls_cert is not set)"
        if len(data) < HEAD.size:
            return Verdict.IN_TURN, ""
        length, crc = HEAD.unpack_from(data)
        frame = data[HEAD.size : HEAD.size + length]
        if length <= MAX_HELLO and len(frame) < length:
            return Verdict.IN_TURN, ""
        if length > MAX_HELLO or crc32c(frame) != crc:
            return Verdict.NEVER, _NO_HELLO
        _, reason = self.read(frame, peers, None)
        return (Verdict.NEVER, reason) if reason else (Verdict.NOW, "")

    def read(self, frame: bytes, peers: Mapping[str, str], dialled: str | None) -> tuple[str, str]:
        """Check a HELLO frame. Returns (sender's name, reason to refuse the connection or ""). peers: name → address.
        dialled: name of the peer that this node called; None for an accepted connection."""
        try:
            if len(frame) > MAX_HELLO or frame[:1] != bytes((HELLO,)):
                raise BadFrame("the first frame is not a HELLO")
            protocol, version, cluster_id, group, name, _feature = decode(frame, str, int, str, int, str, int)
        except BadFrame:
            return "", _NO_HELLO
        reason = ""
        if protocol != PROTOCOL or version != VERSION:
            reason = f"{self.name} uses protocol {PROTOCOL} {VERSION}, you use {protocol} {version}"
        elif cluster_id != self.cluster_id:
            reason = f"{self.name} is in cluster {self.cluster_id!r}, you are in {cluster_id!r}"
        elif group != self.group:
            reason = f"{self.name} is in group {self.group}, you are in {group}"
        elif name == self.name:
            reason = f"{self.name} is my own name: two nodes must not share it"
        elif name not in peers:
            reason = f"{self.name} has no member {name!r}: it was removed, or never added"
        elif dialled not in (None, name):
            reason = f"{peers.get(dialled or '', 'it')} should be the node {dialled}, but answers as {name}"
        return name, reason


def refusal(reason: str) -> bytes:
    return packed(bytes((REFUSED,)) + reason.encode())


def packed(frame: bytes) -> bytes:
    """Add the header (length and checksum) to a frame."""
    return HEAD.pack(len(frame), crc32c(frame)) + frame
