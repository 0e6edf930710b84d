"""Table of deliberate bugs, and how a bug is patched into the server.

A check that cannot fail is no check. Each bug breaks the shipped classes in place for the time of a run.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

Function = TypeVar("Function", bound=Callable[..., Any])
#: Patches that put a bug into methods and functions of the server.
Bug = list[AbstractContextManager[Any]]
#: Original method or function that a bug replaces.
Original = Callable[..., Any]

#: Names of fault families under which most promises are hard to keep.
CRASHES = "kill power_cut power_cut_all reset partition"
#: Promises that break when log entries are lost; also I17 (no node ends by itself), because a node that notices the
#: loss ends. Which of them breaks first depends on the seed.
LOG = (
    "I1 lost", "I12 divergence, entries", "I12 divergence, results", "I12 divergence, replicas",
    "I12 divergence, states", "I13 log safety, leaders", "I13 log safety, votes", "I13 log safety, vote on disk",
    "I13 log safety, term", "I13 log safety, term on disk", "I13 log safety, commit index back",
    "I13 log safety, commit index ahead", "I13 log safety, applied entry", "I13 log safety, members",
    "I14 durability, majority", "I14 durability, restart", "I14 durability, applied", "I14 durability, compacted",
    "I17 fail-stop, own error", "I17 fail-stop, failed sync",
)  # fmt: skip
#: Seeds to try; a bug that no run with these seeds reveals counts as not noticed.
SEEDS = range(1, 151)


@dataclass(frozen=True)
class Mutation:
    what: str
    #: Full names of branches of promises; the bug is noticed if any of these branches is broken. Another branch of the
    #: same promise does not count: it would hide that a branch notices nothing any more.
    caught_by: tuple[str, ...]
    faults: tuple[str, ...]
    apply: Callable[[], Bug]
    #: True: the simulator of Raft alone (chaos/sim/raftsim.py) runs the bug.
    raft: bool = False
    #: Mode of hand-outs in which the bug matters; "" for both.
    sync: str = ""

    @property
    def families(self) -> dict[str, float]:
        """Probabilities for the nemesis: 1 for each of the bug's fault families."""
        return dict.fromkeys(self.faults, 1.0)


MUTATIONS: dict[str, Mutation] = {}


@contextmanager
def broken(name: str) -> Iterator[Mutation]:
    """Context manager that patches the bug into the server."""
    mutation = MUTATIONS[name]
    with ExitStack() as patches:
        for one in mutation.apply():
            patches.enter_context(one)
        yield mutation


def bug(
    what: str, faults: str, *caught_by: str, at: tuple[Any, Any] | None = None, raft: bool = False, sync: str = ""
) -> Callable[[Function], Function]:
    """Decorator: add a bug to the table under the function's name. faults: fault families under which the bug matters.
    at: (owner, name) of the attribute that the function replaces; the function gets the original as its first argument.
    Without `at`, the function returns the patches."""

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
    """Add a bug that replaces whole functions. stand_ins: (owner, name, replacement)."""

    def apply() -> Bug:
        return [patch.object(*one) for one in stand_ins]

    MUTATIONS[name] = Mutation(what, caught_by, tuple(faults.split()), apply, sync=sync)
