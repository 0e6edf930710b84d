"""Encoding of APScheduler's jobs as JSON, for the bodies of messages. Nothing is pickled: a job is the name of a
function, and arguments of JSON types."""

from collections.abc import Mapping
from typing import Any

import msgspec
from apscheduler.job import Job

from hadelay.apscheduler import triggers

#: Attributes of a job that are stored as they are.
_PLAIN = ("id", "name", "executor", "misfire_grace_time", "coalesce", "max_instances")


def encode(job: Job) -> dict[str, Any]:
    """Encode a job. Raises ValueError for a job that another process could not run."""
    if not job.func_ref:
        raise ValueError(
            f"job {job.id}: {job.func!r} has no name that another process could import: use a function of a module, or "
            "a text such as shop.jobs:clean"
        )
    state = job.__getstate__()  # for a bound method, the first of the arguments is its object
    given = {"args": [*state["args"]], "kwargs": dict(state["kwargs"])}
    try:
        same = msgspec.json.decode(msgspec.json.encode(given)) == given
    except (TypeError, ValueError, msgspec.MsgspecError):
        same = False
    if not same:
        raise ValueError(
            f"job {job.id}: its arguments are no JSON values, which other processes could read: give texts, numbers, "
            f"lists and dictionaries, not {given}"
        )
    return {
        **{name: getattr(job, name) for name in _PLAIN},
        "func": job.func_ref,
        **given,
        "trigger": triggers.to_json(job.trigger),
    }


def decode(document: Mapping[str, Any], scheduler: Any, alias: str) -> Job:
    """Decode a job; its next_run_time is not set. Raises LookupError if the job's function does not exist in this
    process."""
    job = Job.__new__(Job)
    plain = {name: document[name] for name in (*_PLAIN, "func", "kwargs")}
    trigger = triggers.from_json(document["trigger"])
    job.__setstate__({**plain, "args": tuple(document["args"]), "trigger": trigger, "next_run_time": None})
    job._scheduler, job._jobstore_alias = scheduler, alias
    return job
