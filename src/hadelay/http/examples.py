"""Examples of the OpenAPI document: of parameters by name, of request bodies and of answers by their types."""

from typing import Any

from msgspec import to_builtins

from hadelay.api import (
    attention,
    batches,
    cluster,
    consumers,
    consuming,
    jobs,
    messages,
    publishing,
    publishrequest,
    schedules,
    shards,
    topics,
    topicsettings,
)
from hadelay.api.base import Nothing
from hadelay.settings.shardmap import ALL, Rule, Shard, ShardMap

_ID, _OTHER_ID, _LEASE = "07D7EG00000G0", "07D7EG00000G1", "AAAAAgAAAAAAAAAHAAAAAAAAAAA"
_NOW, _DUE, _LATER = "2026-11-21T13:00:00.000Z", "2026-11-21T14:00:00.000Z", "2026-11-22T08:00:00.000Z"

_MAP = ShardMap(2, {0: Shard(0, nodes={"n1": "http://10.0.0.1:8500"})}, (Rule(ALL, (0,)),), {"orders": 0})

#: Examples of path, query and header parameters.
PARAMETERS: dict[str, Any] = {
    "topic": "orders", "subscription": "billing", "schedule": "report", "id": _ID, "key": "order-4711",
    "group": "customer-1", "batch": "import-7", "token_id": "0f1e2d3c4b5a",
    "job": "1", "node": "n3", "hour": "2026112113", "file": "idx",
    "snapshot": "4711-0f1e2d3c", "name": "names", "delay": "1h", "from": _NOW, "to": _DUE, "step": "10m",
    "Idempotency-Key": "order-4711", "Range": "bytes=0-1023",
}  # fmt: skip

#: Examples of request bodies, as JSON.
BODIES: dict[Any, Any] = {
    list[publishrequest.BatchItem]: [
        {"topic": "orders", "body": {"order": 4711}, "delay": "1h"},
        {"topic": "mails", "body": "hello", "deliver_at": _LATER, "key": "order-4711"},
    ],
    Nothing: {},
    shards.PutShards: {"step": "prepare", "map": to_builtins(_MAP, str_keys=True)},
    consuming.Receive: {"max": 10, "wait": "10s", "lease": "30s"},
    consuming.ReceiveTopics: {"topics": ["urgent", "orders"], "max": 10, "order": "listed"},
    consuming.Ack: {"leases": [_LEASE]},
    consuming.Nack: {"leases": [_LEASE], "delay": "1m", "reason": "the mail server is down"},
    consuming.Extend: {"leases": [_LEASE], "lease": "30s"},
    messages.Reschedule: {"delay": "2h"},
    messages.Redrive: {"ids": [_ID]},
    messages.Purge: {"states": ["scheduled", "ready"]},
    topicsettings.PutTopic: {"max_attempts": 5, "backoff": ["1s", "1m"], "ttl": "30d"},
    topics.PutSubscription: {"tags": ["paid"]},
    topics.Pause: {"reason": "the warehouse is closed"},
    jobs.BeginJob: {"action": "cancel", "filter": {"topic": "orders", "tags": ["test"]}},
    jobs.CountJob: {"action": "reschedule", "filter": {"topic": "orders", "key_prefix": "shop-1-"}, "shift": "1h"},
    batches.OpenBatch: {"key": "import-7", "callback": {"topic": "imports.done"}, "on": "success"},
    schedules.PutSchedule: {"topic": "reports", "cron": "0 9 * * MON-FRI", "timezone": "Europe/Vienna"},
    schedules.Preview: {"cron": "0 9 * * MON-FRI", "timezone": "Europe/Vienna", "count": 3},
    schedules.Backfill: {"from": _NOW, "to": _LATER},
    cluster.Transfer: {"to": "n2"},
    cluster.Drain: {"node": "n3"},
    cluster.AddMember: {"name": "n4", "raft": "10.0.0.4:8500"},
    cluster.CreateToken: {"name": "shop", "scopes": ["publish:orders", "consume:orders"], "lifetime": "365d"},
}

#: Examples of answers. They are objects, so the type checker refuses what no node answers.
ANSWERS: dict[Any, Any] = {
    publishing.Published[str]: publishing.Published(_ID, "orders", _DUE, "order-4711"),
    publishing.BatchResults[str]: publishing.BatchResults(
        [publishing.BatchResult(_ID, _DUE), publishing.BatchResult(_OTHER_ID, _LATER)]
    ),
    messages.Message[str]: messages.Message(
        id=_ID, topic="orders", key="order-4711", state="scheduled", deliver_at=_DUE, published_at=_NOW, attempt=0,
        tags=[], meta={}, content_type="application/json", size=14, history=[],
    ),
    messages.Outcome: messages.Outcome("cancelled"),
    messages.Rescheduled[str]: messages.Rescheduled(_ID, _LATER),
    messages.Redriven: messages.Redriven([messages.RedriveResult(_ID, "redriven")]),
    consuming.ReceivedMessages: consuming.ReceivedMessages(
        [
            consuming.Received(
                id=_ID, lease=_LEASE, topic="orders", body_base64=b'{"order":4711}', content_type="application/json",
                key="order-4711", tags=[], meta={}, deliver_at=_DUE, late_ms=4, attempt=1, redelivered=False,
                lease_until="2026-11-21T14:00:30.004Z", lease_left_ms=30_000,
            )
        ]
    ),
    consuming.AckResults: consuming.AckResults([consuming.Acked(_LEASE, "acked")]),
    consuming.NackResults: consuming.NackResults([consuming.Nacked(_LEASE, "nacked")]),
    consuming.ExtendResults: consuming.ExtendResults([consuming.Extended(_LEASE, "extended")]),
    jobs.JobCount[str]: jobs.JobCount(12, 1, _DUE, _LATER, 1.0, None),
    jobs.Jobs[str]: jobs.Jobs([]),
    topicsettings.Topic[str]: topicsettings.Topic(
        topic="orders", scheduled=3, ready=0, leased=1, dead=0, oldest_ready_age_ms=None, bytes=56, lateness=None,
        max_attempts=5,
    ),
    topics.Topics: topics.Topics([]),
    topics.Buckets[str]: topics.Buckets([topics.Bucket(_NOW, 3)]),
    schedules.Triggered[str]: schedules.Triggered(_ID, _NOW),
    schedules.Schedules: schedules.Schedules([], None),
    batches.Batches: batches.Batches([], None),
    batches.BatchFailures: batches.BatchFailures([batches.BatchFailure(_ID, _NOW, "dead")], None),
    cluster.Cluster[str]: cluster.Cluster(
        "prod", 5, "n1", 3, "4711", _NOW, cluster.Dispatch("2026112113", 0, 7, "commit"),
        [cluster.Member("n1", "10.0.0.1:8400", "10.0.0.1:8500", "leader", "4711", 0, "0.1.0", 5, 0.0)],
    ),
    attention.Attention[str]: attention.Attention(
        "prod", _NOW,
        [
            attention.Row(
                "receiver", "bad", "topic", "orders",
                "Receiver of orders fails: 2,700 calls in a row, last error: HTTP 503.",
                2_700, _NOW, [attention.Action("Look", "/console/topics/orders", "hadelay topic show orders")],
                "orders",
            )
        ],
        {},
    ),
    consumers.Consumers[str]: consumers.Consumers(
        [
            consumers.ConsumerOfTopics(
                "shop-1", ["orders"], _NOW, "n1", True, 2, 1_240,
                consumers.Failed(_NOW, "orders", "card declined"), consumers.OldestLease(_ID, "orders", _NOW),
            )
        ],
        True,
    ),
    topics.Groups[str]: topics.Groups(
        [topics.GroupOfTopic("orders", "customer-1", 498, _NOW, _ID, "scheduled", 9, "card declined")], True
    ),
    cluster.Patrol: cluster.Patrol("n1", 3, 3, _NOW, 0, []),
    cluster.Health: cluster.Health("ok"),
    cluster.Quorum: cluster.Quorum("n3", ["n1", "n2"], 3, 2),
    cluster.Tokens: cluster.Tokens([]),
    cluster.AuditTrail: cluster.AuditTrail([]),
    cluster.Hours: cluster.Hours("4711", []),
    cluster.Snapshot: cluster.Snapshot("4711-0f1e2d3c", "prod", 0, "4711", 3, 5, _NOW, []),
    shards.ShardsOut: shards.ShardsOut(0, 0, "prod", _MAP, None, False),
    shards.ShardNames: shards.ShardNames(None, ["orders"], ["orders.failed"], None),
    cluster.Names: cluster.Names({"orders": 1}, {"shop-1": 1}, {"n1": 1}, {}),
    dict: {"openapi": "3.1.0"},
    str: "hadelay_up 1\n",
}  # fmt: skip
