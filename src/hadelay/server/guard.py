"""Decides which addresses webhooks may call: public ones, and networks that the configuration allows.

A topic's owner writes the URL and a node makes the request from inside the network (SSRF). Addresses are judged three
times: when the URL is set; when the name is resolved for a call; and for the socket that is about to connect. The last
judgement decides: a name that answers differently the second time (DNS rebinding) gains nothing.
"""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any, TypeVar
from urllib.parse import urlsplit

Info = TypeVar("Info", bound=tuple[Any, ...])
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
#: Network of NAT64: the last 32 bits of its addresses are an IPv4 address that a gateway connects to.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: Networks that count as public but lead to services inside a cloud: IETF protocol assignments, where one cloud has its
#: metadata service; and the address from which another cloud's machines fetch their keys.
_INSIDE = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("168.63.129.16/32"))
#: Network of all IPv6 unicast addresses that are assigned so far.
_UNICAST6 = ipaddress.ip_network("2000::/3")


class AddressRefused(OSError):
    """Error: no address of a webhook's host may be called."""


class Guard:
    def __init__(self, allow: Iterable[str] = ()) -> None:
        """allow: networks in CIDR notation that may be called although they are not public."""
        self.allow = [ipaddress.ip_network(network) for network in allow]

    def permits(self, address: str) -> bool:
        """Whether webhooks may call an IP address. address: as text, perhaps with an IPv6 zone."""
        ip = _meant(ipaddress.ip_address(address.partition("%")[0]))
        return _is_public(ip) or any(ip.version == network.version and ip in network for network in self.allow)

    def literal_problem(self, url: str) -> str:
        """Reason why webhooks may not call a URL, judged from its text only, without looking up the host's name; "" if
        there is none."""
        host = (urlsplit(url).hostname or "").rstrip(".")
        try:
            address = str(ipaddress.ip_address(host.partition("%")[0]))
        except ValueError:
            local = host == "localhost" or host.endswith(".localhost")
            address = "127.0.0.1" if local else _as_numbers(host)
        if not address or self.permits(address):
            return ""
        return (
            f"{host} is a private address: webhooks call public ones, unless [webhooks] allow in the nodes' "
            "configuration names the network"
        )

    def permitted(self, found: list[Info]) -> list[Info]:
        """Those results of getaddrinfo whose addresses webhooks may call. Raises AddressRefused if there are none."""
        permitted = [one for one in found if self.permits(one[4][0])]
        if not permitted:
            raise AddressRefused("the host has private addresses only; webhooks call public addresses")
        return permitted

    def socket(self, info: Info) -> socket.socket:
        """Create a socket to connect to an address. Raises AddressRefused if webhooks may not call it."""
        family, kind, proto, _, address = info
        if not self.permits(address[0]):
            raise AddressRefused(f"{address[0]} is a private address; webhooks call public addresses")
        return socket.socket(family, kind, proto)


def _meant(ip: Address) -> Address:
    """The IPv4 address inside an IPv6 address (mapped, NAT64, 6to4), or the address itself."""
    if isinstance(ip, ipaddress.IPv4Address):
        return ip
    if ip in _NAT64:
        return ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour or ip


def _is_public(ip: Address) -> bool:
    """Whether an address is public: not private, loopback, link-local, CGNAT, reserved, multicast, …"""
    if ip.version == 6 and ip not in _UNICAST6:
        return False
    if any(ip in network for network in _INSIDE):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


def _as_numbers(host: str) -> str:
    """The IPv4 address that the C library would read from a host like `2130706433` or `0x7f.1`; empty for a name."""
    if not host[:1].isdigit():
        return ""
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        return ""
