"""The version, in the one place that the package, the API and the files' writers read it from."""

from __future__ import annotations

VERSION = "0.1.0"
