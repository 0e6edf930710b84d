"""HTTP API types about the consumers of all topics."""

from typing import Generic

from hadelay.api.base import At, Document


class Failed(Document, Generic[At], frozen=True):
    """The last failed attempt of a consumer."""

    at: At
    topic: str
    #: Reason that the consumer gave; `lease expired` if the lease ran out.
    reason: str


class OldestLease(Document, Generic[At], frozen=True):
    message: str
    topic: str
    since: At


class ConsumerOfTopics(Document, Generic[At], frozen=True):
    """A consumer that has received since the present leader took over, has leases, or has settled messages lately."""

    name: str
    #: Topics that the consumer received from, has leases of, or settled messages of, sorted by name; at most 50.
    topics: list[str]
    #: The consumer's latest receive: its time, the node that got it, and whether it still waits. Omitted if there was
    #: none since the present leader took over.
    asked_at: At | None = None
    node: str = ""
    waiting: bool = False
    #: Number of the consumer's leased messages, and number of messages that it acked in the last minute.
    leased: int = 0
    acked: int = 0
    #: The consumer's last failed attempt, if it is not older than ten minutes.
    failed: Failed[At] | None = None
    #: The consumer's oldest lease that has not ended.
    oldest: OldestLease[At] | None = None


class Consumers(Document, Generic[At], frozen=True):
    #: Consumers, those with most leases first; at most 1,000.
    consumers: list[ConsumerOfTopics[At]]
    #: Whether all leases and consumers are counted; false above 20,000 grants or 1,000 consumers, and without a leader.
    complete: bool
