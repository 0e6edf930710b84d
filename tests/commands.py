"""`hadelay` commands as processes of their own, without a start of Python for each: a process that has imported hadelay
forks for every one of them. Each has its own arguments, environment, directory, files and exit code; what a start of
Python itself does is tested by the tests that use sys.executable."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

SOURCE = str(Path(__file__).resolve().parents[1] / "src")
_PR_SET_CHILD_SUBREAPER = 36
#: A command that does not end by itself is a test that fails.
TIMEOUT_S = 60.0


class Hadelay(subprocess.Popen[bytes]):
    """Popen([sys.executable, "-m", "hadelay", …]) with env, of which the start is a fork. The process is our child."""

    def _execute_child(
        self, args: Sequence[str], executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any,
        env: Mapping[str, str], startupinfo: Any, creationflags: Any, shell: bool, *rest: Any,
    ) -> None:  # fmt: skip
        """rest: the six ends of the three pipes, …, start_new_session, process_group (Python 3.11 to 3.14)."""
        if env.get("PYTHONPATH") != SOURCE:
            # Other modules than those that are imported already.
            _exec(
                self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                *rest,
            )  # fmt: skip
            return
        query = {"words": args[3:], "env": dict(env), "cwd": str(cwd or os.getcwd()), "session": rest[-2]}
        try:
            self.pid = _fork(query, _files(rest))
        finally:
            self._close_pipe_fds(*rest[:6])  # type: ignore[attr-defined]
        self._child_created = True


def started(words: Sequence[object], env: Mapping[str, str], **options: Any) -> Hadelay:
    """options: as Popen takes them."""
    return Hadelay([sys.executable, "-m", "hadelay", *map(str, words)], env=env, **options)


def command(
    words: Sequence[object], env: Mapping[str, str], stdin: bytes = b"", timeout: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE
    with started(words, env, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            out, err = process.communicate(stdin, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), err.decode())


# --- the process that forks ------------------------------------------------------------------------------------------

_lock = threading.Lock()
_servers: list[socket.socket] = []


def _files(pipes: Sequence[int]) -> list[int]:
    """The child's stdin, stdout and stderr. pipes: as _execute_child has them, −1 for ours."""
    return [ours if theirs == -1 else theirs for ours, theirs in enumerate((pipes[0], pipes[3], pipes[5]))]


def _fork(query: dict[str, Any], files: list[int]) -> int:
    """Its process id."""
    with _lock:
        if not _servers:
            _servers.append(_start(query["env"]))
        socket.send_fds(_servers[0], [json.dumps(query).encode()], files)
        pid, _ = (_servers[0].recv(100) for _ in range(2))
        return int(pid)


def _start(env: Mapping[str, str]) -> socket.socket:
    # Whose parent ended becomes our child: that is how what was forked for us does.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),), env={**env, "OPENBLAS_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def _serve(asking: socket.socket) -> None:
    from hadelay.cli.app import COMMANDS

    for one in COMMANDS:
        importlib.import_module(one.where.partition(":")[0])
    for name in ("hadelay.cli.remote", "hadelay.process", "hadelay.http.app"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        said, files, _, _ = socket.recv_fds(asking, 1 << 20, 3)
        if not said:
            return
        between = os.fork()
        if not between:
            pid = os.fork()
            if not pid:
                query = json.loads(said)
                _become(query["words"], query["env"], query["cwd"], query["session"], files)
            asking.send(b"%d" % pid)
            os._exit(0)
        os.waitpid(between, 0)
        asking.send(b"it is yours")
        for file in files:
            os.close(file)


def _become(words: Sequence[str], env: Mapping[str, str], cwd: str, session: bool, files: Sequence[int]) -> NoReturn:
    """What exec would make of this process: `python -m hadelay WORDS`."""
    code: Any = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if session:
            os.setsid()
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.argv = ["hadelay", *words]
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
        importlib.import_module("hadelay.__main__").main()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


_exec = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _execute_child(self: Any, args: Any, *rest: Any) -> None:
    """`hadelay dev` starts its nodes with it: they are its children, as they should be."""
    if list(args[:3]) != [sys.executable, "-m", "hadelay"]:
        _exec(self, args, *rest)
        return
    _, preexec_fn, _, _, cwd, env, _, _, _, *rest = rest
    self.pid = os.fork()
    if not self.pid:
        if preexec_fn is not None:
            preexec_fn()
        _become(args[3:], dict(os.environ if env is None else env), cwd or os.getcwd(), rest[-2], _files(rest))
    self._child_created = True
    self._close_pipe_fds(*rest[:6])


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
