"""Rules for the URLs that users set: webhooks, alerts and the webhooks of single messages."""

import re
from ipaddress import IPv6Address
from typing import Any
from urllib.parse import urlsplit

from hadelay.settings.cluster import Settings

MAX_URL = 2_048
#: Pattern for host and port of a URL.
_HOST = re.compile(r"[^/]*//([^/?#]*)")
#: Pattern for a bracketed IPv6 address without a scope, with an optional port.
_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::[0-9]+)?")
_ORIGIN = re.compile(r"(https?)://(\[[^\]/?#]*\]|[^:/?#]*)(?::([0-9]*))?", re.IGNORECASE)
_PORTS = {"http": "80", "https": "443"}


def url_problem(url: Any, _: Settings | None = None) -> str:
    """Error text for an invalid URL; "" for a valid URL. A caller checks the host's address when connecting."""
    if not isinstance(url, str) or not 0 < len(url) <= MAX_URL or not url.isascii() or not url.isprintable():
        return f"a URL is 1 to {MAX_URL} printable ASCII characters"
    if " " in url:
        return "a URL has no spaces: write %20"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"not a URL: {error}"
    if parts.scheme not in ("http", "https"):
        return (
            f"a URL begins with http:// or https://, not {parts.scheme[:20] + ':' if parts.scheme else 'without one'}"
        )
    if not host or port == 0:
        return "the URL has no host"
    if parts.username is not None or parts.password is not None:
        return "a URL must not contain a password, which would appear in logs: use `headers` instead"
    if parts.fragment:
        return "a URL must not have a fragment (#…), which receivers never see: leave it out"
    return ""


def origin_of(url: str) -> tuple[str, str, str]:
    """Scheme, host and port of a valid URL; three empty texts for an invalid one."""
    found = _ORIGIN.match(url)
    if found is None:
        return "", "", ""
    scheme, host = found[1].lower(), found[2].lower()
    return scheme, host, found[3] or _PORTS[scheme]


def disputed_url(config: dict[str, Any]) -> str:
    """Error text for a URL with brackets that Python versions judge differently; "" for others. Apply must decide alike
    on all nodes, so only plain IPv6 addresses pass. Call this after `problem`."""
    for name in ("webhook", "alert"):
        url = (config.get(name) or {}).get("url", "")
        host = _HOST.match(url)
        if host is not None and not _is_plain(host[1]):
            return f"{name}: url: brackets are only for an IPv6 address, as in http://[2001:db8::1]:8080/"
    return ""


def _is_plain(host: str) -> bool:
    if "[" not in host and "]" not in host:
        return True
    address = _BRACKETED.fullmatch(host)
    try:
        return address is not None and IPv6Address(address[1]).version == 6
    except ValueError:
        return False
