"""RabbitMQ: per-message TTL in a quorum queue that dead-letters into the queue of due messages."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from bench.delays.contender import Client, Message, Received
from bench.delays.server import OneServer, Server
from bench.peers import beside, program

_DELAY = {
    "x-queue-type": "quorum", "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "due",
    "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
}  # fmt: skip


class RabbitMq(OneServer):
    name = "rabbitmq-ttl"
    setup = (
        "RabbitMQ 3.10, one node; per-message TTL in a quorum queue, dead-lettered at least once into a quorum queue; "
        "publisher confirms, prefetch 100, manual acks"
    )
    durability = "quorum queue of one node, synced before each confirm"
    waits_in_order = True
    notes = "a queue expires messages only at its head: a message waits for all published before it, however long"
    programs = ("rabbitmq-server", "epmd")
    modules = ("pika",)

    def start(self) -> None:
        (self.directory / "enabled_plugins").write_text("[].\n")
        (self.directory / ".erlang.cookie").write_text("bench" * 4)
        (self.directory / ".erlang.cookie").chmod(0o400)
        self._own = {
            "HOME": str(self.directory), "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": "/dev/null", "RABBITMQ_CONFIG_FILE": str(self.directory / "none"),
            "RABBITMQ_NODENAME": "delays@localhost", "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port), "RABBITMQ_DIST_PORT": str(self.port + 10),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "data"), "RABBITMQ_LOG_BASE": str(self.directory / "log"),
            "ERL_EPMD_PORT": str(self.port + 20), "ERL_EPMD_ADDRESS": "127.0.0.1",
            # For machines that are shared: the schedulers of Erlang do not spin for work.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
        }  # fmt: skip
        command = [beside(program("rabbitmq-server"))]
        self._server = Server(command, self.directory, self.port, environment=self._own)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        environment = dict(os.environ, **self._own)
        # The port mapper of Erlang is a daemon on a port of its own here.
        subprocess.run([program("epmd"), "-kill"], env=environment, capture_output=True, check=False)

    def prepare(self) -> None:
        client = _Client(self)
        client.channel.queue_declare("due", durable=True, arguments={"x-queue-type": "quorum"})
        client.channel.queue_declare("delay", durable=True, arguments=_DELAY)
        client.close()

    def connect(self) -> Client:
        return _Client(self)


class _Client(Client):
    def __init__(self, contender: RabbitMq) -> None:
        import pika

        self._pika = pika
        self._connection: Any = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", contender.port))
        self.channel: Any = self._connection.channel()
        self._confirms = False
        self._consumes: Any = None

    def publish(self, messages: Sequence[Message]) -> None:
        if not self._confirms:
            self.channel.confirm_delivery()
            self._confirms = True
        for message in messages:
            ttl = max(0, int(message.due_ms - time.time() * 1000) + 1)
            properties = self._pika.BasicProperties(delivery_mode=2, expiration=str(ttl))
            self.channel.basic_publish("", "delay", message.body(), properties)

    def receive(self, most: int, wait_s: float) -> list[Received]:
        if self._consumes is None:
            self.channel.basic_qos(prefetch_count=most)
            self._consumes = self.channel.consume("due", inactivity_timeout=wait_s)
        found: list[Received] = []
        while len(found) < most and (not found or self.channel.get_waiting_message_count()):
            method, _, body = next(self._consumes)
            if method is None:
                break
            found.append(Received(body.decode().rstrip(), method.delivery_tag))
        return found

    def ack(self, received: Sequence[Received]) -> None:
        self.channel.basic_ack(received[-1].token, multiple=True)

    def close(self) -> None:
        with contextlib.suppress(self._pika.exceptions.AMQPError):
            self._connection.close()
