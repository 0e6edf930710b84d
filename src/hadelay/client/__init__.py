"""`AsyncClient`, the blocking `Client`, and their types. `import X as X` makes X public for type checkers."""

from hadelay.api.problems import NotANode as NotANode
from hadelay.api.problems import Unreachable as Unreachable
from hadelay.client.aio import AsyncClient as AsyncClient
from hadelay.client.consumer import Consumer as Consumer
from hadelay.client.message import AsyncMessage as AsyncMessage
from hadelay.client.putoptions import *  # noqa: F403
from hadelay.client.sync import Client as Client
from hadelay.client.sync import Consuming as Consuming
from hadelay.client.sync import SyncMessage as SyncMessage
from hadelay.client.topicsettings import *  # noqa: F403
from hadelay.client.types import *  # noqa: F403
