"""The door for AWS SDKs: adds routes, reads the body, checks who asks, relays to the leader, and answers errors.

Each AWS service is a `Protocol`, which says how it writes an error; its handlers get an `Ask`. They raise AwsError, or
the errors of the services below.
"""

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from http import HTTPStatus
from random import getrandbits
from typing import NamedTuple

from hadelay.api.problems import refusal
from hadelay.api.service import Leader
from hadelay.aws.errors import AwsError, Codes, translated
from hadelay.aws.signature import FORWARDED_HOST, Signatures, SignedRequest
from hadelay.errors import Forbidden, HadelayError, Misdirected, Overloaded, Unauthorized
from hadelay.http import answers
from hadelay.http.answers import Answer, unexpected
from hadelay.http.call import Call
from hadelay.http.forwarding.forwarder import Destination
from hadelay.http.forwarding.heads import SHARD, forward_head
from hadelay.http.parts import all_parts
from hadelay.http.routes import OPEN, Routes
from hadelay.rights import SCOPES
from hadelay.rules.access import RequestRights

#: Headers that belong to one connection, or that the relaying node sets anew.
_HOP = {"connection", "content-length", "transfer-encoding", "expect", "keep-alive", "te", "via", "accept-encoding"}
_OWN_HEADERS = frozenset({"host", *_HOP})
#: Header with the name of the node that relays a request. Not Via, which proxies of clients send, too.
_RELAYED_BY = "X-Relayed-By"
#: Header of all answers of a door.
_REQUEST_ID = "x-amzn-RequestId"


class Ask(NamedTuple):
    """A request of an SDK whose signature is checked."""

    call: Call
    access: RequestRights
    body: bytes

    @property
    def origin(self) -> str:
        """Scheme, host and port by which the client came."""
        context, headers = self.call.context, self.call.request.headers
        encrypted = context.tls is not None or _first(headers.get("X-Forwarded-Proto")).lower() == "https"
        return f"{'https' if encrypted else 'http'}://{self._host or context.config.listen}"

    @property
    def _host(self) -> str:
        headers = self.call.request.headers
        return _first(headers.get(FORWARDED_HOST)) or str(headers.get("Host", ""))

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
        """Name of the node that relayed this request; "" if an AWS client sent it. A node can follow a redirect to the
        leader; an AWS client cannot."""
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
        answer = await call.context.polls.run(asked)
        if answer.status == HTTPStatus.NOT_FOUND:  # a door answers a receive with no such status
            raise _no_door(leader.name)
        return answer

    async def forward(self, to: Destination) -> Answer:
        """Send the request to another shard as it came, with its signature, and return the shard's answer. Raises
        HadelayError."""
        call, context = self.call, self.call.context
        fields = call.request.raw_headers
        head = forward_head(call.request.method, call.target, fields, context.service.node, host=self._host)
        answer = await context.forwarder.answer(to, head, self.body)
        headers = dict(answer.headers)
        if headers.pop(_REQUEST_ID.title(), None) is None:
            if answer.status == HTTPStatus.NOT_FOUND:
                raise _no_door(f"shard {to.shard}")
            raise refusal(f"shard {to.shard}", head.method, answer.status, headers, answer.body)
        return answer._replace(headers=headers)

    async def forward_all(self, to: Iterable[Destination]) -> list[Answer | HadelayError]:
        """Forward the request to several shards at once; returns the answer of each, or its error."""
        return await all_parts([self.forward(one) for one in to])


def _no_door(where: str) -> Overloaded:
    return Overloaded(f"{where} does not serve AWS SDKs: set `aws = true` in the section [http] of its nodes' files")


def answered(found: Iterable[Answer | HadelayError]) -> list[Answer]:
    """The answers of several shards. Raises the error of a shard without an answer; an unknown outcome goes first."""
    found = list(found)
    errors = [one for one in found if isinstance(one, HadelayError)]
    if errors:
        raise min(errors, key=lambda error: error.outcome_known)
    return [one for one in found if isinstance(one, Answer)]


def _first(values: str | None) -> str:
    """First value in a header, which the first of several proxies wrote."""
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
        except Misdirected as error:
            del error.extra["nodes"]  # for the node that forwarded the request: it has the addresses in its own map
            answer = answers.refusal(error)
        except HadelayError as error:
            if isinstance(error, Unauthorized | Forbidden):
                call.context.denials.note(name, error)
            if SHARD in call.request.headers and (here := call.context.router.here) is not None:
                error.detail = f"shard {here}: {error.detail or error.title}"
            answer = protocol.refusal(call, translated(error, protocol.codes))
        except Exception as error:
            call.context.failed(name, error, call.request.method)
            answer = protocol.refusal(call, translated(unexpected(error, call.request.method), protocol.codes))
        return Answer(answer.status, {_REQUEST_ID: new_id(), **answer.headers}, answer.body)
