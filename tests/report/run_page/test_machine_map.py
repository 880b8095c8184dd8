"""What the page shows of ranks, GPUs and hosts: the slow one stands out, and there is never too much of it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.report.run_page import page_file
from megastable.report.run_page.machine_map import MOST, ROWS, choose_places, own_work, share_rows, with_gaps
from megastable.report.run_page.page_file import build_content
from megastable.report.run_page.run_reader import RunReader
from megastable.run.machine_state import LEVELS, MachineSample, SamplePlace
from tests.report.run_page.made_runs import machines, made_run
from tests.report.run_page.run_files import BEGIN


def floats(text: str, kind: str = "f4") -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), kind)


def test_machine_maps_show_a_slow_rank_and_a_throttled_gpu(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run")
    reader = RunReader(run.root)
    assert reader.machine_maps("step", None, None)["maps"] == []
    machines(run)
    version = reader.version
    reader.look_again(now=True)
    assert reader.version > version
    found = reader.machine_maps("step", None, None)
    assert found["looks"] == 10 and found["time"] == BEGIN + 52 + 270
    assert floats(found["x"]["step"], "f8").tolist() == [15.0 * (n + 1) for n in range(10)]
    maps = {one["kind"]: (one, floats(one["values"]).reshape(-1, 10)) for one in found["maps"]}
    assert set(maps) == {"machine-own", "machine-utilization", "machine-temperature", "machine-memory_used"}
    own, ratios = maps["machine-own"]
    assert own["rows"] == ["rank 0", "rank 1", "rank 2", "rank 3"] and own["scale"] == (0.9, 1.5)
    assert ratios[2].tolist() == [1.5] * 10 and ratios[0].tolist() == [1.0] * 10
    hot, temperature = maps["machine-temperature"]
    assert hot["rows"][2] == "host-1 GPU 0" and temperature[2, -1] == 69.0 and np.isnan(temperature[1]).all()
    # With something to look at first.
    assert [host["name"] for host in found["hosts"]] == ["host-1", "host-0"]
    assert found["hosts"][0]["trouble"] == ["GPU 1: hardware slowdown"]
    assert (
        found["hosts"][1]["range"]["utilization"] == [0.5, 0.9] and found["hosts"][1]["memory_free"] == 11.0
    )
    assert len(reader.machine_maps("step", 70, 140)["hosts"]) == 2
    assert 3 <= reader.machine_maps("step", 70, 140)["looks"] <= 6 < found["looks"]
    assert reader.machine_maps("time", 100, 200)["looks"] == 3
    page_file.as_json(build_content([reader]))


def test_own_work_compares_stages_with_themselves() -> None:
    own = np.array([[1.0, 1.1, 2.0, 2.6]] * 3)
    found = own_work(own, stages=2)
    assert found["values"][:, 0] == pytest.approx([1 / 1.05, 1.1 / 1.05, 2.0 / 2.3, 2.6 / 2.3])
    assert found["scale"] == (0.9, 1.3)
    assert own_work(own[:, :1], 1)["values"].tolist() == [[1.0, 1.0, 1.0]]  # one alone: its seconds
    absent = np.array([[1.0, np.nan], [np.nan, np.nan]])
    assert np.isnan(own_work(absent, 1)["values"]).sum() == 3


def test_shared_keeps_the_slowest_of_neighbours() -> None:
    values = np.ones((8000, 2))
    values[4321, 1] = 1.7
    found, names = share_rows(values, [f"rank {n}" for n in range(8000)], np.nanmax)
    assert len(found) == len(names) <= ROWS
    (row,) = np.flatnonzero(found[:, 1] > 1.5)
    assert names[row] == "rank 4320 to 4351" and found[row, 1] == 1.7


def test_with_gaps_draws_nothing_where_nothing_was_read() -> None:
    samples = [MachineSample(time=t, seconds=30.0, own=[1.0]) for t in (0.0, 30.0, 1000.0, 1030.0)]
    found = with_gaps(samples)
    assert [s.time for s in found] == [0.0, 30.0, 31.0, 970.0, 1000.0, 1030.0]
    assert [len(s.own) for s in found] == [1, 1, 0, 0, 1, 1]


def level(name: str, first: float, last: float) -> list[SamplePlace]:
    seconds = LEVELS[name]
    return [SamplePlace(t, seconds, Path(), 0, 0) for t in np.arange(first, last, seconds).tolist()]


def test_chosen_is_as_fine_as_can_be_drawn() -> None:
    end = 3_000_000.0
    levels = {
        "30s": level("30s", end - 200_000, end), "15min": level("15min", end - 2_000_000, end),
        "6h": level("6h", 0.0, end - 30_000),
    }  # fmt: skip
    whole = choose_places(levels, 0.0, end)
    times = [place.time for place in whole]
    assert len(whole) <= MOST and times == sorted(times) and times[0] == 0.0 and times[-1] >= end - 30.0
    assert {place.seconds for place in whole[:100]} == {21_600.0}
    hour = choose_places(levels, end - 3600, end)
    assert {place.seconds for place in hour} == {30.0} and len(hour) == 120
    day = choose_places(levels, end - 86_400, end)
    assert {place.seconds for place in day[:90]} == {900.0} and len(day) <= 96 + 30
    early = choose_places(levels, 100_000.0, 200_000.0)
    assert {place.seconds for place in early} == {21_600.0}
    assert (
        choose_places(levels, end + 1, end + 2) == []
        and choose_places({name: [] for name in levels}, 0, end) == []
    )
