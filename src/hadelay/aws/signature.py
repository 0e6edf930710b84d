"""Checks the signatures of requests from AWS SDKs (Signature Version 4), and finds the rights of their tokens.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html

The access key id is the token's id, and the secret access key is derived from the token (rights.py). The signature
covers method, path, query, the signed headers and the body. The body is always hashed here: what a client says about
its hash only has to agree.

The host of a request that a proxy or another node passed on is that of X-Forwarded-Host. The header is not trusted for
anything: a signature for another name of the cluster is as good.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from multidict import CIMultiDictProxy

from hadelay.api.service import Actor
from hadelay.aws.errors import AwsError
from hadelay.errors import NoLeader, Unauthorized
from hadelay.rights import Rights, Token, aws_secret
from hadelay.rules.access import UNRESTRICTED, RequestRights
from hadelay.server.service.node import TokenService

_ALGORITHM = "AWS4-HMAC-SHA256"
#: Largest difference between the time of the signature and cluster time, in ms, in either direction.
MAX_SKEW_MS = 300_000
#: Limits: characters of an Authorization header, and number of signed headers that it names.
_MAX_HEADER, _MAX_SIGNED = 2_048, 64
#: Limits of entries in a node's caches: signing keys, and rights of tokens.
_MAX_KEYS, _MAX_RIGHTS = 1_024, 1_024
_AUTHORIZATION = re.compile(
    rf"{_ALGORITHM} +Credential=(?P<id>[^/,\s]{{1,128}})/"
    r"(?P<scope>\d{8}/[A-Za-z0-9-]{1,64}/(?P<service>[a-z0-9-]{1,64})/aws4_request), *"
    r"SignedHeaders=(?P<headers>[!-+.-:<-~;-]+), *Signature=(?P<signature>[0-9a-f]{64})",
    re.ASCII,
)
_DATE = re.compile(r"\d{8}T\d{6}Z", re.ASCII)
#: Names of the AWS services that a node serves, as a signature names them.
_SERVICES = ("sqs", "scheduler")
#: Header in which a proxy or another node passes on the Host header of the client's own request.
FORWARDED_HOST = "X-Forwarded-Host"
#: Prefix of headers that must be signed: proxies and load balancers do not add headers with this prefix.
_SIGNED_PREFIX = "x-amz-"
#: Characters that percent-encoding leaves as they are (RFC 3986, unreserved): in a path; and in a name or value of a
#: query.
_PATH_SAFE, _QUERY_SAFE = "/-_.~", "-_.~"


class NotSigned(AwsError, Unauthorized):
    """The signature of a request is missing or wrong. reason: reason in logs and metrics (http/access.py)."""

    def __init__(self, code: str, detail: str, reason: str, status: int = HTTPStatus.FORBIDDEN) -> None:
        super().__init__(code, detail, status)
        self.reason = reason


def _malformed(what: str) -> NotSigned:
    return NotSigned("IncompleteSignatureException", what, "malformed", HTTPStatus.BAD_REQUEST)


class SignedRequest(NamedTuple):
    """A request as the client sent it. target: path and query, still percent-encoded."""

    method: str
    target: str
    headers: CIMultiDictProxy[str]
    body: bytes


class Claim(NamedTuple):
    """Parts of an Authorization header: what a client claims about its signature, before the check."""

    key_id: str
    #: Scope of the signing key: day, region and service, as 20261120/hadelay/sqs/aws4_request.
    scope: str
    #: The scope's service alone.
    service: str
    #: Names of the signed headers, in lower case and sorted.
    headers: tuple[str, ...]
    signature: str


def parse_claim(header: str) -> Claim:
    """Parse an Authorization header. Raises NotSigned."""
    found = _AUTHORIZATION.fullmatch(header.strip()) if len(header) <= _MAX_HEADER else None
    names = [] if found is None else found["headers"].split(";")
    if found is None or not all(names) or len(names) > _MAX_SIGNED or names != sorted({n.lower() for n in names}):
        what = (
            f"the Authorization header must be {_ALGORITHM} Credential=ID/DAY/REGION/SERVICE/aws4_request, "
            f"SignedHeaders=…, Signature=… (Signature Version 4), with at most {_MAX_SIGNED} sorted names of headers"
        )
        raise _malformed(what)
    return Claim(found["id"], found["scope"], found["service"], tuple(names), found["signature"])


def canonical_request(request: SignedRequest, signed: Iterable[str]) -> str:
    """The canonical form of a request, from which the signature is computed. signed: names of the signed headers."""
    path, _, query = request.target.partition("?")
    lines = [f"{name}:{','.join(map(_squeezed, _values(request, name)))}\n" for name in signed]
    payload = hashlib.sha256(request.body).hexdigest()
    return "\n".join(
        (request.method, _canonical_path(path), _canonical_query(query), "".join(lines), ";".join(signed), payload)
    )


def _values(request: SignedRequest, name: str) -> list[str]:
    first = request.headers.get(FORWARDED_HOST, "").partition(",")[0]
    return [first] if name == "host" and first else request.headers.getall(name, [])


def _canonical_path(path: str) -> str:
    """The canonical path: without empty, . and .. segments, and percent-encoded once more than the client sent it. All
    AWS services but S3 sign this form."""
    segments = list[str]()
    for segment in path.split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment not in ("", "."):
            segments.append(segment)
    end = "/" if segments and path.endswith("/") else ""
    return quote(f"/{'/'.join(segments)}{end}", safe=_PATH_SAFE, errors="surrogateescape")


def _canonical_query(query: str) -> str:
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    encoded = ((_encoded(name), _encoded(value)) for name, _, value in pairs)
    return "&".join(f"{name}={value}" for name, value in sorted(encoded))


def _encoded(text: str) -> str:
    return quote(unquote_to_bytes(text.encode("utf-8", "surrogateescape")), safe=_QUERY_SAFE)


def _squeezed(value: str) -> str:
    return " ".join(value.split())


def string_to_sign(date: str, scope: str, canonical: str) -> str:
    """The text that is signed. date: value of the header X-Amz-Date."""
    digest = hashlib.sha256(canonical.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{_ALGORITHM}\n{date}\n{scope}\n{digest}"


@lru_cache(_MAX_KEYS)
def signing_key(secret: str, scope: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def signature(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode(), "sha256").hex()


def check_form(request: SignedRequest) -> tuple[Claim, str]:
    """The claim in a request, and the value of its header X-Amz-Date. Raises NotSigned for an unsupported way of
    signing, and for a request whose Host, X-Amz-Date or other x-amz- header is not signed."""
    headers = request.headers
    if "x-amz-signature" in request.target.lower().partition("?")[2]:
        raise _malformed("presigned URLs are not supported: sign the request by its Authorization header")
    given = headers.getall("Authorization", ())
    if len(given) != 1:
        what = "two Authorization headers" if given else "the request is not signed"
        what += ": give the SDK the id and the aws_secret that `hadelay token create --aws` prints"
        raise NotSigned("MissingAuthenticationTokenException", what, "no_token")
    if "X-Amz-Security-Token" in headers:
        what = "session tokens are not used here: unset AWS_SESSION_TOKEN, and use the keys of a token of this cluster"
        raise NotSigned("UnrecognizedClientException", what, "malformed")
    claim = parse_claim(given[0])
    needed = {"host", "x-amz-date"} | {name.lower() for name in headers if name.lower().startswith(_SIGNED_PREFIX)}
    if missing := sorted(needed - set(claim.headers)):
        raise _malformed(f"these headers must be there, and in SignedHeaders: {', '.join(missing)[:200]}")
    dates = headers.getall("X-Amz-Date", ())
    if len(dates) != 1 or not _DATE.fullmatch(dates[0]) or not dates[0].startswith(claim.scope[:8]):
        raise _malformed("the header X-Amz-Date must be one time, as 20261120T180000Z, of the day in the Credential")
    _check_payload(headers.get("X-Amz-Content-Sha256"), request.body)
    return claim, dates[0]


def _check_payload(said: str | None, body: bytes) -> None:
    """Raises NotSigned if the client's header x-amz-content-sha256 (`said`) is there, and is not the hash of the
    body."""
    if said is not None and said != hashlib.sha256(body).hexdigest():
        odd = said.startswith(("UNSIGNED", "STREAMING"))
        what = f"{said[:60]}: the whole body must be signed" if odd else "x-amz-content-sha256 is not the body's hash"
        raise NotSigned("InvalidSignatureException", what, "signature")


def check_date(date: str, now_ms: int) -> None:
    """Raises NotSigned if the time of signing differs from cluster time by more than MAX_SKEW_MS."""
    try:
        at = datetime.strptime(date, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise _malformed(f"X-Amz-Date: {date} is no time") from None
    ahead_ms = int(at.timestamp()) * 1_000 - now_ms
    if abs(ahead_ms) > MAX_SKEW_MS:
        what = "Signature not yet current" if ahead_ms > 0 else "Signature expired"
        now = datetime.fromtimestamp(now_ms // 1_000, UTC).strftime("%Y%m%dT%H%M%SZ")
        what += f": {date}, but here it is {now}; at most 5 minutes apart: set the client's clock"
        raise NotSigned("InvalidSignatureException", what, "signature")


@lru_cache(_MAX_RIGHTS)
def _rights_of(token: Token) -> RequestRights:
    return RequestRights(Actor(token.id, token.name), Rights(token.scopes))


class Signatures:
    """Checks signatures, and finds the rights of requests. required: whether requests need a token; if not, no
    signature is checked."""

    def __init__(self, service: TokenService, *, required: bool) -> None:
        self._service, self._required = service, required

    def signed(self, request: SignedRequest) -> RequestRights:
        """Check the signature of a request; returns the rights of its token. Raises NotSigned; NoLeader while tokens
        are unknown."""
        if not self._required:
            return UNRESTRICTED
        claim, date = check_form(request)
        if claim.service not in _SERVICES:
            what = f"the Credential is for the service {claim.service!r}, not for {' or '.join(_SERVICES)}"
            raise NotSigned("InvalidSignatureException", what, "signature")
        token, secret = self._token(claim.key_id)
        check_date(date, self._service.now_ms())
        text = string_to_sign(date, claim.scope, canonical_request(request, claim.headers))
        if not hmac.compare_digest(signature(signing_key(secret, claim.scope), text), claim.signature):
            what = (
                f"the signature is wrong: use the aws_secret of the token {token.name!r} ({token.id}); a proxy must "
                "pass on the Host, the path and the body as the client sent them"
            )
            raise NotSigned("InvalidSignatureException", what, "signature")
        return _rights_of(token)

    def _token(self, key_id: str) -> tuple[Token, str]:
        """Find the valid token with an access key id, and its secret access key. Raises NotSigned; NoLeader while
        tokens are unknown."""
        if not self._service.knows_tokens:
            # Admit no token until the tokens are known: some may have been revoked while this node was down.
            raise NoLeader("this node has just started and does not know the tokens yet", retry_after_ms=500)
        token = self._service.tokens.get(key_id)
        if token is None:
            what = f"there is no token {key_id[:40]!r}: it was revoked, or it is of another cluster or shard"
            raise NotSigned("UnrecognizedClientException", what, "unknown")
        if not token.holds(self._service.now_ms()):
            what = f"the token {token.name!r} ({token.id}) has expired"
            raise NotSigned("ExpiredTokenException", what, "expired")
        if token.aws_key is None:
            what = f"the token {token.name!r} ({token.id}) has no aws_secret: make one by `hadelay token create --aws`"
            raise NotSigned("UnrecognizedClientException", what, "unknown")
        return token, aws_secret(token.aws_key)
