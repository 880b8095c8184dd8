"""Traces as files: complete, compact, and refused where they are not what they should be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import ConfigError, DataError
from megastable_tools.repeat.trace_file import (
    PlantSpot,
    StepTrace,
    TraceHeader,
    TraceWriter,
    path_of,
    read_header,
    read_steps,
)
from tests.repeat.traces import steps_of

HEADER = TraceHeader(1, 2, "node", "CPU", "attention sdpa", True, {"tensor": 1, "data": 2})


def written(folder: Path, steps: list[StepTrace]) -> Path:
    with TraceWriter(folder, HEADER) as writer:
        for step in steps:
            writer.write_step(step)
    return path_of(folder, 1)


@given(st.integers(0, 2**32))
def test_trace_writer_is_read_back(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder, random = tmp_path_factory.mktemp("trace"), np.random.default_rng(seed)
    steps = [ranks[0] for ranks in (*steps_of(2, 1, 1, 2, seed), *steps_of(1, 2, 1, 1, seed))]
    steps[1] = StepTrace(
        2, steps[1].operations, steps[1].fingerprints, random.normal(size=(len(steps[1].operations), 4)),
        (1.5, float("nan")),
    )  # fmt: skip
    written(folder, steps)
    assert read_header(folder, 1) == HEADER
    for given_, found in zip(steps, read_steps(folder, 1), strict=True):
        assert (given_.step, given_.operations) == (found.step, found.operations)
        assert (given_.fingerprints == found.fingerprints).all()
        assert str(given_.losses) == str(found.losses)
        assert (given_.moments is None) == (found.moments is None)
        assert given_.moments is None or (given_.moments == found.moments).all()


def test_read_steps_refuses_a_damaged_trace(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rank 1 wrote its trace elsewhere.*--output"):
        read_header(tmp_path, 1)
    path = written(tmp_path, [ranks[0] for ranks in steps_of(2, 1, 1, 1)])
    whole = path.read_text()
    path.write_text(whole[:-30])
    with pytest.raises(DataError, match="damaged"):
        list(read_steps(tmp_path, 1))
    path.write_text("{}\n")
    with pytest.raises(DataError, match="not a trace"):
        read_header(tmp_path, 1)
    with pytest.raises(DataError, match="--output"):
        TraceWriter(tmp_path / "none", HEADER)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("7", "STEP:OPERATION"), ("x:tokens", "STEP:OPERATION"), ("1:tokens:a", "STEP:OPERATION"),
        ("1:", "STEP:OPERATION"), ("1:a:0:0", "STEP:OPERATION"), ("0:tokens", "no step 0 of 5"), ("6:tokens", "of 5"),
    ],
)  # fmt: skip
def test_plant_spot_refuses_wrong_texts(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PlantSpot.parse_spot(text, 5)


def test_plant_spot_is_looked_up_in_the_trace() -> None:
    (ranks,) = steps_of(1, 2, 1, 2)
    point = PlantSpot.parse_spot("1:blocks.2.mlp.down", 5).find_point(ranks)
    assert (point.rank, point.phase, point.micro_batch, point.name) == (
        1, "forward", 0, "blocks.2.mlp.down output",
    )  # fmt: skip
    assert PlantSpot.parse_spot("1: tokens :1", 5).find_point(ranks).rank == 1
    for text, told in (
        ("1:blocks.2.mlp.down:0", "rank 0 has no 'blocks.2.mlp.down'; others have, for example rank 1"),
        ("1:tokens:2", "no rank 2: they are 0 to 1"),
        ("1:blocks.2.mlp.dwn", "for example: blocks.2.mlp.down output"),
        ("1:gradient norm", "no operation 'gradient norm'"),
    ):
        with pytest.raises(ConfigError, match=told):
            PlantSpot.parse_spot(text, 5).find_point(ranks)
