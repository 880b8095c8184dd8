"""Optimizer state that all ranks share is compared and shown like any other state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megastable.checkpoint.new_run import OptimizerTensors, write_run
from megastable.convert.diff import WHERE, compare
from megastable.convert.showing import show
from tests.checkpoint.states import numbers, recipe_of, state_of

ROWS, SIZES = "rows/blocks.0.mlp.down.weight", "gradient_sizes/final_norm.weight"
SHARED = {ROWS: torch.arange(1.0, 5.0), SIZES: torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}


def made(folder: Path, shared: dict[str, Tensor], **changes: object) -> Path:
    run, held = recipe_of(), numbers(recipe_of())
    state = state_of((1, 1, 1, 1)).model_copy(update=changes)
    optimizer = OptimizerTensors(lambda _: ("weight",), shared)
    return write_run(folder, run, state, lambda *of: held[of], optimizer=optimizer, origin={})


@pytest.mark.parametrize(
    ("changed", "name", "outcome"),
    [
        (SHARED | {ROWS: torch.tensor([1.0, 2.0, 3.0, 4.5])}, ROWS, "differs"),
        (SHARED | {SIZES: SHARED[SIZES] + torch.tensor([0.0, 0.0, 1e-15])}, SIZES, "differs"),
        (SHARED | {ROWS: torch.ones(3)}, ROWS, "shapes differ"),
        ({ROWS: SHARED[ROWS]}, SIZES, "only in A"),
        (SHARED | {"columns/x": torch.ones(2)}, "columns/x", "only in B"),
    ],
)
def test_other_shared_state_differs(
    changed: dict[str, Tensor], name: str, outcome: str, tmp_path: Path
) -> None:
    a, b = made(tmp_path / "a", SHARED), made(tmp_path / "b", changed)
    sheet, same = compare(a, b, weights_only=False, everything=False, silent=True)
    assert not same
    assert [(row["name"], row["kind"], row["outcome"]) for row in sheet.rows] == [(name, "shared", outcome)]
    assert compare(a, b, weights_only=True, everything=False, silent=True)[1]


def test_equal_shared_state_is_counted(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", SHARED), made(tmp_path / "b", SHARED)
    sheet, same = compare(a, b, weights_only=False, everything=True, silent=True)
    assert same and {row["name"] for row in sheet.rows if row["kind"] == "shared"} == {ROWS, SIZES}


@pytest.mark.parametrize(("field", "value"), [("trained_tokens", 77), ("optimizer", "lion")])
def test_other_counts_differ(field: str, value: object, tmp_path: Path) -> None:
    a, b = made(tmp_path / "a", {}), made(tmp_path / "b", {}, **{field: value})
    assert field in WHERE and not compare(a, b, weights_only=False, everything=False, silent=True)[1]
    assert compare(a, b, weights_only=True, everything=False, silent=True)[1]


def test_shared_state_is_shown(tmp_path: Path) -> None:
    a = made(tmp_path / "a", SHARED)
    assert [(row["name"], row["kind"], row["shape"]) for row in show(a).sheet.rows[-2:]] == [
        (SIZES, "shared", [3]), (ROWS, "shared", [4]),
    ]  # fmt: skip
    assert [row["name"] for row in show(a, "rows/*").sheet.rows] == [ROWS]
