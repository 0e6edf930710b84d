"""The compose file and the Kubernetes manifest as they are shipped: their one-time step, then three real nodes with the
configuration in them, on loopback. Replaced are directories, listeners, and the addresses of the nodes."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml

from chaos.freeports import free_ports
from hadelay import Client
from hadelay.cli.output import Remote
from hadelay.cli.remote import call, call_member
from hadelay.errors import Forbidden, Unauthorized
from tests.cli.support import environment, hadelay
from tests.commands import started
from tests.repository.test_deployment import CLUSTER, ROOT, compose_environment, manifest, pod_environment
from tests.system.cluster import end, ready_line

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
COMPOSE: dict[str, Any] = yaml.safe_load((CLUSTER / "docker/compose.yaml").read_text())
PAGE = ROOT / "docs/howto/containers.md"


@dataclass
class Deployment:
    directory: Path
    names: tuple[str, ...]
    #: The configuration file that all nodes have.
    text: str
    #: Where it expects a node's certificate, and its data.
    tls: str
    data: str
    #: The bootstrap token.
    token: str = ""
    hash: str = ""
    #: The first token, which the bootstrap token made.
    admin: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = field(default_factory=lambda: free_ports(6))

    def url(self, name: str) -> str:
        # A name that is in its certificate.
        return f"https://localhost:{self.port + self.names.index(name)}"

    @property
    def ca(self) -> str:
        return str(self.directory / self.names[0] / "tls/ca.pem")

    def start(self, variables: dict[str, dict[str, str]]) -> None:
        """variables: each node's environment as the deployment has it."""
        text = self.text
        for number, name in enumerate(self.names):
            text = re.sub(rf'(?m)^(\s*{name} = )".*"$', rf'\1"127.0.0.1:{self.port + 3 + number}"', text)
        ready = []
        for number, name in enumerate(self.names):
            here = self.directory / name
            (here / "hadelay.toml").write_text(text.replace(self.tls, f"{here}/tls").replace(self.data, f"{here}/data"))
            own = variables[name] | {
                "HADELAY_HTTP__LISTEN": f"127.0.0.1:{self.port + number}",
                "HADELAY_RAFT__LISTEN": f"127.0.0.1:{self.port + 3 + number}",
                "HADELAY_HTTP__ADVERTISE": self.url(name),
            }
            with open(here / "log", "ab") as log:
                process = started(
                    ("serve", here / "hadelay.toml", "-o", "json"), environment(**own), stdout=subprocess.PIPE,
                    stderr=log, start_new_session=True,
                )  # fmt: skip
            self.processes.append(process)
            ready.append((process, here / "log"))
        for process, log_path in ready:
            ready_line(process, log_path)

    def make_admin(self) -> str:
        if not self.admin:
            made = self.run("token", "create", "ops", "--scope", "admin", token=self.token)
            assert made.returncode == 0, made.stderr
            self.admin = json.loads(made.stdout)["token"]
        return self.admin

    def run(self, *words: object, token: str) -> subprocess.CompletedProcess[str]:
        servers = ",".join(self.url(name) for name in self.names)
        return hadelay(*words, "-o", "json", HADELAY_TOKEN=token, SSL_CERT_FILE=self.ca, HADELAY_SERVERS=servers)


def bootstrap(printed: str) -> tuple[str, str]:
    """The token and its hash, as somebody reads them."""
    token, digest = re.search(r"hadelay_\S+", printed), re.search(r"\b[0-9a-f]{64}\b", printed)
    assert token is not None
    assert digest is not None
    return token[0], digest[0]


def command_file(directory: Path) -> dict[str, str]:
    """An environment in which `hadelay` is this one."""
    path = directory / "bin/hadelay"
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hadelay "$@"\n')
    path.chmod(0o755)
    return environment(PATH=f"{path.parent}:{os.environ['PATH']}")


def compose(directory: Path) -> Deployment:
    names = tuple(name for name, service in COMPOSE["services"].items() if "profiles" not in service)
    setup = COMPOSE["services"]["setup"]
    (script,) = setup["command"]
    # Nobody but root gives files away.
    script = script.replace("$$", "$").replace("-o 10001", f"-o {os.getuid()}")
    for volume in setup["volumes"]:
        name, _, inside = volume.partition(":")
        node = name.removesuffix("-tls")
        there = directory / node / "tls" if node in names else directory / name
        there.mkdir(parents=True)
        script = script.replace("/nodes/$node", f"{directory}/$node/tls").replace(f"{inside}/", f"{there}/")
        script = script.replace(f"{inside} ", f"{there} ")
    done = subprocess.run(
        ["sh", "-ec", script], env=command_file(directory), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    made = Deployment(
        directory, names, COMPOSE["configs"]["hadelay"]["content"], "/etc/hadelay/tls", "/var/lib/hadelay",
        *bootstrap(done.stdout),
    )  # fmt: skip
    made.start({name: compose_environment(COMPOSE["services"][name], made.hash) for name in names})
    return made


def kubernetes(directory: Path) -> Deployment:
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    done = subprocess.run(
        ["sh", "-ec", block], env=command_file(directory), cwd=directory, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    names = tuple(f"hadelay-{n}" for n in range(manifest("StatefulSet")["spec"]["replicas"]))
    for name in names:
        # As the pod mounts them (tests/repository).
        (directory / name / "tls").mkdir(parents=True)
        for kind, source in {"ca.pem": "ca.pem", "node.pem": f"{name}.pem", "node.key": f"{name}.key"}.items():
            (directory / name / "tls" / kind).write_bytes((directory / "pki" / source).read_bytes())
    printed = hadelay("token", "bootstrap").stdout
    text = manifest("ConfigMap")["data"]["hadelay.toml"]
    made = Deployment(directory, names, text, "/etc/hadelay-tls", "/var/lib/hadelay", *bootstrap(printed))
    made.start({name: pod_environment(name, hash_=made.hash) for name in names})
    return made


@pytest.fixture(scope="module", params=[compose, kubernetes], ids=["compose", "kubernetes"])
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made: Deployment = request.param(tmp_path_factory.mktemp(request.param.__name__))
    yield made
    for process in made.processes:
        end(process)


def test_no_node_has_the_authoritys_key_or_anothers(deployment: Deployment) -> None:
    (authority,) = deployment.directory.glob("*/ca.key")
    keys = {name: (deployment.directory / name / "tls/node.key").read_text() for name in deployment.names}
    assert len({*keys.values(), authority.read_text()}) == len(deployment.names) + 1
    for name in deployment.names:
        files = sorted(path.name for path in (deployment.directory / name / "tls").iterdir())
        assert files == ["ca.pem", "node.key", "node.pem"]
    if authority.parent.name == "authority":
        mode = (deployment.directory / deployment.names[0] / "tls/node.key").stat().st_mode
        assert mode & 0o777 == 0o400


def test_certificates_name_what_the_nodes_advertise(deployment: Deployment) -> None:
    for name in deployment.names:
        host = f"{name}.hadelay-nodes.hadelay.svc" if name.startswith("hadelay-") else name
        pem = deployment.directory / name / "tls/node.pem"
        seen = subprocess.run(["openssl", "x509", "-in", pem, "-noout", "-ext", "subjectAltName"], capture_output=True)
        assert re.search(rf"DNS:{re.escape(host)}(,|\s)", seen.stdout.decode()), seen.stdout


def test_probes_are_answered_without_a_token_and_nothing_else_is(deployment: Deployment) -> None:
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE  # as the kubelet, and the image's HEALTHCHECK
    for name in deployment.names:
        found = {path: status(deployment.url(name) + path, anyone) for path in PATHS}
        assert found == PATHS


PATHS = {"/livez": 200, "/readyz": 200, "/v1/cluster": 401, "/metrics": 401}


def status(url: str, context: ssl.SSLContext) -> int:
    try:
        with urlopen(url, timeout=10, context=context) as answer:
            return int(answer.status)
    except HTTPError as error:
        error.close()
        return error.code


def test_the_images_health_check_takes_any_url(deployment: Deployment) -> None:
    text = (CLUSTER / "docker/Dockerfile").read_text()
    found = re.search(r"HEALTHCHECK.*?CMD (\[.*?\])\n", text, re.S)
    assert found is not None
    _, *words = json.loads(found[1])
    for path, code in (("/livez", 0), ("/nowhere", 1)):
        variables = environment(HEALTH_URL=deployment.url(deployment.names[0]) + path)
        assert subprocess.run([sys.executable, *words], env=variables, capture_output=True).returncode == code


def test_the_first_token_and_a_message_through_every_node(deployment: Deployment) -> None:
    first = deployment.url(deployment.names[0])
    with Client(first, deployment.token, ca=deployment.ca) as client, pytest.raises(Forbidden, match="bootstrap"):
        client.put("orders", b"x")
    token = deployment.make_admin()
    spent = deployment.run("token", "create", "me", "--scope", "admin", token=deployment.token)
    assert "no longer valid" in spent.stderr
    for name in deployment.names:
        with Client(deployment.url(name), token, ca=deployment.ca) as client:
            client.put("orders", name.encode())
            (message,) = client.receive("orders", wait=10)
            assert message.body == name.encode()
            client.ack(message)
    with pytest.raises(Unauthorized), Client(deployment.url(name), ca=deployment.ca) as client:
        client.put("orders", b"x")
    # Neither token lies in a file of a node.
    for path in deployment.directory.glob("**/*"):
        if path.is_file():
            content = path.read_bytes()
            assert deployment.token.encode() not in content, path
            assert token.encode() not in content, path


def test_names_that_mean_nothing_here_cost_no_node(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the compose network's on its host: the nodes resolve what they advertise, and this process does not."""
    if deployment.names[0] != "n1":
        pytest.skip("the certificates of the Kubernetes page name no address that could be asked instead")
    token, resolve = deployment.make_admin(), socket.getaddrinfo
    monkeypatch.setenv("SSL_CERT_FILE", deployment.ca)

    def refuse(host: Any, *rest: Any, **more: Any) -> Any:
        if host == "localhost":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    urls = [deployment.url(name).replace("localhost", "127.0.0.1") for name in deployment.names]
    for url in urls:
        with Client(url, token, ca=deployment.ca) as client:
            client.put("far", b"x")
            (message,) = client.receive("far", wait=10)
            client.ack(message)
            client.put("far", b"y")
        query = {"topics": ["far"], "wait": "10s"}
        (received,) = call(Remote(servers=url, token=token), "POST", "/v1/receive", query, needs="messages")["messages"]
        assert received["body_base64"] == "eQ=="
    remote = Remote(servers=",".join(urls), token=token)
    for member in call(remote, "GET", "/v1/cluster", needs="members")["members"]:
        assert call_member(remote, member, "GET", "/v1/hours", needs="hours")["hours"]
