"""`hadelay cluster certs`: a small certificate authority (CA), run by the openssl command, version 3 or later.

docs/howto/security.md says what a node's certificate needs if another CA signs it.
"""

import ipaddress
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hadelay.cli.output import Printing, Several, show
from hadelay.errors import BadRequest, HadelayError, NotFound

_CA_DAYS = 3650
#: X.509 extensions of the CA, and of a node's certificate.
_AUTHORITY = ("basicConstraints = critical, CA:TRUE, pathlen:0", "keyUsage = critical, keyCertSign, cRLSign")
_NODE = (
    "basicConstraints = critical, CA:FALSE", "keyUsage = critical, digitalSignature",
    "extendedKeyUsage = serverAuth, clientAuth", "authorityKeyIdentifier = keyid",
)  # fmt: skip


def certs(
    directory: Path,
    /,
    *nodes: str,
    host: Several = (),
    days: int = 365,
    printing: Printing = Printing(),
) -> None:
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
    _issue(directory, "ca", "hadelay cluster authority", _CA_DAYS, _AUTHORITY)


def make_certificate(directory: Path, name: str, hosts: Sequence[str] = (), days: int = 365) -> Path:
    """Create or replace NAME.pem and NAME.key; returns the path of NAME.pem."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) or name == "ca":
        raise BadRequest(f"{name!r}: a node's name is 1 to 64 of A-Z a-z 0-9 . _ -, and not ca")
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9.:*_-]+", host):
            raise BadRequest(f"{host!r} is neither a host's name nor an address")
    if not (directory / "ca.key").exists():
        raise NotFound(f"{directory}: ca.key is missing, which signs certificates: copy the key of ca.pem there")
    names = ", ".join(f"{'IP' if _is_address(host) else 'DNS'}:{host}" for host in dict.fromkeys((name, *hosts)))
    authority = directory.absolute() / "ca"
    signed = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key")
    return _issue(directory, name, name, days, (*_NODE, f"subjectAltName = {names}"), signed)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _issue(
    directory: Path, file: str, name: str, days: int, extensions: Sequence[str], signed: Sequence[str] = ()
) -> Path:
    """Create or replace FILE.key and FILE.pem; returns the path of FILE.pem. signed: options that name the CA; without
    them, the certificate is signed with its own key."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        words = ["openssl", "req", "-x509", "-config", os.devnull, "-newkey", "ec", "-nodes", *signed]
        words += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}", "-days", str(days)]
        for extension in ("subjectKeyIdentifier = hash", *extensions):
            words += ["-addext", extension]
        words += ["-keyout", "key", "-out", "cert"]
        try:
            done = subprocess.run(words, cwd=scratch, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise NotFound("the openssl command is not installed: install it, or use another CA") from None
        if done.returncode:
            raise HadelayError(f"openssl req failed: {done.stderr.strip()[-500:]}")
        os.chmod(f"{scratch}/key", 0o600)
        os.replace(f"{scratch}/key", directory / f"{file}.key")
        os.replace(f"{scratch}/cert", directory / f"{file}.pem")
    return directory / f"{file}.pem"
