"""Prometheus itself scrapes a run, with the configuration and the rules of launch/monitoring/, and answers all that the
dashboard asks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from megastable.cluster.launcher import free_port
from tests.launch.eventful_run import eventful_run, served
from tests.patience import PATIENCE, until

FOLDER = Path(__file__).resolve().parents[2] / "launch/monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
HOURS = 3.0  # of history: some of what is asked looks back for an hour
Ask = Callable[[str, dict[str, str]], Any]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Asks Prometheus: a path of its API and parameters to what it says."""
    programs = [shutil.which(name) for name in ("prometheus", "promtool")]
    if None in programs:
        pytest.skip("there is no prometheus: the Debian package prometheus has it")
    prometheus, promtool = map(str, programs)
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(path: str, parameters: dict[str, str]) -> Any:
        address = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with direct.open(address, timeout=PATIENCE) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            error.add_note(f"{parameters}: {error.read().decode()}")
            raise

    with eventful_run(folder) as metrics:
        target = f"127.0.0.1:{metrics.port}"
        (folder / "past.txt").write_text(history(served(metrics), target, time.time()))
        blocks = [promtool, "tsdb", "create-blocks-from", "openmetrics", "past.txt", "data"]
        subprocess.run(blocks, cwd=folder, check=True, capture_output=True, timeout=PATIENCE)
        config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        for name in config["rule_files"]:  # at once, whatever interval a group has
            rules = re.sub(r"^    interval: .*\n", "", (FOLDER / name).read_text(), flags=re.M)
            (folder / name).write_text(rules)
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
        del config["alerting"]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        tether = [
            sys.executable,
            "-m",
            "megastable_tools.downstream.tether",
            str(os.getpid()),
        ]  # ends with this process
        words = [*tether, prometheus, "--config.file=prometheus.yaml", "--storage.tsdb.path=data"]
        with (folder / "log").open("wb") as log:
            running = subprocess.Popen(
                [*words, f"--web.listen-address=127.0.0.1:{port}"], cwd=folder, stdout=log, stderr=log
            )
        try:

            def scraped() -> bool:
                assert running.poll() is None, (folder / "log").read_text()
                try:
                    found = ask("query", {"query": "up"})["result"]
                except OSError:
                    return False  # not yet listening, or ready
                return bool(found) and found[0]["value"][1] == "1"

            until(scraped)
            yield ask
        finally:
            running.kill()
            running.wait()


def history(text: str, target: str, now: float) -> str:
    """The same samples for the last hours, a minute apart, up to a minute ago; counters rise to what they are."""
    lines = list[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {**sample.labels, "job": "megastable", "instance": target}
            told = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
            for minute in range(int(HOURS * 60), 0, -1):
                value = sample.value * (1 - minute / 1000) if family.type == "counter" else sample.value
                lines.append(f"{sample.name}{{{told}}} {value!r} {now - 60 * minute:.0f}")
    return "\n".join([*lines, "# EOF\n"])


def filled(text: str) -> str:
    """With Grafana's variables as they are when all is shown."""
    return re.sub(r"\$(run|task|host)\b", ".*", text.replace("$__rate_interval", "4m"))


def lacks(ask: Ask, expression: str, legend: str) -> str:
    """What an expression and the legend of its results lack; "" if nothing."""
    found = ask("query", {"query": filled(expression)})["result"]
    names = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
    missing = {name for one in found for name in names - one["metric"].keys()}
    return "results" if not found else ", ".join(sorted(missing))


@pytest.mark.slow
def test_prometheus_answers_every_panel(ask: Ask) -> None:
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    lacking = {t["expr"]: lacks(ask, t["expr"], t["legendFormat"]) for t in targets}
    assert len(lacking) > 70 and not {expression: what for expression, what in lacking.items() if what}


@pytest.mark.slow
def test_what_is_misspelt_is_noticed(ask: Ask) -> None:
    assert lacks(ask, 'megastable_gpu_temprature_celsius{run=~"$run"}', "") == "results"
    assert lacks(ask, 'sum by (run) (megastable_gpu_power_watts{run=~"$run"})', "{{run}} {{host}}") == "host"


@pytest.mark.slow
def test_prometheus_answers_annotations_and_variables(ask: Ask) -> None:
    for one in DASHBOARD["annotations"]["list"]:
        assert not lacks(ask, one["expr"], one["titleFormat"])
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]).groups()  # type: ignore[union-attr]
            assert ask(f"label/{label}/values", {"match[]": filled(metric)}), one["query"]


def test_queries_of_many_hosts_stay_cheap_and_readable() -> None:
    """What names the ten most of many is asked for one moment: over a range of time others would be among them again
    and again, and the legend endless."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            few = re.search(r"\b(top|bottom)k\b", target["expr"]) is not None
            of_many = "rank" in target["legendFormat"] or "gpu}}" in target["legendFormat"]
            assert few == (panel["type"] == "bargauge") == bool(target.get("instant")), panel["title"]
            assert few or not of_many, panel["title"]
            # Thousands of GPUs at every point in time: fewer points do.
            assert few or "$host" not in target["expr"] or panel["maxDataPoints"] <= 200, panel["title"]


@pytest.mark.slow
def test_every_rule_can_be_evaluated(ask: Ask) -> None:
    """On what is really served: matching of vectors may fail only there."""

    def rules() -> list[dict[str, Any]]:
        found = [rule for group in ask("rules", {})["groups"] for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else []

    found = until(rules)
    assert {rule["name"]: rule.get("lastError", "") for rule in found if rule["health"] != "ok"} == {}
    shown = {alert["labels"]["alertname"] for alert in ask("alerts", {})["alerts"]}  # firing, or to fire
    assert {"GpuErrors", "GpuThrottled", "HostLeftOut", "HostSlow"} <= shown
