"""StartMessageMoveTask and its kin by boto3 on three nodes. The last test kills the leader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.aws.conftest import client
from tests.aws.test_sqs import code, policy, receive
from tests.system.cluster import Cluster, until

Make = Callable[..., str]


def arn_of(url: str) -> str:
    return f"arn:aws:sqs:hadelay:000000000000:{url.rpartition('/')[2]}"


def dies(sqs: Any, *urls: str) -> None:
    """Let all messages of these queues come to an end in the queues for dead letters."""
    for url in urls:
        while got := receive(sqs, url, 0, MaxNumberOfMessages=10):
            for one in got:
                sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=one["ReceiptHandle"], VisibilityTimeout=0)


def ended(sqs: Any, arn: str) -> dict[str, Any]:
    def look() -> Any:
        (task,) = sqs.list_message_move_tasks(SourceArn=arn)["Results"]
        return task if task["Status"] != "RUNNING" else None

    found: dict[str, Any] = until(look, "the task ends")
    return found


def test_dead_letters_of_two_queues_go_back_to_each(sqs: Any, queue: Make) -> None:
    dead = queue()
    arn = arn_of(dead)
    sources = [queue(**policy(arn)) for _ in range(2)]
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == sources
    pages = sqs.get_paginator("list_dead_letter_source_queues").paginate(
        QueueUrl=dead, PaginationConfig={"PageSize": 1}
    )
    assert [page["queueUrls"] for page in pages] == [[url] for url in sources]
    sent = [sqs.send_message(QueueUrl=url, MessageBody=url[-1])["MessageId"] for url in sources]
    dies(sqs, *sources)
    assert sorted(one["MessageId"] for one in receive(sqs, dead, VisibilityTimeout=0)) == sorted(sent)
    until(lambda: counted(sqs, dead) == [2, 0], "both are visible again")
    assert "TaskHandle" in sqs.start_message_move_task(SourceArn=arn)
    task = ended(sqs, arn)
    assert (task["Status"], task["ApproximateNumberOfMessagesMoved"], task["ApproximateNumberOfMessagesToMove"]) == (
        "COMPLETED", 2, 2,
    )  # fmt: skip
    assert "DestinationArn" not in task
    for url, message_id in zip(sources, sent, strict=True):
        (got,) = receive(sqs, url)
        assert (got["MessageId"], got["Attributes"]["ApproximateReceiveCount"]) == (message_id, "1")
    assert not receive(sqs, dead, 0)


def counted(sqs: Any, url: str) -> list[int]:
    """Numbers of visible and of invisible messages."""
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
    return [int(found[name]) for name in names]


def test_rate_destination_and_cancel(sqs: Any, queue: Make) -> None:
    dead, other = queue(), queue()
    arn = arn_of(dead)
    source = queue(**policy(arn))
    sqs.send_message_batch(QueueUrl=source, Entries=[{"Id": f"{n}", "MessageBody": f"{n}"} for n in range(10)])
    dies(sqs, source)
    given = {"SourceArn": arn, "DestinationArn": arn_of(other), "MaxNumberOfMessagesPerSecond": 1}
    handle = sqs.start_message_move_task(**given)["TaskHandle"]
    assert code(sqs.start_message_move_task, SourceArn=arn) == "InvalidParameterValue", "one task of a queue at a time"
    until(lambda: counted(sqs, other) != [0, 0], "the first comes")
    (task,) = sqs.list_message_move_tasks(SourceArn=arn)["Results"]
    assert {name: task[name] for name in given} == given
    assert (task["Status"], task["TaskHandle"], task["ApproximateNumberOfMessagesToMove"]) == ("RUNNING", handle, 10)
    moved = sqs.cancel_message_move_task(TaskHandle=handle)["ApproximateNumberOfMessagesMoved"]
    task = ended(sqs, arn)
    assert (task["Status"], task["ApproximateNumberOfMessagesMoved"]) == ("CANCELLED", moved)
    assert counted(sqs, other) == [moved, 0]
    assert counted(sqs, dead) == [10 - moved, 0]
    assert code(sqs.cancel_message_move_task, TaskHandle=handle) == "ResourceNotFoundException"
    del given["DestinationArn"]
    sqs.start_message_move_task(**given | {"MaxNumberOfMessagesPerSecond": 500})
    assert ended(sqs, arn)["Status"] == "COMPLETED"
    tasks = sqs.list_message_move_tasks(SourceArn=arn, MaxResults=10)["Results"]
    assert [one["Status"] for one in tasks] == ["COMPLETED", "CANCELLED"], "the latest first"
    assert counted(sqs, source) == [10 - moved, 0]


def test_messages_without_a_source_stay(sqs: Any, queue: Make) -> None:
    dead = queue()
    source = queue(**policy(arn_of(dead)))
    for url in (source, dead):
        sqs.send_message(QueueUrl=url, MessageBody=url)
    dies(sqs, source)
    sqs.start_message_move_task(SourceArn=arn_of(dead))
    task = ended(sqs, arn_of(dead))
    assert (task["Status"], task["ApproximateNumberOfMessagesMoved"]) == ("FAILED", 1)
    assert "1 messages stay" in task["FailureReason"]
    assert [one["Body"] for one in receive(sqs, dead)] == [dead]


def test_groups_of_a_fifo_queue_come_back_in_order(sqs: Any, queue: Make) -> None:
    fifo = {"FifoQueue": "true"}
    dead = queue("moving-dead.fifo", **fifo)
    source = queue("moving.fifo", **fifo, **policy(arn_of(dead)))
    for n in range(4):
        sqs.send_message(QueueUrl=source, MessageBody=f"{n}", MessageGroupId=f"g{n % 2}", MessageDeduplicationId=f"{n}")
    dies(sqs, source)
    sqs.start_message_move_task(SourceArn=arn_of(dead))
    assert ended(sqs, arn_of(dead))["Status"] == "COMPLETED"
    got = Counter[str]()
    while some := receive(sqs, source, 1):
        for one in some:
            assert int(one["Body"]) // 2 == got[one["Attributes"]["MessageGroupId"]], "in the order of the group"
            got[one["Attributes"]["MessageGroupId"]] += 1
            sqs.delete_message(QueueUrl=source, ReceiptHandle=one["ReceiptHandle"])
    assert got == {"g0": 2, "g1": 2}


def test_queue_that_keeps_its_own_dead_letters(cluster: Any, sqs: Any, queue: Make) -> None:
    url = queue("keeps")
    cluster.ask("n1", "PUT", "/v1/topics/keeps", {"max_attempts": 1})
    sqs.send_message(QueueUrl=url, MessageBody="x")
    (got,) = receive(sqs, url)
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"], VisibilityTimeout=0)
    arn = arn_of(url)
    elsewhere = {"SourceArn": arn, "DestinationArn": arn_of(queue())}
    assert code(sqs.start_message_move_task, **elsewhere) == "InvalidParameterValue"
    sqs.start_message_move_task(SourceArn=arn, MaxNumberOfMessagesPerSecond=100)
    assert receive(sqs, url)[0]["Body"] == "x"
    (task,) = sqs.list_message_move_tasks(SourceArn=arn)["Results"]
    assert (task["SourceArn"], task["MaxNumberOfMessagesPerSecond"]) == (arn, 100)


def test_refused_tasks(sqs: Any, queue: Make) -> None:
    dead, other = queue(), queue()
    arn, source = arn_of(dead), queue(**policy(arn_of(dead)))
    start, no_queue = sqs.start_message_move_task, arn_of("/none")
    for change, expected in (
        ({"SourceArn": no_queue}, "ResourceNotFoundException"),
        ({"SourceArn": "arn:aws:sns:x:000000000000:y"}, "InvalidParameterValue"),
        ({"SourceArn": arn_of(other)}, "InvalidParameterValue"),
        ({"DestinationArn": no_queue}, "ResourceNotFoundException"),
        ({"DestinationArn": arn}, "InvalidParameterValue"),
        ({"DestinationArn": arn_of(queue("refused.fifo", FifoQueue="true"))}, "InvalidParameterValue"),
        ({"MaxNumberOfMessagesPerSecond": 501}, "InvalidParameterValue"),
        ({"MaxNumberOfMessagesPerSecond": 0}, "InvalidParameterValue"),
    ):
        assert code(start, **{"SourceArn": arn} | change) == expected, change
    assert code(sqs.list_message_move_tasks, SourceArn=no_queue) == "ResourceNotFoundException"
    assert code(sqs.list_message_move_tasks, SourceArn=arn, MaxResults=11) == "InvalidParameterValue"
    assert sqs.list_message_move_tasks(SourceArn=arn)["Results"] == []
    assert code(sqs.cancel_message_move_task, TaskHandle="none") == "InvalidParameterValue"
    assert code(sqs.cancel_message_move_task, TaskHandle="123456789") == "ResourceNotFoundException"
    with pytest.raises(sqs.exceptions.QueueDoesNotExist):
        sqs.list_dead_letter_source_queues(QueueUrl=source + "-none")


def test_task_goes_on_after_its_leader_is_killed(cluster: Cluster, queue: Make) -> None:
    """Each message is in the source once in the end, under its id, also after a restart of all nodes."""
    leader = cluster.leader()
    made = client(cluster.urls[cluster.followers()[0]], attempts=10)
    dead = queue()
    source = queue(**policy(arn_of(dead)))
    ids = set[str]()
    for n in range(6):
        entries = [{"Id": f"{m}", "MessageBody": f"{n} {m}"} for m in range(10)]
        sent = made.send_message_batch(QueueUrl=source, Entries=entries)
        ids |= {one["MessageId"] for one in sent["Successful"]}
    dies(made, source)
    made.start_message_move_task(SourceArn=arn_of(dead), MaxNumberOfMessagesPerSecond=40)
    until(lambda: counted(made, source) != [0, 0], "the task moves messages")
    cluster.kill(leader)
    task = ended(made, arn_of(dead))
    assert (task["Status"], task["ApproximateNumberOfMessagesMoved"]) == ("COMPLETED", 60)
    cluster.kill(*(name for name in cluster.urls if name != leader))
    cluster.revive()
    again, got = client(cluster.urls["n1"], attempts=10), Counter[str]()

    def drained() -> bool:
        for one in receive(again, source, 1):
            got[one["MessageId"]] += 1
            again.delete_message(QueueUrl=source, ReceiptHandle=one["ReceiptHandle"])
        return len(got) == len(ids)

    until(drained, "all messages came back")
    assert got == dict.fromkeys(ids, 1)
    assert counted(again, dead) == counted(again, source) == [0, 0]
    made.close()
    again.close()


def test_the_attribute_of_the_queue_in_which_a_message_died(sqs: Any, queue: Make) -> None:
    dead, other = queue(), queue()
    source = queue(**policy(arn_of(dead)))
    sqs.send_message(QueueUrl=source, MessageBody="dies")
    dies(sqs, source)
    sqs.send_message(QueueUrl=dead, MessageBody="sent")
    for asked in ("All", "DeadLetterQueueSourceArn"):
        until(lambda: counted(sqs, dead) == [2, 0], "both are visible")
        got = sqs.receive_message(
            QueueUrl=dead, MaxNumberOfMessages=10, VisibilityTimeout=0, MessageSystemAttributeNames=[asked]
        )["Messages"]
        found = {one["Body"]: one.get("Attributes", {}).get("DeadLetterQueueSourceArn") for one in got}
        assert found == {"dies": arn_of(source), "sent": None}
    until(lambda: counted(sqs, dead) == [2, 0], "both are visible")
    sqs.start_message_move_task(SourceArn=arn_of(dead), DestinationArn=arn_of(other))
    assert ended(sqs, arn_of(dead))["Status"] == "COMPLETED"
    for one in receive(sqs, other):
        assert "DeadLetterQueueSourceArn" not in one["Attributes"], "this queue is no queue for dead letters"
