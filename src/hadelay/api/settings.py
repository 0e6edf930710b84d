"""A topic's settings as the API writes them: durations as text, secrets and headers masked. The rules are in
settings/topic.py."""

from __future__ import annotations

from typing import Any

import msgspec

from hadelay.api.base import Duration
from hadelay.api.text import format_duration, parse_duration
from hadelay.api.topics import PutTopic
from hadelay.errors import BadRequest
from hadelay.settings.topic import MAX_BACKOFF_STEPS, SETTINGS, WEBHOOK, mask_header, mask_secret
from hadelay.version import FIRST_LEVEL

#: Names under which settings and their parts are kept: of durations with `_ms`.
_KEPT = {*SETTINGS, *WEBHOOK, "min_ms", "max_ms"}


def settings_in(body: PutTopic) -> dict[str, Any]:
    """What PUT names; None takes a setting back."""
    config: dict[str, Any] = _in(body)
    if isinstance(backoff := config.get("backoff"), list):
        if len(backoff) > MAX_BACKOFF_STEPS:  # not one by one before that is known
            raise BadRequest(f"backoff: {len(backoff)} durations; at most {MAX_BACKOFF_STEPS}, the last one repeats")
        config["backoff"] = [parse_duration(f"backoff[{n}]", value) for n, value in enumerate(backoff)]
    webhook = config.get("webhook")
    if webhook is not None and "secret" in webhook:
        if "secrets" in webhook:
            raise BadRequest("webhook: secret and secrets are both given; secret stands for a list of one")
        webhook["secrets"] = [webhook.pop("secret")]
    return config


def settings_out(config: dict[str, Any]) -> dict[str, Any]:
    """What was set, ready for api.topics.Topic."""
    shown: dict[str, Any] = {"defaults": FIRST_LEVEL} | _out(config)
    webhook = shown.get("webhook") or {}
    if "secrets" in webhook:
        webhook["secrets"] = [mask_secret(secret) for secret in webhook["secrets"]]
    if "headers" in webhook:
        webhook["headers"] = {name: mask_header(text) for name, text in webhook["headers"].items()}
    if (alert := shown.get("alert")) is not None and "secret" in alert:
        alert["secret"] = mask_secret(alert["secret"])
    return shown


def _in(value: Any) -> Any:
    if isinstance(value, Duration):
        return int(value)
    if isinstance(value, list):
        return [_in(one) for one in value]
    if not isinstance(value, msgspec.Struct):
        return value
    named = {name: getattr(value, name) for name in value.__struct_fields__}
    return {
        f"{name}_ms" if f"{name}_ms" in _KEPT else name: _in(one)
        for name, one in named.items()
        if one is not msgspec.UNSET
    }


def _out(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {one.removesuffix("_ms"): _out(part, one) for one, part in value.items()}
    if isinstance(value, list):
        return [_out(part, name) for part in value]
    return format_duration(value) if type(value) is int and (name.endswith("_ms") or name == "backoff") else value
