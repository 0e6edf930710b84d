"""Manifest of a snapshot: the files of one checkpoint, for a peer that is new or too far behind, or for a backup."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotFile:
    name: str
    length: int
    crc: int  # crc32c of those bytes


@dataclass(frozen=True)
class Manifest:
    """Files of one durable checkpoint. Names are relative to a data directory, except the export: `state-<index>`."""

    index: int
    term: int
    files: list[SnapshotFile]
    blob: bytes = b""
