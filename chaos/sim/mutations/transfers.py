"""Deliberate bugs in bulk jobs that transfer messages to another topic."""

from typing import Any

import numpy as np

from chaos.sim.mutations.table import Original, bug, stub
from hadelay.codec.commandtypes import Command
from hadelay.codec.results import Done
from hadelay.ledger.apply import _APPLY
from hadelay.ledger.hours.hourstate import bitmap
from hadelay.ledger.hours.lookup import find_entry
from hadelay.ledger.hours.transitions import source_of
from hadelay.ledger.jobs import bulk
from hadelay.ledger.leases import transfers
from hadelay.model import DEAD_HOURS
from hadelay.rules.access import RequestRights
from hadelay.server.delivery.bulk import Work


@bug("a transferred message stays in its source, too", "kill", "J3 transfers, once", at=(transfers, "_move"))
def source_kept(move: Original, ledger: Any, leaving: Any, *rest: Any) -> None:
    move(ledger, leaving, *rest)
    ledger.hours[leaving.hour].settled -= bitmap(leaving.rows["index"])


@bug("a step that comes again writes the transferred messages once more", "kill transfer reset", "J3 transfers, once",
     at=(_APPLY, Command.JOB_STEP))  # fmt: skip
def transferred_again(apply_step: Original, ledger: Any, step: Any) -> Any:
    result, job = apply_step(ledger, step), ledger.jobs.get(step.job)
    if not isinstance(result, Done) and job is not None and job.spec.action == "transfer":
        for place in filter(None, (find_entry(ledger, one) for one in step.ids)):
            if place.hour < DEAD_HOURS and int(place.rows["topic"][0]) not in job.topics:
                ledger.store.append_again(place.hour, place.rows.copy())
    return result


@bug("a transfer counts the last message of a step, and leaves it", "", "J3 transfers, moved", at=(bulk, "transfer"))
def transfer_skips(transfer: Original, ledger: Any, leaving: Any, into: str) -> Any:
    most = len(leaving.rows)
    return transfer(ledger, leaving.some(np.arange(most) < most - 1), into) + 1


@bug("a transfer does not meet the first message that it finds", "kill", "J2 jobs, complete", at=(Work, "take"))
def transfer_leaves_out(take: Original, work: Work) -> Any:
    cursor, ids = take(work)
    return cursor, ids[1:] if work.job.spec.action == "transfer" else ids


@bug("a transferred message is due at once", "", "J3 transfers, moved", at=(transfers, "file_in"))
def transferred_early(file_in: Original, *args: Any, due_ms: Any, **more: Any) -> None:
    file_in(*args, due_ms=0, **more)


@bug("dead letters of a step all go back to the topic in which the last of them died", "", "J3 transfers, moved",
     at=(bulk, "transfer"))  # fmt: skip
def one_home(transfer: Original, ledger: Any, leaving: Any, into: str) -> Any:
    source = source_of(ledger, int(leaving.rows["first_id"][-1]))
    homes = ledger.topics[source].name if not into and source < len(ledger.topics.all) else into
    return transfer(ledger, leaving, homes)


stub(
    "any_rights", "a token needs no rights for the topics of a transfer", "", ("J3 transfers, rights",),
    (RequestRights, "need", lambda rights, scope, topic: None),
)  # fmt: skip
