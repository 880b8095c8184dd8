"""The table of a run's steps: in order, each once, with what was undone, whatever became of the files meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base import durable
from megastable.base.durable import folder_stamp
from megastable.report.run_page.step_table import SOMETIMES, RecordReader, StepTable
from megastable.run import records
from megastable.run.records import Recorder
from tests.report.run_page.made_runs import curve, made_run
from tests.report.run_page.run_files import BEGIN, record


def read(folder: Path) -> RecordReader:
    reader = RecordReader(folder)
    reader.look_again()
    return reader


def columns(reader: RecordReader) -> dict[str, list[float]]:
    with reader.hold_table() as table:
        found = {name: table.steps[name].tolist() for name in ("step", "time", "loss", "applied", "undone")}
        return found | {"row": table.looks["row"].tolist()}


def told(step: int, time: float, **change: float) -> dict[str, object]:
    """What progress.json says after a step."""
    known = {"measured_step": step, "measured_cursor": 8 * step, "stepped": BEGIN + time, "loss": 3.0}
    return {
        **known,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "applied": True,
        "seconds": 2.0,
        "tokens_per_second": 9.0,
        **change,
    }


def undone(found: dict[str, list[float]]) -> list[float]:
    return [step for step, gone in zip(found["step"], found["undone"], strict=True) if gone]


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(0, 40))
def test_find_undone_marks_what_a_later_step_does_again(steps: list[int], recorded: int) -> None:
    """Of recorded steps and of those that were only seen; and of what is read once more."""
    table, given = StepTable(), {"step": np.array(steps, np.int64)}
    nothing = {name: np.full(len(steps), np.nan) for name in SOMETIMES}
    for row in (0, 0, recorded // 2):
        table.put_recorded(
            min(row, len(steps)), {name: some[row:recorded] for name, some in (given | nothing).items()}
        )
        table.steps.append_rows({"step": given["step"][recorded:]})
        table.find_undone()
        wanted = [any(s <= step for s in steps[n + 1 :]) for n, step in enumerate(steps)]
        assert table.steps["undone"].tolist() == wanted and table.recorded == min(recorded, len(steps))


def test_reader_has_the_newest_records_live(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    reader = read(run.steps)
    found, newest = columns(reader), records.read_newest_records(run.steps)
    live = [not undone for undone in found["undone"]]
    assert np.array(found["step"])[live].tolist() == newest.column("step").to_pylist() == list(range(1, 151))
    assert np.array(found["time"])[live].tolist() == newest.column("time").to_pylist()
    assert sum(not applied for applied in found["applied"]) == 4
    assert sum(found["undone"]) == 2 * 4  # two refused, and two before them, of each incident
    with reader.hold_table() as table:
        steps = table.steps["step"][table.looks["row"]]
        assert set(steps.tolist()) == set(range(10, 151, 10))
        assert table.looks["parameter_norm"].tolist() == pytest.approx((50 + steps / 100).tolist())


def test_reader_has_the_table_of_a_new_reader_after_a_rewind_and_a_compaction(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 10)
    reader = RecordReader(tmp_path)
    assert not reader.look_again()
    for first in (1, 95, 290, 301):  # rewound to step 94, and to 289
        for step in range(first, first + 200):
            recorder.add_records(record(step, BEGIN + 500 * first + step, curve(step)))
        assert reader.look_again() and columns(reader) == columns(read(tmp_path))
        recorder.compact_records()
        reader.look_again()
        assert columns(reader) == columns(read(tmp_path)) and len(list(tmp_path.iterdir())) == 1
    assert not reader.look_again() or not undone(columns(reader))[200:]
    assert len(columns(reader)["step"]) == 800 and undone(columns(reader))[:106] == list(range(95, 201))


def test_reader_sees_steps_before_they_are_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 11):
        recorder.add_records(record(step, BEGIN + step, curve(step)))
    reader = read(tmp_path)
    assert reader.see_progress(told(11, 11, loss=3.25)) and not reader.see_progress(told(11, 11, loss=3.25))
    assert reader.see_progress(told(12, 12))
    assert columns(reader)["loss"][-2:] == [3.25, 3.0]
    assert reader.see_progress(told(9, 14, loss=3.5))  # after a rewind to step 8
    assert undone(columns(reader)) == [9, 10, 11, 12]
    for step in (11, 12, *range(9, 17)):
        recorder.add_records(record(step, BEGIN + 20 + step, curve(step)))
    reader.look_again()
    assert columns(reader)["step"] == [*range(1, 13), *range(9, 17)]  # each once
    assert not reader.see_progress(told(16, 36))  # an old one
    assert not reader.see_progress({"measured_step": "x", "loss": None}) and not reader.see_progress({})


def test_reader_undoes_nothing_where_a_clock_is_set_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 31):
        recorder.add_records(record(step, BEGIN + step, curve(step)))
    reader = read(tmp_path)
    recorder = Recorder(tmp_path, 10)  # of the next process, whose host's clock is an hour behind
    for step in range(31, 61):
        recorder.add_records(record(step, BEGIN + step - 3600, curve(step)))
    reader.look_again()
    for found in (columns(reader), columns(read(tmp_path))):
        assert found["step"] == list(range(1, 61)) and not any(found["undone"])


def test_reader_reads_a_file_that_comes_within_a_tick_of_the_file_systems_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "RECENT", 1e9)  # also on a machine that is slow
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 11):
        recorder.add_records(record(step, BEGIN + step, curve(step)))
    reader, tick = read(tmp_path), tmp_path.stat()
    for step in range(11, 21):
        recorder.add_records(record(step, BEGIN + step, curve(step)))
    os.utime(tmp_path, ns=(tick.st_atime_ns, tick.st_mtime_ns))
    reader.look_again()
    assert columns(reader)["step"] == list(range(1, 21))


def test_folder_stamp_is_none_where_the_clock_of_the_file_server_is_ahead(tmp_path: Path) -> None:
    for seconds, known in ((-3600, True), (3600, False)):
        moment = time.time_ns() + seconds * 10**9
        os.utime(tmp_path, ns=(moment, moment))
        assert folder_stamp(tmp_path) == (moment if known else None)
