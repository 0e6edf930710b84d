"""Failure testing of a cluster of real processes, from outside: `python -m chaos run smoke`. See docs/howto/chaos.md.

    scenario.py   reads a scenario file                faults.py     breaks nodes and heals them
    cluster.py    processes, or an admin's commands    namespaces.py, disks.py, preload.c   need root
    load.py       producers and consumers              history.py    records what they saw, on this machine's clock
    checkers.py   one promise per function             report.py     table, JSON and page
    run.py        one run with all parts

Nothing here imports the server. All knowledge of a cluster comes from its HTTP answers.
"""
