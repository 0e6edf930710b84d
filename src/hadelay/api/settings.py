"""A topic's settings as the API writes them: durations as text, secrets and headers masked. The rules are in
settings/topic.py."""

from typing import Any

import msgspec

from hadelay.api.text import format_duration, parse_duration
from hadelay.api.topicsettings import PutTopic
from hadelay.errors import BadRequest
from hadelay.settings.kinds import MAX_BACKOFF_STEPS, Kind, shown_name
from hadelay.settings.topic import SETTINGS, mask_header, mask_secret

#: API names of settings and of their fields → names as stored.
_STORED = {shown_name(name): name for name in SETTINGS}
_STORED |= {shown_name(name): name for row in SETTINGS.values() for name in row.kind.parts}


def settings_in(body: PutTopic) -> dict[str, Any]:
    """The settings that a PUT names, as stored; None resets a setting. Raises BadRequest."""
    config = _stored(msgspec.to_builtins(body, enc_hook=int))
    for name, part in config.items():
        if isinstance(part, dict) and SETTINGS[name].kind.parts:
            config[name] = _stored(part)
    if isinstance(backoff := config.get("backoff"), list):
        if len(backoff) > MAX_BACKOFF_STEPS:  # refuse a long list before parsing its items
            raise BadRequest(f"backoff: {len(backoff)} durations; at most {MAX_BACKOFF_STEPS}, the last one repeats")
        config["backoff"] = [parse_duration(f"backoff[{n}]", value) for n, value in enumerate(backoff)]
    webhook = config.get("webhook")
    if webhook is not None and "secret" in webhook:
        if "secrets" in webhook:
            raise BadRequest("webhook: give either secret or secrets, not both")
        webhook["secrets"] = [webhook.pop("secret")]
    for name in (webhook or {}).get("headers", ()):
        if name.lower().startswith("hadelay-"):
            raise BadRequest(f"webhook: headers: {name}: names that begin with hadelay- are the cluster's own")
    return config


def _stored(part: dict[str, Any]) -> dict[str, Any]:
    return {_STORED.get(name, name): value for name, value in part.items()}


def settings_out(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that were set, as fields of api.topicsettings.Topic."""
    return {shown_name(name): _shown(SETTINGS[name].kind, value) for name, value in config.items()}


def _shown(kind: Kind, value: Any) -> Any:
    """A stored value in the form that answers have: durations as text, secrets and headers masked."""
    if kind.parts and isinstance(value, dict):
        return {shown_name(name): _shown(kind.parts[name].kind, one) for name, one in value.items()}
    match kind.name:
        case "duration":
            return format_duration(value)
        case "backoff":
            return [format_duration(ms) for ms in value]
        case "secret":
            return mask_secret(value)
        case "secrets":
            return [mask_secret(secret) for secret in value]
        case "headers":
            return {name: mask_header(text) for name, text in value.items()}
    return value
