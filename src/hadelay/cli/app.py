"""The command tree, and the mapping of errors to messages and exit codes.

Commands are named by import path and imported on use: `hadelay msg put` never loads the server.

    0 done · 1 refused · 2 usage or configuration · 3 not found · 4 token · 5 no quorum, or no answer
    6 timed out, outcome unknown · 130 interrupted

With `-o json`, an error is the last line of stderr: a problem document like the API's, without `status`, and with the
`idempotency_key` if only a repetition can tell whether the request took effect.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from hadelay import errors
from hadelay.api.problems import NotANode, Unreachable, unsettled
from hadelay.cli.output import note
from hadelay.errors import HadelayError
from hadelay.version import VERSION

#: Command that installs the packages which the commands of a node need.
INSTALL_NODE = "pip install 'hadelay[server]'"
OK, REFUSED, USAGE, NOT_FOUND, AUTH, UNREACHABLE, TIMEOUT, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130


class WrongUsage(HadelayError):
    type, title = "usage", "Wrong usage"


class Interrupted(errors.OutcomeUnknown):
    """Ctrl-C ended a request with an Idempotency-Key: whether the request took effect is unknown."""

    type, title = "interrupted", "Interrupted"


class SystemRefusal(HadelayError):
    """Error type that replaces an OSError (a missing file, say) when an error is printed as JSON."""

    type, title = "system", "Refused by the system"


#: Exit codes by class of the error; the first matching class decides.
_CODES: tuple[tuple[type[Exception], int], ...] = (
    (Interrupted, INTERRUPTED), (WrongUsage, USAGE), (NotANode, UNREACHABLE), (errors.Taken, REFUSED),
    (errors.ConfigError, USAGE), (errors.BadRequest, USAGE), (errors.NotFound, NOT_FOUND),
    (errors.Unauthorized, AUTH), (errors.Forbidden, AUTH), (errors.NoLeader, UNREACHABLE),
    (errors.Overloaded, UNREACHABLE), (errors.OutcomeUnknown, TIMEOUT), (errors.RequestTimeout, TIMEOUT),
    (HadelayError, REFUSED), (ConnectionError, UNREACHABLE), (TimeoutError, TIMEOUT), (OSError, REFUSED),
)  # fmt: skip


class CliCommand(NamedTuple):
    """A command: words as typed, import path of its function, and the line in the list of commands."""

    path: str
    where: str
    help: str


COMMANDS = (
    CliCommand("serve", "hadelay.cli.serve:serve", "Run one node, from a TOML file or from defaults on loopback."),
    CliCommand("dev", "hadelay.cli.dev:dev", "Run a cluster of real processes on this machine, in the foreground."),
    CliCommand("work", "hadelay.cli.work:work", "Run the tasks of an app: worker processes."),
    CliCommand("msg put", "hadelay.cli.msg:put", "Publish one message."),
    CliCommand("msg get", "hadelay.cli.msg:get", "Show a message: its state, times and history."),
    CliCommand("msg list", "hadelay.cli.msg:list_", "List the messages of a topic in due order."),
    CliCommand("msg cancel", "hadelay.cli.msg:cancel", "Cancel messages that have not been handed out."),
    CliCommand("msg reschedule", "hadelay.cli.msg:reschedule", "Make a message due at another time."),
    CliCommand("msg deliver", "hadelay.cli.msg:deliver", "Make a message due now."),
    CliCommand("msg receive", "hadelay.cli.msg:receive", "Receive due messages, print them, and ack them."),
    CliCommand("topic list", "hadelay.cli.topic:list_", "List topics with their counts."),
    CliCommand("topic get", "hadelay.cli.topic:get", "Show the configuration and counts of a topic."),
    CliCommand("topic group", "hadelay.cli.topic:group", "Show a message group of a topic."),
    CliCommand("topic groups", "hadelay.cli.topic:groups", "List message groups in which messages wait."),
    CliCommand("topic set", "hadelay.cli.topic:set_", "Create a topic, or change its settings."),
    CliCommand("topic subscriptions", "hadelay.cli.topic:subscriptions", "List the subscriptions of a topic."),
    CliCommand("topic due", "hadelay.cli.topic:due", "Count the messages that fall due per hour, in one topic or all."),
    CliCommand("topic pause", "hadelay.cli.topic:pause", "Stop handing out messages of a topic."),
    CliCommand("topic resume", "hadelay.cli.topic:resume", "Hand out messages of a paused topic again."),
    CliCommand("topic purge", "hadelay.cli.topic:purge", "Cancel the pending messages of a topic."),
    CliCommand("topic redrive", "hadelay.cli.dead:redrive_all", "Make all dead letters of a topic due again."),
    CliCommand("topic delete", "hadelay.cli.topic:delete", "Delete a topic."),
    CliCommand("schedule set", "hadelay.cli.schedule:set_", "Create a schedule, or replace it."),
    CliCommand("schedule get", "hadelay.cli.schedule:get", "Show a schedule, its next times and last messages."),
    CliCommand("schedule list", "hadelay.cli.schedule:list_", "List schedules by name."),
    CliCommand("schedule preview", "hadelay.cli.schedule:preview", "Show the next times of a pattern."),
    CliCommand("schedule pause", "hadelay.cli.schedule:pause", "Make no occurrences until the schedule is resumed."),
    CliCommand("schedule resume", "hadelay.cli.schedule:resume", "Let a paused schedule go on from now."),
    CliCommand("schedule trigger", "hadelay.cli.schedule:trigger", "Make one occurrence now."),
    CliCommand("schedule backfill", "hadelay.cli.schedule:backfill", "Make the past occurrences of a range now."),
    CliCommand("schedule delete", "hadelay.cli.schedule:delete", "Delete a schedule."),
    CliCommand("batch open", "hadelay.cli.batch:open_", "Open a batch with one callback once all members are settled."),
    CliCommand("batch get", "hadelay.cli.batch:get", "Show a batch and its members by outcome."),
    CliCommand("batch list", "hadelay.cli.batch:list_", "List batches, the newest first."),
    CliCommand("batch seal", "hadelay.cli.batch:seal", "Let no further message join a batch."),
    CliCommand("batch cancel", "hadelay.cli.batch:cancel", "Cancel the waiting members of a batch."),
    CliCommand("batch failures", "hadelay.cli.batch:failures", "List members of a batch that were not acked."),
    CliCommand("batch watch", "hadelay.cli.batch:watch", "Show the progress of a batch until it has ended."),
    CliCommand("dead list", "hadelay.cli.dead:list_", "List the dead letters of a topic, with reasons."),
    CliCommand("dead redrive", "hadelay.cli.dead:redrive", "Make dead letters due again, by id."),
    CliCommand("dead export", "hadelay.cli.dead:export", "Write dead letters to a file, with their payloads."),
    CliCommand("dead purge", "hadelay.cli.dead:purge", "Delete the dead letters of a topic."),
    CliCommand("job cancel", "hadelay.cli.job:cancel", "Cancel all waiting messages that a filter selects."),
    CliCommand("job reschedule", "hadelay.cli.job:reschedule", "Make all waiting messages of a filter due later."),
    CliCommand("job deliver", "hadelay.cli.job:deliver", "Make all scheduled messages of a filter due now."),
    CliCommand("job redrive", "hadelay.cli.job:redrive", "Make all dead letters of a filter due again."),
    CliCommand("job transfer", "hadelay.cli.job:transfer", "Move all messages of a filter to another topic."),
    CliCommand("job delete-dead", "hadelay.cli.job:delete_dead", "Delete all dead letters of a filter for good."),
    CliCommand("job list", "hadelay.cli.job:list_", "List running jobs, and the latest ended ones."),
    CliCommand("job get", "hadelay.cli.job:get", "Show a job and what it did."),
    CliCommand("job watch", "hadelay.cli.job:watch", "Show how far a job is until it has ended."),
    CliCommand("job stop", "hadelay.cli.job:stop", "Stop a job."),
    CliCommand("trace", "hadelay.cli.trace:trace", "Show the status of a message, the reason for it, and its history."),
    CliCommand("attention", "hadelay.cli.attention:attention", "Show what needs attention, the worst first."),
    CliCommand("consumers", "hadelay.cli.consumers:consumers", "Show the consumers of all topics."),
    CliCommand("top", "hadelay.cli.top:top", "Watch nodes, rates, lateness and topics."),
    CliCommand("cluster status", "hadelay.cli.cluster:status", "Show members, leader, lag, and dispatch cursor."),
    CliCommand("cluster transfer", "hadelay.cli.cluster:transfer", "Transfer leadership without a gap."),
    CliCommand("cluster drain", "hadelay.cli.cluster:drain", "Take a node out of traffic before a stop."),
    CliCommand("cluster members list", "hadelay.cli.cluster:list_members", "List members and voters."),
    CliCommand("cluster members add", "hadelay.cli.cluster:add_member", "Add a node while the cluster runs."),
    CliCommand("cluster members remove", "hadelay.cli.cluster:remove_member", "Remove a node while the cluster runs."),
    CliCommand("cluster members replace", "hadelay.cli.cluster:replace_member", "Add a node, then remove another one."),
    CliCommand("cluster certs", "hadelay.cli.certs:certs", "Create certificates for nodes, and a CA for them."),
    CliCommand("cluster audit", "hadelay.cli.cluster:audit", "Show the audit trail of administrators."),
    CliCommand("shards list", "hadelay.cli.shards:list_", "Show the shard map."),
    CliCommand("shards add", "hadelay.cli.shards:add", "Add a cluster to the map as a shard."),
    CliCommand("shards rule", "hadelay.cli.shards:rule", "Set the shards of the topics that a pattern matches."),
    CliCommand("shards pin", "hadelay.cli.shards:pin", "Give the name of a new topic to a shard."),
    CliCommand("shards apply", "hadelay.cli.shards:apply", "Finish a change, or give a restored shard its map."),
    CliCommand("shards balance", "hadelay.cli.shardbalance:balance", "Spread the leaders of shards over the machines."),
    CliCommand("token bootstrap", "hadelay.cli.cluster:bootstrap", "Create the bootstrap token, without a cluster."),
    CliCommand("token create", "hadelay.cli.cluster:create_token", "Create a token, and print it once."),
    CliCommand("token list", "hadelay.cli.cluster:list_tokens", "List tokens and their scopes."),
    CliCommand("token revoke", "hadelay.cli.cluster:revoke_token", "Revoke a token."),
    CliCommand("check files", "hadelay.cli.check:files", "Show whether the files of all nodes are sound."),
    CliCommand("check replicas", "hadelay.cli.check:replicas", "Compare every node's files at one applied index."),
    CliCommand("check quorum", "hadelay.cli.check:quorum", "Check whether a node may stop now."),
    CliCommand("backup create", "hadelay.cli.backup:create", "Copy a running cluster into a directory."),
    CliCommand("backup verify", "hadelay.cli.backup:verify", "Read every byte of a backup, and compare checksums."),
    CliCommand("restore", "hadelay.cli.backup:restore", "Create a node of a new cluster from a backup."),
    CliCommand("pipeline reconcile", "hadelay.cli.pipeline:reconcile", "Report the outcome of every due message."),
    CliCommand("pipeline archive", "hadelay.cli.pipeline:archive", "Write closed hours to Parquet."),
    CliCommand("pipeline tail", "hadelay.cli.pipeline:tail", "Stream new entries to Parquet."),
    CliCommand("pipeline lateness", "hadelay.cli.pipeline:lateness", "Report how late messages were handed out."),
    CliCommand("pipeline load", "hadelay.cli.pipeline:load", "Report load per hour, topic and second."),
    CliCommand("pipeline forecast", "hadelay.cli.pipeline:forecast", "Predict overloaded seconds, with advice."),
    CliCommand("pipeline schedule", "hadelay.cli.pipeline:schedule", "Publish the rows of a table: CSV or Parquet."),
    CliCommand("pipeline replay", "hadelay.cli.pipeline:replay", "Make dead letters due again, by a filter."),
    CliCommand("pipeline doctor", "hadelay.cli.pipeline:doctor", "Check the requirements of Spark jobs."),
    CliCommand("pipeline pack", "hadelay.cli.pipeline:pack", "Write an archive for executors of a Spark cluster."),
    CliCommand("outbox run", "hadelay.cli.outbox:run", "Publish what transactions wrote into a database's outbox."),
    CliCommand("outbox status", "hadelay.cli.outbox:status", "Show how many rows of an outbox wait or are refused."),
    CliCommand("outbox retry", "hadelay.cli.outbox:retry", "Try the refused rows of an outbox again."),
    CliCommand("outbox sql", "hadelay.cli.outbox:sql", "Print the statements that create an outbox."),
    CliCommand("mcp", "hadelay.cli.mcp:mcp", "Serve wake-ups to an agent, over the Model Context Protocol."),
    CliCommand("bridge rabbitmq", "hadelay.cli.bridge:rabbitmq", "Keep RabbitMQ's delayed messages in the cluster."),
    CliCommand("import redis-zset", "hadelay.cli.imports:redis_zset", "Import a sorted set of your own in Redis."),
    CliCommand("import bullmq", "hadelay.cli.imports:bullmq", "Import the delayed jobs of BullMQ."),
    CliCommand("import sidekiq", "hadelay.cli.imports:sidekiq", "Import the scheduled jobs of Sidekiq."),
    CliCommand(
        "import celery-redis", "hadelay.cli.imports:celery_redis", "Import Celery's tasks with an ETA in Redis."
    ),
    CliCommand("import rq-scheduler", "hadelay.cli.imports:rq_scheduler", "Import jobs of rq-scheduler and RQ."),
    CliCommand("import apscheduler", "hadelay.cli.imports:apscheduler", "Import jobs of APScheduler with a date."),
    CliCommand("import rabbitmq-delayed", "hadelay.cli.imports:rabbitmq_delayed", "Import from RabbitMQ's plugin."),
    CliCommand("config check", "hadelay.cli.serve:config_check", "Read a configuration and list all its errors."),
    CliCommand("inspect", "hadelay.cli.inspect:inspect", "Print any file of a data directory."),
    CliCommand("bench", "hadelay.cli.bench:bench", "Measure a running cluster under load."),
    CliCommand("completion", "hadelay.cli.app:completion", "Print a script that completes commands and options."),
)
GROUPS = {
    "msg": "Publish, show, list, cancel, reschedule and receive messages.",
    "topic": "List, configure, pause and purge topics.", "dead": "List, redrive, export and purge dead letters.",
    "job": "Cancel, reschedule, deliver, redrive, move or delete all messages that a filter selects.",
    "schedule": "Make messages again and again: set, show, pause and trigger schedules.",
    "batch": "Messages with one callback once all are settled.",
    "cluster": "Show and manage the cluster.", "cluster members": "Add, remove and replace nodes.",
    "shards": "Show and change the map of several clusters.",
    "token": "Create, list and revoke tokens.", "check": "Check files, replicas and the quorum.",
    "backup": "Copy a cluster, and verify the copy.", "pipeline": "Jobs on the hour files, with Spark.",
    "outbox": "Publishes in the transactions of a database.", "bridge": "Delays for message brokers.",
    "import": "Delayed jobs of other systems, copied into the cluster.",
    "config": "Configuration files.",
}  # fmt: skip


def build(typed: Sequence[str] = ()) -> App:
    """The application. typed: words of the command line; only the typed command gets its docstring as help text."""
    # Flags have no --no-… variants, and an option that takes a list has one value each time it is given.
    default = Parameter(negative="", consume_multiple=False)
    app = App(
        name="hadelay",
        help="Delay messages, replicated and on time. Start here: hadelay dev",
        version=VERSION,
        version_flags=["--version"],
        default_parameter=default,
        error_console=Console(stderr=True),
        help_format="plaintext",
        suppress_keyboard_interrupt=False,  # run() handles KeyboardInterrupt and returns an exit code
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
    return app


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script that completes commands and options. For bash:
    hadelay completion bash > ~/.local/share/bash-completion/completions/hadelay

    Args:
        shell: Shell that will read the script.
    """
    print(build().generate_completion(shell=shell))


def _negative_values(argv: Sequence[str]) -> list[str]:
    """The typed words, with `--delay -5s` written as `--delay=-5s`. No option begins with a digit, so -5s is a value:
    the error then says that the value is negative, and not that --delay has no value."""
    words: list[str] = []
    for n, word in enumerate(argv):
        if words and re.match(r"-\.?\d", word) and re.fullmatch("--[a-z-]+", words[-1]) and "--" not in argv[:n]:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def run(argv: Sequence[str]) -> int:
    argv = _negative_values(argv)
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
            note(f"hadelay: {_usage(error)}")
        return USAGE
    except KeyboardInterrupt as stop:
        if not stop.args and not as_json:
            return INTERRUPTED
        problem: Exception = Interrupted("interrupted", **dict(zip(["idempotency_key"], stop.args, strict=False)))
    except BrokenPipeError:
        # The reader of a pipe has closed it, as in `hadelay … | head`. Closing stderr silences Python's error at exit.
        sys.stderr.close()
        return OK
    except Exception as error:
        problem = error
        # A command that cannot be imported is reported by cyclopts, with the reason as its cause.
        missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        if isinstance(missing, ModuleNotFoundError) and (missing.name or "").partition(".")[0] in _OF_NODES:
            problem = errors.ConfigError(f"this command needs the packages of a node ({missing.name}): {INSTALL_NODE}")
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
        note(f"hadelay: {message(problem, servers)}")
    return code


#: Packages of the extra `server` that commands import; an installation of the client alone lacks them.
_OF_NODES = frozenset({
    "aiohappyeyeballs", "cronsim", "google_crc32c", "jinja2", "lmdb", "msgpack", "numpy", "pyroaring", "pysyncobj",
    "structlog", "uvloop",
})  # fmt: skip
#: Option names of other systems → the names in hadelay, for error messages.
_SYNONYMS = {
    "--at": "--deliver-at", "--in": "--delay", "--after": "--delay", "--eta": "--deliver-at", "--countdown": "--delay",
    "--max-retries": "--max-attempts", "--retries": "--max-attempts", "--visibility-timeout": "--lease",
    "--url": "--webhook", "--host": "--servers", "--server": "--servers", "--endpoint": "--servers",
    "--dlq": "--dead-letter", "--expires": "--ttl", "--number": "--limit", "--count": "--limit",
}  # fmt: skip


def _usage(error: CycloptsError) -> str:
    path = " ".join(error.command_chain or ())
    text = str(error)
    found = re.match(r"Unknown option: (--[a-z-]+)", text)
    if found:
        known = {name for argument in getattr(error, "argument_collection", None) or () for name in argument.names}
        meant = _SYNONYMS.get(found[1])
        text = f"{found[0]}. Did you mean {meant}?" if meant in known else text
    return f"{text}\n  hadelay {path + ' ' if path else ''}--help lists commands and options."


def wants_json(argv: Sequence[str]) -> bool:
    """Whether to print errors as JSON. Reads the typed words, because a wrong command line has no parsed options."""
    typed = re.search(r"\0(?:-o|--output)[=\0]?([^\0]*)", "\0".join(["", *argv]).partition("\0--\0")[0])
    return (typed[1] if typed else os.environ.get("HADELAY_OUTPUT")) == "json"


def exit_code(error: Exception) -> int | None:
    """The exit code for an error; None for a bug, which deserves a traceback."""
    known = not isinstance(error, HadelayError) or error.outcome_known or isinstance(error, Interrupted)
    return next((code for kind, code in _CODES if isinstance(error, kind)), None) if known else TIMEOUT


def _print_document(error: Exception) -> None:
    if not isinstance(error, HadelayError):
        kinds = {ConnectionError: Unreachable, TimeoutError: errors.RequestTimeout}
        kind = next((kinds[theirs] for theirs in kinds if isinstance(error, theirs)), SystemRefusal)
        error = kind(str(error) or type(error).__name__)
    # Print the error without the HTTP status, because often no node has answered.
    document = {name: value for name, value in error.document().items() if name != "status"}
    note(json.dumps(document, default=str).replace("\x7f", "\\u007f"))


def message(error: Exception, servers: str) -> str:
    """Error message, with advice if the error has none. servers: name of the option for node addresses."""
    text = str(error) or type(error).__name__
    if isinstance(error, HadelayError) and "id" in error.extra:
        return f"{text}\n  id {error.extra['id']}"
    if isinstance(error, HadelayError) and error.outcomes:
        return "\n  ".join([text, *(f"{topic}: {outcome}" for topic, outcome in error.outcomes.items())])
    if isinstance(error, errors.NoLeader) and error.of_a_node:
        return f"{text}\n  A node answers, but does not serve: GET /readyz?verbose on each node tells the reason."
    if isinstance(error, errors.NoLeader | ConnectionError) and servers not in text:
        return f"{text}\n  Is a cluster running there? `hadelay dev` starts one; {servers} names another."
    if isinstance(error, errors.Unauthorized) and "HADELAY_TOKEN" not in text:
        return f"{text}\n  Give a token of this cluster: set HADELAY_TOKEN."
    if isinstance(error, HadelayError) and not error.outcome_known:
        return f"{text}\n  {unsettled(error.extra.get('idempotency_key'))}"
    return text
