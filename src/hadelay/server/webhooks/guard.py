"""Where a webhook may lead: nowhere inside, unless the configuration allows it.

A topic's owner writes the URL and a node makes the request, from inside the network (SSRF). So only public addresses
are called. That is judged three times: when the URL is set, for literal addresses and for what the name gives then;
when the name is resolved for a call; and on the very address that a socket is about to be connected to, which is the
one that counts: a name that answers differently the second time (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any, TypeVar
from urllib.parse import urlsplit

Info = TypeVar("Info", bound=tuple[Any, ...])
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
#: NAT64: the last 32 bits are an IPv4 address that a gateway connects to.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: Not private by name, and answered from inside all the same: what IETF protocols use, and one cloud's metadata; what
#: another cloud's machines ask for their keys.
_INSIDE = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("168.63.129.16/32"))
#: All that was ever given out of IPv6 for unicast.
_UNICAST6 = ipaddress.ip_network("2000::/3")


class AddressRefused(OSError):
    """The only addresses of a host are such as must not be called."""


class Guard:
    def __init__(self, allow: Iterable[str] = ()) -> None:
        """allow: networks in CIDR notation that may be called although they are not public."""
        self.allow = [ipaddress.ip_network(network) for network in allow]

    def permits(self, address: str) -> bool:
        """`address`: a literal one, IPv6 zone and all."""
        ip = _meant(ipaddress.ip_address(address.partition("%")[0]))
        return _is_public(ip) or any(ip.version == network.version and ip in network for network in self.allow)

    def literal_problem(self, url: str) -> str:
        """What forbids a URL at first sight, without asking any name server; empty if nothing does."""
        host = (urlsplit(url).hostname or "").rstrip(".")
        try:
            address = str(ipaddress.ip_address(host.partition("%")[0]))
        except ValueError:
            numeric = _as_numbers(host)
            if numeric is None:
                local = host == "localhost" or host.endswith(".localhost")
                address = "127.0.0.1" if local else ""
            else:
                address = numeric
        if not address or self.permits(address):
            return ""
        return (
            f"{host} is a private address: webhooks call public ones, unless [webhooks] allow in the nodes' "
            "configuration names the network"
        )

    def permitted(self, found: list[Info]) -> list[Info]:
        """What getaddrinfo found for a host, less what may not be called. Raises AddressRefused if nothing is left."""
        permitted = [one for one in found if self.permits(one[4][0])]
        if not permitted:
            raise AddressRefused("private addresses only")
        return permitted

    def socket(self, info: Info) -> socket.socket:
        """A socket factory: the last check, of what is connected to. Raises AddressRefused."""
        family, kind, proto, _, address = info
        if not self.permits(address[0]):
            raise AddressRefused(f"{address[0]} is a private address")
        return socket.socket(family, kind, proto)


def _meant(ip: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for (mapped, NAT64, 6to4), or the address itself."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour or ip


def _is_public(ip: Address) -> bool:
    """Not private, loopback, link-local, shared (CGNAT), reserved, unspecified, documentation, multicast, …"""
    if isinstance(ip, ipaddress.IPv6Address) and ip not in _UNICAST6:
        return False
    if any(ip in network for network in _INSIDE):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


def _as_numbers(host: str) -> str | None:
    """`2130706433`, `0x7f.1`: what the C library reads as an address, it reads so for attackers too."""
    if not host or not host[0].isdigit():
        return None
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        return None
