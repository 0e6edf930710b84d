"""python -m chaos run|replay|report|list|mutations|sim

    run SCENARIO   break a cluster as the scenario says, and check what it promised
    replay DIR     the scenario of that run again, with its seed
    report DIR     judge a run's history again, and write its page
    list           scenarios, kinds of faults, and what of them works here; crash points, mutations
    mutations      run with each deliberate bug in its turn: does a run notice?
    sim            run seeds of the simulator (docs/explanation/simulation.md); sim --help lists its options

Exit codes: 0 promises kept · 1 a promise broken · 2 a mistake in the scenario, the cluster file or what is installed
· 130 interrupted, everything healed · 141 nobody reads what it prints.
"""

import argparse
import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from chaos import scenario as scenarios
from chaos import tools
from chaos.checkers import check
from chaos.cluster import Cluster, GivenCluster, LocalCluster, check_targets
from chaos.history import History
from chaos.report import page, summary, table
from chaos.run import Run
from chaos.scenario import KINDS, Mistake, Scenario, unknown
from chaos.shards import ShardRuns
from chaos.sim.failpoints import POINTS, STEPS

#: Mutations (deliberate bugs) that no chaos run notices: they show only in rare orders of events, or for less than a
#: round trip.
UNSEEN = (
    "forgotten_vote",
    "plain_library",
    "wiped_node_votes",
    "swallowed_sync_error",
    "blind_key",
    "five_ms_early",
)
KEPT, BROKEN, MISTAKE, INTERRUPTED, UNREAD = 0, 1, 2, 130, 141


def main(argv: list[str]) -> int:
    if argv[:1] == ["sim"]:
        from chaos.sim.cli import main as sim

        return sim(argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|replay|report|list|mutations|sim")
    run = commands.add_parser("run")
    run.add_argument("scenario", help="a TOML file, or the name of one that comes along")
    replay = commands.add_parser("replay")
    replay.add_argument("directory", type=Path)
    for one in (run, replay):
        one.add_argument("--cluster", type=Path, help="a cluster that runs already: a file with addresses and commands")
        one.add_argument("--seconds", type=float, help="how long, instead of what the scenario says")
        one.add_argument("--port-base", type=int, help="of a cluster on loopback; free ports otherwise")
        one.add_argument("--dir", type=Path, help="where logs, history and report go")
    run.add_argument("--seed", type=int, help="instead of the scenario's")
    run.add_argument("--mutation", help="a deliberate bug in every node: the run has to notice it")
    mutations = commands.add_parser("mutations")
    mutations.add_argument("names", nargs="*", metavar="NAME", help="these; all that a run can notice otherwise")
    report = commands.add_parser("report")
    report.add_argument("directory", type=Path)
    commands.add_parser("list")
    for one in commands.choices.values():
        one.add_argument("-o", "--output", choices=("text", "json"), default="text")
    options = parser.parse_args(argv)
    try:
        command = {"run": _run, "replay": _replay, "report": _report, "list": _list, "mutations": _mutations}
        code: int = command[options.command](options)
        return code
    except Mistake as error:
        print(error, file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:
        # A reader such as `head` has closed the pipe: close stderr, so that Python's last flush prints no second error.
        sys.stderr.close()
        return UNREAD


def _list(options: argparse.Namespace) -> int:
    lacking = {name: [tools.missing(n) for n in kind.needs if tools.missing(n)] for name, kind in KINDS.items()}
    files = sorted(scenarios.HERE.glob("*.toml"))
    mutations = {name: mutation.what for name, mutation in _all_mutations().items()}
    if options.output == "json":
        found = {"scenarios": [path.stem for path in files], "missing": lacking}
        print(json.dumps(found | {"points": POINTS, "mutations": mutations}))
        return KEPT
    for path in files:
        print(f"{path.stem:<14}{scenarios.load(path).title}")
    print()
    for name, kind in KINDS.items():
        print(f"{name:<14}{kind.help}" + (f"  — not here: {'; '.join(lacking[name])}" if lacking[name] else ""))
    print("\ncrash points:", *(f"{name:<24}{', '.join(step.when)}" for name, step in STEPS.items()), sep="\n  ")
    print("\nmutations:", *(f"{name:<24}{what}" for name, what in mutations.items()), sep="\n  ")
    return KEPT


def _replay(options: argparse.Namespace) -> int:
    head = _head(options.directory)
    options.scenario, options.seed = str(options.directory / "scenario.toml"), head["seed"]
    options.seconds, options.mutation = options.seconds or head["seconds"], head.get("mutation")
    return _run(options)


def _head(directory: Path) -> dict[str, Any]:
    try:
        head: dict[str, Any] = json.loads((directory / "run.json").read_bytes())
    except OSError as error:
        raise Mistake(f"{directory}: not the directory of a run: {error.strerror}") from error
    return head


def _report(options: argparse.Namespace) -> int:
    head = _head(options.directory)
    return _finish(options, head, History.read(options.directory / "history.jsonl"))


def _run(options: argparse.Namespace) -> int:
    path = scenarios.find(options.scenario)
    scenario = scenarios.load(path)
    if options.seconds:
        scenario = msgspec.structs.replace(scenario, seconds=options.seconds)
    seed = scenario.seed if options.seed is None else options.seed
    mutation = options.mutation or scenario.cluster.mutation
    if mutation and mutation not in _all_mutations():
        raise Mistake(f"mutation: {unknown(mutation, _all_mutations())}")
    part = msgspec.structs.replace(scenario.cluster, mutation=mutation)
    scenario = msgspec.structs.replace(scenario, seed=seed, cluster=part)
    for what in tools.clean():
        _say(f"removed {what}, left behind by a run that was killed")
    given = GivenCluster(options.cluster) if options.cluster else None
    kinds = given.kinds(scenario.kinds()) if given else tools.usable(scenario.kinds())
    directory: Path = (options.dir or Path(f"chaos-out/{time.strftime('%Y%m%d-%H%M%S')}-{path.stem}-{seed}")).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    if path.absolute() != directory / "scenario.toml":
        shutil.copyfile(path, directory / "scenario.toml")
    head = {
        "scenario": scenario.title or path.stem,
        "seed": seed,
        "seconds": scenario.seconds,
        "sync": scenario.cluster.sync,
        "mutation": mutation,
        "directory": str(directory),
        "replay": f"python -m chaos replay {directory}",
        "interrupted": True,  # stays true for a killed run: only the end of a run writes this file again
    }
    (directory / "run.json").write_text(json.dumps(head))
    if scenario.cluster.shards > 1:
        if given:
            raise Mistake("cluster.shards: chaos starts the nodes of several shards itself: leave out --cluster")
        return _run_shards(options, scenario, head, kinds)
    cluster = given or LocalCluster(scenario, directory, kinds, options.port_base)
    if given and mutation:
        raise Mistake("--mutation works only on a cluster that chaos starts: leave out --mutation or the cluster file")
    check_targets(scenario, cluster)
    with open(directory / "history.jsonl", "wb", buffering=1 << 16) as file:
        history = History(file=file)
        try:
            head["interrupted"] = _interruptible(Run(scenario, seed, cluster, history, _say), cluster, sorted(kinds))
        except Mistake as error:
            seen = f"\nWhat was seen until then: python -m chaos report {directory}" if history.puts else ""
            raise Mistake(f"{error}{seen}") from error
    (directory / "run.json").write_text(json.dumps(head))
    return _finish(options, head, history)


def _run_shards(options: argparse.Namespace, scenario: Scenario, head: dict[str, Any], kinds: set[str]) -> int:
    directory = Path(head["directory"])
    runs = ShardRuns(scenario, directory, kinds, _say)
    head["interrupted"] = _interruptible(runs, runs, sorted(kinds))
    (directory / "run.json").write_text(json.dumps(head))
    codes = []
    for index, (there, history) in enumerate(zip(runs.directories, runs.histories, strict=True)):
        part = head | {"scenario": f"{head['scenario']}, shard {index}", "directory": str(there)}
        (there / "run.json").write_text(json.dumps(part))
        codes.append(_finish(options, part, history))
    return BROKEN if BROKEN in codes else max(codes)


def _interruptible(run: Run | ShardRuns, cluster: Cluster | ShardRuns, kinds: list[str]) -> bool:
    """Run all of the scenario. Returns True if SIGINT or SIGTERM ended the run early. All faults are healed and all
    started processes are gone on return."""
    stopped = False

    async def all() -> None:
        loop = asyncio.get_running_loop()
        work = asyncio.current_task()
        assert work is not None

        def stop() -> None:
            nonlocal stopped
            if not stopped:
                stopped = True
                _say("interrupted: healing; this takes a few seconds")
                work.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        try:
            cluster.up()
            await run.all(kinds)
        except asyncio.CancelledError:
            if not stopped:
                raise
        finally:
            cluster.close()

    uvloop.run(all())
    return stopped


def _finish(options: argparse.Namespace, head: dict[str, Any], history: History) -> int:
    found = summary(history, check(history), head)
    directory = Path(head["directory"]) if options.command != "report" else options.directory
    (directory / "report.json").write_text(json.dumps(found, indent=1))
    (directory / "report.html").write_text(page(history, found))
    print(json.dumps(found) if options.output == "json" else table(found))
    if not found["ok"]:
        return BROKEN
    return INTERRUPTED if head["interrupted"] else KEPT


def _all_mutations() -> dict[str, Any]:
    # Import late: this import loads the server's classes, which only this command needs.
    from chaos.sim.mutations import MUTATIONS

    return MUTATIONS


def _mutations(options: argparse.Namespace) -> int:
    """Run chaos once with each mutation (deliberate bug): the scenario `storm`, or `calm` if the bug shows without
    faults."""
    mutations, noticed = _all_mutations(), {}
    for name in options.names or [name for name in mutations if name not in UNSEEN]:
        if name not in mutations:
            raise Mistake(unknown(name, mutations))
        scenario = "storm" if mutations[name].faults else "calm"
        words = ("run", scenario, "--mutation", name, "--output", "json")
        run = subprocess.run([sys.executable, "-m", "chaos", *words], stdout=subprocess.PIPE, check=False)
        if run.returncode not in (KEPT, BROKEN):
            return run.returncode
        verdicts = json.loads(run.stdout)["verdicts"]
        broken = {verdict: len(found["violations"]) for verdict, found in verdicts.items() if found["violations"]}
        noticed[name] = any(verdict.startswith(mutations[name].caught_by) for verdict in broken)
        _say(f"{name}: {'noticed' if noticed[name] else 'NOT NOTICED'}: {broken}")
    if options.output == "json":
        print(json.dumps(noticed))
    return KEPT if all(noticed.values()) else BROKEN


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
