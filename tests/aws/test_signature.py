"""Signature Version 4. The signatures are botocore's, besides one that Amazon publishes. Each refusal has AWS's code.
No process, no cluster."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from multidict import CIMultiDict, CIMultiDictProxy

from hadelay.aws import signature
from hadelay.aws.signature import NotSigned, Signatures, SignedRequest
from hadelay.errors import NoLeader
from hadelay.rights import Token, aws_key, aws_secret, hash_token
from hadelay.rules.access import UNRESTRICTED

NOW = datetime(2026, 11, 29, 17, 0, 0, tzinfo=UTC)
NOW_MS = int(NOW.timestamp()) * 1_000
SECRET = "hadelay_" + "x" * 43


def token(name: str, *, aws: bool = True, expires_at_ms: int | None = None) -> Token:
    secret = SECRET[: -len(name)] + name
    return Token(name, hash_token(secret), ("publish:orders-*",), 0, expires_at_ms, aws_key(secret) if aws else None)


SHOP, OLD, PLAIN = token("shop"), token("old", expires_at_ms=NOW_MS), token("plain", aws=False)


def service(*tokens: Token, knows: bool = True) -> Any:
    return SimpleNamespace(tokens={one.id: one for one in tokens}, now_ms=lambda: NOW_MS, knows_tokens=knows)


CHECK = Signatures(service(SHOP, OLD, PLAIN), required=True)


def signed(
    method: str = "POST",
    url: str = "http://127.0.0.1:8400/aws/sqs/",
    body: bytes = b"{}",
    *,
    by: Token = SHOP,
    at: datetime = NOW,
    name: str = "sqs",
    secret: str | None = None,
    session: str | None = None,
    **headers: str,
) -> SignedRequest:
    """A request that botocore has signed. headers: with _ in place of -."""
    own = {key.replace("_", "-"): value for key, value in headers.items()}
    request = AWSRequest(method, url, {"Host": url.split("/")[2], **own}, body)
    keys = Credentials(by.id, secret or aws_secret(by.aws_key or bytes(32)), session)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.auth.get_current_datetime", lambda: at)
        SigV4Auth(keys, name, "hadelay").add_auth(request)
    target = "/" + request.prepare().url.split("/", 3)[3]
    return SignedRequest(method, target, CIMultiDictProxy(CIMultiDict(request.headers.items())), body)


def refusal(request: SignedRequest, check: Signatures = CHECK) -> NotSigned:
    with pytest.raises(NotSigned) as found:
        check.signed(request)
    return found.value


def with_header(request: SignedRequest, name: str, value: str | None) -> SignedRequest:
    headers = CIMultiDict(request.headers)
    headers.popall(name, None)
    if value is not None:
        headers[name] = value
    return request._replace(headers=CIMultiDictProxy(headers))


def test_published_example() -> None:
    """The example of Amazon's documentation: a GET of iam, with the secret that all its examples use."""
    headers = CIMultiDict(
        {
            "Content-Type": "application/x-www-form-urlencoded; charset=utf-8",
            "Host": "iam.amazonaws.com",
            "X-Amz-Date": "20150830T123600Z",
        }
    )
    request = SignedRequest("GET", "/?Action=ListUsers&Version=2010-05-08", CIMultiDictProxy(headers), b"")
    canonical = signature.canonical_request(request, ["content-type", "host", "x-amz-date"])
    scope = "20150830/us-east-1/iam/aws4_request"
    text = signature.string_to_sign("20150830T123600Z", scope, canonical)
    assert text.endswith("f536975d06c0309214f805bb90ccff089219ecd68b2577efef23edd43b7e1a59")
    key = signature.signing_key("wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", scope)
    assert key.hex() == "c4afb1cc5771d871763a393e44b703571b55cc28424d1a5e86da6ed3c154a4b9"
    assert signature.signature(key, text) == "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"


@pytest.mark.parametrize(
    ("method", "url", "body"),
    [
        ("POST", "http://127.0.0.1:8400/", b'{"QueueUrl": "\xc3\xa4"}'),
        ("GET", "http://n1.example:8400/aws/scheduler/schedules?ScheduleGroup=default&MaxResults=5", b""),
        ("GET", "http://n1.example/aws/scheduler/schedules?NamePrefix=a%20b&A=1&a=&a=0", b""),
        ("GET", "http://[::1]:8400/tags/arn%3Aaws%3Ascheduler%3Ahadelay%3A000000000000%3Aschedule-group%2Fg", b""),
        ("DELETE", "http://n1/tags/arn%3Aaws?TagKeys=b&TagKeys=a%2Fb&TagKeys=%C3%A4~", b""),
        ("PUT", "https://n1.example/a//b/./c/../d/", b"\x00\xff" * 1_000),
    ],
)
def test_requests_that_botocore_signed(method: str, url: str, body: bytes) -> None:
    request = signed(method, url, body, X_Amz_Target="AmazonSQS.SendMessage", Content_Type="a;  b   c")
    rights = CHECK.signed(request)
    assert (rights.actor.token_id, rights.actor.token) == (SHOP.id, "shop")
    assert rights.may("publish", "orders-eu")
    assert not rights.may("read", "orders-eu")
    assert CHECK.signed(request) is rights, "rights are cached"


def test_hash_that_the_client_says_itself() -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert CHECK.signed(signed(body=b"", X_Amz_Content_SHA256=empty))
    wrong = refusal(with_header(signed(body=b"", X_Amz_Content_SHA256=empty), "X-Amz-Content-Sha256", "0" * 64))
    assert (wrong.code, wrong.reason) == ("InvalidSignatureException", "signature")
    for word in ("UNSIGNED-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"):
        assert "the whole body must be signed" in refusal(signed(X_Amz_Content_SHA256=word)).detail


def test_host_of_a_request_that_was_passed_on() -> None:
    passed = with_header(signed(), "Host", "n2:8400")
    assert refusal(passed).reason == "signature"
    assert CHECK.signed(with_header(passed, "X-Forwarded-Host", "127.0.0.1:8400, proxy"))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r._replace(method="PUT"),
        lambda r: r._replace(target="/aws/sqs/x"),
        lambda r: r._replace(target="/aws/sqs/?a=b"),
        lambda r: r._replace(body=b"{ }"),
        lambda r: with_header(r, "Host", "127.0.0.1:8401"),
        lambda r: with_header(r, "X-Amz-Target", "AmazonSQS.DeleteQueue"),
        lambda r: with_header(r, "X-Amz-Date", "20261129T170001Z"),
        lambda r: with_header(r, "Authorization", r.headers["Authorization"].replace("/hadelay/", "/eu-west-1/")),
        lambda r: with_header(r, "Authorization", r.headers["Authorization"][:-64] + "0" * 64),
    ],
)
def test_part_that_was_changed_on_the_way(change: Callable[[SignedRequest], SignedRequest]) -> None:
    request = signed(X_Amz_Target="AmazonSQS.SendMessage")
    assert CHECK.signed(request)
    found = refusal(change(request))
    assert (found.code, found.reason, found.http_status) == ("InvalidSignatureException", "signature", 403)
    assert aws_secret(SHOP.aws_key or b"") not in found.detail


def test_secret_of_another_token() -> None:
    assert refusal(signed(secret=aws_secret(bytes(32)))).code == "InvalidSignatureException"
    assert refusal(signed(secret=SECRET)).code == "InvalidSignatureException", "the token itself is no secret key"


def test_clock_of_the_client() -> None:
    for minutes in (-5, 5):
        assert CHECK.signed(signed(at=NOW + timedelta(minutes=minutes)))
        late = refusal(signed(at=NOW + timedelta(minutes=minutes, seconds=minutes / 5)))
        # SDKs correct their clocks by this code and the answer's Date.
        assert late.code == "InvalidSignatureException"
        assert ("expired" if minutes < 0 else "not yet current") in late.detail


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (signed(by=token("stranger")), "UnrecognizedClientException", "there is no token"),
        (signed(by=OLD), "ExpiredTokenException", "'old'"),
        (signed(by=PLAIN), "UnrecognizedClientException", "has no aws_secret"),
        (signed(session="a-session"), "UnrecognizedClientException", "AWS_SESSION_TOKEN"),
        (signed(name="s3"), "InvalidSignatureException", "the service 's3'"),
        (with_header(signed(), "Authorization", None), "MissingAuthenticationTokenException", "is not signed"),
        (with_header(signed(), "Authorization", "Bearer x"), "IncompleteSignatureException", "Signature Version 4"),
        (with_header(signed(), "Authorization", "x" * 3_000), "IncompleteSignatureException", "Signature Version 4"),
        (with_header(signed(), "X-Amz-Date", None), "IncompleteSignatureException", "must be one time"),
        (with_header(signed(), "X-Amz-Date", "20261129T250000Z"), "IncompleteSignatureException", "is no time"),
        (with_header(signed(), "X-Amz-Date", "20261130T170000Z"), "IncompleteSignatureException", "of the day"),
        (with_header(signed(), "X-Amz-Target", "AmazonSQS.PurgeQueue"), "IncompleteSignatureException", "x-amz-target"),
        (signed()._replace(target="/?X-Amz-Signature=00"), "IncompleteSignatureException", "presigned"),
    ],
)  # fmt: skip
def test_request_that_is_not_signed(request_: SignedRequest, code: str, words: str) -> None:
    found = refusal(request_)
    assert found.code == code
    assert words in found.detail


@pytest.mark.parametrize("names", ["host", "x-amz-date;host", "host;host;x-amz-date", "", ";host", "Host;x-amz-date"])
def test_names_of_signed_headers(names: str) -> None:
    request = signed()
    claim = request.headers["Authorization"].replace("host;x-amz-date", names)
    assert refusal(with_header(request, "Authorization", claim)).code == "IncompleteSignatureException"


def test_headers_twice() -> None:
    request = signed()
    for name in ("Authorization", "X-Amz-Date"):
        headers = CIMultiDict(request.headers)
        headers.add(name, headers[name])
        assert refusal(request._replace(headers=CIMultiDictProxy(headers))).http_status in (400, 403)


def test_garbage_is_refused_and_never_fails() -> None:
    request = signed(X_Amz_Target="AmazonSQS.SendMessage")
    claim = request.headers["Authorization"]
    for at in range(0, len(claim), 3):
        for letter in ("", "\x00", "ä", "\udcff", ",", ";", "=", "%"):
            garbled = claim[:at] + letter + claim[at + 1 :]
            if garbled.replace(" ", "") != claim.replace(" ", ""):
                refusal(with_header(request, "Authorization", garbled))
    for target in ("/\udcff", "/%ff?%zz=%", "/?&&=&==", "//", "/../..", "?"):
        refusal(request._replace(target=target))


def test_tokens_that_are_unknown_or_revoked() -> None:
    with pytest.raises(NoLeader):
        Signatures(service(SHOP, knows=False), required=True).signed(signed())
    source = service(SHOP)
    check = Signatures(source, required=True)
    assert check.signed(signed())
    source.tokens = {}
    assert refusal(signed(), check).code == "UnrecognizedClientException"


def test_any_keys_are_taken_by_a_cluster_without_tokens() -> None:
    open_ = Signatures(service(), required=False)
    assert open_.signed(with_header(signed(), "Authorization", None)) is UNRESTRICTED
    assert open_.signed(signed(by=token("stranger"))) is UNRESTRICTED


def test_secret_access_key_opens_nothing_else() -> None:
    key = aws_key(SECRET)
    assert aws_secret(key).startswith("hadelay_aws_")
    assert len(aws_secret(key)) == 55
    assert hash_token(aws_secret(key)) != hash_token(SECRET)
    assert key not in (hash_token(SECRET), aws_key(SECRET + "x"))


def test_caches_are_bounded_and_keep_no_rights_of_changed_tokens() -> None:
    for region in range(signature._MAX_KEYS + 10):
        signature.signing_key("secret", f"20261129/r{region}/sqs/aws4_request")
    assert signature.signing_key.cache_info().currsize == signature._MAX_KEYS
    source = service(SHOP)
    check = Signatures(source, required=True)
    assert not check.signed(signed()).may("read", "orders-eu")
    source.tokens = {SHOP.id: SHOP._replace(scopes=("read:orders-*",))}
    assert check.signed(signed()).may("read", "orders-eu")
