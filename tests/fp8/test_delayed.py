"""Delayed scaling's memory against the numpy model: what enters, what a scale follows from, what survives."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.fp8.emulated import Delayed
from megastable.fp8.scale_factors import E4M3, E5M2, SLOTS, FP8Format, Meters
from tests.distributed import run_ranks
from tests.fp8 import model

FORMATS = (E4M3, E4M3, E5M2)
MODELS = {E4M3: model.E4M3, E5M2: model.E5M2}
LAYERS = ("blocks.0.mlp.down", "blocks.1.attention.qkv")
CPU = torch.device("cpu")

Step = Sequence[Sequence[float]]  # of every layer and slot


def meters(length: int = 4, margin: int = 0, names: Sequence[str] = LAYERS) -> Meters:
    return Meters(names, FORMATS, length, margin, CPU)


def show(to: Meters, step: Step) -> None:
    for layer, slots in enumerate(step):
        for slot, amax in enumerate(slots):
            to.note_magnitude(layer, slot, torch.tensor(amax, dtype=torch.float32))


class Models:
    """One model for every layer and slot."""

    def __init__(self, length: int = 4, margin: int = 0, layers: int = len(LAYERS)) -> None:
        self.all = [[model.Delayed(MODELS[f], length, margin) for f in FORMATS] for _ in range(layers)]

    def update(self, step: Step) -> None:
        for slots, amaxes in zip(self.all, step, strict=True):
            for one, amax in zip(slots, amaxes, strict=True):
                one.update(amax)

    @property
    def scales(self) -> list[list[float]]:
        """0 where nothing is known."""
        return [[0.0 if one.scale is None else float(one.scale) for one in slots] for slots in self.all]


def numbers(count: int, seed: int) -> np.ndarray:
    """fp32 of shape (count, layers, slots): magnitudes that drift and jump."""
    random = np.random.default_rng(seed)
    drift = random.standard_normal((count, len(LAYERS), len(SLOTS))).cumsum(0)
    return np.exp(drift + 3 * (random.random(drift.shape) < 0.1)).astype(np.float32)


AMAX = st.one_of(
    st.floats(2.0**-60, 2.0**60, width=32),
    st.sampled_from([0.0, np.inf, np.nan, 2.0**-149, 2.0**-140, float(model.FP32_MAX)]),
)
STEP = st.lists(st.lists(AMAX, min_size=3, max_size=3), min_size=len(LAYERS), max_size=len(LAYERS))


@given(
    st.integers(1, 5), st.integers(0, 3), st.lists(st.tuples(STEP, st.booleans()), min_size=1, max_size=12)
)
def test_meters_follow_the_model_through_any_steps(
    length: int, margin: int, steps: list[tuple[Step, bool]]
) -> None:
    mine, theirs = meters(length, margin), Models(length, margin)
    for step, applied in steps:
        show(mine, step)
        mine.settle_step(applied)
        if applied:
            theirs.update(step)
        assert mine.scales.tolist() == theirs.scales
        assert not mine.seen.any()


# State.


def run(mine: Meters, steps: np.ndarray) -> list[list[list[float]]]:
    found = []
    for step in steps.tolist():
        show(mine, step)
        mine.settle_step(True)
        found.append(mine.scales.tolist())
    return found


def test_meters_go_the_same_way_again_after_a_rewind() -> None:
    steps = numbers(12, 7)
    mine = meters()
    run(mine, steps[:5])
    saved, scales = mine.copy_state(), mine.scales.clone()
    first = run(mine, steps[5:])
    show(mine, (steps[0] * 1e9).tolist())  # a step that is given up midway
    mine.restore_state(saved)
    assert torch.equal(mine.scales, scales)
    assert run(mine, steps[5:]) == first


def test_meters_go_through_json_exactly() -> None:
    steps = numbers(12, 8)
    mine, other = meters(), meters()
    run(mine, steps[:6])
    other.read_history(json.loads(json.dumps(mine.write_history())))
    assert torch.equal(other.scales, mine.scales) and torch.equal(other.copy_state(), mine.copy_state())
    assert run(other, steps[6:]) == run(mine, steps[6:])


# As a layer uses it.


def quantizer(to: Meters, layer: int = 0) -> Delayed:
    return Delayed(FORMATS, to, layer)


@pytest.mark.parametrize(("slot", "of"), list(enumerate(FORMATS)))
def test_delayed_takes_the_scale_of_steps_before(slot: int, of: FP8Format) -> None:
    mine = meters(length=2)
    x = torch.randn(50, 60, generator=torch.Generator().manual_seed(slot))
    # Unknown yet: its own.
    found, same = quantizer(mine)(x, slot, True)
    assert same is found
    expected = model.quantize(x.numpy(), MODELS[of])
    assert (found.values.view(torch.uint8).numpy() == expected.codes).all()
    mine.settle_step(True)
    scale = float(mine.scales[0, slot])
    assert np.float32(scale) == expected.scale[0, 0]
    # Ten times larger ones now are cut: this step's own magnitude does not matter yet.
    found, _ = quantizer(mine)(10 * x, slot, True)
    expected = model.with_scale((10 * x).numpy(), MODELS[of], scale)
    assert (found.values.view(torch.uint8).numpy() == expected.codes).all()
    assert (np.abs(expected.values) == of.max).mean() > 0.1
    mine.settle_step(True)
    assert np.float32(float(mine.scales[0, slot])) == np.float32(of.max) / np.float32((10 * x).abs().max())
    # No other tensor has learnt of it.
    assert int((mine.scales != 0).sum()) == 1


def of_rank(steps: list[list[np.ndarray]]) -> list[list[list[list[float]]]]:
    """What a rank knows after each step, having shown its own magnitudes: scales, and then the history."""
    import torch.distributed as dist

    mine, found = meters(length=3), []
    for number, step in enumerate(steps):
        show(mine, step[dist.get_rank()].tolist())
        mine.settle_step(number != 2)
        found.append(mine.scales.tolist())
    return [*found, mine.copy_state().tolist()]


def test_settle_shares_the_largest_magnitudes() -> None:
    steps = [list(numbers(2, 20 + i)) for i in range(6)]
    steps[4][1][:] = 0  # nothing there to see on rank 1
    ranks = run_ranks(2, of_rank, steps)
    assert ranks[0] == ranks[1]
    theirs = Models(length=3)
    for number, (step, scales) in enumerate(zip(steps, ranks[0][:-1], strict=True)):
        if number != 2:
            theirs.update(np.maximum(*step).tolist())
        assert scales == theirs.scales
