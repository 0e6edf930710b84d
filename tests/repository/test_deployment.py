"""What cluster/ offers to run a cluster with, against the configuration, the ports and the routes that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hadelay.cli.app import COMMANDS
from hadelay.http.app import ROUTES
from hadelay.process import RESERVE, divide
from hadelay.settings.load import load
from hadelay.settings.node import Config
from hadelay.settings.rules import split_address

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"
PATHS = {route.path for route in ROUTES.all}
#: Where a node finds its certificate, its key, and the authority's certificate.
TLS = ("/etc/hadelay/tls", "/etc/hadelay-tls")
UNIT = CLUSTER / "systemd/hadelay.service"
SHARD_UNIT = CLUSTER / "systemd/hadelay@.service"
SHARD_MANIFESTS = CLUSTER / "kubernetes/shard.yaml"
#: systemd-analyze security: 0 is a service that can do nothing, 10 one that can do everything.
MOST_EXPOSED = 1.5


def configured(text: str, directory: Path, environment: dict[str, str]) -> Config:
    path = directory / "hadelay.toml"
    path.write_text(text)
    return load(str(path), environment)


def check_node(config: Config, name: str, names: list[str]) -> None:
    assert config.node.name == name
    assert list(config.raft.peers) == names
    assert (split_address(config.http.listen)[1], split_address(config.raft.listen)[1]) == (8400, 8500)
    assert {split_address(address)[1] for address in config.raft.peers.values()} == {8500}
    assert config.advertise.startswith("https://")
    assert config.advertise.endswith(":8400")
    # Neither the words nor the thing: `load` refuses an open address without certificates and tokens.
    assert not config.security.insecure
    assert config.security.tokens
    assert {config.http.tls_cert, config.raft.tls_cert} < {f"{directory}/node.pem" for directory in TLS}


def check_command(words: list[str]) -> None:
    assert words[0] in {command.path for command in COMMANDS}
    # No --init for good: whoever loses its disk later would be a founder again.
    assert words[1:] == ["/etc/hadelay/hadelay.toml"]


# ---- Kubernetes

MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((CLUSTER / "kubernetes/hadelay.yaml").read_text()))
#: Labels of the nodes of all shards.
OF_ALL = {"app.kubernetes.io/name": "hadelay"}


def manifest(kind: str, name: str = "hadelay") -> dict[str, Any]:
    (found,) = (m for m in MANIFESTS if (m["kind"], m["metadata"]["name"]) == (kind, name))
    return found


def pod() -> dict[str, Any]:
    template: dict[str, Any] = manifest("StatefulSet")["spec"]["template"]
    return template


def container() -> dict[str, Any]:
    (found,) = pod()["spec"]["containers"]
    return dict(found)


def test_each_pod_has_a_configuration_that_the_others_expect(tmp_path: Path) -> None:
    text = manifest("ConfigMap")["data"]["hadelay.toml"]
    stateful = manifest("StatefulSet")["spec"]
    names = [f"hadelay-{n}" for n in range(stateful["replicas"])]
    variables = {item["name"]: item for item in container()["env"]}
    assert variables["HADELAY_NODE__NAME"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    for name in names:
        config = configured(text, tmp_path, pod_environment(name))
        check_node(config, name, names)
        assert config.cluster.init
        assert "take this line out" in text
        # As the headless service names them.
        assert config.raft.peers[name] == f"{name}.{stateful['serviceName']}:8500"
        assert config.advertise == f"https://{name}.{stateful['serviceName']}.hadelay.svc:8400"
        mounts = [mount["mountPath"] for mount in container()["volumeMounts"] if not mount.get("readOnly")]
        # In a directory of its own: the root of a volume has a lost+found.
        for directory in (config.node.data_dir, config.journal_dir):
            assert str(Path(directory).parent) in mounts
    check_command(container()["args"])
    (mount,) = (m for m in container()["volumeMounts"] if m["name"] == "config")
    assert mount["mountPath"] == "/etc/hadelay"
    # A Service called hadelay would give every pod variables such as HADELAY_PORT, which the configuration refuses.
    assert pod()["spec"]["enableServiceLinks"] is False


def shard_manifests(shard: int) -> list[dict[str, Any]]:
    """As the comment of the file says that they are made."""
    text = SHARD_MANIFESTS.read_text()
    (command,) = re.findall(r"^# For shard 2: (sed .*)$", text, re.M)
    command = command.replace("s2", f"s{shard}").replace("= 2", f"= {shard}")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10)
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("shard", [1, 2, 12])
def test_nodes_of_a_shard_differ_by_names_and_group(shard: int, tmp_path: Path) -> None:
    found = shard_manifests(shard)
    mine = [one for one in MANIFESTS if one["kind"] in ("ConfigMap", "PodDisruptionBudget", "StatefulSet")]
    assert [one["kind"] for one in found] == [one["kind"] for one in mine]
    text = json.dumps(found).replace(f"\\n    group = {shard}", "").replace(f"\\ngroup = {shard}", "")
    alike = json.loads(text.replace(f"-s{shard}", "").replace(f'"s{shard}"', '"s0"'))
    assert alike == mine
    config = found[0]["data"]["hadelay.toml"]
    names = [f"hadelay-s{shard}-{n}" for n in range(3)]
    for name in names:
        node = configured(config, tmp_path, pod_environment(name))
        check_node(node, name, names)
        assert (node.cluster.id, node.cluster.group) == (f"kubernetes-s{shard}", shard)
        # As the headless service of all shards names them.
        assert node.raft.peers[name] == f"{name}.{found[2]['spec']['serviceName']}:8500"
    template = found[2]["spec"]["template"]
    assert OF_ALL.items() < template["metadata"]["labels"].items()
    assert template["metadata"]["labels"] != pod()["metadata"]["labels"]


def pod_environment(name: str, namespace: str = "hadelay", hash_: str = "") -> dict[str, str]:
    """What the pod of that name has in its environment."""
    known = {"metadata.name": name, "metadata.namespace": namespace}
    found: dict[str, str] = {}
    for item in container()["env"]:
        source = item.get("valueFrom", {})
        if "fieldRef" in source:
            found[item["name"]] = known[source["fieldRef"]["fieldPath"]]
        elif "configMapKeyRef" in source:
            assert source["configMapKeyRef"] == {"name": "hadelay-bootstrap", "key": "hash", "optional": True}
            found |= {item["name"]: hash_} if hash_ else {}
        else:
            text = item["value"]
            for variable in re.findall(r"\$\((\w+)\)", text):
                text = text.replace(f"$({variable})", found[variable])
            found[item["name"]] = text
    return found


def test_a_pod_sees_its_own_key_and_no_other() -> None:
    (volume,) = (volume for volume in pod()["spec"]["volumes"] if volume["name"] == "tls")
    # For the group that the pod runs as.
    assert volume["secret"] == {"secretName": "hadelay-tls", "defaultMode": 0o440}
    mounts = [mount for mount in container()["volumeMounts"] if mount["name"] == "tls"]
    assert all(mount["readOnly"] for mount in mounts)
    assert {Path(mount["mountPath"]).name: mount.get("subPath") or mount["subPathExpr"] for mount in mounts} == {
        "ca.pem": "ca.pem", "node.pem": "$(HADELAY_NODE__NAME).pem", "node.key": "$(HADELAY_NODE__NAME).key",
    }  # fmt: skip
    page = (ROOT / "docs/howto/containers.md").read_text()
    given = {Path(path).name for path in re.findall(r"--from-file=(\S+)", page)}
    assert given == {"ca.pem"} | {f"hadelay-{n}.{kind}" for n in range(3) for kind in ("pem", "key")}


def test_the_number_of_descriptors_that_a_node_needs_is_documented(tmp_path: Path) -> None:
    """A pod cannot set its limit; the node lowers what does not fit."""
    text = manifest("ConfigMap")["data"]["hadelay.toml"]
    config = configured(text, tmp_path, pod_environment("hadelay-0"))
    (said,) = re.findall(r"# ([\d,]+) descriptors are needed", text)
    needed = int(said.replace(",", ""))
    assert "max_connections = " in text
    assert needed == config.http.max_connections + config.webhooks.max_calls + RESERVE
    assert divide(config, needed)[0] == config
    fitted = divide(config, 1_024)[0]
    assert (fitted.http.max_connections, fitted.webhooks.max_calls) == (384, 128)


def test_nodes_find_each_other_before_they_are_ready() -> None:
    headless = manifest("Service", manifest("StatefulSet")["spec"]["serviceName"])["spec"]
    assert headless["clusterIP"] == "None"
    assert headless["publishNotReadyAddresses"] is True
    assert manifest("StatefulSet")["spec"]["podManagementPolicy"] == "Parallel"


def test_selectors_and_ports_name_what_there_is() -> None:
    labels = pod()["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": 8400, "raft": 8500}
    assert manifest("StatefulSet")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    # The names are those of all shards; clients reach a shard that is in no map yet by none.
    for name, selected in (("hadelay", labels), ("hadelay-nodes", OF_ALL)):
        service = manifest("Service", name)["spec"]
        assert service["selector"] == selected
        assert all((port["targetPort"], port["port"]) in ports.items() for port in service["ports"])
    mounted = {mount["name"] for mount in container()["volumeMounts"]}
    claimed = {claim["metadata"]["name"] for claim in manifest("StatefulSet")["spec"]["volumeClaimTemplates"]}
    assert mounted == claimed | {volume["name"] for volume in pod()["spec"]["volumes"]}


def test_one_node_may_be_away_and_probes_ask_for_routes() -> None:
    assert manifest("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    probes = {name: container()[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    # The kubelet accepts any certificate; health takes no token.
    assert all(probe["path"] in PATHS and probe["port"] == "http" for probe in probes.values())
    assert {probe["scheme"] for probe in probes.values()} == {"HTTPS"}
    # Never the majority: a partition would restart every node.
    assert probes["liveness"]["path"] == probes["startup"]["path"] == "/livez"
    assert probes["readiness"]["path"] == "/readyz"
    # A scrape takes a token, which annotations cannot give.
    assert "annotations" not in pod()["metadata"]


def test_only_nodes_reach_the_links() -> None:
    policy = manifest("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["podSelector"]["matchLabels"] == OF_ALL
    for rule in policy["ingress"]:
        named = {port["port"] for port in rule["ports"]}
        assert named <= {"http", "raft"}
        if "raft" in named:
            assert rule["from"] == [{"podSelector": {"matchLabels": OF_ALL}}]


def test_pods_may_do_little() -> None:
    spec, own = pod()["spec"], container()["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}
    # Handing over, calls that end, and a checkpoint (process.py).
    assert spec["terminationGracePeriodSeconds"] >= 3 + 5 + 10


# ---- Docker


def test_each_service_has_a_configuration_that_the_others_expect(tmp_path: Path) -> None:
    compose = yaml.safe_load((CLUSTER / "docker/compose.yaml").read_text())
    services = {name: service for name, service in compose["services"].items() if "profiles" not in service}
    names = list(services)
    text = compose["configs"]["hadelay"]["content"]
    hosts = set()
    for name, service in services.items():
        config = configured(text, tmp_path, compose_environment(service))
        check_node(config, name, names)
        assert config.cluster.init
        assert "take it out" in text
        assert service["environment"]["HADELAY_HTTP__ADVERTISE"] == f"https://{name}:8400"
        # Its own, and not the authority's.
        assert service["volumes"] == [f"{name}:/var/lib/hadelay", f"{name}-tls:/etc/hadelay/tls:ro"]
        assert {name, f"{name}-tls"} <= set(compose["volumes"])
        assert service["configs"] == [{"source": "hadelay", "target": "/etc/hadelay/hadelay.toml"}]
        (published,) = service["ports"]
        host, ours = published.rsplit(":", 1)
        # For a look: this machine only.
        assert host.startswith("127.0.0.1:")
        assert ours == "8400"
        hosts.add(host)
        build = service["build"]
        assert (CLUSTER / "docker" / build["context"] / build["dockerfile"]).exists()
    assert len(hosts) == len(names)


def compose_environment(service: dict[str, Any], hash_: str = "") -> dict[str, str]:
    """What a node's process has of it; hash_: of the bootstrap token, from .env."""
    found = {name: str(value) for name, value in service["environment"].items() if name != "HEALTH_URL"}
    return {name: value.replace("${BOOTSTRAP_TOKEN_HASH:-}", hash_) for name, value in found.items()}


def test_the_one_time_step_is_outside_the_nodes() -> None:
    compose = yaml.safe_load((CLUSTER / "docker/compose.yaml").read_text())
    setup = compose["services"]["setup"]
    assert (setup["network_mode"], setup["profiles"], "ports" in setup) == ("none", ["setup"], False)
    whole = {name for name, one in compose["services"].items() if any("authority" in v for v in one["volumes"])}
    assert whole == {"setup"}
    # The uid that the image runs as.
    assert "-o 10001" in setup["command"][0]
    urls = {one["environment"]["HEALTH_URL"] for one in compose["services"].values() if "HEALTH_URL" in str(one)}
    assert urls == {"https://127.0.0.1:8400/livez"}


def test_the_image_is_made_of_what_there_is() -> None:
    text = re.sub(r"\\\n\s*", " ", (CLUSTER / "docker/Dockerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    of = {word: [rest for kind, rest in lines if kind == word] for word, _ in lines}
    for copied in of["COPY"]:
        if not copied.startswith("--from"):
            assert all((ROOT / source).exists() for source in copied.split()[:-1]), copied
    assert of["EXPOSE"] == ["8400 8500"]
    assert of["USER"] == ["10001"]
    check_command(yaml.safe_load(of["CMD"][0]))
    assert "HEALTH_URL" in of["HEALTHCHECK"][0]
    assert "HEALTH_URL=http://127.0.0.1:8400/livez" in of["ENV"]
    # What pins the versions finds every package of the lock.
    pattern = re.compile(r"^([a-z0-9-]*==[^ \\]*)", re.M)
    lock = (ROOT / "requirements.lock").read_text()
    assert len(pattern.findall(lock)) == lock.count("==")
    assert "s/^\\([a-z0-9-]*==[^ \\\\]*\\).*/\\1/p" in of["RUN"][0]


# ---- systemd


def unit(path: Path = UNIT) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_starts_what_there_is() -> None:
    (start,) = unit()["ExecStart"]
    program, *words = start.split()
    assert program == "/opt/hadelay/bin/hadelay"
    check_command(words)
    assert unit()["Type"] == ["notify"]
    # A mistake in the configuration ends with 2 (cli/app.py).
    assert unit()["RestartPreventExitStatus"] == ["2"]
    assert int(unit()["TimeoutStopSec"][0]) >= 3 + 5 + 10


def test_the_unit_of_a_shard_differs_by_its_index_and_the_user() -> None:
    """The user of a template's instance would otherwise be another one, who may not write to the directory."""
    one, shard = unit(), unit(SHARD_UNIT)
    (start,), (shard_start,) = one.pop("ExecStart"), shard.pop("ExecStart")
    assert shard_start == f"{start} --shard %i"
    assert shard.pop("EnvironmentFile") == ["-/etc/hadelay/s%i.env"]
    assert shard.pop("User") == [UNIT.stem]
    assert one["DynamicUser"] == ["yes"]
    assert "%i" in shard.pop("Description")[0]
    one.pop("Description")
    assert one == shard


def test_a_node_that_ended_itself_is_started_again_without_end() -> None:
    """A full disk ends it with 70, and with 1 where there is no room to start: it comes back when there is room."""
    said = unit()
    assert said["Restart"] == ["on-failure"]
    assert not {"1", "70"} & set(said["RestartPreventExitStatus"][0].split())
    assert said["StartLimitIntervalSec"] == ["0"]
    services = yaml.safe_load((CLUSTER / "docker/compose.yaml").read_text())["services"]
    assert [services[f"n{n}"]["restart"] for n in (1, 2, 3)] == ["on-failure"] * 3
    pod = next(one for one in MANIFESTS if one["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    assert pod.get("restartPolicy", "Always") == "Always"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(("path", "name"), [(UNIT, UNIT.name), (SHARD_UNIT, "hadelay@1.service")])
def test_systemd_takes_the_unit_and_finds_it_hardened(path: Path, name: str, tmp_path: Path) -> None:
    here = tmp_path / name
    # Where the program will be it is not yet.
    here.write_text(path.read_text().replace("/opt/hadelay/bin/hadelay", "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", here], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={MOST_EXPOSED * 10:.0f}", here],
        capture_output=True,
        text=True,
    )
    assert judged.returncode == 0, judged.stdout[-2000:] + judged.stderr
