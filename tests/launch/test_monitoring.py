"""What launch/monitoring/ asks for is served, and Prometheus, Alertmanager and Grafana can read it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from megastable.run.goodput.time_account import TimeKind
from megastable.run.run_history import ENDED_AS
from megastable.supervise.metrics import Metrics
from megastable.supervise.status import read_status
from megastable.warnings.trend_signals import SIGNALS
from megastable_guard.actions import Cause
from tests.launch.eventful_run import eventful_run, served
from tests.patience import PATIENCE
from tests.supervise.runs import journal

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch/monitoring"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
ALERTS: dict[str, dict[str, Any]] = {r["alert"]: r for group in RULES["groups"] for r in group["rules"]}
CASES = Path(__file__).with_name("alert_rules.yaml")
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OURS = re.compile(r"\bmegastable_\w+")


def samples(text: str) -> list[Any]:
    return [s for family in text_string_to_metric_families(text) for s in family.samples]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run serves to which everything has happened, and that still trains."""
    with eventful_run(tmp_path_factory.mktemp("runs")) as metrics:
        return served(metrics)


def test_metrics_have_all_that_alerts_and_panels_ask_for(full: str) -> None:
    known = {sample.name for sample in samples(full)}
    asked = {alert["expr"] for alert in ALERTS.values()}
    asked |= {target["expr"] for panel in PANELS for target in panel["targets"]}
    asked |= {one["expr"] for one in DASHBOARD["annotations"]["list"]}
    asked |= {one["query"] for one in DASHBOARD["templating"]["list"]}
    named = {name for text in asked for name in OURS.findall(text)}
    assert len(named) > 30 and named <= known, named - known
    values = {(s.name, *(v for k, v in s.labels.items() if k != "run")): s.value for s in samples(full)}
    assert values["megastable_skipped_samples",] == 8 and values["megastable_tokens",] == 51200
    assert values["megastable_host_left_out", "c"] == 1 and values["megastable_slow_host_cost", "b"] == 0.2
    assert (
        values["megastable_trend_warning", "entropy"] == 1
        and values["megastable_trend_warning", "logits"] == 0
    )
    assert values["megastable_validation_corpus_loss_nats", "a"] == 3.5
    assert values["megastable_task_score", "arc/acc"] == 0.25 and values["megastable_task_step",] == 40
    assert values["megastable_task_settled_step",] == 48 and values["megastable_task_interval_steps",] == 8
    assert values["megastable_task_failures_in_a_row",] == 1 and values["megastable_in_step",] == 1
    drop = (values["megastable_task_drop_ratio", "arc/acc"], values["megastable_task_drop_sigmas", "arc/acc"])
    assert drop == pytest.approx((1 / 30, 0.01 * 0.954 / 0.03))  # medians of 0.29 and 0.3, distances of 0.03
    assert values["megastable_rank_own_seconds", "b", "1", "1"] == 0.7  # rank 1 is stage 1
    assert values["megastable_step_phase_seconds", "forward"] == pytest.approx(0.2)
    assert (
        values["megastable_last_checkpoint_bytes",] == 1000
        and values["megastable_checkpoint_free_bytes",] > 0
    )


def test_metrics_have_counters_of_what_has_not_happened(tmp_path: Path) -> None:
    journal(tmp_path, {"event": "training", "step": 0, "world": 1})
    metrics = Metrics(0)
    metrics.update(read_status(tmp_path))
    found = samples(served(metrics))
    metrics.close()
    for name, label, known in (
        ("restarts", "reason", ENDED_AS),
        ("incidents_by_cause", "cause", Cause),
        ("seconds", "kind", TimeKind),
    ):
        zero = {s.labels[label] for s in found if s.name == f"megastable_{name}_total" and s.value == 0}
        assert zero == set(known)
    assert {s.labels["signal"] for s in found if s.name == "megastable_trend_warning"} == set(SIGNALS)
    for name in ("updates_refused", "steps_lost"):
        assert [s.value for s in found if s.name == f"megastable_{name}_total"] == [0]


def test_alerts_are_explained_tried_and_have_a_severity() -> None:
    page = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([A-Z]\w+)` \|", page, re.M) == list(ALERTS)
    cases = [case["alert_rule_test"] for case in cases_as_written() if "alert_rule_test" in case]
    (everything,) = (case for case in cases if len(case) > 1)
    assert [one["alertname"] for one in everything] == list(ALERTS)
    assert all(one["exp_alerts"] for one in everything)
    assert {a["labels"]["severity"] for a in ALERTS.values()} == {"critical", "warning"}
    assert all(set(a["annotations"]) == {"summary", "description"} for a in ALERTS.values())


def test_dashboard_has_what_grafana_wants() -> None:
    assert DASHBOARD["schemaVersion"] >= 36 and DASHBOARD["uid"] and "id" not in DASHBOARD
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) > 20
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    for panel in PANELS:
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(refs) == len(set(refs)), panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}" and 'run=~"$run"' in target["expr"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"} <= variables


def tool(name: str, *arguments: object, given: str = "", cwd: Path = FOLDER) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"there is no {name}: Debian packages prometheus and prometheus-alertmanager have it")
    done = subprocess.run(
        [path, *map(str, arguments)], cwd=cwd, input=given, text=True, capture_output=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_rules_configuration_and_metrics(full: str) -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in tool("promtool", "check", "rules", "alerts.yaml")
    tool("promtool", "check", "config", "prometheus.yaml")
    assert tool("promtool", "check", "metrics", given=full) == ""


def cases_as_written() -> list[dict[str, Any]]:
    return list(yaml.safe_load(CASES.read_text())["tests"])


def minutes(values: str) -> int:
    """How many values of a minute a series of promtool has."""
    words = [word.partition("x") for word in values.split()]
    return sum(int(times or 0) + (what != "_" or not times) for what, _, times in words)  # "1x2" is 1 1 1


def try_cases(folder: Path, alerts: Mapping[str, Mapping[str, Any]], cases: list[dict[str, Any]]) -> str:
    """What promtool says of alerts in these cases. Where a case says nothing of alerts, none may fire, at any time."""
    bare = [{k: v for k, v in rule.items() if k != "annotations"} for rule in alerts.values()]
    (folder / "alerts.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": bare}]}))
    for case in cases:
        if "alert_rule_test" not in case:
            end = max(minutes(series["values"]) for series in case["input_series"])
            case["alert_rule_test"] = [
                {"eval_time": f"{at}m", "alertname": name, "exp_alerts": []}
                for name in alerts for at in range(0, end + 1, 5)
            ]  # fmt: skip
    written = yaml.safe_load(CASES.read_text()) | {"tests": cases}
    (folder / "cases.yaml").write_text(yaml.safe_dump(written))
    return tool("promtool", "test", "rules", "cases.yaml", cwd=folder)


@pytest.mark.quick("1")
@pytest.mark.parametrize("number", range(len(cases_as_written())))
def test_alerts_fire_when_they_should_and_only_then(number: int, tmp_path: Path) -> None:
    assert "SUCCESS" in try_cases(tmp_path, ALERTS, [cases_as_written()[number]])


@pytest.mark.parametrize(
    ("severity", "receivers"), [("critical", "pagerduty,slack,email"), ("warning", "slack,email")]
)
def test_alerts_wake_somebody_only_if_critical(severity: str, receivers: str) -> None:
    words = ("config", "routes", "test", "--config.file=alertmanager.yaml", f"severity={severity}")
    assert receivers in tool("amtool", *words).splitlines()  # beside a warning
