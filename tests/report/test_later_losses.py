"""What came of an incident, renewed as the run goes on, against the trend from before; and where trackers show it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from megastable.report.postmortem import incidents_of, sentences, write_incidents
from megastable.report.postmortem.evidence import expect_loss
from megastable.report.postmortem.facts import LaterLoss
from megastable.report.postmortem.tracker_links import find_trackers
from megastable.run.directory import RunDirectory
from megastable.run.tracker_memory import TrackerMemory
from tests.report.runs import data_incident, make_run, note, tell


def test_a_report_is_renewed_when_the_journal_tells_of_a_later_step(corpus: Path, tmp_path: Path) -> None:
    run = RunDirectory(make_run(corpus, tmp_path / "run"))
    tell(run, data_incident(corpus, [(236, 248)]))
    assert [folder.name for folder in write_incidents(run.root)] == ["0001"]
    assert write_incidents(run.root) == []
    (before,) = incidents_of(run.root)
    assert before.later == [] and sentences.later_losses(before) == []
    for step, loss, more in ((50, 4.0, {}), (139, 3.5, {}), (150, "nan", {}), (160, 3.0, {"at_end": True})):
        note(run, 2000.0 + step, "incident_later", number=1, step=step, after=step - 39, loss=loss, **more)
        assert len(write_incidents(run.root)) == 1 and write_incidents(run.root) == []
    (found,) = incidents_of(run.root)
    near, far, last = found.later
    assert near == LaterLoss(step=50, after=11, loss=4.0, expected=4.0, scatter=0.0)
    assert (far.after, far.expected, last.at_end, last.expected) == (100, None, True, None)
    told = [
        "11 steps after it was over, at step 50, the loss was 4.00; the trend of the steps before it leads to "
        "4.00 ± 0.00.",
        "100 steps after it was over, at step 139, the loss was 3.50.",
        "At the end, 121 steps after it was over, at step 160, the loss was 3.00.",
        "It was worth it: 2 steps lost, and the loss is where the trend from before leads to.",
    ]
    assert sentences.later_losses(found) == told
    for name in ("report.html", "postmortem.md"):
        text = (run.incidents / "0001" / name).read_text()
        assert "100 steps after it was over, at step 139" in text and "It was worth it" in text


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (2.0, "It was worth it: 2 steps lost, and the loss is 0.50 below the trend from before."),
        (2.55, "It was worth it: 2 steps lost, and the loss is where the trend from before leads to."),
        (
            2.75,
            "It was not, or not yet, worth it: 2 steps lost, and the loss is 0.25 above the trend from before.",
        ),
    ],
)
def test_the_newest_look_that_can_be_compared_says_whether_it_was_worth_it(
    loss: float, told: str, corpus: Path, tmp_path: Path
) -> None:
    run = RunDirectory(make_run(corpus, tmp_path / "run"))
    tell(run, data_incident(corpus, [(236, 248)]))
    (evidence,) = incidents_of(run.root)
    later: list[Any] = [
        LaterLoss(step=139, after=100, loss=9.0, expected=2.0, scatter=0.1),
        LaterLoss(step=539, after=500, loss=loss, expected=2.5, scatter=0.1),
        LaterLoss(step=9000, after=8961, loss=1.0, at_end=True),
    ]
    assert sentences.describe_worth(evidence.model_copy(update={"later": later})) == told


def test_a_trend_is_continued_as_far_as_its_steps_reach() -> None:
    line = {step: 4.0 - 0.001 * step for step in range(1, 501)}
    for step in (601, 1001):
        assert expect_loss(line, 501, step)["expected"] == pytest.approx(4.0 - 0.001 * step)
    assert expect_loss(line, 501, 1502) == {}  # twice as many steps ahead
    assert expect_loss(dict.fromkeys(range(480, 501), 4.0), 501, 510) == {}  # too few
    # A curve that flattens out is not continued by its steep beginning.
    curve = {step: 2 + 5 * step**-0.5 for step in range(1, 501)}
    there = expect_loss(curve, 501, 601)["expected"]
    assert 2 + 5 * 601**-0.5 - 0.03 < there < curve[500]
    # Nor is the steep beginning of a run, whose newer half leads elsewhere: the quickstart's.
    start = {step: 3.8 + 4.5 * math.exp(-step / 50) + 0.1 * math.sin(7 * step) for step in range(1, 120)}
    assert expect_loss(start, 120, 220) == {}
    falls = {step: math.log(step) for step in range(1, 501)}
    assert (
        expect_loss(falls, 501, 601)["expected"] <= falls[500]
    )  # a loss that rises is not expected to go on


def test_a_report_says_where_the_trackers_of_the_run_show_it(corpus: Path, tmp_path: Path) -> None:
    run = RunDirectory(make_run(corpus, tmp_path / "run"))
    tell(run, data_incident(corpus, [(236, 248)]))
    assert len(write_incidents(run.root)) == 1
    facts: dict[str, dict[str, Any]] = {
        "wandb": {"id": "abc", "url": "https://wandb.example/me/p/runs/abc"},
        "mlflow": {"run_id": "12ab", "store": "https://me:secret@mlflow.example:5000/", "experiment": "7"},
        "tensorboard": {"folder": "run"},
    }
    (run.root / "trackers").mkdir()
    for name, told in facts.items():
        TrackerMemory(run.root, name).keep(**told)
    assert len(write_incidents(run.root)) == 1 and write_incidents(run.root) == []
    page, text = ((run.incidents / "0001" / name).read_text() for name in ("report.html", "postmortem.md"))
    for url in (
        "https://wandb.example/me/p/runs/abc",
        "https://mlflow.example:5000/#/experiments/7/runs/12ab",
    ):
        assert f'href="{url}"' in page and url in text
    assert f"tensorboard --logdir {run.root}/tensorboard" in page and "secret" not in page + text
    # A copy of the run has none: its trackers' runs are those of the original.
    shutil.copytree(run.root, tmp_path / "copy")
    assert find_trackers(tmp_path / "copy") == []


@pytest.mark.parametrize(
    ("name", "facts", "url", "command"),
    [
        ("wandb", {"id": "abc", "url": None}, "", "wandb sync {run}/trackers/wandb/offline-run-*"),
        ("wandb", {"url": "javascript:alert(1)"}, "", "wandb sync {run}/trackers/wandb/offline-run-*"),
        ("mlflow", {"store": "file:///runs/mlruns", "run_id": "1"}, "", "mlflow ui --backend-store-uri file:///runs/mlruns"),
        ("mlflow", {"store": "postgresql://me:secret@host/db", "run_id": "1", "experiment": "2"}, None, None),
        ("mlflow", {"store": "https://[", "run_id": "1", "experiment": "2"}, None, None),
    ],
)  # fmt: skip
def test_where_a_tracker_has_no_page_a_command_shows_the_run(
    name: str, facts: dict[str, Any], url: str | None, command: str | None, tmp_path: Path
) -> None:
    (tmp_path / "trackers").mkdir()
    TrackerMemory(tmp_path, name).keep(**facts)
    found = [(link.url, link.command) for link in find_trackers(tmp_path)]
    assert found == ([] if command is None else [(url, command.format(run=tmp_path))])
