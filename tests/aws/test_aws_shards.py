"""The doors over two shards by boto3: any node answers for any queue. The queues of the second shard, which has three
nodes, are asked for through the first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from hadelay.rights import hash_token
from tests.aws.conftest import client
from tests.aws.test_scheduler import OFF, at, target
from tests.aws.test_sqs import code, policy, receive
from tests.system.cluster import Cluster, until

ARN = "arn:aws:sqs:hadelay:000000000000:"
GROUPS = "aws-schedule-group.*"
ROOT = "hadelay_" + "r" * 43
COUNT, SENDERS = 60, 6


def join(clusters: list[Cluster], **headers: str) -> None:
    """Give the clusters one map. Queues that begin with "far" belong to the second shard, and groups of schedules."""
    known = {
        "version": 1,
        "shards": {str(n): {"group": n, "nodes": one.urls} for n, one in enumerate(clusters)},
        "rules": [{"pattern": name, "shards": [1]} for name in ("far*", GROUPS)] + [{"pattern": "*", "shards": [0]}],
    }
    for step in ("prepare", "commit"):
        for one in clusters:
            answer = one.ask("n1", "PUT", "/v1/shards", {"step": step, "map": known}, headers=headers)
            assert answer.status == 200, answer


def started(directory: Path, stack: ExitStack, nodes: tuple[int, int], *settings: str) -> list[Cluster]:
    found = [Cluster(directory / f"s{n}", nodes=nodes[n], settings=(f"cluster.group={n}", *settings)) for n in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(stack.enter_context, found))
    return found


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cluster]]:
    with ExitStack() as stack:
        found = started(tmp_path_factory.mktemp("shards"), stack, (1, 3))
        join(found)
        yield found


@pytest.fixture(scope="module")
def fronts(shards: list[Cluster]) -> Iterator[list[Any]]:
    """A client of a node of each shard, by another name of the machine than the map has."""
    made = [client(one.urls["n1"].replace("127.0.0.1", "localhost")) for one in shards]
    yield made
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def schedulers(shards: list[Cluster]) -> Iterator[list[Any]]:
    made = [client(one.urls["n1"], "scheduler", "/aws/scheduler") for one in shards]
    yield made
    for one in made:
        one.close()


def make(sqs: Any, name: str, **attributes: str) -> str:
    return str(sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])


@pytest.mark.parametrize("shard", [0, 1])
def test_each_node_answers_for_the_queues_of_each_shard(fronts: list[Any], shards: list[Cluster], shard: int) -> None:
    sqs, name = fronts[shard], ("far-one", "one")[shard]
    url = make(sqs, name, VisibilityTimeout="60")
    assert url == f"{shards[shard].urls['n1'].replace('127.0.0.1', 'localhost')}/000000000000/{name}"
    assert sqs.get_queue_url(QueueName=name)["QueueUrl"] == url
    topic = shards[shard].ask("n1", "GET", f"/v1/topics/{name}")
    assert topic.headers["hadelay-shard"] == str(1 - shard)
    sqs.send_message(QueueUrl=url, MessageBody="first")
    (got,) = receive(sqs, url)
    assert got["Body"] == "first"
    sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"], VisibilityTimeout=0)
    (got,) = receive(sqs, url)
    sqs.delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
    entries = [{"Id": str(n), "MessageBody": str(n)} for n in range(3)]
    assert len(sqs.send_message_batch(QueueUrl=url, Entries=entries)["Successful"]) == 3
    got = [*receive(sqs, url), *receive(sqs, url, 0), *receive(sqs, url, 0)]
    handles = [{"Id": one["Body"], "ReceiptHandle": one["ReceiptHandle"]} for one in got]
    assert sorted(one["Body"] for one in got) == ["0", "1", "2"]
    changed = [one | {"VisibilityTimeout": 50} for one in handles]
    assert len(sqs.change_message_visibility_batch(QueueUrl=url, Entries=changed)["Successful"]) == 3
    assert len(sqs.delete_message_batch(QueueUrl=url, Entries=handles)["Successful"]) == 3
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"DelaySeconds": "900"})
    sqs.tag_queue(QueueUrl=url, Tags={"team": "a", "old": "b"})
    sqs.untag_queue(QueueUrl=url, TagKeys=["old"])
    assert sqs.list_queue_tags(QueueUrl=url)["Tags"] == {"team": "a"}
    sqs.send_message(QueueUrl=url, MessageBody="later")
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    assert (found["DelaySeconds"], found["ApproximateNumberOfMessagesDelayed"]) == ("900", "1")
    sqs.purge_queue(QueueUrl=url)
    sqs.delete_queue(QueueUrl=url)
    for there in fronts:
        assert code(there.get_queue_url, QueueName=name) == "AWS.SimpleQueueService.NonExistentQueue"
        assert code(there.send_message, QueueUrl=url, MessageBody="x") == "AWS.SimpleQueueService.NonExistentQueue"


def test_a_receive_waits_at_the_shard_of_its_queue(fronts: list[Any]) -> None:
    url = make(fronts[0], "far-long", ReceiveMessageWaitTimeSeconds="10")
    with ThreadPoolExecutor(1) as pool:
        begin = time.monotonic()
        waiting = pool.submit(fronts[0].receive_message, QueueUrl=url)
        until(lambda: time.monotonic() > begin + 0.3 or waiting.done(), "the receive waits")
        assert not waiting.done()
        fronts[1].send_message(QueueUrl=url, MessageBody="now")
        (got,) = waiting.result(20)["Messages"]
    assert got["Body"] == "now"
    fronts[0].delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
    other = make(fronts[0], "not-far")
    assert (
        code(fronts[0].delete_message, QueueUrl=other, ReceiptHandle=got["ReceiptHandle"]) == "ReceiptHandleIsInvalid"
    )


def test_a_list_has_the_queues_of_all_shards_page_by_page(fronts: list[Any]) -> None:
    names = [f"far-list-{n}" for n in range(3)] + [f"list-{n}" for n in range(4)]
    made = [make(fronts[0], name) for name in names]
    for prefix, shown in (("far-list", made[:3]), ("list", made[3:]), ("", made)):
        pages = list[list[str]]()
        options: dict[str, Any] = {"QueueNamePrefix": prefix, "MaxResults": 2}
        while True:
            page = fronts[0].list_queues(**options)
            pages.append(page.get("QueueUrls", []))
            if "NextToken" not in page:
                break
            options["NextToken"] = page["NextToken"]
        all_urls = [url for page in pages for url in page]
        assert all_urls == sorted(set(all_urls))
        assert [url for url in all_urls if url in made] == shown
        assert all(len(page) == 2 for page in pages[:-1])
    assert set(made) <= set(fronts[0].list_queues()["QueueUrls"])


def test_dead_letters_and_tasks_that_move_them_stay_in_their_shard(fronts: list[Any]) -> None:
    sqs = fronts[0]
    dead = make(sqs, "far-dead")
    source = make(sqs, "far-source", **policy(ARN + "far-dead"))
    assert sqs.list_dead_letter_source_queues(QueueUrl=dead)["queueUrls"] == [source]
    sqs.send_message(QueueUrl=source, MessageBody="sick")
    (sick,) = receive(sqs, source)
    sqs.change_message_visibility(QueueUrl=source, ReceiptHandle=sick["ReceiptHandle"], VisibilityTimeout=0)
    (letter,) = until(lambda: receive(sqs, dead, 1), "it is a dead letter")
    sqs.change_message_visibility(QueueUrl=dead, ReceiptHandle=letter["ReceiptHandle"], VisibilityTimeout=0)
    make(sqs, "moved-here")
    for call, options in (
        (sqs.create_queue, {"QueueName": "near", "Attributes": policy(ARN + "far-dead")}),
        (sqs.set_queue_attributes, {"QueueUrl": make(sqs, "near2"), "Attributes": policy(ARN + "far-dead")}),
        (sqs.start_message_move_task, {"SourceArn": ARN + "far-dead", "DestinationArn": ARN + "moved-here"}),
    ):
        with pytest.raises(ClientError) as refused:
            call(**options)
        error = refused.value.response["Error"]
        assert error["Code"] == "InvalidParameterValue"
        assert "hadelay shards pin" in error["Message"]
    task = sqs.start_message_move_task(SourceArn=ARN + "far-dead", MaxNumberOfMessagesPerSecond=500)["TaskHandle"]
    (shown,) = sqs.list_message_move_tasks(SourceArn=ARN + "far-dead")["Results"]
    assert shown["SourceArn"] == ARN + "far-dead"

    def over() -> bool:
        (task,) = sqs.list_message_move_tasks(SourceArn=ARN + "far-dead")["Results"]
        return bool(task["Status"] == "COMPLETED" and task["ApproximateNumberOfMessagesMoved"] == 1)

    until(over, "the task ends")
    assert code(sqs.cancel_message_move_task, TaskHandle=task) == "ResourceNotFoundException"
    make(sqs, "far-more")
    sqs.send_message_batch(QueueUrl=dead, Entries=[{"Id": str(n), "MessageBody": str(n)} for n in range(5)])
    slow = {"DestinationArn": ARN + "far-more", "MaxNumberOfMessagesPerSecond": 1}
    running = sqs.start_message_move_task(SourceArn=ARN + "far-dead", **slow)["TaskHandle"]
    assert "ApproximateNumberOfMessagesMoved" in sqs.cancel_message_move_task(TaskHandle=running)


def test_schedules_of_all_shards_through_each_node(fronts: list[Any], schedulers: list[Any]) -> None:
    one, other = schedulers
    for name in ("far-due", "due"):
        make(fronts[0], name)
    one.create_schedule_group(Name="shop")
    once = {"ScheduleExpression": at(3600), "FlexibleTimeWindow": OFF}
    rate = {"ScheduleExpression": "rate(1 hour)", "FlexibleTimeWindow": OFF}
    for n, queue in enumerate(("far-due", "due")):
        for asked, scheduler in enumerate(schedulers):
            scheduler.create_schedule(Name=f"once-{n}{asked}", GroupName="shop", Target=target(queue), **once)
            scheduler.create_schedule(Name=f"rate-{n}{asked}", Target=target(queue), **rate)
    for scheduler in schedulers:
        assert scheduler.get_schedule(Name="once-00", GroupName="shop")["Target"]["Arn"].endswith(":far-due")
        assert scheduler.get_schedule(Name="rate-11")["ScheduleExpression"] == "rate(1 hour)"
        assert error_of(scheduler.get_schedule, Name="unknown") == "ResourceNotFoundException"
        assert error_of(scheduler.create_schedule, Name="x", GroupName="no", Target=target("due"), **once) == (
            "ResourceNotFoundException"
        )
        assert error_of(scheduler.create_schedule, Name="x", Target=target("far-no"), **once) == "ValidationException"
        listed = scheduler.list_schedules()["Schedules"]
        names = [f"{kind}-{n}{asked}" for kind in ("once", "rate") for n in (0, 1) for asked in (0, 1)]
        assert sorted(schedule["Name"] for schedule in listed) == names
        paged = scheduler.get_paginator("list_schedules").paginate(GroupName="shop", PaginationConfig={"PageSize": 3})
        assert sorted(row["Name"] for page in paged for row in page["Schedules"]) == names[:4]
        assert error_of(scheduler.list_schedules, GroupName="no") == "ResourceNotFoundException"
        # A name is in one shard, whatever its target is.
        for call in (scheduler.create_schedule, scheduler.update_schedule):
            for queue, name in (("due", "once-01"), ("far-due", "once-10")):
                taken = {"Name": name, "GroupName": "shop", "Target": target(queue)} | once
                assert error_of(call, **taken) == "ConflictException"
        scheduler.update_schedule(Name="once-00", GroupName="shop", Target=target("far-due", "new"), **once)
        assert scheduler.get_schedule(Name="once-00", GroupName="shop")["Target"]["Input"] == "new"
    one.update_schedule(
        Name="once-00", GroupName="shop", Target=target("far-due", "new"), **(once | {"ScheduleExpression": at(0)})
    )
    url = fronts[0].get_queue_url(QueueName="far-due")["QueueUrl"]
    (got,) = receive(fronts[0], url)
    assert got["Body"] == "new"
    fronts[0].delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
    one.delete_schedule(Name="rate-01")
    other.delete_schedule(Name="rate-10")
    assert error_of(one.delete_schedule, Name="rate-01") == "ResourceNotFoundException"
    left = [row["Name"] for row in one.list_schedules(GroupName="default")["Schedules"]]
    assert left == ["rate-11", "rate-00"], "one shard after the other"


def test_groups_are_those_of_one_shard_for_all(fronts: list[Any], schedulers: list[Any]) -> None:
    one, other = schedulers
    before = len(one.list_schedules()["Schedules"])
    one.create_schedule_group(Name="bye", Tags=[{"Key": "team", "Value": "a"}])
    assert error_of(other.create_schedule_group, Name="bye") == "ConflictException"
    made = one.get_schedule_group(Name="bye")
    assert other.get_schedule_group(Name="bye")["CreationDate"] == made["CreationDate"]
    for scheduler in schedulers:
        pages = scheduler.get_paginator("list_schedule_groups").paginate(PaginationConfig={"PageSize": 1})
        listed = [group["Name"] for page in pages for group in page["ScheduleGroups"]]
        assert listed == sorted({*listed, "default", "bye"})
    other.tag_resource(ResourceArn=made["Arn"], Tags=[{"Key": "b", "Value": "c"}])
    assert {tag["Key"] for tag in one.list_tags_for_resource(ResourceArn=made["Arn"])["Tags"]} == {"team", "b"}
    for queue in ("far-bye", "bye"):
        make(fronts[0], queue)
        for expression in (at(3600), "rate(1 hour)"):
            name = f"{queue}-{expression[:2]}"
            of_group = {"GroupName": "bye", "FlexibleTimeWindow": OFF}
            one.create_schedule(Name=name, Target=target(queue), ScheduleExpression=expression, **of_group)
    assert len(one.list_schedules()["Schedules"]) == before + 4
    one.delete_schedule_group(Name="bye")
    assert error_of(other.get_schedule_group, Name="bye") == "ResourceNotFoundException"
    until(lambda: len(one.list_schedules()["Schedules"]) == before, "the messages of the group are cancelled")


def error_of(call: Callable[..., Any], **options: Any) -> str:
    with pytest.raises(ClientError) as raised:
        call(**options)
    return str(raised.value.response["Error"]["Code"])


def test_messages_through_the_killed_leader_of_another_shard(shards: list[Cluster]) -> None:
    front, owner = shards
    with closing(client(front.urls["n1"], attempts=8)) as sqs:
        url = make(sqs, "far-killed", VisibilityTimeout="120")
        sent, got = set[int](), Counter[str]()

        def send(n: int) -> None:
            sqs.send_message(QueueUrl=url, MessageBody=str(n), DelaySeconds=n % 2)
            sent.add(n)

        with ThreadPoolExecutor(SENDERS) as pool:
            sending = [pool.submit(send, n) for n in range(COUNT)]
            until(lambda: len(sent) >= COUNT // 4, "a quarter is sent")
            leader = owner.leader()
            owner.kill(leader)
            for one in sending:
                one.result(60)

        def drain() -> bool:
            for message in receive(sqs, url, 1):
                got[message["Body"]] += 1
                sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
            return len(got) == COUNT

        until(drain, f"all {COUNT} messages")
        assert set(got.values()) == {1}, "no message was sent or received twice"
        owner.restart(leader)


# --- with tokens


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cluster]]:
    root = hash_token(ROOT).hex()
    with ExitStack() as stack:
        found = started(
            tmp_path_factory.mktemp("guarded"),
            stack,
            (1, 1),
            "security.tokens=true",
            f"security.bootstrap_token_hash={root}",
        )
        for one in found:
            token(one, name="root", scopes=["admin"], hash=root)
        join(found, Authorization=f"Bearer {ROOT}")
        yield found


def token(cluster: Cluster, query: str = "", **document: Any) -> Any:
    headers = {"Authorization": f"Bearer {ROOT}"}
    answer = cluster.ask("n1", "POST", f"/v1/tokens{query}", document, headers=headers)
    assert answer.status == 201, answer
    return answer.json


def keys_of(made: Any) -> tuple[str, str]:
    return str(made["id"]), str(made["aws_secret"])


def test_keys_are_good_at_all_shards_with_their_rights(guarded: list[Cluster]) -> None:
    admin = keys_of(token(guarded[0], name="all", scopes=["admin"], aws=True))
    some = keys_of(token(guarded[1], name="some", scopes=["publish:far-a", "consume:far-a"], aws=True))
    for one in guarded:
        with closing(client(one.urls["n1"], keys=admin)) as sqs:
            for name in ("far-a", "a"):
                url = make(sqs, name)
                sqs.send_message(QueueUrl=url, MessageBody="x")
                (got,) = receive(sqs, url)
                sqs.delete_message(QueueUrl=url, ReceiptHandle=got["ReceiptHandle"])
            assert [url.rpartition("/")[2] for url in sqs.list_queues()["QueueUrls"]] == ["a", "far-a"]
        with closing(client(one.urls["n1"], "scheduler", "/aws/scheduler", keys=admin)) as scheduler:
            for queue in ("far-a", "a"):
                scheduler.create_schedule(
                    Name=queue, Target=target(queue), ScheduleExpression="rate(1 day)", FlexibleTimeWindow=OFF
                )
                scheduler.get_schedule(Name=queue)
            assert len(scheduler.list_schedules()["Schedules"]) == 2
            for queue in ("far-a", "a"):
                scheduler.delete_schedule(Name=queue)
        with closing(client(one.urls["n1"], keys=some)) as sqs:
            url = sqs.get_queue_url(QueueName="far-a")["QueueUrl"]
            sqs.send_message(QueueUrl=url, MessageBody="x")
            assert len(receive(sqs, url)) == 1
            assert [url.rpartition("/")[2] for url in sqs.list_queues()["QueueUrls"]] == ["far-a"]
            assert code(sqs.send_message, QueueUrl=url[:-5] + "a", MessageBody="x") == "AccessDeniedException"
            assert code(sqs.tag_queue, QueueUrl=url, Tags={"a": "b"}) == "AccessDeniedException"


def test_a_token_of_one_shard_is_unknown_in_the_other_and_no_queue_is_missing(guarded: list[Cluster]) -> None:
    front = guarded[0]
    keys = keys_of(token(front, "?shard=0", name="near", scopes=["admin"], aws=True))
    with closing(client(front.urls["n1"], keys=keys)) as sqs:
        make(sqs, "near")
        for call, options in (
            (sqs.create_queue, {"QueueName": "far-b"}), (sqs.get_queue_url, {"QueueName": "far-b"}),
            (sqs.receive_message, {"QueueUrl": "/000000000000/far-b"}), (sqs.list_queues, {}),
        ):  # fmt: skip
            with pytest.raises(ClientError) as refused:
                call(**options)
            error = refused.value.response["Error"]
            assert error["Code"] == "UnrecognizedClientException"
            assert "no token" in error["Message"]


def test_a_shard_that_is_down_is_no_missing_queue(guarded: list[Cluster]) -> None:
    """The last test: the shard stays down."""
    front, owner = guarded
    keys = keys_of(token(front, name="down", scopes=["admin"], aws=True))
    with (
        closing(client(front.urls["n1"], keys=keys)) as sqs,
        closing(client(front.urls["n1"], "scheduler", "/aws/scheduler", keys=keys)) as scheduler,
    ):
        url, here = make(sqs, "far-down"), make(sqs, "up")
        owner.kill("n1")
        for call, options in (
            (sqs.send_message, {"QueueUrl": url, "MessageBody": "x"}), (sqs.receive_message, {"QueueUrl": url}),
            (sqs.get_queue_url, {"QueueName": "far-down"}), (sqs.list_queues, {}),
        ):  # fmt: skip
            assert code(call, **options) == "ServiceUnavailable"
        assert error_of(scheduler.get_schedule, Name="x") == "InternalServerException"
        sqs.send_message(QueueUrl=here, MessageBody="x")
        assert len(receive(sqs, here)) == 1
