"""Configuration: every source, every kind of mistake, named with where it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hadelay.errors import ConfigError
from hadelay.settings.load import load
from hadelay.settings.node import RETIRED, Config, keys
from hadelay.settings.rules import problems


def complaint(tmp_path: Path, text: str, **environ: str) -> str:
    path = tmp_path / "n.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(path), environ)
    return str(caught.value).replace(f"{path}:", "")


def test_defaults_are_sound() -> None:
    assert list(problems(Config())) == []
    assert Config().members == {"n1": "127.0.0.1:8500"}


def test_flags_go_over_environment_over_file(tmp_path: Path) -> None:
    path = tmp_path / "n.toml"
    path.write_text('[http]\nmax_tags = 1\nmax_waiting = 1\nmax_receive = 11\n[node]\nname = "a"\n')
    environ = {"HADELAY_HTTP__MAX_WAITING": "2", "HADELAY_HTTP__MAX_RECEIVE": "12", "PATH": "/bin"}
    config = load(str(path), environ, ["http.max_receive=13"])
    assert (config.http.max_tags, config.http.max_waiting, config.http.max_receive) == (1, 2, 13)
    assert config.node.name == "a"


def test_durations_sizes_and_peers_in_words() -> None:
    config = load(None, {"HADELAY_RAFT__PEERS": "n1=127.0.0.1:1, n2=127.0.0.1:2"}, [
        "limits.max_delay_ms=2h30m", "http.max_body_bytes=2MiB", "cluster.init=true",
    ])  # fmt: skip
    assert config.limits.max_delay_ms == 9_000_000
    assert config.http.max_body_bytes == 2 << 20
    assert config.raft.peers == {"n1": "127.0.0.1:1", "n2": "127.0.0.1:2"}
    assert config.cluster.init


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[http]\n\nlisen = "x"', "3: http.lisen: unknown key; did you mean http.listen?"),
        ("[https]\nlisten = 1", "2: https.listen: unknown key; did you mean http.listen?"),
        ("[frobnicate]\nx = 1", "2: frobnicate.x: unknown key; the sections are node,"),
        ("listen = 1", "1: listen: unknown key; did you mean http.listen?"),
        ("[http]\nmax_tags = true", "2: http.max_tags: True: expected a whole number, not true or false"),
        ('[http]\nmax_wait_ms = "soon"', "2: http.max_wait_ms: 'soon': expected milliseconds or a duration"),
        ('[http]\nmax_body_bytes = "1MB"', "2: http.max_body_bytes: '1MB': expected bytes or a size"),
        ("[http]\nmax_waiting = 0", "2: http.max_waiting: is 0; must be at least 1"),
        ('[dispatch]\nsync = "never"', '2: dispatch.sync: \'never\': choose "commit" or "interval"'),
        ('[http]\nlisten = "8400"', '2: http.listen: expected "host:port"'),
        ('[http]\nlisten = "0.0.0.0:8400"', "2: http.listen: other machines can reach 0.0.0.0:8400"),
        ('[raft.peers]\nn2 = "127.0.0.1:1"', "1: raft.peers: lists every member, but not this node (n1)"),
        ('[raft.peers]\nn1 = "127.0.0.1:1"\nn2 = "x"', '3: raft.peers.n2: expected "host:port"'),
        ("[raft]\nheartbeat_ms = 190", "2: raft.heartbeat_ms: is 190; must be at most a third"),
        ('[http]\ntls_cert = "a"', "2: http.tls_cert: needs tls_key"),
        ('[raft]\ntls_cert = "a"\ntls_key = "b"', "2: raft.tls_cert: needs tls_ca"),
        (
            '[http]\ntls_cert = "a"\ntls_key = "b"\nadvertise = "http://x"',
            "4: http.advertise: http://x: this node serves HTTPS",
        ),
        ('[security]\nbootstrap_token_hash = "abc"', "2: security.bootstrap_token_hash: expected 64 hex digits"),
        ("[http]\nlisten = ", "not TOML"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in complaint(tmp_path, text)


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    said = complaint(tmp_path, "[http]\nlisen = 1\n[nod]\nname = 2", HADELAY_HTP__X="1")
    assert len(said.splitlines()) == 3
    assert "environment variable HADELAY_HTP__X" in said


def test_a_flag_does_not_hide_an_unknown_variable_below_its_key() -> None:
    with pytest.raises(
        ConfigError, match=r"environment variable HADELAY_HTTP__LISTEN__X: http\.listen\.x: unknown key"
    ):
        load(environ={"HADELAY_HTTP__LISTEN__X": "1"}, overrides=["http.listen=127.0.0.1:1"])


def test_one_peer_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "n.toml"
    path.write_text('[raft.peers]\nn1 = "127.0.0.1:1"\nn2 = "127.0.0.1:2"\n')
    config = load(str(path), {"HADELAY_RAFT__PEERS__N3": "127.0.0.1:3"}, ["raft.peers.n2=127.0.0.1:9"])
    assert config.raft.peers == {"n1": "127.0.0.1:1", "n2": "127.0.0.1:9", "n3": "127.0.0.1:3"}


def test_lists_are_written_with_commas_outside_the_file() -> None:
    wanted = ["10.0.0.0/8", "fd00::/8"]
    assert load(environ={"HADELAY_WEBHOOKS__ALLOW": "10.0.0.0/8, fd00::/8"}).webhooks.allow == wanted
    assert load(overrides=["webhooks.allow=10.0.0.0/8,fd00::/8"]).webhooks.allow == wanted


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("webhooks.allow=everything", "networks"),
        ("webhooks.allow=10.0.0.1/8", "host bits"),
        ("webhooks.alert_url=ftp://x", "expected a URL"),
        ("webhooks.alert_url=http://user:pass@x/", "expected a URL"),
        ("webhooks.max_calls=0", "at least 1"),
    ],
)
def test_refused_settings_of_webhooks(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(overrides=[setting])


def test_insecure_in_so_many_words(tmp_path: Path) -> None:
    path = tmp_path / "n.toml"
    path.write_text('[http]\nlisten = "0.0.0.0:8400"\nadvertise = "http://n1:8400"\n[security]\ninsecure = true\n')
    assert load(str(path)).http.listen == "0.0.0.0:8400"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (
            "",
            "2: http.listen: .*10.* set tls_cert and tls_key under \\[http\\], tokens = true under \\[security\\]",
        ),
        ('tls_cert = "a"\ntls_key = "b"', "nothing protects it: .* set tokens = true under"),
        ("[security]\ntokens = true", "set tls_cert and tls_key under"),
        ('tls_cert = "a"\ntls_key = "b"\n[security]\ntokens = true', ""),
        ("[security]\ninsecure = true", ""),
    ],
)
def test_others_are_let_near_a_node_that_asks_who_they_are(tmp_path: Path, text: str, missing: str) -> None:
    text = f'[http]\nlisten = "10.0.0.1:8400"\n{text}\n'
    if missing:
        assert re.search(missing, complaint(tmp_path, text))
    else:
        path = tmp_path / "n.toml"
        path.write_text(text)
        assert load(str(path)).http.listen == "10.0.0.1:8400"


def test_a_node_link_that_others_reach_takes_certificates(tmp_path: Path) -> None:
    said = complaint(tmp_path, '[raft]\nlisten = "[fd00::1]:8500"')
    assert "2: raft.listen: other machines can reach [fd00::1]:8500" in said
    assert "set tls_cert, tls_key and tls_ca under [raft]" in said


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load("/nonexistent/hadelay.toml")


def test_every_key_has_its_unit_or_needs_none() -> None:
    plain = {
        "group", "max_connections", "max_connections_per_address", "max_calls", "topic_calls", "idempotency_keys"
    }  # fmt: skip
    numbers = {key.partition(".")[2] for key, kind in keys().items() if kind is int and key not in RETIRED}
    assert {name for name in numbers if not name.endswith(("_ms", "_bytes"))} == plain


def test_there_are_few_keys() -> None:
    """Fifty, `http.console`, which switches the console off, and three of the certificate that webhooks are shown;
    the rate at which a node reads its files again; and the doors for AWS SDKs, with their port."""
    assert len(keys()) - len(RETIRED) <= 57


#: A value of each retired key that 0.1.0 took.
OF_BEFORE = {
    "http.max_batch_items": 100_000, "http.max_receive": 10_000, "http.default_receive": 50, "http.max_wait_ms": 90_000,
    "http.max_topic_bytes": 256, "http.max_key_bytes": 1_024, "http.max_meta_bytes": 0, "http.max_tags": 0,
    "http.max_tag_bytes": 1_024, "http.max_reading_bytes": 1 << 20, "http.io_timeout_ms": 60_000,
    "http.no_leader_wait_ms": 5_000, "http.max_waiting": 50, "raft.election_max_ms": 900, "raft.heartbeat_ms": 20,
    "raft.max_entry_bytes": 4 << 20, "raft.max_inflight_bytes": 8 << 20, "raft.segment_bytes": 64 << 20,
    "raft.max_sync_ms": 5_000, "dispatch.preload_ms": 20_000, "dispatch.ready_window": 1_000_000,
    "dispatch.job_step": 100, "dispatch.sweep_ms": 60_000, "limits.metrics_topics": 0,
    "limits.publish_queue_bytes": 1 << 30,
    "limits.max_clock_skew_ms": 1_000, "storage.far_buffer_bytes": 1 << 20, "storage.checkpoint_bytes": 1 << 30,
    "storage.checkpoint_interval_ms": 600_000, "webhooks.host_calls": 1_000, "webhooks.user_agent": "ours",
}  # fmt: skip


def test_every_retired_key_has_a_value_of_before() -> None:
    assert OF_BEFORE.keys() == RETIRED


@pytest.mark.parametrize("key", OF_BEFORE)
@pytest.mark.parametrize("source", ["file", "environment", "flag"])
def test_a_retired_key_is_honoured_with_a_warning(key: str, source: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    value, said = OF_BEFORE[key], list[str]()
    path, environ, flags = None, dict[str, str](), list[str]()
    if source == "file":
        path = tmp_path / "n.toml"
        path.write_text(f"[{section}]\n{name} = {value if isinstance(value, int) else repr(value)}\n")
    elif source == "environment":
        environ = {f"HADELAY_{section}__{name}".upper(): str(value)}
    else:
        flags = [f"{key}={value}"]
    config = load(path and str(path), environ, flags, warn=said.append)
    assert getattr(getattr(config, section), name) == value
    (warning,) = said
    where = {"file": f"{path}:2", "environment": f"environment variable {next(iter(environ), '')}"}
    assert warning.startswith(f"{where.get(source, f'--set {key}={value}')}: {key} is retired. Its value is used in")


def test_nothing_is_said_of_other_keys(capsys: pytest.CaptureFixture[str]) -> None:
    load(overrides=["http.max_body_bytes=2MiB"])
    assert capsys.readouterr().err == ""
    load(overrides=["http.max_tags=3"])
    assert capsys.readouterr().err.startswith("hadelay: --set http.max_tags=3: http.max_tags is retired.")


def test_a_typo_is_not_led_to_a_retired_key(tmp_path: Path) -> None:
    assert "max_tags" not in complaint(tmp_path, "[http]\nmax_tag = 3")


def test_a_survivor_is_alone(tmp_path: Path) -> None:
    two = '[cluster]\nsurvivor = true\n[raft.peers]\nn1 = "127.0.0.1:1"\nn2 = "127.0.0.1:2"\n'
    assert "cluster.survivor: needs a cluster of this node alone: --set raft.peers=" in complaint(tmp_path, two)


OPEN = "[security]\ninsecure = true\n"
APART = '[raft]\nlisten = "0.0.0.0:8500"\n[raft.peers]\nn1 = "10.0.0.1:8500"\nn2 = "10.0.0.2:8500"\n'
HERE = '[raft.peers]\nn1 = "127.0.0.1:8500"\nn2 = "localhost:8501"\n'


@pytest.mark.parametrize("listen", ["0.0.0.0:8400", "[::]:8400", "0:8400", "[::ffff:0.0.0.0]:8400", "[0:0::0]:8400"])
@pytest.mark.parametrize("peers", ["", HERE, APART])
def test_a_wildcard_is_no_address_to_be_found_at(tmp_path: Path, listen: str, peers: str) -> None:
    """Followers would redirect to it, and clients and other nodes would reach themselves there."""
    said = complaint(tmp_path, f'{OPEN}[http]\nlisten = "{listen}"\n{peers}')
    assert f"4: http.listen: clients and other nodes look for this node at http://{listen}" in said
    assert "names no machine: set http.advertise to a URL such as http://10.0.0.1:8400" in said
    said = complaint(tmp_path, f'{OPEN}[http]\nlisten = "10.0.0.1:8400"\nadvertise = "https://{listen}"\n{peers}')
    assert f"5: http.advertise: clients and other nodes look for this node at https://{listen}" in said
    path = tmp_path / "fine.toml"
    path.write_text(f'{OPEN}[http]\nlisten = "{listen}"\nadvertise = "http://10.0.0.1:8400"\n{peers}')
    assert load(str(path)).http.listen == listen


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8400", "http://localhost:8400", "http://[::1]:8400", "http://127.9.9.9"]
)
@pytest.mark.parametrize(
    ("listen", "peers"), [("0.0.0.0:8400", HERE), ("10.0.0.1:8400", APART), ("127.0.0.1:8400", APART)]
)
def test_loopback_is_no_address_for_other_machines(tmp_path: Path, url: str, listen: str, peers: str) -> None:
    said = complaint(tmp_path, f'{OPEN}[http]\nlisten = "{listen}"\nadvertise = "{url}"\n{peers}')
    assert f"http.advertise: clients and other nodes look for this node at {url}" in said
    assert "other machines reach themselves there" in said


def test_loopback_is_enough_on_one_machine(tmp_path: Path) -> None:
    path = tmp_path / "n.toml"
    for text in (HERE, f'{OPEN}[http]\nlisten = "0.0.0.0:8400"\nadvertise = "http://localhost:8400"\n', ""):
        path.write_text(text)
        load(str(path))
    assert "http.listen" in complaint(tmp_path, OPEN + APART), "the default is loopback"


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        (APART.replace("10.0.0.2", "0.0.0.0"), "7: raft.peers.n2: 0.0.0.0 names no machine"),
        (APART.replace("10.0.0.1", "[::]"), "6: raft.peers.n1: :: names no machine"),
        (APART.replace("10.0.0.2", "127.0.0.1"), "7: raft.peers.n2: 127.0.0.1: other machines, such as that of n1,"),
        (APART.replace("10.0.0.1", "localhost"), "6: raft.peers.n1: localhost: other machines, such as that of n2,"),
        ('[raft]\nlisten = "0.0.0.0:8500"\n', "4: raft.listen: 0.0.0.0 names no machine: other nodes find n1 by"),
    ],
)
def test_members_have_addresses_at_which_they_are_found(tmp_path: Path, peers: str, expected: str) -> None:
    text = f'{OPEN}{peers}[http]\nlisten = "10.0.0.1:8400"\n'
    assert expected in complaint(tmp_path, text)
    path = tmp_path / "x.toml"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "hadelay", "config", "check", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert "names no machine" in done.stderr or "reach themselves" in done.stderr
