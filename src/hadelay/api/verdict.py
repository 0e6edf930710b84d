"""The state of a message in one sentence with the reason for it, and the events of the message by time.

`hadelay trace` and the console say the same. The functions take documents of the API, decoded from JSON.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from hadelay.words import span

_instant = datetime.fromisoformat
#: A receive waits at most 60 s. If the last one began longer ago than this, the verdict says that no consumer asks for
#: messages, even if one is still listed as waiting.
_SILENT_MS = 90_000
#: Time since the last receive after which the verdict says that no consumer asks for messages, if no receive waits. A
#: consumer asks again within this time, unless it is busy with messages or has stopped.
_BUSY_MS = 5_000
#: Limit of the consumers that a verdict names; it gives the number of the others.
_NAMED = 5


def verdict(message: dict[str, Any], topic: dict[str, Any], nodes: list[dict[str, Any]], now: str) -> str:
    """One sentence: status of the message, and the reason for it. topic: {} for an unknown topic."""
    said = _standing(message, topic, now)
    others = [f"{node['node']}: {node['state']}" for node in nodes if node["state"] not in (None, message["state"])]
    return f"{said}. THE NODES DISAGREE ({', '.join(others)})" if others else said


def _standing(message: dict[str, Any], topic: dict[str, Any], now: str) -> str:
    due, state, attempt = message["deliver_at"], message["state"], message["attempt"]
    last = message["history"][-1] if message["history"] else {"at": now}
    failed = next((e for e in reversed(message["history"]) if e["event"] in ("nacked", "lease_expired")), None)
    why = f"{failed.get('reason') or failed['event'].replace('_', ' ')}" if failed else ""
    retry = f"; attempt {failed['attempt']} failed: {why}" if failed and message.get("retry") else ""
    if state == "scheduled":
        return f"due in {span(_ms(now, due))}{retry}{_paused(topic)}"
    if state == "ready":
        return f"overdue by {span(_ms(due, now))}: {waits_for(topic, now)}{retry}"
    if state == "blocked":
        group = f" {message['group']!r}" if message.get("group") else ""
        return f"waits behind other messages of its group{group}{_paused(topic)}{retry}"
    if state == "leased":
        return f"with consumer {last.get('consumer') or 'unknown'} for {span(_ms(last['at'], now))}, attempt {attempt}"
    if state == "acked":
        return f"done: acked {span(_ms(due, last['at']))} after it was due, attempt {attempt}"
    if state == "dead":
        return f"dead after {attempt} attempt{'' if attempt == 1 else 's'}: {why or 'no reason given'}"
    return f"{state} {span(_ms(last['at'], now))} ago"


def _paused(topic: dict[str, Any]) -> str:
    if not topic.get("paused"):
        return ""
    return f"; its topic is paused{': ' + topic['paused_reason'] if topic.get('paused_reason') else ''}"


def waits_for(topic: dict[str, Any], now: str) -> str:
    """The main reason why a due message has not been handed out."""
    limit, consumers = topic.get("concurrency"), topic.get("consumers")
    if paused := _paused(topic):
        return paused.removeprefix("; ")
    if limit is not None and topic["leased"] >= limit:
        return f"{topic['leased']:,} messages of its topic are leased, as many as concurrency allows"
    if topic.get("webhook"):
        return f"{topic['ready']:,} messages wait for calls of the topic's webhook"
    if consumers == []:
        return "no consumer has asked for its topic since the present leader took over"
    if consumers:
        asked = max(consumer["asked_at"] for consumer in consumers)
        names = ", ".join(consumer["name"] for consumer in consumers[:_NAMED])
        names += f" and {len(consumers) - _NAMED:,} more" if len(consumers) > _NAMED else ""
        waits = any(consumer.get("waiting") for consumer in consumers)
        if (silent_ms := _ms(asked, now)) > (_SILENT_MS if waits else _BUSY_MS):
            return f"no consumer has asked in the last {span(silent_ms)} ({names} did before)"
        most = f", at most {topic['rate']:g} a second" if topic.get("rate") else ""
        ready = f"{topic['ready']:,} message{' of its topic is' if topic['ready'] == 1 else 's of its topic are'} ready"
        return f"{ready}{most}; consumers: {names}"
    return "no consumer has taken it"


def _ms(start: str, end: str) -> float:
    return max(0.0, (_instant(end) - _instant(start)).total_seconds() * 1000)


def timeline(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of the message in order of time, and an event for the due time of each attempt."""
    due = sorted({message["deliver_at"], *(e["due_at"] for e in message["history"] if e.get("due_at"))})
    happened = [{"at": message["published_at"], "event": "published"}, *message["history"]]
    happened += [{"at": at, "event": "due"} for at in due]
    order = {"published": 0, "due": 1}
    for entry in sorted(happened, key=lambda entry: (_instant(entry["at"]), order.get(entry["event"], 2))):
        yield {name: value for name, value in entry.items() if value is not None}
