"""Applies TOPIC_PUT, TOPIC_DELETE and PURGE, which change a topic but none of its messages (ledger/topics.py)."""

from typing import Any

from hadelay.codec.formats import TOPIC
from hadelay.codec.results import Done, Refused
from hadelay.ledger.jobend import end_job
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import PurgeMark, TopicState
from hadelay.model import MAX_SUBSCRIPTIONS, SEPARATOR
from hadelay.settings.topic import (
    CALLBACK_SETTINGS,
    COPY_SETTINGS,
    FAN_OUT_SETTINGS,
    GROUP_RATE_SETTINGS,
    GROUP_SETTINGS,
    TOPIC_NAME,
    group_problem,
    merged,
    newest_defaults,
    problem,
    settings_of,
    unmasked,
    with_defaults,
)
from hadelay.settings.urls import disputed_url
from hadelay.version import (
    BOUNDED,
    CALLBACKS_LEVEL,
    GROUP_RATE_LEVEL,
    MASKED_HEADERS,
    MASKED_OF_ORIGIN,
    PLAIN_URLS,
    RETRY_DEFAULTS,
    SCHEDULER_LEVEL,
    SUBSCRIPTION_LEVEL,
)

MAX_GENERATION = 0xFFFF
#: Limit of a topic's purges of scheduled or ready messages that SWEEP has not finished: look-ups check them all.
MAX_MARKS = 100
#: Limit of the name of a subscription's queue, in characters: topic, SEPARATOR, name of the subscription.
_MAX_NAME = 128
#: Bits for the states of messages in a PURGE.
SCHEDULED, READY, DEAD = 1, 2, 4


def topic_or_new(ledger: Ledger, name: str, *, subscription: bool = False) -> TopicState | None:
    """The topic of that name, created if missing. None if it is missing and max_topics topics exist; or if it is a
    missing subscription, unless `subscription` says that it may be created."""
    topic = ledger.known_topic(name)
    if topic is not None and topic.exists:
        return topic
    if SEPARATOR in name and not subscription and ledger.level >= SUBSCRIPTION_LEVEL:
        return None
    if topic is None:
        if len(ledger.topics.all) >= ledger.settings.max_topics:
            return None
        topic = TopicState(ledger.names.register(TOPIC, name), name)
        ledger.topics.add(topic)
    topic.exists = True
    if ledger.level >= RETRY_DEFAULTS:
        # A topic that ended by itself still has its expires_after: a late message must not make it stay for ever.
        topic.configure({"defaults": newest_defaults(ledger.level), **topic.config})
    _use(ledger, topic)
    ledger.listener.on_topic(topic)
    return topic


def _use(ledger: Ledger, topic: TopicState) -> None:
    """Note a use of the topic, for `expires_after`; call after a change of settings, too."""
    ledger.topics.note_expiry(topic)
    if topic.settings.expires_after_ms is not None:
        topic.used_ms = ledger.now_ms


def end_unused(ledger: Ledger, topic: TopicState) -> None:
    """End a topic that expires. A topic that is made anew under its name has the same `expires_after`."""
    kept = {"expires_after_ms": topic.settings.expires_after_ms}
    _delete(ledger, topic)
    topic.configure(kept)
    ledger.topics_expired += 1


def apply_subscription_put(ledger: Ledger, command: tuple[str, str, Any]) -> Done | Refused:
    """Create a subscription, which gets what is published to its topic from now on, or change its settings."""
    of, own, config = command
    name = f"{of}{SEPARATOR}{own}"
    if not TOPIC_NAME.fullmatch(of) or not TOPIC_NAME.fullmatch(own) or len(name) > _MAX_NAME:
        return Refused("bad_config", f"{name!r}: names have A-Z a-z 0-9 . _ -, both together {_MAX_NAME - 1} of them")
    if ledger.topic(of) is None:
        return Refused("no_topic", f"there is no topic {of!r}")
    if ledger.topic(name) is None and len(ledger.topics.subscriptions_of(of)) >= MAX_SUBSCRIPTIONS:
        return Refused("too_many_subscriptions", f"{of!r} has {MAX_SUBSCRIPTIONS} subscriptions: delete one first")
    return apply_put(ledger, (name, config), subscription=True)


def apply_put(ledger: Ledger, command: tuple[str, Any], *, subscription: bool = False) -> Done | Refused:
    """Change the settings of a topic, created if missing. subscription: whether a subscription may be created."""
    name, config = command
    wrong = problem(config, ledger.settings)
    if not wrong:
        config, wrong = with_defaults(config, ledger.level)
    if not wrong and ledger.level >= MASKED_HEADERS:
        before = ledger.topic(name)
        known = {} if before is None else before.config
        config, wrong = unmasked(known, config, any_origin=ledger.level < MASKED_OF_ORIGIN)
    if not wrong and ledger.level >= PLAIN_URLS:
        wrong = disputed_url(config)
    if not wrong and config.get("dead_letter") == name:
        wrong = f"dead_letter: {name} would get its own dead letters back, for ever; name another topic, or keep"
    if wrong:
        return Refused("bad_config", wrong)
    for refusal in (_refuse_groups, _refuse_fan_out, _refuse_callbacks):
        if (refused := refusal(ledger, name, config)) is not None:
            return refused
    topic = topic_or_new(ledger, name, subscription=subscription)
    if topic is None and SEPARATOR in name and not subscription:
        return Refused("no_topic", f"there is no subscription {name!r}")
    if topic is None:
        return Refused("too_many_topics", f"there are {len(ledger.topics.all)} topics already")
    after = merged(topic.config, config)
    changed = after != topic.config
    topic.configure(after)
    _use(ledger, topic)
    ledger.topics.note_settings(topic)
    ledger.listener.on_topic(topic)
    return Done(changed)


def _refuse_fan_out(ledger: Ledger, name: str, config: dict[str, Any]) -> Refused | None:
    """Refuse settings that only subscriptions have, or only topics."""
    if ledger.level < SUBSCRIPTION_LEVEL:
        new = [setting for setting in (*COPY_SETTINGS, *FAN_OUT_SETTINGS) if setting in config]
        return Refused("needs_upgrade", f"{new[0]}: upgrade every node first (feature_level)") if new else None
    owners, others = ("topics", "subscriptions") if SEPARATOR in name else ("subscriptions", "topics")
    foreign = (*FAN_OUT_SETTINGS, "publish_rate") if SEPARATOR in name else COPY_SETTINGS
    for setting in foreign:
        if config.get(setting) is not None:
            return Refused("bad_config", f"{setting}: a setting of {owners}, not of {others}")
    return None


def _refuse_callbacks(ledger: Ledger, name: str, config: dict[str, Any]) -> Refused | None:
    """Refuse settings of webhooks and callbacks that nodes of an older version do not know."""
    if ledger.level >= CALLBACKS_LEVEL:
        return None
    new = [setting for setting in CALLBACK_SETTINGS if setting in config]
    new += ["webhook: method"] if "method" in (config.get("webhook") or {}) else []
    return Refused("needs_upgrade", f"{new[0]}: upgrade every node first (feature_level)") if new else None


def _refuse_groups(ledger: Ledger, name: str, config: dict[str, Any]) -> Refused | None:
    """Refuse settings of message groups that contradict other settings, or that pending messages do not allow."""
    if ledger.level < SCHEDULER_LEVEL:
        new = [setting for setting in GROUP_SETTINGS if setting in config]
        return Refused("needs_upgrade", f"{new[0]}: upgrade every node first (feature_level)") if new else None
    if ledger.level < GROUP_RATE_LEVEL and (new := [name for name in GROUP_RATE_SETTINGS if name in config]):
        return Refused("needs_upgrade", f"{new[0]}: upgrade every node first (feature_level)")
    topic = ledger.topic(name)
    known = {"defaults": newest_defaults(ledger.level)} if topic is None else topic.config
    after = settings_of(merged(known, config))
    if wrong := group_problem(after):
        return Refused("impossible_config", wrong)
    before = None if topic is None else topic.settings.group_concurrency
    if topic is not None and topic.grouped and (before is None) != (after.group_concurrency is None):
        text = "messages with a group are pending: settle, cancel or purge them before the setting is made or removed"
        return Refused("groups_pending", f"group_concurrency: {text}")
    return None


def apply_delete(ledger: Ledger, command: tuple[str, bool]) -> Done | Refused:
    name, force = command
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
    if ledger.level >= CALLBACKS_LEVEL:
        topic.born = topic.generation
    for fill in list(ledger.fills.values()):
        if topic.name in (fill.spec.topic, fill.spec.subscription):
            end_job(ledger, fill, stopped=True)
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


def apply_purge(ledger: Ledger, command: tuple[str, int]) -> Done | Refused:
    """Cancel the messages that a topic has in these states (bits) now, in O(1) (ADR 78)."""
    name, states = command
    topic = ledger.topic(name)
    if topic is None:
        return Refused("no_topic", f"there is no topic {name!r}")
    waiting = states & (SCHEDULED | READY)
    bounded = ledger.level >= BOUNDED
    if bounded and not topic.pending:
        waiting = 0  # no message to cancel: do not use up a generation number
    if bounded and waiting == SCHEDULED and len(topic.marks) >= MAX_MARKS:
        return Refused("too_many_marks", f"{MAX_MARKS} purges of {name!r} are still in progress: try again later")
    if waiting and topic.generation == MAX_GENERATION:
        return Refused("too_many_generations", f"{name!r} was purged {MAX_GENERATION} times: use another name")
    if waiting:
        begin_generation(ledger, topic)
    if waiting == SCHEDULED | READY:
        ledger.topics.end(topic)
        ledger.listener.on_purged(topic)
    elif waiting:
        if bounded and waiting == READY:
            # A purge of ready messages includes all earlier purges of ready messages: drop their marks.
            topic.marks = [mark for mark in topic.marks if not mark.ready]
        topic.marks.append(PurgeMark(topic.generation, ledger.now_ms, waiting == READY))
        ledger.topics.note_work(topic)
    if states & DEAD:
        ledger.topics.end_dead(topic, ledger.now_ms)
    _use(ledger, topic)
    ledger.listener.on_topic(topic)
    return Done()
