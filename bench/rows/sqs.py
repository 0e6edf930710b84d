"""The door for AWS SDKs: send, receive and delete by a C client and by boto3, beside the native routes and moto."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench import peers
from bench.cluster import Cluster, Void, get
from bench.delays import field
from bench.result import Row, Setup, Target
from bench.rows.publish import SECONDS, WARM_S, ours
from bench.wrk_run import Figures, Missing, wrk

_URL = "http://bench/000000000000/bench"
#: Number of connections of the C client that receives and settles, and of threads that share one client of boto3.
_DRAINERS, _THREADS = 64, 8
_BATCH = 1_000


def sqs(setup: Setup) -> list[Row]:
    row = Row(
        "sqs",
        "SendMessage of 200 bytes, 256 connections; ten received and deleted at a time, 64 connections; by boto3, too",
        [
            Target("send against native", 0.6, 0.8),
            Target("drain against native", 0.6, 0.8),
            Target("boto3 send against moto", 1),
            Target("boto3 drain against moto", 1),
        ],
    )
    for _ in setup.each_round("sqs"):
        row.add("native send", ours(setup, "publish", 256).rate, "/s")
        sent = _sent(setup)
        row.add("send", sent.rate, "/s")
        row.add("send p99", sent.p99, "ms")
        for api, figure in (("native", "native drain"), ("sqs", "drain")):
            row.add(figure, _drained(setup, api), "msg/s")
        with setup.cluster() as cluster:
            cluster.put_topic("bench")
            for figure, value in _boto3(setup, f"{cluster.leader().http}/aws/sqs").items():
                row.add(f"boto3 {figure}", value, "msg/s")
        with contextlib.suppress(Missing), _moto(setup) as url:
            for figure, value in _boto3(setup, url).items():
                row.add(f"moto {figure}", value, "msg/s")
    row.ratio("send against native", "send", "native send")
    row.ratio("drain against native", "drain", "native drain")
    for figure in ("send", "drain"):
        row.ratio(f"boto3 {figure} against moto", f"boto3 {figure}", f"moto {figure}")
    if "moto send" not in row.samples:
        row.notes.append("moto is not installed (python -m bench delays --install)")
    return [row]


def _sent(setup: Setup) -> Figures:
    with setup.cluster() as cluster:
        cluster.put_topic("bench")
        url, connections = cluster.leader().http, 256
        warm = wrk(url, "sqs", connections, WARM_S, BENCH_QUEUE=_URL)
        run = wrk(url, "sqs", connections, setup.seconds(SECONDS), BENCH_QUEUE=_URL)
        good = warm.requests - warm.status + run.requests - run.status
        cluster.account(["bench"], good, 0, unsure=2 * connections)
        if run.bad:
            setup.say(f"  {run.bad} of {run.requests} answers were not 2xx")
        return run


def _drained(setup: Setup, api: str) -> float:
    """Messages that are received and settled per second. The queue has more than can be settled in the time."""
    with setup.cluster() as cluster:
        url, count = cluster.leader().http, setup.many(400_000, 80_000)
        _fill(cluster, count)
        run = wrk(url, "drain", _DRAINERS, setup.seconds(5), BENCH_API=api, BENCH_QUEUE=_URL)
        cluster.settle()
        left = cluster.pending(cluster.leader(), ["bench"])
        if not left:
            raise Void(f"{api}: the queue of {count} messages is empty: nobody knows since when")
        return (count - left) / run.seconds


def _fill(cluster: Cluster, count: int) -> None:
    cluster.put_topic("bench", backoff=[0])
    body = json.dumps([{"topic": "bench", "body": "0123456789" * 20}] * _BATCH).encode()
    url = f"{cluster.leader().http}/v1/messages:batch"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: get(url, body=body), range(count // _BATCH)))


def _boto3(setup: Setup, url: str) -> dict[str, float]:
    """Messages per second by one client of boto3 in some threads: sent one by one, and received and deleted in tens."""
    client = _client(url)
    queue = client.create_queue(QueueName="boto3")["QueueUrl"]
    count = setup.many(1_000, 600)  # more keep moto busy for minutes: it looks at all messages for each receive
    with ThreadPoolExecutor(_THREADS) as pool:
        began = time.monotonic()
        list(pool.map(lambda n: client.send_message(QueueUrl=queue, MessageBody=f"{n} " * 40), range(count)))
        sent_s = time.monotonic() - began
        began = time.monotonic()
        settled = sum(pool.map(lambda _: _settle(client, queue, count // _THREADS), range(_THREADS)))
        drained_s = time.monotonic() - began
    return {"send": count / sent_s, "drain": settled / drained_s}


def _settle(client: Any, queue: str, count: int) -> int:
    """Receive and delete about this number of messages; returns their number."""
    done = empty = 0
    while done < count and empty < 3:
        got = client.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages", [])
        empty = 0 if got else empty + 1
        entries = [{"Id": f"{n}", "ReceiptHandle": one["ReceiptHandle"]} for n, one in enumerate(got)]
        if entries:
            done += len(client.delete_message_batch(QueueUrl=queue, Entries=entries)["Successful"])
    return done


def _client(url: str) -> Any:
    if importlib.util.find_spec("boto3") is None:
        raise Missing("boto3 is not installed")
    import boto3
    from botocore.config import Config

    session = boto3.Session("any", "any", region_name="us-east-1")
    return session.client("sqs", endpoint_url=url, config=Config(max_pool_connections=_THREADS))


@contextlib.contextmanager
def _moto(setup: Setup) -> Iterator[str]:
    if not field.has_module("moto"):
        raise Missing("moto is not installed")
    port, directory = setup.port + 300, peers.fresh(setup.directory / "moto")
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
    with peers.running([command], directory, field.environment()):
        peers.wait_port(port)
        yield f"http://127.0.0.1:{port}"
