"""Three processes that trust certificates and tokens only: the first token, who is refused, what changes meanwhile."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError

import hadelay.celery
from chaos.freeports import free_ports
from hadelay import Client
from hadelay.errors import Forbidden, Unauthorized
from tests.cli.support import hadelay
from tests.security.conftest import Pki
from tests.system.cluster import end, ready_line, spawn, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
#: From the port that answers clients to the one for nodes.
RAFT = 5


@dataclass
class Secure:
    """n1 … n3, each with the certificate of its own in a directory of its own."""

    directory: Path
    pki: Pki
    settings: tuple[str, ...] = ()
    #: With the scope admin.
    token: str = ""
    port: int = field(default_factory=lambda: free_ports(10))
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    names: tuple[str, ...] = ("n1", "n2", "n3")

    def address(self, name: str, offset: int = 0) -> str:
        return f"127.0.0.1:{self.port + int(name[1:]) - 1 + offset}"

    @property
    def urls(self) -> list[str]:
        return [f"https://{self.address(name)}" for name in self.names]

    def client(self, token: str | None = None, *names: str) -> Client:
        urls = [f"https://{self.address(name)}" for name in names] or self.urls
        return Client(urls, self.token if token is None else token, ca=self.pki.ca, timeout=20)

    def run(self, *words: object, token: str | None = None) -> subprocess.CompletedProcess[str]:
        """A command, as an administrator types it; JSON."""
        variables = {"SSL_CERT_FILE": self.pki.ca, "HADELAY_SERVERS": ",".join(self.urls)}
        return hadelay(*words, "-o", "json", HADELAY_TOKEN=self.token if token is None else token, **variables)

    def made(self, *words: str, token: str | None = None) -> dict[str, str]:
        done = self.run("token", "create", *words, token=token)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def write(self, name: str, at: str = "") -> Path:
        """at: another name, whose file, directory and addresses it gets."""
        at = at or name
        cert, key, ca = self.pki.copy(name, self.directory / f"{at}-tls")
        peers = {peer: self.address(peer, RAFT) for peer in self.names} | {name: self.address(at, RAFT)}
        files = f'tls_cert = "{cert}"\ntls_key = "{key}"\ntls_ca = "{ca}"\n'
        path = self.directory / f"{at}.toml"
        path.write_text(
            f'[node]\nname = "{name}"\ndata_dir = "{self.directory / at}"\n[cluster]\nid = "secure"\n'
            f'[http]\nlisten = "{self.address(at)}"\n{files}[raft]\nlisten = "{self.address(at, RAFT)}"\n{files}'
            "[raft.peers]\n" + "".join(f'{peer} = "{address}"\n' for peer, address in peers.items())
        )
        return path

    def spawn(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Ready when it says so."""
        words += tuple(word for setting in self.settings for word in ("--set", setting))
        path, errors = self.directory / f"{name}.toml", self.directory / f"{name}.log"
        self.processes[name] = spawn("serve", path, "-o", "json", *words, errors=errors)
        return self.processes[name]

    def start(self, *names: str, init: bool = False) -> None:
        for name in names:
            self.spawn(name, *(["--init"] if init else []))
        for name in names:
            ready_line(self.processes[name], self.directory / f"{name}.log")

    def stop(self, name: str) -> None:
        end(self.processes.pop(name))

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def ready(self, name: str) -> bool:
        """Asked without a token."""
        context = ssl.create_default_context(cafile=self.pki.ca)
        try:
            return bool(urlopen(f"https://{self.address(name)}/readyz", timeout=10, context=context).status == 200)
        except HTTPError:
            return False

    def serial(self, name: str) -> str:
        """Of the certificate that it shows to a client that connects now."""
        host, _, port = self.address(name).partition(":")
        context = ssl.create_default_context(cafile=self.pki.ca)
        with (
            socket.create_connection((host, int(port))) as sock,
            context.wrap_socket(sock, server_hostname=host) as tls,
        ):
            return str((tls.getpeercert() or {})["serialNumber"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, pki: Pki) -> Iterator[Secure]:
    first = json.loads(hadelay("token", "bootstrap", "-o", "json").stdout)
    settings = ("security.tokens=true", f"security.bootstrap_token_hash={first['security.bootstrap_token_hash']}")
    secure = Secure(tmp_path_factory.mktemp("secure"), pki, settings)
    with ExitStack() as stack:
        stack.callback(lambda: [end(process) for process in secure.processes.values()])
        for name in secure.names:
            secure.write(name)
        secure.start(*secure.names, init=True)
        secure.token = secure.made("ops", "--scope", "admin", token=first["token"])["token"]
        spent = secure.run("token", "create", "me", "--scope", "admin", token=first["token"])
        assert spent.returncode == 4, spent
        assert "the bootstrap token is no longer valid" in spent.stderr
        yield secure


def test_nobody_gets_in_without_a_token(cluster: Secure) -> None:
    done = cluster.run("topic", "list", token="")
    assert (done.returncode, "requires a token" in done.stderr) == (4, True)
    done = cluster.run("topic", "list", token=cluster.token[:-1])
    assert (done.returncode, "43 characters" in done.stderr) == (4, True)
    assert cluster.run("check", "replicas").returncode == 0


def test_a_token_is_rotated_and_the_old_one_refused_by_every_node(cluster: Secure) -> None:
    old = cluster.made("shop", "--scope", "publish:orders-*", "--scope", "consume:orders-*")
    new = cluster.made("shop", "--scope", "publish:orders-*", "--scope", "consume:orders-*", "--lifetime", "1h")
    for name in cluster.names:
        for made in (old, new):
            with cluster.client(made["token"], name) as client:
                until(lambda client=client: _accepted(client), f"{name} knows {made['id']}")  # type: ignore[misc]
                with pytest.raises(Forbidden, match="no scope publish for topic 'refunds'"):
                    client.put("refunds", b"x")
    with cluster.client(new["token"]) as client:
        leased = client.receive("orders-eu", max=1, wait=5)
        assert [client.ack(message) for message in leased]
    with cluster.client(old["token"]) as client:
        message_id = client.put("orders-eu", b"x", delay="1h").id
    stranger = cluster.made("other", "--scope", "publish:refunds", "--scope", "consume:refunds")
    with cluster.client(stranger["token"]) as client:
        until(lambda: _known(client), "the other token is known")
        with pytest.raises(Forbidden):
            client.cancel(message_id)
        with pytest.raises(Forbidden, match="consume"):
            client.ack(leased)
    assert cluster.run("token", "revoke", old["id"]).returncode == 0
    for name in cluster.names:
        with cluster.client(old["token"], name) as client:
            until(lambda client=client: not _accepted(client), f"{name} refuses it")  # type: ignore[misc]
        with cluster.client(new["token"], name) as client:
            assert _accepted(client)


def test_celery_with_a_token_for_its_topics(cluster: Secure) -> None:
    scopes = [word for verb in ("publish", "consume", "read") for word in ("--scope", f"{verb}:shop.*")]
    token = cluster.made("celery", *scopes)["token"]
    hosts = ",".join(url.removeprefix("https://") for url in cluster.urls)
    with Connection(f"hadelays://:{token}@{hosts}/shop?ca={cluster.pki.ca}") as connection:
        queue = until(lambda: _connected(connection) and connection.SimpleQueue("celery"), "the token is known")
        queue.put("hello")
        message = queue.get(timeout=20)
        assert message.payload == "hello"
        message.ack()
        queue.close()
    wrong = Connection(f"hadelay://:{token[:-1]}@{hosts}/shop", ssl={"ca_certs": cluster.pki.ca})
    with wrong, pytest.raises(OperationalError, match="token"):
        wrong.ensure_connection(max_retries=1)


def _connected(connection: Connection) -> bool:
    with contextlib.suppress(OperationalError):
        return bool(connection.ensure_connection(max_retries=1))
    return False


def _accepted(client: Client) -> bool:
    try:
        return bool(client.put("orders-eu", b"x"))
    except Unauthorized:
        return False


def _known(client: Client) -> bool:
    try:
        return bool(client.put("refunds", b"x", delay="1h"))
    except Unauthorized:
        return False


def test_the_audit_trail_survives_all_of_them(cluster: Secure) -> None:
    for words in (
        ("topic", "set", "audited", "--lease", "1m"),
        ("topic", "pause", "audited"),
        ("topic", "delete", "audited", "--force", "--yes"),
        ("topic", "delete", "audited", "--yes"),
    ):
        cluster.run(*words)

    def trail() -> list[tuple[str, str, str, str]]:
        done = cluster.run("cluster", "audit")
        assert done.returncode == 0, done.stderr
        entries = json.loads(done.stdout)
        assert [entry["number"] for entry in entries] == list(range(1, len(entries) + 1))
        return [(e["token"], e["action"], e["target"].partition(":")[0], e["outcome"]) for e in entries]

    before = trail()
    assert before[0][:2] == ("bootstrap", "token.create")
    assert before[-4:] == [
        ("ops", "topic.set", "audited", "done"),
        ("ops", "topic.pause", "audited", "done"),
        ("ops", "topic.delete", "audited", "done"),
        ("ops", "topic.delete", "audited", "no_topic"),
    ]
    for name in cluster.names:
        cluster.stop(name)
    cluster.start(*cluster.names)
    until(lambda: trail() == before, "the same after a restart of all")


def test_a_secured_cluster_serves_through_every_node(cluster: Secure) -> None:
    for url in cluster.urls:
        with Client(url, cluster.token, ca=cluster.pki.ca) as client:
            receipt = client.put("orders", b"x", delay="1h")
            assert client.get(receipt.id).state == "scheduled"
            assert client.cancel(receipt.id)


def test_a_node_that_knew_the_tokens_knows_them_without_a_leader(cluster: Secure) -> None:
    """Nobody has shown a token to n3 since it started; it has been up to date, and now it cannot be."""
    cluster.stop("n3")
    cluster.start("n3")
    others = [cluster.processes[name] for name in ("n1", "n2")]
    try:
        for process in others:
            process.send_signal(signal.SIGSTOP)
        until(lambda: not cluster.ready("n3"), "n3 knows of no leader")
        with Client(cluster.urls[2], cluster.token, ca=cluster.pki.ca, timeout=5) as client:
            assert client.cluster(stale=True).leader is None
    finally:
        for process in others:
            process.send_signal(signal.SIGCONT)
    with cluster.client() as client:
        assert client.put("orders", b"x", delay="1h")


def test_an_impostor_is_refused_and_the_others_go_on(cluster: Secure) -> None:
    """n3's certificate and key, in the hands of a process that says that it is n2."""
    cluster.stop("n2")
    for path, kind in zip(cluster.pki.files("n3"), ("cert.pem", "cert.key"), strict=False):
        shutil.copy(path, cluster.directory / "n2-tls" / kind)
    impostor = spawn("serve", cluster.directory / "n2.toml", "-o", "json", errors=cluster.directory / "n2.log")
    try:
        words = "n2 shows a certificate that names localhost, n3"
        until(lambda: words in cluster.log("n1") and words in cluster.log("n2"), "both say why")
        with cluster.client() as client:
            assert client.put("orders", b"x")
    finally:
        end(impostor)
    cluster.write("n2")
    cluster.start("n2")


def test_new_certificates_without_a_restart(cluster: Secure) -> None:
    before = {name: cluster.serial(name) for name in cluster.names}
    for name in cluster.names:
        cluster.pki.make(name)
        cluster.pki.copy(name, cluster.directory / f"{name}-tls")
        cluster.processes[name].send_signal(signal.SIGHUP)
        until(lambda name=name: cluster.serial(name) != before[name], f"{name} shows its new one")  # type: ignore[misc]
    cluster.stop("n3")
    cluster.start("n3")
    with cluster.client() as client:
        assert client.put("orders", b"x")
    since = cluster.log("n3").rpartition("certificate_read")[2]
    assert "link_refused" not in since
    reported = [line for line in since.splitlines() if "certificate_expires" in line]
    assert len(reported) == 3, "two days are little: told when the last of them was read, and of both at the start"


def test_a_node_is_added_and_removed_while_it_runs(cluster: Secure) -> None:
    cluster.write("n4")
    joining = cluster.spawn("n4")
    added = cluster.run("cluster", "members", "add", "n4", cluster.address("n4", RAFT), "--wait")
    assert added.returncode == 0, added.stderr
    ready_line(joining, cluster.directory / "n4.log")
    with cluster.client(cluster.token, "n4") as client:
        message = client.put("orders", b"x", delay="1h")
        assert client.get(message.id).state == "scheduled"
    assert cluster.run("check", "replicas").returncode == 0
    removed = cluster.run("cluster", "members", "remove", "n4")
    assert removed.returncode == 0, removed.stderr
    cluster.stop("n4")
    with cluster.client() as client:
        assert client.cancel(message.id)


def test_two_nodes_with_one_name(cluster: Secure) -> None:
    """A second n2, with a certificate as good as that of the first: one of them is told, and stays out."""
    cluster.write("n2", at="n5")
    cluster.spawn("n5")
    words = "is linked with another n2, at 127.0.0.1: two nodes must not share a name"
    until(lambda: any(words in cluster.log(name) for name in ("n2", "n5")), "one of them is told")
    with cluster.client() as client:
        assert client.put("orders", b"x", delay="1h")
    cluster.stop("n5")
    until(lambda: cluster.run("check", "replicas").returncode == 0, "the first is back")
