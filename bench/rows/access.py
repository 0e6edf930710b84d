"""What TLS and tokens cost: publishes per second, and the leader's processor time for each, with neither, with tokens,
and with both, TLS between the nodes included."""

from __future__ import annotations

import shutil
from typing import Any

from bench.cluster import cpu_seconds
from bench.result import Row, Setup, Target
from bench.rows.publish import WARM_S, of_a_batch
from bench.wrk_run import wrk
from hadelay.cli.certs import make_authority, make_certificate
from hadelay.rights import TOKEN_PREFIX, hash_token

_FIRST = TOKEN_PREFIX + "b" * 43
_TOKENS = ("security.tokens=true", f"security.bootstrap_token_hash={hash_token(_FIRST).hex()}")
CONNECTIONS = 256
#: Connections are kept for hours: their handshakes, a quarter of a second of the leader's, shall not count for much.
SECONDS = 30


def tokens_and_tls(setup: Setup) -> dict[str, Any]:
    """Arguments of Setup.cluster for a cluster with tokens and TLS, between the nodes too; makes the certificates."""
    pki = setup.directory / "pki"
    shutil.rmtree(pki, ignore_errors=True)
    make_authority(pki)
    # One certificate with the names of all: `hadelay dev` gives every node the same settings.
    cert = make_certificate(pki, "n1", ("n2", "n3", "127.0.0.1"))
    files = {"tls_cert": cert, "tls_key": cert.with_suffix(".key"), "tls_ca": pki / "ca.pem"}
    tls = tuple(f"{section}.{key}={path}" for section in ("http", "raft") for key, path in files.items())
    return {"settings": _TOKENS + tls, "ca": pki / "ca.pem", "first_token": _FIRST}


def access(setup: Setup) -> list[Row]:
    row = Row(
        "access", "one message per request, and batches of 1,000, with tokens, and with TLS too, against neither",
        [
            Target("TLS and tokens against neither", 0.7, 0.85), Target("both against neither, in batches", 0.7, 0.85),
            Target("the leader's time against neither", 0.7),
        ],
    )  # fmt: skip
    batch, secured = of_a_batch(setup.directory), tokens_and_tls(setup)
    sides: dict[str, dict[str, Any]] = {
        "neither": {}, "tokens": {"settings": _TOKENS, "first_token": _FIRST}, "TLS and tokens": secured
    }  # fmt: skip
    for _ in setup.each_round("access"):
        for name, how in sides.items():
            with setup.cluster(**how) as cluster:
                node = cluster.leader()
                warm = wrk(node.http, "publish", CONNECTIONS, WARM_S, BENCH_TOKEN=cluster.token)
                before = cpu_seconds(node.pid)
                run = wrk(node.http, "publish", CONNECTIONS, setup.seconds(SECONDS), BENCH_TOKEN=cluster.token)
                took = cpu_seconds(node.pid) - before
                many = wrk(node.http, "file", 32, setup.seconds(SECONDS // 3), BENCH_TOKEN=cluster.token, **batch)
                good = warm.requests - warm.status + run.requests - run.status + 1000 * (many.requests - many.status)
                cluster.account(["bench"], good, 0, unsure=2 * CONNECTIONS + 32_000)
            row.add(name, run.rate, "/s")
            row.add(f"{name} p99", run.p99, "ms")
            row.add(f"{name}: leader", took / (run.requests - run.status) * 1e6, "µs")
            row.add(f"{name}, in batches", many.rate * 1000, "msg/s")
    row.ratio("TLS and tokens against neither", "TLS and tokens", "neither")
    row.ratio("both against neither, in batches", "TLS and tokens, in batches", "neither, in batches")
    row.ratio("the leader's time against neither", "neither: leader", "TLS and tokens: leader")
    return [row]
