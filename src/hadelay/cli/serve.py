"""`serve`: run one node in this process. `config check`: only load and validate a configuration."""

import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from hadelay.cli.output import Printing, emit_json, note, say
from hadelay.errors import DamagedFile, HadelayError
from hadelay.settings.load import load
from hadelay.settings.node import Config

Settings = Annotated[tuple[str, ...], Parameter(name="--set", show_default=False)]


def serve(
    file: Path | None = None,
    /,
    *,
    init: bool = False,
    shard: int = 0,
    settings: Settings = (),
    printing: Printing = Printing(),
) -> int:
    """Run one node until SIGTERM or SIGINT; a leader hands over first.

    Without a file, and with an empty data directory, the node founds a cluster of itself on loopback.

    Args:
        file: TOML file; see docs/reference/config.md. HADELAY_… variables and --set override it.
        init: Found the cluster; required once, for an empty data directory.
        shard: Index of the shard that this process is a node of: the index is added to cluster.group and to all ports
            of the file, and cluster.id and the directories get their own.
        settings: KEY=VALUE that overrides the file, such as http.listen=127.0.0.1:8400. May be repeated.
    """
    founding = ("cluster.init=true",) if init or file is None else ()
    path = None if file is None else str(file)
    return run_node(load(path, os.environ, (*founding, *settings), shard=shard), printing)


def run_node(config: Config, printing: Printing) -> int:
    from hadelay.process import serve as serve_node

    def ready(node: dict[str, Any]) -> None:
        if printing.output == "json":
            emit_json({"ready": True, "nodes": [node]})
        else:
            note(f"{node['name']} is ready: {node['http']}")

    try:
        return serve_node(config, ready)
    except DamagedFile as damage:
        alone = len(config.members) == 1
        others = "restore a backup" if alone else "start it again; the other nodes, which must all run, fill it"
        way_out = f"No node can start with damaged files. Move {config.node.data_dir} away and {others}."
        raise HadelayError(f"{damage}\n  {way_out}") from damage


def config_check(
    file: Path | None = None, /, *, shard: int = 0, settings: Settings = (), printing: Printing = Printing()
) -> None:
    """Load a configuration like `serve`, certificates and keys included, and list all errors with line and key.

    Args:
        file: TOML file. Default: only the environment and --set.
        shard: Index of the shard, as for `serve`.
        settings: KEY=VALUE that overrides the file. May be repeated.
    """
    config = load(None if file is None else str(file), os.environ, settings, shard=shard)
    _read_certificates(config)
    if printing.output == "json":
        emit_json(config)
        return
    members = ", ".join(f"{name} at {address}" for name, address in config.members.items())
    say(f"{file or 'defaults'}: fine. Node {config.node.name} of cluster {config.cluster.id}: {members}")


def _read_certificates(config: Config) -> None:
    from hadelay.platform.tls import Certificates

    for section, part in (("raft", config.raft), ("http", config.http), ("webhooks", config.webhooks)):
        if part.tls_cert:
            files = part.tls_cert, part.tls_key, part.tls_ca
            Certificates(section, *files, mutual=section == "raft", caller=section == "webhooks")
