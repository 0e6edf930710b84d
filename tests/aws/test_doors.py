"""Where the doors are, who may pass, and that a node refuses what is no request of an SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from botocore.exceptions import ClientError

from chaos.freeports import free_ports
from tests.aws.conftest import client
from tests.system.cluster import Cluster, ask

TOKEN = "hadelay_" + "b" * 43


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    """(a node that requires tokens, address of the port that serves the doors alone)"""
    from hadelay.rights import hash_token

    port = free_ports(1)
    settings = (
        "security.tokens=true", f"security.bootstrap_token_hash={hash_token(TOKEN).hex()}",
        f"http.aws_listen=127.0.0.1:{port}",
    )  # fmt: skip
    with Cluster(tmp_path_factory.mktemp("guarded"), nodes=1, settings=settings) as running:
        yield running, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def make_token(guarded: tuple[Cluster, str]) -> Callable[..., Any]:
    """make_token(*scopes): a new token with keys for SDKs."""
    cluster, _ = guarded

    def create(by: str, *scopes: str) -> Any:
        document = {"name": "door", "scopes": list(scopes), "aws": True}
        answer = cluster.ask("n1", "POST", "/v1/tokens", document, headers={"Authorization": f"Bearer {by}"})
        assert answer.status == 201, answer
        return answer.json

    root = create(TOKEN, "admin")["token"]
    return partial(create, root)


def test_keys_have_the_rights_of_their_token(guarded: tuple[Cluster, str], make_token: Callable[..., Any]) -> None:
    cluster, _ = guarded
    admin, some = make_token("admin"), make_token("publish:orders")
    url = cluster.urls["n1"]
    with closing(client(url, keys=(admin["id"], admin["aws_secret"]))) as sqs:
        orders = sqs.create_queue(QueueName="orders")["QueueUrl"]
        other = sqs.create_queue(QueueName="other")["QueueUrl"]
    with closing(client(url, keys=(some["id"], some["aws_secret"]))) as sqs:
        sqs.send_message(QueueUrl=orders, MessageBody="x")
        assert sqs.list_queues()["QueueUrls"] == [orders]
        for call, options in (
            (sqs.receive_message, {"QueueUrl": orders}), (sqs.send_message, {"QueueUrl": other, "MessageBody": "x"}),
            (sqs.delete_queue, {"QueueUrl": orders}), (sqs.create_queue, {"QueueName": "third"}),
            (sqs.get_queue_url, {"QueueName": "other"}),
        ):  # fmt: skip
            with pytest.raises(ClientError) as refused:
                call(**options)
            assert refused.value.response["Error"]["Code"] == "AccessDeniedException"
    with closing(client(url, keys=(some["id"], "wrong"))) as sqs, pytest.raises(ClientError) as refused:
        sqs.send_message(QueueUrl=orders, MessageBody="x")
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_messages_go_back_by_a_right_to_send_anywhere(
    guarded: tuple[Cluster, str], make_token: Callable[..., Any]
) -> None:
    """Without a DestinationArn, messages go back to whatever queues they died in."""
    cluster, _ = guarded
    url, arn = cluster.urls["n1"], "arn:aws:sqs:hadelay:000000000000:"
    admin, clerk = make_token("admin"), make_token("admin:moving-dead", "publish:moving-one")
    with closing(client(url, keys=(admin["id"], admin["aws_secret"]))) as sqs:
        sqs.create_queue(QueueName="moving-dead")
        policy = f'{{"deadLetterTargetArn": "{arn}moving-dead", "maxReceiveCount": 1}}'
        for name in ("moving-one", "moving-other"):
            sqs.create_queue(QueueName=name, Attributes={"RedrivePolicy": policy})
    with closing(client(url, keys=(clerk["id"], clerk["aws_secret"]))) as sqs:
        for options, named in (({}, "name one with DestinationArn"), ({"DestinationArn": f"{arn}moving-other"}, "")):
            with pytest.raises(ClientError) as refused:
                sqs.start_message_move_task(SourceArn=f"{arn}moving-dead", **options)
            error = refused.value.response["Error"]
            assert error["Code"] == "AccessDeniedException"
            assert named in error["Message"]
        one = {"SourceArn": f"{arn}moving-dead", "DestinationArn": f"{arn}moving-one"}
        assert "TaskHandle" in sqs.start_message_move_task(**one)


def test_port_of_their_own_serves_nothing_else(guarded: tuple[Cluster, str], make_token: Callable[..., Any]) -> None:
    _, alone = guarded
    admin = make_token("admin")
    for path in ("", "/aws/sqs"):
        with closing(client(alone, path=path, keys=(admin["id"], admin["aws_secret"]))) as sqs:
            assert sqs.create_queue(QueueName="alone")["QueueUrl"] == f"{alone}/000000000000/alone"
    assert ask(alone, "GET", "/livez").status == 200
    for path in ("/v1/topics", "/metrics", "/console/", "/openapi.json"):
        assert ask(alone, "GET", path, headers={"Authorization": f"Bearer {admin['token']}"}).status == 404


def test_a_node_has_no_doors_unless_it_is_asked_to(tmp_path: Any) -> None:
    with Cluster(tmp_path / "c", nodes=1, settings=("http.aws=false",)) as cluster:
        answer = cluster.ask("n1", "POST", "/aws/sqs", b"{}", headers={"X-Amz-Target": "AmazonSQS.ListQueues"})
        assert answer.status == 404
