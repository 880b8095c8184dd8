"""What a checkpoint remembers of its state, and when a state is another one: tables of numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.checkpoint.vitals import (
    RATIO,
    Size,
    Vitals,
    bound_moment_ratio,
    explain_contradiction,
    explain_doubt,
    explain_loss_change,
    explain_size_change,
    explain_unclear_proof,
    fallen_behind,
    judge_loaded_state,
)
from megastable.config.training import VitalsConfig

C = VitalsConfig()


def sizes(
    norm: float = 3.0, largest: float = 0.5, m: float = 1e-3, v: float = 1e-5
) -> dict[str, dict[str, Size]]:
    return {
        "weight": {"w": Size(norm=norm, largest=largest)},
        "exp_avg": {"w": Size(norm=2 * m, largest=m)},
        "exp_avg_sq": {"w": Size(norm=2 * v, largest=v)},
    }


def vitals(losses: list[float], **sized: float) -> Vitals:
    names = [f"{i:016x}" for i in range(len(losses))]
    return Vitals(losses=losses, samples=names, sizes=sizes(**sized), precision="bf16")


LOSSES = [3.0 + 0.01 * i for i in range(32)]


@pytest.mark.parametrize(
    "change", [{"norm": 3.003}, {"largest": 1e4}, {"v": 2e-5}, {"m": 0.0}, {"norm": math.nan}]
)
def test_another_size_quarantines_the_content(change: dict[str, float]) -> None:
    found = judge_loaded_state(vitals(LOSSES), vitals(LOSSES, **change), False, C)
    assert found.content and "of w" in found.problem


def test_rounding_to_bf16_moments_is_no_change_and_more_is() -> None:
    assert not explain_size_change(sizes(), sizes(v=1e-5 * (1 + 2**-9)), True, C.size_change)
    assert explain_size_change(sizes(), sizes(v=1e-5 * (1 + 2**-9)), False, C.size_change)
    assert explain_size_change(sizes(), sizes(v=1.02e-5), True, C.size_change)
    assert explain_size_change(
        sizes(), sizes(largest=0.5 * (1 + 2**-9)), True, C.size_change
    )  # weights are fp32


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=60),
    st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.8, 0.99), (0.95, 0.98), (0.0, 0.999), (0.9, 0.9999)]),
)
def test_moments_that_adam_made_never_contradict_each_other(
    gradients: list[float], betas: tuple[float, float]
) -> None:
    """The bound is Cauchy's and Schwarz's: it holds for every sequence of gradients, also after zeros."""
    one, two = betas
    m = v = 0.0
    for g in gradients:
        m, v = one * m + (1 - one) * g, two * v + (1 - two) * g * g
    found = {
        "exp_avg": {"w": Size(norm=abs(m), largest=abs(m))}, "exp_avg_sq": {"w": Size(norm=v, largest=v)},
    }  # fmt: skip
    assert not explain_contradiction(found, bound_moment_ratio(betas))


def test_of_several_betas_those_that_allow_most_count() -> None:
    """One gradient after none for long, without a first moment's memory: the square of it over 0.001 of it."""
    burst = sizes(m=0.1, v=0.1**2 * 0.001)
    assert explain_contradiction(burst) and explain_contradiction(
        burst, bound_moment_ratio((0.9, 0.999), (0.9, 0.95))
    )
    assert not explain_contradiction(burst, bound_moment_ratio((0.9, 0.95), (0.0, 0.999)))
    assert bound_moment_ratio((0.9, 0.95)) == RATIO
    assert bound_moment_ratio((0.9, 0.8)) == math.inf  # no bound where the first moment remembers longer
    assert not explain_contradiction(sizes(v=0.0), math.inf)


def test_half_of_the_probes_decide() -> None:
    few = [loss + (1.0 if i < 15 else 0.0) for i, loss in enumerate(LOSSES)]
    many = [loss + (1.0 if i < 17 else 0.0) for i, loss in enumerate(LOSSES)]
    assert not explain_loss_change(vitals(LOSSES), vitals(few), C) and explain_loss_change(
        vitals(LOSSES), vitals(many), C
    )
    assert explain_loss_change(vitals(LOSSES), vitals([math.nan] * 32), C)
    lower = [loss - 0.1 for loss in LOSSES]  # another state, for better or worse
    assert explain_loss_change(vitals(LOSSES), vitals(lower), C)


def test_fp32_is_compared_more_closely() -> None:
    near = [loss + 0.02 for loss in LOSSES]
    kept, now = vitals(LOSSES), vitals(near)
    assert not explain_loss_change(kept, now, C)
    exact, again = (v.model_copy(update={"precision": "fp32"}) for v in (kept, now))
    assert explain_loss_change(exact, again, C) and not explain_loss_change(exact, now, C)


def test_what_is_too_small_for_fp32_squares_is_not_compared() -> None:
    """Second moments of a tensor that gets no more gradients shrink until each kernel rounds them to another norm."""
    assert not explain_size_change(sizes(v=3e-23), sizes(v=0.0), False, C.size_change)
    assert explain_size_change(sizes(v=1e-15), sizes(v=0.0), False, C.size_change)
    assert explain_size_change(sizes(v=3e-23), sizes(v=math.nan), False, C.size_change)


def test_only_who_hardly_moved_is_a_witness() -> None:
    kept = vitals(LOSSES)
    near, far = vitals([x + 0.004 for x in LOSSES]), vitals([x + 0.02 for x in LOSSES])
    assert not explain_unclear_proof(kept, kept, C) and not explain_unclear_proof(kept, near, C)
    assert "moved by more than 0.02" in explain_unclear_proof(kept, far, C) and not explain_loss_change(
        kept, far, C
    )
    exact, again = (v.model_copy(update={"precision": "fp32"}) for v in (kept, near))
    assert explain_unclear_proof(exact, again, C) and not explain_loss_change(exact, again, C)
    assert explain_unclear_proof(kept, vitals([math.nan] * 32), C)
    others = kept.model_copy(update={"samples": [f"x{i}" for i in range(32)]})
    for silent in (None, Vitals(), others):
        assert "no losses" in explain_unclear_proof(silent, kept, C)


def test_a_state_far_above_the_last_one_and_its_own_losses_is_doubted() -> None:
    recent = [3.1] * 20
    before = vitals(LOSSES)
    worse = vitals([loss + 2 for loss in LOSSES])
    assert not explain_doubt(before, None, recent, C) and not explain_doubt(before, before, recent, C)
    assert "above the checkpoint before" in explain_doubt(worse, before, recent, C)
    assert explain_doubt(worse, None, recent, C)
    assert not explain_doubt(
        worse, before, [5.1] * 20, C
    )  # the data got harder, or an excursion is under way
    assert not explain_doubt(worse, worse, recent, C)  # odd samples by themselves, no change
    assert explain_doubt(vitals([math.nan] * 32), before, recent, C)
    assert not explain_doubt(Vitals(), before, recent, C) and not explain_doubt(worse, before, [math.nan], C)


def test_a_state_is_compared_with_what_it_was_trained_on() -> None:
    recent = list(3.0 + 0.05 * np.sin(np.arange(20)))
    assert not fallen_behind(np.full(128, 2.9), recent, 16, C)
    assert fallen_behind(np.full(128, 9.0), recent, 16, C)
    assert fallen_behind(np.full(128, math.nan), recent, 16, C)
    some = np.full(128, 2.9)
    some[:40] = 12.0  # three steps of eight
    assert not fallen_behind(some, recent, 16, C)
    assert not fallen_behind(np.empty(0), recent, 16, C) and not fallen_behind(some, [], 16, C)
    falling = [6.0 - 0.2 * i for i in range(20)]  # its median is far above its end, and its scatter is none
    assert fallen_behind(np.full(128, 8.0), falling, 16, C) and not fallen_behind(
        np.full(128, 2.2), falling, 16, C
    )
    swinging = [2.0, 4.0] * 10
    assert not fallen_behind(np.full(128, 5.0), swinging, 16, C)  # what scatters so much proves little
