"""EventBridge Scheduler: a one-time schedule is a message with a key, and a recurring one a schedule."""

from functools import partial

from hadelay.aws.door import Door
from hadelay.aws.scheduler import groups, listing, schedules
from hadelay.aws.scheduler.protocol import PROTOCOL, handle, operations

#: Modules that add their operations to the table of the protocol.
MODULES = (schedules, listing, groups)
#: Paths in front of those of the API: that of an endpoint `http://host/aws/scheduler`, and none.
_PREFIXES = ("/aws/scheduler", "")


def mount(door: Door) -> None:
    for prefix in _PREFIXES:
        for name, operation in operations.all.items():
            method, path = name.split()
            door.add(PROTOCOL, "aws_scheduler", method, prefix + path, partial(handle, operation))
