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
    """A consumer: it asked for messages since the present leader took over, has leases, or settled messages lately."""

    name: str
    #: Topics that it asked for, has leases of, or settled messages of, by name; at most 50.
    topics: list[str]
    #: Time of its latest receive, node to which that was sent, and whether a receive waits now. Absent: none since the
    #: present leader took over.
    asked_at: At | None = None
    node: str = ""
    waiting: bool = False
    #: Number of its leased messages, and of messages that it acked in the last minute.
    leased: int = 0
    acked: int = 0
    #: Its last failed attempt of the last ten minutes.
    failed: Failed[At] | None = None
    #: Its oldest lease that did not end.
    oldest: OldestLease[At] | None = None


class Consumers(Document, Generic[At], frozen=True):
    #: Those with most leases first; at most 1,000.
    consumers: list[ConsumerOfTopics[At]]
    #: Whether all leases and consumers were looked at; false above 20,000 grants, 1,000 consumers, or without a leader.
    complete: bool
