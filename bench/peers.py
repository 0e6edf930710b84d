"""The others: each started on free ports in a directory of its own, configured as durably as it can be, and ended.

A peer that is not installed raises Missing, and its column is left out with a note.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.wrk_run import Missing


def program(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        raise Missing(f"{name} is not installed (bench/install-peers)")
    return found


@contextlib.contextmanager
def running(commands: list[list[str]], directory: Path, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Processes with their output in `directory`, ended by SIGTERM, then by SIGKILL."""
    processes = []
    try:
        for i, command in enumerate(commands):
            with open(directory / f"output{i}", "ab") as log:
                env = dict(os.environ, **(environment or {}))
                processes.append(
                    subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, env=env, start_new_session=True)
                )
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def wait_port(port: int, timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise Missing(f"nothing listens on port {port} after {timeout_s:.0f} s")


@contextlib.contextmanager
def etcd(directory: Path, port: int) -> Iterator[str]:
    """Three nodes; the URL of the leader's JSON gateway."""
    binary = program("etcd")
    fresh(directory)
    members = ",".join(f"e{i}=http://127.0.0.1:{port + 10 + i}" for i in range(3))
    commands = []
    for i in range(3):
        peer, client = f"http://127.0.0.1:{port + 10 + i}", f"http://127.0.0.1:{port + i}"
        commands.append([binary, "--name", f"e{i}", "--data-dir", f"e{i}", "--initial-cluster", members])
        commands[-1] += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        commands[-1] += ["--listen-client-urls", client, "--advertise-client-urls", client]
        commands[-1] += ["--logger", "zap", "--log-level", "error", "--quota-backend-bytes", str(8 << 30)]
    with running(commands, directory, {"ETCD_UNSUPPORTED_ARCH": ""}):
        yield _etcd_leader([f"http://127.0.0.1:{port + i}" for i in range(3)])


def _etcd_leader(urls: list[str]) -> str:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for url in urls:
            with contextlib.suppress(OSError, KeyError, ValueError):
                ask = urllib.request.Request(
                    f"{url}/v3/maintenance/status", b"{}", {"Content-Type": "application/json"}
                )
                said = json.loads(urllib.request.urlopen(ask, timeout=2).read())
                if said["leader"] == said["header"]["member_id"] and said["leader"] != "0":
                    return url
        time.sleep(0.2)
    raise Missing("etcd elected no leader")


@contextlib.contextmanager
def redis(directory: Path, port: int) -> Iterator[int]:
    """One primary and two replicas, the append-only file synced always; the primary's port."""
    binary = program("redis-server")
    fresh(directory)
    commands = []
    for i in range(3):
        (directory / f"r{i}").mkdir()
        commands.append([binary, "--port", str(port + i), "--dir", str(directory / f"r{i}"), "--save", ""])
        commands[-1] += ["--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync-delay", "0"]
        commands[-1] += ["--replicaof", "127.0.0.1", str(port)] if i else []
    with running(commands, directory):
        wait_port(port + 2)
        yield port


@contextlib.contextmanager
def beanstalkd(directory: Path, port: int) -> Iterator[int]:
    """One node, since it has no more; its log synced after every write (-f0)."""
    binary = program("beanstalkd")
    fresh(directory)
    with running([[binary, "-l", "127.0.0.1", "-p", str(port), "-b", str(directory), "-f0"]], directory):
        wait_port(port)
        yield port


@contextlib.contextmanager
def nats(directory: Path, port: int) -> Iterator[int]:
    """Three nodes with JetStream; a stream of three replicas. It syncs every two minutes: not durable as the others."""
    binary = program("nats-server")
    fresh(directory)
    routes = ",".join(f"nats://127.0.0.1:{port + 10 + i}" for i in range(3))
    commands = []
    for i in range(3):
        commands.append([binary, "-a", "127.0.0.1", "-p", str(port + i), "--name", f"j{i}", "--cluster_name", "bench"])
        commands[-1] += ["-js", "--store_dir", str(directory / f"j{i}")]
        commands[-1] += ["--cluster", f"nats://127.0.0.1:{port + 10 + i}", "--routes", routes]
    with running(commands, directory):
        wait_port(port + 2)
        yield port


@contextlib.contextmanager
def rabbitmq(directory: Path, port: int) -> Iterator[int]:
    """Three nodes joined to one cluster; the first one's AMQP port."""
    server, control = program("rabbitmq-server"), program("rabbitmqctl")
    fresh(directory)
    (directory / "enabled_plugins").write_text("[].\n")
    (directory / ".erlang.cookie").write_text("bench" * 4)
    (directory / ".erlang.cookie").chmod(0o400)
    shared = {"HOME": str(directory), "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins")}
    shared |= {"RABBITMQ_CONF_ENV_FILE": "/dev/null", "RABBITMQ_CONFIG_FILE": str(directory / "none")}
    names = [f"bench{i}@localhost" for i in range(3)]
    with contextlib.ExitStack() as stack:
        for i, name in enumerate(names):
            home = directory / f"q{i}"
            home.mkdir()
            own = {"RABBITMQ_NODENAME": name, "RABBITMQ_NODE_PORT": str(port + i)}
            own |= {"RABBITMQ_DIST_PORT": str(port + 10 + i), "RABBITMQ_MNESIA_BASE": str(home)}
            own |= {"RABBITMQ_LOG_BASE": str(home), "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1"}
            stack.enter_context(running([[beside(server)]], home, shared | own))
        for i in range(3):
            wait_port(port + i, 120)
        for name in names[1:]:
            for step in (["stop_app"], ["join_cluster", names[0]], ["start_app"]):
                environment = dict(os.environ, **shared)
                subprocess.run([beside(control), "-n", name, *step], check=True, env=environment, capture_output=True)
        yield port


def beside(binary: str) -> str:
    """Debian's wrapper changes to the service's own user, who may not write here: take what it wraps."""
    inner = Path("/usr/lib/rabbitmq/bin") / Path(binary).name
    return str(inner) if inner.exists() else binary
