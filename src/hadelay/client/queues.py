"""Topics of the queues of other frameworks: Celery, Django, taskiq and Dramatiq allow names that topics cannot have."""

import hashlib
import re

#: Limit of a topic's name here, in characters. Topics may have 128: the rest is for what a framework appends.
_LONGEST = 110
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def topic_of(prefix: str, queue: str) -> str:
    """The topic of a queue: prefix and name. A name that no topic can have is cut, has "-" for what topics lack, and
    ends in a hash, so that two queues do not share a topic."""
    safe = _UNSAFE.sub("-", queue)
    if safe == queue and 0 < len(prefix + queue) <= _LONGEST:
        return prefix + queue
    mark = "." + hashlib.sha256(queue.encode()).hexdigest()[:12]
    return f"{prefix}{safe}"[: _LONGEST - len(mark)] + mark
