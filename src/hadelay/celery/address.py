"""Parser of the URLs in Celery's settings: hadelay://:token@host:port,host2:port2/prefix?ca=/path/of.pem

hadelays:// uses TLS. Without hosts, the addresses come from HADELAY_SERVERS, or there is one node on loopback. The
prefix names the application: its topics begin with "prefix.".
"""

import functools
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote

from kombu.utils.url import as_url

from hadelay.client import Client

_PASSWORD = re.compile(r"(://[^/@]*:)[^/@]*@")
_SCHEMES = {"hadelay": "http", "hadelays": "https"}


class Address(NamedTuple):
    """A cluster, and the part of its topics that an application uses."""

    urls: str
    token: str | None
    #: Prefix of the names of all topics, such as "shop."; may be empty.
    prefix: str
    ca: str | None


def address_of(url: str, ssl: Mapping[str, Any] | bool | None = None) -> Address:
    """Parse a URL. Raises ValueError for a URL of another form. ssl: Celery's setting `broker_use_ssl`; its `ca_certs`
    is the file with the CA certificate for the nodes' certificates."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    options = parse_qs(query, strict_parsing=True) if query else {}
    if scheme not in _SCHEMES or options.keys() - {"ca"}:
        raise ValueError(f"{masked(url)}: expected a URL such as hadelay://:token@host:8400,host2:8400/prefix?ca=file")
    if hosts:
        protocol = "https" if ssl else _SCHEMES[scheme]
        urls = ",".join(
            f"{protocol}://{host if re.search(r':[0-9]+$', host) else host + ':8400'}" for host in hosts.split(",")
        )
    else:
        urls = os.environ.get("HADELAY_SERVERS") or "http://127.0.0.1:8400"
    name = unquote(path).strip("/")
    ca = options["ca"][0] if "ca" in options else ssl.get("ca_certs") if isinstance(ssl, Mapping) else None
    return Address(urls, unquote(credentials.partition(":")[2]) or None, f"{name}." if name else "", ca)


def url_of(client: Any) -> str:
    """URL of a kombu connection. Of a list of failover URLs, kombu leaves only the first whole; the others are put
    together again from their parts."""
    if "://" in client.hostname:
        return str(client.hostname)
    scheme = "hadelays" if client.transport_cls == "hadelays" else "hadelay"
    path = (client.virtual_host or "").lstrip("/")
    return str(as_url(scheme, client.hostname, client.port, "", client.password, path))


def masked(url: str, mask: str = "**") -> str:
    """The URL with its token replaced by `mask`."""
    return _PASSWORD.sub(rf"\g<1>{mask}@", url)


#: Client of a test's own node. If set, all new connections use it instead of the cluster in the settings.
of_a_test: Client | None = None


def client_of(address: Address, timeout_s: float) -> Client:
    """The client that all connections of a process to the cluster share. The client survives a fork."""
    return of_a_test or _client_of(address, timeout_s)


@functools.cache
def _client_of(address: Address, timeout_s: float) -> Client:
    return Client(address.urls, address.token, timeout=timeout_s, ca=address.ca)
