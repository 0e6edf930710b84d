"""ARNs and queue URLs.

    arn:aws:sqs:hadelay:000000000000:orders          http://any.host:8400/000000000000/orders

The account is always the same, since a cluster has no accounts. Any partition, region, account, scheme and host are
accepted: clients come by different names of a node, and configurations were written for AWS.
"""

import re

from hadelay.aws.errors import AwsError

REGION, ACCOUNT = "hadelay", "000000000000"
#: Prefix of the topics that stand for groups of schedules, and are no queues.
GROUPS = "aws-schedule-group."
_ARN = re.compile(r"arn:[a-z0-9-]+:([a-z0-9-]+):([a-z0-9-]*):([0-9]{12}):(\S{1,1024})")
_URL = re.compile(r"(?:https?://[^/?#\s]{1,512})?(?:/aws/sqs)?/([0-9]{12})/([A-Za-z0-9._~-]{1,255})")


def queue_arn(name: str) -> str:
    return f"arn:aws:sqs:{REGION}:{ACCOUNT}:{name}"


def queue_of_arn(arn: str, member: str) -> str:
    """Name of the queue of an ARN. member: name of the field, for the error. Raises AwsError."""
    found = _ARN.fullmatch(arn)
    if found is None or found[1] != "sqs":
        raise AwsError(
            "InvalidParameterValueException", f"{member}: {arn[:200]!r} is not the ARN of a queue: {queue_arn('NAME')}"
        )
    return found[4]


def queue_url(origin: str, name: str) -> str:
    """URL of a queue. origin: scheme, host and port by which the client came."""
    return f"{origin}/{ACCOUNT}/{name}"


def queue_of_url(url: str) -> str:
    """Name of the queue of a URL. Raises AwsError."""
    found = _URL.fullmatch(url)
    if found is None:
        raise AwsError("InvalidAddress", f"QueueUrl: {url[:200]!r} is not the URL of a queue: ask GetQueueUrl for it")
    return found[2]
