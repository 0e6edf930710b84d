"""Pack hadelay, and the packages that it needs, from this environment into an archive for Spark executors.

Driver and executors then run the same versions, and workers need only Spark and a Python of the same minor version.
"""

import os
import re
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import hadelay
from hadelay.errors import BadRequest, ConfigError
from hadelay.version import VERSION

#: Packages to pack, with their requirements. Spark is left out: executors have it.
_ROOTS = ("hadelay", "pyarrow")


@dataclass
class Packed:
    out: str
    #: Version of Python, and platform, that executors need to have, too.
    python: str
    platform: str
    bytes: int
    #: Package name → its version.
    packages: dict[str, str]


#: Finds the requirements of hadelay's extra `server`, whose packages read hour files.
_SERVER = re.compile(r"""extra == ["']server["']""").search


def pack(out: str) -> Packed:
    """Write the archive atomically. BadRequest unless `out` ends with .zip; ConfigError if a needed package is missing,
    or its files are unknown."""
    if not out.endswith(".zip"):
        raise BadRequest(f"{out}: the archive's name must end with .zip")
    found = _needed()
    part = Path(f"{out}.{os.getpid()}")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
            for name, path in _files(found):
                archive.write(path, name)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    versions = {name: dist.version for name, dist in sorted(found.items())} | {"hadelay": VERSION}
    return Packed(out, sysconfig.get_python_version(), sysconfig.get_platform(), os.path.getsize(out), versions)


def _needed() -> dict[str, Distribution]:
    """Name → distribution, for all packages to pack and their requirements."""
    found: dict[str, Distribution] = {}
    wanted = list(_ROOTS)
    while wanted:
        name = re.sub("[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            if name in _ROOTS:
                raise ConfigError(f"{name} is not installed: pip install 'hadelay[spark]'") from None
            continue  # skip a package that is not required on this platform
        if dist.files is None:
            raise ConfigError(f"the files of package {name} are unknown: install hadelay[spark] into a venv, with pip")
        found[name] = dist
        lines = (
            line for line in dist.requires or () if "extra ==" not in line or (name == "hadelay" and _SERVER(line))
        )
        wanted += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]
    return found


def _files(found: dict[str, Distribution]) -> Iterator[tuple[str, Path]]:
    """List the files to pack: (name in the archive, path). Files of hadelay are those of the running code, also in an
    editable installation."""
    here = Path(hadelay.__file__).parent
    for path in sorted(here.rglob("*.py")):
        yield str(path.relative_to(here.parent)), path
    for name, dist in found.items():
        for file in dist.files or () if name != "hadelay" else ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                yield str(file), Path(str(dist.locate_file(file)))
