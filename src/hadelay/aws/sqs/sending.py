"""SendMessage and SendMessageBatch."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from msgspec import field
from msgspec.structs import replace

from hadelay.api.publishrequest import BatchItem, PublishQuery
from hadelay.aws.door import Ask
from hadelay.aws.errors import AwsError
from hadelay.aws.sqs import batches, values
from hadelay.aws.sqs.attributes import Queue, find
from hadelay.aws.sqs.protocol import Document, invalid, named
from hadelay.aws.sqs.values import OPTION, SYSTEM, Value
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import hash_key
from hadelay.errors import HadelayError
from hadelay.model import PERIOD, Draft, encode_id
from hadelay.rules import publishing

#: Time for which a FIFO queue drops messages with a deduplication id that it has had, in ms, as in AWS.
_UNIQUE_MS = 300_000
#: Limits in characters: of a group id or a deduplication id; and of a trace header.
_LONGEST, _TRACE = 128, 1_024
TRACE = "AWSTraceHeader"
#: Encoded meta of a message that has only a text, without attributes, group or trace.
_TEXT = pack(Meta(values.TEXT))
#: Options of a publish that message attributes such as hadelay.key can set; for the other options, SQS has own members.
_OPTIONS = frozenset(PublishQuery.__struct_fields__) - {"delay", "group"}


class Message(Document, kw_only=True):
    MessageBody: str
    DelaySeconds: int | None = None
    MessageAttributes: dict[str, Value] = field(default_factory=dict)
    MessageSystemAttributes: dict[str, Value] = field(default_factory=dict)
    MessageDeduplicationId: str | None = None
    MessageGroupId: str | None = None


@batches.add("SendMessage", Message)
async def send_messages(ask: Ask, url: str, messages: Sequence[Message]) -> Any:
    queue = await find(ask, named(ask, url, "publish"), stale=True)
    found: list[Any] = []
    for message in messages:
        try:
            found.append(_draft(ask, queue, message))
        except HadelayError as error:
            found.append(error)
    places = [at for at, one in enumerate(found) if isinstance(one, Draft)]
    if places:
        receipts = await ask.publish([found[at] for at in places], ask.retry_key)
        for row, at in enumerate(places):
            found[at] = receipts.problems.get(row) or _answer(queue, messages[at], receipts.ids[row])
    return found


def _answer(queue: Queue, message: Message, message_id: int) -> dict[str, str]:
    found = {"MessageId": encode_id(message_id), "MD5OfMessageBody": values.md5(message.MessageBody)}
    if message.MessageAttributes:
        found["MD5OfMessageAttributes"] = values.md5_of(message.MessageAttributes)
    if message.MessageSystemAttributes:
        found["MD5OfMessageSystemAttributes"] = values.md5_of(message.MessageSystemAttributes)
    if queue.fifo:
        found["SequenceNumber"] = sequence(message_id)
    return found


def sequence(message_id: int) -> str:
    """Sequence number of a message of a FIFO queue: the message's id in 20 decimal digits."""
    return f"{message_id:020d}"


def _draft(ask: Ask, queue: Queue, message: Message) -> Draft:
    """Make the message to publish from a message of the request. Raises HadelayError."""
    max_delay_ms, config = ask.call.context.max_delay_ms, ask.limits
    if not message.MessageBody:
        raise AwsError("MissingRequiredParameterException", "MessageBody: the body is empty")
    values.check_text(message.MessageBody, "MessageBody")
    values.check_values(message.MessageAttributes)
    most = int(queue.own("MaximumMessageSize") or config.max_body_bytes)
    if (size := values.size_of(message.MessageBody, message.MessageAttributes)) > most:
        raise invalid(f"MessageBody: {size:,} bytes, attributes included; a message of this queue has at most {most:,}")
    body, kind = values.pack(message.MessageBody, message.MessageAttributes)
    if len(body) > config.max_body_bytes:
        raise invalid(
            f"MessageBody: {len(body):,} bytes with its attributes as JSON; at most {config.max_body_bytes:,}"
        )
    options = _options(message.MessageAttributes)
    if (delay := message.DelaySeconds) is not None and delay < 0:
        raise invalid(f"DelaySeconds: {delay} is negative")
    times = publishing.due_time(max_delay_ms, delay, options.pop("deliver_at", None))
    group, unique = _fifo(queue, message)
    meta = _system(message) | ({} if unique is None else {f"{SYSTEM}MessageDeduplicationId": unique[0]})
    traceparent = ask.headers.get("traceparent")
    if not (message.MessageAttributes or meta or traceparent) and group is None:
        # Fast path for most messages: draft_of would make the same draft, but would take as long as the rest of this
        # function.
        return Draft(queue.name, *times, 0, 0, _TEXT, body)
    item = BatchItem(queue.name, content_type=kind, group=group, meta=meta, **options)
    trace = publishing.check_traceparent((traceparent or "").encode("utf-8", "replace"))
    draft = publishing.draft_of(config, max_delay_ms, item, times, trace, body)
    for topic in publishing.callback_topics(draft):
        ask.access.need("publish", topic)
    if unique is None:
        return draft
    if draft.key is not None:
        raise invalid("hadelay.key: messages of a FIFO queue have no key besides their deduplication id")
    return replace(draft, key=unique[1], on_conflict=PERIOD, unique_ms=_UNIQUE_MS)


def _options(given: Mapping[str, Value]) -> dict[str, Any]:
    """Options of the publish in message attributes, such as hadelay.key. Raises AwsError."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name.startswith(OPTION):
            option = name.removeprefix(OPTION)
            if option not in _OPTIONS or value.StringValue is None:
                known = ", ".join(sorted(OPTION + one for one in _OPTIONS))
                raise invalid(f"MessageAttributes.{name[:80]}: unknown option, or no text; there is {known}")
            found[option] = value.StringValue
    if "tags" in found:
        found["tags"] = found["tags"].split(",")
    return found


def _system(message: Message) -> dict[str, str]:
    """Check the system attributes of a message; returns those that its meta keeps. Raises AwsError."""
    given = message.MessageSystemAttributes
    if not given:
        return {}
    if unknown := sorted(given.keys() - {TRACE}):
        raise invalid(f"MessageSystemAttributes: {unknown[0][:80]!r} is not {TRACE}")
    text = given[TRACE].StringValue
    if not text or len(text) > _TRACE or given[TRACE].DataType != "String":
        raise invalid(f"MessageSystemAttributes.{TRACE}: a String of 1 to {_TRACE} characters")
    return {SYSTEM + TRACE: text}


def _fifo(queue: Queue, message: Message) -> tuple[str | None, tuple[str, bytes] | None]:
    """(group, (deduplication id, client key made from this id)): group of a message, None without one; the inner tuple
    for a FIFO queue, else None. Raises AwsError."""
    group, given = message.MessageGroupId, message.MessageDeduplicationId
    for member, text in (("MessageGroupId", group), ("MessageDeduplicationId", given)):
        if text is not None and not (0 < len(text) <= _LONGEST and text.isascii() and text.isprintable()):
            raise invalid(f"{member}: 1 to {_LONGEST} printable characters of ASCII, not {text[:40]!r}")
    if not queue.fifo:
        if given is not None:
            raise invalid("MessageDeduplicationId: only messages of a FIFO queue have one; its name ends with .fifo")
        return group, None
    if group is None:
        raise AwsError("MissingRequiredParameterException", "MessageGroupId: a message of a FIFO queue needs a group")
    if given is None:
        if queue.own("ContentBasedDeduplication") != "true":
            raise invalid(
                "MessageDeduplicationId: this queue has no ContentBasedDeduplication, so each message needs an id"
            )
        given = sha256(message.MessageBody.encode()).hexdigest()
    scope = group if queue.own("DeduplicationScope") == "messageGroup" else ""
    return group, (given, hash_key(b"sqs", f"{scope}\0{given}".encode()))
