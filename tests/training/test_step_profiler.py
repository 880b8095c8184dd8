"""A profile of a few steps: what is traced, once, and that nothing of it can end a run."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megastable.base import activity
from megastable.config.tree import LoggingConfig, ProfileConfig
from megastable.report.trace_summary import read_trace
from megastable.run import records
from megastable.run.directory import RunDirectory
from megastable.run.step_phases import COLUMNS
from megastable.training import step_profiler
from megastable.training.step_profiler import (
    profile_steps,
)
from tests.conftest import tiny
from tests.distributed import run_ranks, train


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    activity.listener = None
    activity.timed.clear()
    activity.spent.clear()


def step(done: int) -> None:
    """A step after so many, as the training loop does it."""
    activity.enter_activity("step")
    activity.begin_step(done)
    activity.enter_activity(activity.FORWARD)
    x = torch.randn(32, 32)
    for name in (activity.BACKWARD, activity.GATE, activity.OPTIMIZER):
        activity.enter_activity(name)
        x = x @ x
    activity.end_step(0.001)


def run_steps(folder: Path, *done: int, rank: int = 0, said: list[str] | None = None, **profile: Any) -> None:
    config = LoggingConfig(profile=ProfileConfig(**{"start": 3, "steps": 2} | profile))
    with profile_steps(config, RunDirectory(folder), rank, (said if said is not None else []).append):
        for number in done:
            step(number)


def test_the_steps_that_are_wanted_are_traced_with_their_phases(tmp_path: Path) -> None:
    said: list[str] = []
    run_steps(tmp_path, *range(6), said=said)
    (file,) = (tmp_path / "profiles").iterdir()
    assert file.name == "step-00000003-rank-0.json.gz" and str(file) in said[0] and "steps 3 to 4" in said[0]
    found = read_trace(file)
    assert (found.steps, found.rank, found.device) == ([3, 4], 0, "cpu")
    assert {"forward", "backward", "gate", "optimizer"} <= set(found.phases)
    products = next(one for one in found.operators if one.name == "aten::mm")
    assert products.count >= 6 and 0 <= found.idle < 1
    with gzip.open(file) as content:
        names = [e["name"] for e in json.load(content)["traceEvents"] if "megastable" in e.get("name", "")]
    assert names.count("megastable: step 3") == names.count("megastable: step 4") == 1


def test_what_a_killed_process_had_begun_to_write_is_removed(tmp_path: Path) -> None:
    """Also if nothing is traced again; not that of another rank, which may be at work."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    for rank in (0, 1):
        (folder / f".step-00000100-rank-{rank}.json").write_text("half")
        (folder / f".step-00000100-rank-{rank}.json.gz").write_text("half")
    run_steps(tmp_path, 10)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".step-00000100-rank-1.json", ".step-00000100-rank-1.json.gz",
    ]  # fmt: skip


@pytest.mark.parametrize("broken", ["folder", "start", "stop", "write"])
def test_a_profile_that_fails_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no profiler here")

    if broken == "folder":
        (tmp_path / "profiles").write_text("a file where the folder should be")
    elif broken == "write":
        monkeypatch.setattr(step_profiler.gzip, "open", fail)
    else:
        monkeypatch.setattr(step_profiler.profile, broken, fail)
    run_steps(tmp_path, *range(6))
    assert sum("profile" in line.message for line in caplog.records) == 1
    assert len(activity.timed) == 6  # every step was done
    monkeypatch.undo()
    if broken != "folder":
        assert not list((tmp_path / "profiles").iterdir())
        run_steps(tmp_path, *range(6))  # and the profiler is free for the next one
        assert len(list((tmp_path / "profiles").iterdir())) == 1


@pytest.mark.slow
def test_a_profiled_run_is_the_same_run_and_its_records_have_phases(corpus: Path, tmp_path: Path) -> None:
    tables = []
    for name, profile in (("plain", None), ("profiled", {"start": 3, "ranks": (0, 1)})):
        config = tiny(
            corpus, tmp_path / name, train={"steps": 6}, checkpoint={"interval": 0, "at_end": False},
            logging={"profile": profile},
        )  # fmt: skip
        assert run_ranks(2, train, config) == [0, 0]
        tables.append(records.read_newest_records(tmp_path / name / "steps").to_pydict())
    plain, traced = tables
    assert plain["step"] == [*range(1, 7)]
    for column in ("loss", "grad_norm", "worst_losses", "parameter_norm"):
        assert plain[column] == traced[column], column
    for row in (dict(zip(plain, values)) for values in zip(*plain.values())):
        times = {phase: row[column] for phase, column in COLUMNS.items()}
        assert all(times[phase] > 0 for phase in ("forward", "backward", "reduce", "gate", "optimizer")), (
            times
        )
        assert times["exchange"] == 0 and sum(times.values()) == pytest.approx(row["seconds"], rel=1e-3)
    for rank in (0, 1):
        found = read_trace(tmp_path / f"profiled/profiles/step-00000003-rank-{rank}.json.gz")
        assert found.steps == [3, 4, 5] and found.communication > 0 and found.rank == rank


class Event:
    """torch.cuda.Event: its time is when the stream got there, and known when `stream` is done with it."""

    stream: SimpleNamespace

    def record(self) -> None:
        self.stream.now += 0.5
        self.at = self.stream.now

    def query(self) -> bool:
        return bool(self.at <= self.stream.done)

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


def test_on_a_gpu_the_phases_are_added_when_its_events_have_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megastable.engine.measured import DeviceClock
    from megastable.training.recorder import Observer
    from tests.run.test_records import record

    stream = Event.stream = SimpleNamespace(now=0.0, done=0.0)
    monkeypatch.setattr(activity, "clock", DeviceClock(Event))
    observer = Observer.__new__(Observer)
    observer.steps = records.Recorder(tmp_path, 50)
    for done in (0, 1, 2, 1, 2):  # after the third step it goes back, and does two again
        stream.done = stream.now  # when a step ends, the GPU is done with the one before it
        step(done)
        missing = dict.fromkeys(COLUMNS.values())
        observer.steps.add_records(
            observer._with_phases(record(done + 1, **missing | {"seconds": 5.0, "data_seconds": 1.0}))
        )
    rows = observer.steps.pending
    assert [row.step for row in rows] == [1, 2, 3, 2, 3]
    assert all(row.forward_seconds == row.gate_seconds == 0.5 for row in rows[:-1])  # type: ignore[union-attr]
    assert rows[0].other_seconds == pytest.approx(5 - 1 - 4 * 0.5)  # type: ignore[union-attr]
    assert rows[-1].forward_seconds is None  # type: ignore[union-attr]
