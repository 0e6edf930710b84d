"""A cluster that looks like one in use: topics, keys, dead letters with reasons, a paused topic, consumers."""

from __future__ import annotations

import math
import random
import time
from typing import Any

from tests.system.cluster import Answer, Cluster, until

HOSTILE = '<script>document.title = "hacked"</script><img src=x onerror="document.title = \'hacked\'">'
REASONS = ("card declined: issuer 51", "timeout after 30 s", "HTTP 503 from bank", "card declined: issuer 05")
_DELAYS_S = (60, 600, 3_600, 86_400, 20 * 86_400, 200 * 86_400)


#: Names and keys that are as long as they may be, and a message that has failed as often as the default allows.
LONG_TOPIC, LONG_KEY, ATTEMPTS = "warehouse.returns-" + "x" * 110, "order/" + "k" * 244, 83


def use(cluster: Cluster, seconds: float) -> None:
    """Publish and consume for a while, so that pictures have charts."""
    end, node = time.monotonic() + seconds, cluster.names[0]

    def publish() -> None:
        chance = random.Random(7)
        while time.monotonic() < end:
            wave = 1.3 + math.sin(time.monotonic() / 25)
            delay = f"{chance.randrange(200, 9_000)}ms"
            cluster.publish_many(node, "checkouts", ["x"] * int(20 * wave + chance.random() * 6), delay=delay)
            time.sleep(0.5)

    def consume(name: str) -> None:
        while time.monotonic() < end:
            at = cluster.names[int(name[-1])]
            path = "/v1/topics/checkouts/receive?redirect=false"
            found = cluster.ask(at, "POST", path, {"max": 100, "consumer": name, "wait": "2s"}).json.get("messages")
            if found:
                cluster.settle(node, "ack", found)

    workers = [cluster.later(publish), *(cluster.later(consume, f"checkout-{n}") for n in range(3))]
    for worker in workers:
        worker.result()


def sure(cluster: Cluster, method: str, path: str, body: Any) -> Answer:
    """Send a request that may be repeated until a node has done it: a busy machine may have no leader for a moment."""

    def done() -> Answer | None:
        answer = cluster.ask(cluster.names[0], method, path, body)
        assert answer.status < 300 or answer.status in (503, 504), answer
        return answer if answer.status < 300 else None

    return until(done, f"{method} {path}", every=0.2)  # type: ignore[return-value]


def fill(cluster: Cluster) -> dict[str, str]:
    """Publish and kill messages; returns ids of messages by what they are."""
    chance, node = random.Random(4), cluster.names[0]
    for name, settings in (
        ("payments", {"max_attempts": 2, "backoff": ["10ms"]}), ("emails", {"rate": 50}), ("invoices", {"ttl": "30d"}),
        ("reminders", {"webhook": {"url": "https://hooks.invalid/"}}),
    ):  # fmt: skip
        sure(cluster, "PUT", f"/v1/topics/{name}", settings)
    items = [
        {
            "topic": topic, "key": f"{topic}-{n}", "tags": ["eu" if n % 3 else "us"],
            "delay": f"{int(chance.choice(_DELAYS_S) * chance.random()) + 30}s",
            "body": {"order": 4_000 + n, "customer": f"c-{n % 17}", "lines": [{"sku": "A1", "n": 2}]},
        }
        for topic, count in (("orders", 120), ("reminders", 300), ("invoices", 60), ("emails", 80), ("trials", 200))
        for n in range(count)
    ]  # fmt: skip
    items += [{"topic": "payments", "key": f"pay-{n}", "body": {"payment": n, "amount": 12.5 * n}} for n in range(40)]
    items += [{"topic": "hostile", "key": "h", "body": HOSTILE, "content_type": "text/html", "delay": "2h"}]
    items += [{"topic": "acts", "body": "x", "delay": "1h", "key": f"act-{n}"} for n in range(20)]
    sure(cluster, "PUT", "/v1/topics/tenants", {"group_concurrency": 1})
    items += [
        {"topic": "tenants", "key": f"t-{n}", "body": "x", "delay": "5m", "group": f"customer-{n % 3 + 17}"}
        for n in range(24)
    ]
    for name, query in (
        ("report", {"cron": "0 9 * * mon-fri", "timezone": "Europe/Vienna"}), ("cleanup", {"every": "15m"}),
        ("newsletter", {"cron": "30 7 * * 2", "paused": True}),
    ):  # fmt: skip
        sure(cluster, "PUT", f"/v1/schedules/{name}", {"topic": "chores", "body": name, **query})
    cluster.ask(node, "POST", "/v1/schedules/report:trigger", {})
    answer = sure(cluster, "POST", "/v1/messages:batch", items)
    ids = [result["id"] for result in answer.json["results"]]
    longest = _unfriendly(cluster)

    _batches(cluster)
    query = {"action": "reschedule", "filter": {"topic": "invoices"}, "shift": "1h", "rate": 25}
    job = sure(cluster, "POST", "/v1/jobs", query | {"request_id": "seeds"}).json["id"]

    _kill_payments(cluster, chance)
    sure(cluster, "POST", "/v1/topics/trials:pause", {"reason": "receiver is down, INC-12"})
    cluster.receive(cluster.leader(), "orders", consumer="shop-1", wait="0s")
    snapshot = sure(cluster, "POST", "/v1/snapshots", None).json["id"]
    cluster.ask(node, "DELETE", f"/v1/snapshots/{snapshot}?complete=true")
    hostile = next(one for one, item in zip(ids, items, strict=True) if item["topic"] == "hostile")
    dead = next(one for one, item in zip(ids, items, strict=True) if item.get("key") == "pay-7")
    return {
        "hostile": hostile, "dead": dead, "scheduled": ids[0], "job": str(job), "long": LONG_TOPIC, "longest": longest,
    }  # fmt: skip


def _kill_payments(cluster: Cluster, chance: random.Random) -> None:
    """Nack all payments until they are dead letters."""
    node = cluster.names[0]

    def all_dead() -> bool:
        found = cluster.receive(
            cluster.leader(), "payments", max=40, consumer=f"worker-{chance.randrange(3)}", wait="1s"
        )
        for message in found if isinstance(found, list) else ():
            cluster.settle(node, "nack", [message], reason=chance.choice(REASONS))
        return bool(cluster.topic(node, "payments")["dead"] == 40)

    until(all_dead, "all payments are dead letters")


def _batches(cluster: Cluster) -> None:
    """A batch with members that were acked, died or wait, and one whose key and topic have the longest names."""
    for key, topic in (("b" * 128, LONG_TOPIC), ("import-7", "imports.done")):
        sure(cluster, "POST", "/v1/batches", {"key": key, "callback": {"topic": topic}})
    sure(cluster, "PUT", "/v1/topics/rows", {"max_attempts": 1})
    for count, delay in ((10, "0s"), (2, "1h")):
        items = [{"topic": "rows", "body": "x", "batch": "import-7", "delay": delay}] * count
        sure(cluster, "POST", "/v1/messages:batch", items)

    def settled() -> bool:
        found = cluster.receive(cluster.leader(), "rows", max=10, wait="1s")
        for n, message in enumerate(found if isinstance(found, list) else ()):
            cluster.settle(cluster.names[0], "nack" if n % 4 == 3 else "ack", [message])
        answer = cluster.ask(cluster.names[0], "GET", "/v1/batches/import-7")
        return answer.status == 200 and answer.json["pending"] == 2

    until(settled, "ten rows are settled")


def _unfriendly(cluster: Cluster) -> str:
    """A topic with the longest name, and a message with the longest key that has failed many times; its id."""
    sure(cluster, "PUT", f"/v1/topics/{LONG_TOPIC}", {"backoff": ["1ms"]})
    item = {"topic": LONG_TOPIC, "key": LONG_KEY, "body": {"note": "n" * 300}, "tags": ["t" * 60]}
    message = sure(cluster, "POST", "/v1/messages:batch", [item]).json["results"][0]["id"]

    def failed_often() -> bool:
        found = cluster.receive(cluster.leader(), LONG_TOPIC, consumer="w" * 60, wait="1s")
        for one in found if isinstance(found, list) else ():
            cluster.settle(cluster.names[0], "nack", [one], reason="no answer from https://hooks.example/" + "r" * 90)
        return int(cluster.describe(cluster.names[0], message)["attempt"]) >= ATTEMPTS

    until(failed_often, "the message has failed many times", every=0.001)
    return str(message)
