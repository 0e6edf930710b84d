"""Constants of a node, which are not part of its documented configuration. They are fields, so that the simulator and
tests can set them; a configuration file may still set one in this release, with a warning (load.py)."""

from msgspec import Struct

_KIB, _MIB = 1 << 10, 1 << 20


class Http(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Size limit of all request bodies in progress on all connections; beyond it: 503. A body that arrives in one piece
    #: does not count.
    max_reading_bytes: int = 64 * _MIB
    #: Maximum number of messages per batch.
    max_batch_items: int = 10_000
    #: Maximum number of messages per receive.
    max_receive: int = 1_000
    #: Number of messages per receive, if the request names none.
    default_receive: int = 10
    #: Maximum wait of a receive.
    max_wait_ms: int = 60_000
    #: Limit of waiting receives per node; each costs a connection and a few kilobytes.
    max_waiting: int = 10_000
    max_topic_bytes: int = 128
    max_key_bytes: int = 256
    #: Size limit of all `Hadelay-Meta-*` headers of a message.
    max_meta_bytes: int = 4 * _KIB
    #: Limit of tags per message. More tags make filters check more messages in vain (ADR 70).
    max_tags: int = 16
    max_tag_bytes: int = 64
    #: Timeout of receiving a request, and of sending its answer.
    io_timeout_ms: int = 30_000
    #: Time that a follower holds a poll without a known leader, before it answers 503.
    no_leader_wait_ms: int = 2_000


class Raft(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Maximum election timeout; 0: 4/3 of election_min_ms. Timeouts are random, to keep candidates apart.
    election_max_ms: int = 0
    #: Interval of the leader's heartbeats; 0: a sixth of election_min_ms.
    heartbeat_ms: int = 0
    #: Size limit of a Raft entry built by group commit. Larger entries need fewer syncs, but delay heartbeats.
    max_entry_bytes: int = _MIB
    #: Limit of unacknowledged bytes per follower. A higher limit hides latency, but a slow follower costs memory.
    max_inflight_bytes: int = 4 * _MIB
    #: Size of a pre-allocated journal segment; checkpoints delete whole segments.
    segment_bytes: int = 16 * _MIB
    #: Maximum duration of a leader's sync; a leader with a slower disk hands over its leadership.
    max_sync_ms: int = 1_000


class DispatchSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Time before their due times at which messages are loaded into memory. A longer time smooths bursts, but keeps
    #: more ids in memory.
    preload_ms: int = 10_000
    #: Limit of ids of ready messages in memory per topic; an index scan finds the others.
    ready_window: int = 65_536
    #: Interval of the search for due messages that memory has lost track of. A metric counts them, and should stay 0.
    sweep_ms: int = 10_000
    #: Limit of messages that one step of a bulk job changes: at most 500. Smaller steps make jobs slower.
    job_step: int = 500


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Size limit of the publishes that wait for their commit on this node; beyond it: 503 with retry_after_ms.
    publish_queue_bytes: int = 64 * _MIB
    #: Limit of topics with their own series in /metrics, the busiest first; all others share the series "(other)".
    metrics_topics: int = 1_000
    #: Limit of this node's clock skew; beyond it, the node reports an alarm.
    max_clock_skew_ms: int = 250


class StorageSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Size of the buffer for far hours, and of the buffer for changes of tables; a full buffer triggers a checkpoint,
    #: which needs as much memory again. A larger buffer makes fewer, larger writes of messages spread over years.
    far_buffer_bytes: int = 32 * _MIB
    #: Journal bytes since the last checkpoint that trigger the next one; an entry counts as at least 8 KiB. A smaller
    #: limit makes restarts quicker, but writes more.
    checkpoint_bytes: int = 64 * _MIB
    #: Maximum time between checkpoints, if there are changes. (Some nodes lower all limits that trigger a checkpoint by
    #: up to 30 %, to avoid simultaneous checkpoints.)
    checkpoint_interval_ms: int = 60_000


class WebhookSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Limit of concurrent webhook calls to one host.
    host_calls: int = 256
    #: User-Agent header of webhook calls.
    user_agent: str = "hadelay"
