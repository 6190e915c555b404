"""Dashboards and alerts: up to date, parseable, and about metrics and labels that the code exports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import promql_parser
import pytest
import yaml
from moving_metrics import exported
from rendered_chart import CHART, ROOT, Renderer

from antiphon.protocol.identity import Role
from antiphon.router.admission import Admission
from antiphon.router.metrics import STAGES, RouterMetrics

MONITORING = ROOT / "helm/monitoring"
DASHBOARDS = sorted((CHART / "files/dashboards").glob("*.json"))
ADDED_BY_PROMETHEUS = {"instance", "job"}
DCGM_LABELS = {"Hostname", "gpu"}
VARIABLES = {"$model": ".+", "$__rate_interval": "5m"}


def dcgm_metrics() -> set[str]:
    """What gpu_panels.py says of dcgm-exporter."""
    text = (MONITORING / "gpu_panels.py").read_text()
    table = text[text.index("DCGM_METRICS = {") :].split("}", 1)[0]
    return set(re.findall(r'"(DCGM_\w+)"', table))


@dataclass(frozen=True, slots=True)
class Expression:
    """One expression and where it is from."""

    where: str
    text: str

    def parse(self) -> promql_parser.Expr:
        text = self.text
        for variable, value in VARIABLES.items():
            text = text.replace(variable, value)
        return promql_parser.parse(text)


def panels() -> Iterator[tuple[str, dict[str, object]]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            yield f"{path.stem}: {panel['title']}", panel


def alert_rules() -> list[dict[str, object]]:
    groups = yaml.safe_load((ROOT / "docker/prometheus/alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[Expression]:
    for where, panel in panels():
        targets = panel.get("targets", [])
        assert isinstance(targets, list)
        for target in targets:
            yield Expression(where, target["expr"])
    for rule in alert_rules():
        yield Expression(str(rule["alert"]), str(rule["expr"]))


EXPRESSIONS = list(expressions())


def nodes(expression: promql_parser.Expr) -> list[promql_parser.Expr]:
    found: list[promql_parser.Expr] = []
    promql_parser.walk(expression, pre_visit=found.append)
    return found


def selectors(expression: promql_parser.Expr) -> list[promql_parser.VectorSelector]:
    found = []
    for node in nodes(expression):
        if isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        elif isinstance(node, promql_parser.VectorSelector):
            found.append(node)
    return found


def labels_of(name: str) -> frozenset[str]:
    """Labels of a metric that exists."""
    if name in dcgm_metrics():
        return frozenset(DCGM_LABELS)
    return exported()[name] | ADDED_BY_PROMETHEUS


def test_the_files_are_what_the_code_makes() -> None:
    done = subprocess.run(
        [sys.executable, str(MONITORING / "generate.py"), "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_there_is_something_to_look_at() -> None:
    assert {path.stem for path in DASHBOARDS} == {
        *("overview", "pd-balance", "kv-transfer", "latency-anatomy", "errors-and-repairs", "gpu")
    }
    assert len(EXPRESSIONS) > 60


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda e: e.where)
def test_an_expression_uses_what_is_exported(expression: Expression) -> None:
    parsed = expression.parse()
    used = selectors(parsed)
    assert used
    available: set[str] = set()
    for selector in used:
        labels = labels_of(str(selector.name))
        available |= labels
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels, selector
    for node in nodes(parsed):
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            inside = set.intersection(*(set(labels_of(str(s.name))) for s in selectors(node.expr)))
            assert set(node.modifier.labels) <= inside, expression


def cumulative(name: str) -> bool:
    """Whether a metric only grows."""
    return name.endswith(("_total", "_bucket", "_sum", "_count", "_BYTES"))


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda e: e.where)
def test_counters_are_read_as_rates_and_gauges_are_not(expression: Expression) -> None:
    parsed = expression.parse()
    rated = {
        str(s.name)
        for node in nodes(parsed)
        if isinstance(node, promql_parser.Call) and node.func.name in ("rate", "increase")
        for s in selectors(node)
    }
    for name in {str(selector.name) for selector in selectors(parsed)}:
        assert (name in rated) is cumulative(name), name
    for node in nodes(parsed):
        if isinstance(node, promql_parser.Call) and node.func.name == "histogram_quantile":
            (aggregation,) = (a for a in nodes(node) if isinstance(a, promql_parser.AggregateExpr))
            assert "le" in aggregation.modifier.labels


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda e: e.where)
def test_nothing_is_divided_by_a_gauge_that_may_be_0(expression: Expression) -> None:
    """Rates fall to 0 together, which draws nothing; over a gauge of 0 they would be infinite."""
    for node in nodes(expression.parse()):
        if isinstance(node, promql_parser.BinaryExpr) and str(node.op) == "/":
            names = {str(selector.name) for selector in selectors(node.rhs)}
            gauges = {name for name in names if name.startswith("antiphon") and not cumulative(name)}
            assert not gauges or " > 0" in str(node.rhs), node


def test_the_checks_catch_what_they_are_for() -> None:
    for wrong in (
        "sum(antiphon_no_such_metric)",
        'antiphon_ready_pairs{worker="a"}',
        "sum by (worker) (antiphon_ready_pairs)",
    ):
        with pytest.raises((KeyError, AssertionError)):
            test_an_expression_uses_what_is_exported(Expression("wrong", wrong))
    with pytest.raises(AssertionError):
        test_counters_are_read_as_rates_and_gauges_are_not(Expression("wrong", "antiphon_retries_total"))
    with pytest.raises(AssertionError):
        test_nothing_is_divided_by_a_gauge_that_may_be_0(Expression("wrong", "1 / sum(antiphon_ready_pairs)"))


def test_matched_values_are_ones_that_exist() -> None:
    roles = {str(role) for role in Role}
    rejections = set(
        re.findall(
            r'rejections\.labels\("(\w+)"\)',
            Path(sys.modules[Admission.__module__].__file__ or "").read_text(),
        )
    )
    known = {"role": roles, "stage": set(STAGES), "reason": rejections}
    matched = set()
    for expression in EXPRESSIONS:
        for selector in selectors(expression.parse()):
            for matcher in selector.matchers.matchers:
                if matcher.name in known:
                    matched.add(matcher.name)
                    assert set(matcher.value.split("|")) <= known[matcher.name], expression
    assert matched == set(known)


def test_what_alerts_count_is_0_from_the_start() -> None:
    """No rate shows the first refusal or error of a series that begins with it."""
    text = RouterMetrics("m").exposition()[0].decode()
    source = (ROOT / "router/admission.py").read_text()
    at_the_door = set(re.findall(r'rejections\.labels\("(\w+)"\)', source))
    begun = set(re.findall(r'^antiphon_rejections_total{.*reason="(\w+)"', text, re.M))
    assert begun == at_the_door | {"key_limit"}
    errors = set(re.findall(r"^\| (5\d\d) \|", page_of("http-api.md"), re.M))
    for endpoint in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        series = rf'^antiphon_requests_total{{endpoint="{endpoint}",.*status_code="(5\d\d)"'
        assert set(re.findall(series, text, re.M)) == errors


def test_bounds_of_objectives_are_bounds_of_buckets() -> None:
    text = RouterMetrics("m").exposition()[0].decode()
    for expression in EXPRESSIONS:
        for selector in selectors(expression.parse()):
            for matcher in selector.matchers.matchers:
                if matcher.name == "le":
                    assert re.search(rf'^{selector.name}{{.*le="{re.escape(matcher.value)}"', text, re.M)


def test_every_metric_is_shown_somewhere() -> None:
    shown = {str(s.name) for expression in EXPRESSIONS for s in selectors(expression.parse())}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()}
    families.remove("antiphon_kv_cache_info")  # sizes, for whoever wants to multiply by them
    assert families == {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown if "DCGM" not in name}


def test_every_dcgm_metric_that_is_listed_is_shown() -> None:
    shown = {str(s.name) for expression in EXPRESSIONS for s in selectors(expression.parse())}
    assert {name for name in shown if "DCGM" in name} == dcgm_metrics()


def test_panels_can_be_told_apart() -> None:
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        assert board["uid"] == f"antiphon-{path.stem}"
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        for panel in board["panels"]:
            names = [target["refId"] for target in panel.get("targets", [])]
            assert len(names) == len(set(names))
            assert all(names)
            assert panel["type"] == "row" or panel["datasource"]["uid"] == "$datasource"
        cells = [panel["gridPos"] for panel in board["panels"]]
        assert all(cell["x"] + cell["w"] <= 24 for cell in cells)


def test_the_charts_rules_are_filled_in(render: Renderer) -> None:
    release = render("h200-one-node-values.yaml", {"metrics.rules.ttftSeconds": "5.0"})
    rule = release.one("PrometheusRule")
    text = json.dumps(rule["spec"])
    assert "@" not in text
    assert 'le=\\"5.0\\"' in text
    assert "above 5.0 s" in text
    assert rule["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    with_page = render("h200-two-nodes-values.yaml").one("PrometheusRule")
    assert "https://docs.example.com/antiphon/operations/runbook.md#" in json.dumps(with_page)


def test_the_runbook_has_a_page_for_every_alert() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/operations/runbook.md").read_text(), re.M)
    names = [str(rule["alert"]) for rule in alert_rules()]
    assert sorted(headings) == sorted(names)
    for rule in alert_rules():
        annotations = rule["annotations"]
        assert isinstance(annotations, dict)
        assert annotations["runbook_url"] == f"docs/operations/runbook.md#{str(rule['alert']).lower()}"
        assert annotations["summary"]
        assert annotations["cause"]


def families() -> dict[str, set[str]]:
    """Metric -> its labels, but those of every sample of its kind of process."""
    found: dict[str, set[str]] = {}
    for name, labels in exported().items():
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        found.setdefault(family, set()).update(labels - {"model_name", "le"})
    return found


def test_pages_of_operations_name_metrics_that_exist() -> None:
    for page in (ROOT / "docs/operations").glob("*.md"):
        for name in re.findall(r"`(antiphon_[a-z0-9_]+)", page.read_text()):
            if name not in ("antiphon_prefill", "antiphon_decode", "antiphon_router"):
                assert name in families(), (page.name, name)


def test_every_metric_and_label_of_a_router_is_on_its_page() -> None:
    described: dict[str, set[str]] = {}
    for names, labels in re.findall(r"^\| (`antiphon_.*?) \| (.*?)\|$", page_of("http-api.md"), re.M):
        for name in re.findall(r"`(\w+)`", names):
            described[name] = set(re.findall(r"`(\w+)`", labels))
    exports = {
        re.sub(r"_(bucket|sum|count)$", "", family)
        for family in re.findall(r"^# TYPE (\w+)", RouterMetrics("m").exposition()[0].decode(), re.M)
    }
    assert set(described) == exports
    # Every process has the last one; `engine` is only of workers.
    expected = {
        name: families()[name] - ({"engine"} if name == "antiphon_build_info" else set()) for name in exports
    }
    assert described == expected


def test_every_other_metric_and_label_is_on_its_page() -> None:
    page = page_of("operations/observability.md")
    described = dict(re.findall(r"`(antiphon_[a-z0-9_]+)(?:\{([a-z_,]+)\})?`", page))
    routers = set(re.findall(r"`(antiphon_\w+)`", page_of("http-api.md")))
    assert sorted(set(families()) - set(described) - routers) == []
    everywhere = {"engine", "role"}
    beside = {"rank", "worker", "version", "full_pages", "sliding_pages", "page_size_tokens"}  # said in words
    for name, labels in described.items():
        own = families()[name] - everywhere - beside
        assert not labels or set(labels.split(",")) - everywhere == own, name


def page_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text()
