"""Drafts of SendMessage: a message that is nothing but its text, which is made the short way, and one with more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from multidict import CIMultiDict

from hadelay.api.publishrequest import BatchItem
from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError
from hadelay.aws.sqs.attributes import Queue
from hadelay.aws.sqs.sending import Message, _draft
from hadelay.model import OWN_DELAY
from hadelay.rules import publishing
from hadelay.rules.access import UNRESTRICTED
from hadelay.settings.node import HttpConfig
from hadelay.settings.topic import TopicSettings

MAX_DELAY_MS = 1 << 40
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def ask(**headers: str) -> Any:
    context = SimpleNamespace(config=HttpConfig(), max_delay_ms=MAX_DELAY_MS)
    request = SimpleNamespace(headers=CIMultiDict(headers))
    return Ask(SimpleNamespace(context=context, request=request), UNRESTRICTED, b"")  # type: ignore[arg-type]


@pytest.mark.parametrize("traceparent", ["", TRACE, "malformed"])
@pytest.mark.parametrize("group", [None, "a"])
@pytest.mark.parametrize("delay", [None, 0, 7])
def test_the_short_way_makes_the_same_draft(traceparent: str, group: str | None, delay: int | None) -> None:
    item = BatchItem("orders", content_type="text/plain", group=group)
    times = (OWN_DELAY if delay is None else 1000 * delay, True)
    trace = publishing.check_traceparent(traceparent.encode())
    expected = publishing.draft_of(HttpConfig(), MAX_DELAY_MS, item, times, trace, "ä\n".encode())
    message = Message(MessageBody="ä\n", DelaySeconds=delay, MessageGroupId=group)
    headers = {"traceparent": traceparent} if traceparent else {}
    assert _draft(ask(**headers), Queue("orders", TopicSettings()), message) == expected


@pytest.mark.parametrize("body", ["", "\x00", "a\x0b", "\ufffe", "\uffff", "a" * (1 + HttpConfig().max_body_bytes)])
def test_the_short_way_refuses_what_the_other_refuses(body: str) -> None:
    with pytest.raises(AwsError):
        _draft(ask(), Queue("orders", TopicSettings()), Message(MessageBody=body))


@pytest.mark.parametrize("body", ["\t\r\n", "\x7f", "\x85", "\ue000", "\ufffd", "\U0001f600", "\u202e", "\U000e0001"])
def test_the_short_way_takes_all_that_sqs_takes(body: str) -> None:
    labels = (("aws:MaximumMessageSize", "1024"),)
    queue = Queue("orders", TopicSettings(labels=labels))
    assert _draft(ask(), queue, Message(MessageBody=body)).body == body.encode()
    with pytest.raises(AwsError, match="1,024"):
        _draft(ask(), queue, Message(MessageBody=body + "a" * 1_024))
