"""ARNs and queue URLs.

    arn:aws:sqs:hadelay:000000000000:orders          http://any.host:8400/000000000000/orders

The account is always the same, since a cluster has no accounts. Any partition, region, account, scheme and host are
accepted: clients come by different names of a node, and configurations were written for AWS.
"""

import re

from hadelay.aws.errors import AwsError

REGION, ACCOUNT = "hadelay", "000000000000"
#: Prefix of the topics that keep schedule groups and their tags; these topics are not shown as queues.
GROUPS = "aws-schedule-group."
_ARN = re.compile(r"arn:[a-z0-9-]+:([a-z0-9-]+):([a-z0-9-]*):([0-9]{12}):(\S{1,1024})")
_URL = re.compile(r"(?:https?://[^/?#\s]{1,512})?(?:/aws/sqs)?/([0-9]{12})/([A-Za-z0-9._~-]{1,255})")


def queue_arn(name: str) -> str:
    return f"arn:aws:sqs:{REGION}:{ACCOUNT}:{name}"


def queue_of_arn(arn: str, member: str) -> str:
    """Name of the queue that an ARN names. member: name of the request's field with the ARN, for the error. Raises
    AwsError."""
    found = _ARN.fullmatch(arn)
    if found is None or found[1] != "sqs":
        raise AwsError(
            "InvalidParameterValueException", f"{member}: {arn[:200]!r} is not the ARN of a queue: {queue_arn('NAME')}"
        )
    return found[4]


def queue_url(origin: str, name: str) -> str:
    """URL of a queue. origin: scheme, host and port at which the client reached the node."""
    return f"{origin}/{ACCOUNT}/{name}"


def queue_of_url(url: str) -> str:
    """Name of the queue that a URL names. Raises AwsError."""
    found = _URL.fullmatch(url)
    if found is None:
        raise AwsError("InvalidAddress", f"QueueUrl: {url[:200]!r} is not the URL of a queue: ask GetQueueUrl for it")
    return found[2]
