"""What differs between two checkpoints is named and measured; what does not, is not."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from megastable.checkpoint.new_run import OptimizerTensors, write_run
from megastable_tools.convert import inspecting
from megastable_tools.convert.inspecting import (
    Distance,
    compare_checkpoints,
    field_differences,
    list_differences,
    measure_distance,
)
from tests.checkpoint.states import numbers, recipe_of, state_of

NAN, INF = math.nan, math.inf
FLOATS = arrays.arrays(
    np.float32, st.integers(0, 20), elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
)


class Held:
    """Tensors in memory, as `diff` reads them."""

    def __init__(self, tensors: dict[tuple[str, str], Tensor], kinds: tuple[str, ...] = ("weight",)) -> None:
        self.tensors, self.kinds = tensors, kinds
        self.names = sorted({name for name, _ in tensors})

    def kinds_of(self, name: str) -> tuple[str, ...]:
        return self.kinds

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name, self.kinds[0]].shape)

    def read_tensor(self, name: str, kind: str) -> Tensor:
        return self.tensors[name, kind]


def weights(**tensors: list[float]) -> Held:
    return Held({(name, "weight"): torch.tensor(values) for name, values in tensors.items()})


@given(FLOATS, st.integers(0, 2**32 - 1))
def test_distance_is_that_of_numpy(a: np.ndarray, seed: int) -> None:
    b = a + np.random.default_rng(seed).integers(-2, 3, a.shape).astype(np.float32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inspecting, "CHUNK", 7)
        found = measure_distance(torch.from_numpy(a), torch.from_numpy(b))
    if a.tobytes() == b.tobytes():
        assert found is None
        return
    assert found is not None
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert found.differing == int((a.view(np.int32) != b.view(np.int32)).sum())
    assert found.max_abs == np.abs(y - x).max()
    norm = float(np.linalg.norm(x))
    expected = np.linalg.norm(y - x) / norm if norm else (INF if (x != y).any() else 0.0)
    assert math.isclose(found.relative, expected, rel_tol=1e-12)
    both = norm * float(np.linalg.norm(y))
    assert math.isclose(found.cosine, x @ y / both, abs_tol=1e-12) if both else math.isnan(found.cosine)


def test_distance_counts_bytes_not_values() -> None:
    same = torch.tensor([NAN, INF, 1.0])
    assert measure_distance(same, same.clone()) is None
    zeros = measure_distance(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert zeros == Distance(differing=1, max_abs=0.0, relative=0.0, cosine=1.0)


def test_differences_begin_with_what_is_not_finite() -> None:
    broken = measure_distance(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, NAN, 4.0]))
    assert broken is not None and broken.differing == 2
    assert math.isnan(broken.max_abs) and math.isnan(broken.relative) and math.isnan(broken.cosine)
    found = list_differences(weights(a=[1.0], b=[1.0], c=[1.0]), weights(a=[9.0], b=[NAN], c=[1.0]))
    assert [one.name for one in found] == ["b", "a", "c"]


def test_differences_have_every_outcome_the_largest_first() -> None:
    a = Held(
        {
            ("both", "weight"): torch.ones(4), ("both", "exp_avg"): torch.ones(4),
            ("near", "weight"): torch.ones(4), ("near", "exp_avg"): torch.ones(4),
            ("bent", "weight"): torch.ones(2, 3), ("bent", "exp_avg"): torch.ones(2, 3),
            ("gone", "weight"): torch.ones(5), ("gone", "exp_avg"): torch.ones(5),
        },
        ("weight", "exp_avg"),
    )  # fmt: skip
    b = weights(both=[1.0, 1.0, 1.0, 1.0], near=[1.0, 1.0, 1.0, 1.5], new=[1.0])
    b.tensors["bent", "weight"], b.names = torch.ones(3, 2), [*b.names, "bent"]
    seen: list[int] = []
    found = [(one.name, one.kind, one.outcome) for one in list_differences(a, b, seen.append)]
    assert found == [
        ("bent", "exp_avg", "only in A"), ("bent", "weight", "shapes differ"), ("both", "exp_avg", "only in A"),
        ("gone", "exp_avg", "only in A"), ("gone", "weight", "only in A"), ("near", "exp_avg", "only in A"),
        ("new", "weight", "only in B"), ("near", "weight", "differs"), ("both", "weight", "identical"),
    ]  # fmt: skip
    assert sum(seen) == 2 * 4 + 2 * 4 + 2 * 6 + 2 * 5 + 1


def test_field_differences() -> None:
    a = {"step": 3, "layout": {"tensor": 1, "zero": 1}, "loss": NAN, "old": 1, "empty": {}}
    b = {"step": 4, "layout": {"tensor": 2, "zero": 1}, "loss": NAN, "new": None}
    assert field_differences(a, b) == [
        ("step", 3, 4), ("layout.tensor", 1, 2), ("old", 1, None), ("new", None, None),
    ]  # fmt: skip
    assert field_differences(a, a) == []


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
def test_compare_sees_other_shared_state(
    changed: dict[str, Tensor], name: str, outcome: str, tmp_path: Path
) -> None:
    a, b = made(tmp_path / "a", SHARED), made(tmp_path / "b", changed)
    sheet, same = compare_checkpoints(a, b, weights_only=False, everything=False, silent=True)
    assert not same
    assert [(row["name"], row["kind"], row["outcome"]) for row in sheet.rows] == [(name, "shared", outcome)]
    assert compare_checkpoints(a, b, weights_only=True, everything=False, silent=True)[1]
