"""Checks whether this machine has what the faults need; says what to install where something is missing."""

import ctypes
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from chaos.scenario import KINDS, Mistake

#: Requirement of a kind of fault → (program that must be installed, its Debian package).
_COMMANDS = {
    "ip": ("ip", "iproute2"),
    "tc": ("tc", "iproute2"),
    "nft": ("nft", "nftables"),
    "mkfs": ("mkfs.ext4", "e2fsprogs"),
    "cc": ("cc", "gcc"),
}
#: Namespaces and mounts are named with the pid of their run: a later run removes those of a killed run.
OURS = re.compile(r"hdchaos\.(\d+)\.[\w.-]+")
_CLONE_NEWNET = 0x4000_0000
libc = ctypes.CDLL(None, use_errno=True)


def run(*words: object, stdin: str | None = None) -> str:
    """Run a command; returns its output. Raises Mistake with the command's error text."""
    done = subprocess.run([str(w) for w in words], input=stdin, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Mistake(f"{' '.join(map(str, words))}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def authorization() -> dict[str, str]:
    """Authorization header from HADELAY_TOKEN in the environment, as clients send it."""
    token = os.environ.get("HADELAY_TOKEN", "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


@cache
def missing(need: str) -> str:
    """Check whether this machine meets a need of a fault. Returns advice on what to do, or "" if the need is met."""
    if need == "root":
        return "" if os.geteuid() == 0 else "run it as root: it makes network namespaces and mounts disks"
    if need == "netem":
        return _netem()
    command, package = _COMMANDS[need]
    return "" if shutil.which(command) else f"{command} is not installed: apt-get install {package}"


def _netem() -> str:
    if missing("root") or missing("ip") or missing("tc"):
        return ""  # the checks of the needs `root`, `ip` and `tc` already report what is missing
    name = f"hdchaos.{os.getpid()}.probe"
    run("ip", "netns", "add", name)
    try:
        run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except Mistake:
        return "this kernel has no netem (CONFIG_NET_SCH_NETEM, Debian: linux-image-amd64)"
    finally:
        run("ip", "netns", "del", name)
    return ""


def usable(kinds: set[str]) -> set[str]:
    """Replace "any" in `kinds` by every kind of fault that works on this machine. Raises Mistake if a named kind lacks
    a need."""
    works = {name for name, kind in KINDS.items() if not any(map(missing, kind.needs))} if "any" in kinds else set()
    named = kinds - {"any"}
    complaints = [f"{kind}: {missing(need)}" for kind in sorted(named) for need in KINDS[kind].needs if missing(need)]
    if complaints:
        raise Mistake("\n".join(complaints))
    return named | works


def build_preload(directory: Path) -> Path:
    target = directory / "preload.so"
    run("cc", "-shared", "-fPIC", "-O2", "-o", target, Path(__file__).with_name("preload.c"), "-ldl", "-lpthread")
    return target


def enter_namespace(name: str) -> None:
    """Move this thread, and all processes that it starts, to network namespace `name`."""
    with open(f"/run/netns/{name}") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            raise Mistake(f"cannot enter the network namespace {name}: {os.strerror(ctypes.get_errno())}")


def clean() -> list[str]:
    """Remove network namespaces and mounts that killed runs of chaos left behind."""
    if missing("root") or missing("ip"):
        return []
    done = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        where = line.split()[1]
        if _stale(Path(where).name):
            subprocess.run(["fsfreeze", "-u", where], capture_output=True)
            run("umount", "-l", where)
            done.append(where)
    for line in run("ip", "netns", "list").splitlines():
        if _stale(line.split()[0]):
            run("ip", "netns", "del", line.split()[0])
            done.append(line.split()[0])
    return done


def _stale(name: str) -> bool:
    match = OURS.fullmatch(name)
    if not match:
        return False
    try:
        words = Path(f"/proc/{match[1]}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return b"chaos" not in words and b"pytest" not in words
