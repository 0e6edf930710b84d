"""Random documents for every operation of SQS, near to valid ones: no answer but 200 and 400, each as SDKs read it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from hadelay.aws.sqs.protocol import operations
from tests.aws.test_sqs import receive
from tests.system.cluster import Cluster

STEPS = 400
NAMES = sorted(operations.all)
TEXTS = [
    "",
    "x",
    "fuzzed",
    "0",
    "-1",
    "99999999999999999999",
    "\x01",
    "\U0001f600",
    "a" * 300,
    "{}",
    "true",
    "All",
    ".fifo",
]


def test_random_documents(cluster: Cluster, sqs: Any, queue: Callable[..., str]) -> None:
    rng, url = random.Random(36), queue("fuzzed")
    arn, other = "arn:aws:sqs:hadelay:000000000000:fuzzed", queue("untouched")
    sqs.send_message(QueueUrl=other, MessageBody="kept")

    def value(depth: int) -> Any:
        kind = rng.randrange(9 if depth < 3 else 5)
        if kind < 2:
            return rng.choice([*TEXTS, url, arn])
        if kind == 2:
            return rng.choice([-1, 0, 1, 10, 20, 43_201, 1 << 40, 1.5])
        if kind < 5:
            return rng.choice([None, True, "fuzzed", url])
        if kind == 5:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        members = (
            "DataType",
            "StringValue",
            "BinaryValue",
            "Id",
            "MessageBody",
            "ReceiptHandle",
            "VisibilityTimeout",
            "x",
        )
        return {rng.choice(members): value(depth + 1) for _ in range(rng.randrange(4))}

    members = (
        "QueueName", "Attributes", "tags", "Tags", "TagKeys", "Entries", "MessageBody", "DelaySeconds", "ReceiptHandle",
        "MessageAttributes", "MessageSystemAttributes", "MessageGroupId", "MessageDeduplicationId", "AttributeNames",
        "MaxNumberOfMessages", "VisibilityTimeout", "SourceArn", "DestinationArn", "TaskHandle", "MaxResults",
        "NextToken", "MessageAttributeNames", "ReceiveRequestAttemptId",
    )  # fmt: skip
    for _ in range(STEPS):
        document = {name: value(0) for name in rng.sample(members, rng.randrange(8))} | {
            "QueueUrl": rng.choice([url] * 9 + TEXTS)
        }
        body = msgspec.json.encode(document)
        if rng.random() < 0.1:
            body = body[: rng.randrange(len(body))] + rng.randbytes(2)
        head = {"X-Amz-Target": f"AmazonSQS.{rng.choice(NAMES)}", "Content-Type": "application/x-amz-json-1.0"}
        answer = cluster.ask(rng.choice(cluster.names), "POST", "/aws/sqs", body, headers=head)
        assert answer.status in (200, 400), (head, document, answer)
        assert answer.status == 200 or answer.json["__type"].startswith("com.amazonaws.sqs#"), answer
    assert [message["Body"] for message in receive(sqs, other)] == ["kept"]
