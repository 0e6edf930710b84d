"""`hadelay cluster certs`: a small certificate authority (CA) for one cluster, run by the openssl command.

docs/howto/security.md says what a node's certificate needs if another CA signs it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hadelay.cli.output import Printing, Several, show
from hadelay.errors import BadRequest, HadelayError, NotFound

_CA_DAYS = 3650
_CONFIG = """
[req]
distinguished_name = name
prompt = no
[name]
CN = {name}
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[node]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def certs(
    directory: Path, /, *nodes: str, host: Several = (), days: int = 365, printing: Printing = Printing(),
) -> None:  # fmt: skip
    """Create certificates for the nodes of a cluster, signed by the cluster's own certificate authority (CA).

    The first run creates the CA (ca.pem, ca.key); keep ca.key off the nodes. Each named node gets a new NODE.pem and
    NODE.key. Running nodes load changed files by themselves.

    Args:
        directory: Directory of certificates and keys.
        nodes: Names of nodes, as in node.name.
        host: NODE=HOST: name or address of a node for clients. HOST: for every node; {node} is its name. Repeatable.
        days: Validity of the nodes' certificates, in days.
    """
    if not nodes:
        raise BadRequest("name the nodes: hadelay cluster certs DIRECTORY n1 n2 n3")
    hosts: dict[str, list[str]] = {name: [] for name in nodes}
    for text in host:
        one, equals, address = text.rpartition("=")
        if not address or (equals and one not in hosts):
            raise BadRequest(f"--host {text}: expected NODE=HOST, with one of the given nodes, or HOST for every node")
        for name in [one] if equals else nodes:
            hosts[name].append(address.replace("{node}", name))
    make_authority(directory)
    made = [make_certificate(directory, name, addresses, days) for name, addresses in hosts.items()]
    show([{"certificate": path} for path in (str(directory / "ca.pem"), *map(str, made))], printing, ["certificate"])


def make_authority(directory: Path) -> None:
    """Create ca.pem and ca.key unless they exist."""
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / "ca.key").exists():
        return
    with tempfile.TemporaryDirectory(dir=directory) as name:
        scratch = Path(name)
        (scratch / "config").write_text(_CONFIG.format(name="hadelay cluster authority", names=""))
        _openssl(
            scratch,
            *("req", "-x509", *_NEW_KEY, "-config", "config", "-extensions", "authority", "-days", str(_CA_DAYS)),
            *("-keyout", "key", "-out", "cert"),
        )
        _move(scratch, directory, "ca")


def make_certificate(directory: Path, name: str, hosts: Sequence[str] = (), days: int = 365) -> Path:
    """Create or replace NAME.pem and NAME.key; returns the path of NAME.pem."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) or name == "ca":
        raise BadRequest(f"{name!r}: a node's name is 1 to 64 of A-Z a-z 0-9 . _ -, and not ca")
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9.:*_-]+", host):
            raise BadRequest(f"{host!r} is neither a host's name nor an address")
    if not (directory / "ca.key").exists():
        raise NotFound(f"{directory}: there is no ca.key to sign certificates with")
    names = ", ".join(f"{'IP' if _is_address(host) else 'DNS'}:{host}" for host in dict.fromkeys((name, *hosts)))
    with tempfile.TemporaryDirectory(dir=directory) as made:
        scratch, authority = Path(made), directory.absolute()
        (scratch / "config").write_text(_CONFIG.format(name=name, names=names))
        _openssl(scratch, "req", "-new", *_NEW_KEY, "-config", "config", "-keyout", "key", "-out", "request")
        _openssl(
            scratch,
            *("x509", "-req", "-in", "request", "-out", "cert", "-days", str(days)),
            *("-CA", str(authority / "ca.pem"), "-CAkey", str(authority / "ca.key")),
            *("-set_serial", f"0x{secrets.token_hex(16)}", "-extfile", "config", "-extensions", "node", "-sha256"),
        )
        return _move(scratch, directory, name)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _move(scratch: Path, directory: Path, name: str) -> Path:
    os.chmod(scratch / "key", 0o600)
    os.replace(scratch / "key", directory / f"{name}.key")
    os.replace(scratch / "cert", directory / f"{name}.pem")
    return directory / f"{name}.pem"


def _openssl(directory: Path, *words: str) -> None:
    try:
        done = subprocess.run(("openssl", *words), cwd=directory, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotFound("the openssl command is not installed: install it, or use another CA") from None
    if done.returncode:
        raise HadelayError(f"openssl {words[0]}: {done.stderr.strip()[-500:]}")
