"""Paths of the HTTP API, as clients and the command line write them."""

from __future__ import annotations

from urllib.parse import quote


def segment(text: str) -> str:
    """`text` as one segment of a path. `.` and `..`, as topics of earlier versions may be called, would make another
    path of it: their dots are encoded."""
    return quote(text, safe="") if text.strip(".") or not text else text.replace(".", "%2E")
