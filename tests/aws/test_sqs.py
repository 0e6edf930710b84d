"""SQS by boto3 on three nodes, through a follower: every operation does what its users rely on."""

from __future__ import annotations

import hashlib
import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.aws.conftest import client
from tests.system.cluster import Cluster, until

Make = Callable[..., str]


def receive(sqs: Any, url: str, wait_s: int = 5, **options: Any) -> list[dict[str, Any]]:
    options = {"MaxNumberOfMessages": 10, "AttributeNames": ["All"], "MessageAttributeNames": ["All"]} | options
    return list(sqs.receive_message(QueueUrl=url, WaitTimeSeconds=wait_s, **options).get("Messages", []))


def code(call: Callable[..., Any], **options: Any) -> str:
    """Code of the error that a call raises."""
    with pytest.raises(ClientError) as raised:
        call(**options)
    assert raised.value.response["Error"]["Message"]
    return str(raised.value.response["Error"]["Code"])


def policy(arn: str, count: int = 1) -> dict[str, str]:
    return {"RedrivePolicy": json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": count})}


def test_message_from_send_to_delete(sqs: Any, queue: Make) -> None:
    url = queue()
    sent = sqs.send_message(QueueUrl=url, MessageBody="häll\u00f6 \U0001f600")
    assert sent["MD5OfMessageBody"] == hashlib.md5("häll\u00f6 \U0001f600".encode()).hexdigest()
    (got,) = receive(sqs, url)
    assert (got["MessageId"], got["Body"]) == (sent["MessageId"], "häll\u00f6 \U0001f600")
    assert got["Attributes"]["ApproximateReceiveCount"] == "1"
    assert abs(int(got["Attributes"]["SentTimestamp"]) / 1000 - time.time()) < 60
    assert abs(int(got["Attributes"]["ApproximateFirstReceiveTimestamp"]) / 1000 - time.time()) < 60
    sqs.delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
    sqs.delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
    counts = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert [counts[f"ApproximateNumberOfMessages{kind}"] for kind in ("", "NotVisible", "Delayed")] == ["0", "0", "0"]


def test_attributes_of_messages_up_to_the_limit_of_a_message(sqs: Any, queue: Make) -> None:
    """boto3 checks the MD5 of what it sent."""
    url = queue()
    given = {
        "text": {"DataType": "String", "StringValue": "x" * 200_000},
        "count": {"DataType": "Number.int", "StringValue": "-12.5"},
        "raw": {"DataType": "Binary", "BinaryValue": bytes(range(256))},
        "trace.id": {"DataType": "String", "StringValue": "7"},
    }
    trace = {"AWSTraceHeader": {"DataType": "String", "StringValue": "Root=1-5759e988-bd862e3fe1be46a994272793"}}
    sent = sqs.send_message(QueueUrl=url, MessageBody="b", MessageAttributes=given, MessageSystemAttributes=trace)
    (got,) = receive(sqs, url, VisibilityTimeout=0)
    assert got["MessageAttributes"] == given
    assert got["MD5OfMessageAttributes"] == sent["MD5OfMessageAttributes"]
    assert got["Attributes"]["AWSTraceHeader"] == trace["AWSTraceHeader"]["StringValue"]
    (got,) = receive(sqs, url, MessageAttributeNames=["trace.*", "count"], VisibilityTimeout=0)
    assert sorted(got["MessageAttributes"]) == ["count", "trace.id"]
    (got,) = receive(sqs, url, MessageAttributeNames=[], AttributeNames=["SentTimestamp"])
    assert "MessageAttributes" not in got
    assert list(got["Attributes"]) == ["SentTimestamp"]


def test_options_of_a_publish_in_attributes(cluster: Cluster, sqs: Any, queue: Make) -> None:
    url = queue()
    options = {"deliver_at": "2027-05-01T12:00:00Z", "key": "o-1", "tags": "a,b", "ttl": "2h"}
    attributes = {f"hadelay.{name}": {"DataType": "String", "StringValue": text} for name, text in options.items()}
    sent = sqs.send_message(QueueUrl=url, MessageBody="later", MessageAttributes=attributes)
    found = cluster.describe("n1", sent["MessageId"])
    assert (found["key"], found["tags"], found["deliver_at"]) == ("o-1", ["a", "b"], "2027-05-01T12:00:00.000Z")
    assert found["content_type"] == "text/plain"
    wrong = {"hadelay.dely": {"DataType": "String", "StringValue": "1h"}}
    assert code(sqs.send_message, QueueUrl=url, MessageBody="x", MessageAttributes=wrong) == "InvalidParameterValue"


def test_delay_of_years_and_the_delay_of_the_queue(cluster: Cluster, sqs: Any, queue: Make) -> None:
    url = queue(DelaySeconds="31536000")
    day = 86_400
    message = cluster.describe("n1", sqs.send_message(QueueUrl=url, MessageBody="next year")["MessageId"])
    own = cluster.describe("n1", sqs.send_message(QueueUrl=url, MessageBody="now", DelaySeconds=0)["MessageId"])
    ahead = cluster.describe("n1", sqs.send_message(QueueUrl=url, MessageBody="x", DelaySeconds=500 * day)["MessageId"])
    assert message["state"] == ahead["state"] == "scheduled"
    assert own["state"] == "ready"
    native = cluster.describe("n1", cluster.publish("n2", url.rpartition("/")[2]))
    assert native["state"] == "scheduled", "a publish without SQS has the delay of the topic, too"
    assert code(sqs.send_message, QueueUrl=url, MessageBody="x", DelaySeconds=10_000 * day) == "InvalidParameterValue"


def test_message_published_without_sqs(cluster: Cluster, sqs: Any, queue: Make) -> None:
    url = queue()
    topic = url.rpartition("/")[2]
    cluster.publish("n1", topic, b"plain", Hadelay_Meta_Trace="t-1")
    cluster.publish("n1", topic, b"\x00\xff")
    got = {m["Body"]: m.get("MessageAttributes", {}) for m in [*receive(sqs, url), *receive(sqs, url, 1)]}
    text = {"DataType": "String"}
    assert got["plain"] == {"trace": text | {"StringValue": "t-1"}}
    assert got["AP8="] == {"hadelay.encoding": text | {"StringValue": "base64"}}


def test_batches_succeed_and_fail_entry_by_entry(sqs: Any, queue: Make) -> None:
    url = queue()
    entries = [{"Id": f"e{n}", "MessageBody": f"m{n}"} for n in range(9)] + [{"Id": "bad", "MessageBody": "\x01"}]
    sent = sqs.send_message_batch(QueueUrl=url, Entries=entries)
    assert [one["Id"] for one in sent["Successful"]] == [f"e{n}" for n in range(9)]
    assert [(one["Id"], one["Code"], one["SenderFault"]) for one in sent["Failed"]] == [
        ("bad", "InvalidMessageContents", True)
    ]
    got = receive(sqs, url)
    assert sorted(message["Body"] for message in got) == [f"m{n}" for n in range(9)]
    changes = [{"Id": str(n), "ReceiptHandle": m["ReceiptHandle"], "VisibilityTimeout": 60} for n, m in enumerate(got)]
    changed = sqs.change_message_visibility_batch(
        QueueUrl=url, Entries=[*changes, changes[0] | {"Id": "long", "VisibilityTimeout": 43_201}]
    )
    assert [len(changed["Successful"]), changed["Failed"][0]["Code"]] == [9, "InvalidParameterValue"]
    handles = [{"Id": str(n), "ReceiptHandle": message["ReceiptHandle"]} for n, message in enumerate(got)]
    deleted = sqs.delete_message_batch(QueueUrl=url, Entries=[*handles, {"Id": "no", "ReceiptHandle": "nonsense"}])
    assert [len(deleted["Successful"]), deleted["Failed"][0]["Code"]] == [9, "ReceiptHandleIsInvalid"]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], "EmptyBatchRequest"),
        ([{"Id": str(n), "MessageBody": "x"} for n in range(11)], "TooManyEntriesInBatchRequest"),
        ([{"Id": "a", "MessageBody": "x"}] * 2, "BatchEntryIdsNotDistinct"),
        ([{"Id": "a b", "MessageBody": "x"}], "InvalidBatchEntryId"),
    ],
)
def test_wrong_batches_store_nothing(sqs: Any, queue: Make, entries: list[Any], expected: str) -> None:
    url = queue()
    found = code(sqs.send_message_batch, QueueUrl=url, Entries=entries)
    assert found.endswith(expected)
    assert not receive(sqs, url, 0)


def test_visibility_timeouts(sqs: Any, queue: Make) -> None:
    """The message of a timeout that ended, or of 0, is visible at once, without a backoff."""
    url = queue(VisibilityTimeout="1")
    sqs.send_message(QueueUrl=url, MessageBody="x")
    (first,) = receive(sqs, url)
    assert not receive(sqs, url, 0)
    (second,) = receive(sqs, url, VisibilityTimeout=60)
    assert second["Attributes"]["ApproximateReceiveCount"] == "2"
    received = [int(one["Attributes"]["ApproximateFirstReceiveTimestamp"]) for one in (first, second)]
    assert abs(received[0] - received[1]) < 1_000, "the second one is of the first receive, too"
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=second["ReceiptHandle"], VisibilityTimeout=0)
    (third,) = receive(sqs, url, VisibilityTimeout=60)
    assert third["Attributes"]["ApproximateReceiveCount"] == "3"
    sqs.delete_message(QueueUrl=url, ReceiptHandle=first["ReceiptHandle"])
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=third["ReceiptHandle"], VisibilityTimeout=30)
    sqs.delete_message(QueueUrl=url, ReceiptHandle=third["ReceiptHandle"])
    gone = {"QueueUrl": url, "ReceiptHandle": third["ReceiptHandle"], "VisibilityTimeout": 30}
    assert code(sqs.change_message_visibility, **gone).endswith("MessageNotInflight")


def test_long_poll_is_relayed_to_the_leader(cluster: Cluster, sqs: Any, queue: Make) -> None:
    url = queue(ReceiveMessageWaitTimeSeconds="20")
    waiting = cluster.later(lambda: sqs.receive_message(QueueUrl=url))
    until(lambda: cluster.metric(cluster.leader(), "http_waiting_receives") >= 1, "the receive waits at the leader")
    other = client(cluster.urls[cluster.leader()])
    other.send_message(QueueUrl=url, MessageBody="now")
    assert waiting.result(20)["Messages"][0]["Body"] == "now"
    other.close()


def test_receive_through_a_proxy_is_relayed_too(cluster: Cluster, sqs: Any, queue: Make) -> None:
    url = queue()
    sqs.send_message(QueueUrl=url, MessageBody="x")
    head = {"X-Amz-Target": "AmazonSQS.ReceiveMessage", "Via": "1.1 proxy.example"}
    body = {"QueueUrl": url, "WaitTimeSeconds": 5}
    answer = cluster.ask(cluster.followers()[0], "POST", "/aws/sqs", body, headers=head)
    assert (answer.status, answer.json["Messages"][0]["Body"]) == (200, "x")


def test_queues_and_their_pages(sqs: Any, queue: Make) -> None:
    urls = [queue(f"paged-{n}") for n in range(5)]
    assert queue("paged-0") == urls[0], "creating a queue again finds it"
    assert code(sqs.create_queue, QueueName="paged-0", Attributes={"VisibilityTimeout": "7"}) == "QueueAlreadyExists"
    assert sqs.get_queue_url(QueueName="paged-3")["QueueUrl"] == urls[3]
    pages = list(sqs.get_paginator("list_queues").paginate(QueueNamePrefix="paged-", PaginationConfig={"PageSize": 2}))
    assert [page.get("QueueUrls") for page in pages] == [urls[:2], urls[2:4], urls[4:]]
    sqs.delete_queue(QueueUrl=urls[0])
    missing = "AWS.SimpleQueueService.NonExistentQueue"
    assert code(sqs.get_queue_url, QueueName="paged-0") == missing
    assert code(sqs.send_message, QueueUrl=urls[0], MessageBody="x") == missing
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        sqs.receive_message(QueueUrl=urls[0])
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        sqs.delete_queue(QueueUrl=urls[0])


def test_url_of_a_queue_by_any_name_of_a_host(cluster: Cluster, sqs: Any, queue: Make) -> None:
    url = queue()
    name = url.rpartition("/")[2]
    elsewhere = f"https://sqs.eu-central-1.amazonaws.com/123456789012/{name}"
    sqs.send_message(QueueUrl=elsewhere, MessageBody="x")
    at_root = client(cluster.urls["n1"], path="")
    assert at_root.get_queue_url(QueueName=name)["QueueUrl"] == f"{cluster.urls['n1']}/000000000000/{name}"
    assert [m["Body"] for m in receive(at_root, url)] == ["x"]
    at_root.close()
    for wrong in ("nonsense", f"http://x/{name}", "http://x/000000000000/a/b", "http://x/000000000000/"):
        assert code(sqs.send_message, QueueUrl=wrong, MessageBody="x") == "InvalidAddress"


def test_attributes_of_a_queue(cluster: Cluster, sqs: Any, queue: Make) -> None:
    dead = queue("attributes-dead")
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    assert arn == "arn:aws:sqs:hadelay:000000000000:attributes-dead"
    policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "5"})
    given = {
        "VisibilityTimeout": "45", "DelaySeconds": "1000", "MessageRetentionPeriod": "3600", "RedrivePolicy": policy,
        "MaximumMessageSize": "2048", "ReceiveMessageWaitTimeSeconds": "3",
    }  # fmt: skip
    url = queue("attributes-1", **given)
    assert queue("attributes-1", **given) == url
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert json.loads(found.pop("RedrivePolicy")) == {"deadLetterTargetArn": arn, "maxReceiveCount": 5}
    assert {name: found[name] for name in given if name in found} == {n: v for n, v in given.items() if n in found}
    topic = cluster.topic("n1", "attributes-1")
    assert (topic["lease"], topic["delay"], topic["ttl"], topic["dead_letter"], topic["max_attempts"]) == (
        "45s", "16m40s", "1h", "attributes-dead", 5
    )  # fmt: skip
    sources = sqs.list_dead_letter_source_queues(QueueUrl=dead)
    assert sources["queueUrls"] == [url]
    assert code(sqs.send_message, QueueUrl=url, MessageBody="x" * 2049) == "InvalidParameterValue"
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"VisibilityTimeout": "5", "RedrivePolicy": ""})
    topic = cluster.topic("n1", "attributes-1")
    assert (topic["lease"], topic.get("dead_letter"), topic["max_attempts"]) == ("5s", None, 0)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"VisibilityTimeout": "43201"}, "InvalidAttributeValue"),
        ({"VisibilityTimeout": "-1"}, "InvalidAttributeValue"),
        ({"DelaySeconds": "many"}, "InvalidAttributeValue"),
        ({"ReceiveMessageWaitTimeSeconds": "21"}, "InvalidAttributeValue"),
        ({"MaximumMessageSize": "1"}, "InvalidAttributeValue"),
        ({"RedrivePolicy": "{"}, "InvalidParameterValue"),
        (policy("arn:aws:sns:x:000000000000:y"), "InvalidParameterValue"),
        (policy("arn:aws:sqs:x:000000000000:none"), "InvalidParameterValue"),
        ({"KmsMasterKeyId": "alias/x"}, "InvalidAttributeValue"),
        ({"Policy": "{}"}, "InvalidAttributeValue"),
        ({"Colour": "blue"}, "InvalidAttributeName"),
        ({"QueueArn": "arn"}, "InvalidAttributeName"),
        ({"ContentBasedDeduplication": "true"}, "InvalidAttributeName"),
    ],
)  # fmt: skip
def test_wrong_attributes_create_no_queue(sqs: Any, attributes: dict[str, str], expected: str) -> None:
    assert code(sqs.create_queue, QueueName="wrong-attributes", Attributes=attributes) == expected
    assert "QueueUrls" not in sqs.list_queues(QueueNamePrefix="wrong-attributes")


def test_tags_of_a_queue(sqs: Any, queue: Make) -> None:
    url = sqs.create_queue(QueueName="tagged", tags={"owner": "payments"})["QueueUrl"]
    sqs.tag_queue(QueueUrl=url, Tags={"team": "x", "empty": ""})
    sqs.untag_queue(QueueUrl=url, TagKeys=["team", "unknown"])
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"owner": "payments", "empty": ""}
    assert code(sqs.tag_queue, QueueUrl=url, Tags={"aws:x": "y"}) == "InvalidParameterValue"
    assert code(sqs.tag_queue, QueueUrl=url, Tags={f"t{n}": "y" for n in range(51)}) == "InvalidParameterValue"


def test_purge(sqs: Any, queue: Make) -> None:
    url = queue()
    for delay in (0, 0, 900):
        sqs.send_message(QueueUrl=url, MessageBody="x", DelaySeconds=delay)
    sqs.purge_queue(QueueUrl=url)
    sqs.send_message(QueueUrl=url, MessageBody="later")
    assert [message["Body"] for message in receive(sqs, url)] == ["later"]


@pytest.mark.parametrize(
    "options",
    [
        {"MaxNumberOfMessages": 0}, {"MaxNumberOfMessages": 11}, {"WaitTimeSeconds": 21}, {"WaitTimeSeconds": -1},
        {"VisibilityTimeout": 43_201}, {"ReceiveRequestAttemptId": "a b\x01"},
    ],
)  # fmt: skip
def test_receives_out_of_range(sqs: Any, queue: Make, options: dict[str, Any]) -> None:
    assert code(sqs.receive_message, QueueUrl=queue(), **options) == "InvalidParameterValue"


def test_receive_repeated_with_its_attempt_id(sqs: Any, queue: Make) -> None:
    """Gets the messages again that it leased, and no others."""
    url = queue()
    sqs.send_message(QueueUrl=url, MessageBody="1")
    (first,) = receive(sqs, url, MaxNumberOfMessages=1, ReceiveRequestAttemptId="a-1")
    sqs.send_message(QueueUrl=url, MessageBody="2")
    (again,) = receive(sqs, url, MaxNumberOfMessages=1, ReceiveRequestAttemptId="a-1")
    assert again["MessageId"] == first["MessageId"]
    assert [message["Body"] for message in receive(sqs, url)] == ["2"]


def test_operations_that_are_missing_are_refused_in_words(cluster: Cluster, sqs: Any, queue: Make) -> None:
    url = queue()
    assert code(sqs.add_permission, QueueUrl=url, Label="l", AWSAccountIds=["1" * 12], Actions=["*"]).endswith(
        "UnsupportedOperation"
    )
    answer = cluster.ask("n1", "POST", "/aws/sqs", b"Action=ListQueues&Version=2012-11-05")
    assert (answer.status, answer.headers["content-type"]) == (400, "text/xml")
    assert b"<Code>AWS.SimpleQueueService.UnsupportedOperation</Code>" in answer.body
    head = {"X-Amz-Target": "AmazonSQS.SendMesage", "Content-Type": "application/x-amz-json-1.0"}
    answer = cluster.ask("n1", "POST", "/aws/sqs", b"{}", headers=head)
    assert (answer.status, answer.json["__type"]) == (400, "com.amazonaws.sqs#UnknownOperationException")
    head["X-Amz-Target"] = "AmazonSQS.SendMessage"
    for body, expected in (
        (b"{", "SerializationException"),
        (b"{}", "MissingRequiredParameterException"),
        (b'{"QueueUrl": 1}', "SerializationException"),
        (b"[" * 100_000, "SerializationException"),
        (b'{"QueueUrl": ' + b"[" * 100_000, "SerializationException"),
        (b'{"a": ' + b"[" * 100_000, "SerializationException"),
    ):
        answer = cluster.ask("n1", "POST", "/aws/sqs", body, headers=head)
        assert (answer.status, answer.json["__type"]) == (400, f"com.amazonaws.sqs#{expected}"), answer


def test_attributes_that_say_nothing_are_no_error(sqs: Any, queue: Make) -> None:
    """Terraform takes a policy or a key away by an empty value."""
    url = queue("emptied", Policy="", KmsMasterKeyId="")
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"Policy": ""})
    assert queue("emptied", Policy="") == url


def test_urls_name_the_host_and_scheme_of_the_first_proxy(cluster: Cluster) -> None:
    """Each proxy adds its own; the first value is what the client asked."""
    headers = {
        "X-Amz-Target": "AmazonSQS.CreateQueue",
        "Content-Type": "application/x-amz-json-1.0",
        "X-Forwarded-Host": "queues.example.com, inner.example.com",
        "X-Forwarded-Proto": "https, http",
    }
    request = urllib.request.Request(
        f"{cluster.urls['n1']}/aws/sqs", b'{"QueueName": "proxied"}', headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer)["QueueUrl"] == "https://queues.example.com/000000000000/proxied"
