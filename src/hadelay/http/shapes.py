"""JSON Schemas of the values that the checks of requests accept: ranges, lengths, patterns, and members that exclude
each other.

The types in api/ say which members there are. The checks behind them are in several layers, down to apply; a test sends
the limits of each schema here to a node, and a node must take them.
"""

from typing import Any

from msgspec import Struct
from msgspec.structs import fields

from hadelay.api import (
    batches,
    cluster,
    consuming,
    jobs,
    messages,
    publishrequest,
    schedules,
    shards,
    topics,
    topicsettings,
)
from hadelay.api.publishoptions import OPTIONS, Kind
from hadelay.api.text import END_OF_YEARS_MS, SMALLEST_INSTANT_MS
from hadelay.codec.batches import MAX_LIFETIME_MS as MAX_BATCH_MS
from hadelay.codec.jobcommands import MAX_IDS
from hadelay.codec.schedules import ANY_VERSION, MAX_JITTER_MS, MAX_TIMES, MIN_EVERY_MS
from hadelay.model import MAX_GROUP, MAX_RATE, MAX_REASON, MAX_RUN
from hadelay.rights import MAX_LIFETIME_MS, MAX_TOKEN_NAME, MAX_TOKEN_SCOPES
from hadelay.settings import kinds
from hadelay.settings.cluster import Settings
from hadelay.settings.kinds import MAX_BACKOFF_STEPS, MAX_FILTER_TAGS, MAX_LABELS, MAX_SECRETS, shown_name
from hadelay.settings.topic import SETTINGS

Schema = dict[str, Any]

_MS, _S, _M, _H, _D = 1, 1_000, 60_000, 3_600_000, 86_400_000
_UNITS = (("ms", _MS), ("s", _S), ("m", _M), ("h", _H), ("d", _D))
#: Two units of a duration such as 1h30m: the larger unit → the smaller unit, and the pattern of the smaller unit's
#: number.
_PAIRS = {"d": ("h", "(1?[0-9]|2[0-3])"), "h": ("m", "[1-5]?[0-9]"), "m": ("s", "[1-5]?[0-9]")}


def _numbers(least: int, most: int) -> str:
    """Pattern of the whole numbers from `least`, 0 or more, to `most`. To keep the pattern
    short, it leaves out some numbers: if `most` is 1,000 or more, those with as many digits as `most`; if `least` is
    above 1, those below the next power of ten."""
    if most >= 1_000:
        most = 10 ** (len(str(most)) - 1) - 1
    if least > 1:
        least = 10 ** len(str(least - 1))
    digits, size = str(most), len(str(most))
    parts = ["0"] if not least else []
    first = len(str(least)) if least > 1 else 1
    shorter = size if most == 10**size - 1 else size - 1
    if shorter >= first:
        parts.append(f"[1-9][0-9]{{{first - 1},{shorter - 1}}}")
    if shorter < size:
        # Numbers with as many digits as the limit: equal digits in front, then a lower digit, then any digits.
        for n, digit in enumerate(digits):
            low, high = 0 if n else 1, int(digit) - (n < size - 1)
            if low <= high:
                parts.append(f"{digits[:n]}[{low}-{high}][0-9]{{{size - n - 1}}}")
    return f"({'|'.join(parts)})" if parts else ""


def durations(least_ms: int, most_ms: int) -> Schema:
    """Durations from least_ms to most_ms, as text and as a number of seconds. The pattern leaves out text with more
    than two units, and some numbers at the limits; nodes take them, too."""
    found = []
    for unit, ms in (*_UNITS, ("", _S)):
        least, most = -(-least_ms // ms), most_ms // ms
        if least <= most:
            found.append(f"{most}{unit}")
        if least < most and (number := _numbers(least, most - 1)):
            small, rest = _PAIRS.get(unit, ("", ""))
            found.append(rf"{number}(\.[0-9]{{1,3}})?{unit}")
            found += [f"{number}{unit}{rest}{small}"] if small else []
    return {
        "description": "250ms, 15m, 2h30m, 7d; a bare number is seconds",
        "anyOf": [
            {"type": "string", "pattern": f"^({'|'.join(found)})$"},
            {"type": "number", "minimum": least_ms / 1000, "maximum": most_ms / 1000},
        ],
    }


#: A time as text with an offset, or in Unix ms.
INSTANT: Schema = {
    "description": "RFC 3339 with any offset, or Unix milliseconds",
    "anyOf": [
        {"type": "string", "format": "date-time", "pattern": "^(19[7-9][0-9]|[2-9][0-9]{3})-"},
        {"type": "integer", "minimum": SMALLEST_INSTANT_MS, "maximum": END_OF_YEARS_MS - 1},
    ],
}


def integers(least: int, most: int) -> Schema:
    return {"minimum": least, "maximum": most}


def text(most: int, least: int = 1) -> Schema:
    """Text of `least` to `most` bytes, without control characters: ASCII up to `most` characters, other text up to a
    quarter of that."""
    other = r"[^\x00-\x1f\x7f-\x9f]"
    return {"pattern": rf"^([ -~]{{{least},{most}}}|{other}{{{least},{most // 4}}})$"}


def lists(item: Schema, most: int, least: int = 0) -> Schema:
    return {"items": item, "minItems": least, "maxItems": most}


def _but(schema: Schema, *refused: str) -> Schema:
    return {**schema, "not": {"enum": list(refused)}}


def _excluding(*pairs: tuple[str, str]) -> Schema:
    """Schema that refuses a document with both members of one of the pairs."""
    return {"not": {"anyOf": [{"required": list(pair)} for pair in pairs]}}


#: Schemas of the name of a topic to publish to, of the name of any topic or subscription, of a name or a pattern of
#: names, and of a tag. None of their characters needs percent-encoding in a URL.
_TOPIC = _but({"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"}, ".", "..")
_ANY_TOPIC: Schema = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}(~[A-Za-z0-9._-]{1,126})?$"}
_TOPICS: Schema = {"pattern": "^[A-Za-z0-9._*-]{1,128}$"}
_TAG: Schema = {"type": "string", "pattern": "^[!-+.-~-]{1,64}$"}
_TAGS_TEXT: Schema = {"pattern": "^[!-+.-~-]{1,64}(,[!-+.-~-]{1,64}){0,15}$"}
_ID: Schema = {"type": "string", "pattern": "^[0-9A-Fa-f][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{12}$"}
_URL: Schema = {
    "pattern": r"^https?://[A-Za-z0-9]([A-Za-z0-9.-]{0,200}[A-Za-z0-9])?(:[1-9][0-9]{0,3})?(/[A-Za-z0-9._~%/-]{0,200})?$"
}
_SECRET: Schema = {"type": "string", "pattern": "^whsec_([A-Za-z0-9+/]{4}){8,21}$"}
_FIELD: Schema = {
    "propertyNames": {"pattern": "^[Xx]-[A-Za-z0-9-]{1,40}$"},
    "maxProperties": 16,
    "additionalProperties": {"type": "string", "pattern": "^[ -~]{0,64}$"},
}
_META: Schema = {
    "maxProperties": 16,
    "additionalProperties": {"type": "string", "maxLength": 32},
    "propertyNames": {"maxLength": 16},
}
_DELAY, _POSITIVE = durations(0, 730 * _D), durations(1, 730 * _D)
_RATE: Schema = {"exclusiveMinimum": 0, "maximum": MAX_RATE}
_LIMIT, _LEASES = integers(1, 1_000), lists({"type": "string"}, 10_000)
_GROUP = _but(text(MAX_GROUP), ".", "..")
_RANGE = {"from": INSTANT, "to": INSTANT}
_CRON = "^(@(yearly|annually|monthly|weekly|daily|midnight|hourly)|[0-9A-Za-z*/,-]{1,40}( [0-9A-Za-z*/,-]{1,40}){4,5})$"
_TIMES: dict[str, Schema] = {
    "cron": {"pattern": _CRON}, "every": durations(MIN_EVERY_MS, 730 * _D), "at": lists(INSTANT, MAX_TIMES, 1),
    "timezone": {"maxLength": 255}, "start": INSTANT, "end": INSTANT,
}  # fmt: skip
_RECEIVE: dict[str, Schema] = {
    "max": _LIMIT, "wait": durations(0, 60 * _S), "lease": durations(1, 12 * _H), "consumer": text(128),
    "request_id": text(64), "tags": lists(_TAG, 16), "any_tags": lists(_TAG, 16),
    "group_max": integers(1, MAX_RUN),
}  # fmt: skip
_FILTER: dict[str, Schema] = {
    "topic": _TOPICS, "tags": lists(_TAG, 16), "ids": lists(_ID, MAX_IDS), "key_prefix": {"maxLength": 256},
    "group": {"maxLength": MAX_GROUP}, "schedule": {"maxLength": 128}, "error": {"maxLength": 128}, **_RANGE,
}  # fmt: skip
_SHIFT = durations(1, 730 * _D)
_SHIFT["anyOf"] = [
    {"type": "string", "pattern": _SHIFT["anyOf"][0]["pattern"].replace("^", "^-?", 1)},
    {"type": "number", "minimum": 0.001, "maximum": 730 * _D / 1000},
    {"type": "number", "minimum": -730 * _D / 1000, "maximum": -0.001},
]
_JOB: dict[str, Schema] = {
    "shift": _SHIFT,
    "deliver_at": INSTANT,
    "delay": _DELAY,
    "rate": {"minimum": 0.01, "maximum": MAX_RATE},
}
#: Kind of a topic setting → schema of the values that its check accepts; kinds with a range are not here.
_KINDS: dict[str, Schema] = {
    "topic": _TOPIC, "tags": lists({"type": "string", "minLength": 1, "maxLength": 64}, MAX_FILTER_TAGS),
    "backoff": lists(_DELAY, MAX_BACKOFF_STEPS, 1), "url": _URL, "secret": _SECRET,
    "secrets": lists(_SECRET, MAX_SECRETS, 1), "headers": _FIELD, "labels": {"maxProperties": MAX_LABELS},
}  # fmt: skip


def _accepted(kind: kinds.Kind) -> Schema:
    """Schema of the values that the check of a topic setting accepts."""
    if kind.name == "duration":
        most = getattr(Settings(), kind.most) if isinstance(kind.most, str) else kind.most
        return durations(int(kind.least), int(most))
    if kind.name in ("integer", "number"):
        above = kind.name == "number" and not kind.least
        return {"exclusiveMinimum" if above else "minimum": kind.least, "maximum": kind.most}
    return _KINDS.get(kind.name, {})


def _parts(setting: str) -> dict[str, Schema]:
    return {shown_name(name): _accepted(part.kind) for name, part in SETTINGS[setting].kind.parts.items()}


_TOPIC_SETTINGS = {shown_name(name): _accepted(row.kind) for name, row in SETTINGS.items() if row.put}
#: Schema of a duration in whole seconds.
_STEP: Schema = {
    "anyOf": [
        {"type": "string", "pattern": "^[1-9][0-9]{0,5}[smhd]?$"},
        {"type": "number", "minimum": 1, "maximum": 8_640_000},
    ]
}
_STATE = "(scheduled|ready|blocked|leased|retrying|acked|cancelled|expired|dead)"
_SCOPE: Schema = {"type": "string", "pattern": "^(publish|consume|read|admin)(:[A-Za-z0-9._*~-]{1,128})?$"}
_CONTENT_TYPE: Schema = {"pattern": "^[ -~]{0,256}$"}
_BASE64: Schema = {"pattern": "^([A-Za-z0-9+/]{4})*$"}
#: Kind of a publish option → schema of the values that rules/publishing.py accepts; kinds with a range or a length are
#: not here.
_OPTION_KINDS: dict[str, Schema] = {
    "instant": INSTANT, "tags": lists(_TAG, 16), "url": _URL, "topic": _TOPIC, "headers": _FIELD, "meta": _META,
    "type": _CONTENT_TYPE,
}  # fmt: skip


def _option(kind: Kind) -> Schema:
    """Schema of the values that rules/publishing.py accepts for a publish option of this kind."""
    if kind.name == "duration":
        return durations(kind.least, kind.most or Settings().max_delay_ms)
    if kind.name == "choice":
        return {"enum": list(kind.choices)}
    if kind.name in ("name", "text") and kind.most:
        return _but(text(kind.most), ".", "..") if kind.name == "name" else text(kind.most)
    return _OPTION_KINDS.get(kind.name, {})


_LIST: dict[str, Schema] = _RANGE | {
    "tag": _TAGS_TEXT,
    "limit": _LIMIT,
    "state": {"pattern": f"^(all|pending|{_STATE}(,{_STATE}){{0,8}})$"},
}
#: Type of a query or body → schemas of its members; they are merged into the schemas made from the members' types.
MEMBERS: dict[type, dict[str, Schema]] = {
    publishrequest.PublishQuery: {name: _option(row.kind) for name, row in OPTIONS.items() if row.query}
    | {"tags": _TAGS_TEXT},
    publishrequest.BatchItem: {name: _option(row.kind) for name, row in OPTIONS.items()}
    | {"topic": _TOPIC, "body_base64": _BASE64},
    consuming.Receive: _RECEIVE,
    consuming.ReceiveTopics: _RECEIVE | {"topics": lists(_ANY_TOPIC, 1_000, 1)},
    consuming.Ack: {"leases": _LEASES},
    consuming.Nack: {"leases": _LEASES, "delay": _DELAY, "reason": text(MAX_REASON, 0)},
    consuming.Extend: {"leases": _LEASES, "lease": durations(1, 12 * _H), "progress": text(MAX_REASON, 0)},
    messages.MessageQuery: {"wait": durations(0, 60 * _S)},
    messages.ListQuery: _LIST,
    messages.ListAllQuery: _LIST,
    topics.GroupsQuery: {"topic": _TOPIC},
    messages.DeadQuery: {"limit": _LIMIT},
    messages.Reschedule: {"shift": _SHIFT, "delay": _DELAY, "deliver_at": INSTANT},
    messages.Redrive: {"ids": lists(_ID, 1_000), "rate": _RATE, "all": {"const": True}},
    messages.Purge: {"states": {"minItems": 1}},
    jobs.JobFilter: _FILTER,
    jobs.BeginJob: _JOB | {"request_id": text(64)},
    jobs.CountJob: _JOB,
    topicsettings.PutTopic: _TOPIC_SETTINGS,
    topics.PutSubscription: _TOPIC_SETTINGS,
    topicsettings.Backoff: {
        "min": durations(1, _M), "max": durations(_M, 730 * _D), "factor": integers(1, 100), "jitter": integers(0, 1),
    },
    topicsettings.Webhook: _parts("webhook"),
    topicsettings.Alert: _parts("alert"),
    topics.Pause: {"reason": text(256, 0)},
    topics.DueQuery: _RANGE | {"step": _STEP},
    schedules.PutSchedule: _TIMES
    | {
        "topic": _TOPIC, "max_occurrences": integers(1, 2**53 - 1), "jitter": durations(0, MAX_JITTER_MS),
        "catch_up_window": _DELAY, "tags": lists(_TAG, 16), "meta": _META, "ttl": _POSITIVE, "group": _GROUP,
        "content_type": _CONTENT_TYPE, "body_base64": _BASE64,
    },
    batches.OpenBatch: {
        "key": {"pattern": "^[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,127}$"}, "ttl": durations(1, MAX_BATCH_MS),
    },
    batches.BatchCallback: {
        "topic": _TOPIC, "tags": lists(_TAG, 16), "meta": _META, "delay": _DELAY, "ttl": _POSITIVE,
        "content_type": _CONTENT_TYPE, "body_base64": _BASE64,
    },
    batches.ListBatchesQuery: {"limit": _LIMIT},
    shards.NamesQuery: {"limit": _LIMIT},
    schedules.PutScheduleQuery: {"version": integers(0, ANY_VERSION - 1)},
    schedules.ListSchedulesQuery: {"limit": _LIMIT},
    schedules.Preview: _TIMES | {"count": integers(1, 100), "after": INSTANT},
    schedules.Backfill: _RANGE,
    cluster.CreateToken: {
        "name": text(MAX_TOKEN_NAME), "lifetime": durations(1, MAX_LIFETIME_MS),
        "scopes": lists(_SCOPE, MAX_TOKEN_SCOPES, 1),
    },
    cluster.AuditQuery: {"after": integers(0, 2**53), "limit": _LIMIT},
}  # fmt: skip
_BODIES = ["body", "body_base64"]
_NEVER: Schema = {"not": {}}  # in place of `false`, which generators of clients do not understand
_ONE_TIME: Schema = {
    "not": {
        "anyOf": [
            {"properties": dict.fromkeys(("cron", "every", "at"), _NEVER)},
            {"required": ["cron", "every"]}, {"required": ["cron", "at"]}, {"required": ["every", "at"]},
        ]
    },
    "dependentRequired": {"timezone": ["cron"]},
}  # fmt: skip
_CHANGES = ("shift", "delay", "deliver_at")
_ONE_CHANGE: Schema = {
    "if": {"properties": {"action": {"const": "reschedule"}}},
    "then": {"oneOf": [{"required": [name]} for name in _CHANGES], "properties": {"into": _NEVER}},
    "else": {
        "properties": dict.fromkeys(_CHANGES, _NEVER),
        "dependentSchemas": {"into": {"properties": {"action": {"const": "transfer"}, "into": _TOPIC}}},
    },
}
#: Type of a body → which of its members exclude or need each other. These members are never null here.
TOGETHER: dict[type, Schema] = {
    publishrequest.BatchItem: {
        **_excluding(("delay", "deliver_at"), ("body", "body_base64"), ("unique_for", "on_conflict")),
        "dependentRequired": {"on_conflict": ["key"], "unique_for": ["key"], "max_wait": ["on_conflict"]},
    },
    messages.Reschedule: {
        "oneOf": [{"required": [name]} for name in _CHANGES], "dependentRequired": {"shift": ["expected_deliver_at"]},
    },
    messages.Redrive: {
        "minProperties": 1, **_excluding(("ids", "all"), ("ids", "rate")), "dependentRequired": {"rate": ["all"]},
    },
    batches.BatchCallback: _excluding(("body", "body_base64")),
    jobs.BeginJob: _ONE_CHANGE,
    jobs.CountJob: _ONE_CHANGE,
    topicsettings.Webhook: _excluding(("secret", "secrets")),
    schedules.PutSchedule: _ONE_TIME | {"not": {"anyOf": [*_ONE_TIME["not"]["anyOf"], {"required": _BODIES}]}},
    schedules.Preview: _ONE_TIME,
}  # fmt: skip


def _parts_help(setting: str) -> dict[str, str]:
    return {shown_name(name): part.help for name, part in SETTINGS[setting].kind.parts.items() if part.help}


_OPTIONS_HELP = {name: row.help for name, row in OPTIONS.items()}
_SETTINGS_HELP = {shown_name(name): row.help for name, row in SETTINGS.items() if row.put}
#: Type of a body → descriptions of its members.
_HELP: dict[type, dict[str, str]] = {
    publishrequest.PublishQuery: _OPTIONS_HELP,
    publishrequest.BatchItem: _OPTIONS_HELP,
    topicsettings.PutTopic: _SETTINGS_HELP,
    topics.PutSubscription: _SETTINGS_HELP,
    topicsettings.Webhook: _parts_help("webhook"),
    topicsettings.Alert: _parts_help("alert"),
}


#: Keywords of JSON Schema → types of values to which they apply.
_ABOUT = {
    **dict.fromkeys(("pattern", "minLength", "maxLength"), ("string",)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum"), ("integer", "number")),
    **dict.fromkeys(("items", "minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("propertyNames", "maxProperties", "additionalProperties"), ("object",)),
}


def _narrow(found: Schema, shape: Schema) -> None:
    """Add a shape to the schema of a member. If the schema has alternatives, add the shape to those of the types to
    which its keywords apply."""
    options = found.get("anyOf", ())
    if "anyOf" in shape:
        found |= shape | {"anyOf": [*shape["anyOf"], *(one for one in options if one == {"type": "null"})]}
        return
    kinds = {kind for keyword in shape for kind in _ABOUT.get(keyword, ())}
    fitting = [one for one in options if one.get("type") in kinds]
    for one in fitting or [found]:
        one |= shape


def members(kind: type, schema: Schema) -> None:
    """Narrow the schema of a query or body to what the checks accept, and add descriptions of the members."""
    alone = TOGETHER.get(kind, {})
    schema |= alone
    for name, shape in MEMBERS.get(kind, {}).items():
        _narrow(schema["properties"][name], shape)
    for name, help in _HELP.get(kind, {}).items():
        found = schema["properties"].get(name, {})
        found["description"] = f"{help} {found.get('description', '')}".rstrip()
    for name, found in schema["properties"].items():
        if f"'{name}'" in repr(alone) and "anyOf" in found:
            found["anyOf"] = [option for option in found["anyOf"] if option != {"type": "null"}]


def needs_members(kind: Any) -> bool:
    """Whether a request must have a body: {}, which stands for no body, is refused."""
    if not isinstance(kind, type) or not issubclass(kind, Struct):
        return True
    together = TOGETHER.get(kind, {})
    wants = "minProperties" in together or "oneOf" in together or together is _ONE_TIME
    return wants or any(field.required for field in fields(kind))
