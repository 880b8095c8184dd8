"""The mean of checkpoints: exact, of one model only, and a run of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from megastable.base.errors import CheckpointError, ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.whole import WholeState, run_of
from megastable_tools.convert.average import average, check_alike, mean, shares
from tests.checkpoint.states import LAYOUTS, make_run, numbers, recipe_of
from tests.convert.test_diff import weights

FLOATS = arrays.arrays(
    np.float32, st.integers(0, 9), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@given(FLOATS, st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_the_mean_of_copies_is_the_copy_byte_by_byte(values: np.ndarray, given_weights: list[float]) -> None:
    tensor = torch.from_numpy(values)
    held = weights()
    held.tensors, held.names = {("a", "weight"): tensor}, ["a"]
    parts = shares(len(given_weights), given_weights)
    found = mean([("it", held)] * len(parts), parts)("a", "weight")
    assert found.dtype == torch.float32 and found.numpy().tobytes() == values.tobytes()


def test_shares() -> None:
    assert shares(4, None) == [0.25] * 4
    assert shares(2, [1, 3]) == [0.25, 0.75]
    for bad, told in (([1.0], "1 numbers for 2"), ([1, 0], "0 is not"), ([1, -2], "-2"), ([1, float("nan")], "nan"),
                      ([1e308, 1e308], "too large")):  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            shares(2, bad)


def test_another_model_is_refused() -> None:
    first = weights(a=[1.0, 2.0], b=[1.0])
    for other, told in (
        (weights(a=[1.0, 2.0]), "has no 'b'"),
        (weights(a=[1.0, 2.0], b=[1.0], c=[1.0]), "has 'c' besides"),
        (weights(a=[1.0, 2.0], b=[1.0, 2.0]), r"b is \(2,\), in A \(1,\)"),
    ):
        with pytest.raises(CheckpointError, match=rf"B: {told}.*of different models"):
            check_alike([("A", first), ("B", other)])
    check_alike([("A", first), ("B", weights(a=[5.0, 6.0], b=[7.0]))])


def test_a_run_of_the_mean_of_other_layouts(tmp_path: Path) -> None:
    given_ = [
        make_run(tmp_path / "a", LAYOUTS["tp2-pp2"], seed=1, step=9),
        make_run(tmp_path / "b", LAYOUTS["dp2-zero3"], seed=2, step=12),
        make_run(tmp_path / "c", LAYOUTS["one"], seed=3, step=11),
    ]
    (tmp_path / "b" / "skips.jsonl").write_text("{}\n")
    seen: list[int] = []
    made = average(given_, tmp_path / "out", [1, 2, 5], seen.append)
    store.verify(made.checkpoint)
    whole, state = WholeState(made.checkpoint), store.read_state(made.checkpoint)
    assert whole.kinds == ("weight",) and whole.adam_step == state.adam_step == 0
    # Everything but the moments and the losses is of the newest one.
    newest = store.read_state(given_[1])
    own = {"adam_step": 0.0, "versions": state.versions, "recent_losses": []}
    assert state == newest.model_copy(update=own)
    assert run_of(made.checkpoint).parallel.zero == 3 and made.layout.data == 2
    assert (tmp_path / "out" / "skips.jsonl").read_text() == "{}\n"
    held = [numbers(recipe_of(), seed) for seed in (1, 2, 3)]
    for name in whole.names:
        a, b, c = (one[name, "weight"].double() for one in held)
        expected = a / 8 + b / 4 + c * 5 / 8
        assert torch.allclose(whole.tensor(name, "weight").double(), expected, rtol=1e-7, atol=1e-12)
    assert sum(seen) == 4 * sum(whole.tensor(name, "weight").numel() for name in whole.names)
    event = json.loads((tmp_path / "out" / "journal.jsonl").read_text().splitlines()[0])
    assert (event["event"], event["how"], event["shares"]) == ("imported", "averaged", [0.125, 0.25, 0.625])
    assert [one["source"] for one in event["sources"]] == [str(path) for path in given_]


def test_what_cannot_be_averaged_leaves_nothing(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a")
    wider = make_run(tmp_path / "wider", model={"ffn": 32})
    turned = make_run(tmp_path / "turned", model={"rope_theta": 5e5})
    loss = make_run(tmp_path / "loss", model={"z_loss": 0.0})
    out = tmp_path / "out"
    for given_, told in (
        ([a, wider], r"blocks\.0\.mlp.* is .*of different models"),
        ([a, turned], r"model\.rope_theta is .*500000"),
    ):
        with pytest.raises(CheckpointError, match=told):
            average(given_, out)
    with pytest.raises(ConfigError, match="at least two"):
        average([a], out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "loss", "turned", "wider"]
    average([a, loss], out)  # what only says how it is computed may differ
    with pytest.raises(CheckpointError, match="exists already"):
        average([a, loss], out)


def test_weights_that_are_not_finite_are_refused() -> None:
    held = [("A", weights(a=[1.0, 2.0])), ("B", weights(a=[1.0, float("inf")]))]
    with pytest.raises(CheckpointError, match="B: a holds values that are not finite"):
        mean(held, [0.5, 0.5])("a", "weight")
