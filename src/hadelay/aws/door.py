"""The door for AWS SDKs: adds routes, reads the body, checks who asks, relays to the leader, and answers errors.

Each AWS service is a `Protocol`, which says how it writes an error; its handlers get an `Ask`. They raise AwsError, or
the errors of the services below.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from random import getrandbits
from typing import NamedTuple

from hadelay.api.service import Leader
from hadelay.aws.errors import AwsError, Codes, translated
from hadelay.aws.signature import FORWARDED_HOST, Signatures, SignedRequest
from hadelay.errors import Forbidden, HadelayError, Unauthorized
from hadelay.http.answers import Answer, unexpected
from hadelay.http.call import Call
from hadelay.http.routes import OPEN, Routes
from hadelay.rights import SCOPES
from hadelay.rules.access import RequestRights

#: Headers that belong to one connection, or that the relaying node sets anew.
_HOP = {"connection", "content-length", "transfer-encoding", "expect", "keep-alive", "te", "via", "accept-encoding"}
_OWN_HEADERS = frozenset({"host", *_HOP})
#: Header with the name of the node that relays a request. Not Via, which proxies of clients send, too.
_RELAYED_BY = "X-Relayed-By"


class Ask(NamedTuple):
    """A request of an SDK whose signature is checked."""

    call: Call
    access: RequestRights
    body: bytes

    @property
    def origin(self) -> str:
        """Scheme, host and port by which the client came."""
        context, headers = self.call.context, self.call.request.headers
        host = _first(headers.get(FORWARDED_HOST)) or headers.get("Host") or context.config.listen
        encrypted = context.tls is not None or _first(headers.get("X-Forwarded-Proto")).lower() == "https"
        return f"{'https' if encrypted else 'http'}://{host}"

    @property
    def retry_key(self) -> bytes | None:
        """Idempotency key of the request: SDKs repeat this header in all tries of one call. None without the header."""
        invocation = self.call.request.headers.get("amz-sdk-invocation-id", "")
        return f"aws {invocation}".encode() if 0 < len(invocation) <= 128 else None

    def may_any(self, topic: str) -> bool:
        """Whether the caller has any scope for the topic, and so may know that it exists."""
        return any(self.access.may(scope, topic) for scope in SCOPES)

    def need_any(self, topic: str) -> None:
        if not self.may_any(topic):
            self.access.need("read", topic)

    @property
    def relayed_by(self) -> str:
        """Name of the node that relayed this request, which follows redirects; "" for a client, which cannot."""
        return str(self.call.request.headers.get(_RELAYED_BY, ""))

    async def relay(self, leader: Leader, wait_ms: int) -> Answer:
        """Send the request to the leader as it came, with its signature, and return the leader's answer."""
        call, request = self.call, self.call.request
        headers = {name: text for name, text in request.headers.items() if name.lower() not in _OWN_HEADERS}
        headers.setdefault(FORWARDED_HOST, request.headers.get("Host", ""))
        headers[_RELAYED_BY] = call.service.node
        asked = call.context.relay.ask(
            leader, request.method, call.target, self.body, headers, wait_ms, names=tuple(headers)
        )
        return await call.context.polls.run(asked)


def _first(values: str | None) -> str:
    """What the first of several proxies wrote into a header."""
    return (values or "").partition(",")[0].strip()


def new_id() -> str:
    """An id for the log of a client, which nobody has to be unable to guess. UUIDs from the system cost 20 µs more."""
    return f"{getrandbits(128):032x}"


Handler = Callable[[Ask], Awaitable[Answer]]


class Protocol(NamedTuple):
    """How an AWS service writes its errors. codes: its own codes for our errors."""

    refusal: Callable[[Call, AwsError], Answer]
    codes: Codes


class Door:
    """Routes of the doors. Add services with `add`. signatures: finds the rights of signed requests."""

    def __init__(self, signatures: Signatures) -> None:
        self._signatures, self.routes = signatures, Routes()

    def add(
        self, protocol: Protocol, name: str, method: str, path: str, handler: Handler, *, short: bool = False
    ) -> None:
        """Add a route. name: of the route, in metrics. short: see Route."""
        self.routes.add(
            method,
            path,
            returns={200: str},
            raw_body=True,
            own_head=not short,
            short=short,
            scope=OPEN,
            described=False,
            name=name,
            summary="-",
        )(partial(self._answer, protocol, name, handler))

    async def _answer(self, protocol: Protocol, name: str, handler: Handler, call: Call) -> Answer:
        try:
            body = await call.read(call.context.config.max_batch_bytes, "max_batch_bytes")
            request = call.request
            access = self._signatures.signed(SignedRequest(request.method, call.target, request.headers, body))
            answer = await handler(Ask(call, access, body))
        except AwsError as error:
            answer = protocol.refusal(call, error)
        except HadelayError as error:
            if isinstance(error, Unauthorized | Forbidden):
                call.context.denials.note(name, error)
            answer = protocol.refusal(call, translated(error, protocol.codes))
        except Exception as error:
            call.context.failed(name, error, call.request.method)
            answer = protocol.refusal(call, translated(unexpected(error, call.request.method), protocol.codes))
        return Answer(answer.status, {"x-amzn-RequestId": new_id(), **answer.headers}, answer.body)
