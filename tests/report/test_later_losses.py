"""What came of an incident, renewed as the run goes on, against the trend from before; and where trackers show it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from megastable.base.text import show_duration
from megastable.report.postmortem import costs_of, incidents_of, sentences, write_incidents
from megastable.report.postmortem.evidence import expect_loss
from megastable.report.postmortem.facts import LaterLoss, find_trackers
from megastable.report.story import tell_incident
from megastable.run.directory import RunDirectory, TrackerMemory
from tests.conftest import tiny
from tests.report.runs import data_incident, make_run, note


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory(make_run(corpus, tmp_path / "run", data_incident(corpus, [(236, 248)])))


def test_report_is_renewed_when_the_journal_tells_of_a_later_step(run: RunDirectory) -> None:
    assert len(write_incidents(run.root)) == 1 and write_incidents(run.root) == []
    (before,) = incidents_of(run.root)
    assert before.later == [] and sentences.later_losses(before) == []
    for step, loss, more in ((50, 4.0, {}), (139, 3.5, {}), (150, "nan", {}), (160, 3.0, {"at_end": True})):
        note(run, 2000.0 + step, "incident_later", number=1, step=step, after=step - 39, loss=loss, **more)
        assert len(write_incidents(run.root)) == 1 and write_incidents(run.root) == []
    (found,) = incidents_of(run.root)
    near, far, last = found.later
    assert near == LaterLoss(step=50, after=11, loss=4.0, expected=4.0, scatter=0.0)
    assert (far.after, far.expected, last.at_end, last.expected) == (100, None, True, None)
    first, second, *_ = sentences.later_losses(found)
    assert first.endswith("the loss was 4.00; the trend of the steps before it leads to 4.00 ± 0.00.")
    for name in ("report.html", "postmortem.md"):
        text = (run.incidents / "0001" / name).read_text()
        assert second in text and "It was worth it" in text


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (2.0, "It was worth it: 2 steps lost, and the loss is 0.50 below the trend from before."),
        (2.55, "It was worth it: 2 steps lost, and the loss is where the trend from before leads to."),
        (2.75, "It was not, or not yet, worth it: 2 steps lost, and the loss is 0.25 above the trend from before."),
    ],
)  # fmt: skip
def test_describe_worth_takes_the_newest_look_that_can_be_compared(
    loss: float, told: str, run: RunDirectory
) -> None:
    (evidence,) = incidents_of(run.root)
    later: list[Any] = [
        LaterLoss(step=139, after=100, loss=9.0, expected=2.0, scatter=0.1),
        LaterLoss(step=539, after=500, loss=loss, expected=2.5, scatter=0.1),
        LaterLoss(step=9000, after=8961, loss=1.0, at_end=True),
    ]
    assert sentences.describe_worth(evidence.model_copy(update={"later": later})) == told


def test_expect_loss_continues_a_trend_as_far_as_its_steps_reach() -> None:
    line = {step: 4.0 - 0.001 * step for step in range(1, 501)}
    for step in (601, 1001):
        assert expect_loss(line, 501, step)["expected"] == pytest.approx(4.0 - 0.001 * step)
    assert expect_loss(line, 501, 1502) == {}  # twice as many steps ahead
    assert expect_loss(dict.fromkeys(range(480, 501), 4.0), 501, 510) == {}  # too few
    # A curve that flattens out is not continued by its steep beginning.
    curve = {step: 2 + 5 * step**-0.5 for step in range(1, 501)}
    assert 2 + 5 * 601**-0.5 - 0.03 < expect_loss(curve, 501, 601)["expected"] < curve[500]
    # Nor is the steep beginning of a run, whose newer half leads elsewhere: the quickstart's.
    start = {step: 3.8 + 4.5 * math.exp(-step / 50) + 0.1 * math.sin(7 * step) for step in range(1, 120)}
    assert expect_loss(start, 120, 220) == {}


def test_report_says_where_the_trackers_of_the_run_show_it(run: RunDirectory, tmp_path: Path) -> None:
    facts: dict[str, dict[str, Any]] = {
        "wandb": {"id": "abc", "url": "https://wandb.example/me/p/runs/abc"},
        "mlflow": {"run_id": "12ab", "store": "https://me:secret@mlflow.example:5000/", "experiment": "7"},
        "tensorboard": {"folder": "run"},
    }
    (run.root / "trackers").mkdir()
    for name, told in facts.items():
        TrackerMemory(run.root, name).keep_facts(**told)
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
    ("name", "facts", "command"),
    [
        ("wandb", {"url": "javascript:alert(1)"}, "wandb sync {run}/trackers/wandb/offline-run-*"),
        ("mlflow", {"store": "file:///runs/mlruns", "run_id": "1"}, "mlflow ui --backend-store-uri file:///runs/mlruns"),
        ("mlflow", {"store": "postgresql://me:secret@host/db", "run_id": "1", "experiment": "2"}, None),
        ("mlflow", {"store": "https://[", "run_id": "1", "experiment": "2"}, None),
    ],
)  # fmt: skip
def test_find_trackers_gives_a_command_where_there_is_no_page(
    name: str, facts: dict[str, Any], command: str | None, tmp_path: Path
) -> None:
    (tmp_path / "trackers").mkdir()
    TrackerMemory(tmp_path, name).keep_facts(**facts)
    found = [(link.url, link.command) for link in find_trackers(tmp_path)]
    assert found == ([] if command is None else [("", command.format(run=tmp_path))])


KNOWN: dict[str, Any] = {
    "loss_before": 4.0, "loss_peak": 9.0, "step": 121, "onset": 120, "verdict": "spike", "class": "recoverable",
    "cause": "data", "positions": [[190, 193]], "documents": [], "planted_documents": [], "action": "rewind",
    "outcome": "healed", "steps_lost": 2, "batches_discarded": 0, "seconds": 1.0, "failure": "",
}  # fmt: skip


def lines(corpus: Path, **change: Any) -> list[str]:
    return list(tell_incident(KNOWN | change, tiny(corpus, Path("unused"))))


def test_story_tells_the_time_lost_of_the_post_mortem(corpus: Path, spike: Path) -> None:
    """Not only the search: the steps that are done again, too."""
    (evidence,) = incidents_of(spike)
    cost = costs_of(spike)[evidence.incident.number]
    assert cost == evidence.cost and cost.seconds > evidence.incident.seconds > 0
    found = [
        line for line in tell_incident(KNOWN, tiny(corpus, Path("unused")), cost) if line.startswith("cost")
    ]
    assert found == [
        f"cost         steps lost: 2, updates refused: 0, time lost: {show_duration(cost.seconds)}"
    ]
    assert {name: value for name, value, _ in sentences.list_figures(evidence)}["time lost"] == show_duration(
        cost.seconds
    )


def test_story_of_a_crash_tells_the_failure(corpus: Path) -> None:
    failure = "rank 1 was killed by \x1b[31msignal 9 (SIGKILL)"
    crash = {"verdict": "crash", "cause": "process", "positions": [], "action": "restart", "failure": failure}
    seen, done, _ = lines(corpus, **crash, loss_before=None, loss_peak=None)
    assert seen == f"step 120     {failure}; recoverable, cause: process".replace("\x1b", "\\x1b")
    assert done.startswith("done         restarted the processes from the newest intact checkpoint, or ")
    assert done.endswith(": healed")
