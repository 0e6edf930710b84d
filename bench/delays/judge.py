"""The judge: from a history alone, what was lost, early, doubled and late. It knows no contender.

- lost: the server acknowledged the publish, and no worker got the message, or only workers that were killed before they
  were done with it, although the last hand-out of any message is long past. Messages that were still coming when the
  run ended count as unfinished instead.
- early: a worker had the message in hand before its due time.
- doubled: a worker got a message that another hand-out had given away before, although the earlier worker was not
  killed. A second hand-out after the earlier worker was killed is what it should be: redelivered.
- uncancelled: a worker got a message after the server had confirmed its cancellation.
- lateness: first hand-out minus due time, taken in the worker.
- gap: the longest time between two consecutive first hand-outs, from when a message was due that came later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bench.delays.history import Event


@dataclass
class Judgement:
    published: int = 0
    #: Publishes whose outcome the producer does not know: such a message may come once or never.
    unsure: int = 0
    delivered: int = 0
    unfinished: int = 0
    lost: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    #: Longest time by which a hand-out was early, in ms.
    early_ms: float = 0.0
    doubled: list[str] = field(default_factory=list)
    uncancelled: list[str] = field(default_factory=list)
    redelivered: int = 0
    #: Messages that no producer published.
    unknown: list[str] = field(default_factory=list)
    #: Lateness of each first hand-out in ms, in order.
    late_ms: list[float] = field(default_factory=list)
    gap_s: float = 0.0
    #: Seconds from each kill to the first hand-out after it of a message that was due after it.
    after_kill_s: list[float] = field(default_factory=list)
    #: Time of the last first hand-out, Unix ms.
    last_ms: float = 0.0

    def late(self, quantile: float) -> float:
        """A quantile of the lateness in ms; 1 is the maximum."""
        ordered = self.late_ms
        return ordered[min(len(ordered) - 1, int(len(ordered) * quantile))] if ordered else float("nan")


def judge(events: Sequence[Event], quiet_s: float) -> Judgement:
    """quiet_s: time without any hand-out before the end after which a missing message counts as lost."""
    found = Judgement()
    due, sure = _published(events)
    found.published, found.unsure = len(sure), len(due) - len(sure)
    first: dict[str, float] = {}
    holder: dict[str, int] = {}
    killed: set[int] = set()
    cancelled: set[str] = set()
    done: set[str] = set()
    for event in sorted(events, key=lambda e: float(e["at"])):
        match event["e"]:
            case "fault" if event["what"] == "worker":
                killed |= set(event["pids"])
            case "cancel" if event["ok"] is not None:
                cancelled |= set(event["ids"])
            case "done":
                done |= set(event["ids"])
            case "got":
                for id in event["ids"]:
                    _hand_out(found, id, event, due, cancelled)
                    if id not in first:
                        first[id] = event["at"]
                    elif holder[id] in killed:
                        found.redelivered += 1
                    else:
                        found.doubled.append(id)
                    holder[id] = event["pid"]
    _lateness(found, first, due)
    dropped = {id for id in sure & first.keys() if holder[id] in killed and id not in done}
    last_ms = max((event["at"] for event in events if event["e"] == "got"), default=0.0)
    _missing(found, events, (sure - first.keys() - cancelled) | dropped, due, (quiet_s, last_ms))
    found.after_kill_s = list(_after_kills(events, first, due))
    return found


def _published(events: Iterable[Event]) -> tuple[dict[str, int], set[str]]:
    """Due times of all publishes, and the ids of those that the server acknowledged."""
    due: dict[str, int] = {}
    sure: set[str] = set()
    for event in events:
        if event["e"] == "pub":
            due.update(zip(event["ids"], event["due"], strict=True))
            sure.update(event["ids"] if event["ok"] is not None else ())
    return due, sure


def _hand_out(found: Judgement, id: str, event: Event, due: dict[str, int], cancelled: set[str]) -> None:
    if id not in due:
        found.unknown.append(id)
    elif event["at"] < due[id]:
        found.early.append(id)
        found.early_ms = max(found.early_ms, due[id] - event["at"])
    if id in cancelled:
        found.uncancelled.append(id)


def _lateness(found: Judgement, first: dict[str, float], due: dict[str, int]) -> None:
    given = sorted((at, due[id]) for id, at in first.items() if id in due)
    found.delivered = len(given)
    found.late_ms = sorted(at - when for at, when in given)
    found.last_ms = given[-1][0] if given else 0.0
    soonest = float("inf")
    for (before, _), (after, when) in reversed(list(pairwise(given))):
        soonest = min(soonest, when)
        found.gap_s = max(found.gap_s, (after - max(before, soonest)) / 1000)


def _missing(
    found: Judgement, events: Iterable[Event], missing: set[str], due: dict[str, int], quiet: tuple[float, float]
) -> None:
    """quiet: seconds without any hand-out after which a message is lost, and the time of the last hand-out."""
    quiet_s, last_ms = quiet
    ended = max((event["at"] for event in events if event["e"] == "end"), default=float("inf"))
    owed = sorted(id for id in missing if due[id] < ended - quiet_s * 1000)
    if ended - last_ms < quiet_s * 1000:
        found.unfinished = len(owed)
    else:
        found.lost = owed


def _after_kills(events: Iterable[Event], first: dict[str, float], due: dict[str, int]) -> Iterable[float]:
    given = sorted((at, due[id]) for id, at in first.items() if id in due)
    for kill in [event["at"] for event in events if event["e"] == "fault"]:
        after = next((at for at, when in given if at > kill and when > kill), None)
        if after is not None:
            yield (after - kill) / 1000


def causes(found: Judgement) -> Counter[str]:
    """Number of violations by kind."""
    kinds = ("lost", "early", "doubled", "uncancelled", "unknown")
    return Counter({kind: len(getattr(found, kind)) for kind in kinds})
