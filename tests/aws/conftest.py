"""The doors for AWS SDKs, asked by boto3: three real nodes for all tests of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.system.cluster import Cluster


def client(
    url: str, service: str = "sqs", path: str = "/aws/sqs", attempts: int = 1, keys: tuple[str, str] = ("any", "any")
) -> Any:
    """A client of boto3 for one node. attempts: tries of one call, the first
    included. keys: access key id and secret."""
    session = boto3.Session(*keys, region_name="hadelay")
    config = Config(retries={"total_max_attempts": attempts, "mode": "standard"}, connect_timeout=2, read_timeout=30)
    return session.client(service, endpoint_url=url + path, config=config)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def sqs(cluster: Cluster) -> Iterator[Any]:
    """A client of a node that does not lead."""
    made = client(cluster.urls[cluster.followers()[0]])
    yield made
    made.close()


@pytest.fixture
def queue(sqs: Any, request: pytest.FixtureRequest) -> Callable[..., str]:
    """queue(name="", **attributes): the URL of a new queue."""
    count = 0

    def make(name: str = "", **attributes: str) -> str:
        nonlocal count
        count += 1
        name = name or f"{request.node.name.partition('[')[0][:60]}-{count}"
        return str(sqs.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"])

    return make
