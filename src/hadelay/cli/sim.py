"""`hadelay sim`: the simulator's seeds, from the command line."""

from __future__ import annotations


def sim(
    *,
    seed: int = 1,
    count: int = 1,
    jobs: int = 0,
    verbose: bool = False,
    mutation: str = "",
    log: str = "",
    shrink: bool = False,
    only: str = "",
    fault: str = "",
) -> int:
    """Run seeds of the simulator: real nodes, simulated disks, network and clocks. One that fails ends with 1.

    Parameters
    ----------
    seed
        The first one. The same seed gives the same run.
    count
        How many, counting up.
    jobs
        Processes; 0 is one per core.
    verbose
        A line per seed.
    mutation
        A bug to put in first, to see it noticed.
    log
        A file for the results: seeds that are in it are not run again, so a long run can be interrupted.
    shrink
        Of a seed that fails, look for a smaller run that breaks the same promise: with fewer faults, fewer messages and
        fewer clients. Some minutes at most.
    only
        The parts of the run that are done, as `--shrink` prints them; `nothing` for none.
    fault
        A kind of fault that every run has, such as `members`; by themselves runs draw theirs.
    """
    from hadelay.testing.cli import main

    return main(seed, count, jobs, verbose, mutation, log, only, shrink, fault)
