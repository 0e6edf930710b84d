"""FIFO queues and dead letters by boto3 on three nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.aws.test_sqs import code, policy, receive

Make = Callable[..., str]


def test_messages_of_a_group_come_in_order(sqs: Any, queue: Make) -> None:
    """A message is not handed out before the one in front of it in its group is deleted."""
    url = queue("order.fifo", FifoQueue="true", ContentBasedDeduplication="true")
    entries = [{"Id": f"e{n}", "MessageBody": f"{n}", "MessageGroupId": f"g{n % 2}"} for n in range(6)]
    sent = sqs.send_message_batch(QueueUrl=url, Entries=entries)["Successful"]
    assert [one["SequenceNumber"] for one in sent] == sorted(one["SequenceNumber"] for one in sent)
    seen = list[str]()
    while len(seen) < 6:
        for got in receive(sqs, url, 5):
            attributes = got["Attributes"]
            assert attributes["MessageGroupId"] == f"g{int(got['Body']) % 2}"
            assert len(attributes["MessageDeduplicationId"]) == 64
            seen.append(got["Body"])
            sqs.delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
    assert [n for n in seen if int(n) % 2 == 0] == ["0", "2", "4"]
    assert [n for n in seen if int(n) % 2] == ["1", "3", "5"]


def test_one_answer_has_several_messages_of_a_group_and_the_group_waits_for_all(sqs: Any, queue: Make) -> None:
    """As SQS: a message that is visible again does not come before the others of its answer are deleted."""
    url = queue("several.fifo", FifoQueue="true", ContentBasedDeduplication="true")
    for text in "abcd":
        sqs.send_message(QueueUrl=url, MessageBody=text, MessageGroupId="g")
    first = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=3, WaitTimeSeconds=5)["Messages"]
    assert [got["Body"] for got in first] == [*"abc"]
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=first[0]["ReceiptHandle"], VisibilityTimeout=0)
    sqs.delete_message(QueueUrl=url, ReceiptHandle=first[1]["ReceiptHandle"])
    assert not receive(sqs, url, 0)
    sqs.delete_message(QueueUrl=url, ReceiptHandle=first[2]["ReceiptHandle"])
    assert [got["Body"] for got in receive(sqs, url)] == ["a", "d"]


def test_deduplication(sqs: Any, queue: Make) -> None:
    """An id is remembered for five minutes, whether its message is deleted or not, and the body does not matter."""
    url = queue("once.fifo", FifoQueue="true")
    options = {"QueueUrl": url, "MessageGroupId": "g", "MessageDeduplicationId": "d-1"}
    first = sqs.send_message(MessageBody="first", **options)
    again = sqs.send_message(MessageBody="another body", **options)
    assert (again["MessageId"], again["SequenceNumber"]) == (first["MessageId"], first["SequenceNumber"])
    (got,) = receive(sqs, url)
    assert (got["Body"], got["Attributes"]["MessageDeduplicationId"]) == ("first", "d-1")
    sqs.delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
    sqs.send_message(MessageBody="again", **options)
    sqs.send_message(MessageBody="other", **options | {"MessageDeduplicationId": "d-2"})
    assert [message["Body"] for message in receive(sqs, url)] == ["other"]


def test_scope_of_deduplication_by_group(sqs: Any, queue: Make) -> None:
    url = queue("scope.fifo", FifoQueue="true", DeduplicationScope="messageGroup")
    for group in ("a", "b", "a"):
        sqs.send_message(QueueUrl=url, MessageBody=group, MessageGroupId=group, MessageDeduplicationId="same")
    assert sorted(message["Body"] for message in receive(sqs, url)) == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "MissingParameter"),
        ({"MessageGroupId": "g"}, "InvalidParameterValue"),
        ({"MessageGroupId": "g h", "MessageDeduplicationId": "d\t"}, "InvalidParameterValue"),
    ],
)
def test_fifo_messages_that_lack_something(sqs: Any, queue: Make, options: dict[str, str], expected: str) -> None:
    url = queue("lacks.fifo", FifoQueue="true")
    assert code(sqs.send_message, QueueUrl=url, MessageBody="x", **options) == expected
    assert not receive(sqs, url, 0)


def test_names_and_kinds_of_queues_agree(sqs: Any, queue: Make) -> None:
    for name, attributes in (("plain", {"FifoQueue": "true"}), ("no.fifo", {}), ("a b", {}), ("x" * 81, {})):
        assert code(sqs.create_queue, QueueName=name, Attributes=attributes) == "InvalidParameterValue"
    url = queue()
    dedup = {"QueueUrl": url, "MessageBody": "x", "MessageDeduplicationId": "d"}
    assert code(sqs.send_message, **dedup) == "InvalidParameterValue"
    sqs.send_message(QueueUrl=url, MessageBody="x", MessageGroupId="fair")
    assert receive(sqs, url)[0]["Attributes"]["MessageGroupId"] == "fair"


def test_an_attempt_id_counts_in_its_own_queue(sqs: Any, queue: Make) -> None:
    """Consumers name their attempts by a counter, and one of them may read several queues."""
    urls = [queue(name, FifoQueue="true") for name in ("first.fifo", "second.fifo")]
    for url in urls:
        sqs.send_message(QueueUrl=url, MessageBody=url[-6:], MessageGroupId="g", MessageDeduplicationId="d")
    for _ in range(2):  # a repeated attempt gets the same message again
        for url in urls:
            (got,) = receive(sqs, url, ReceiveRequestAttemptId="attempt-1")
            assert got["Body"] == url[-6:]


def test_queues_for_dead_letters_are_of_the_kind_of_their_source(sqs: Any, queue: Make) -> None:
    """A message of a FIFO queue loses its order in another; one of another queue has no group."""
    targets = queue("dead"), queue("dead.fifo", FifoQueue="true")
    for name, url in (("source.fifo", targets[0]), ("source", targets[1])):
        arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        kind = {"FifoQueue": "true"} if name.endswith(".fifo") else {}
        given = kind | policy(arn)
        assert code(sqs.create_queue, QueueName=name, Attributes=given) == "InvalidParameterValue"
        source = queue(name, **kind)
        assert code(sqs.set_queue_attributes, QueueUrl=source, Attributes=policy(arn)) == "InvalidParameterValue"


def test_message_dies_into_the_queue_for_dead_letters(sqs: Any, queue: Make) -> None:
    dead = queue("dead-target")
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    url = queue(**policy(arn, 2))
    sent = sqs.send_message(QueueUrl=url, MessageBody="x")
    for _ in range(2):
        (got,) = receive(sqs, url)
        sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"], VisibilityTimeout=0)
    assert not receive(sqs, url, 0)
    (letter,) = receive(sqs, dead)
    assert (letter["MessageId"], letter["Body"]) == (sent["MessageId"], "x")
