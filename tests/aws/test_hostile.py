"""Hostile requests for SQS and EventBridge Scheduler, as raw HTTP at a real node: each gets the code that AWS answers
with, and words; nothing is stored, and the node answers at once."""

from __future__ import annotations

import http.client
import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import pytest

from tests.system.cluster import Cluster

ACCOUNT = "000000000000"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/any"
#: Names of the queues that the requests name: a queue and one of FIFO kind; a queue with dead letters, and its target.
PLAIN, ORDERED, DYING, DEAD = "plain", "ordered.fifo", "dying", "dead"
#: Longest time that one request may take, in seconds: no refused request waits, or keeps the event loop busy.
LONGEST_S = 5.0
#: Codes of SQS.
WRONG, MISSING, TYPE = "InvalidParameterValueException", "MissingRequiredParameterException", "SerializationException"
ATTRIBUTE, ATTRIBUTE_NAME, GONE = "InvalidAttributeValue", "InvalidAttributeName", "QueueDoesNotExist"
HANDLE, CONTENTS, ADDRESS = "ReceiptHandleIsInvalid", "InvalidMessageContents", "InvalidAddress"
#: Codes of both services, or of Scheduler alone.
UNKNOWN, INVALID, TAKEN = "ResourceNotFoundException", "ValidationException", "ConflictException"


def url(queue: str = PLAIN, host: str = "http://127.0.0.1:1", account: str = ACCOUNT) -> str:
    return f"{host}/{account}/{queue}"


def arn(queue: str, service: str = "sqs", account: str = ACCOUNT) -> str:
    return f"arn:aws:{service}:hadelay:{account}:{queue}"


class Door:
    """A connection to one node. code: error type that the header of the last answer had."""

    def __init__(self, address: str) -> None:
        at = urlsplit(address)
        self.code = ""
        self._connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=20)

    def close(self) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, Any, float]:
        """(status, document, seconds)"""
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        began = time.monotonic()
        self._connection.request(method, path, sent, headers)
        answer = self._connection.getresponse()
        self.code = answer.headers.get("x-amzn-ErrorType", "")
        raw = answer.read()
        return answer.status, json.loads(raw), time.monotonic() - began

    def sqs(self, operation: str, document: Any) -> tuple[int, Any, float]:
        head = {"X-Amz-Target": f"AmazonSQS.{operation}", "Content-Type": "application/x-amz-json-1.0"}
        return self.ask("POST", "/aws/sqs", document, head)

    def scheduler(self, method: str, path: str, document: Any = None) -> tuple[int, Any, float]:
        return self.ask(method, f"/aws/scheduler{path}", document, {"Content-Type": "application/json"})

    def done(self, operation: str, **members: Any) -> Any:
        status, document, _ = self.sqs(operation, members)
        assert status == 200, document
        return document


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with Cluster(tmp_path_factory.mktemp("hostile"), nodes=1) as cluster:
        made = Door(cluster.urls["n1"])
        made.done("CreateQueue", QueueName=PLAIN)
        made.done("CreateQueue", QueueName=ORDERED, Attributes={"FifoQueue": "true"})
        made.done("CreateQueue", QueueName=DEAD)
        policy = json.dumps({"deadLetterTargetArn": arn(DEAD), "maxReceiveCount": 1})
        made.done("CreateQueue", QueueName=DYING, Attributes={"RedrivePolicy": policy})
        yield made
        made.close()


class Bad(NamedTuple):
    """A request of SQS that is refused with a code. of: id of the entry with the error, in a batch that is answered
    entry by entry."""

    operation: str
    document: Any
    code: str
    of: str | None = None


def send(code: str, queue: str = PLAIN, **members: Any) -> Bad:
    return Bad("SendMessage", {"QueueUrl": url(queue), "MessageBody": "x"} | members, code)


def ordered(code: str, **members: Any) -> Bad:
    return send(code, ORDERED, **{"MessageGroupId": "g", "MessageDeduplicationId": "d"} | members)


def batch(code: str, *entries: Any, of: str | None = None, queue: str = PLAIN) -> Bad:
    return Bad("SendMessageBatch", {"QueueUrl": url(queue), "Entries": list(entries)}, code, of)


def entry(name: Any = "a", **members: Any) -> dict[str, Any]:
    return {"Id": name, "MessageBody": "x"} | members


def receive(code: str, **members: Any) -> Bad:
    return Bad("ReceiveMessage", {"QueueUrl": url()} | members, code)


def attributes(code: str, **values: Any) -> Bad:
    return Bad("SetQueueAttributes", {"QueueUrl": url(), "Attributes": values}, code)


def policy(code: str, text: Any) -> Bad:
    return attributes(code, RedrivePolicy=text if isinstance(text, str) else json.dumps(text))


def create(code: str, name: Any = "fresh", **members: Any) -> Bad:
    return Bad("CreateQueue", {"QueueName": name} | members, code)


def visible(code: str, handle: Any = "x", seconds: Any = 30) -> Bad:
    document = {"QueueUrl": url(), "ReceiptHandle": handle, "VisibilityTimeout": seconds}
    return Bad("ChangeMessageVisibility", document, code)


def value(kind: Any = "String", text: Any = "v", **more: Any) -> dict[str, Any]:
    return {"DataType": kind, "StringValue": text} | more


def carrying(code: str, name: str = "a", **members: Any) -> Bad:
    return send(code, MessageAttributes={name: members})


def move(code: str, source: Any, **members: Any) -> Bad:
    return Bad("StartMessageMoveTask", {"SourceArn": source} | members, code)


SQS: list[Bad] = [
    # Numbers of a send: out of range, of another type
    send(WRONG, DelaySeconds=-1), send(WRONG, DelaySeconds=1 << 40), send(WRONG, DelaySeconds=1 << 70),
    send(TYPE, DelaySeconds=1.5), send(TYPE, DelaySeconds=True), send(TYPE, DelaySeconds="5"),
    send(TYPE, DelaySeconds=[]), ordered(WRONG, DelaySeconds=-1),
    # Bodies, and members of another type
    send(MISSING, MessageBody=""), send(TYPE, MessageBody=5), send(MISSING, MessageBody=None),
    send(TYPE, MessageBody=["x"]),
    Bad("SendMessage", {"QueueUrl": url()}, MISSING), Bad("SendMessage", {"MessageBody": "x"}, MISSING),
    send(CONTENTS, MessageBody="a\x01"), send(CONTENTS, MessageBody="\ufffe"), send(CONTENTS, MessageBody="\x0b"),
    send(WRONG, MessageBody="x" * (1024 * 1024 + 1)), send(TYPE, MessageBody="\ud800"),
    send(WRONG, MessageBody="ä" * (512 * 1024 + 1)),
    Bad("SendMessage", b"{", TYPE), Bad("SendMessage", b"\xff", TYPE), Bad("SendMessage", b"[" * 100_000, TYPE),
    Bad("SendMessage", [], TYPE), Bad("SendMessage", "x", TYPE), Bad("SendMessage", b"", MISSING),
    # Addresses
    *(Bad("SendMessage", {"QueueUrl": one, "MessageBody": "x"}, ADDRESS) for one in (
        "", "x", url(""), url("a b"), url("plain", account="1"), url() + "?x=1", "ftp://host/000000000000/plain",
        url("a" * 300), "http://host/plain", url() + "/more", arn(PLAIN),
    )),
    Bad("SendMessage", {"QueueUrl": 5, "MessageBody": "x"}, TYPE),
    send(GONE, "nobody"), Bad("ReceiveMessage", {"QueueUrl": url("nobody")}, GONE),
    Bad("DeleteQueue", {"QueueUrl": url("nobody")}, GONE), Bad("PurgeQueue", {"QueueUrl": url("nobody")}, GONE),
    Bad("GetQueueUrl", {"QueueName": "nobody"}, GONE), Bad("TagQueue", {"QueueUrl": url("nobody"), "Tags": {}}, GONE),
    Bad("GetQueueAttributes", {"QueueUrl": url("nobody")}, GONE),
    # Batches
    batch("EmptyBatchRequest"), batch("TooManyEntriesInBatchRequest", *(entry(f"e{n}") for n in range(11))),
    batch("BatchEntryIdsNotDistinct", entry(), entry()), batch("InvalidBatchEntryId", entry("a b")),
    batch("InvalidBatchEntryId", entry("")), batch("InvalidBatchEntryId", entry("x" * 81)),
    batch(TYPE, entry(5)), batch(TYPE, "x"), batch(MISSING, {"MessageBody": "x"}), batch(MISSING, {"Id": "a"}),
    Bad("SendMessageBatch", {"QueueUrl": url(), "Entries": {}}, TYPE),
    Bad("SendMessageBatch", {"QueueUrl": url()}, MISSING),
    Bad("SendMessageBatch", b" " * (16 * 1024 * 1024 + 1), WRONG),
    batch(WRONG, entry(DelaySeconds=-1), of="a"), batch(TYPE, entry(DelaySeconds=True)),
    batch(CONTENTS, entry(MessageBody="\x00"), of="a"), batch(GONE, entry(), queue="nobody"),
    Bad("DeleteMessageBatch", {"QueueUrl": url(), "Entries": []}, "EmptyBatchRequest"),
    Bad("DeleteMessageBatch", {"QueueUrl": url(), "Entries": [{"Id": "a", "ReceiptHandle": "x"}]}, HANDLE, "a"),
    Bad("ChangeMessageVisibilityBatch", {"QueueUrl": url(),
    "Entries": [{"Id": "a", "ReceiptHandle": "x", "VisibilityTimeout": 5}]}, HANDLE, "a"),
    # Receives
    *(receive(WRONG, MaxNumberOfMessages=n) for n in (0, 11, -1, 1 << 40)),
    *(receive(WRONG, WaitTimeSeconds=n) for n in (-1, 21)),
    *(receive(WRONG, VisibilityTimeout=n) for n in (-1, 43_201)),
    *(receive(TYPE, **{name: odd}) for name in ("MaxNumberOfMessages", "WaitTimeSeconds", "VisibilityTimeout")
      for odd in ("1", 1.5, False)),
    receive(ATTRIBUTE_NAME, AttributeNames=["Nothing"]), receive(ATTRIBUTE_NAME, MessageSystemAttributeNames=["x"]),
    receive(TYPE, AttributeNames="All"), receive(WRONG, ReceiveRequestAttemptId=""),
    receive(WRONG, ReceiveRequestAttemptId="x" * 129),
    # Receipt handles
    Bad("DeleteMessage", {"QueueUrl": url("nobody"), "ReceiptHandle": "x"}, GONE),
    *(Bad("DeleteMessage", {"QueueUrl": url(), "ReceiptHandle": one}, HANDLE) for one in (
        "", "x", "ä" * 10, "A" * 5_000, "../../etc", "\x00",
    )),
    Bad("DeleteMessage", {"QueueUrl": url()}, MISSING), Bad("DeleteMessage", {"QueueUrl": url(),
    "ReceiptHandle": 5}, TYPE),
    visible(HANDLE), visible(WRONG, seconds=43_201), visible(WRONG, seconds=-1), visible(TYPE, seconds="30"),
    Bad("ChangeMessageVisibility", {"QueueUrl": url(), "ReceiptHandle": "x"}, MISSING),
    # Message attributes
    carrying(MISSING, StringValue="v"), carrying(WRONG, **value("")), carrying(WRONG, **value("Text")),
    carrying(WRONG, **value("string")), carrying(WRONG, **value("String" + "." + "x" * 250)),
    carrying(TYPE, **value(5)),
    carrying(WRONG, **value(text="")), carrying(WRONG, DataType="String"), carrying(WRONG, **value("Number", "one")),
    carrying(WRONG, **value("Number", "")), carrying(WRONG, DataType="Binary", StringValue="x"),
    carrying(WRONG, DataType="Binary", BinaryValue=""), carrying(TYPE, DataType="Binary", BinaryValue="%"),
    carrying(WRONG, **value(BinaryValue="eA==")), carrying(TYPE, **value(text=5)),
    carrying(CONTENTS, **value(text="\x01")),
    *(carrying(WRONG, name, **value()) for name in (
        "", "a b", ".a", "a.", "a..b", "AWS.x", "amazon.x", "x" * 257, "ä", "hadelay.nothing",
    )),
    send(WRONG, MessageAttributes={f"a{n}": value() for n in range(11)}), send(TYPE, MessageAttributes=[value()]),
    send(TYPE, MessageAttributes={"a": "v"}), send(WRONG, MessageSystemAttributes={"x": value()}),
    send(WRONG, MessageSystemAttributes={"AWSTraceHeader": value(text="")}),
    send(WRONG, MessageSystemAttributes={"AWSTraceHeader": value("Number", "5")}),
    # FIFO queues
    ordered(MISSING, MessageGroupId=None), ordered(WRONG, MessageGroupId=""),
    ordered(WRONG, MessageGroupId="x" * 129),
    ordered(WRONG, MessageGroupId="ä"), ordered(WRONG, MessageDeduplicationId=None),
    ordered(WRONG, MessageDeduplicationId=""), ordered(WRONG, MessageDeduplicationId="x" * 129),
    ordered(WRONG, MessageDeduplicationId="a\tb"), send(WRONG, MessageDeduplicationId="d"),
    ordered(TYPE, MessageGroupId=5),
    ordered(WRONG, MessageAttributes={"hadelay.key": value()}),
    # Queues and their attributes
    *(create(WRONG, name) for name in ("", "a b", "a/b", "x" * 81, "a.b", "ä", "x.fifo", "a\n")), create(TYPE, 5),
    create(WRONG, "fresh", Attributes={"FifoQueue": "true"}),
    create(WRONG, "x.fifo", Attributes={"FifoQueue": "yes"}),
    create(ATTRIBUTE_NAME, Attributes={"Nothing": "1"}), create(TYPE, Attributes={"DelaySeconds": 5}),
    create(ATTRIBUTE_NAME, Attributes={"ContentBasedDeduplication": "true"}), create(TYPE, Attributes=[]),
    create(WRONG, tags={"aws:x": "y"}), create(WRONG, tags={"": "y"}), create(WRONG, tags={"x" * 129: "y"}),
    create(WRONG, tags={"x": "y" * 257}), create(WRONG, tags={f"t{n}": "" for n in range(51)}),
    create(TYPE, tags={"x": 5}),
    Bad("CreateQueue", {"QueueName": PLAIN, "Attributes": {"DelaySeconds": "7"}}, "QueueNameExists"),
    *(attributes(ATTRIBUTE, **{name: text}) for name, text in (
        ("DelaySeconds", "-1"), ("DelaySeconds", "1.5"), ("DelaySeconds", ""), ("DelaySeconds", "9" * 20),
        ("DelaySeconds", "٣"), ("DelaySeconds", "null"), ("VisibilityTimeout", "43201"), ("VisibilityTimeout", " 5"),
        ("MessageRetentionPeriod", "59"), ("MaximumMessageSize", "1023"), ("MaximumMessageSize", "9999999"),
        ("ReceiveMessageWaitTimeSeconds", "21"), ("SqsManagedSseEnabled", "true"), ("Policy", "{}"),
        ("KmsMasterKeyId", "k"),
    )),
    attributes(ATTRIBUTE_NAME, QueueArn="x"), attributes(ATTRIBUTE_NAME, FifoQueue="true"),
    attributes(ATTRIBUTE_NAME, **{"aws:x": "y"}), attributes(MISSING, DelaySeconds=None),
    Bad("SetQueueAttributes", {"QueueUrl": url()}, MISSING),
    Bad("GetQueueAttributes", {"QueueUrl": url(), "AttributeNames": ["Nothing"]}, ATTRIBUTE_NAME),
    # Redrive policies
    policy(WRONG, "{"), policy(WRONG, "[]"), policy(WRONG, "null"), policy(WRONG, "[" * 100_000), policy(WRONG, {}),
    policy(WRONG, {"maxReceiveCount": 1}), policy(WRONG, {"deadLetterTargetArn": arn(DEAD)}),
    policy(WRONG, {"deadLetterTargetArn": 5, "maxReceiveCount": 1}),
    *(policy(WRONG, {"deadLetterTargetArn": arn(DEAD),
    "maxReceiveCount": n}) for n in (0, 1_001, -1, 1.5, True, "x", [], None)),
    *(policy(WRONG, {"deadLetterTargetArn": one, "maxReceiveCount": 1}) for one in (
        "", DEAD, arn("nobody"), arn(DEAD, "sns"), arn(DEAD, account="1"), arn(ORDERED), arn(PLAIN), url(DEAD),
        arn("a b"),
    )),
    attributes(WRONG, RedriveAllowPolicy="{"),
    # Lists, tags and operations
    *(Bad("ListQueues", {"MaxResults": n}, WRONG) for n in (0, 1_001, -1)),
    Bad("ListQueues", {"MaxResults": "1"}, TYPE),
    *(Bad("ListQueues", {"MaxResults": 1, "NextToken": one}, WRONG) for one in ("%", "abc", "ä", "_w==")),
    Bad("ListQueues", {"QueueNamePrefix": 5}, TYPE),
    Bad("TagQueue", {"QueueUrl": url(), "Tags": {"aws:x": "y"}}, WRONG),
    Bad("TagQueue", {"QueueUrl": url()}, MISSING),
    Bad("UntagQueue", {"QueueUrl": url(), "TagKeys": ["aws:x"]}, WRONG),
    Bad("UntagQueue", {"QueueUrl": url(), "TagKeys": "x"}, TYPE),
    Bad("Nothing", {}, "UnknownOperationException"), Bad("", {}, "UnknownOperationException"),
    Bad("AddPermission", {"QueueUrl": url()}, "UnsupportedOperation"),
    # Tasks that move messages
    move(WRONG, "x"), move(WRONG, arn("x", "sns")), move(UNKNOWN, arn("nobody")), move(WRONG, arn(PLAIN)),
    move(TYPE, 5),
    move(UNKNOWN, arn(DEAD), DestinationArn=arn("nobody")), move(WRONG, arn(DEAD), DestinationArn=arn(DEAD)),
    move(WRONG, arn(DEAD), DestinationArn=arn(ORDERED)), move(WRONG, arn(DEAD), DestinationArn=""),
    *(move(WRONG, arn(DEAD), MaxNumberOfMessagesPerSecond=n) for n in (0, 501, -1)),
    move(TYPE, arn(DEAD), MaxNumberOfMessagesPerSecond=1.5), move(TYPE, arn(DEAD), MaxNumberOfMessagesPerSecond=True),
    *(Bad("ListMessageMoveTasks", {"SourceArn": arn(DEAD), "MaxResults": n}, WRONG) for n in (0, 11)),
    *(Bad("CancelMessageMoveTask", {"TaskHandle": one}, WRONG) for one in ("", "x", "-1", "9" * 30, "٣")),
    Bad("CancelMessageMoveTask", {"TaskHandle": "999"}, UNKNOWN), Bad("CancelMessageMoveTask", {}, MISSING),
]  # fmt: skip


def test_hostile_requests_of_sqs(door: Door) -> None:
    before = _stored(door)
    wrong = list[str]()
    for bad in SQS:
        status, document, seconds = door.sqs(bad.operation, bad.document)
        code, words = str(document.get("__type", "")).removeprefix("com.amazonaws.sqs#"), document.get("message", "")
        if bad.of is not None and status == 200:
            (failed,) = document["Failed"]
            assert not document["Successful"]
            code, words, status = failed["Code"], failed["Message"], 400 if failed["SenderFault"] else 500
            expected = code if code in (bad.code, bad.code.removesuffix("Exception")) else bad.code
        else:
            expected = bad.code
        fine = code == expected and len(words) > 10 and status == (404 if code == UNKNOWN else 400)
        if not fine or seconds > LONGEST_S:
            what = f"{bad.operation} {json.dumps(bad.document, default=repr)[:160]}"
            wrong.append(f"{what}: {status} {code} in {seconds:.2f} s, not {bad.code}: {words[:90]}")
    assert not wrong, "\n".join(["", *wrong])
    assert _stored(door) == before


def _stored(door: Door) -> Any:
    urls = door.done("ListQueues")["QueueUrls"]
    found = [door.done("GetQueueAttributes", QueueUrl=one, AttributeNames=["All"])["Attributes"] for one in urls]
    return [*zip(urls, found, strict=True), [door.done("ListQueueTags", QueueUrl=one) for one in urls]]


def test_receipt_handles_of_other_messages_and_queues(door: Door) -> None:
    """A handle that is cut short, altered, or of another queue changes nothing."""
    door.done("SendMessage", QueueUrl=url(), MessageBody="kept")
    (got,) = door.done("ReceiveMessage", QueueUrl=url(), WaitTimeSeconds=5)["Messages"]
    handle = got["ReceiptHandle"]
    hostile = [handle[:n] for n in range(0, len(handle), 5)] + [handle + "A", handle[::-1], f" {handle}"]
    for one in hostile:
        assert door.sqs("DeleteMessage", {"QueueUrl": url(), "ReceiptHandle": one})[:2][0] == 400, one
    for queue in (DEAD, ORDERED, "nobody"):
        for operation, more in (("DeleteMessage", {}), ("ChangeMessageVisibility", {"VisibilityTimeout": 0})):
            status, document, _ = door.sqs(operation, {"QueueUrl": url(queue), "ReceiptHandle": handle} | more)
            assert (status, document["__type"].partition("#")[2]) == (400, HANDLE if queue != "nobody" else GONE)
    door.done("DeleteMessage", QueueUrl=url(), ReceiptHandle=handle)
    status, document, _ = door.sqs(
        "ChangeMessageVisibility", {"QueueUrl": url(), "ReceiptHandle": handle, "VisibilityTimeout": 5}
    )
    assert (status, document["__type"].partition("#")[2]) == (400, "MessageNotInflight")


def test_one_bad_entry_of_a_batch_stops_no_other(door: Door) -> None:
    entries = [
        entry("good"),
        entry("late", DelaySeconds=-1),
        entry("odd", MessageBody="\x01"),
        entry("empty", MessageBody=""),
    ]
    answer = door.done("SendMessageBatch", QueueUrl=url(), Entries=entries)
    assert [one["Id"] for one in answer["Successful"]] == ["good"]
    codes = {one["Id"]: one["Code"] for one in answer["Failed"]}
    assert codes == {"late": "InvalidParameterValue", "odd": CONTENTS, "empty": "MissingParameter"}
    (got,) = door.done("ReceiveMessage", QueueUrl=url(), WaitTimeSeconds=5, MaxNumberOfMessages=10)["Messages"]
    door.done("DeleteMessage", QueueUrl=url(), ReceiptHandle=got["ReceiptHandle"])


class Refused(NamedTuple):
    """A request of Scheduler that is refused with a code."""

    code: str
    method: str
    path: str
    document: Any = None


def made(**changes: Any) -> dict[str, Any]:
    """The document of a schedule. Members that change to None are left out."""
    target = {"Arn": arn(PLAIN), "RoleArn": ROLE}
    whole = {"ScheduleExpression": "rate(1 hour)", "Target": target, "FlexibleTimeWindow": {"Mode": "OFF"}} | changes
    return {name: one for name, one in whole.items() if one is not None}


def schedule(code: str = INVALID, name: str = "fresh", **changes: Any) -> Refused:
    return Refused(code, "POST", f"/schedules/{name}", made(**changes))


def targeting(**changes: Any) -> Refused:
    target = {"Arn": arn(PLAIN), "RoleArn": ROLE} | changes
    return schedule(Target={name: one for name, one in target.items() if one is not None})


def group(code: str = INVALID, name: str = "fresh", **members: Any) -> Refused:
    return Refused(code, "POST", f"/schedule-groups/{name}", members)


def listed(query: str, code: str = INVALID, path: str = "/schedules") -> Refused:
    return Refused(code, "GET", f"{path}?{query}")


def forged(*position: Any) -> str:
    return urlsafe_b64encode(json.dumps(position).encode()).decode()


SCHEDULER: list[Refused] = [
    # Expressions. Those with blanks at the ends, too, are refused by AWS.
    *(schedule(ScheduleExpression=text) for text in (
        "", "every day", "x" * 257, "cron()", "cron(INVALID)", "cron(0 1 * * * *)", "cron(0 1 ? * ? *)",
        "cron(7 20 * * NOT *)", "cron(0 dummy ? * MON-FRI *)", "cron(71 8 1 * ? *)", "cron(0 24 1 * ? *)",
        "cron(0 9 32 * ? *)", "cron(0 9 1 13 ? *)", "cron(0 9 ? * 8 *)", "cron(0 9 ? * MON#6 *)",
        "cron(0 9 ? * MON-FRI)", "cron(* * * * ? * *)", "cron(0 9 1 * ? 1969)", "cron(0 9 1 * ? 2200)",
        "cron(0 9 1 * ? 2199/0)", "cron(0 9 1 * ? *)x", "cron(0/0 9 1 * ? *)", "cron(-1 9 1 * ? *)",
        "cron(0 9 1-0 * ? *)", "cron(\u0663 9 1 * ? *)", "cron(0 0 30 2 ? *)", "cron(0 9 1 * ? *", "rate()",
        "rate(0 minutes)",
        "rate(-10 minutes)", "rate(10)", "rate(10 seconds)", "rate(10 years)", "rate(10 minutess)", "rate(foo minutes)",
        "rate(1.5 hours)", "rate( 10 minutes )", " rate(10 minutes)", "rate(10 minutes) ", "rate(\u0663 minutes)",
        "rate(999999999 days)", "rate(1e3 days)", "at()", "at(tomorrow)", "at(2021-12-31T23:59:59Z)", "at(2030-12-31)",
        "at(2030-01-01T00:00:00+01:00)", "at(2030-01-01 00:00:00)", "at(2030-13-01T00:00:00)",
        "at(2030-02-30T00:00:00)", "at(2030-01-01T24:00:01)", "at(0001-01-01T00:00:00)", "at(99999-01-01T00:00:00)",
        "at(2030-01-01T00:00:00) ", "at( 2030-01-01T00:00:00)",
    )),
    schedule(ScheduleExpression=5), schedule(ScheduleExpression=None),
    *(schedule(ScheduleExpressionTimezone=zone) for zone in (
        "Mars/Base", "", "x" * 51, "../../etc/passwd", "UTC+1", "europe/vienna/", "\x00", 5,
    )),
    # Dates, windows and words
    schedule(StartDate=2e9, EndDate=1.9e9), schedule(StartDate=-1), schedule(StartDate=1e15),
    schedule(StartDate="today"), schedule(EndDate=True), schedule(EndDate=[]), schedule(StartDate={}),
    *(schedule(FlexibleTimeWindow=window) for window in (
        None, {}, "OFF", [], {"Mode": "SOMETIMES"}, {"Mode": "off"}, {"Mode": "FLEXIBLE"},
        {"Mode": "OFF", "MaximumWindowInMinutes": 5}, {"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 0},
        {"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 1_441}, {"Mode": "FLEXIBLE", "MaximumWindowInMinutes": "5"},
        {"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 1.5}, {"Mode": "OFF", "Nothing": 1},
    )),
    schedule(State="PAUSED"), schedule(ActionAfterCompletion="KEEP"), schedule(Description="x" * 513),
    schedule(KmsKeyArn=""), schedule(Nothing=1), schedule(ClientToken=""), schedule(ClientToken="x" * 65),
    schedule(ClientToken="a b"), schedule(Description="x" * 512, Target={
        "Arn": arn(PLAIN), "RoleArn": ROLE, "DeadLetterConfig": {"Arn": arn("x" * 1_000) * 4},
    }),
    # Names and groups
    *(schedule(name=name) for name in ("x" * 65, "a%20b", "%C3%A4", "a%2Fb", "a~b", "a%0A")), schedule(Name="other"),
    schedule(Name=""), schedule(Name=5), schedule(UNKNOWN, GroupName="nobody"), schedule(GroupName="x" * 65),
    schedule(GroupName="a~b"), schedule(GroupName=""), group(name="x" * 65), group(name="a%20b"), group(Nothing=1),
    group(Tags=[{"Key": "a"}]), group(Tags=[{"Key": "", "Value": "v"}]), group(Tags=[{"Key": "a", "Value": ""}]),
    group(Tags=[{"Key": "x" * 129, "Value": "v"}]), group(Tags=[{"Key": "a", "Value": "x" * 257}]),
    group(Tags=[{"Key": "a", "Value": "v"}] * 2), group(Tags=[{"Key": "aws:a", "Value": "v"}]), group(Tags={"a": "v"}),
    group(Tags=[{"Key": f"t{n}", "Value": "v"} for n in range(51)]), group(ClientToken="a b"), group(TAKEN, "default"),
    # Targets
    schedule(Target=None), schedule(Target="x"), schedule(Target={}),
    *(targeting(Arn=one) for one in (
        None, "", "x", arn("f", "lambda"), arn("nobody"), arn(PLAIN, account="1"), "x" * 1_601, url(), "http://", 5,
        arn(ORDERED), arn("a b"),
    )),
    *(targeting(RoleArn=one) for one in (None, "", "x", arn(PLAIN), ROLE + " ", "x" * 1_601)),
    targeting(Input=""), targeting(Input="x" * (64 * 1024 + 1)), targeting(Input="<aws.scheduler.scheduled-time>"),
    targeting(Input={"a": 1}), targeting(EcsParameters={}), targeting(Nothing=1), targeting(SqsParameters=[]),
    targeting(SqsParameters={"MessageGroupId": ""}), targeting(SqsParameters={"MessageGroupId": "x" * 129}),
    *(targeting(RetryPolicy={name: n}) for name, n in (
        ("MaximumEventAgeInSeconds", 59), ("MaximumEventAgeInSeconds", 86_401), ("MaximumRetryAttempts", -1),
        ("MaximumRetryAttempts", 186), ("MaximumRetryAttempts", 1.5), ("MaximumRetryAttempts", True),
    )),
    targeting(DeadLetterConfig={"Arn": "x"}), targeting(DeadLetterConfig={"Arn": ""}),
    # Bodies
    *(Refused(INVALID, "POST", "/schedules/fresh", body) for body in (
        b"", b"{", b"\xff", b"[]", b'"x"', b"NaN", b"[" * 100_000,
    )),
    # What does not exist
    Refused(UNKNOWN, "GET", "/schedules/nobody"), Refused(UNKNOWN, "DELETE", "/schedules/nobody"),
    Refused(UNKNOWN, "PUT", "/schedules/nobody", made()), Refused(UNKNOWN, "GET", "/schedule-groups/nobody"),
    Refused(UNKNOWN, "DELETE", "/schedule-groups/nobody"), Refused(INVALID, "DELETE", "/schedule-groups/default"),
    Refused(INVALID, "GET", f"/schedules/{'x' * 65}"), Refused(INVALID, "DELETE", "/schedules/a%20b"),
    Refused(UNKNOWN, "GET", f"/tags/{quote(arn('schedule-group/nobody', 'scheduler'), safe='')}"),
    Refused(INVALID, "GET", f"/tags/{quote(arn('schedule/default/x', 'scheduler'), safe='')}"),
    Refused(INVALID, "GET", "/tags/x"), Refused(INVALID, "POST", "/tags/x", {"Tags": []}),
    # Lists
    *(listed(f"MaxResults={n}", path=path) for n in ("0", "101", "-1", "x", "1.5", "", "9" * 30)
      for path in ("/schedules", "/schedule-groups")),
    listed("MaxResults=1&MaxResults=2"), listed("Nothing=1"), listed("State=PAUSED"), listed("NamePrefix="),
    listed("NamePrefix=a%20b"), listed("ScheduleGroup=nobody", UNKNOWN), listed(f"ScheduleGroup={'x' * 65}"),
    *(listed(f"NextToken={one}") for one in (
        "", "x", "%25", "%C3%A4", "x" * 2_049, forged(5), forged("", PLAIN, -2, 0), forged("", PLAIN, 0, -1),
        forged("", PLAIN, 1 << 70, 0), forged("", PLAIN, 0, 1 << 64), forged("", 5), forged("", "", "", ""),
        forged(*[0] * 1_000),
    )),
    listed(f"NextToken={'x' * 65}", path="/schedule-groups"), listed("NextToken=a%20b", path="/schedule-groups"),
]  # fmt: skip


def test_hostile_requests_of_scheduler(door: Door) -> None:
    wrong = list[str]()
    for bad in SCHEDULER:
        status, document, seconds = door.scheduler(bad.method, bad.path, bad.document)
        expected = {INVALID: 400, UNKNOWN: 404, TAKEN: 409}[bad.code]
        words = document.get("Message", "") if isinstance(document, dict) else ""
        if (status, door.code) != (expected, bad.code) or len(words) < 10 or seconds > LONGEST_S:
            what = f"{bad.method} {bad.path[:90]} {json.dumps(bad.document, default=repr)[:200]}"
            wrong.append(f"{what}: {status} {door.code} in {seconds:.2f} s, not {bad.code}: {words[:90]}")
    assert not wrong, "\n".join(["", *wrong])
    assert door.scheduler("GET", "/schedules")[1] == {"Schedules": []}
    groups = door.scheduler("GET", "/schedule-groups")[1]["ScheduleGroups"]
    assert [one["Name"] for one in groups] == ["default"]


def test_a_client_token_means_one_request(door: Door) -> None:
    """The token with the same content finds what the first request made; with other content, it is a conflict."""
    once, often = made(ScheduleExpression="at(2030-01-01T00:00:00)", ClientToken="t-1"), made(ClientToken="t-2")
    for name, document in (("once", once), ("often", often)):
        arns = {door.scheduler("POST", f"/schedules/{name}", document)[1]["ScheduleArn"] for _ in range(2)}
        assert len(arns) == 1
        for change in (
            {"ScheduleExpression": "rate(2 hours)"}, {"Description": "other"}, {"State": "DISABLED"},
            {"Target": document["Target"] | {"Input": "other"}}, {"ClientToken": "t-3"},
        ):  # fmt: skip
            status, _, _ = door.scheduler("POST", f"/schedules/{name}", document | change)
            assert (status, door.code) == (409, TAKEN), change
        assert door.scheduler("DELETE", f"/schedules/{name}")[0] == 200
    tags = {"Tags": [{"Key": "a", "Value": "b"}], "ClientToken": "t"}
    assert [door.scheduler("POST", "/schedule-groups/g", tags)[0] for _ in range(2)] == [200, 200]
    assert door.scheduler("POST", "/schedule-groups/g", tags | {"Tags": []})[0] == 409
    assert door.scheduler("DELETE", "/schedule-groups/g")[0] == 200
