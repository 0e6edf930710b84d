"""`AsyncClient`, its blocking twin `Client`, and what they give back. Knows the API, and nothing of a node."""

from __future__ import annotations

from hadelay.answers import NotANode
from hadelay.client.aio import AsyncClient
from hadelay.client.consumer import Consumer, Leased
from hadelay.client.sync import Client, Delivered
from hadelay.client.transport import Unreachable
from hadelay.client.types import (
    AckOutcome,
    Alert,
    Backoff,
    Bucket,
    ClusterInfo,
    DeadLetter,
    Delay,
    ExtendOutcome,
    Failure,
    HoursInfo,
    Member,
    Message,
    MessageInfo,
    NackOutcome,
    OnConflict,
    Put,
    PutResult,
    Receipt,
    Redriven,
    Rescheduled,
    State,
    TopicInfo,
    TopicSettings,
    Webhook,
    When,
)

__all__ = [
    "AckOutcome",
    "Alert",
    "AsyncClient",
    "Backoff",
    "Bucket",
    "Client",
    "ClusterInfo",
    "Consumer",
    "DeadLetter",
    "Delay",
    "Delivered",
    "ExtendOutcome",
    "Failure",
    "HoursInfo",
    "Leased",
    "Member",
    "Message",
    "MessageInfo",
    "NackOutcome",
    "NotANode",
    "OnConflict",
    "Put",
    "PutResult",
    "Receipt",
    "Redriven",
    "Rescheduled",
    "State",
    "TopicInfo",
    "TopicSettings",
    "Unreachable",
    "Webhook",
    "When",
]
