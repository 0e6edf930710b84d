"""What TLS and tokens cost: publishes per second, and the leader's processor time for each, with neither, with tokens,
and with both, TLS between the nodes included."""

from __future__ import annotations

import shutil

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


def access(setup: Setup) -> list[Row]:
    row = Row(
        "access", "one message per request, and batches of 1,000, with tokens, and with TLS too, against neither",
        [
            Target("TLS and tokens against neither", 0.7, 0.85), Target("both against neither, in batches", 0.7, 0.85),
            Target("the leader's time against neither", 0.7),
        ],
    )  # fmt: skip
    pki = setup.directory / "pki"
    shutil.rmtree(pki, ignore_errors=True)
    make_authority(pki)
    # One certificate with the names of all: `hadelay dev` gives every node the same settings.
    cert = make_certificate(pki, "n1", ("n2", "n3", "127.0.0.1"))
    files = {"tls_cert": cert, "tls_key": cert.with_suffix(".key"), "tls_ca": pki / "ca.pem"}
    batch = of_a_batch(setup.directory)
    tls = tuple(f"{section}.{key}={path}" for section in ("http", "raft") for key, path in files.items())
    for _ in setup.each_round("access"):
        for name, settings in (("neither", ()), ("tokens", _TOKENS), ("TLS and tokens", _TOKENS + tls)):
            ca = pki / "ca.pem" if tls[0] in settings else None
            with setup.cluster(settings=settings, ca=ca, first_token=_FIRST if settings else "") as cluster:
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
