"""A schedule by tokens: the one by steps wherever the batch is constant, and the data's where it grows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config.tree import RunConfig
from megastable.optim.schedule import progress, rate, rates, total, warmup

KINDS = ("cosine", "linear", "constant", "wsd")


def config(batch: int = 4, warmup: Any = None, **parts: Any) -> RunConfig:
    train = {"global_batch": batch, "batch_warmup": warmup, "steps": parts.pop("steps", 40)}
    model = {"sequence_length": 16, "vocab_size": 250}
    return RunConfig.model_validate({"model": model, "train": train, "schedule": parts})


@settings(deadline=None)
@given(
    st.sampled_from(KINDS), st.integers(0, 20), st.none() | st.integers(1, 30), st.none() | st.integers(1, 60)
)
def test_with_a_constant_batch_it_is_the_schedule_by_steps(
    kind: str, warm: int, decay: int | None, end: int | None
) -> None:
    step = 4 * 16
    tokens = {
        "warmup_tokens": warm * step,
        "decay_tokens": decay and decay * step,
        "total_tokens": end and end * step,
    }
    by_steps = config(kind=kind, warmup_steps=warm, decay_steps=decay, total_steps=end)
    by_tokens = config(kind=kind, **tokens)
    found, wanted = list(rates(by_tokens)), list(rates(by_steps))
    # The default of the final decay is a tenth of the run, in whole steps or in whole tokens.
    if kind != "wsd" or decay is not None:
        assert found == pytest.approx(wanted, rel=1e-12)
    s = by_steps.schedule
    assert wanted == [rate(s, by_steps.optimizer.lr, end or 40, n) for n in range(40)]


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 2000), st.integers(1, 1500), st.integers(1, 5))
def test_it_follows_the_tokens_whatever_the_batch(kind: str, warm: int, ramp: int, start: int) -> None:
    """During a batch warm-up the rate at a position is that of any other batch, but for what the update adds."""
    grown = config(
        6 * start, {"start": start, "tokens": ramp}, kind=kind, warmup_tokens=warm, total_tokens=4000
    )
    cursor, peak = 0, grown.optimizer.lr
    for found in rates(grown):
        tokens, size = cursor * 16, grown.batches.at(cursor) * 16
        assert found == rate(grown.schedule, peak, 4000, tokens, size)
        assert 0 < found <= peak and (
            tokens >= warm or found == pytest.approx(peak * min(1, (tokens + size) / warm))
        )
        cursor += size // 16
    assert cursor * 16 == grown.tokens == total(grown.model_copy(
        update={"schedule": grown.schedule.model_copy(update={"total_tokens": None})}
    ))  # fmt: skip


def test_the_rate_rises_and_falls_once() -> None:
    c = config(8, {"start": 2, "tokens": 900}, warmup_tokens=500, total_tokens=4000, kind="cosine", steps=60)
    found = list(rates(c))
    top = found.index(max(found))
    assert all(a <= b for a, b in pairwise(found[: top + 1])) and all(
        a >= b for a, b in pairwise(found[top:])
    )
    assert found[-1] == pytest.approx(0.1 * max(found), rel=1e-3)


def test_what_a_step_adds() -> None:
    by_tokens, by_steps = config(warmup_tokens=7), config(warmup_steps=7)
    assert (progress(by_tokens.schedule, 3, 90), warmup(by_tokens.schedule)) == (90, 7)
    assert (progress(by_steps.schedule, 3, 90), warmup(by_steps.schedule)) == (3, 7)
