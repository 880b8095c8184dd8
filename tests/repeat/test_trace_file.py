"""Traces as files: complete, compact, and refused where they are not what they should be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import ConfigError, DataError
from megastable_tools.repeat.trace_file import (
    StepTrace,
    TraceHeader,
    TraceWriter,
    path_of,
    read_header,
    read_steps,
)
from megastable_tools.repeat.trace_request import PlantSpot, TraceRequest
from tests.repeat.traces import steps_of

HEADER = TraceHeader(1, 2, "node", "CPU", "attention sdpa", True, {"tensor": 1, "data": 2})


def written(folder: Path, steps: list[StepTrace]) -> Path:
    with TraceWriter(folder, HEADER) as writer:
        for step in steps:
            writer.write(step)
    return path_of(folder, 1)


@given(st.integers(0, 2**32))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
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


def test_names_are_written_once(tmp_path: Path) -> None:
    steps = [ranks[0] for ranks in steps_of(50, 1, 1, 4)]
    size = written(tmp_path, steps).stat().st_size
    assert size < 12 * 50 * len(steps[0].operations) + 20_000


def test_a_damaged_trace_is_refused(tmp_path: Path) -> None:
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


def test_requests(tmp_path: Path) -> None:
    request = TraceRequest(steps=3, moments=True)
    request.save(tmp_path / "new")
    assert TraceRequest.load(tmp_path / "new") == request
    with pytest.raises(DataError, match="megastable repeat"):
        TraceRequest.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("7", "STEP:OPERATION"), ("x:tokens", "STEP:OPERATION"), ("1:tokens:a", "STEP:OPERATION"),
        ("1:", "STEP:OPERATION"), ("1:a:0:0", "STEP:OPERATION"), ("0:tokens", "no step 0 of 5"), ("6:tokens", "of 5"),
    ],
)  # fmt: skip
def test_what_is_to_be_planted_must_be_said_right(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PlantSpot.parsed(text, 5)


def test_what_is_planted_is_looked_up_in_the_trace() -> None:
    (ranks,) = steps_of(1, 2, 1, 2)
    point = PlantSpot.parsed("1:blocks.2.mlp.down", 5).found(ranks)
    assert (point.rank, point.phase, point.micro_batch, point.name) == (
        1, "forward", 0, "blocks.2.mlp.down output",
    )  # fmt: skip
    assert PlantSpot.parsed("1: tokens :1", 5).found(ranks).rank == 1
    for text, told in (
        ("1:blocks.2.mlp.down:0", "rank 0 has no 'blocks.2.mlp.down'; others have, for example rank 1"),
        ("1:tokens:2", "no rank 2: they are 0 to 1"),
        ("1:blocks.2.mlp.dwn", "for example: blocks.2.mlp.down output"),
        ("1:gradient norm", "no operation 'gradient norm'"),
    ):
        with pytest.raises(ConfigError, match=told):
            PlantSpot.parsed(text, 5).found(ranks)
