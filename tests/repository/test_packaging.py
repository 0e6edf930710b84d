"""The locks and the metadata agree, each lock is whole, and no lock names an address."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hadelay.version import VERSION
from tools.lock import FIRST, GROUPS, needs

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = (FIRST, *(f"requirements-{group}.lock" for group in GROUPS))
LOCKS = [(ROOT / name).read_text() for name in NAMES]


def packages(lock: str) -> dict[str, set[str]]:
    """package → the packages that it needs, by the lock itself."""
    parts = re.split(r"^(?=[a-z0-9-]+==)", lock, flags=re.M)[1:]
    return {part.split("==")[0]: set(" ".join(re.findall(r"^ +# needs (.*)$", part, re.M)).split()) for part in parts}


def test_requirements_are_locked_within_their_bounds() -> None:
    first, *others = (dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.M)) for lock in LOCKS)
    groups, extras = PROJECT["dependency-groups"], PROJECT["project"]["optional-dependencies"]
    build = PROJECT["build-system"]["requires"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["server"], *groups["dev"], *build]
    for locked, requirements in ((first, wanted), *zip(others, map(groups.get, GROUPS), strict=True)):
        for requirement in map(Requirement, requirements):
            assert requirement.specifier.contains((first | locked)[canonicalize_name(requirement.name)]), requirement
    second = others[GROUPS.index("spark")]
    _, *extra = map(Requirement, extras["spark"])
    assert all(requirement.specifier.contains((first | second)[requirement.name]) for requirement in extra)


def test_every_package_has_hashes_and_no_address() -> None:
    for lock in LOCKS:
        packages = re.split(r"^(?=[a-z0-9-]+==)", lock, flags=re.M)[1:]
        assert all("--hash=sha256:" in package for package in packages)
        assert "://" not in lock
        assert "index" not in lock


def test_one_version() -> None:
    assert PROJECT["project"]["version"] == VERSION


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_is_whole_beside_the_first_alone(name: str) -> None:
    """A stranger's machine installs the first lock and one other, in any order of the others."""
    found = packages(LOCKS[NAMES.index(name)])
    known = packages(LOCKS[0]).keys() | found.keys()
    assert {package: needed - known for package, needed in found.items() if needed - known} == {}


def test_a_lock_names_what_its_packages_need() -> None:
    """By the metadata of the packages that are installed here."""
    installed = {canonicalize_name(found.metadata["Name"]): found for found in distributions()}
    requires = {name: found.requires or [] for name, found in installed.items()}
    for lock in LOCKS:
        versions = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.M))
        for package, needed in packages(lock).items():
            if package in installed and installed[package].version == versions[package]:
                assert needed == needs(package, requires), package


def test_a_package_of_two_locks_has_one_version() -> None:
    found = {line for lock in LOCKS for line in re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.M)}
    assert len({name for name, _ in found}) == len(found)


def test_ci_begins_as_a_newcomer_and_installs_the_browser_afterwards() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    steps = re.findall(r"^(?:if )?(make \w+)", script, re.M)
    assert steps == ["make test", "make browser"]


def test_a_wheel_has_what_the_checkout_has_and_leaves_nothing_there(tmp_path: Path) -> None:
    """Modules that were deleted are not in the next wheel: nothing is built in the checkout."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    before = sorted(checkout.rglob("*"))
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    subprocess.run([sys.executable, *build, "--wheel-dir", tmp_path, checkout], check=True)
    assert sorted(checkout.rglob("*")) == before
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("hadelay/")}
    assert packed == {
        str(path.relative_to(checkout / "src")) for path in before if path.is_file() and "src" in path.parts
    }


#: Runs a command line in a process in which packages cannot be imported.
_WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import hadelay.client, hadelay.tasks, hadelay.webhooks
from hadelay.cli.app import run
sys.exit(run({words}))
"""


def without_server(*words: str) -> subprocess.CompletedProcess[str]:
    project = PROJECT["project"]
    client = {requirement.name for requirement in map(Requirement, project["dependencies"])}
    server = {requirement.name for requirement in map(Requirement, project["optional-dependencies"]["server"])}
    missing = {name.replace("-", "_") for name in server - client - {"markupsafe", "tzdata"}}
    program = _WITHOUT.format(missing=missing, words=list(words))
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_client_tasks_and_commands_need_no_package_of_a_node() -> None:
    for command in ("msg put", "topic list", "schedule list", "work", "cluster status", "token create", "bench"):
        done = without_server(*command.split(), "--help")
        assert (done.returncode, done.stderr) == (0, ""), command
    done = without_server("msg", "put", "t", "x", "--servers", "http://127.0.0.1:9")
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["dev"], ["inspect", "x.idx"]])
def test_a_command_of_a_node_says_which_extra_is_missing(words: list[str]) -> None:
    done = without_server(*words)
    assert done.returncode
    assert "pip install 'hadelay[server]'" in done.stderr
    assert "Traceback" not in done.stderr
