"""The dashboard and the alerts against what nodes show, and the alerts against the runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from hadelay.api.attention import KINDS
from hadelay.http.app import ROUTES
from hadelay.http.metrics import FAMILIES as HTTP_FAMILIES
from hadelay.server.metrics import CALLBACKS, CAUSES, FAMILIES, OUTCOMES
from tools import dashboard

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"
RUNBOOK = ROOT / "docs/howto/runbook.md"
#: What Prometheus adds to every series.
TARGET = {"job", "instance"}
#: Values of labels that never change, as far as an expression may name them.
VALUES = {
    "outcome": {*OUTCOMES, *CALLBACKS, "2xx"}, "cause": set(CAUSES), "file": {"log", "idx", "dsp"},
    "kind": set(KINDS), "quantile": {"0.5", "0.99", "1"},
    "state": {"waiting", "scheduled", "ready", "leased", "dead"}, "route": {route.name for route in ROUTES.all},
}  # fmt: skip


def series() -> dict[str, set[str]]:
    """Names that can be asked for → their labels."""
    found = {"up": set(TARGET)}
    for family in (*FAMILIES.values(), *HTTP_FAMILIES):
        labels = TARGET | set(family.labels)
        if family.kind == "histogram":
            found |= {f"{family.name}_{part}": labels for part in ("sum", "count")}
            found[f"{family.name}_bucket"] = {*labels, "le"}
        else:
            found[family.name] = labels
    return found


SERIES = series()


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((CLUSTER / "prometheus/alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dashboard.PAGE.read_text())["panels"]
    return found


def queries() -> Iterator[tuple[str, str, str]]:
    """(where, expression, text that names labels)"""
    for rule in alerts():
        yield rule["alert"], rule["expr"], rule["annotations"]["summary"]
    for panel in panels():
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "5m").replace("$job", "hadelay")
            yield f"{panel['title']} {target['refId']}", expression, target["legendFormat"]


def labels_left(node: Any) -> set[str] | None:
    """The labels of what an expression gives; checks those that it names on the way. None: it is a number."""
    match node:
        case promql.VectorSelector():
            assert node.name in SERIES, f"no node shows {node.name}"
            for matcher in node.matchers.matchers:
                assert matcher.name in SERIES[node.name], f"{node.name} has no label {matcher.name}"
                if matcher.name in VALUES:
                    assert set(matcher.value.split("|")) <= VALUES[matcher.name], matcher.value
            return set(SERIES[node.name])
        case promql.MatrixSelector():
            return labels_left(node.vector_selector)
        case promql.AggregateExpr():
            labels = labels_left(node.expr)
            assert labels is not None
            if node.modifier is None:
                return labels if "topk" in node.prettify()[:5] else set()
            assert set(node.modifier.labels) <= labels, f"{node.modifier.labels} of {labels}"
            return set(node.modifier.labels)
        case promql.Call():
            found = [labels for arg in node.args if (labels := labels_left(arg)) is not None]
            if not node.args:
                return None  # time()
            if node.func.name in ("rate", "increase"):
                name = node.args[0].vector_selector.name
                assert name.endswith(("_total", "_bucket", "_sum", "_count")), f"{node.func.name} of {name}, no counter"
            if node.func.name == "label_replace":
                return found[0] | {node.args[1].val}
            if node.func.name == "histogram_quantile":
                assert "le" in found[0]
            return found[0] - {"le"} if node.func.name == "histogram_quantile" else found[0]
        case promql.BinaryExpr():
            left, right = labels_left(node.lhs), labels_left(node.rhs)
            if left is not None and right is not None:
                matching = node.modifier.matching if node.modifier is not None else None
                if matching is not None:
                    assert set(matching.labels) <= left & right, matching.labels
                elif str(node.op) != "or":
                    assert left == right, f"{left} and {right} never match"
                return left if str(node.op) in ("and", "unless") else left & right
            return left if left is not None else right
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return labels_left(node.expr)
    return None


@pytest.mark.parametrize(("where", "expression", "said"), list(queries()), ids=[where for where, _, _ in queries()])
def test_expressions_ask_for_what_is_shown(where: str, expression: str, said: str) -> None:
    left = labels_left(promql.parse(expression))
    assert left is not None
    named = set(re.findall(r"\{\{ \$labels\.(\w+)", said)) | set(re.findall(r"\{\{(\w+)\}\}", said))
    assert named <= left, f"{where} speaks of {named - left}, which is not left"
    assert set(re.findall(r"with \$labels\.(\w+)", said)) <= {"topic"}


@pytest.mark.parametrize(
    "wrong",
    [
        "hadelay_raft_leader", 'hadelay_raft_term{node="n1"}', "sum by (peer) (hadelay_raft_term)",
        "rate(hadelay_raft_term[5m])", 'hadelay_messages{state="lost"}',
        "histogram_quantile(0.99, rate(hadelay_throttled_total[5m]))",
        "hadelay_messages / hadelay_raft_term",
    ],
)  # fmt: skip
def test_a_metric_that_no_panel_shows_is_noticed(wrong: str) -> None:
    with pytest.raises(AssertionError):
        labels_left(promql.parse(wrong))


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    sections = re.findall(r"^## (Hadelay\w+)$", RUNBOOK.read_text(), re.M)
    names = [rule["alert"] for rule in alerts()]
    assert sorted(sections) == sorted(names)
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/howto/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}


SERIES_TESTS = CLUSTER / "prometheus/alerts.test.yaml"


def test_every_alert_has_an_incident_and_a_noise_in_series_that_nodes_show() -> None:
    tests = yaml.safe_load(SERIES_TESTS.read_text())["tests"]
    incidents, noises = set(), set()
    for test in tests:
        name, _, kinds = test["name"].partition(" - ")[0].partition(", ")
        asked = {one["alertname"]: one["exp_alerts"] for one in test["alert_rule_test"]}
        assert set(asked) == {name}
        assert bool(asked[name]) == ("incident" in kinds), test["name"]
        incidents |= {name} if "incident" in kinds else set()
        noises |= {name} if "noise" in kinds else set()
        for one in test["input_series"]:
            selector = promql.parse(one["series"])
            given = {matcher.name for matcher in selector.matchers.matchers}
            assert given == SERIES[selector.name], f"{name}: {one['series']}"
    assert incidents == noises == {rule["alert"] for rule in alerts()}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_alerts_fire_in_their_incidents_and_not_in_noise() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", SERIES_TESTS.name], cwd=SERIES_TESTS.parent, capture_output=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_each_section_says_what_it_means_and_what_to_do() -> None:
    for section in re.split(r"^## (?=Hadelay)", RUNBOOK.read_text(), flags=re.M)[1:]:
        name = section.partition("\n")[0]
        assert "**Means.**" in section, name
        assert "**Do.**" in section, name


def test_the_dashboard_is_what_the_code_makes() -> None:
    assert dashboard.PAGE.read_text() == dashboard.text()


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(panels())


def test_prometheus_reads_the_alerts() -> None:
    config = yaml.safe_load((CLUSTER / "prometheus/prometheus.yaml").read_text())
    assert [(CLUSTER / "prometheus" / name).exists() for name in config["rule_files"]] == [True]
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "hadelay"
