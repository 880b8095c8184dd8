"""Step records: written in files of a few steps, small, and the newest of each step wins."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megastable.base.errors import DataError
from megastable.run.record_files import list_files
from megastable.run.records import (
    LAYER_SCHEMA,
    SCHEMA,
    LayerRecord,
    Recorder,
    StepRecord,
    encode_records,
    read_newest_records,
    worst_samples,
)
from tests.full_disk import files_no_larger_than

OCCASIONAL = [f.name for f in fields(StepRecord) if f.default is None]


def record(step: int, time: float | None = None, worst: int = 4, **changes: Any) -> StepRecord:
    """Numbers with as many random digits as a real step has."""
    r = random.Random(step)
    values: dict[str, Any] = {
        "step": step, "time": 1.7e9 + step * 1.03 if time is None else time, "first_position": 64 * (step - 1),
        "next_position": 64 * step, "skipped": [], "applied": True, "finite": True, "clipped": r.random() < 0.3,
        "loss": r.gauss(3, 0.1), "z_loss": r.gauss(0.01, 1e-3), "z": r.gauss(10, 0.1),
        "grad_norm": r.gauss(1, 0.1), "lr": 3e-4 * r.random(), "worst_position": 64 * step - r.randint(1, 64),
        "worst_loss": r.gauss(4, 0.3), "worst_micro_batch": r.randrange(8), "worst_rank": r.randrange(64),
        "worst_positions": [64 * step - r.randint(1, 64) for _ in range(worst)],
        "worst_losses": [r.gauss(4, 0.3) for _ in range(worst)],
        "seconds": r.gauss(1, 0.02), "data_seconds": r.random() * 1e-3,
        "tokens_per_second": r.gauss(1e5, 1e3), "mfu_full": r.gauss(0.4, 0.01), "mfu_causal": r.gauss(0.35, 0.01),
        "memory": 60 + r.random(), "loss_scale": 1.0,
    } | {name: r.random() if step % 50 == 0 else None for name in OCCASIONAL}  # fmt: skip
    return StepRecord(**values | changes)  # type: ignore[arg-type]


def write(folder: Path, records: list[StepRecord], flush_steps: int = 50) -> None:
    recorder = Recorder(folder, flush_steps)
    for r in records:
        recorder.add_records(r)
    recorder.flush_records()


def test_read_gives_back_what_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "step=7" / "steps"  # datasets of Parquet files read columns from such names
    folder.mkdir(parents=True)
    assert read_newest_records(folder).num_rows == 0 and read_newest_records(folder).schema.equals(SCHEMA)
    records = [record(step) for step in range(1, 8)]
    records[2] = record(3, loss=math.nan, grad_norm=math.inf, applied=False, first_position=10**15 + 1)
    write(folder, records, flush_steps=3)
    assert len(list(folder.iterdir())) == 3
    (folder / "00000002-00000002-5.tmp").write_bytes(b"PAR1 and then a crash")
    table = read_newest_records(folder)
    assert table.schema.equals(SCHEMA)
    for got, wanted in zip(table.to_pylist(), map(asdict, records), strict=True):
        for name, value in wanted.items():
            exact = name == "time" or value is None or isinstance(value, int)
            assert got[name] == (value if exact else pytest.approx(value, rel=1e-7, nan_ok=True)), name


@pytest.mark.parametrize(("worst", "size"), [(0, 200), (4, 200 + 4 * 12)])
def test_recorder_takes_at_most_200_bytes_a_step_and_12_a_worst_sample(
    worst: int, size: int, tmp_path: Path
) -> None:
    write(tmp_path, [record(step, worst=worst) for step in range(1, 1001)], flush_steps=50)
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) <= size * 1000


def test_worst_samples_are_found_where_they_were() -> None:
    """Two micro-batches of two on each of three ranks; a loss that is not a number is the worst."""
    losses = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 9.0, 2.5, 1.5, math.nan, 0.5, 7.0]
    positions = [100 + 10 * i for i in range(12)]
    worst = worst_samples(losses, positions, 4, micro_batch=2, data=3)
    assert worst["worst_positions"] == [190, 160, 210, 150]
    assert math.isnan(worst["worst_losses"][0]) and worst["worst_losses"][1:] == [9.0, 7.0, 6.0]
    assert worst["worst_position"] == 190 and math.isnan(worst["worst_loss"])
    assert (worst["worst_micro_batch"], worst["worst_rank"]) == (1, 1)
    few = worst_samples([1.0, 3.0], [7, 8], 4, micro_batch=1, data=1)
    assert (few["worst_positions"], few["worst_micro_batch"], few["worst_rank"]) == ([8, 7], 1, 0)


def test_read_gives_layers_of_a_step_done_again_in_place_of_the_old(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 1, LAYER_SCHEMA)
    for time, steps in ((100.0, (10, 20, 30)), (200.0, (20,))):
        for step in steps:
            recorder.add_records(
                LayerRecord(step, time + step, "embedding.weight", gradient_rms=time, weight_max=math.inf),
                LayerRecord(step, time + step, "blocks.0", attention_entropy=float(step)),
            )
    table = read_newest_records(tmp_path, LAYER_SCHEMA)
    assert table.schema.equals(LAYER_SCHEMA) and table.column("step").to_pylist() == [10, 10, 20, 20, 30, 30]
    assert table.column("name").to_pylist() == ["embedding.weight", "blocks.0"] * 3
    assert table.column("gradient_rms").to_pylist() == [100.0, None, 200.0, None, 100.0, None]
    assert table.column("attention_entropy").to_pylist() == [None, 10.0, None, 20.0, None, 30.0]


def test_read_takes_the_newest_record_of_a_step(tmp_path: Path) -> None:
    """Steps 1 to 10, then a return to step 6, then one to step 4 that got as far as 7."""
    write(tmp_path, [record(s, time=100.0 + s, loss=1.0) for s in range(1, 11)], flush_steps=4)
    write(tmp_path, [record(s, time=200.0 + s, loss=2.0) for s in range(7, 13)], flush_steps=4)
    write(tmp_path, [record(s, time=300.0 + s, loss=3.0) for s in range(5, 8)], flush_steps=4)
    table = read_newest_records(tmp_path)
    assert table.column("step").to_pylist() == list(range(1, 13))
    assert table.column("loss").to_pylist() == [1.0] * 4 + [3.0] * 3 + [2.0] * 5


def test_read_takes_what_was_written_last_whatever_the_clock_says(tmp_path: Path) -> None:
    first, again = ([record(step) for step in range(1, 7)], [record(n, time=1.6e9 + n) for n in range(4, 9)])
    write(tmp_path, first)
    write(tmp_path, again)  # by a host whose clock is years behind
    stamps = [file.stamp for file in list_files(tmp_path)]
    assert stamps == [int(first[-1].time * 1000), int(first[-1].time * 1000) + 1]
    assert read_newest_records(tmp_path).column("time").to_pylist() == [r.time for r in [*first[:3], *again]]
    assert read_newest_records(tmp_path, newest=False).column("time").to_pylist() == [
        r.time for r in [*first, *again[3:]]
    ]


@pytest.mark.parametrize("damage", ["empty", "cut", "foreign", "other columns"])
def test_read_names_a_damaged_file(damage: str, tmp_path: Path) -> None:
    write(tmp_path, [record(s) for s in range(1, 11)], flush_steps=5)
    path = sorted(tmp_path.iterdir())[1]
    if damage == "other columns":
        pq.write_table(pa.table({"step": ["one"], "loss": ["two"]}), path)
    else:
        path.write_bytes(
            {"empty": b"", "cut": path.read_bytes()[:-100], "foreign": b"step,loss\n1,2\n"}[damage]
        )
    with pytest.raises(DataError, match=f"{path.name}: not a readable record file"):
        read_newest_records(tmp_path)


def test_recorder_loses_no_record_on_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path, 5)
    for step in range(1, 5):
        recorder.add_records(record(step))
    with files_no_larger_than(100):
        recorder.add_records(record(5))
    assert list(tmp_path.glob("*.parquet")) == [] and "5 records wait in memory" in caplog.text
    recorder.add_records(record(6))
    recorder.flush_records()
    assert read_newest_records(tmp_path).column("step").to_pylist() == [1, 2, 3, 4, 5, 6]
    assert [p.suffix for p in tmp_path.iterdir()] == [".parquet"]


def test_restore_writes_pending_records_of_a_killed_process_once(tmp_path: Path) -> None:
    folder, file = tmp_path / "steps", tmp_path / "pending.parquet"
    Recorder(folder, 50).restore_records(file)  # there is none
    assert not folder.exists()
    folder.mkdir()
    write(folder, [record(step) for step in range(1, 5)])
    # Steps 6 and 7 were undone and done again; 5 to 7 were written after the file was made.
    again = [record(step, time=1.7e9 + 20 + step) for step in (6, 7, 8)]
    pending = [record(step) for step in (5, 6, 7)] + again
    file.write_bytes(encode_records(pending))
    write(folder, pending[:4])
    for _ in range(2):  # also if the same point is resumed from twice
        recorder = Recorder(folder, 50)
        with files_no_larger_than(10):
            recorder.restore_records(file)
        recorder.flush_records()
        table = read_newest_records(folder)
        assert table.column("step").to_pylist() == list(range(1, 9))
        assert table.column("time").to_pylist()[5:] == [r.time for r in again]
        assert sum(len(pq.read_table(path)) for path in folder.iterdir()) == 10
        first = read_newest_records(folder, newest=False).column("time").to_pylist()
        assert first[5:7] == [record(6).time, record(7).time]
