"""Loading a configuration: a TOML file, overridden by HADELAY_… from the environment, overridden by --set.

One error lists all problems, with line (or variable) and key. An unknown key is an error that suggests a similar key.
"""

import difflib
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from hadelay.errors import ConfigError
from hadelay.settings.node import RETIRED, ClusterConfig, Config, HttpConfig, NodeConfig, RaftSettings, keys
from hadelay.settings.rules import problems
from hadelay.settings.shardmap import MAX_SHARDS
from hadelay.words import plain

#: HADELAY_ variables of clients and the command line, which are not configuration keys.
CLIENT_VARIABLES = frozenset({"HADELAY_SERVERS", "HADELAY_TOKEN", "HADELAY_BOOTSTRAP_TOKEN", "HADELAY_OUTPUT"})

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNITS_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DURATION = re.compile(r"(?:\d+(?:ms|[smhd]))+")
_SIZE = re.compile(r"(\d+) ?(B|[KMGT]iB)")


def load(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Iterable[str] = (),
    *,
    shard: int = 0,
    warn: Callable[[str], object] = lambda text: print(f"hadelay: {text}", file=sys.stderr, flush=True),
) -> Config:
    """The configuration of one node. ConfigError lists all problems, one per line. warn: called for each retired key,
    which still has effect. shard: see `of_shard`."""
    values: dict[str, Any] = {}
    #: Origin of each key (file and line, environment variable, or option): the prefix of error messages.
    origins: dict[str, str] = {}
    if path is not None:
        tree, lines = read_toml(path)
        values = dict(_leaves(tree))
        origins = {key: f"{path}:{line_of(lines, key)}" for key in {**lines, **values}}
    if shard:
        values |= of_shard(values, shard)
    for key, text, origin in (*_from_environment(environ or {}), *_from_overrides(overrides)):
        values[key] = _text_value(key, text)
        origins = {known: at for known, at in origins.items() if known in values or not known.startswith(f"{key}.")}
        origins[key] = origin
    found, complaints = _build(values, origins)
    if found is not None:
        complaints += [f"{_origin(origins, key)}: {key}: {what}" for key, what in problems(found)]
    if complaints or found is None:
        raise ConfigError("\n".join(complaints))
    for key in sorted(RETIRED & values.keys()):
        warn(
            f"{origins[key]}: {key} is retired. Its value is used in this release; the next release refuses "
            "the key and uses a constant. Remove the key (docs/howto/upgrade.md)"
        )
    return found


def of_shard(values: Mapping[str, Any], shard: int) -> dict[str, Any]:
    """Values of a configuration file that differ for the shard of this index: group number and ports are raised by the
    index, and the cluster id and the directories get a suffix. Raises ConfigError."""
    if not 0 <= shard < MAX_SHARDS:
        raise ConfigError(f"--shard {shard}: the index of a shard is 0 to {MAX_SHARDS - 1}")
    found = {
        "cluster.id": f"{values.get('cluster.id', ClusterConfig().id)}-s{shard}",
        "cluster.group": values.get("cluster.group", 0) + shard,
    }
    for key, default in (("node.data_dir", NodeConfig().data_dir), ("node.journal_dir", "")):
        if directory := values.get(key, default):
            found[key] = f"{directory}/s{shard}"
    defaults = {"http.listen": HttpConfig().listen, "raft.listen": RaftSettings().listen}
    for key in ("http.listen", "http.aws_listen", "http.advertise", "raft.listen"):
        if address := values.get(key, defaults.get(key, "")):
            found[key] = _shifted(key, address, shard)
    if peers := values.get("raft.peers"):
        found["raft.peers"] = {name: _shifted("raft.peers", address, shard) for name, address in peers.items()}
    return found


def _shifted(key: str, address: Any, shard: int) -> str:
    """The address with its port raised by the index of the shard; port 0, which takes a free port, stays."""
    rest, colon, port = str(address).rstrip("/").rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"{key} = {address!r}: --shard adds the index to the port, so the address needs a port")
    return f"{rest}:{int(port) and int(port) + shard}"


def _origin(origins: Mapping[str, str], key: str) -> str:
    """Origin of a key, for error messages; for a key that was not set, the origin of its nearest parent
    (`raft.peers.n2` → `raft.peers`)."""
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return "default"


def read_toml(path: Path | str) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a TOML file: returns its tree, and the line number of each dotted key, such as `raft.peers.n2` or
    `faults[2].kind`. ConfigError if the file is not TOML.

    tomllib gives no lines, so a scan for headers and `key =` finds them.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except (ValueError, RecursionError) as error:  # raised by tomllib for invalid TOML, huge numbers or deep nesting
        raise ConfigError(f"{path}: not TOML: {error}") from error
    lines: dict[str, int] = {}
    tables: Counter[str] = Counter()
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[{1,2})\s*([^\[\]]+?)\s*\]", line):
            table = re.sub(r"[\" ]", "", header[2])
            if header[1] == "[[":
                tables[table] += 1
                table = f"{table}[{tables[table] - 1}]"
            lines.setdefault(table, number)
        elif entry := re.match(r"\s*([\w.\"' -]+?)\s*=", line):
            key = re.sub(r"[\"' ]", "", entry[1])
            lines.setdefault(f"{table}.{key}" if table else key, number)
    return tree, lines


def line_of(lines: Mapping[str, int], key: str) -> int:
    """Line number of a key, or of the first key within it, or of the nearest parent."""
    while key:
        if found := [n for k, n in lines.items() if k == key or k.startswith(f"{key}.")]:
            return lines.get(key, min(found))
        key = key.rpartition(".")[0]
    return 1


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (section.key, value) for all keys of a tree. Keys outside a section, refused later, have bare names."""
    for section, part in tree.items():
        if not isinstance(part, dict):
            yield section, part
            continue
        for name, value in part.items():
            yield f"{section}.{name}", value


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name, text in sorted(environ.items()):
        if name.startswith("HADELAY_") and name not in CLIENT_VARIABLES:
            key = name.removeprefix("HADELAY_").lower().replace("__", ".")
            yield key, text, f"environment variable {name}"


def _from_overrides(overrides: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: expected KEY=VALUE, such as --set http.listen=127.0.0.1:8400")
        yield key.strip(), text.strip(), f"--set {item}"


def _text_value(key: str, text: str) -> Any:
    """Convert a text from the environment or --set to the value that TOML would give for this key's type."""
    kind = keys().get(key)
    if kind is bool and text.lower() in ("true", "false", "1", "0", "yes", "no"):
        return text.lower() in ("true", "1", "yes")
    if kind is int and re.fullmatch(r"-?\d[\d_]*", text):
        return int(text)
    if key == "raft.peers":
        pairs = (item.partition("=") for item in text.split(",") if item.strip())
        return {name.strip(): address.strip() for name, _, address in pairs}
    return text


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> tuple[Config | None, list[str]]:
    known = keys()
    tree: dict[str, dict[str, Any]] = {}
    complaints = []
    for key, value in values.items():
        table, _, member = key.rpartition(".")
        if table == "raft.peers":
            peers = tree.setdefault("raft", {}).get("peers", {})
            tree["raft"]["peers"] = {**peers, member: str(value)}
            continue
        if key not in known:
            complaints.append(f"{origins[key]}: {key}: {_unknown(key, known)}")
            continue
        section, _, name = key.partition(".")
        try:
            tree.setdefault(section, {})[name] = msgspec.convert(_in_unit(name, value, known[key]), known[key])
        except (msgspec.ValidationError, ValueError) as error:
            complaints.append(f"{origins[key]}: {key}: {_in_words(error, value, known[key])}")
    return (None, complaints) if complaints else (msgspec.convert(tree, Config), [])


def _in_unit(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, str):
        return value
    if kind == list[str]:  # environment variables and --set separate the items of a list by commas
        return [one.strip() for one in value.split(",") if one.strip()]
    if name.endswith("_ms"):
        if not _DURATION.fullmatch(value):
            raise ValueError(f'{value!r}: expected milliseconds or a duration such as "250ms", "15m", "2h30m", "7d"')
        parts = re.findall(r"(\d+)(ms|[smhd])", value)
        return sum(int(n) * _UNITS_MS[unit] for n, unit in parts)
    if name.endswith("_bytes"):
        size = _SIZE.fullmatch(value)
        if not size:
            raise ValueError(f'{value!r}: expected bytes or a size such as "64MiB"')
        return int(size[1]) * _UNITS_BYTES[size[2]]
    return value


def _unknown(key: str, known: Mapping[str, Any]) -> str:
    name = key.rpartition(".")[2]
    listed = known.keys() - RETIRED
    near = difflib.get_close_matches(key, sorted(listed), n=1, cutoff=0.75)
    near = near or [k for k in known if k in listed and k.endswith(f".{name}")]
    sections = dict.fromkeys(k.partition(".")[0] for k in known)
    if near:
        return f"unknown key; did you mean {near[0]}?"
    return f"unknown key; the sections are {', '.join(sections)} (docs/reference/config.md)"


def _in_words(error: Exception, value: Any, kind: Any) -> str:
    text = str(error).partition(" - at ")[0]
    if not isinstance(error, msgspec.ValidationError):
        return text
    words = plain(text, choices=[f'"{word}"' for word in get_args(kind)])
    return words if words.startswith(repr(value)) else f"{value!r}: {words}"
