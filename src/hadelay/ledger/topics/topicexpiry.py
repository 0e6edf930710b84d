"""expires_after: a topic that is not used for this time is deleted.

A topic is in use while it has a message (pending or dead), a consumer, a webhook, a subscription, a schedule, a running
period of `unique_for`, or gets dead letters or callbacks of another topic. `used_ms` is the end of the last use that
apply knows of. The leader reports polls to apply at most once per eighth of `expires_after`, so `used_ms` may be too
early. A topic therefore ends a quarter of `expires_after` later than `used_ms` says: never earlier than `expires_after`
after its last use, also after a change of leader.
"""

from hadelay.codec.commandtypes import TopicExpiry
from hadelay.codec.results import JobResult
from hadelay.ledger.messages import unique
from hadelay.ledger.schedules import schedules
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import topicchanges
from hadelay.ledger.topics.topics import TopicState


def ends_at_ms(topic: TopicState) -> int | None:
    """Time from which on the topic may be deleted, if nobody uses it until then; None if the topic does not expire."""
    expires_after_ms = topic.settings.expires_after_ms
    return None if expires_after_ms is None else topic.used_ms + expires_after_ms + expires_after_ms // 4


def is_empty(topic: TopicState) -> bool:
    """Whether the topic has no message, pending or dead, and no webhook."""
    return not topic.pending and not topic.dead and topic.settings.webhook is None


def routes(ledger: Ledger) -> set[str]:
    """Names of topics that get dead letters or callbacks of other topics."""
    routing = [ledger.topics[number].settings for number in ledger.topics.routing]
    return {name for one in routing for name in (one.dead_letter, one.on_success, one.on_failure) if name}


def is_needed(ledger: Ledger, topic: TopicState, routed: set[str]) -> bool:
    """Whether a subscription, a schedule, a setting of another topic or a unique key needs the topic, or the topic has
    used up its generations, so that it cannot be deleted. routed: see `routes`."""
    return (
        topic.name in routed
        or topic.generation == topicchanges.MAX_GENERATION
        or bool(ledger.topics.subscriptions_of(topic.name))
        or bool(schedules.of_topic(ledger, topic.name, 1))
        or unique.has_period(ledger, topic)
    )


def apply_expiry(ledger: Ledger, command: TopicExpiry) -> JobResult:
    """Apply TOPIC_EXPIRY: note which topics are in use, and delete those that were unused for their `expires_after`."""
    ended, routed = 0, routes(ledger) if any(use.ends for use in command.topics) else set()
    for number, lives, ends, used_ms in command.topics:
        topic = ledger.topics[number] if number < len(ledger.topics.all) else None
        if topic is None or not topic.exists or topic.lives != lives:
            continue
        at_ms = ends_at_ms(topic)
        if at_ms is None:
            continue
        if not ends:
            topic.used_ms = ledger.now_ms
        elif (
            topic.used_ms == used_ms
            and ledger.now_ms >= at_ms
            and is_empty(topic)
            and not is_needed(ledger, topic, routed)
        ):
            topicchanges.end_unused(ledger, topic)
            ended += 1
    return JobResult(True, ended)
