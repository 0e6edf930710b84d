"""Rights at the door of EventBridge Scheduler, and wrong keys: one node in the event loop, and boto3 in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from hadelay.api.service import Actor
from hadelay.aws.mount import doors
from hadelay.http.app import HttpServer
from hadelay.rights import Token, aws_key, aws_secret, hash_token
from hadelay.settings.node import HttpConfig, SecurityConfig
from tests.http.served import Served, serve

OFF = {"Mode": "OFF"}


class Guarded:
    def __init__(self, service: Served, url: str) -> None:
        self.service, self.url = service, url

    async def add(self, name: str, *scopes: str, lifetime_ms: int | None = None) -> Token:
        secret = f"hadelay_{name.ljust(43, '_')}"
        access = self.service.access
        return await access.create_token(
            name, hash_token(secret), list(scopes), lifetime_ms, Actor(), aws_key=aws_key(secret)
        )

    def client(self, kind: str, token: Token, secret: str | None = None) -> Any:
        key = aws_secret(token.aws_key or b"") if secret is None else secret
        session = boto3.Session(token.id, key, region_name="hadelay")
        config = Config(retries={"total_max_attempts": 1})
        return session.client(kind, endpoint_url=f"{self.url}/aws/{kind}", config=config)


@asynccontextmanager
async def guarded() -> AsyncIterator[Guarded]:
    config = HttpConfig(listen="127.0.0.1:0", aws=True)
    service = await serve(config)
    server = HttpServer(service, config, 1 << 40, SecurityConfig(tokens=True), doors=doors(service, tokens=True))
    try:
        yield Guarded(service, f"http://{await server.start()}")
    finally:
        await server.stop(1)
        service.close()


async def refusal(call: Callable[..., Any], **options: Any) -> tuple[str, int]:
    """(code, status) of the error that a call raises."""
    with pytest.raises(ClientError) as raised:
        await asyncio.to_thread(call, **options)
    answer = raised.value.response
    return str(answer["Error"]["Code"]), int(answer["ResponseMetadata"]["HTTPStatusCode"])


async def test_rights_of_a_token() -> None:
    async with guarded() as node:
        shop = await node.add("shop", "publish:orders", "consume:orders", "read:orders")
        for topic in ("orders", "mails"):
            await node.service.topics.put_topic(topic, {}, Actor())
        scheduler = node.client("scheduler", shop)
        target = {"Arn": "arn:aws:sqs:x:000000000000:orders", "RoleArn": "arn:aws:iam::000000000000:role/x"}
        request = {"ScheduleExpression": "at(2027-01-01T00:00:00)", "FlexibleTimeWindow": OFF}
        await asyncio.to_thread(scheduler.create_schedule, Name="a", Target=target, **request)
        foreign = target | {"Arn": target["Arn"].replace("orders", "mails")}
        denied = ("AccessDeniedException", 403)
        assert await refusal(scheduler.create_schedule, Name="b", Target=foreign, **request) == denied
        assert await refusal(scheduler.create_schedule_group, Name="g") == denied
        clerk = node.client("scheduler", await node.add("clerk", "publish:mails", "read:mails"))
        assert await refusal(clerk.get_schedule, Name="a") == denied
        assert await refusal(clerk.delete_schedule, Name="a") == denied
        assert await refusal(clerk.update_schedule, Name="a", Target=foreign, **request) == denied
        assert (await asyncio.to_thread(clerk.list_schedules))["Schedules"] == []
        answer = await asyncio.to_thread(scheduler.list_schedules)
        assert [one["Name"] for one in answer["Schedules"]] == ["a"]
        await asyncio.to_thread(
            scheduler.update_schedule, Name="a", Target=target, **request | {"ScheduleExpression": "rate(1 day)"}
        )
        (entry,) = [one for one in await node.service.access.audit(0, 100) if one.action == "schedule.set"]
        assert (entry.token, entry.target) == ("shop", "aws~default~a: orders")


async def test_keys_that_are_wrong_revoked_or_expired() -> None:
    async with guarded() as node:
        shop = await node.add("shop", "admin")
        for kind, call in (("sqs", "list_queues"), ("scheduler", "list_schedules")):
            assert await refusal(getattr(node.client(kind, shop, "wrong"), call)) == ("InvalidSignatureException", 403)
        await asyncio.to_thread(node.client("sqs", shop).list_queues)
        await node.service.access.revoke_token(shop.id, Actor())
        for kind, call in (("sqs", "list_queues"), ("scheduler", "list_schedules")):
            unknown = ("UnrecognizedClientException", 403)
            assert await refusal(getattr(node.client(kind, shop), call)) == unknown
        old = await node.add("old", "admin", lifetime_ms=1)
        node.service.runtime.move(1.0)
        assert await refusal(node.client("sqs", old).list_queues) == ("ExpiredTokenException", 403)
