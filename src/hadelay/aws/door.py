"""The endpoint for AWS SDKs (door): adds routes, reads the body, checks the signature, relays to the leader, and writes
errors in AWS's form.

Each AWS service is a `Protocol`, which says how it writes an error; its handlers get an `Ask`. They raise HadelayError:
an AwsError has the code of AWS, and the code of any other error is looked up.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from random import getrandbits
from typing import Any, NamedTuple

import msgspec

from hadelay.api.problems import refusal
from hadelay.api.service import Leader, Receipts, answered
from hadelay.aws.errors import AwsError, Codes, translated
from hadelay.aws.signature import FORWARDED_HOST, Signatures, SignedRequest
from hadelay.errors import HadelayError, Misdirected, Overloaded
from hadelay.http import answers
from hadelay.http.answers import Answer, unexpected
from hadelay.http.call import Call
from hadelay.http.forwarding.forwarder import Destination
from hadelay.http.forwarding.heads import SHARD, forward_head
from hadelay.http.parts import all_parts
from hadelay.http.routes import OPEN, Routes
from hadelay.http.sharding import ShardRouter
from hadelay.model import Draft
from hadelay.rights import SCOPES
from hadelay.rules.access import RequestRights
from hadelay.server.service.node import NodeService
from hadelay.settings.node import HttpConfig

#: Headers that a relayed request does not take over: they belong to one connection, or the relaying node sets its own.
_HOP = {"connection", "content-length", "transfer-encoding", "expect", "keep-alive", "te", "via", "accept-encoding"}
_OWN_HEADERS = frozenset({"host", *_HOP})
#: Header with the name of the node that relays a request. Not Via: proxies of clients send Via, too.
_RELAYED_BY = "X-Relayed-By"
#: Header with the id of the request, which all answers to AWS SDKs have.
_REQUEST_ID = "x-amzn-RequestId"
#: Header with AWS's error code, in AWS APIs of the protocol REST JSON.
ERROR_TYPE = "x-amzn-ErrorType"


class Ask(NamedTuple):
    """A request of an AWS SDK. Its signature has been checked."""

    call: Call
    access: RequestRights
    body: bytes

    @property
    def headers(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.call.request.headers
        return found

    @property
    def service(self) -> NodeService:
        return self.call.context.service

    @property
    def router(self) -> ShardRouter:
        return self.call.context.router

    @property
    def limits(self) -> HttpConfig:
        return self.call.context.config

    @property
    def origin(self) -> str:
        """Scheme, host and port at which the client reached this node."""
        proxied = _first(self.headers.get("X-Forwarded-Proto")).lower()
        scheme = "https" if self.call.context.tls is not None or proxied == "https" else "http"
        return f"{scheme}://{self._host or self.limits.listen}"

    @property
    def _host(self) -> str:
        return _first(self.headers.get(FORWARDED_HOST)) or self.headers.get("Host", "")

    @property
    def retry_key(self) -> bytes | None:
        """Idempotency key of the request, from a header that an SDK repeats in all tries of one call; None without this
        header."""
        invocation = self.headers.get("amz-sdk-invocation-id", "")
        return f"aws {invocation}".encode() if 0 < len(invocation) <= 128 else None

    async def publish(self, drafts: list[Draft], key: bytes | None) -> Receipts:
        """Publish the messages. key: idempotency key of the request. Raises HadelayError."""
        sender = self.access.actor.token
        found: Receipts = await answered(lambda done: self.service.publish(drafts, key, done, sender))
        return found

    def may_any(self, topic: str) -> bool:
        """Whether the caller's token has any scope for the topic; without one, the caller must not see that the topic
        exists."""
        return any(self.access.may(scope, topic) for scope in SCOPES)

    def need_any(self, topic: str) -> None:
        if not self.may_any(topic):
            self.access.need("read", topic)

    @property
    def relayed_by(self) -> str:
        """Name of the node that relayed this request; "" if the request came from an AWS client. Unlike an AWS client,
        a node can follow a redirect to the leader."""
        return self.headers.get(_RELAYED_BY, "")

    async def relay(self, leader: Leader, wait_ms: int) -> Answer:
        """Send the unchanged request to the leader, with the client's signature, and return the leader's answer."""
        call = self.call
        headers = {name: text for name, text in self.headers.items() if name.lower() not in _OWN_HEADERS}
        headers.setdefault(FORWARDED_HOST, self.headers.get("Host", ""))
        headers[_RELAYED_BY] = self.service.node
        asked = call.context.relay.ask(
            leader, call.request.method, call.target, self.body, headers, wait_ms, names=tuple(headers)
        )
        answer = await call.context.polls.run(asked)
        if answer.status == HTTPStatus.NOT_FOUND:  # a node that serves AWS SDKs never answers a receive with 404
            raise _no_door(leader.name)
        return answer

    async def forward(self, to: Destination) -> Answer:
        """Send the unchanged request to another shard, with the client's signature, and return the shard's answer.
        Raises HadelayError."""
        call = self.call
        head = forward_head(
            call.request.method, call.target, call.request.raw_headers, self.service.node, host=self._host
        )
        answer = await call.context.forwarder.answer(to, head, self.body)
        headers = dict(answer.headers)
        if headers.pop(_REQUEST_ID.title(), None) is None:
            if answer.status == HTTPStatus.NOT_FOUND:
                raise _no_door(f"shard {to.shard}")
            raise refusal(f"shard {to.shard}", head.method, answer.status, headers, answer.body)
        return answer._replace(headers=headers)

    async def part(self, to: Destination) -> Any:
        """Send the request to another shard; returns the JSON document of its answer, or None if the answer has no
        body. Raises HadelayError, also if the shard refuses the request."""
        answer = await self.forward(to)
        document: Any = msgspec.json.decode(answer.body) if answer.body else None
        if answer.status < HTTPStatus.BAD_REQUEST:
            return document
        code = answer.headers.get(ERROR_TYPE.title()) or document["__type"].partition("#")[2]
        raise AwsError(code, document.get("message") or document["Message"], answer.status)

    async def parts(self, to: Iterable[Destination]) -> list[Any]:
        """Send the request to several shards; returns, for each shard, the JSON document of its answer, or its
        error."""
        return await all_parts([self.part(one) for one in to])


def _no_door(where: str) -> Overloaded:
    return Overloaded(f"{where} does not serve AWS SDKs: set `aws = true` in the section [http] of its nodes' files")


def whole(found: Iterable[Any]) -> list[Any]:
    """The JSON documents of all shards, as `parts` returns them. If there are errors, raises one; an error that leaves
    the outcome unknown goes first."""
    found = list(found)
    errors = [one for one in found if isinstance(one, HadelayError)]
    if errors:
        raise min(errors, key=lambda error: error.outcome_known)
    return found


def _first(values: str | None) -> str:
    """First value of a header. If several proxies have added values, the first one is of the proxy next to the
    client."""
    return (values or "").partition(",")[0].strip()


def new_id() -> str:
    """A random id of the request, for logs. It may be easy to guess, so it need not be a UUID from the system, which
    costs 20 µs more."""
    return f"{getrandbits(128):032x}"


Handler = Callable[[Ask], Awaitable[Answer]]


class Protocol(NamedTuple):
    """How an AWS service writes its errors. codes: the service's own error codes, by classes of hadelay's errors."""

    refusal: Callable[[Call, AwsError], Answer]
    codes: Codes


class Door:
    """Routes of the AWS services, added with `add`. signatures: checks the signatures of requests, and finds the rights
    of their tokens."""

    def __init__(self, signatures: Signatures) -> None:
        self._signatures, self.routes = signatures, Routes()

    def add(
        self, protocol: Protocol, name: str, method: str, path: str, handler: Handler, *, short: bool = False
    ) -> None:
        """Add a route. name: name of the route in metrics. short: see Route."""
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
        context, request = call.context, call.request
        try:
            body = await call.read(context.config.max_batch_bytes, "max_batch_bytes")
            access = self._signatures.signed(SignedRequest(request.method, call.target, request.headers, body))
            answer = await handler(Ask(call, access, body))
        except Misdirected as error:
            del error.extra["nodes"]  # the node that forwarded the request uses the addresses in its own shard map
            answer = answers.refusal(error)
        except HadelayError as error:
            context.denials.note(name, error)
            if SHARD in request.headers and context.router.here is not None:
                error.detail = f"shard {context.router.here}: {error.detail or error.title}"
            answer = protocol.refusal(call, translated(error, protocol.codes))
        except Exception as error:
            context.failed(name, error, request.method)
            answer = protocol.refusal(call, translated(unexpected(error, request.method), protocol.codes))
        return Answer(answer.status, {_REQUEST_ID: new_id(), **answer.headers}, answer.body)
