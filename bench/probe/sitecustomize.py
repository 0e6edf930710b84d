"""Python imports this module at its start if this directory is on PYTHONPATH: so a node notes its instants
(bench.instants) without a change of its code."""

import os

if "BENCH_INSTANTS" in os.environ:
    from bench import instants

    instants.install()
