"""Every input that was kept is read again: it raises what is declared or nothing, soon.

`python -m tests.fuzz` looks for more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.fuzz.__main__ import CORPUS, attempt, read
from tests.fuzz.targets import TARGETS


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_of_the_corpus_are_read_or_refused(name: str) -> None:
    kept = read(name)
    assert kept
    wrong = [(text, data.hex()) for data in [*TARGETS[name].samples(), *kept] if (text := attempt(TARGETS[name], data))]
    assert not wrong


def test_the_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.iterdir()) < 1 << 20
    assert {path.stem for path in CORPUS.iterdir()} == {*TARGETS, "archive"}  # which needs pyarrow


def test_unexpected_exceptions_are_reported() -> None:
    def broken(data: bytes) -> None:
        raise KeyError(data)

    target = TARGETS["call"]._replace(run=broken)
    assert attempt(target, b"x").startswith("KeyError")
