"""The command line as its users meet it: every command, its files, its errors."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megastable_tools.commands.inspect import app
from tests.report.runs import data_incident, make_run
from tests.tools.cli import Done, call

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "COLUMNS": "200",
    "TERM": "dumb",
    "DS_ACCELERATOR": "cpu",
}
COMMANDS = ("step", "incident", "document", "run", "scan", "score", "ahead")


def inspect(*arguments: object, cwd: Path | None = None) -> Done:
    return call(app, *arguments, cwd=cwd or ROOT)


def result(*arguments: object, cwd: Path | None = None) -> dict[str, Any]:
    """What it says to machines, and that it says nothing else."""
    done = inspect(*arguments, "--json", cwd=cwd)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inspect") / "run"
    return make_run(corpus, root, data_incident(corpus, [(233, 236)]))


@pytest.mark.slow
def test_a_step_for_people_machines_spreadsheets_and_browsers(run: Path, tmp_path: Path) -> None:
    """The first of them by a process of its own."""
    command = [sys.executable, "-m", "megastable", "inspect", "step", str(run), "30-31", "--json"]
    alone = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert (alone.returncode, alone.stderr) == (0, ""), alone.stderr
    assert {row["step"] for row in json.loads(alone.stdout)["rows"]} == {30, 31}
    done = inspect("step", run, "30", "--csv", tmp_path / "x.csv", "--html", tmp_path / "x.html", "--rows", 3)
    assert done.returncode == 0 and "refused" in done.stdout and "written: " in done.stdout
    rows = list(csv.DictReader(io.StringIO((tmp_path / "x.csv").read_text())))
    assert next(int(r["position"]) for r in rows if r["state"] == "trained") == 232
    assert (
        "<script>" not in (tmp_path / "x.csv").read_text() and "</html>" in (tmp_path / "x.html").read_text()
    )


def test_an_incident_a_document_and_what_was_read(run: Path, corpus: Path) -> None:
    told = result("incident", run, 1)
    assert next(row["position"] for row in told["rows"] if row["bad"]) in (233, 234, 235)
    first = told["rows"][0]
    about = result("document", corpus / f"{first['shard']}.idx", first["document"], "--run", run)
    assert first["position"] in {row.get("position") for row in about["rows"]}
    assert result("run", run)["rows"][0]["corpus"] == corpus.name


def test_a_scan_and_what_is_to_come(run: Path, corpus: Path, tmp_path: Path) -> None:
    told = result("scan", corpus, "--workers", 1, cwd=tmp_path)
    assert (tmp_path / "scans" / corpus.name / "scan.json").is_file() and told["rows"]
    done = inspect("scan", corpus, "--workers", 1, "--rows", 2, cwd=tmp_path)
    assert done.returncode == 0 and "score" in done.stdout
    assert result("ahead", run, "--steps", 5)["rows"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("step {run} 999", "step 999 was not recorded"),
        ("step {run} 3-1", "'3-1' is not a step or a range of steps"),
        ("step nowhere 1", "nowhere is not the directory of a run"),
        ("incident {run} 9", "there is no incident 9; those of this run: 1"),
        ("document {corpus}/part-9 0", "part-9"),
        ("document {corpus}/part-0 99999999", "has the documents 0 to"),
        ("scan {run}", "holds neither manifest.json nor any .idx file"),
        ("score {corpus} --checkpoint {run}", "checkpoint"),
        ("ahead {corpus}", "is not the directory of a run"),
        ("run {run} --csv /nowhere/x.csv", "/nowhere/x.csv could not be written"),
    ],
)
def test_mistakes(arguments: str, message: str, run: Path, corpus: Path, tmp_path: Path) -> None:
    done = inspect(*arguments.format(run=run, corpus=corpus).split(), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert message in done.stderr.replace("\n", " ")
