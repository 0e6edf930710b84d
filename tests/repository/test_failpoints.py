"""chaos/sim/failpoints.py names functions by text: each of them exists."""

from __future__ import annotations

from functools import reduce
from importlib import import_module

import pytest

from chaos.sim.failpoints import STEPS


@pytest.mark.parametrize("name", STEPS)
def test_a_crash_point_names_a_function_that_exists(name: str) -> None:
    module, _, path = STEPS[name].where.partition(":")
    assert callable(reduce(getattr, path.split("."), import_module(f"hadelay.{module}")))
