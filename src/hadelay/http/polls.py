"""Waiting receives (polls): ends them when the node stops, or relays them to the leader for the client."""

import asyncio
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp

from hadelay.api.service import Granting, Leader
from hadelay.errors import HadelayError, NoLeader, OutcomeUnknown, Overloaded
from hadelay.http.answers import Answer
from hadelay.platform.tls import Certificates
from hadelay.settings.node import HttpConfig

T = TypeVar("T")

_RELAYED = ("Content-Type", "Accept", "Accept-Body", "Authorization")
_ANSWERED = ("Content-Type", "Retry-After", "Location", "x-amzn-query-error")
#: Limit of redirects of one poll: each node names the leader that it knows, and leadership may move meanwhile.
_MOST_REDIRECTS = 3


_RECEIVE_AGAIN = "repeat the receive at another node, with the same request_id"


class Polls:
    """Waiting receives. When the node drains, they are answered 503, or 504 if a grant may have been made; the consumer
    then asks another node with the same request_id."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        self.draining = False

    async def run(self, poll: Coroutine[Any, Any, T], again: str = _RECEIVE_AGAIN) -> T:
        """Await the poll. again: advice to the client, for the error if the node stops."""
        if self.draining:
            poll.close()
            raise self._gone(again)
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            return await poll
        except asyncio.CancelledError as cancelled:
            if self.draining and task.uncancel() == 0:
                raise self._gone(again, sure=not isinstance(cancelled, Granting)) from None
            raise
        finally:
            self.tasks.discard(task)

    def drain(self) -> None:
        self.draining = True
        for task in self.tasks:
            task.cancel()

    @staticmethod
    def _gone(again: str, *, sure: bool = True) -> HadelayError:
        detail = f"this node is shutting down: {again}"
        return Overloaded(detail, retry_after_ms=0) if sure else OutcomeUnknown(detail)


class Relay:
    """Relays polls to the leader for clients that cannot follow a redirect. full: tells whether no socket is left for
    another poll."""

    def __init__(self, config: HttpConfig, tls: Certificates | None, node: str) -> None:
        """node: name of this node, which the leader learns from the header Via."""
        self._config, self._tls, self._node = config, tls, node
        self.full: Callable[[], bool] = lambda: False
        #: Function that returns the URLs to which redirects of other nodes may lead.
        self.known: Callable[[], Container[str]] = lambda: ()
        #: Number of polls that wait for the leader's answer, each on its own connection.
        self.count = 0
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self,
        leader: Leader,
        method: str,
        path: str,
        data: bytes | None,
        headers: Mapping[str, str],
        wait_ms: int,
        *,
        names: Iterable[str] = _RELAYED,
    ) -> Answer:
        """Send a poll to the leader, and return the leader's answer. path: without the query, in which the client asked
        for a relay, so that a node that does not lead answers with a redirect. Redirects are followed to `known` URLs
        only, because the client's token goes with the poll."""
        if self.full():
            raise Overloaded(
                "this node has no free socket to relay the receive: ask the leader itself",
                retry_after_ms=1_000,
            )
        sent = {name: headers[name] for name in names if name in headers} | {"Via": f"1.1 {self._node}"}
        base = leader.url
        self.count += 1
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                answer = await self._send(method, base + path, data, sent, wait_ms)
                if answer.status != HTTPStatus.TEMPORARY_REDIRECT or "Location" not in answer.headers:
                    return answer
                # Follow redirects here: aiohttp would drop the token, because another node is another origin.
                base = self._followed(base, answer.headers["Location"].removesuffix(path))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NoLeader(f"the leader {leader.name} cannot be reached: {error}", retry_after_ms=200) from None
        except aiohttp.ClientError as error:
            raise OutcomeUnknown(
                f"the connection to the leader {leader.name} broke before its answer ({error}): messages may be leased "
                "to this consumer. Receive again with the same request_id"
            ) from None
        except asyncio.CancelledError:
            raise Granting from None  # the leader may have leased messages already
        finally:
            self.count -= 1
        raise NoLeader(f"leadership is moving: {_MOST_REDIRECTS} redirects, no answer", retry_after_ms=200)

    def _followed(self, url: str, there: str) -> str:
        """The URL of the node that the node at `url` redirects to. Raises NoLeader for a URL that is not followed."""
        if there not in self.known():
            what = "which is no address of this cluster's members or of its shard map"
        elif url.startswith("https:") and not there.startswith("https:"):
            what = "which is not encrypted"
        else:
            return there
        raise NoLeader(f"{url} redirects to {there[:255]!r}, {what}: nothing was sent there", retry_after_ms=200)

    async def _send(self, method: str, url: str, data: bytes | None, headers: dict[str, str], wait_ms: int) -> Answer:
        """Send a poll to one node, and return its answer, which may be a redirect."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        if self._tls is not None and not url.startswith("https:"):
            # If this node uses TLS, send the token only over TLS.
            headers = {name: text for name, text in headers.items() if name != "Authorization"}
        config = self._config
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=config.no_leader_wait_ms / 1000, sock_read=(wait_ms + config.io_timeout_ms) / 1000
        )
        async with self._session.request(
            method,
            url,
            data=data,
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
            ssl=self._tls.client if self._tls is not None else True,
        ) as answer:
            body = await answer.read()
            kept = {name: answer.headers[name] for name in _ANSWERED if name in answer.headers}
            return Answer(answer.status, kept, body)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
