"""Three processes that trust certificates only: they serve, stay three, and take new certificates while they run."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hadelay import Client
from hadelay.testing.ports import free_ports
from tests.security.conftest import Pki
from tests.system.cluster import end, ready_line, spawn, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@dataclass
class Secure:
    """n1 … n3, each with the certificate of its own in a directory of its own."""

    directory: Path
    pki: Pki
    settings: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_ports(6))
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    names: tuple[str, ...] = ("n1", "n2", "n3")

    def address(self, name: str, offset: int = 0) -> str:
        return f"127.0.0.1:{self.port + self.names.index(name) + offset}"

    @property
    def urls(self) -> list[str]:
        return [f"https://{self.address(name)}" for name in self.names]

    def client(self, token: str | None = None) -> Client:
        return Client(self.urls, token, ca=self.pki.ca)

    def write(self, name: str) -> Path:
        cert, key, ca = self.pki.copy(name, self.directory / f"{name}-tls")
        peers = "".join(f'{peer} = "{self.address(peer, 3)}"\n' for peer in self.names)
        files = f'tls_cert = "{cert}"\ntls_key = "{key}"\ntls_ca = "{ca}"\n'
        path = self.directory / f"{name}.toml"
        path.write_text(
            f'[node]\nname = "{name}"\ndata_dir = "{self.directory / name}"\n[cluster]\nid = "secure"\n'
            f'[http]\nlisten = "{self.address(name)}"\n{files}[raft]\nlisten = "{self.address(name, 3)}"\n{files}'
            f"[raft.peers]\n{peers}"
        )
        return path

    def start(self, *names: str, init: bool = False) -> None:
        words = ["-o", "json", *(["--init"] if init else [])]
        words += [word for setting in self.settings for word in ("--set", setting)]
        for name in names:
            path = self.directory / f"{name}.toml"
            self.processes[name] = spawn("serve", path, *words, errors=self.directory / f"{name}.log")
        for name in names:
            ready_line(self.processes[name], self.directory / f"{name}.log")

    def stop(self, name: str) -> None:
        end(self.processes.pop(name))

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

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
    secure = Secure(tmp_path_factory.mktemp("secure"), pki)
    with ExitStack() as stack:
        stack.callback(lambda: [end(process) for process in secure.processes.values()])
        for name in secure.names:
            secure.write(name)
        secure.start(*secure.names, init=True)
        yield secure


def test_it_serves_through_every_node(cluster: Secure) -> None:
    for url in cluster.urls:
        with Client(url, ca=cluster.pki.ca) as client:
            receipt = client.put("orders", b"x", delay="1h")
            assert client.get(receipt.id).state == "scheduled"
            assert client.cancel(receipt.id)


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
    assert "link_refused" not in cluster.log("n3")
