"""`python -m bench [ROW…] [--quick] [--rounds N] [--out DIR]`: measure, and write a report.

Ends non-zero when a row is void, or missed by more than 20 %. `python -m bench delays` compares hadelay with other
systems for delayed messages (bench.delays).
"""

from __future__ import annotations

import argparse
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path

from bench.cluster import Void
from bench.report import write_report
from bench.result import Row, Setup, save
from bench.rows import ROWS
from bench.wrk_run import Missing


def main() -> int:
    if sys.argv[1:2] == ["delays"]:
        from bench.delays.command import main as delays

        return delays(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"{', '.join(ROWS)}; all when none is named")
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes, one round: does it work at all"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each row, alternating with what it is compared with")
    parser.add_argument("--out", type=Path, default=Path("bench/out"), help="where the report goes")
    parser.add_argument("--data", type=Path, help="where the clusters keep their data: the disk that is measured")
    parser.add_argument("--before", type=Path, help="a checkout of the version that `unused` compares with")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.rows if name not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    # Ended from outside, it ends its clusters and peers: SystemExit passes through their `with` blocks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    data = Path(tempfile.mkdtemp(prefix="hadelay-bench-", dir=chosen.data))
    setup = Setup(
        1 if chosen.quick else chosen.rounds, chosen.quick, data, _port(), lambda text: print(text, flush=True),
        chosen.before,
    )  # fmt: skip
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    try:
        for name in chosen.rows or ROWS:
            rows += _measure(name, setup)
            save(rows, chosen.out / "results.json")
    finally:
        shutil.rmtree(data, ignore_errors=True)
    return write_report(rows, chosen.out, setup)


def _measure(name: str, setup: Setup) -> list[Row]:
    try:
        return ROWS[name](setup)
    except Missing as missing:
        return [Row(name, "left out", [], notes=[str(missing)])]
    except Void as void:
        setup.say(f"{name}: VOID: {void}")
        return [Row(name, "void", [], notes=[f"VOID: {void}"])]
    except Exception as error:
        # One row must not take the others' hours with it; its own verdict is failure.
        traceback.print_exc()
        return [Row(name, "failed", [], notes=[f"VOID: {type(error).__name__}: {error}"])]


def _port() -> int:
    """The first of a range that nobody uses: the cluster, etcd, and the baseline are at fixed distances from it."""
    for port in range(18_400, 30_000, 400):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise SystemExit("no free port")


if __name__ == "__main__":
    sys.exit(main())
