"""SQS: queues are topics, receipt handles are leases, and a RedrivePolicy sets the topic's dead_letter and
max_attempts."""

from hadelay.aws.door import Door
from hadelay.aws.sqs import attributes, leases, moving, queues, receiving, sending, tags
from hadelay.aws.sqs.protocol import PROTOCOL, handle

#: Modules that declare operations of SQS in `protocol.operations` when they are imported.
MODULES = (queues, attributes, tags, sending, receiving, leases, moving)
#: Paths at which SDKs find SQS: the endpoint, with and without the slash that SDKs add; the root, for endpoints without
#: a path; and the URLs of queues, to which some SDKs send requests.
_PATHS = ("/aws/sqs", "/aws/sqs/", "/", "/000000000000/{queue}", "/aws/sqs/000000000000/{queue}")


def mount(door: Door) -> None:
    for path in _PATHS:
        door.add(PROTOCOL, "aws_sqs", "POST", path, handle, short=True)
    for path in _PATHS[:2]:
        door.add(PROTOCOL, "aws_sqs", "GET", path, handle)
