"""Start hadelay with deliberate faults: python -m chaos.sim.faulty [--mutation X] [--points FILE] [--clock SECONDS]
serve …

The server that users run, with a deliberate bug in it (chaos.sim.mutations), or one that ends itself at the crash
point that FILE names (chaos.sim.failpoints), or whose wall clock is ahead. What follows is the ordinary command
line.
"""

import argparse
import sys
from contextlib import ExitStack
from runpy import run_module


def main(argv: list[str]) -> None:
    """Run hadelay with the faults that the options name. Ends with SystemExit, as the command line does."""
    parser = argparse.ArgumentParser(prog="python -m chaos.sim.faulty", allow_abbrev=False)
    parser.add_argument("--mutation")
    parser.add_argument("--points")
    parser.add_argument("--clock", type=int, default=0)
    options, words = parser.parse_known_args(argv)
    with ExitStack() as broken_by:
        if options.mutation:
            from chaos.sim.mutations import MUTATIONS, broken

            if options.mutation not in MUTATIONS:
                parser.error(f"no mutation {options.mutation}; there are {', '.join(sorted(MUTATIONS))}")
            broken_by.enter_context(broken(options.mutation))
        if options.points:
            from chaos.sim.failpoints import install

            install(options.points)
        if options.clock:
            from hadelay.platform.runtime import Runtime

            right, ahead_ms = Runtime.wall_ms, options.clock * 1000
            Runtime.wall_ms = lambda self: right(self) + ahead_ms  # type: ignore[method-assign]
        sys.argv[1:] = words
        run_module("hadelay", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
