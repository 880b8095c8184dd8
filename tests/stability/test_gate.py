"""The gate: what is refused, and why."""

from __future__ import annotations

import math

import pytest

from megastable.stability.gate import judge


@pytest.mark.parametrize("grad_norm", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("loss", [0.0, 3.5, 1e30])
def test_finite_numbers_pass(loss: float, grad_norm: float) -> None:
    verdict = judge(loss, grad_norm)
    assert verdict.apply and verdict.reason == ""


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_refused_by_name(bad: float) -> None:
    assert judge(bad, 1.0).reason == judge(bad, bad).reason == "non-finite loss"
    assert not judge(bad, 1.0).apply


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_no_numbers_are_refused_by_name(bad: float) -> None:
    verdict = judge(3.5, bad)
    assert not verdict.apply and verdict.reason == "non-finite gradients"
