"""docs/howto/behind-a-proxy.md: its files, with a real nginx and a real HAProxy in front of three nodes."""

from __future__ import annotations

import re
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from chaos.freeports import free_ports
from hadelay import Client
from hadelay.cli.app import OK, run
from hadelay.cli.certs import make_authority, make_certificate
from tests.system.cluster import Cluster, until

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/howto/behind-a-proxy.md").read_text()
BLOCKS = re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL)
NAME = "queue.example.com"


def block(words: str) -> str:
    (found,) = (text for text in BLOCKS if words in text)
    return found


def program(name: str) -> str:
    """Debian has both in /usr/sbin, which may not be in PATH."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install {name}")
    return found


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    make_authority(directory)
    make_certificate(directory, "queue", ("127.0.0.1", "localhost", NAME), 2)
    (directory / "both.pem").write_text((directory / "queue.pem").read_text() + (directory / "queue.key").read_text())
    return directory


def files(kind: str, pki: Path, port: int, urls: list[str], directory: Path, *, tls: bool) -> list[str]:
    """Write the page's files of a proxy, for these nodes and this port; the command that runs the proxy."""
    if kind == "nginx":
        text = block("upstream hadelay {")
        if tls:
            text = text.replace("proxy_pass http:", "proxy_pass https:")
            text = text.replace("proxy_http_version", block("proxy_ssl_verify") + "    proxy_http_version")
        text = (
            f"pid {directory}/pid;\ndaemon off;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{text}}}\n"
        )
        text = re.sub(r"http \{", "http {\n" + "".join(f"{one}_temp_path {directory}/{one};\n" for one in (
            "client_body", "proxy", "fastcgi", "uwsgi", "scgi")), text, count=1)  # fmt: skip
        command = [program("nginx"), "-e", "stderr", "-c", str(directory / "proxy.conf")]
    else:
        text = block("frontend queue")
        if tls:
            text = text.replace("rise 1", "rise 1 " + block("verifyhost").strip())
        command = [program("haproxy"), "-db", "-f", str(directory / "proxy.conf")]
    for number, url in enumerate(urls, 1):
        text = text.replace(f"10.0.0.{number}:8400", urlsplit(url).netloc)
    text = re.sub(
        r"listen 443|bind :443", lambda found: found[0].replace(":443", "443").replace("443", f"127.0.0.1:{port}"), text
    )
    text = text.replace("/etc/nginx/queue", f"{pki}/queue").replace("/etc/haproxy/queue.pem", f"{pki}/both.pem")
    text = re.sub(r"/etc/(nginx|haproxy)/ca.pem", f"{pki}/ca.pem", text)
    (directory / "proxy.conf").write_text(text)
    return command


@contextmanager
def proxy(kind: str, pki: Path, urls: list[str], directory: Path, *, tls: bool = False) -> Iterator[str]:
    """A running proxy; its URL."""
    port = free_ports(1)
    directory.mkdir()
    command = files(kind, pki, port, urls, directory, tls=tls)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"https://localhost:{port}"
    try:

        def serves() -> bool:
            assert process.poll() is None, (directory / "log").read_text()
            try:
                return asked(url, pki, "GET", "/readyz")[0] == 200
            except OSError:
                return False

        until(serves, f"{kind} serves")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@contextmanager
def answered(url: str, pki: Path, method: str, path: str, body: bytes | None, **headers: str) -> Iterator[Any]:
    """An answer whose body is still to be read."""
    context = ssl.create_default_context(cafile=str(pki / "ca.pem"))
    with closing(HTTPSConnection("localhost", urlsplit(url).port, timeout=30, context=context)) as connection:
        connection.request(method, path, body, {"Host": NAME} | {k.replace("_", "-"): v for k, v in headers.items()})
        with connection.getresponse() as answer:
            yield answer


def asked(url: str, pki: Path, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
    with answered(url, pki, method, path, body, **headers) as answer:
        return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    for name in ("nginx", "haproxy"):
        program(name)
    with Cluster(tmp_path_factory.mktemp("nodes"), settings=(f"http.hosts={NAME}",)) as running:
        yield running


@pytest.mark.parametrize("kind", ["nginx", "haproxy"])
def test_clients_and_the_console(
    kind: str, nodes: Cluster, pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    with proxy(kind, pki, [nodes.urls[name] for name in nodes.names], tmp_path / kind) as url:
        topic = f"of-{kind}"
        for n in range(7):  # each client begins at another node
            with Client(url, ca=str(pki / "ca.pem"), timeout=20) as client:
                client.put(topic, {"n": n}, delay="500ms")
                (message,) = client.receive(topic, wait="20s")  # a poll that waits, at the leader or relayed
                assert (message.json(), message.ack()) == ({"n": n}, "acked")
        monkeypatch.setenv("SSL_CERT_FILE", str(pki / "ca.pem"))
        assert run(["msg", "put", topic, "x", "--servers", url]) == OK
        assert run(["msg", "receive", topic, "--wait", "5s", "--servers", url]) == OK
        # A form of the console, as a browser sends it: by https, and, without Sec-Fetch-Site, with Origin and Host.
        _, page = asked(url, pki, "GET", "/console/topics", Accept="text/html")
        for headers in ({"Sec_Fetch_Site": "same-origin"}, {"Origin": f"https://{NAME}"}):
            assert asked(url, pki, "PUT", f"/v1/topics/{topic}", b"{}", **headers)[0] == 200
        assert asked(url, pki, "PUT", f"/v1/topics/{topic}", b"{}", Origin="https://evil.example")[0] == 403
        assert "<html" in page
        with answered(url, pki, "GET", "/console/live/overview", None, Accept="text/event-stream") as stream:
            assert stream.headers["Content-Type"].startswith("text/event-stream")
            assert stream.readline(), "the first event comes at once: nothing is buffered"


@pytest.mark.parametrize("kind", ["nginx", "haproxy"])
def test_nodes_that_serve_https(kind: str, pki: Path, tmp_path: Path) -> None:
    program(kind)
    settings = (
        f"http.tls_cert={pki}/queue.pem",
        f"http.tls_key={pki}/queue.key",
        f"http.tls_ca={pki}/ca.pem",
        f"http.hosts={NAME}",
    )
    with Cluster(tmp_path / "nodes", nodes=1, settings=settings) as running, proxy(
        kind, pki, [*running.urls.values()] * 3, tmp_path / kind, tls=True
    ) as url, Client(url, ca=str(pki / "ca.pem"), timeout=20) as client:  # fmt: skip
        client.put("t", "x")
        (message,) = client.receive("t", wait="10s")
        assert message.ack() == "acked"


def test_a_node_that_fails_is_left_out(nodes: Cluster, pki: Path, tmp_path: Path) -> None:
    """Last: it kills a node."""
    urls = [nodes.urls[name] for name in nodes.names]
    with (
        proxy("nginx", pki, urls, tmp_path / "nginx") as first,
        proxy("haproxy", pki, urls, tmp_path / "haproxy") as second,
    ):
        nodes.kill(nodes.followers()[0])
        for url in (first, second) * 3:
            with Client(url, ca=str(pki / "ca.pem"), timeout=20) as client:
                client.put("left", "x")
                (message,) = client.receive("left", wait="10s")
                message.ack()


def test_a_path_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="not served under a path"):
        Client("https://example.com/hadelay")


def test_the_files_for_traefik_and_kubernetes_name_what_there_is() -> None:
    """They are read, and not run."""
    traefik = yaml.safe_load(block("passHostHeader"))["http"]["services"]["hadelay"]["loadBalancer"]
    assert (traefik["healthCheck"]["path"], len(traefik["servers"])) == ("/readyz", 3)
    ingress = yaml.safe_load(block("kind: Ingress"))
    (rule,) = ingress["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    manifest = list(yaml.safe_load_all((ROOT / "cluster/kubernetes/hadelay.yaml").read_text()))
    (service,) = (one for one in manifest if one["kind"] == "Service" and one["metadata"]["name"] == backend["name"])
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
