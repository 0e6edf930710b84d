"""Labels of topics that AWS services use: tags of a queue or of a schedule group, and values that the services keep for
themselves.

The names of the latter values begin with `aws:`, as no tag of a user may.
"""

import time
from collections.abc import Iterable, Mapping

from hadelay.aws.errors import AwsError

OWN = "aws:"
#: Limits of AWS: number of tags of a queue or a group, and characters of a name and of a value.
_MOST, _NAME, _VALUE = 50, 128, 256
CREATED, CHANGED = f"{OWN}CreatedTimestamp", f"{OWN}LastModifiedTimestamp"


def check_tags(tags: Mapping[str, str], before: Iterable[str] = ()) -> dict[str, str]:
    """Labels of a topic for these tags. before: names of the tags that the topic has already. Raises AwsError."""
    for name, text in tags.items():
        if not 0 < len(name) <= _NAME or len(text) > _VALUE or name.startswith(OWN):
            what = f"Tags: {name[:80]!r}: 1 to {_NAME} characters, not beginning with {OWN}; a value up to {_VALUE}"
            raise AwsError("InvalidParameterValueException", what)
    if (count := len(tags.keys() | set(before))) > _MOST:
        raise AwsError("InvalidParameterValueException", f"Tags: {count} tags; at most {_MOST} are allowed")
    return dict(tags)


def tags_of(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in labels.items() if not name.startswith(OWN)}


def times(*, new: bool) -> dict[str, str]:
    """Labels with the time of a change, in Unix seconds. new: whether the change creates the topic."""
    now = str(int(time.time()))
    return {CREATED: now, CHANGED: now} if new else {CHANGED: now}
