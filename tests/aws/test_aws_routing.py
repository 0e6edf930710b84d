"""Which shard answers a request at the doors: two nodes in the event loop, which know a map of two shards."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import boto3
import msgspec
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from hadelay.aws import scheduler, sqs
from hadelay.aws.mount import doors
from hadelay.aws.operations import Document, Operation
from hadelay.http.app import HttpServer
from hadelay.settings.node import HttpConfig
from hadelay.settings.shardmap import Rule, Shard, ShardMap, Shards
from tests.http.served import Served, serve
from tests.system.cluster import ask

OFF = {"Mode": "OFF"}
ROLE = "arn:aws:iam::000000000000:role/any"
ARN = "arn:aws:sqs:hadelay:000000000000:"


class Front(NamedTuple):
    service: Served
    url: str
    #: Clients of boto3 by service: to make one takes a third of a second.
    clients: dict[str, Any]

    async def sqs(self, operation: str, **options: Any) -> Any:
        return await self._call("sqs", "/aws/sqs", operation, options)

    async def scheduler(self, operation: str, **options: Any) -> Any:
        return await self._call("scheduler", "/aws/scheduler", operation, options)

    async def _call(self, kind: str, path: str, operation: str, options: dict[str, Any]) -> Any:
        if kind not in self.clients:
            session = boto3.Session("any", "any", region_name="hadelay")
            config = Config(retries={"total_max_attempts": 1})
            self.clients[kind] = session.client(kind, endpoint_url=self.url + path, config=config)
        return await asyncio.to_thread(getattr(self.clients[kind], operation), **options)

    async def raw(self, document: dict[str, Any], target: str, **headers: str) -> Any:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        names |= {"X-Amz-Target": f"AmazonSQS.{target}"}
        return await asyncio.to_thread(ask, self.url, "POST", "/aws/sqs", document, names)

    def give(self, known: ShardMap) -> None:
        self.service.raft_node.ledger.shards = Shards(known)


@asynccontextmanager
async def front(group: int, *, aws: bool = True) -> AsyncIterator[Front]:
    config = HttpConfig(listen="127.0.0.1:0", aws=True, hosts=["queues.example"])
    service = await serve(config, group=group)
    server = HttpServer(service, config, 1 << 40, doors=doors(service, tokens=False) if aws else None)
    found = Front(service, f"http://{await server.start()}", {})
    try:
        yield found
    finally:
        for client in found.clients.values():
            client.close()
        await server.stop(1)
        service.close()


def map_of(fronts: list[Front], far: int = 1, version: int = 17) -> ShardMap:
    """far: owner of queues that begin with "far"."""
    shards = {n: Shard(n, (), {"n1": one.url}) for n, one in enumerate(fronts)}
    return ShardMap(version, shards, (Rule("far*", (far,)), Rule("*", (0,))))


@pytest.fixture
async def fronts() -> AsyncIterator[list[Front]]:
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(front(group)) for group in (0, 1)]
        for one in found:
            one.give(map_of(found))
        yield found


def code(error: ClientError) -> str:
    return str(error.response["Error"]["Code"])


def names_a_shard(operation: Operation) -> bool:
    return operation.over is not None or operation.kind.names is not Document.names


def test_each_operation_names_a_shard_or_is_carried_out_over_all() -> None:
    """A new operation that does neither would not find what another shard has."""
    unrouted = {name for name, one in sqs.protocol.operations.all.items() if not names_a_shard(one)}
    assert unrouted == set()
    assert [key for key, one in scheduler.operations.all.items() if not names_a_shard(one)] == []
    assert len(sqs.protocol.operations.all) > 20


async def test_a_forwarded_request_of_another_shard_is_misdirected(fronts: list[Front]) -> None:
    """It is never forwarded twice."""
    for document, target, forwarded, shard in (
        ({"QueueName": "far"}, "CreateQueue", "0; map=16", 1),
        ({"QueueUrl": "/000000000000/far", "MessageBody": "x"}, "SendMessage", "0; map=16", 1),
        ({"TaskHandle": "1000000000007"}, "CancelMessageMoveTask", "0; map=16", 1),
        ({}, "ListQueues", "1; map=16", 0),
    ):
        answer = await fronts[0].raw(document, target, Hadelay_Shard=forwarded)
        assert (answer.status, answer.json["shard"]) == (421, shard), target
    answer = await fronts[0].raw({"QueueName": "near"}, "CreateQueue", Hadelay_Shard="0; map=16")
    assert answer.status == 200
    assert (await fronts[0].raw({}, "ListQueues", Hadelay_Shard="0; map=16")).json["QueueUrls"] == [
        f"{fronts[0].url}/000000000000/near"
    ]


async def test_a_node_with_an_older_map_finds_the_owner(fronts: list[Front]) -> None:
    """The owner of "far" by the old map says that another shard owns the queue."""
    async with front(2) as third:
        every = [*fronts, third]
        for node in every[1:]:
            node.give(map_of(every, version=18))
        fronts[0].give(map_of(every, far=2))
        url = (await fronts[0].sqs("create_queue", QueueName="far-new"))["QueueUrl"]
        assert url == f"{fronts[0].url}/000000000000/far-new"
        await fronts[0].sqs("send_message", QueueUrl=url, MessageBody="x")
        having = [node.service.raft_node.ledger.topic("far-new") is not None for node in every]
        assert having == [False, True, False]


async def test_the_host_of_the_client_goes_along(fronts: list[Front]) -> None:
    for headers, origin in (
        ({"Host": "queues.example"}, "http://queues.example"),
        ({"X_Forwarded_Host": "q.example, inner"}, "http://q.example"),
        ({"X_Forwarded_Host": "q.example", "X_Forwarded_Proto": "https"}, "https://q.example"),
    ):
        answer = await fronts[0].raw({"QueueName": "far-host"}, "CreateQueue", **headers)
        assert answer.json["QueueUrl"] == f"{origin}/000000000000/far-host"
        assert answer.headers["hadelay-shard"] == "1"
        assert len([name for name in answer.headers if name == "x-amzn-requestid"]) == 1


async def test_a_shard_that_does_not_serve_sdks_is_named() -> None:
    async with front(0) as one, front(1, aws=False) as other:
        one.give(map_of([one, other]))
        other.give(map_of([one, other]))
        for operation, options in (
            ("create_queue", {"QueueName": "far"}), ("list_queues", {}),
            ("receive_message", {"QueueUrl": f"{one.url}/000000000000/far"}),
        ):  # fmt: skip
            with pytest.raises(ClientError, match="does not serve AWS SDKs: set `aws = true`") as refused:
                await one.sqs(operation, **options)
            assert code(refused.value) == "ServiceUnavailable"


async def test_a_schedule_is_not_said_to_be_stored_by_a_shard_that_only_looked(fronts: list[Front]) -> None:
    """The front's map is older: the shard that it takes for the owner owns the topic no more."""
    one, other = fronts
    await one.sqs("create_queue", QueueName="near")
    one.give(map_of(fronts, far=1, version=16))
    other.give(map_of(fronts, far=0))
    plain = {"Target": {"Arn": ARN + "far", "RoleArn": ROLE}, "FlexibleTimeWindow": OFF}
    with pytest.raises(ClientError, match="different shard maps") as refused:
        await one.scheduler("create_schedule", Name="s", ScheduleExpression="rate(1 day)", **plain)
    assert code(refused.value) == "InternalServerException"


async def test_tokens_of_lists_of_schedules(fronts: list[Front]) -> None:
    """Pages of one row; a token of the first shard's end begins the second's list; others are refused."""
    one, other = fronts
    names = []
    for queue in ("near", "far"):
        await one.sqs("create_queue", QueueName=queue)
        for n in range(2):
            names.append(f"{queue}-{n}")
            target = {"Arn": ARN + queue, "RoleArn": ROLE}
            await one.scheduler(
                "create_schedule",
                Name=names[-1],
                Target=target,
                ScheduleExpression="rate(1 day)",
                FlexibleTimeWindow=OFF,
            )
    for asked in ((one, one), (one, other)):
        found, options = list[str](), {"MaxResults": 1}
        for turn in range(20):
            page = await asked[turn % 2].scheduler("list_schedules", **options)
            found += [row["Name"] for row in page["Schedules"]]
            if "NextToken" not in page:
                break
            options["NextToken"] = page["NextToken"]
        assert found == names
    without = msgspec.json.encode(("", None, 0, 0, 7))
    for token in ("x", base64.urlsafe_b64encode(without).decode()):
        with pytest.raises(ClientError, match="no token from a list") as refused:
            await one.scheduler("list_schedules", NextToken=token)
        assert code(refused.value) == "ValidationException"


async def test_a_group_is_deleted_in_all_shards_or_stays(fronts: list[Front]) -> None:
    one, other = fronts
    for queue in ("near", "far"):
        await one.sqs("create_queue", QueueName=queue)
    await other.scheduler("create_schedule_group", Name="shop")
    for name, queue in (("a", "near"), ("b", "far")):
        target = {"Arn": ARN + queue, "RoleArn": ROLE}
        await one.scheduler(
            "create_schedule", Name=name, GroupName="shop", Target=target, ScheduleExpression="rate(1 day)",
            FlexibleTimeWindow=OFF,
        )  # fmt: skip
    one.give(map_of([one, other._replace(url="http://127.0.0.1:1")]))
    with pytest.raises(ClientError) as refused:
        await one.scheduler("delete_schedule_group", Name="shop")
    assert code(refused.value) == "InternalServerException"
    one.give(map_of(fronts))
    assert (await one.scheduler("get_schedule_group", Name="shop"))["Name"] == "shop"
    await other.scheduler("delete_schedule_group", Name="shop")
    assert (await one.scheduler("list_schedules"))["Schedules"] == []
    with pytest.raises(ClientError) as refused:
        await one.scheduler("delete_schedule_group", Name="shop")
    assert code(refused.value) == "ResourceNotFoundException"
