"""EventBridge Scheduler: a one-time schedule becomes a message with a client key, a recurring one a schedule of
hadelay."""

from functools import partial

from hadelay.aws.door import Door
from hadelay.aws.scheduler import groups, listing, schedules
from hadelay.aws.scheduler.protocol import PROTOCOL, handle, operations

#: Modules that declare operations of this service in `protocol.operations` when they are imported.
MODULES = (schedules, listing, groups)
#: Prefixes of the API's paths: for an endpoint `http://host/aws/scheduler`, and for an endpoint without a path.
_PREFIXES = ("/aws/scheduler", "")


def mount(door: Door) -> None:
    for prefix in _PREFIXES:
        for name, operation in operations.all.items():
            method, path = name.split()
            door.add(PROTOCOL, "aws_scheduler", method, prefix + path, partial(handle, operation))
