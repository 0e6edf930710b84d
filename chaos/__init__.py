"""Failure testing of a cluster of real processes, from outside: `python -m chaos run smoke`. See docs/howto/chaos.md.

    scenario.py   the file that says what is done         faults.py     what is broken, and how it is healed
    cluster.py    the processes, or an admin's commands   namespaces.py, disks.py, preload.c   what root adds
    load.py       producers and consumers                 history.py    what they saw, on this machine's clock
    checkers.py   one promise each                        report.py     a table, JSON, a page
    run.py        all of it together

Nothing here imports the server: what is known of a cluster is what it answers over HTTP.
"""
