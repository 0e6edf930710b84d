"""`AsyncClient`, its blocking twin `Client`, and their types. `X as X` makes X public for type checkers."""

from __future__ import annotations

from hadelay.api.problems import NotANode as NotANode
from hadelay.api.problems import Unreachable as Unreachable
from hadelay.client.aio import AsyncClient as AsyncClient
from hadelay.client.consumer import Consumer as Consumer
from hadelay.client.consumer import Leased as Leased
from hadelay.client.sync import Client as Client
from hadelay.client.sync import Delivered as Delivered
from hadelay.client.types import AckOutcome as AckOutcome
from hadelay.client.types import Alert as Alert
from hadelay.client.types import Backoff as Backoff
from hadelay.client.types import Bucket as Bucket
from hadelay.client.types import ClusterInfo as ClusterInfo
from hadelay.client.types import DeadLetter as DeadLetter
from hadelay.client.types import Delay as Delay
from hadelay.client.types import ExtendOutcome as ExtendOutcome
from hadelay.client.types import Failure as Failure
from hadelay.client.types import HoursInfo as HoursInfo
from hadelay.client.types import Member as Member
from hadelay.client.types import Message as Message
from hadelay.client.types import MessageInfo as MessageInfo
from hadelay.client.types import NackOutcome as NackOutcome
from hadelay.client.types import OnConflict as OnConflict
from hadelay.client.types import Put as Put
from hadelay.client.types import PutResult as PutResult
from hadelay.client.types import Receipt as Receipt
from hadelay.client.types import Redriven as Redriven
from hadelay.client.types import Rescheduled as Rescheduled
from hadelay.client.types import State as State
from hadelay.client.types import TopicInfo as TopicInfo
from hadelay.client.types import TopicSettings as TopicSettings
from hadelay.client.types import Webhook as Webhook
from hadelay.client.types import When as When
