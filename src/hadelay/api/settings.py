"""A topic's settings as the API writes them: durations as text, secrets and headers masked. The rules are in
settings/topic.py."""

from typing import Any

import msgspec

from hadelay.api.text import format_duration, parse_duration
from hadelay.api.topics import PutTopic
from hadelay.errors import BadRequest
from hadelay.settings.topic import MAX_BACKOFF_STEPS, SETTINGS, WEBHOOK, mask_header, mask_secret, shown_name
from hadelay.version import FIRST_LEVEL

#: Stored names (ending in _ms) of the settings that are durations: of topics, webhooks and backoffs.
_DURATIONS = {name for name in (*SETTINGS, *WEBHOOK, "min_ms", "max_ms") if name.endswith("_ms")}


def settings_in(body: PutTopic) -> dict[str, Any]:
    """The settings that a PUT names, as stored; None resets a setting. Raises BadRequest."""
    config = _stored(msgspec.to_builtins(body, enc_hook=int))
    for name in ("backoff", "webhook"):
        if isinstance(part := config.get(name), dict):
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
    return {f"{name}_ms" if f"{name}_ms" in _DURATIONS else name: value for name, value in part.items()}


def settings_out(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that were set, as fields of api.topics.Topic."""
    shown = {"defaults": FIRST_LEVEL} | _shown(config)
    if (backoff := shown.get("backoff")) is not None:
        shown["backoff"] = _shown(backoff) if isinstance(backoff, dict) else [format_duration(ms) for ms in backoff]
    if (webhook := shown.get("webhook")) is not None:
        webhook = shown["webhook"] = _shown(webhook)
        if "secrets" in webhook:
            webhook["secrets"] = [mask_secret(secret) for secret in webhook["secrets"]]
        if "headers" in webhook:
            webhook["headers"] = {name: mask_header(text) for name, text in webhook["headers"].items()}
    if (alert := shown.get("alert")) is not None and "secret" in alert:
        shown["alert"] = {**alert, "secret": mask_secret(alert["secret"])}
    return shown


def _shown(part: dict[str, Any]) -> dict[str, Any]:
    return {shown_name(name): format_duration(value) if name in _DURATIONS else value for name, value in part.items()}
