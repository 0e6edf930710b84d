"""Applies TOPIC_PUT, TOPIC_DELETE and PURGE, which change a topic but none of its messages
(ledger/topics/topics.py)."""

from collections.abc import Iterable
from typing import Any

from hadelay.codec.commandtypes import Purge, SubscriptionPut, TopicDelete, TopicPut
from hadelay.codec.formats import TOPIC
from hadelay.codec.results import Done, Refused
from hadelay.ledger.limits import shares
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.shards import foreign_target, is_foreign, owner_in_words
from hadelay.ledger.topics.topics import PurgeMark, TopicState
from hadelay.model import MAX_SUBSCRIPTIONS, SEPARATOR
from hadelay.settings.kinds import TOPIC_NAME
from hadelay.settings.topic import (
    contradiction,
    foreign_setting,
    merged,
    newer_setting,
    problem,
    settings_of,
    topics_named,
    unmasked,
)
from hadelay.settings.urls import disputed_url

MAX_GENERATION = 0xFFFF
#: Limit of a topic's purges that SWEEP has not finished, as look-ups check them all; a further one has to wait.
MAX_MARKS = 100
#: Limit of the full name of a subscription (topic, SEPARATOR, own name), in characters; a longer one is refused.
_MAX_NAME = 128
#: Bits for the states of messages in a PURGE.
SCHEDULED, READY, DEAD = 1, 2, 4


def topic_or_new(ledger: Ledger, name: str, *, subscription: bool = False) -> TopicState | None:
    """The topic of that name, created if missing. None if it is missing, and the present request may create no topic
    (ledger/limits/shares.py), or this shard may not create it (ledger/topics/shards.py); or if it is a missing
    subscription, unless `subscription` says that it may be created."""
    topic = ledger.known_topic(name)
    if topic is not None and topic.exists:
        return topic
    if (SEPARATOR in name and not subscription) or is_foreign(ledger, name):
        return None
    if topic is None:
        if no_room(ledger):
            return None
        shares.took(ledger, shares.TOPICS)
        topic = TopicState(ledger.names.register(TOPIC, name), name)
        ledger.topics.add(topic)
    topic.exists = True
    _use(ledger, topic)
    ledger.listener.on_topic(topic)
    return topic


def no_room(ledger: Ledger, count: int = 1) -> str:
    """Explain why the present request may not create this number of topics; "" if it may."""
    return shares.refusal(ledger, shares.TOPICS, len(ledger.topics.all), ledger.settings.max_topics, amount=count)


def name_topics(ledger: Ledger, names: Iterable[str | None]) -> str:
    """If shares limit the present request, create the further topics that it names, as targets of callbacks and dead
    letters, so that they count for its token. If they were created later, they would count for no token. Returns the
    reason of a refusal; "" if there is none."""
    if not shares.is_bounded(ledger):
        return ""
    new = [name for name in dict.fromkeys(names) if name and SEPARATOR not in name and ledger.known_topic(name) is None]
    wrong = no_room(ledger, len(new)) if new else ""
    for name in [] if wrong else new:
        topic_or_new(ledger, name)
    return wrong


def _use(ledger: Ledger, topic: TopicState) -> None:
    """Note a use of the topic, for `expires_after`; call after a change of settings, too."""
    ledger.topics.note_expiry(topic)
    if topic.settings.expires_after_ms is not None:
        topic.used_ms = ledger.now_ms


def end_unused(ledger: Ledger, topic: TopicState) -> None:
    """Delete a topic that nobody has used for its `expires_after`. A topic that is created later under its name begins
    with the same `expires_after`."""
    kept = {"expires_after_ms": topic.settings.expires_after_ms}
    _delete(ledger, topic)
    topic.configure(kept)
    ledger.topics_expired += 1


def apply_subscription_put(ledger: Ledger, command: SubscriptionPut) -> Done | Refused:
    """Create a subscription, which gets what is published to its topic from now on, or change its settings."""
    of, own, config = command.topic, command.subscription, command.config
    name = f"{of}{SEPARATOR}{own}"
    if not TOPIC_NAME.fullmatch(of) or not TOPIC_NAME.fullmatch(own) or len(name) > _MAX_NAME:
        return Refused("bad_config", f"{name!r}: names have A-Z a-z 0-9 . _ -, both together {_MAX_NAME - 1} of them")
    if ledger.topic(of) is None:
        return Refused("no_topic", f"there is no topic {of!r}")
    if ledger.topic(name) is None and len(ledger.topics.subscriptions_of(of)) >= MAX_SUBSCRIPTIONS:
        return Refused("too_many_subscriptions", f"{of!r} has {MAX_SUBSCRIPTIONS} subscriptions: delete one first")
    return apply_put(ledger, TopicPut(name, config), subscription=True)


def apply_put(ledger: Ledger, command: TopicPut, *, subscription: bool = False) -> Done | Refused:
    """Change the settings of a topic, created if missing. subscription: whether a subscription may be created."""
    name, config = command.topic, command.config
    wrong = problem(config, ledger.settings)
    if not wrong and (newer := newer_setting(config, ledger.level)):
        return Refused("needs_upgrade", f"{newer}: upgrade every node first (feature_level of GET /v1/cluster)")
    if not wrong:
        before = ledger.topic(name)
        config, wrong = unmasked({} if before is None else before.config, config)
    wrong = wrong or disputed_url(config)
    wrong = wrong or foreign_setting(config, "subscriptions" if SEPARATOR in name else "topics")
    if not wrong and config.get("dead_letter") == name:
        wrong = f"dead_letter: {name} would get its own dead letters back, for ever; name another topic, or keep"
    if wrong:
        return Refused("bad_config", wrong)
    if (refused := _refuse_together(ledger, name, config) or _refuse_foreign(ledger, name, config)) is not None:
        return refused
    if crowded := name_topics(ledger, [name, *topics_named(config)]):
        return Refused("too_many_topics", crowded)
    topic = topic_or_new(ledger, name, subscription=subscription)
    if topic is None and SEPARATOR in name and not subscription:
        return Refused("no_topic", f"there is no subscription {name!r}")
    if topic is None:
        return Refused("too_many_topics", no_room(ledger))
    after = merged(topic.config, config)
    changed = after != topic.config
    topic.configure(after)
    _use(ledger, topic)
    ledger.topics.note_settings(topic)
    ledger.listener.on_topic(topic)
    return Done(changed)


def _refuse_together(ledger: Ledger, name: str, config: dict[str, Any]) -> Refused | None:
    """Refuse settings that contradict each other, or settings of groups that pending messages do not allow."""
    topic = ledger.topic(name)
    after = settings_of(merged({} if topic is None else topic.config, config))
    if wrong := contradiction(after):
        return Refused("impossible_config", wrong)
    before = None if topic is None else topic.settings.group_concurrency
    if topic is not None and topic.grouped and (before is None) != (after.group_concurrency is None):
        text = "messages with a group are pending: settle, cancel or purge them before the setting is made or removed"
        return Refused("groups_pending", f"group_concurrency: {text}")
    return None


def _refuse_foreign(ledger: Ledger, name: str, config: dict[str, Any]) -> Refused | None:
    """Refuse settings of a topic that another shard owns, or that name such a topic: dead letters and callbacks are
    made in the shard of their topic."""
    if is_foreign(ledger, name):
        return Refused("other_shard", owner_in_words(ledger.shards, name))
    for target in topics_named(config):
        if is_foreign(ledger, target):
            return Refused("foreign_target", f"{target}: {foreign_target(ledger.shards, target)}")
    return None


def apply_delete(ledger: Ledger, command: TopicDelete) -> Done | Refused:
    name, force = command.topic, command.force
    topic = ledger.topic(name)
    if topic is None:
        return Refused("no_topic", f"there is no topic {name!r}")
    if topic.pending and not force:
        return Refused("topic_not_empty", f"{topic.pending} messages of {name!r} are pending")
    subscriptions = ledger.topics.subscriptions_of(name)
    if subscriptions and not force:
        return Refused("topic_not_empty", f"{name!r} has subscriptions: {len(subscriptions)}; delete them first")
    for one in (topic, *subscriptions):
        if one.generation == MAX_GENERATION:
            return Refused("too_many_generations", f"{one.name!r} was deleted {MAX_GENERATION} times: use another name")
    for one in (topic, *subscriptions):
        _delete(ledger, one)
    return Done()


def _delete(ledger: Ledger, topic: TopicState) -> None:
    begin_generation(ledger, topic)
    topic.lives += 1
    topic.born = topic.generation
    for fill in list(ledger.fills.values()):
        if topic.name in (fill.spec.topic, fill.spec.subscription):
            ledger.end_job(fill, stopped=True)
    ledger.topics.end(topic)
    ledger.topics.end_dead(topic, ledger.now_ms)
    topic.exists = False
    topic.configure({})
    topic.used_ms = 0
    ledger.topics.note_expiry(topic)
    ledger.topics.note_settings(topic)
    ledger.listener.on_purged(topic)
    ledger.listener.on_topic(topic)


def begin_generation(ledger: Ledger, topic: TopicState) -> None:
    topic.generation += 1
    ledger.topics.generations[topic.number] = topic.generation
    ledger.sweep = (0, 0)


def apply_purge(ledger: Ledger, command: Purge) -> Done | Refused:
    """Cancel the messages that a topic has in these states (bits) now, in O(1) (ADR 78)."""
    name, states = command.topic, command.states
    topic = ledger.topic(name)
    if topic is None:
        return Refused("no_topic", f"there is no topic {name!r}")
    waiting = states & (SCHEDULED | READY)
    if not topic.pending:
        waiting = 0  # no message to cancel: do not use up a generation number
    if waiting == SCHEDULED and len(topic.marks) >= MAX_MARKS:
        return Refused("too_many_marks", f"{MAX_MARKS} purges of {name!r} are still in progress: try again later")
    if waiting and topic.generation == MAX_GENERATION:
        return Refused("too_many_generations", f"{name!r} was purged {MAX_GENERATION} times: use another name")
    if waiting:
        begin_generation(ledger, topic)
    if waiting == SCHEDULED | READY:
        ledger.topics.end(topic)
        ledger.listener.on_purged(topic)
    elif waiting:
        if waiting == READY:
            # A purge of ready messages includes all earlier purges of ready messages: drop their marks.
            topic.marks = [mark for mark in topic.marks if not mark.ready]
        topic.marks = [*topic.marks, PurgeMark(topic.generation, ledger.now_ms, waiting == READY)]
        ledger.topics.note_work(topic)
    if states & DEAD:
        ledger.topics.end_dead(topic, ledger.now_ms)
    _use(ledger, topic)
    ledger.listener.on_topic(topic)
    return Done()
