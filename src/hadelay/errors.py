"""All errors that hadelay raises or answers. They tell a caller: may I retry, and did the request take effect?

docs/reference/errors.md says when each error is answered. ConfigError and FatalError end a process instead.
"""

import errno
from functools import partial
from typing import Any, ClassVar

#: Limit of characters in an error text, which may repeat what a client sent.
_LONGEST = 1_000


def shortened(text: str) -> str:
    """Shorten an error text to 1,000 characters (_LONGEST) for an answer or a log line."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


class HadelayError(Exception):
    """Base of everything hadelay raises.

    retryable: the same request may succeed later, here or at another node.
    outcome_known: False when the command may or may not have been committed. Retry only with the same
        Idempotency-Key or request_id, which makes the retry harmless.
    of_a_node: False when no node reported the error: it tells about one address, and nothing about the cluster.
    extra: members added to the problem document, such as `outcome` or `id`.
    """

    type: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    outcome_known: ClassVar[bool] = True
    of_a_node: ClassVar[bool] = True

    def __init__(self, detail: str = "", /, *, retry_after_ms: int | None = None, **extra: Any) -> None:
        super().__init__(detail or self.title)
        self.detail = detail
        self.retry_after_ms = retry_after_ms
        self.extra = extra

    def document(self) -> dict[str, Any]:
        """This error as a problem document (RFC 9457)."""
        found: dict[str, Any] = {
            "type": self.type,
            "title": self.title,
            "status": self.http_status,
            "detail": shortened(self.detail) or self.title,
            "retryable": self.retryable,
            "outcome_known": self.outcome_known,
        }
        if self.retry_after_ms is not None:
            found["retry_after_ms"] = self.retry_after_ms
        return found | self.extra

    @property
    def outcome(self) -> str | None:
        """State of the message that forbids the operation (leased, acked, …); None if the error names no state."""
        return self.extra.get("outcome")

    @property
    def outcomes(self) -> dict[str, str] | None:
        """Outcomes of a message's copies by topic and subscription, if `outcome` is "partial"; None otherwise."""
        return self.extra.get("outcomes")

    @property
    def idempotency_key(self) -> str | None:
        """Key of a publish whose outcome is unknown: a repetition with this key stores no second message."""
        return self.extra.get("idempotency_key")


class BadRequest(HadelayError):
    type, title, http_status = "bad-request", "Bad request", 400


class Unauthorized(HadelayError):
    type, title, http_status = "unauthorized", "Unauthorized", 401
    #: Reason of the refusal in the node's log and metrics; http/access.py has all reasons.
    reason = "unknown"


class Forbidden(HadelayError):
    type, title, http_status = "forbidden", "Forbidden", 403
    reason = "scope"


class NotFound(HadelayError):
    type, title, http_status = "not-found", "Not found", 404


class MethodNotAllowed(HadelayError):
    type, title, http_status = "method-not-allowed", "Method not allowed", 405


class RequestTimeout(HadelayError):
    type, title, http_status, retryable = "request-timeout", "Request timeout", 408, True


class Conflict(HadelayError):
    type, title, http_status = "conflict", "Conflict with the state of the message", 409


class TooLarge(HadelayError):
    type, title, http_status = "too-large", "Too large", 413


class Misdirected(HadelayError):
    """A node forwarded the request to this shard, but another shard owns the topic by this shard's map."""

    type, title, http_status, retryable = "misdirected", "Misdirected to another shard", 421, True


class UnsupportedMediaType(HadelayError):
    type, title, http_status = "unsupported-media-type", "Unsupported media type", 415


class Impossible(HadelayError):
    type, title, http_status = "impossible", "Understood, but impossible", 422


class LimitReached(HadelayError):
    type, title, http_status, retryable = "limit-reached", "A limit is reached", 429, True


class NoLeader(HadelayError):
    type, title, http_status, retryable = "no-leader", "No leader", 503, True


class Overloaded(HadelayError):
    type, title, http_status, retryable = "overloaded", "Overloaded", 503, True


class OtherShard(HadelayError):
    """Another shard owns the topic, or the shard map is being changed."""

    type, title, http_status, retryable = "other-shard", "Another shard", 503, True


class OutcomeUnknown(HadelayError):
    type, title, http_status, retryable, outcome_known = "outcome-unknown", "Outcome unknown", 504, True, False


class DiskFull(HadelayError):
    type, title, http_status, retryable = "disk-full", "Disk full", 507, True


#: Advice to the administrator if files in the data directory fail their checks.
WAY_OUT = (
    "run `hadelay check quorum NODE`; only if NODE may stop, move the node's directories away and start the "
    "node again: it copies everything from its peers. Never do this on two nodes at once: messages would be lost"
)


def is_disk_full(error: BaseException | None) -> bool:
    """Whether the disk is full, or the user's quota on the disk is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class DamagedFile(HadelayError):
    """Synced bytes of a file fail their check. The error's text names the file, the offset and the problem.

    size: number of bytes of the damaged record or entry, to be copied from a peer; 0 if the damage is no single one.
    """

    type, title = "damaged-file", "Damaged file"

    def __init__(self, path: str, offset: int, what: str, *, size: int = 0) -> None:
        super().__init__(f"{path}, offset {offset}: {what}")
        self.path, self.offset, self.what, self.size = path, offset, what, size

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickle, which otherwise calls the class with the error's text as the only argument."""
        return partial(DamagedFile, size=self.size), (self.path, self.offset, self.what)


class ConfigError(HadelayError):
    """A wrong configuration. The message names the key (and the line, if it is from a file) and the expected value."""

    type, title = "config", "Configuration error"


class Taken(ConfigError):
    """A configured address or directory is in use by another process, or does not exist yet: a retry may help."""


class FatalError(HadelayError):
    """The node must stop now: going on could break a guarantee. The code that started the node gets this error."""

    type, title = "fatal", "Fatal error"
