"""Certificates for tests: made by `hadelay cluster certs`, once."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from hadelay.cli.certs import make_authority, make_certificate
from hadelay.platform.tls import Certificates


@dataclass
class Pki:
    """An authority and its certificates, `<name>.pem` and `<name>.key`, in one directory."""

    directory: Path

    def make(self, name: str, days: int = 2) -> Path:
        return make_certificate(self.directory, name, ("127.0.0.1", "localhost"), days)

    def expire(self, name: str) -> None:
        """Issue the certificate again, as one that ended yesterday."""
        self.make(name)
        new = ("openssl", "req", "-new", "-key", f"{name}.key", "-subj", f"/CN={name}", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-days", "-1", "-out", f"{name}.pem")
        for command in (new, ("openssl", "x509", "-req", "-in", f"{name}.csr", *signed)):
            subprocess.run(command, cwd=self.directory, check=True, capture_output=True)

    @property
    def ca(self) -> str:
        return str(self.directory / "ca.pem")

    def files(self, name: str) -> tuple[str, str, str]:
        """Certificate, key, authority: made if they are not there."""
        if not (self.directory / f"{name}.pem").exists():
            self.make(name)
        return str(self.directory / f"{name}.pem"), str(self.directory / f"{name}.key"), self.ca

    def mutual(self, name: str) -> Certificates:
        return Certificates("raft", *self.files(name), mutual=True)

    def copy(self, name: str, directory: Path) -> tuple[str, str, str]:
        """Copies that a test may overwrite."""
        directory.mkdir(exist_ok=True)
        return tuple(shutil.copy(path, directory / kind) for path, kind in zip(self.files(name), _KINDS, strict=True))  # type: ignore[return-value]


_KINDS = ("cert.pem", "cert.key", "ca.pem")


def _pki(directory: Path) -> Pki:
    make_authority(directory)
    return Pki(directory)


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return _pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Another authority, as good as the first."""
    return _pki(tmp_path_factory.mktemp("strangers"))
