"""EventBridge Scheduler by boto3 on three nodes, through a follower, and SQS to receive what schedules send. The last
test kills the leader."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from random import Random
from threading import Thread
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.aws.conftest import client
from tests.system.cluster import Cluster, until

ROLE = "arn:aws:iam::000000000000:role/any"
OFF = {"Mode": "OFF"}
Make = Callable[..., str]


def arn(queue: str) -> str:
    return f"arn:aws:sqs:us-east-1:123456789012:{queue}"


def target(queue: str, body: str | None = "hello", **more: Any) -> dict[str, Any]:
    return {"Arn": arn(queue), "RoleArn": ROLE} | ({} if body is None else {"Input": body}) | more


def at(seconds: float) -> str:
    """A one-time expression, some seconds from now."""
    return f"at({datetime.now(UTC) + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S})"


def code(call: Callable[..., Any], **options: Any) -> tuple[str, str]:
    """(code, words) of the error that a call raises."""
    with pytest.raises(ClientError) as raised:
        call(**options)
    error = raised.value.response["Error"]
    return str(error["Code"]), str(error["Message"])


@pytest.fixture(scope="module")
def scheduler(cluster: Cluster) -> Iterator[Any]:
    """A client of a node that does not lead."""
    made = client(cluster.urls[cluster.followers()[0]], "scheduler", "/aws/scheduler")
    yield made
    made.close()


@pytest.fixture
def names(queue: Make) -> tuple[str, str]:
    """Names of two new queues."""
    first, second = queue().rpartition("/")[2], queue().rpartition("/")[2]
    return first, second


def url_of(sqs: Any, name: str) -> str:
    return str(sqs.get_queue_url(QueueName=name)["QueueUrl"])


def received(sqs: Any, name: str, wait_s: int = 8) -> list[str]:
    answer = sqs.receive_message(QueueUrl=url_of(sqs, name), WaitTimeSeconds=wait_s, MaxNumberOfMessages=10)
    for message in answer.get("Messages", []):
        sqs.delete_message(QueueUrl=url_of(sqs, name), ReceiptHandle=message["ReceiptHandle"])
    return [message["Body"] for message in answer.get("Messages", [])]


def test_one_time_schedule_is_a_message(cluster: Cluster, scheduler: Any, sqs: Any, names: tuple[str, str]) -> None:
    queue, name = names[0], "order.4711"
    due = datetime.now(UTC) + timedelta(seconds=3)
    policy = {"MaximumEventAgeInSeconds": 600, "MaximumRetryAttempts": 3}
    request = {
        "ScheduleExpression": f"at({due:%Y-%m-%dT%H:%M:%S})",
        "Target": target(queue, "häll\u00f6", RetryPolicy=policy),
        "FlexibleTimeWindow": OFF,
        "Description": "a reminder",
        "ActionAfterCompletion": "DELETE",
    }
    made = scheduler.create_schedule(Name=name, **request)
    assert made["ScheduleArn"] == f"arn:aws:scheduler:hadelay:000000000000:schedule/default/{name}"
    answer = scheduler.get_schedule(Name=name)
    assert {key: answer[key] for key in request} == request
    assert (answer["Arn"], answer["GroupName"], answer["Name"], answer["State"]) == (
        made["ScheduleArn"], "default", name, "ENABLED",
    )  # fmt: skip
    assert answer["ScheduleExpressionTimezone"] == "UTC"
    assert abs(answer["CreationDate"].timestamp() - time.time()) < 60
    message = cluster.ask("n1", "GET", f"/v1/topics/{queue}/keys/aws~default~{name}").json
    assert message["state"] == "scheduled"
    assert cluster.ask("n1", "GET", f"/v1/schedules/aws~default~{name}").status == 404
    assert received(sqs, queue) == ["häll\u00f6"]
    assert datetime.now(UTC) >= due.replace(microsecond=0), "never early"
    words = code(scheduler.get_schedule, Name=name)
    assert words[0] == "ResourceNotFoundException"
    assert "ends with its message" in words[1]


def test_update_of_a_one_time_schedule(scheduler: Any, sqs: Any, names: tuple[str, str]) -> None:
    (one, other), name = names, "moved"
    scheduler.create_schedule(
        Name=name, ScheduleExpression=at(3_600), Target=target(one), FlexibleTimeWindow=OFF, Description="x"
    )
    created = scheduler.get_schedule(Name=name)["CreationDate"]
    scheduler.update_schedule(Name=name, ScheduleExpression=at(7_200), Target=target(one, "2"), FlexibleTimeWindow=OFF)
    answer = scheduler.get_schedule(Name=name)
    assert ("Description" not in answer, answer["Target"]["Input"]) == (True, "2"), (
        "an update replaces the whole document"
    )
    assert answer["CreationDate"] == created
    scheduler.update_schedule(Name=name, ScheduleExpression=at(-1), Target=target(other, "3"), FlexibleTimeWindow=OFF)
    assert received(sqs, other) == ["3"]
    assert received(sqs, one, 0) == [], "the message in the first queue is cancelled"
    words = code(
        scheduler.update_schedule, Name=name, ScheduleExpression=at(9), Target=target(one), FlexibleTimeWindow=OFF
    )
    assert words[0] == "ResourceNotFoundException"


def test_disabled_one_time_schedule_sends_nothing(scheduler: Any, sqs: Any, names: tuple[str, str]) -> None:
    queue, name = names[0], "held-back"
    request = {"Name": name, "Target": target(queue), "FlexibleTimeWindow": OFF}
    scheduler.create_schedule(ScheduleExpression=at(1), **request)
    scheduler.update_schedule(ScheduleExpression=at(3_600), State="DISABLED", **request)
    assert scheduler.get_schedule(Name=name)["State"] == "DISABLED"
    assert received(sqs, queue, 2) == []
    scheduler.update_schedule(ScheduleExpression=at(0), **request)
    assert received(sqs, queue) == ["hello"]
    assert code(scheduler.get_schedule, Name=name)[0] == "ResourceNotFoundException"


def test_recurring_schedules(cluster: Cluster, scheduler: Any, names: tuple[str, str]) -> None:
    queue, name = names[0], "nightly"
    start = datetime(2027, 3, 1, 12, tzinfo=UTC)
    scheduler.create_schedule(
        Name=name, ScheduleExpression="cron(30 2 ? * MON-FRI 2027-2030)", Target=target(queue, None),
        ScheduleExpressionTimezone="Europe/Vienna", EndDate=datetime(2028, 1, 1, tzinfo=UTC), State="DISABLED",
        FlexibleTimeWindow={"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 15},
    )  # fmt: skip
    ours = cluster.ask("n2", "GET", f"/v1/schedules/aws~default~{name}?body=true").json
    assert (ours["cron"], ours["timezone"], ours["state"], ours["jitter"]) == (
        "30 2 * * 1-5", "Europe/Vienna", "paused", "15m",
    )  # fmt: skip
    assert (ours["start"], ours["end"]) == ("2026-12-31T23:00:00.000Z", "2028-01-01T00:00:00.000Z")
    answer = scheduler.get_schedule(Name=name)
    assert answer["FlexibleTimeWindow"] == {"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 15}
    assert answer["EndDate"].astimezone(UTC) == datetime(2028, 1, 1, tzinfo=UTC)
    assert "Input" not in answer["Target"]
    scheduler.update_schedule(
        Name=name, ScheduleExpression="rate(2 hours)", Target=target(queue), FlexibleTimeWindow=OFF, StartDate=start
    )
    ours = cluster.ask("n2", "GET", f"/v1/schedules/aws~default~{name}").json
    assert (ours["state"], ours["next"][:2]) == ("active", ["2027-03-01T12:00:00.000Z", "2027-03-01T14:00:00.000Z"])
    scheduler.delete_schedule(Name=name)
    assert cluster.ask("n2", "GET", f"/v1/schedules/aws~default~{name}").status == 404
    assert code(scheduler.delete_schedule, Name=name)[0] == "ResourceNotFoundException"


def test_rate_begins_at_once_and_keeps_its_beat(cluster: Cluster, scheduler: Any, sqs: Any, names: Any) -> None:
    queue, name = names[0], "beat"
    request = {"Name": name, "ScheduleExpression": "rate(1 day)", "FlexibleTimeWindow": OFF}
    scheduler.create_schedule(Target=target(queue, "first"), **request)
    assert received(sqs, queue) == ["first"]
    before = cluster.ask("n1", "GET", f"/v1/schedules/aws~default~{name}").json["next"]
    scheduler.update_schedule(Target=target(queue, "changed"), **request)
    assert cluster.ask("n1", "GET", f"/v1/schedules/aws~default~{name}").json["next"] == before


def test_client_token_makes_a_repetition_harmless(scheduler: Any, sqs: Any, names: tuple[str, str]) -> None:
    queue = names[0]
    for expression in (at(3_600), "cron(0 0 1 1 ? *)"):
        name = f"token-{expression[:2]}"
        request = {"Name": name, "ScheduleExpression": expression, "Target": target(queue), "FlexibleTimeWindow": OFF}
        first = scheduler.create_schedule(ClientToken="a-token", **request)
        assert scheduler.create_schedule(ClientToken="a-token", **request)["ScheduleArn"] == first["ScheduleArn"]
        assert code(scheduler.create_schedule, ClientToken="another", **request)[0] == "ConflictException"
        scheduler.delete_schedule(Name=name)
    request = {"Name": "due", "ScheduleExpression": at(0), "Target": target(queue), "FlexibleTimeWindow": OFF}
    scheduler.create_schedule(ClientToken="once", **request)
    assert received(sqs, queue) == ["hello"]
    scheduler.create_schedule(ClientToken="once", **request)
    assert received(sqs, queue, 1) == [], "the repetition of a request whose message is consumed sends nothing"


def test_update_of_a_message_that_is_being_handled_fires_nothing_twice(
    scheduler: Any, sqs: Any, names: tuple[str, str]
) -> None:
    """Also to another queue, or to a recurring schedule: no key forbids that."""
    (one, other), request = names, {"Name": "handled", "FlexibleTimeWindow": OFF}
    scheduler.create_schedule(ScheduleExpression=at(0), Target=target(one), **request)
    (got,) = sqs.receive_message(QueueUrl=url_of(sqs, one), WaitTimeSeconds=8)["Messages"]
    for change in (
        {"ScheduleExpression": at(0), "Target": target(one)},
        {"ScheduleExpression": at(0), "Target": target(other)},
        {"ScheduleExpression": "rate(1 day)", "Target": target(one)},
        {"ScheduleExpression": at(60), "Target": target(one), "State": "DISABLED"},
    ):
        assert code(scheduler.update_schedule, **request | change)[0] == "ConflictException", change
    assert received(sqs, other, 0) == []
    sqs.delete_message(QueueUrl=url_of(sqs, one), ReceiptHandle=got["ReceiptHandle"])
    assert code(scheduler.get_schedule, Name="handled")[0] == "ResourceNotFoundException"


def test_document_of_a_schedule_is_no_attribute_of_its_message(scheduler: Any, sqs: Any, names: Any) -> None:
    """Consumers do not see the role and the token of the request, which the document has."""
    scheduler.create_schedule(
        Name="plain", ScheduleExpression=at(0), Target=target(names[0]), FlexibleTimeWindow=OFF, ClientToken="secret"
    )
    (message,) = sqs.receive_message(
        QueueUrl=url_of(sqs, names[0]), WaitTimeSeconds=8, MessageAttributeNames=["All"], AttributeNames=["All"]
    )["Messages"]
    assert "MessageAttributes" not in message
    sqs.delete_message(QueueUrl=url_of(sqs, names[0]), ReceiptHandle=message["ReceiptHandle"])


def test_retry_policy_of_a_target_has_defaults(scheduler: Any, names: tuple[str, str]) -> None:
    request = {"Name": "policy", "ScheduleExpression": at(3_600), "FlexibleTimeWindow": OFF}
    scheduler.create_schedule(Target=target(names[0], RetryPolicy={"MaximumRetryAttempts": 3}), **request)
    policy = scheduler.get_schedule(Name="policy")["Target"]["RetryPolicy"]
    assert policy == {"MaximumEventAgeInSeconds": 86_400, "MaximumRetryAttempts": 3}
    scheduler.update_schedule(Target=target(names[0]), **request)
    policy = scheduler.get_schedule(Name="policy")["Target"]["RetryPolicy"]
    assert policy == {"MaximumEventAgeInSeconds": 86_400, "MaximumRetryAttempts": 185}
    scheduler.delete_schedule(Name="policy")


def test_name_and_token_of_a_deleted_schedule_are_free(scheduler: Any, sqs: Any, names: tuple[str, str]) -> None:
    """A program that derives the token from the name may create, delete and create again."""
    request = {"Name": "again", "ClientToken": "derived", "FlexibleTimeWindow": OFF, "Target": target(names[0])}
    for _ in range(2):
        scheduler.create_schedule(ScheduleExpression=at(3_600), **request)
        scheduler.delete_schedule(Name="again")
    scheduler.create_schedule(ScheduleExpression=at(0), **request)
    assert received(sqs, names[0]) == ["hello"]


def test_time_beyond_the_longest_delay(cluster: Cluster, scheduler: Any, names: tuple[str, str]) -> None:
    """It is a schedule until the message can be made; an update may bring it nearer."""
    request = {"Name": "far", "FlexibleTimeWindow": OFF, "Target": target(names[0])}
    scheduler.create_schedule(ScheduleExpression="at(2035-01-01T00:00:00)", **request)
    assert scheduler.get_schedule(Name="far")["ScheduleExpression"] == "at(2035-01-01T00:00:00)"
    assert [one["Name"] for one in scheduler.list_schedules(NamePrefix="far")["Schedules"]] == ["far"]
    assert cluster.ask("n1", "GET", "/v1/schedules/aws~default~far").json["next"] == ["2035-01-01T00:00:00.000Z"]
    scheduler.update_schedule(ScheduleExpression=at(3_600), **request)
    assert cluster.ask("n1", "GET", "/v1/schedules/aws~default~far").status == 404
    scheduler.delete_schedule(Name="far")


def test_repeated_deletion_of_a_group_is_no_error(cluster: Cluster, scheduler: Any) -> None:
    """The SDK repeats a request whose answer was lost, and says so."""
    scheduler.create_schedule_group(Name="once")
    node, path = cluster.followers()[0], "/aws/scheduler/schedule-groups/once"
    assert cluster.ask(node, "DELETE", path, headers={"amz-sdk-request": "attempt=1; max=3"}).status == 200
    assert cluster.ask(node, "DELETE", path, headers={"amz-sdk-request": "attempt=2; max=3"}).status == 200
    assert cluster.ask(node, "DELETE", path, headers={"amz-sdk-request": "attempt=1; max=3"}).status == 404


def test_tags_that_aws_refuses(scheduler: Any) -> None:
    one = {"Key": "a", "Value": "b"}
    for tags in ([one, one], [{"Key": "aws:x", "Value": "y"}], [{"Key": f"{n}", "Value": "y"} for n in range(51)]):
        assert code(scheduler.create_schedule_group, Name="tagged", Tags=tags)[0] == "ValidationException"
    assert code(scheduler.get_schedule_group, Name="tagged")[0] == "ResourceNotFoundException"


def test_groups_and_their_tags(cluster: Cluster, scheduler: Any, sqs: Any, names: tuple[str, str]) -> None:
    queue = names[0]
    request = {"ScheduleExpression": at(3_600), "Target": target(queue), "FlexibleTimeWindow": OFF}
    assert code(scheduler.create_schedule, Name="x", GroupName="billing", **request)[0] == "ResourceNotFoundException"
    tags = [{"Key": "team", "Value": "money"}, {"Key": "cost", "Value": "7"}]
    group = scheduler.create_schedule_group(Name="billing", Tags=tags, ClientToken="t")["ScheduleGroupArn"]
    assert scheduler.create_schedule_group(Name="billing", Tags=tags, ClientToken="t")["ScheduleGroupArn"] == group
    assert code(scheduler.create_schedule_group, Name="billing")[0] == "ConflictException"
    scheduler.tag_resource(ResourceArn=group, Tags=[{"Key": "team", "Value": "cash"}])
    scheduler.untag_resource(ResourceArn=group, TagKeys=["cost", "none"])
    assert scheduler.list_tags_for_resource(ResourceArn=group)["Tags"] == [{"Key": "team", "Value": "cash"}]
    topic = cluster.topic("n1", "aws-schedule-group.billing")
    assert {name: text for name, text in topic["labels"].items() if not name.startswith("aws:")} == {"team": "cash"}
    assert not [url for url in sqs.list_queues().get("QueueUrls", []) if "aws-schedule-group" in url]
    answer = scheduler.get_schedule_group(Name="billing")
    assert (answer["Arn"], answer["Name"], answer["State"]) == (group, "billing", "ACTIVE")
    assert abs(answer["CreationDate"].timestamp() - time.time()) < 60
    scheduler.create_schedule_group(Name="billing.2")
    pages = scheduler.get_paginator("list_schedule_groups").paginate(PaginationConfig={"PageSize": 1})
    assert [one["Name"] for page in pages for one in page["ScheduleGroups"]] == ["billing", "billing.2", "default"]
    for name in ("a", "b"):
        scheduler.create_schedule(Name=name, GroupName="billing", **request)
    scheduler.create_schedule(Name="c", GroupName="billing", **request | {"ScheduleExpression": "rate(10 days)"})
    scheduler.create_schedule(Name="a", **request)
    scheduler.delete_schedule_group(Name="billing")
    assert code(scheduler.get_schedule_group, Name="billing")[0] == "ResourceNotFoundException"

    def state(name: str) -> str:
        return str(cluster.ask("n1", "GET", f"/v1/topics/{queue}/keys/aws~{name}").json["state"])

    until(lambda: state("billing~a") == state("billing~b") == "cancelled", "the job cancels the group's messages")
    assert state("default~a") == "scheduled"
    assert cluster.ask("n1", "GET", "/v1/schedules/aws~billing~c").status == 404
    scheduler.delete_schedule_group(Name="billing.2")
    assert code(scheduler.delete_schedule_group, Name="default")[0] == "ValidationException"
    scheduler.tag_resource(ResourceArn=group.replace("billing", "default"), Tags=tags)
    assert len(scheduler.list_tags_for_resource(ResourceArn=group.replace("billing", "default"))["Tags"]) == 2
    scheduler.delete_schedule(Name="a")


def test_lists_of_schedules(scheduler: Any, names: tuple[str, str]) -> None:
    scheduler.create_schedule_group(Name="lists")
    request = {"GroupName": "lists", "FlexibleTimeWindow": OFF}
    expected = []
    for n in range(7):
        queue = names[n % 2]
        if n < 3:
            request |= {"ScheduleExpression": "rate(9 days)", "State": "DISABLED" if n == 1 else "ENABLED"}
        else:
            request |= {"ScheduleExpression": at(3_600 + n), "State": "ENABLED"}
        scheduler.create_schedule(Name=f"{'ab'[n % 2]}-{n}", Target=target(queue), **request)
        expected.append((f"{'ab'[n % 2]}-{n}", arn(queue)))
    paginator = scheduler.get_paginator("list_schedules")

    def listed(size: int, **options: Any) -> list[tuple[str, str]]:
        pages = paginator.paginate(PaginationConfig={"PageSize": size}, **options)
        return [(one["Name"], one["Target"]["Arn"]) for page in pages for one in page["Schedules"]]

    for size in (1, 2, 100):
        assert sorted(listed(size, GroupName="lists")) == sorted(expected)
    assert {name for name, _ in listed(2, GroupName="lists", NamePrefix="a-")} == {"a-0", "a-2", "a-4", "a-6"}
    assert listed(100, GroupName="lists", State="DISABLED") == [expected[1]]
    assert {name for name, _ in listed(100, NamePrefix="b-")} == {"b-1", "b-3", "b-5"}
    assert code(scheduler.list_schedules, GroupName="no-such")[0] == "ResourceNotFoundException"
    for token in ("x", "eyJ9", "Wy0xXQ==", "WyIiLCJ0IiwtOV0="):
        assert code(scheduler.list_schedules, NextToken=token)[0] == "ValidationException", token
    scheduler.delete_schedule_group(Name="lists")


def test_urls_as_webhooks(cluster: Cluster, scheduler: Any) -> None:
    called: list[str] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            called.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/hook"
    request = {
        "Name": "call", "ScheduleExpression": at(0), "FlexibleTimeWindow": OFF,
        "Target": {"Arn": url, "RoleArn": ROLE, "Input": "ring", "RetryPolicy": {"MaximumEventAgeInSeconds": 600}},
    }  # fmt: skip
    assert "there is no topic 'aws-scheduler'" in code(scheduler.create_schedule, **request)[1]
    cluster.ask("n1", "PUT", "/v1/topics/aws-scheduler", {})
    assert "allow_per_message" in code(scheduler.create_schedule, **request)[1]
    hook = {"webhook": {"url": url + "/none", "allow_per_message": True}}
    assert cluster.ask("n1", "PUT", "/v1/topics/aws-scheduler", hook).status == 200
    scheduler.create_schedule(**request)
    scheduler.create_schedule(**request | {"Name": "again", "ScheduleExpression": "rate(1 day)"})
    until(lambda: called == ["ring", "ring"], "the URL is called by both schedules")
    server.shutdown()
    server.server_close()


def test_fifo_queue_needs_a_group(scheduler: Any, sqs: Any, queue: Make) -> None:
    url = queue("scheduled.fifo", FifoQueue="true")
    request = {"Name": "fifo", "ScheduleExpression": at(0), "FlexibleTimeWindow": OFF}
    assert "MessageGroupId" in code(scheduler.create_schedule, Target=target("scheduled.fifo"), **request)[1]
    scheduler.create_schedule(Target=target("scheduled.fifo", SqsParameters={"MessageGroupId": "g"}), **request)
    (message,) = sqs.receive_message(QueueUrl=url, WaitTimeSeconds=8, AttributeNames=["All"])["Messages"]
    assert message["Attributes"]["MessageGroupId"] == "g"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"Name": "x" * 65}, "Name"),
    ({"Name": "a b"}, "Name"),
    ({"GroupName": "a/b"}, "GroupName"),
    ({"ScheduleExpression": "soon"}, "is none of at("),
    ({"ScheduleExpression": "cron(0 9 ? * 9 *)"}, "weekday"),
    ({"ScheduleExpression": "cron(0 9 15W * ? *)"}, "weekday nearest"),
    ({"ScheduleExpression": "cron(0 0 30 2 ? *)"}, "no month of the pattern"),
    ({"ScheduleExpression": "cron(0 0 1 1 ? 2020)"}, "no future occurrence"),
    ({"ScheduleExpression": "at(0199-01-01T00:00:00)"}, "at(0199"),
    ({"ScheduleExpressionTimezone": "Mars/Base"}, "Mars/Base"),
    ({"FlexibleTimeWindow": {"Mode": "FLEXIBLE"}}, "MaximumWindowInMinutes"),
    ({"FlexibleTimeWindow": {"Mode": "OFF", "MaximumWindowInMinutes": 5}}, "MaximumWindowInMinutes"),
    ({"FlexibleTimeWindow": {"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 1441}}, "MaximumWindowInMinutes"),
    ({"FlexibleTimeWindow": {"Mode": "SOMETIMES"}}, "Mode"),
    ({"State": "ASLEEP"}, "State"),
    ({"Description": "x" * 513}, "Description"),
    ({"ClientToken": "a b"}, "ClientToken"),
    ({"ActionAfterCompletion": "REPEAT"}, "ActionAfterCompletion"),
    ({"EndDate": 1}, "no future occurrence"),
    ({"KmsKeyArn": ""}, "KmsKeyArn"),
    ({"Target": {"Arn": "arn:aws:lambda:eu-west-1:123456789012:function:f"}}, "queues of this cluster"),
    ({"Target": {"Arn": "no-arn"}}, "queues of this cluster"),
    ({"Target": {"Arn": arn("no such queue")}}, "Target.Arn"),
    ({"Target": {"Arn": arn("no-such-queue")}}, "no queue 'no-such-queue'"),
    ({"Target": {"Arn": "ftp://example.com/"}}, "Target.Arn"),
    ({"Target": {"RoleArn": "me"}}, "RoleArn"),
    ({"Target": {"Input": ""}}, "Input"),
    ({"Target": {"Input": "x" * 70_000}}, "at most 65536"),
    ({"Target": {"Input": "<aws.scheduler.scheduled-time>"}}, "are not replaced"),
    ({"Target": {"KinesisParameters": {"PartitionKey": "p"}}}, "KinesisParameters"),
    ({"Target": {"RetryPolicy": {"MaximumRetryAttempts": 186}}}, "MaximumRetryAttempts"),
    ({"Target": {"RetryPolicy": {"MaximumEventAgeInSeconds": 59}}}, "MaximumEventAgeInSeconds"),
    ({"Target": {"DeadLetterConfig": {"Arn": "arn:aws:sns:us-east-1:123456789012:t"}}}, "DeadLetterConfig"),
    ({"Target": {"SqsParameters": {"MessageGroupId": "x" * 129}}}, "MessageGroupId"),
    ({"Target": {"Unknown": 1}}, "Unknown"),
    ({"Unknown": 1}, "Unknown"),
    ({"Target": None}, "Target"),
]  # fmt: skip


@pytest.mark.parametrize("operation", ["POST", "PUT"])
def test_bad_input_stores_nothing(cluster: Cluster, scheduler: Any, names: tuple[str, str], operation: str) -> None:
    queue, node = names[0], cluster.followers()[0]
    good = {
        "ScheduleExpression": "rate(1 hour)", "Target": target(queue), "FlexibleTimeWindow": OFF, "State": "ENABLED",
    }  # fmt: skip
    if operation == "PUT":
        scheduler.create_schedule(Name="bad", **good)
    for change, words in BAD:
        name = change.get("Name", "bad")
        request = {**good, **change}
        request.pop("Name", None)
        if isinstance(change.get("Target"), dict):
            request["Target"] = good["Target"] | change["Target"]
        path = f"/aws/scheduler/schedules/{name.replace(' ', '%20')}"
        answer = cluster.ask(node, operation, path, request)
        assert answer.status == 400, (change, answer)
        assert answer.headers["x-amzn-errortype"] == "ValidationException"
        assert words in answer.json["Message"], (change, answer.json)
    answer = cluster.ask(node, "GET", "/v1/schedules?prefix=aws~default~bad").json["schedules"]
    assert [one["version"] for one in answer] == ([1] if operation == "PUT" else [])
    assert cluster.topic(node, queue)["scheduled"] + cluster.topic(node, queue)["ready"] <= 1
    if operation == "PUT":
        scheduler.delete_schedule(Name="bad")


def test_requests_that_are_not_of_the_api(cluster: Cluster) -> None:
    node = cluster.followers()[0]
    for method, path, status in (
        ("GET", "/aws/scheduler/schedules?MaxResults=0", 400),
        ("GET", "/aws/scheduler/schedules?MaxResults=x", 400),
        ("GET", "/aws/scheduler/schedules?State=ON", 400),
        ("GET", "/aws/scheduler/schedules?Unknown=1", 400),
        ("GET", "/aws/scheduler/schedules?NamePrefix=a&NamePrefix=b", 400),
        ("GET", "/aws/scheduler/tags/arn%3Aaws%3Ascheduler%3Ax%3A000000000000%3Aschedule%2Fg%2Fn", 400),
        ("GET", "/aws/scheduler/tags/arn%3Aaws%3Ascheduler%3Ax%3A000000000000%3Aschedule-group%2Fnone", 404),
        ("GET", "/aws/scheduler/schedules/%2e%2e", 404),
        ("GET", "/aws/scheduler/schedules/a%20b", 400),
        ("PATCH", "/aws/scheduler/schedules/a", 405),
        ("GET", "/schedules/none", 404),
    ):
        answer = cluster.ask(node, method, path)
        assert answer.status == status, (path, answer)
    for body in (b"", b"[]", b"{", b'{"a":' * 5_000, b"\xff", json.dumps({"Target": [1]}).encode()):
        answer = cluster.ask(node, "POST", "/aws/scheduler/schedules/a", body)
        assert (answer.status, answer.headers["x-amzn-errortype"]) == (400, "ValidationException"), answer


def test_fuzzed_requests_get_a_definite_refusal_or_are_done(cluster: Cluster, names: tuple[str, str]) -> None:
    """Random values in random members: the node refuses with 4xx, or does what the request says, and goes on."""
    random, node = Random(36), cluster.followers()[0]
    values = [
        None, True, -1, 0, 1, 1e308, 2**63, 2**70, "", "x", "\0", "\ud83d\ude00" * 70, "a" * 3_000, [], [1], {},
        "at(9999-12-31T23:59:59)", "rate(999999999 days)", "cron(* * * * ? *)", "cron(0 0 31 2 ? *)", "~",
    ]  # fmt: skip
    statuses = set()
    for _ in range(200):
        document: dict[str, Any] = {
            "ScheduleExpression": random.choice([at(90_000), "rate(7 days)", "cron(0 9 ? * MON-FRI *)"]),
            "Target": target(names[0]), "FlexibleTimeWindow": dict(OFF), "StartDate": 1_900_000_000,
        }  # fmt: skip
        where = random.choice([document, document, document["Target"], document["FlexibleTimeWindow"]])
        name = random.choice([*where, "State", "EndDate", "GroupName", "ClientToken", "Name", "Input", "RetryPolicy"])
        where[name] = random.choice(values)
        path = f"/aws/scheduler/schedules/fuzz-{random.randrange(5)}"
        answer = cluster.ask(node, random.choice(["POST", "PUT", "POST", "PUT", "GET", "DELETE"]), path, document)
        statuses.add(answer.status)
        assert answer.status in (200, 400, 404, 409), (document, answer)
    assert statuses == {200, 400, 404, 409}
    for n in range(5):
        cluster.ask(node, "DELETE", f"/aws/scheduler/schedules/fuzz-{n}")


def test_killed_leader_loses_and_doubles_nothing(cluster: Cluster, queue: Make) -> None:
    """200 one-time schedules are created while the leader is killed; each comes once, and not before its time."""
    leader = cluster.leader()
    follower = cluster.followers()[0]
    url = queue()
    name = url.rpartition("/")[2]
    made = client(cluster.urls[follower], "scheduler", "/aws/scheduler", attempts=10)
    due = datetime.now(UTC) + timedelta(seconds=7)

    def create(n: int) -> None:
        if n == 60:
            cluster.kill(leader)
        at_ = due + timedelta(seconds=n % 3)
        made.create_schedule(
            Name=f"kill-{n}", ScheduleExpression=f"at({at_:%Y-%m-%dT%H:%M:%S})", FlexibleTimeWindow=OFF,
            Target=target(name, f"{n} {at_.replace(microsecond=0).timestamp()}"),
        )  # fmt: skip

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create, range(200)))
    consumer, seen = client(cluster.urls[follower], attempts=10), list[int]()

    def more() -> bool:
        answer = consumer.receive_message(QueueUrl=url, WaitTimeSeconds=5, MaxNumberOfMessages=10)
        for message in answer.get("Messages", []):
            n, at_s = message["Body"].split()
            assert time.time() >= float(at_s), "never early"
            consumer.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
            seen.append(int(n))
        return len(seen) >= 200

    until(more, "all schedules came", 60)
    assert sorted(seen) == list(range(200))
    assert consumer.receive_message(QueueUrl=url, WaitTimeSeconds=1).get("Messages", []) == []
    cluster.revive()
