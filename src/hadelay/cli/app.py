"""The command tree, and the one place where what went wrong becomes a message and an exit code.

Commands are named by import path and imported when used: `hadelay msg put` never loads the server.

    0 done · 1 refused · 2 usage or configuration · 3 not found · 4 token · 5 no quorum, or nobody answers
    6 timed out, outcome unknown · 130 interrupted

With `-o json`, what went wrong is one line of JSON, the last on stderr: a problem document as of the API, without
`status`, and with the `idempotency_key` where only a repetition finds out whether it happened.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from hadelay.api.problems import NotANode, Unreachable, unsettled
from hadelay.errors import (
    BadRequest,
    ConfigError,
    Forbidden,
    HadelayError,
    NoLeader,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    RequestTimeout,
    Taken,
    Unauthorized,
)
from hadelay.version import VERSION

OK, REFUSED, USAGE, NOT_FOUND, AUTH, UNREACHABLE, TIMEOUT, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130


class WrongUsage(HadelayError):
    type, title = "usage", "Wrong usage"


class Interrupted(OutcomeUnknown):
    """Ctrl-C, with a request under way that has a key."""

    type, title = "interrupted", "Interrupted"


class SystemRefusal(HadelayError):
    """An OSError: of a file, most often."""

    type, title = "system", "Refused by the system"


#: The first class that fits decides.
_CODES: tuple[tuple[type[Exception], int], ...] = (
    (Interrupted, INTERRUPTED), (WrongUsage, USAGE), (NotANode, UNREACHABLE), (Taken, REFUSED), (ConfigError, USAGE),
    (BadRequest, USAGE), (NotFound, NOT_FOUND), (Unauthorized, AUTH), (Forbidden, AUTH), (NoLeader, UNREACHABLE),
    (Overloaded, UNREACHABLE), (OutcomeUnknown, TIMEOUT), (RequestTimeout, TIMEOUT), (HadelayError, REFUSED),
    (ConnectionError, UNREACHABLE), (TimeoutError, TIMEOUT), (OSError, REFUSED),
)  # fmt: skip


class Command(NamedTuple):
    """One line of the tree: `path` as typed, where its function is, and the line shown in the list of commands."""

    path: str
    where: str
    help: str


COMMANDS = (
    Command("serve", "hadelay.cli.serve:serve", "Run one node, from a TOML file or from defaults on loopback."),
    Command("dev", "hadelay.cli.dev:dev", "Run a cluster of real processes on this machine, in the foreground."),
    Command("msg put", "hadelay.cli.msg:put", "Publish one message."),
    Command("msg get", "hadelay.cli.msg:get", "Show a message: its state, its times, what happened to it."),
    Command("msg list", "hadelay.cli.msg:list_", "List the messages of a topic in due order."),
    Command("msg cancel", "hadelay.cli.msg:cancel", "Cancel messages that have not been handed out."),
    Command("msg reschedule", "hadelay.cli.msg:reschedule", "Make a message due at another time."),
    Command("msg deliver", "hadelay.cli.msg:deliver", "Make a message due now."),
    Command("msg receive", "hadelay.cli.msg:receive", "Take due messages, print them, and ack them."),
    Command("topic list", "hadelay.cli.topic:list_", "Every topic with its counts."),
    Command("topic get", "hadelay.cli.topic:get", "One topic: its configuration and counts."),
    Command("topic set", "hadelay.cli.topic:set_", "Create a topic, or change its settings."),
    Command("topic due", "hadelay.cli.topic:due", "How many messages fall due when, in one topic or in all."),
    Command("topic defaults", "hadelay.cli.topic:defaults", "Which defaults topics have; convert old ones."),
    Command("topic pause", "hadelay.cli.topic:pause", "Hand out nothing more of a topic."),
    Command("topic resume", "hadelay.cli.topic:resume", "Hand out again."),
    Command("topic purge", "hadelay.cli.topic:purge", "Cancel what is pending in a topic."),
    Command("topic redrive", "hadelay.cli.dead:redrive_all", "Make all dead letters of a topic due again."),
    Command("topic delete", "hadelay.cli.topic:delete", "Delete a topic."),
    Command("dead list", "hadelay.cli.dead:list_", "Dead letters of a topic, and why they died."),
    Command("dead redrive", "hadelay.cli.dead:redrive", "Make dead letters due again, by id."),
    Command("dead export", "hadelay.cli.dead:export", "Write dead letters to a file, with their payloads."),
    Command("dead purge", "hadelay.cli.dead:purge", "Forget the dead letters of a topic."),
    Command("trace", "hadelay.cli.trace:trace", "How one message stands, and why; and all that happened to it."),
    Command("top", "hadelay.cli.top:top", "Nodes, rates, lateness and topics, again and again."),
    Command("cluster status", "hadelay.cli.cluster:status", "Members, leader, lag, and the dispatch cursor."),
    Command("cluster transfer", "hadelay.cli.cluster:transfer", "Hand leadership over, without a gap."),
    Command("cluster drain", "hadelay.cli.cluster:drain", "Take a node out of traffic, before it is stopped."),
    Command("cluster members list", "hadelay.cli.members:list_", "Who belongs to the cluster, and who votes."),
    Command("cluster members add", "hadelay.cli.members:add", "Add a node while the cluster runs."),
    Command("cluster members remove", "hadelay.cli.members:remove", "Remove a node while the cluster runs."),
    Command("cluster members replace", "hadelay.cli.members:replace", "Add a node, then remove another one."),
    Command("cluster certs", "hadelay.cli.certs:certs", "Make certificates for the nodes, and an authority for them."),
    Command("cluster audit", "hadelay.cli.token:audit", "What administrators did."),
    Command("token bootstrap", "hadelay.cli.token:bootstrap", "Make what makes the first token; asks no cluster."),
    Command("token create", "hadelay.cli.token:create", "Make a token, and print it once."),
    Command("token list", "hadelay.cli.token:list_", "Tokens, and what they may."),
    Command("token revoke", "hadelay.cli.token:revoke", "Refuse a token from now on."),
    Command("check replicas", "hadelay.cli.check:replicas", "Compare every node's files at one applied index."),
    Command("check quorum", "hadelay.cli.check:quorum", "May this node stop now?"),
    Command("backup create", "hadelay.cli.backup:create", "Copy a running cluster into a directory."),
    Command("backup verify", "hadelay.cli.backup:verify", "Is every byte of a backup what was backed up?"),
    Command("restore", "hadelay.cli.restore:restore", "Make a node of a new cluster from a backup."),
    Command("pipeline reconcile", "hadelay.cli.pipeline:reconcile", "What became of every message that fell due."),
    Command("pipeline archive", "hadelay.cli.pipeline:archive", "Write closed hours to Parquet."),
    Command("pipeline tail", "hadelay.cli.pipeline:tail", "A stream of what is filed into Parquet."),
    Command("pipeline lateness", "hadelay.cli.pipeline:lateness", "How late messages were handed out."),
    Command("pipeline load", "hadelay.cli.pipeline:load", "How much fell due, per hour, topic and second."),
    Command("pipeline forecast", "hadelay.cli.pipeline:forecast", "Seconds to come with too much, and what helps."),
    Command("pipeline schedule", "hadelay.cli.pipeline:schedule", "Publish the rows of a table: CSV or Parquet."),
    Command("pipeline replay", "hadelay.cli.pipeline:replay", "Make dead letters due again that a filter fits."),
    Command("pipeline doctor", "hadelay.cli.pipeline:doctor", "Is everything there that Spark needs?"),
    Command("pipeline pack", "hadelay.cli.pipeline:pack", "What executors of a Spark cluster need, as one archive."),
    Command("config check", "hadelay.cli.serve:config_check", "Read a configuration and say everything wrong in it."),
    Command("inspect", "hadelay.cli.inspect:inspect", "Print any file of a data directory."),
    Command("bench", "hadelay.cli.bench:bench", "Put load on a running cluster and measure it."),
    Command("completion", "hadelay.cli.app:completion", "Print a script that completes commands and options."),
)
#: Earlier names, not listed.
ALIASES = {"story": "trace"}
GROUPS = {
    "msg": "Publish, look at, list, cancel, reschedule and receive messages.",
    "topic": "List, configure, pause and purge topics.", "dead": "List, redrive, export and purge dead letters.",
    "cluster": "See and steer the cluster.", "cluster members": "Add, remove and replace nodes.",
    "token": "Make, list and revoke tokens.", "check": "Verify what a cluster promises.",
    "backup": "Copy a cluster, and verify the copy.", "pipeline": "Jobs on the hour files, with Spark.",
    "config": "Configuration files.",
}  # fmt: skip


def build(typed: Sequence[str] = ()) -> App:
    """typed: words of the command line. Help for one command is its docstring, in lists of commands it is a line."""
    # A flag is true by being there: no --no-… twins, and a list takes one value per flag.
    default = Parameter(negative="", consume_multiple=False)
    app = App(
        name="hadelay",
        help="Delay messages, replicated and on time. Start here: hadelay dev",
        version=VERSION,
        version_flags=["--version"],
        default_parameter=default,
        error_console=Console(stderr=True),
        help_format="plaintext",
        suppress_keyboard_interrupt=False,  # run() has a code for it
    )
    groups = {"": app}
    for path, text in GROUPS.items():
        above, _, name = path.rpartition(" ")
        groups[path] = App(name=name, help=text, version_flags=[])
        groups[above].command(groups[path])
    for path, where, text in COMMANDS:
        above, _, name = path.rpartition(" ")
        chosen = list(typed[: len(path.split())]) == path.split()
        groups[above].command(where, name=name, help=None if chosen else text)
    for path, new in ALIASES.items():
        app.command(next(command.where for command in COMMANDS if command.path == new), name=path, show=False)
    return app


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that completes commands and options. For bash:
    hadelay completion bash > ~/.local/share/bash-completion/completions/hadelay

    Parameters
    ----------
    shell
        The shell that is to read it.
    """
    print(build().generate_completion(shell=shell))


def run(argv: Sequence[str]) -> int:
    """The exit code of one command line."""
    app = build(argv)
    call: Callable[..., Any] = app
    as_json = wants_json(argv)
    try:
        if argv[:1] == ["sim"]:
            raise WrongUsage("the simulator is in the repository: run `python -m chaos sim` in a checkout")
        result = call(list(argv), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        if as_json:
            _print_document(WrongUsage(_usage(error)))
        else:
            print(f"hadelay: {_usage(error)}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt as stop:
        if not stop.args and not as_json:
            return INTERRUPTED
        problem: Exception = Interrupted("interrupted", **dict(zip(["idempotency_key"], stop.args, strict=False)))
    except BrokenPipeError:
        # `hadelay … | head`: the reader has what it wanted. Python would complain once more when it flushes.
        sys.stderr.close()
        return OK
    except Exception as error:
        problem = error
        if type(error).__module__.startswith(("pyspark", "py4j")):
            from hadelay.pipeline.session import plain

            problem = plain(error)
    else:
        return result if isinstance(result, int) else OK
    code = exit_code(problem)
    if code is None:
        raise problem
    if as_json:
        _print_document(problem)
    else:
        command = list(argv[:2])
        servers = "--endpoint" if command[:1] == ["pipeline"] and command[1:] != ["replay"] else "--servers"
        print(f"hadelay: {message(problem, servers)}", file=sys.stderr)
    return code


#: What other systems call our options.
_SYNONYMS = {
    "--at": "--deliver-at", "--in": "--delay", "--after": "--delay", "--eta": "--deliver-at", "--countdown": "--delay",
    "--max-retries": "--max-attempts", "--retries": "--max-attempts", "--visibility-timeout": "--lease",
    "--url": "--webhook", "--host": "--servers", "--server": "--servers", "--endpoint": "--servers",
    "--dlq": "--dead-letter", "--expires": "--ttl", "--number": "--limit", "--count": "--limit",
}  # fmt: skip


def _usage(error: CycloptsError) -> str:
    """Say which of the typed words is wrong, and where the right ones are listed."""
    path = " ".join(error.command_chain or ())
    text = str(error)
    found = re.match(r"Unknown option: (--[a-z-]+)", text)
    if found:
        known = {name for argument in getattr(error, "argument_collection", None) or () for name in argument.names}
        meant = _SYNONYMS.get(found[1])
        text = f"{found[0]}. Did you mean {meant}?" if meant in known else text
    return f"{text}\n  hadelay {path + ' ' if path else ''}--help shows what there is."


def wants_json(argv: Sequence[str]) -> bool:
    """By the words as typed: wrong ones become no command that could be asked for its options."""
    typed = re.search(r"\0(?:-o|--output)[=\0]?([^\0]*)", "\0".join(["", *argv]).partition("\0--\0")[0])
    return (typed[1] if typed else os.environ.get("HADELAY_OUTPUT")) == "json"


def exit_code(error: Exception) -> int | None:
    """None: of a bug, for which a traceback is right."""
    known = not isinstance(error, HadelayError) or error.outcome_known or isinstance(error, Interrupted)
    return next((code for kind, code in _CODES if isinstance(error, kind)), None) if known else TIMEOUT


def _print_document(error: Exception) -> None:
    if not isinstance(error, HadelayError):
        kinds = {ConnectionError: Unreachable, TimeoutError: RequestTimeout}
        kind = next((kinds[theirs] for theirs in kinds if isinstance(error, theirs)), SystemRefusal)
        error = kind(str(error) or type(error).__name__)
    # No status: often nobody answered at all.
    document = {name: value for name, value in error.document().items() if name != "status"}
    print(json.dumps(document, default=str), file=sys.stderr)


def message(error: Exception, servers: str) -> str:
    """The error, and what to do where the error does not say it. servers: the option that names nodes."""
    text = str(error) or type(error).__name__
    if isinstance(error, HadelayError) and "id" in error.extra:
        return f"{text}\n  id {error.extra['id']}"
    if isinstance(error, NoLeader) and error.of_a_node:
        return f"{text}\n  A node is there: /readyz?verbose of each says, to anybody, what keeps it from serving."
    if isinstance(error, NoLeader | ConnectionError) and servers not in text:
        return f"{text}\n  Is a cluster running there? `hadelay dev` starts one; {servers} names another."
    if isinstance(error, HadelayError) and not error.outcome_known:
        return f"{text}\n  {unsettled(error.extra.get('idempotency_key'))}"
    return text
