"""Step records are read once each, in order, and what was undone is known; the cache holds the same."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base import folder_stamp
from megastable.report.run_page import record_reader
from megastable.report.run_page.record_cache import RecordCache
from megastable.report.run_page.record_reader import RecordReader, SharedStepTimes
from megastable.report.run_page.step_table import StepTable, mark_undone
from megastable.run import records
from megastable.run.goodput.step_times import StepFiles
from megastable.run.records import Recorder
from tests.report.run_page.made_runs import curve, made_run
from tests.report.run_page.run_files import BEGIN, record


def read(folder: Path, cache: RecordCache | None = None) -> RecordReader:
    reader = RecordReader(folder, cache)
    reader.look()
    while reader.loaded < 1:
        reader.look()
    return reader


def columns(reader: RecordReader) -> dict[str, list[float]]:
    with reader.table() as table:
        return {name: table.steps[name].tolist() for name in ("step", "time", "loss", "applied", "undone")}


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, 6))
def test_undone_is_what_a_later_step_does_again(steps: list[int], files: int) -> None:
    step, undone = np.array(steps, np.int64), np.zeros(len(steps), bool)
    for part in np.array_split(np.arange(len(steps)), files):
        if len(part):
            mark_undone(step[: part[-1] + 1], undone[: part[-1] + 1], int(part[0]))
    assert undone.tolist() == [any(s <= step for s in steps[n + 1 :]) for n, step in enumerate(steps)]


def test_what_is_live_is_what_the_newest_records_are(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    reader = read(run.steps)
    found, newest = columns(reader), records.read(run.steps)
    live = [not undone for undone in found["undone"]]
    assert np.array(found["step"])[live].tolist() == newest.column("step").to_pylist() == list(range(1, 151))
    assert np.array(found["time"])[live].tolist() == newest.column("time").to_pylist()
    assert sum(not applied for applied in found["applied"]) == 4
    assert sum(found["undone"]) == 2 * 4  # two refused, and two before them, of each incident
    with reader.table() as table:
        steps = table.steps["step"][table.looks["row"]]
        assert set(steps.tolist()) == set(range(10, 151, 10))
        assert table.looks["parameter_norm"].tolist() == pytest.approx((50 + steps / 100).tolist())


def test_only_new_files_are_read_and_a_rewind_undoes_what_was_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 31):
        recorder.add(record(step, BEGIN + step, curve(step)))
    reader = read(tmp_path)
    opened = list[str]()
    inner = reader._file
    reader._file = lambda name: (opened.append(name), inner(name))[1]  # type: ignore[method-assign]
    assert not reader.look()
    for step in range(25, 35):  # rewound to step 24
        recorder.add(record(step, BEGIN + 20 + step, curve(step)))
    assert reader.look() and len(opened) == 1
    found = columns(reader)
    undone = [int(step) for step, gone in zip(found["step"], found["undone"], strict=True) if gone]
    assert undone == list(range(25, 31)) and len(found["step"]) == 40


def test_steps_are_seen_before_they_are_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 11):
        recorder.add(record(step, BEGIN + step, curve(step)))
    reader = read(tmp_path)
    told = {
        "cursor": 96,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "applied": True,
        "seconds": 2.0,
        "tokens_per_second": 9.0,
    }
    assert reader.see({**told, "step": 11, "loss": 3.25, "time": BEGIN + 11})
    assert not reader.see({**told, "step": 11, "loss": 3.25, "time": BEGIN + 11.5})  # the same step
    assert reader.see({**told, "step": 12, "loss": 3.0, "time": BEGIN + 12})
    assert columns(reader)["loss"][-2:] == [3.25, 3.0]
    # Back at step 8, still with the numbers of step 12; then step 9 anew.
    assert not reader.see({**told, "step": 8, "loss": 3.0, "time": BEGIN + 13})
    assert reader.see({**told, "step": 9, "loss": 3.5, "time": BEGIN + 14})
    found = columns(reader)
    assert [s for s, gone in zip(found["step"], found["undone"], strict=True) if gone] == [9, 10, 11, 12]
    for step in (11, 12, *range(9, 17)):
        recorder.add(record(step, BEGIN + 20 + step, curve(step)))
    reader.look()
    found = columns(reader)
    assert found["step"] == [*range(1, 13), *range(9, 17)]  # each once
    assert not reader.see({**told, "step": 16, "loss": curve(16), "time": BEGIN + 36})  # an old one
    assert not reader.see({"step": "x", "loss": None}) and not reader.see({})


def test_a_damaged_file_is_named_and_read_when_it_is_whole(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 41):
        recorder.add(record(step, BEGIN + step, curve(step)))
    names = sorted(path.name for path in tmp_path.iterdir())
    whole = (tmp_path / names[1]).read_bytes()
    (tmp_path / names[1]).write_bytes(whole[:200])
    reader = read(tmp_path)
    assert list(reader.damaged) == [names[1]] and len(columns(reader)["step"]) == 30
    (tmp_path / names[1]).write_bytes(whole)
    recorder.add(record(41, BEGIN + 41, 3.0))
    recorder.flush()
    reader.look()
    while reader.loaded < 1:
        reader.look()
    assert not reader.damaged and columns(reader)["step"] == list(range(1, 42))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this size a run counts as long."""
    for name, value in {"MANY": 10, "KEEP_AFTER": 10, "BATCH": 7, "SAMPLE": 5}.items():
        monkeypatch.setattr(record_reader, name, value)


def long(folder: Path, first: int, last: int) -> None:
    recorder = Recorder(folder, 2)
    for step in range(first, last + 1):
        recorder.add(record(step, BEGIN + step, curve(step)))


@pytest.mark.usefixtures("few")
def test_a_long_run_begins_with_a_sample(tmp_path: Path) -> None:
    long(tmp_path, 1, 100)
    reader = RecordReader(tmp_path)
    assert reader.loaded == 0 and reader.look() and reader.loaded == 0
    sample = columns(reader)["step"]
    assert sample[:2] == [1, 2] and sample[-2:] == [99, 100] and len(sample) == 10
    while reader.loaded < 1:
        reader.look()
    assert columns(reader)["step"] == list(range(1, 101))


@pytest.mark.usefixtures("few")
def test_the_cache_gives_the_same_and_only_new_files_are_read(tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    steps.mkdir()
    long(steps, 1, 60)
    cache = RecordCache(tmp_path, tmp_path / "cache")
    before = columns(read(steps, cache))
    assert oct(cache.path.stat().st_mode)[-3:] == "600"
    long(steps, 55, 64)
    reader = RecordReader(steps, cache)
    reader.look()
    assert columns(reader) == before and reader.loaded < 1  # from the cache
    while reader.loaded < 1:
        reader.look()
    assert columns(reader) == columns(read(steps))


@pytest.mark.quick("head")
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "head", "other files"])
def test_a_cache_that_does_not_fit_is_as_none(tmp_path: Path, harm: str) -> None:
    steps = tmp_path / "steps"
    steps.mkdir()
    long(steps, 1, 60)
    cache = RecordCache(tmp_path, tmp_path / "cache")
    wanted = columns(read(steps, cache))
    content = bytearray(cache.path.read_bytes())
    if harm == "other files":
        min(steps.iterdir()).unlink()
        wanted = {name: values[2:] for name, values in wanted.items()}
    elif harm == "head":
        head, _, rest = bytes(content).partition(b"\n")
        content = bytearray(json.dumps(json.loads(head) | {"steps": 1 << 40}).encode() + b"\n" + rest)
    elif harm == "flip":
        content[len(content) // 2] ^= 1
    else:
        content = content[: 0 if harm == "empty" else -9]
    cache.path.write_bytes(content)
    assert columns(read(steps, cache)) == wanted


def test_the_account_of_time_sees_what_it_would_read_itself(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    files = StepFiles(run.steps)
    files.look()
    shared = SharedStepTimes(read(run.steps))
    assert not shared.behind
    for mine, theirs in zip(shared.all(), files.all(), strict=True):
        assert mine.tolist() == theirs.tolist()


def test_the_account_of_time_keeps_no_room_that_was_left(tmp_path: Path) -> None:
    reader = read(made_run(tmp_path / "run", last=60, incidents=()).steps)
    shared = SharedStepTimes(reader)
    before = shared.all()
    with reader.table() as table:
        table.see(
            {"step": np.arange(61, 5000), "time": BEGIN + 1000 + np.arange(4939.0)}
        )  # more than there is room for
        assert not np.shares_memory(before.step, now := table.steps["step"])
    after = shared.all()
    assert np.shares_memory(after.step, now) and np.array_equal(after.step, before.step)


def test_an_empty_table() -> None:
    table = StepTable()
    assert table.end == 0.0 and len(table.steps) == 0


def test_a_clock_that_is_set_back_undoes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 31):
        recorder.add(record(step, BEGIN + step, curve(step)))
    reader = read(tmp_path)
    recorder = Recorder(tmp_path, 10)  # of the next process, whose host's clock is an hour behind
    for step in range(31, 61):
        recorder.add(record(step, BEGIN + step - 3600, curve(step)))
    reader.look()
    for found in (columns(reader), columns(read(tmp_path))):
        assert found["step"] == list(range(1, 61)) and not any(found["undone"])


def test_another_run_in_a_directory_of_the_same_name(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 61):
        recorder.add(record(step, BEGIN + step, curve(step)))
    reader = read(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.unlink()
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 21):
        recorder.add(record(step, BEGIN + 1000 + step, 5.0))
    assert reader.look()
    found = columns(reader)
    assert found["step"] == list(range(1, 21)) and not any(found["undone"]) and set(found["loss"]) == {5.0}


def test_a_file_that_comes_within_a_tick_of_the_file_systems_clock_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_stamp, "RECENT", 1e9)  # also on a machine that is slow
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 11):
        recorder.add(record(step, BEGIN + step, curve(step)))
    reader, tick = read(tmp_path), tmp_path.stat()
    for step in range(11, 21):
        recorder.add(record(step, BEGIN + step, curve(step)))
    os.utime(tmp_path, ns=(tick.st_atime_ns, tick.st_mtime_ns))
    reader.look()
    assert columns(reader)["step"] == list(range(1, 21))


def test_the_stamp_of_a_folder(tmp_path: Path) -> None:
    for seconds, known in ((-3600, True), (3600, False)):  # a file server's clock may be ahead
        moment = time.time_ns() + seconds * 10**9
        os.utime(tmp_path, ns=(moment, moment))
        assert folder_stamp.folder_stamp(tmp_path) == (moment if known else None)


def test_what_was_only_seen_marks_nothing_for_good(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 11):
        recorder.add(record(step, BEGIN + step, curve(step)))
    reader = read(tmp_path)
    # As versions without `measured_step` said it: back at step 8, with the numbers of step 12, which nobody saw.
    assert reader.see({"step": 8, "cursor": 64, "loss": 9.0, "time": BEGIN + 13})
    for step in (11, 12, *range(9, 17)):
        recorder.add(record(step, BEGIN + 20 + step, curve(step)))
    reader.look()
    assert columns(reader) == columns(read(tmp_path))


def test_numbers_are_those_of_the_step_that_they_are_of(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 10)
    for step in range(1, 11):
        recorder.add(record(step, BEGIN + step, curve(step)))
    reader = read(tmp_path)
    # An evaluation goes on after step 12, whose outcome was open until it began; then a rewind to step 8.
    told = {"measured_step": 12, "measured_cursor": 96, "stepped": BEGIN + 12, "loss": 3.0, "applied": True}
    assert reader.see({**told, "step": 11, "cursor": 88, "time": BEGIN + 13})
    assert not reader.see({**told, "step": 12, "cursor": 96, "time": BEGIN + 60})
    assert not reader.see({**told, "step": 8, "cursor": 64, "time": BEGIN + 61})
    with reader.table() as table:
        last = {name: table.steps[name][-1] for name in ("step", "next_position", "time", "loss")}
    assert last == {"step": 12, "next_position": 96, "time": BEGIN + 12, "loss": 3.0}
    assert not any(columns(reader)["undone"])
    assert reader.see({**told, "measured_step": 9, "step": 9, "cursor": 72, "stepped": BEGIN + 62})
    found = columns(reader)
    assert [s for s, gone in zip(found["step"], found["undone"], strict=True) if gone] == [9, 10, 12]
    for odd in ({"stepped": float("inf")}, {"stepped": "nan"}, {"measured_step": None}):
        assert not reader.see({**told, **odd})


@pytest.mark.usefixtures("few")
def test_the_cache_knows_which_files_are_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    folder.mkdir()
    long(folder, 1, 60)
    path = sorted(folder.iterdir())[5]
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    cache = RecordCache(folder, tmp_path / "cache")
    for _ in range(2):
        reader = read(folder, cache)
        assert list(reader.damaged) == [path.name] and len(columns(reader)["step"]) == 58
    path.write_bytes(whole)
    reader = read(folder, cache)
    assert not reader.damaged and columns(reader)["step"] == list(range(1, 61))
