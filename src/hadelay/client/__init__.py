"""`AsyncClient`, its blocking twin `Client`, and what they give back. Knows the API, and nothing of a node."""

from __future__ import annotations

from hadelay.client.aio import AsyncClient
from hadelay.client.consumer import Consumer, Leased
from hadelay.client.sync import Client, Delivered
from hadelay.client.transport import Unreachable
from hadelay.client.types import (
    Bucket,
    ClusterInfo,
    Delay,
    HoursInfo,
    Member,
    Message,
    MessageInfo,
    Put,
    PutResult,
    Receipt,
    TopicInfo,
    When,
)

__all__ = [
    "AsyncClient",
    "Bucket",
    "Client",
    "ClusterInfo",
    "Consumer",
    "Delay",
    "Delivered",
    "HoursInfo",
    "Leased",
    "Member",
    "Message",
    "MessageInfo",
    "Put",
    "PutResult",
    "Receipt",
    "TopicInfo",
    "Unreachable",
    "When",
]
