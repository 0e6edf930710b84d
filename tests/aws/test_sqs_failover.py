"""SQS through a killed leader: the retries of the SDK lose nothing, store nothing twice, and nothing comes early."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.aws.conftest import client
from tests.system.cluster import Cluster, until

COUNT, SENDERS = 200, 8


def test_two_hundred_delayed_messages_through_a_killed_leader(tmp_path: Path) -> None:
    with Cluster(tmp_path / "c") as cluster:
        leader = cluster.leader()
        followers = [client(cluster.urls[name], attempts=8) for name in cluster.followers()]
        url = followers[0].create_queue(QueueName="orders", Attributes={"VisibilityTimeout": "120"})["QueueUrl"]
        due: dict[str, float] = {}

        def send(n: int) -> None:
            delay_s = n % 4
            asked = time.time()
            followers[n % 2].send_message(QueueUrl=url, MessageBody=str(n), DelaySeconds=delay_s)
            due[str(n)] = asked + delay_s

        with ThreadPoolExecutor(SENDERS) as pool:
            sending = [pool.submit(send, n) for n in range(COUNT)]
            until(lambda: len(due) >= COUNT // 4, "a quarter is sent")
            cluster.kill(leader)
            for one in sending:
                one.result(60)
        got = Counter[str]()

        def drain() -> bool:
            for message in received(followers[0], url):
                assert time.time() >= due[message["Body"]] - 0.001, "a message is early"
                got[message["Body"]] += 1
                followers[1].delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
            return len(got) == COUNT

        until(drain, f"all {COUNT} messages")
        assert not received(followers[1], url), "no message is left"
        assert set(got.values()) == {1}, "no message was sent or received twice"
        for one in followers:
            one.close()


def received(sqs: Any, url: str) -> list[Any]:
    return list(sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=1).get("Messages", []))
