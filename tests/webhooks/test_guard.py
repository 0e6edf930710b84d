"""What may be called: public addresses, and what the configuration allows."""

from __future__ import annotations

import socket

import pytest

from hadelay.server.guard import AddressRefused, Guard

PRIVATE = """
127.0.0.1 127.8.8.8 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 169.254.169.254 100.64.0.1 100.127.255.254
0.0.0.0 0.1.2.3 192.0.0.1 192.0.2.1 198.18.0.1 198.51.100.7 203.0.113.9 224.0.0.1 239.255.255.250 240.0.0.1
255.255.255.255 ::1 :: fe80::1 fe80::1%eth0 fc00::1 fd12:3456::1 fec0::1 ff02::1 2001:db8::1 2001::1
::ffff:127.0.0.1 ::ffff:10.0.0.1 ::127.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::1 2002:7f00:1::
2002:c0a8:101::1 100::1 192.0.0.8 192.0.0.192 168.63.129.16 ::ffff:168.63.129.16 64:ff9b::c000:c0
"""
PUBLIC = """
8.8.8.8 1.1.1.1 100.63.255.255 100.128.0.1 172.32.0.1 168.63.129.17 192.0.1.1 2606:4700::1111 ::ffff:8.8.8.8
64:ff9b::808:808
"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_private_addresses_are_refused(address: str) -> None:
    assert not Guard().permits(address)


@pytest.mark.parametrize("address", PUBLIC.split())
def test_public_addresses_are_permitted(address: str) -> None:
    assert Guard().permits(address)


def test_networks_can_be_allowed() -> None:
    guard = Guard(["10.1.0.0/16", "::1/128"])
    assert [guard.permits(a) for a in ("10.1.2.3", "::ffff:10.1.2.3", "::1", "10.2.0.1", "127.0.0.1")] == [
        True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::1]", "localhost", "LOCALHOST", "a.localhost", "localhost.", "2130706433", "0x7f000001", "127.1",
     "017700000001", "0", "[::ffff:127.0.0.1]", "[fe80::1%25eth0]", "169.254.169.254:80"],
)  # fmt: skip
def test_urls_of_private_literals_are_refused_at_first_sight(host: str) -> None:
    assert "private" in Guard().literal_problem(f"http://{host}/x")


@pytest.mark.parametrize("host", ["example.com", "8.8.8.8", "[2606:4700::1111]:8443", "0x.example", "1.example.com"])
def test_other_urls_are_not(host: str) -> None:
    assert Guard().literal_problem(f"https://{host}/x") == ""


def found(*addresses: str) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    """As getaddrinfo gives it."""
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 80)) for one in addresses]


def test_private_answers_of_a_name_server_are_left_out() -> None:
    assert Guard().permitted(found("10.0.0.1", "8.8.8.8", "127.0.0.1")) == found("8.8.8.8")
    with pytest.raises(AddressRefused):
        Guard().permitted(found("10.0.0.1"))


def test_no_socket_is_made_for_a_private_address() -> None:
    with pytest.raises(AddressRefused):
        Guard().socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80)))
    Guard(["127.0.0.0/8"]).socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80))).close()
