"""`python -m tests.overload [SCENARIO …] [--small] [--dir DIR] [-o json]`: all of them at full size, one after another.

Each on a cluster of its own. It takes some minutes, up to 3 GB of memory and some GB of disk. Exit code 1: a promise
was broken; the nodes' logs are in DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import traceback
from pathlib import Path

from tests.overload.rig import Rig, nodes
from tests.overload.scenarios import FULL, SCENARIOS, SMALL, Figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.overload", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help=f"{', '.join(SCENARIOS)}; all when none is named")
    parser.add_argument("--small", action="store_true", help="as in `make test`")
    parser.add_argument("--dir", type=Path, help="where the nodes keep their data; kept afterwards")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in SCENARIOS]:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    scale, found, broken = SMALL if options.small else FULL, dict[str, Figures](), 0

    async def run(name: str, directory: Path) -> Figures:
        with nodes(directory, *scale.settings) as cluster:
            async with Rig(cluster) as rig:
                return await SCENARIOS[name](rig, scale)

    with tempfile.TemporaryDirectory(prefix="hadelay-overload-") as temporary:
        for name in options.names or SCENARIOS:
            try:
                found[name] = asyncio.run(run(name, (options.dir or Path(temporary)) / name))
            except AssertionError:
                traceback.print_exc()
                broken = 1
                continue
            if options.output == "text":
                print(f"{name}: held")
                print(*(f"  {what:<40}{value:>14,.1f}" for what, value in found[name].items()), sep="\n", flush=True)
    if options.output == "json":
        print(json.dumps(found))
    return broken


if __name__ == "__main__":
    sys.exit(main())
