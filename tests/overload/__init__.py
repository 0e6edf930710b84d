"""More than a cluster can take, against real processes: bounded memory, fair refusals, and nobody has to help.

scenarios.py        one function each: what is done, and what has to hold
rig.py              three nodes, clients, what the kernel says of a process
test_overload.py    all of them, small, in `make test`
__main__.py         all of them at full size: `make overload`
"""
