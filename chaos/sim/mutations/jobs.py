"""Deliberate bugs in bulk jobs and in the calls of webhooks."""

from types import SimpleNamespace
from typing import Any

from chaos.sim.mutations.table import Original, bug
from hadelay.codec.commandtypes import Command
from hadelay.codec.results import Done
from hadelay.ledger.apply import _APPLY
from hadelay.server.delivery.bulk import Work
from hadelay.server.webhooks.calls import Reply
from hadelay.server.webhooks.pool import Pool
from hadelay.server.webhooks.queues import WebhookQueue


@bug("a job's step counts whatever the job's cursor is", "kill", "J1 jobs, counts", at=(_APPLY, Command.JOB_STEP))
def cursor_ignored(apply_step: Original, ledger: Any, step: Any) -> Any:
    job = ledger.jobs.get(step.job)
    at_cursor = SimpleNamespace(job=step.job, expected=job and job.cursor, cursor=step.cursor, ids=step.ids)
    return apply_step(ledger, step if job is None else at_cursor)


@bug("a job counts a message too many in each step", "kill", "J1 jobs, counts", at=(_APPLY, Command.JOB_STEP))
def miscounted_job(apply_step: Original, ledger: Any, step: Any) -> Any:
    result = apply_step(ledger, step)
    if isinstance(result, Done) and len(step.ids):
        ledger.jobs[step.job].done += 1
    return result


@bug("a job's step leaves out what was found and did not fit", "", "J2 jobs, complete", at=(Work, "take"))
def early_end(take: Original, work: Work) -> Any:
    _, ids = take(work)
    work.found.clear()
    work.count = work.bytes = 0
    return work.scan.cursor, ids


@bug("a webhook's Retry-After is ignored", "", "webhooks, Retry-After", at=(Pool, "_called"))
def ignored_retry_after(called: Original, pool: Pool, feed: Any, job: Any, url: str, host: str, answer: Reply) -> None:
    called(pool, feed, job, url, host, answer._replace(retry_after_ms=None))


@bug("a webhook's message is done however the call was answered", "", "I1 lost", at=(Pool, "_called"))
def any_answer_is_yes(called: Original, pool: Pool, feed: Any, job: Any, url: str, host: str, answer: Reply) -> None:
    called(pool, feed, job, url, host, answer._replace(reason="") if answer.status else answer)


@bug("a webhook's call may outlast its lease", "", "webhooks, one at a time", at=(WebhookQueue, "set"))
def long_calls(set_: Original, queue: WebhookQueue, *args: Any) -> None:
    set_(queue, *args)
    queue.lease_ms, queue.needs_s = 100, 0.0
