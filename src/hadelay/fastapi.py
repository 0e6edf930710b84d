"""hadelay in a FastAPI application (docs/howto/fastapi.md): `Hadelay` is a lifespan, `HadelayClient` a dependency."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from hadelay.client import AsyncClient, AsyncMessage, Delay
from hadelay.client.consumer import DRAIN_S
from hadelay.client.wire import ADAPTER_TIMEOUT_S, seconds_of, servers
from hadelay.errors import HadelayError
from hadelay.tasks.app import App
from hadelay.tasks.cpu import CpuPool
from hadelay.tasks.runner import Runner
from hadelay.tasks.worker import store_schedules
from hadelay.webhooks import VerificationError, verify

try:
    from fastapi import Depends, HTTPException, Request
    from starlette.requests import HTTPConnection
except ImportError:
    raise ImportError("hadelay.fastapi needs FastAPI: pip install 'hadelay[fastapi]'") from None

log = logging.getLogger(__name__)

Topics = str | Sequence[str]
Handler = Callable[[AsyncMessage], Awaitable[object]]
H = TypeVar("H", bound=Handler)
#: Pause before a consumer that ended with an error starts again, in seconds.
_AGAIN_S = 5.0


class Hadelay:
    """The lifespan of an application: a client that is open while the application serves, and consumers beside it.

        hadelay = Hadelay("http://n1:8400,http://n2:8400,http://n3:8400")
        app = FastAPI(lifespan=hadelay)

    In a lifespan of your own, `async with hadelay(app) as state:` gives the state to yield.

    urls, token, ca: as of AsyncClient. Default: those of `tasks`; without tasks, urls come from the variable
    HADELAY_SERVERS, or name a node on loopback. tasks: an App whose tasks each process of the server runs,
    `concurrency` at a time. drain: when the server stops, time for handlers and tasks to finish, their leases extended
    meanwhile; then they are cancelled, and their messages go back at once, without counting the attempt. timeout: time
    after which a request of the client fails if no node can answer it.
    """

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        ca: str | None = None,
        tasks: App | None = None,
        concurrency: int = 10,
        drain: Delay = DRAIN_S,
        timeout: Delay = ADAPTER_TIMEOUT_S,
    ) -> None:
        if tasks is not None:
            token, ca = token or tasks.token, ca or tasks.ca
        self._urls, self._token, self._ca = urls, token, ca
        self._tasks, self._concurrency, self._drain = tasks, concurrency, drain
        self._timeout_s = seconds_of(timeout)
        self._consumers: list[tuple[Topics, Handler, dict[str, Any]]] = []

    def consumer(self, topics: Topics, **options: Any) -> Callable[[H], H]:
        """Decorator of an async function that handles the messages of the topics: each process of the server runs a
        consumer, which calls the function for every message that it receives.

        options: concurrency, lease, tags, any_tags, order and on_error, as of `AsyncClient.work`.
        """

        def add(handler: H) -> H:
            self._consumers.append((topics, handler, options))
            return handler

        return add

    @contextlib.asynccontextmanager
    async def __call__(self, app: object) -> AsyncIterator[dict[str, AsyncClient]]:
        """Lifespan of `app`: runs the client and the consumers, and yields the state that requests get."""
        urls = servers(self._urls or (self._tasks.urls if self._tasks is not None else None))
        async with (
            AsyncClient(urls, self._token, timeout=self._timeout_s, ca=self._ca) as client,
            contextlib.AsyncExitStack() as ends,
        ):
            consumers = list(self._consumers)
            if self._tasks is not None:
                runner = _runner(self._tasks, client)
                ends.callback(runner.close)
                ends.callback(asyncio.create_task(store_schedules(self._tasks, client)).cancel)
                consumers.append((self._tasks.topics, runner, {"concurrency": self._concurrency}))
            stop = asyncio.Event()
            works = [
                partial(client.work, topics, handler, stop=stop, drain=self._drain, **options)
                for topics, handler, options in consumers
            ]
            running = [asyncio.create_task(_keep_working(work, stop)) for work in works]
            try:
                yield {"hadelay": client}
            finally:
                stop.set()
                await asyncio.gather(*running)


def _runner(tasks: App, client: AsyncClient) -> Runner:
    if names := [task.name for task in tasks.tasks.values() if task.rules.cpu]:
        raise TypeError(f"{names[0]} has cpu=True: run its app with `hadelay work` instead")
    return Runner(tasks, client, CpuPool(""), lambda report: None)


async def _keep_working(work: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
    """Run a consumer until `stop` is set; run it again after an error, such as a token that was revoked."""
    while not stop.is_set():
        try:
            await work()
        except Exception as error:
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            log.error("a consumer ended, and starts again in %g s: %s", _AGAIN_S, first)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _AGAIN_S)


async def _client(connection: HTTPConnection) -> AsyncIterator[AsyncClient]:
    client: AsyncClient | None = getattr(connection.state, "hadelay", None)
    if client is None:
        raise RuntimeError("the application has no hadelay client: create it with FastAPI(lifespan=Hadelay())")
    try:
        yield client
    except HadelayError as error:
        if not error.retryable and error.outcome_known:
            raise
        log.error("answered 503: %s", error)
        raise HTTPException(
            503, "the message store does not answer: try again", headers={"Retry-After": "1"}
        ) from error


#: Type of a parameter that gets the client: `async def place(client: HadelayClient)`. If the route raises a temporary
#: error of the client, such as NoLeader, the response is 503.
HadelayClient = Annotated[AsyncClient, Depends(_client)]


def verified_webhook(secret: str | Sequence[str], *, tolerance_s: float = 300) -> Any:
    """Dependency of a route that receives webhooks: answers 401 to calls that `hadelay.webhooks.verify` refuses.

    @app.post("/invoices", dependencies=[verified_webhook(os.environ["WEBHOOK_SECRET"])])
    """

    async def refuse_others(request: Request) -> None:
        try:
            verify(request.headers, await request.body(), secret, tolerance_s=tolerance_s)
        except VerificationError as error:
            raise HTTPException(401, str(error)) from None

    return Depends(refuse_others)
