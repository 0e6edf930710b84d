"""Services for topics: their settings, counts, and the due times of their messages."""

import asyncio
import socket
from collections.abc import Awaitable
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from hadelay.api.service import Actor
from hadelay.api.settings import settings_out
from hadelay.api.text import format_instant
from hadelay.api.topics import Group, GroupHead
from hadelay.api.topicsettings import Topic
from hadelay.api.topicstatus import Consumer, Lateness
from hadelay.codec import commands
from hadelay.codec.jobcommands import FillBegin
from hadelay.codec.publishcommand import hash_group
from hadelay.codec.wire import cut_name
from hadelay.errors import BadRequest, HadelayError, Impossible, NoLeader, NotFound, OutcomeUnknown
from hadelay.ledger.groups.messagegroups import find_group
from hadelay.ledger.topics.topics import TopicState
from hadelay.ledger.views.describe import describe
from hadelay.model import SEPARATOR, Description, Event, State, encode_id
from hadelay.server.guard import Guard
from hadelay.server.node import Node
from hadelay.server.service.duecounts import DueCounts
from hadelay.server.service.part import Service, once_begun
from hadelay.settings.topic import TopicSettings
from hadelay.settings.urls import url_problem
from hadelay.webhooks import new_secret_problem

#: Number of topics of a list that are read before other tasks of the event loop run.
_TOPICS_AT_ONCE = 200
#: Timeout, in seconds, of looking up a webhook's host when the webhook is set. If the look-up takes longer, the webhook
#: is set without this check.
_RESOLVE_S = 2.0
#: The leader's reports: topic number → number of ready messages; Unix ms at which the oldest fell due; number of
#: messages handed out in the last minutes; p50, p99 and maximum of their lateness, in ms.
Reports = dict[int, tuple[int, ...]]


class TopicService(Service):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._due = DueCounts(node.replica)
        self._wait_s = node.config.http.no_leader_wait_ms / 1000

    async def get_topic(self, name: str, *, stale: bool) -> Topic[str]:
        await self._confirm(stale)
        topic = self._topic(name)
        view = self.document(topic, await self.ready([topic.number], stale=stale))
        if self._unasked(stale):
            return view
        if topic.blocked and (since_ms := await _known(self._ask_leader("blocked", name, self._wait_s))):
            view = replace(view, oldest_blocked_age_ms=max(0, self._node.now_ms() - int(since_ms)))
        found = await _known(self._ask_leader("consumers", name, self._wait_s))
        if found is None:
            return view
        consumers = [Consumer(who, format_instant(at_ms), node, waits) for who, at_ms, node, waits in found]
        return replace(view, consumers=consumers)

    async def list_topics(self, *, stale: bool, prefix: str = "") -> list[Topic[str]]:
        await self._confirm(stale)
        ready, known, found = await self.ready(stale=stale), self._node.ledger.topics.all, list[Topic[str]]()
        for first in range(0, len(known), _TOPICS_AT_ONCE):
            few = known[first : first + _TOPICS_AT_ONCE]
            found += [self.document(topic, ready) for topic in few if topic.exists and topic.name.startswith(prefix)]
            await asyncio.sleep(0)
        return found

    async def settings_of(self, name: str, *, stale: bool) -> TopicSettings:
        """All settings of a topic. stale: if this node knows the topic, do not confirm that its settings are
        current. Raises NotFound."""
        if not stale or self._node.ledger.topic(name) is None:
            await self._confirm()
        return self._topic(name).settings

    async def all_settings(self, prefix: str = "") -> dict[str, TopicSettings]:
        """All settings of each topic and subscription whose name begins with `prefix`."""
        await self._confirm()
        known, found = self._node.ledger.topics.all, dict[str, TopicSettings]()
        for first in range(0, len(known), _TOPICS_AT_ONCE):
            few = known[first : first + _TOPICS_AT_ONCE]
            found |= {topic.name: topic.settings for topic in few if topic.exists and topic.name.startswith(prefix)}
            await asyncio.sleep(0)
        return found

    async def list_subscriptions(self, name: str, *, stale: bool) -> list[Topic[str]]:
        """List the subscriptions of a topic. Raises NotFound."""
        await self._confirm(stale)
        self._topic(name)
        found = list(self._node.ledger.topics.subscriptions_of(name))
        ready = await self.ready([topic.number for topic in found], stale=stale) if found else {}
        return [self.document(topic, ready) for topic in found]

    async def get_group(self, name: str, group: str, *, stale: bool) -> Group[str]:
        """A message group that has pending messages. Raises NotFound, also for a group without pending messages."""
        await self._confirm(stale)
        ledger, topic, now_ms = self._node.ledger, self._topic(name), self._node.now_ms()
        found = find_group(ledger, topic, hash_group(group))
        if found is None:
            raise NotFound(
                f"no pending message of {name!r} is in group {group!r}, or the topic has no group_concurrency"
            )
        views = [describe(ledger, head.id, now_ms) for head in found.heads]
        return Group(name, group, found.limit, found.blocked, [_head(view) for view in views if view is not None])

    async def put_topic(
        self, name: str, config: dict[str, Any], by: Actor, *, subscribes: bool = True, pending: bool = False
    ) -> Topic[str]:
        """Create or change a topic, or a subscription (orders~billing). config: settings; the value None resets a
        setting. subscribes: whether a subscription may be created. pending: whether a new subscription gets copies of
        the topic's pending messages. Raises BadRequest, Impossible, Conflict; NotFound for a subscription without its
        topic, or that is missing and may not be created."""
        await _check_urls(self._node.guard, config)
        sync = self._node.config.dispatch.sync
        if config.get("dispatch_sync") not in (None, sync):
            # Refuse a sync mode other than the nodes' mode: the topic's owner would expect guarantees that hand-outs do
            # not have.
            raise Impossible(f"dispatch_sync must be {sync!r}, the nodes' dispatch.sync: topics cannot differ yet")
        if sync == "interval" and config.get("group_concurrency") is not None:
            raise Impossible(
                "group_concurrency: a crash in interval mode repeats hand-outs, so two consumers could hold one group: "
                "set dispatch.sync to commit"
            )
        of, separator, own = name.partition(SEPARATOR)
        try:
            if pending:
                begin = FillBegin(self._node.name, cut_name(by.token), of, own, config)
                command = commands.encode_subscription_fill(begin)
            elif separator and subscribes:
                command = commands.encode_subscription_put(of, own, config)
            else:
                command = commands.encode_topic_put(name, config)
        except OverflowError:
            raise BadRequest("a number among the settings has more than 64 bits") from None
        await self._administer(by, *_put_in_words(name, config), command)
        with once_begun():
            return await self.get_topic(name, stale=False)

    async def delete_topic(self, name: str, *, force: bool, by: Actor) -> None:
        """Delete a topic. force: cancel its pending messages; without force, pending messages raise Conflict."""
        try:
            await self._administer(by, "topic.delete", name, commands.encode_topic_delete(name, force))
        except NotFound:
            # It is no error to delete a deleted topic: the answer to the first request may have been lost.
            await self._confirm()
            if self._node.ledger.known_topic(name) is None:
                raise

    async def due(
        self, topic: str | None, from_ms: int, to_ms: int, step_ms: int, *, stale: bool
    ) -> tuple[list[int], list[int]]:
        """Count a topic's open messages by due time. Returns the non-empty buckets of [from_ms, to_ms) as two ascending
        columns: start in ms, and number of messages."""
        await self._confirm(stale)
        if topic is not None:
            self._topic(topic)
        return await self._node.reader.in_slices(lambda: self._due.count(topic, from_ms, to_ms, step_ms))

    async def due_of_largest(
        self, from_ms: int, to_ms: int, step_ms: int, most: int
    ) -> list[tuple[str, list[int], list[int]]]:
        """Count open messages by due time, as `due` does, for the `most` topics with most messages in the range.
        Returns (name, starts, counts) per topic, the topic with most messages first. All counts are this node's."""
        read = self._node.reader.in_slices
        names = await read(lambda: self._due.largest(from_ms, to_ms, most))
        found = []
        for name in names:
            counts = await read(lambda name=name: self._due.count(name, from_ms, to_ms, step_ms))  # type: ignore[misc]
            found.append((name, *counts))
        return found

    async def ready(self, numbers: list[int] | None = None, *, stale: bool) -> Reports:
        """Ask the leader for its reports about the topics `numbers`, or about all topics: only its delivery loop knows
        the ready messages. A stale read on another node does not ask; it shows ready messages as scheduled."""
        if self._unasked(stale):
            return {}
        try:
            reports: Reports = await self._ask_leader("ready", numbers, self._wait_s)
        except OutcomeUnknown as error:
            # This call to the leader only reads, so the outcome is known although no answer came: nothing was changed.
            raise NoLeader(error.detail, retry_after_ms=100) from None
        return reports

    def _unasked(self, stale: bool) -> bool:
        """Whether a read does not ask the leader: a stale read on another node, or a read without a known leader."""
        return not self._node.leading and (stale or self._node.raft.leader is None)

    def document(self, topic: TopicState, reports: Reports) -> Topic[str]:
        count, oldest, *lateness = reports.get(topic.number, (0, 0, 0, 0, 0, 0))
        # Limit the count of ready messages, which is the leader's: the leader may have applied more entries than this
        # node.
        count = min(count, topic.waiting)
        return Topic(
            topic.name,
            topic.waiting - count,
            count,
            topic.leased,
            topic.dead,
            max(0, self._node.now_ms() - oldest) if count else None,
            topic.bytes,
            Lateness(*lateness) if lateness[0] else None,
            blocked=topic.blocked,
            retrying=topic.retrying,
            dropped=topic.dropped,
            shard=self._shard,
            **settings_out(topic.config),
        )


def _head(view: Description) -> GroupHead[str]:
    since_ms, consumer = view.deliver_at_ms if view.state is State.READY else None, None
    # Take the present lease from the ledger: the history is limited in length, and may end before this lease.
    if view.state is State.LEASED and view.history and view.history[-1].event is Event.LEASED:
        since_ms, consumer = view.history[-1].at_ms, view.history[-1].consumer
    return GroupHead(
        encode_id(view.id),
        str(view.state),
        format_instant(view.deliver_at_ms),
        view.attempt,
        None if since_ms is None else format_instant(since_ms),
        consumer,
    )


async def _known(asked: Awaitable[Any]) -> Any:
    """Answer of the leader to a link operation; None if there is no answer, because the leader has an earlier version,
    or leads no longer."""
    try:
        return await asked
    except HadelayError:
        return None


def _put_in_words(name: str, config: dict[str, Any]) -> tuple[str, str]:
    """Entry (action, target) for the audit trail about a change of settings. It names the settings without values,
    because some are secrets."""
    if "paused" in config:
        return "topic.pause" if config["paused"] else "topic.resume", name
    return "topic.set", f"{name}: {' '.join(sorted(config))}" if config else name


async def _check_urls(guard: Guard, config: dict[str, Any]) -> None:
    """Check URLs and secrets of a webhook and an alert. Raises BadRequest if one is malformed, Impossible if its
    address may not be called. This only reports mistakes early: the guard checks each connection again."""
    for name in ("webhook", "alert"):
        part = config.get(name)
        if not isinstance(part, dict):
            continue
        for secret in (*(part.get("secrets") or ()), *([part["secret"]] if "secret" in part else ())):
            if isinstance(secret, str) and "****" not in secret and (wrong := new_secret_problem(secret)):
                raise BadRequest(f"{name}: {wrong}")
        if (url := part.get("url")) is not None and not url_problem(url):
            if problem := guard.literal_problem(url):
                raise Impossible(f"{name}.url: {problem}")
            await _check_host(guard, url, f"{name}.url")


async def _check_host(guard: Guard, url: str, name: str) -> None:
    parts = urlsplit(url)
    try:
        asked = asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port or 443, type=socket.SOCK_STREAM)
        found = await asyncio.wait_for(asked, _RESOLVE_S)
    except (OSError, TimeoutError, UnicodeError):
        return
    if found and not any(guard.permits(str(address[0])) for *_, address in found):
        raise Impossible(
            f"{name}: {parts.hostname} has private addresses only; webhooks call public ones, unless [webhooks] allow "
            "in the nodes' configuration names the network"
        )
