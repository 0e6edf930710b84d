"""The API of SQS by boto3: hadelay's own, and moto, an emulator for tests."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.delays.contender import Client, Contender, Message, Received
from bench.delays.contenders.hadelay_client import Hadelay
from bench.delays.server import OneServer, Server

#: Limit of the API: messages per request.
_MOST = 10


class SqsHadelay(Hadelay):
    name = "sqs-hadelay"
    setup = "boto3 against hadelay's SQS API (three nodes), batches of 10, the attribute `hadelay.deliver_at`"
    notes = "boto3 is given one node, so clients of that node fail while it is down"
    modules = ("boto3",)

    def prepare(self) -> None:
        _queue(self, f"http://{self.addresses()[0]}/aws/sqs")

    def connect(self) -> Client:
        return _Client(self, f"http://{self.addresses()[0]}/aws/sqs", exact=True)


class SqsMoto(OneServer):
    name = "sqs-moto"
    setup = "boto3 against moto's server, batches of 10, `DelaySeconds`"
    durability = "memory of one process: an emulator for tests"
    notes = "delays are whole seconds of at most 15 minutes, rounded up here"
    modules = ("boto3", "moto")
    longest_delay_s = 900.0

    def start(self) -> None:
        from bench.delays.field import environment

        run = "from moto.server import main; main()"
        command = [sys.executable, "-c", run, "-H", "127.0.0.1", "-p", str(self.port)]
        self._server = Server(command, self.directory, self.port, environment=environment())
        self._server.start()

    def prepare(self) -> None:
        _queue(self, f"http://127.0.0.1:{self.port}")

    def connect(self) -> Client:
        return _Client(self, f"http://127.0.0.1:{self.port}", exact=False)


def _library(url: str) -> Any:
    import boto3
    from botocore.config import Config

    own = {"aws_access_key_id": "any", "aws_secret_access_key": "any", "region_name": "us-east-1"}
    retries = {"max_attempts": 1, "mode": "standard"}
    return boto3.session.Session().client(
        "sqs", endpoint_url=url, config=Config(retries=retries, connect_timeout=5, read_timeout=30), **own
    )


def _queue(contender: Contender, url: str) -> str:
    timeout = str(math.ceil(contender.visibility_s))
    made = _library(url).create_queue(QueueName="bench", Attributes={"VisibilityTimeout": timeout})
    return str(made["QueueUrl"])


class _Client(Client):
    def __init__(self, contender: Contender, url: str, *, exact: bool) -> None:
        """exact: send hadelay's attribute with the due time in place of DelaySeconds."""
        self._sqs, self._queue, self._exact = _library(url), _queue(contender, url), exact

    def publish(self, messages: Sequence[Message]) -> None:
        for start in range(0, len(messages), _MOST):
            some = messages[start : start + _MOST]
            answer = self._sqs.send_message_batch(QueueUrl=self._queue, Entries=[self._entry(m) for m in some])
            if answer.get("Failed"):
                raise RuntimeError(f"refused: {answer['Failed'][0]}")

    def _entry(self, message: Message) -> dict[str, Any]:
        entry: dict[str, Any] = {"Id": message.id, "MessageBody": message.body().decode()}
        if self._exact:
            due = {"DataType": "String", "StringValue": str(message.due_ms)}
            return {**entry, "MessageAttributes": {"hadelay.deliver_at": due}}
        return {**entry, "DelaySeconds": max(0, math.ceil(message.due_ms / 1000 - time.time()))}

    def receive(self, most: int, wait_s: float) -> list[Received]:
        got = self._sqs.receive_message(
            QueueUrl=self._queue, MaxNumberOfMessages=min(most, _MOST), WaitTimeSeconds=math.ceil(wait_s)
        )
        return [Received(one["Body"].rstrip(), one["ReceiptHandle"]) for one in got.get("Messages", [])]

    def ack(self, received: Sequence[Received]) -> None:
        entries = [{"Id": str(n), "ReceiptHandle": one.token} for n, one in enumerate(received)]
        answer = self._sqs.delete_message_batch(QueueUrl=self._queue, Entries=entries)
        if answer.get("Failed"):
            raise RuntimeError(f"not deleted: {answer['Failed'][0]}")

    def close(self) -> None:
        self._sqs.close()
