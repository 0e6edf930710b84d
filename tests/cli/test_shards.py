"""`hadelay shards` over two real clusters of a node each, and `--shard N`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from chaos.freeports import free_ports
from hadelay.api.text import parse_instant
from hadelay.cli import shards, shardtokens
from hadelay.cli.output import Remote
from hadelay.errors import BadRequest, ConfigError, Conflict, HadelayError, NoLeader, Unauthorized
from hadelay.rights import TOKEN_PREFIX, hash_token
from hadelay.settings.load import load
from hadelay.settings.rules import problems
from hadelay.settings.shardmap import Shard, Shards
from hadelay.testing import node as testing
from hadelay.testing.node import LocalNode

Two = tuple[LocalNode, LocalNode]


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    first, second = of_group(0), of_group(1)
    yield first, second
    second.close()
    first.close()


def of_group(group: int, *settings: str) -> LocalNode:
    """A cluster of this group number, with a port that other shards are told."""
    more = f"cluster.group={group}", f"cluster.id=c{group}", f"http.listen=127.0.0.1:{free_ports(1)}", *settings
    with patch.object(testing, "_SETTINGS", (*testing._SETTINGS, *more)):
        return LocalNode().start()


def at(node: LocalNode, output: Any = "table", token: str = "") -> Remote:
    return Remote(servers=node.url, output=output, token=token)


def test_one_cluster_becomes_two_shards(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = two
    for name in ("orders", "billing.old"):
        first.client.put(name, b"x")
    second.client.put("own", b"x")
    shards.list_(remote=at(first))
    assert "has no shard map" in capsys.readouterr().out
    shards.add(1, second.url, plan=True, remote=at(first))
    assert "would pin 1 names" in capsys.readouterr().out
    shards.add(1, second.url, remote=at(first))
    assert "Version 1 is in force in shards 0, 1. Pinned names: 1." in capsys.readouterr().out
    shards.rule("billing.*", "1", remote=at(second))
    assert "Pinned names: 2." in capsys.readouterr().out
    first.client.put("billing.old", b"x")
    second.client.put("billing.new", b"x")
    second.client.put("own", b"x")
    shards.rule("t-*", "0,1", key="number", remote=at(first))
    shards.pin("t-1", 0, remote=at(first))
    shards.apply(remote=at(second))
    capsys.readouterr()
    shards.list_(remote=at(second, "json"))
    found = json.loads(capsys.readouterr().out)
    assert (found["shard"], found["current"]["version"], found["prepared"]) == (1, 5, None)
    assert [one["pattern"] for one in found["current"]["rules"]] == ["t-*", "billing.*", "*"]
    assert found["current"]["pinned"] == {"billing.old": 0, "own": 1, "t-1": 0}
    assert found["current"]["shards"]["1"]["nodes"] == {"test": second.url}
    shards.list_(remote=at(first))
    assert "Version 5, 3 pinned names. Shard 0 answered." in capsys.readouterr().out


def test_nodes_of_other_shards_among_the_servers_are_not_asked_for_this_one(two: Two) -> None:
    first, second = two
    both = Remote(servers=f"{second.url},{first.url}")
    found = shards.Shards.named_by(both, {}).at
    assert {index: one.servers for index, one in found.items()} == {0: first.url, 1: second.url}


def test_refused_changes(two: Two) -> None:
    first, second = two
    with pytest.raises(Conflict, match="'own' exists in shard 1"):
        shards.pin("own", 0, remote=at(first))
    with pytest.raises(Conflict, match="the map has no shard 7"):
        shards.rule("x*", "7", remote=at(first))
    with pytest.raises(HadelayError, match="it is the last rule"):
        shards.rule("*", remove=True, remote=at(first))
    with pytest.raises(BadRequest, match="give the shards"):
        shards.rule("x*", remote=at(first))
    with pytest.raises((NoLeader, OSError)):
        shards.add(2, "http://127.0.0.1:1", remote=at(first))
    for node in (first, second):
        assert json_of(node)["prepared"] is None


def json_of(node: LocalNode) -> Any:
    return shards.call(at(node), "GET", "/v1/shards", needs="cluster_id")


def test_topic_in_both_clusters_ends_the_change_before_it_begins(two: Two) -> None:
    first, second = two
    version = json_of(first)["current"]["version"]
    third = of_group(2)
    third.client.put("own", b"x")
    with pytest.raises(Conflict, match=r"own \(shards 1 and 2\)"):
        shards.add(2, third.url, remote=at(first))
    assert json_of(third)["prepared"] is None
    third.close()
    assert json_of(second)["current"]["version"] == version


# ---- tokens of a shard that joins


def secret(name: str) -> str:
    return TOKEN_PREFIX + name.ljust(43, "_")


def guarded(group: int, bootstrap: str) -> LocalNode:
    return of_group(group, "security.tokens=true", f"security.bootstrap_token_hash={hash_token(bootstrap).hex()}")


def tokens_of(node: LocalNode, token: str) -> dict[str, Any]:
    found = shardtokens._tokens(at(node, token=token)).values()
    return {one["name"]: (one["hash"], one["scopes"], one["expires_at"]) for one in found}


def keys_of(node: LocalNode, token: str) -> dict[str, Any]:
    """Secret access keys of tokens, by their names."""
    return {one["name"]: one.get("aws_key") for one in shardtokens._tokens(at(node, token=token)).values()}


def made(node: LocalNode, by: str, **document: Any) -> str:
    token: str = shards.call(at(node, token=by), "POST", "/v1/tokens", document, needs="id")["token"]
    return token


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_shard_that_joins_gets_the_tokens(closing: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = guarded(0, secret("one")), guarded(1, secret("two"))
    for node in (first, second):
        closing.callback(node.close)
    admin = made(first, secret("one"), name="ops", scopes=["admin"])
    made(first, admin, name="shop", scopes=["publish:orders"], lifetime="30d")
    made(first, admin, name="sqs", scopes=["consume"], aws=True)
    key = keys_of(first, admin)["sqs"]
    with pytest.raises(Unauthorized, match=r"shard 1 does not know your token: .*HADELAY_BOOTSTRAP_TOKEN"):
        shards.add(1, second.url, remote=at(first, token=admin))
    shards.add(1, second.url, bootstrap_token=secret("two"), remote=at(first, token=admin))
    said = capsys.readouterr().err
    assert "Copied to shard 1: ops (" in said
    here, there = tokens_of(first, admin), tokens_of(second, admin)
    assert here["ops"] == there["ops"]
    assert here["shop"][:2] == there["shop"][:2]
    assert abs(parse_instant("", here["shop"][2]) - parse_instant("", there["shop"][2])) < 60_000
    assert keys_of(second, admin) == {"ops": None, "shop": None, "sqs": key}
    # A repetition copies what is new, and says what only the new shard knows.
    made(first, admin, name="later", scopes=["read"])
    own = {"name": "own", "scopes": ["read"]}
    shards.call(at(second, token=admin), "POST", "/v1/tokens?shard=1", own, needs="id")
    shards.add(1, second.url, remote=at(first, token=admin))
    said = capsys.readouterr().err
    assert "ops (" not in said
    advice = "revoke those that the other shards revoked since, and create the rest there"
    assert f"Known only to shard 1: {advice}: own (" in said
    assert tokens_of(second, admin)["later"][:2] == tokens_of(first, admin)["later"][:2]


def suspend(node: LocalNode, *, mapless: bool = False) -> None:
    """As after a restore, but with the number before."""
    had = node._node.ledger.shards
    node._node.ledger.shards = Shards(None if mapless else had.current, suspended=True)


def test_a_restored_shard_gets_the_tokens_wherever_the_command_is_sent(
    closing: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = guarded(0, secret("one")), guarded(1, secret("two"))
    for node in nodes:
        closing.callback(node.close)
    admin = made(nodes[0], secret("one"), name="ops", scopes=["admin"])
    shards.add(1, nodes[1].url, bootstrap_token=secret("two"), remote=at(nodes[0], token=admin))
    capsys.readouterr()
    for restored, asked in ((1, 0), (0, 0)):
        later = {"name": f"later-{restored}", "scopes": ["read"]}
        other = 1 - restored
        shards.call(at(nodes[other], token=admin), "POST", f"/v1/tokens?shard={other}", later, needs="id")
        suspend(nodes[restored])
        shards.apply(plan=True, remote=at(nodes[asked], token=admin))
        assert "Copied" not in capsys.readouterr().err
        shards.apply(remote=at(nodes[asked], token=admin))
        assert f"Copied to shard {restored}: later-{restored} (" in capsys.readouterr().err
        assert not nodes[restored]._node.ledger.shards.suspended


def test_a_restored_shard_without_a_map_begins_none(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    third = of_group(3)
    suspend(third, mapless=True)
    shards.list_(remote=at(third))
    assert "was restored, and creates no topics" in capsys.readouterr().out
    for change in (shards.apply, partial(shards.add, 1, two[1].url)):
        with pytest.raises(
            Conflict, match="restored from a backup without a shard map: run `hadelay shards apply --at"
        ):
            change(remote=at(third))
    assert third._node.ledger.shards.current is None
    third.close()


def test_a_restored_shard_says_that_its_number_is_in_no_map(two: Two, capsys: pytest.CaptureFixture[str]) -> None:
    known = two[1]._node.ledger.shards
    assert known.current is not None
    old = replace(known.current, shards={**known.current.shards, 1: Shard(9, (8,))})
    two[1]._node.ledger.shards = Shards(old, suspended=True)
    shards.list_(remote=at(two[1]))
    said = capsys.readouterr().out
    assert "Cluster c1 answered, whose group number 1 is not in this map." in said
    assert "run `hadelay shards apply --at N=URL` at another shard" in said
    assert "former" in said
    two[1]._node.ledger.shards = known


def test_own_token_may_be_the_bootstrap_token_of_a_shard_that_joins(closing: ExitStack) -> None:
    first = guarded(0, secret("one"))
    closing.callback(first.close)
    admin = made(first, secret("one"), name="ops", scopes=["admin"])
    second = guarded(1, admin)
    closing.callback(second.close)
    shards.add(1, second.url, remote=at(first, token=admin))
    assert tokens_of(second, admin) == tokens_of(first, admin)


def test_no_token_goes_from_https_to_http(two: Two) -> None:
    remote = Remote(servers="https://n1.example:8400", token=secret("one"))
    assert shards._allowed(remote, 1, ["http://n4:1", "https://n5:1"]) == ["https://n5:1"]
    with pytest.raises(BadRequest, match="only unencrypted addresses"):
        shards._allowed(remote, 1, ["http://n4:1"])
    known, seen = json_of(two[0]), list[str]()

    def answer(at: Remote, *_: Any, **__: Any) -> Any:
        seen.append(at.servers)
        return known

    with patch.object(shards, "call", answer), pytest.raises(BadRequest, match="no token is sent there"):
        shards.add(1, "http://n4:1", remote=remote)
    assert seen == ["https://n1.example:8400"]


# ---- --shard N

FILE = """
[node]
name = "n2"
data_dir = "/data"
journal_dir = "/fast"
[cluster]
id = "prod"
[http]
listen = "0.0.0.0:8400"
advertise = "https://n2.example:8400"
tls_cert = "c"
tls_key = "k"
[security]
insecure = true
[raft]
listen = "0.0.0.0:8500"
[raft.peers]
n1 = "n1.example:8500"
n2 = "n2.example:8500"
n3 = "n3.example:8500"
"""


def test_shard_of_a_configuration_has_its_own_group_ports_and_directories(tmp_path: Path) -> None:
    path = tmp_path / "n.toml"
    path.write_text(FILE)
    config = load(str(path), {"HADELAY_LOG__LEVEL": "debug"}, ["raft.listen=0.0.0.0:9999"], shard=3)
    assert (config.cluster.id, config.cluster.group) == ("prod-s3", 3)
    assert (config.node.data_dir, config.journal_dir) == ("/data/s3", "/fast/s3")
    assert (config.http.listen, config.http.advertise) == ("0.0.0.0:8403", "https://n2.example:8403")
    assert config.members == {f"n{n}": f"n{n}.example:8503" for n in (1, 2, 3)}
    # Options override what the index gives.
    assert config.raft.listen == "0.0.0.0:9999"
    assert load(str(path), shard=0) == load(str(path))


def test_shard_of_the_defaults() -> None:
    config = load(shard=1)
    assert (config.http.listen, config.raft.listen) == ("127.0.0.1:8401", "127.0.0.1:8501")
    assert (config.cluster.id, config.node.data_dir) == ("hadelay-s1", "hadelay-data/s1")
    assert list(problems(config)) == []
    assert load(None, {}, ["http.listen=127.0.0.1:0"], shard=1).http.listen == "127.0.0.1:0"


@pytest.mark.parametrize("shard", [-1, 128])
def test_index_beyond_the_limit_is_refused(shard: int) -> None:
    with pytest.raises(ConfigError, match="0 to 127"):
        load(shard=shard)


def test_address_without_a_port_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "n.toml"
    path.write_text('[http]\nadvertise = "https://n2.example"\n')
    with pytest.raises(ConfigError, match="the address needs a port"):
        load(str(path), shard=1)
