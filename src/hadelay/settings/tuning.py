"""Constants of a node that are no keys: fields, since the simulator and tests set them, and since a file that names one
is honoured for one release, with a warning (load.py)."""

from __future__ import annotations

from msgspec import Struct

_KIB, _MIB = 1 << 10, 1 << 20


class Http(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Bodies on their way in, of all connections together, until their requests are answered; beyond: 503. Those that
    #: come in one piece do not count.
    max_reading_bytes: int = 64 * _MIB
    #: Messages of one batch, and of one receive; and how many a receive gets that does not say.
    max_batch_items: int = 10_000
    max_receive: int = 1_000
    default_receive: int = 10
    #: Longest time that a receive may wait for a message.
    max_wait_ms: int = 60_000
    #: Receives that wait on one node; each costs a connection and a few kilobytes.
    max_waiting: int = 10_000
    max_topic_bytes: int = 128
    max_key_bytes: int = 256
    #: All `Hadelay-Meta-*` of one message together.
    max_meta_bytes: int = 4 * _KIB
    #: Tags of one message. The more there are, the more messages are looked at in vain (ADR 70).
    max_tags: int = 16
    max_tag_bytes: int = 64
    #: Timeout of a request on its way in, and of a reader of its answer.
    io_timeout_ms: int = 30_000
    #: How long a follower holds a poll while it knows no leader, before it answers 503.
    no_leader_wait_ms: int = 2_000


class Raft(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Longest time without a leader before an election; 0: twice election_min_ms. The spread keeps candidates apart.
    election_max_ms: int = 0
    #: Time between two heartbeats of the leader; 0: a sixth of election_min_ms.
    heartbeat_ms: int = 0
    #: Largest Raft entry built by group commit. Larger: fewer syncs, and heartbeats wait behind it for longer.
    max_entry_bytes: int = _MIB
    #: Bytes sent to one follower and not yet answered. More hides latency, and costs memory when a follower is slow.
    max_inflight_bytes: int = 4 * _MIB
    #: Size of one pre-allocated journal segment; whole segments are deleted after checkpoints.
    segment_bytes: int = 16 * _MIB
    #: A leader whose oldest sync is older than this hands over: its disk is stuck.
    max_sync_ms: int = 1_000


class Dispatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: How far ahead the seconds' chains are walked. Longer smooths bursts, and keeps more ids in memory.
    preload_ms: int = 10_000
    #: Ids kept ready per topic; what is beyond them is found again by scanning the index.
    ready_window: int = 65_536
    #: How often the sweeper looks for messages owed and forgotten. It should never find one; a metric says so.
    sweep_ms: int = 10_000


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Publishes that wait to be committed on this node; beyond: 503 with retry_after_ms.
    publish_queue_bytes: int = 64 * _MIB
    #: Topics with series of their own in /metrics, the busiest first; all others are one, "(other)". Bounds what a
    #: million topic names cost whoever scrapes.
    metrics_topics: int = 1_000
    #: How far this node's wall clock may be off before it says so.
    max_clock_skew_ms: int = 250


class Storage(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Appends to hours that are not near wait in memory up to this much, and changes of keys and places up to as much;
    #: then a checkpoint writes them, and what comes meanwhile takes as much again. More: fewer and larger writes when
    #: messages are spread over years.
    far_buffer_bytes: int = 32 * _MIB
    #: Journal written since the last checkpoint that causes the next one, an entry counting as 8 KiB at least. Smaller:
    #: quicker restart, more writing.
    checkpoint_bytes: int = 64 * _MIB
    #: Time after which a checkpoint is made, if anything changed. (All three bounds are up to 30 % lower on some nodes,
    #: so that they do not checkpoint in the same moment.)
    checkpoint_interval_ms: int = 60_000


class Webhooks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    #: Concurrent calls to one host.
    host_calls: int = 256
    #: What the calls say they come from.
    user_agent: str = "hadelay"
