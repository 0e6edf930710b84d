"""A deliberate bug, and how it is patched in.

A check that cannot fail is no check. Each bug breaks the shipped classes in place for the time of a run.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

Function = TypeVar("Function", bound=Callable[..., Any])
#: Replacements of methods and functions of the server while the bug is patched in.
Bug = list[AbstractContextManager[Any]]
#: Original method or function that a bug replaces.
Original = Callable[..., Any]

#: Faults under which most promises are hard to keep.
CRASHES = "kill power_cut power_cut_all reset partition"
#: Checks that notice a lost log. A journal that lost synced entries may notice by itself, and stop.
LOG = ("I1 ", "I12", "I13", "I14", "I17")
#: Seeds that are tried before a bug counts as not noticed.
SEEDS = range(1, 61)


@dataclass(frozen=True)
class Mutation:
    what: str
    #: Prefixes of the promises' names; a violation of any of them counts as noticed.
    caught_by: tuple[str, ...]
    faults: tuple[str, ...]
    apply: Callable[[], Bug]
    #: Fault families for the simulator of Raft alone (chaos/sim/raftsim.py), which notices the bug.
    raft: bool = False
    #: Mode of hand-outs in which the bug matters; "" for both.
    sync: str = ""

    @property
    def families(self) -> dict[str, float]:
        """Nemesis with all of these fault families, and no others."""
        return dict.fromkeys(self.faults, 1.0)


MUTATIONS: dict[str, Mutation] = {}


@contextmanager
def broken(name: str) -> Iterator[Mutation]:
    """Context in which the bug is patched in."""
    mutation = MUTATIONS[name]
    with ExitStack() as patches:
        for one in mutation.apply():
            patches.enter_context(one)
        yield mutation


def bug(
    what: str, faults: str, *caught_by: str, at: tuple[Any, Any] | None = None, raft: bool = False, sync: str = ""
) -> Callable[[Function], Function]:
    """Add a bug to the table, under the function's name. faults: families that give it a chance to matter. at: (owner,
    name) of what the decorated function replaces; it is called with the original first. Without `at` the function
    returns the patches."""

    def add(function: Function) -> Function:
        def apply() -> Bug:
            return function() if at is None else _replaced(*at, function)

        MUTATIONS[function.__name__] = Mutation(what, caught_by, tuple(faults.split()), apply, raft, sync)
        return function

    return add


def _replaced(owner: Any, name: Any, function: Callable[..., Any]) -> Bug:
    original = owner[name] if isinstance(owner, dict) else getattr(owner, name)

    def stand_in(*args: Any, **more: Any) -> Any:
        return function(original, *args, **more)

    return [patch.dict(owner, {name: stand_in}) if isinstance(owner, dict) else patch.object(owner, name, stand_in)]


def stub(
    name: str, what: str, faults: str, caught_by: tuple[str, ...], *stand_ins: tuple[Any, str, Callable[..., Any]],
    sync: str = "",
) -> None:  # fmt: skip
    """Add a bug that only replaces functions: (owner, name, replacement)."""

    def apply() -> Bug:
        return [patch.object(*one) for one in stand_ins]

    MUTATIONS[name] = Mutation(what, caught_by, tuple(faults.split()), apply, sync=sync)
