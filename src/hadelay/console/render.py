"""Templates, their filters, and the files that pages load."""

import gzip
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from multidict import CIMultiDict

from hadelay.api.text import format_instant
from hadelay.console.zones import beside, clock, millis, zone_of
from hadelay.http.answers import Answer
from hadelay.words import span

_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
#: Size of a page, in bytes, from which on it is compressed.
_SMALL = 1_024
#: Security headers of all pages: scripts and styles only from this node, forms only to it, and no page in a frame.
SECURITY: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class StaticFile(NamedTuple):
    body: bytes
    packed: bytes
    headers: dict[str, str]
    #: First digits of the file's SHA-256. The file's URL contains them, so browsers may cache the file for ever.
    version: str


def _lean(body: bytes) -> bytes:
    """Shorten a script or style of the console: drop comments that have a line of their own, and indents."""
    lines = (line.strip() for line in body.splitlines())
    return b"\n".join(line for line in lines if line and not line.startswith((b"//", b"/*")))


def load_static() -> dict[str, StaticFile]:
    found = {}
    for path in files("hadelay.console").joinpath("static").iterdir():
        kind = _TYPES.get(path.name.rpartition(".")[2])
        if kind is not None:
            body = path.read_bytes() if ".min." in path.name else _lean(path.read_bytes())
            headers = {
                "Content-Type": kind,
                "Cache-Control": "public, max-age=31536000, immutable",
                "Vary": "Accept-Encoding",
                **SECURITY,
            }
            version = hashlib.sha256(body).hexdigest()[:12]
            found[path.name] = StaticFile(body, gzip.compress(body, 9, mtime=0), headers, version)
    return found


def count(number: float) -> str:
    return f"{number:,.0f}"


def short(number: float) -> str:
    """Shorten a number for display: 950, 12.3 k, 4.56 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(number) >= size:
            return f"{number / (1e3 if unit == ' k' else size):.3g}{unit}"
    return f"{number:,.0f}"


def rate(number: float) -> str:
    """Format a rate per second for display: 0, 0.4, 12, 3,400."""
    return f"{number:.1f}" if 0 < number < 9.95 else f"{number:,.0f}"


def size(number: float) -> str:
    unit = 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{number:,.0f} B" if not unit else f"{number:,.1f} {_UNITS[unit]}"


class Renderer:
    """Renders pages. node, cluster: names of this node and its cluster."""

    def __init__(self, node: str, cluster: str = "") -> None:
        self.static = load_static()
        self._env = Environment(
            loader=PackageLoader("hadelay.console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._env.filters |= {
            "count": count, "short": short, "rate": rate, "size": size, "span": span, "millis": millis,
            "instant": format_instant, "clock": self._clock, "exact": self._exact, "beside": beside,
        }  # fmt: skip
        #: Time zone of the page that is being rendered.
        self._zone = zone_of(None)
        self._env.globals |= {"node": node, "cluster": cluster, "static": self.address_of}

    def address_of(self, name: str) -> str:
        return f"/console/static/{name}?v={self.static[name].version}"

    def render(self, template: str, values: Mapping[str, Any], zone: ZoneInfo) -> str:
        """Render a template. zone: time zone in which the page shows times."""
        self._zone = zone
        return str(self._env.get_template(template).render(values, zone=zone.key))

    def block(self, template: str, values: Mapping[str, Any], zone: ZoneInfo) -> str:
        """Render the template of a part of a page."""
        return self.render(f"parts/{template}", values, zone)

    def _clock(self, text: str, zone: str = "") -> Markup:
        """HTML of a time. zone: name of a time zone; "": the reader's."""
        return clock(text, zone_of(zone) if zone else self._zone)

    def _exact(self, text: str) -> Markup:
        return clock(text, self._zone, exact=True)


def as_answer(status: int, headers: Mapping[str, str], text: str | bytes, *, packs: bool) -> Answer:
    """Make an answer to a browser, which no cache may keep. packs: whether the browser accepts gzip."""
    body = text.encode() if isinstance(text, str) else text
    all_headers = CIMultiDict({"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store", **SECURITY})
    all_headers.update(headers)
    if packs and len(body) >= _SMALL:
        all_headers.update({"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})
        body = gzip.compress(body, 5, mtime=0)
    return Answer(status, all_headers, body)


def as_json(value: Any, *, packs: bool, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    all_headers = CIMultiDict(headers or {})
    all_headers["Content-Type"] = "application/json"
    return as_answer(status, all_headers, msgspec.json.encode(value), packs=packs)
