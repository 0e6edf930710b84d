"""Requests of AsyncClient, except publishes: messages, leases, topics, dead letters, members and files."""

import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, TypeVar, Unpack, cast

import msgspec

from hadelay.api import cluster as api
from hadelay.api import messages
from hadelay.api.messages import PurgedState
from hadelay.client import exactjson, wire
from hadelay.client.message import AsyncMessage
from hadelay.client.paths import message_path, segment, with_query
from hadelay.client.topicsettings import TopicSettings
from hadelay.client.transport import Transport
from hadelay.client.types import (
    AckOutcome,
    Bucket,
    ClusterInfo,
    DeadLetter,
    Delay,
    ExtendOutcome,
    Group,
    HoursInfo,
    JobAction,
    JobCount,
    JobInfo,
    JobSelection,
    Leases,
    Message,
    MessageInfo,
    NackOutcome,
    Names,
    Order,
    Redriven,
    Rescheduled,
    TopicInfo,
    When,
)
from hadelay.client.wire import BATCH_ITEMS, MSGPACK, each, new_key, plain, seconds_of, when_of
from hadelay.errors import HadelayError

T = TypeVar("T")
Topics = str | Sequence[str]

#: Time in seconds that the answer to a poll may take beyond the poll's wait; after that, the node counts as
#: unreachable.
_POLL_GRACE_S = 5.0
#: Time, in seconds, for which one request of `wait_for` waits for the message to end.
_LONG_POLL_S = 20.0
#: Limit of leases in one request; nodes have the same limit.
_MAX_LEASES = 10_000


class Requests:
    """Client methods without state of their own: each sends one API request, or several if one request would exceed a
    limit of the API."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        #: Consumer name of this client, for requests that give no name.
        self.consumer = f"py-{os.getpid()}-{os.urandom(4).hex()}"

    async def get(
        self,
        message_id: str | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        body: bool = False,
        stale: bool = False,
        wait: Delay = 0,
    ) -> MessageInfo:
        """State and history of a message: by id, or by topic and key (the message published last with the key).

        wait: time to wait for the end of a message that is pending; nodes allow 60 s unless configured otherwise.
        """
        wait_s = seconds_of(wait)
        path = with_query(
            message_path(message_id, topic, key), {"body": body, "stale": stale, "wait": plain(wait) or None}
        )
        return await self._transport.request(
            "GET",
            path,
            wire.read(MessageInfo),
            timeout_s=wait_s + self._transport.timeout_s if wait_s else None,
            answer_within_s=wait_s + _POLL_GRACE_S if wait_s else None,
        )

    async def wait_for(self, message_id: str, *, timeout: float | None = None) -> MessageInfo:
        """Wait until a message is settled or dead: acked, with its `result` if the ack carried one, cancelled, expired
        or dead. Raises TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = _LONG_POLL_S if until is None else min(_LONG_POLL_S, until - time.monotonic())
            found = await self.get(message_id, wait=max(left_s, 0.0))
            if found.state not in ("scheduled", "ready", "blocked", "leased"):
                return found
            if left_s < _LONG_POLL_S and until is not None and time.monotonic() >= until:
                raise TimeoutError(f"message {message_id} is {found.state} after {timeout} s")

    async def messages(
        self,
        topic: str | None = None,
        *,
        state: str | Sequence[str] = "pending",
        start: When | None = None,
        end: When | None = None,
        tags: Sequence[str] = (),
        page: int = 1_000,
        stale: bool = False,
    ) -> AsyncIterator[MessageInfo]:
        """The messages of a topic, or of all topics, in due order, without their histories.

        state: one or more of scheduled, ready, blocked, leased, acked, cancelled, expired, dead; pending is the first
        four, all is all. start, end: due in [start, end). tags: messages that have all of them. page: messages per
        request. Messages settled meanwhile never hide another message.
        """
        options: Any = {"state": state, "start": start, "end": end, "tags": tags, "limit": page, "stale": stale}
        found = await self.messages_page(topic, **options)
        while True:
            for message in found.messages:
                yield message
            if found.cursor is None:
                return
            found = await self.messages_page(topic, cursor=found.cursor, **options)

    async def messages_page(
        self,
        topic: str | None = None,
        *,
        state: str | Sequence[str] = "pending",
        start: When | None = None,
        end: When | None = None,
        tags: Sequence[str] = (),
        limit: int = 1_000,
        cursor: str | None = None,
        stale: bool = False,
    ) -> wire.WirePage[MessageInfo]:
        """One page of `messages`: at most `limit` of them, from the cursor of the page before on. The answer has
        `messages`, and the `cursor` of the next page, None after the last one."""
        query = {
            "state": ",".join(each(state)), "limit": limit, "from": when_of(start), "to": when_of(end),
            "tag": ",".join(each(tags)) or None, "cursor": cursor, "stale": stale,
        }  # fmt: skip
        path = "/v1/messages" if topic is None else f"/v1/topics/{segment(topic)}/messages"
        return await self._get(path, wire.WirePage[MessageInfo], **query)

    async def cancel(
        self, message_id: str | None = None, *, topic: str | None = None, key: str | None = None
    ) -> Literal["cancelled"]:
        """Cancel a message by id, or by topic and key. A repetition is harmless.

        Of a message with copies for subscriptions, all copies are cancelled. Raises Conflict when it is too late;
        `outcome` of the error: leased, acked, expired, dead; partial: not every copy, see its `outcomes`.
        """
        await self._transport.request("DELETE", message_path(message_id, topic, key), wire.read(wire.WireOutcome))
        return "cancelled"

    async def reschedule(
        self,
        message_id: str | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        shift: Delay | None = None,
        delay: Delay | None = None,
        at: When | None = None,
        expected: When | None = None,
    ) -> Rescheduled:
        """Make a message due `delay` from now, or `at` a time, or later by `shift` ("-90m": earlier) than `expected`;
        its id stays. Name it by id, or by topic and key.

        expected: due time that the message has; if it has another one by now, nothing changes. Of a message with
        copies for subscriptions, all copies are rescheduled. Raises Conflict when it is not pending; `outcome` of the
        error: leased, acked, cancelled, expired, dead; moved: not due as `expected`; partial: not every copy, see its
        `outcomes`.
        """
        if sum(value is not None for value in (shift, delay, at)) != 1:
            raise ValueError("give one of shift, delay and at")
        if shift is not None and expected is None:
            raise ValueError("shift needs expected, the due time that the message has")
        change = {"shift": wire.shift_of(shift), "delay": plain(delay), "deliver_at": when_of(at)}
        when = _present(change | {"expected_deliver_at": when_of(expected)})
        return await self._send("PATCH", message_path(message_id, topic, key), when, Rescheduled)

    async def deliver_now(
        self, message_id: str | None = None, *, topic: str | None = None, key: str | None = None
    ) -> Rescheduled:
        """Make a message due now. A message that is already due keeps its position in due order."""
        return await self.reschedule(message_id, topic=topic, key=key, delay=0)

    async def receive(
        self,
        topics: Topics,
        *,
        max: int = 10,
        wait: Delay = 0,
        lease: Delay | None = None,
        tags: Sequence[str] = (),
        any_tags: Sequence[str] = (),
        order: Order = "turns",
        group_max: int = 1,
        consumer: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> list[AsyncMessage]:
        """Lease up to `max` messages that are due, waiting for the first for up to `wait`.

        tags, any_tags: only messages that have all of the former and, if there are any, one of the latter. order:
        "turns" lets the topics take turns; "listed" takes messages of a topic only when no earlier topic has any due.
        group_max: limit of messages of one group, which come in order, from topics with group_concurrency 1. Handle
        them one after the other, and nack the rest of the group after a failure.
        """
        query: dict[str, Any] = {
            "topics": each(topics),
            "max": max,
            "wait": plain(wait),
            "consumer": consumer or self.consumer,
            "request_id": request_id or new_key(),
        }
        query |= _present({"lease": plain(lease), "tags": each(tags) or None, "any_tags": each(any_tags) or None})
        if order != "turns":
            query["order"] = order
        if group_max != 1:
            query["group_max"] = group_max
        wait_s = seconds_of(wait)
        messages = await self._transport.request(
            "POST",
            "/v1/receive",
            wire.read_messages,
            data=msgspec.msgpack.encode(query),
            headers=MSGPACK,
            timeout_s=wait_s + (self._transport.timeout_s if timeout is None else timeout),
            answer_within_s=wait_s + _POLL_GRACE_S,
            to_leader=",".join(query["topics"]),
        )
        for message in messages:
            message._client = self
        return messages

    async def ack(self, leases: Leases, *, results: Sequence[Any] | None = None) -> list[AckOutcome]:
        """Acknowledge messages as done; returns `acked`, `already_acked` or `lease_lost` for each lease.

        results: one for each lease, kept with the message and shown by `get`: whatever msgspec encodes as JSON, at most
        64 KiB each. Of several acks of one message, the result of the ack that answers `acked` counts.
        """
        if results is None:
            return cast(list[AckOutcome], await self._settle("ack", leases))
        given = [leases] if isinstance(leases, str | Message) else list(leases)
        if len(given) != len(results):
            raise ValueError(f"{len(given)} leases, {len(results)} results: give one for each lease")
        outcomes: list[str] = []
        for some in wire.result_batches(given, results):
            tokens, encoded = zip(*some, strict=True)
            outcomes += await self._settle("ack", list(tokens), results=list(encoded))
        return cast(list[AckOutcome], outcomes)

    async def nack(
        self, leases: Leases, *, delay: Delay | None = None, reason: str | None = None, count: bool = True,
        dead: bool = False,
    ) -> list[NackOutcome]:  # fmt: skip
        """Give messages back as not done; returns `nacked`, `already_acked` or `lease_lost` for each lease.

        The message is handed out again after `delay`, or after the topic's backoff; after the topic's last attempt it
        is dead. reason: at most 128 bytes, kept with the message and shown with it when it is dead. count: False gives
        it back unhandled: the attempt counts neither for max_attempts nor for the backoff. dead: no further attempt;
        the message is a dead letter now.
        """
        options = {"delay": plain(delay), "reason": reason, "count": None if count else False, "dead": dead or None}
        return cast(list[NackOutcome], await self._settle("nack", leases, **options))

    async def extend(self, leases: Leases, *, lease: Delay, progress: str | None = None) -> list[ExtendOutcome]:
        """Extend leases to `lease` from now; returns `extended`, `already_acked` or `lease_lost` for each lease.

        progress: at most 128 bytes for people, shown by `get` until the lease ends.
        """
        return cast(
            list[ExtendOutcome], await self._settle("extend", leases, lease=plain(lease), progress=progress or None)
        )

    async def _settle(self, verb: str, leases: Leases, **options: Any) -> list[str]:
        given = [leases] if isinstance(leases, str | Message) else leases
        tokens = [lease.lease if isinstance(lease, Message) else lease for lease in given]
        outcomes: list[str] = []
        for at in range(0, len(tokens), _MAX_LEASES):
            body = {"leases": tokens[at : at + _MAX_LEASES], **_present(options)}
            answer = await self._send("POST", f"/v1/leases:{verb}", body, wire.Results[wire.WireOutcome])
            outcomes += [result.outcome for result in answer.results]
        return outcomes

    async def topics(self, *, prefix: str = "", stale: bool = False) -> list[TopicInfo]:
        """The topics whose names begin with `prefix`."""
        return (await self._get("/v1/topics", wire.WireTopics, prefix=prefix or None, stale=stale)).topics

    async def topic(self, name: str, *, stale: bool = False) -> TopicInfo:
        return await self._get(f"/v1/topics/{segment(name)}", TopicInfo, stale=stale)

    async def group(self, topic: str, group: str, *, stale: bool = False) -> Group:
        """A message group with pending messages. Raises NotFound."""
        return await self._get(f"/v1/topics/{segment(topic)}/groups/{segment(group)}", Group, stale=stale)

    async def put_topic(self, name: str, **settings: Unpack[TopicSettings]) -> TopicInfo:
        """Create a topic, or change the given settings (`TopicSettings`); None resets a setting."""
        return await self._send("PUT", f"/v1/topics/{segment(name)}", plain(settings), TopicInfo)

    async def delete_topic(self, name: str, *, force: bool = False) -> None:
        """Delete a topic. Raises Conflict while messages are pending, unless `force`, which cancels them."""
        await self._delete(with_query(f"/v1/topics/{segment(name)}", {"force": force}))

    async def put_subscription(
        self, topic: str, name: str, *, start: Literal["now", "pending"] = "now", **settings: Unpack[TopicSettings]
    ) -> TopicInfo:
        """Create a subscription, which gets a copy of each message published to the topic from now on, or change the
        given settings; None resets a setting. The subscription is the topic "topic~name" for all other methods. start:
        "pending" also gives a new subscription copies of the topic's pending messages, made by a job (`jobs`)."""
        path = f"/v1/topics/{segment(topic)}/subscriptions/{segment(name)}"
        return await self._send("PUT", path, {"from": start, **plain(settings)}, TopicInfo)

    async def subscriptions(self, topic: str, *, stale: bool = False) -> list[TopicInfo]:
        """The subscriptions of a topic. Raises NotFound."""
        return (await self._get(f"/v1/topics/{segment(topic)}/subscriptions", wire.WireTopics, stale=stale)).topics

    async def delete_subscription(self, topic: str, name: str, *, force: bool = False) -> None:
        """Delete a subscription. Raises Conflict while its messages are pending, unless `force`, which cancels them."""
        path = f"/v1/topics/{segment(topic)}/subscriptions/{segment(name)}"
        await self._delete(with_query(path, {"force": force}))

    async def pause(self, name: str, *, reason: str | None = None) -> TopicInfo:
        """Stop handing out messages of a topic. Publishing and leases continue. reason: shown with the topic."""
        return await self._send("POST", f"/v1/topics/{segment(name)}:pause", _present({"reason": reason}), TopicInfo)

    async def resume(self, name: str) -> TopicInfo:
        """Hand out the messages of a paused topic again."""
        return await self._send("POST", f"/v1/topics/{segment(name)}:resume", {}, TopicInfo)

    async def purge(self, name: str, states: Sequence[PurgedState] = ("scheduled", "ready")) -> None:
        """Cancel a topic's messages that are in `states` now, without reading each one; dead letters are deleted."""
        await self._send("POST", f"/v1/topics/{segment(name)}:purge", {"states": each(states)}, messages.Purged)

    async def dead(
        self, topic: str, *, body: bool = False, page: int = 1_000, stale: bool = False
    ) -> AsyncIterator[DeadLetter]:
        """Dead letters by time of death, with the errors of their last attempts. page: letters per request."""
        query = {"limit": page, "body": body, "stale": stale}
        async for letter in self._pages(f"/v1/topics/{segment(topic)}/dead", query, wire.WirePage[DeadLetter]):
            yield letter

    async def redrive(self, topic: str, ids: Sequence[str]) -> list[Redriven]:
        """Make dead letters due now, with attempts counted from 0; returns an outcome for each dead letter."""
        results: list[Redriven] = []
        given, path = each(ids), f"/v1/topics/{segment(topic)}/dead:redrive"
        for at in range(0, len(given), BATCH_ITEMS):
            body = {"ids": given[at : at + BATCH_ITEMS]}
            results += (await self._send("POST", path, body, wire.Results[Redriven])).results
        return results

    async def redrive_all(self, topic: str, *, rate: float | None = None) -> int:
        """Begin to redrive all present dead letters of a topic, `rate` per second; returns their number."""
        body = _present({"all": True, "rate": plain(rate)})
        answer = await self._send("POST", f"/v1/topics/{segment(topic)}/dead:redrive", body, wire.Redriving)
        return answer.redriving

    async def purge_dead(self, topic: str) -> None:
        """Delete the dead letters that a topic has now."""
        await self._delete(f"/v1/topics/{segment(topic)}/dead")

    async def begin_job(
        self,
        action: JobAction,
        topic: str,
        *,
        rate: float | None = None,
        request_id: str | None = None,
        **selection: Unpack[JobSelection],
    ) -> JobInfo:
        """Begin a bulk job for the messages of `topic` that are waiting now and match `selection`; for "redrive" and
        "delete_dead", for the dead letters that match.

        topic: a name, or a pattern such as "orders-*". rate: messages per second. request_id: new for each job; a
        repetition with the same one begins no second job. `job` tells how far the job is.
        """
        document = _document(action, topic, selection) | _present(
            {"rate": plain(rate), "request_id": request_id or new_key()}
        )
        return await self._send("POST", "/v1/jobs", document, JobInfo)

    async def count_job(self, action: JobAction, topic: str, **selection: Unpack[JobSelection]) -> JobCount:
        """Count the messages that `begin_job` with the same arguments would change now."""
        document = _document(action, topic, selection)
        found = await self._send("POST", "/v1/jobs:count", document, JobCount)
        while found.cursor is not None:
            more = await self._send("POST", "/v1/jobs:count", {**document, "cursor": found.cursor}, JobCount)
            times = [time for time in (found.first, found.last, more.first, more.last) if time is not None]
            found = msgspec.structs.replace(
                more, matched=found.matched + more.matched, leased=found.leased + more.leased,
                first=min(times, default=None), last=max(times, default=None),
            )  # fmt: skip
        return found

    async def jobs(self, *, stale: bool = False) -> list[JobInfo]:
        """Running jobs and the latest ended ones, oldest first."""
        return (await self._get("/v1/jobs", wire.WireJobs, stale=stale)).jobs

    async def job(self, number: int, *, stale: bool = False) -> JobInfo:
        return await self._get(f"/v1/jobs/{number}", JobInfo, stale=stale)

    async def stop_job(self, number: int) -> JobInfo:
        """Stop a job; messages that it changed stay changed."""
        return await self._transport.request("DELETE", f"/v1/jobs/{number}", wire.read(JobInfo))

    async def due(
        self, start: When, end: When, step: Delay, *, topic: str | None = None, stale: bool = False
    ) -> list[Bucket]:
        """Count the messages due in each step of [start, end), over all topics or in one. Steps without messages are
        omitted."""
        path = "/v1/due" if topic is None else f"/v1/topics/{segment(topic)}/due"
        query = {"from": when_of(start), "to": when_of(end), "step": plain(step), "stale": stale}
        return (await self._get(path, wire.WireBuckets, **query)).buckets

    async def cluster(self, *, stale: bool = False) -> ClusterInfo:
        return await self._get("/v1/cluster", ClusterInfo, stale=stale)

    async def transfer_leader(self, to: str | None = None) -> str:
        """Hand leadership to the node named, or to the follower with the smallest lag; returns its name."""
        path = "/v1/cluster:transfer-leader"
        return (await self._send("POST", path, {"to": to}, api.Transferred, retry=False)).leader

    async def add_member(self, name: str, raft: str) -> None:
        """Add a node. raft: host:port of its node link. The node votes once it has caught up."""
        await self._send("POST", "/v1/cluster/members", {"name": name, "raft": raft}, api.AddedMember, retry=False)

    async def remove_member(self, name: str) -> None:
        await self._delete(f"/v1/cluster/members/{segment(name)}")

    async def hours(self) -> HoursInfo:
        """Hour files of the node that answers. To ask a certain node, use a client with this address alone."""
        return await self._get("/v1/hours", HoursInfo)

    async def names(self) -> Names:
        return await self._get("/v1/names", Names)

    async def ready(self) -> api.Health:
        """Whether the answering node can serve. Failing checks are returned, not raised."""
        try:
            return await self._transport.request("GET", "/readyz?verbose", wire.read(api.Health), retry=False)
        except HadelayError as error:
            if "checks" not in error.extra:
                raise
            return msgspec.convert({"status": "failing", "checks": error.extra["checks"]}, api.Health)

    async def _pages(self, path: str, query: dict[str, Any], kind: type[Any]) -> AsyncIterator[Any]:
        while True:
            found = await self._get(path, kind, **query)
            for item in found.messages:
                yield item
            if found.cursor is None:
                return
            query["cursor"] = found.cursor

    async def _get(self, path: str, kind: type[T], **query: Any) -> T:
        return await self._transport.request("GET", with_query(path, query), wire.read(kind))

    async def _delete(self, path: str) -> None:
        await self._transport.request("DELETE", path, wire.read_nothing)

    async def _send(self, method: str, path: str, value: Any, kind: type[T], *, retry: bool = True) -> T:
        data, headers = exactjson.encode(value, "body"), {"Content-Type": "application/json"}
        return await self._transport.request(method, path, wire.read(kind), data=data, headers=headers, retry=retry)


def _present(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _document(action: JobAction, topic: str, selection: JobSelection) -> dict[str, Any]:
    """Body of a request about a bulk job."""
    unknown = selection.keys() - JobSelection.__annotations__.keys()
    if unknown:
        raise TypeError(f"a bulk job takes no argument {min(unknown)!r}")
    given: dict[str, Any] = {"tags": each(selection.get("tags", ())), "ids": each(selection.get("ids", ()))}
    given |= {name: selection.get(name, "") for name in ("key_prefix", "group", "schedule", "error", "retrying")}
    due = _present({"from": when_of(selection.get("start")), "to": when_of(selection.get("end"))})
    change = {"shift": wire.shift_of(selection.get("shift")), "delay": plain(selection.get("delay"))}
    change |= {"deliver_at": when_of(selection.get("at")), "into": selection.get("into")}
    chosen = {name: value for name, value in given.items() if value}
    return {"action": action, "filter": {"topic": topic, **chosen, **due}, **_present(change)}
