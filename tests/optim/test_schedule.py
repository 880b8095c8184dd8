"""The learning rate: where it begins, peaks and ends, and what it never does."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config.tree import RunConfig, ScheduleConfig
from megastable.optim.schedule import find_decay_end, rate_at
from megastable.optim.schedule import list_rates as rates_of_run
from tests.tiers import examples

PEAK, TOTAL, WARMUP = 2e-3, 1000, 100
KINDS = ["cosine", "linear", "constant", "wsd"]


def schedule(kind: str, **changes: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate({"kind": kind, "warmup_steps": WARMUP, "floor": 0.1, **changes})


def rates(kind: str, upto: int = TOTAL + 1, **changes: Any) -> list[float]:
    return [rate_at(schedule(kind, **changes), PEAK, TOTAL, n) for n in range(upto)]


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_is_linear_and_never_zero(kind: str) -> None:
    """The first update moves already, and the last one of the warm-up is at the peak."""
    found = rates(kind)[:WARMUP]
    assert found == pytest.approx([PEAK * (n + 1) / WARMUP for n in range(WARMUP)])


@pytest.mark.parametrize(("kind", "end"), [("cosine", 0.1), ("linear", 0.1), ("wsd", 0.1), ("constant", 1.0)])
def test_it_ends_at_the_floor_and_stays(kind: str, end: float) -> None:
    found = rates(kind, TOTAL + 500)
    assert found[TOTAL] == pytest.approx(PEAK * end)
    assert found[TOTAL:] == pytest.approx([PEAK * end] * 500)


@pytest.mark.parametrize(("decay", "begin"), [(None, 900), (250, 750), (5000, WARMUP)])
def test_wsd_stays_at_the_peak_until_its_decay(decay: int | None, begin: int) -> None:
    """A tenth of the run unless said, and never into the warm-up."""
    found = rates("wsd", decay_steps=decay)
    assert set(found[WARMUP : begin + 1]) == {PEAK}
    wanted = [PEAK * (1 - 0.9 * (n - begin) / (TOTAL - begin)) for n in range(begin, TOTAL + 1)]
    assert found[begin:] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("decay", "left"),
    [
        ("linear", [1, 0.75, 0.5, 0]),
        ("sqrt", [1, 0.5, 1 - math.sqrt(0.5), 0]),
        ("cosine", [1, (1 + math.sqrt(0.5)) / 2, 0.5, 0]),
    ],
)
def test_shapes_of_the_final_decay(decay: str, left: list[float]) -> None:
    """After none, a quarter, a half and all of it; other kinds ignore the key."""
    found = rates("wsd", decay_steps=400, decay=decay)
    assert [found[n] for n in (600, 700, 800, 1000)] == pytest.approx([PEAK * (0.1 + 0.9 * x) for x in left])
    assert all(rates(kind, decay=decay) == rates(kind) for kind in ("cosine", "linear", "constant"))


@settings(deadline=None, max_examples=examples(300))
@given(
    st.sampled_from(KINDS),
    st.integers(0, 300),
    st.just(0.0) | st.floats(1e-30, 1),
    st.one_of(st.none(), st.integers(1, 2000)),
    st.integers(1, 1000),
    st.integers(0, 3000),
    st.floats(1e-8, 1.0),
)
def test_always_between_nothing_and_the_peak(
    kind: str, warmup: int, floor: float, decay: int | None, total: int, updates: int, peak: float
) -> None:
    """A run that is shorter than its warm-up included."""
    s = schedule(kind, warmup_steps=warmup, floor=floor, decay_steps=decay)
    found = rate_at(s, peak, total, updates)
    assert 0 <= found <= peak * (1 + 1e-12)
    if updates < warmup:
        assert found > 0
    else:
        assert found >= peak * floor * (1 - 1e-12)
    if updates > max(total, warmup) and kind != "constant":
        assert found == pytest.approx(peak * floor)


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
    found, wanted = list(rates_of_run(by_tokens)), list(rates_of_run(by_steps))
    # The default of the final decay is a tenth of the run, in whole steps or in whole tokens.
    if kind != "wsd" or decay is not None:
        assert found == pytest.approx(wanted, rel=1e-12)
    s = by_steps.schedule
    assert wanted == [rate_at(s, by_steps.optimizer.lr, end or 40, n) for n in range(40)]


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 2000), st.integers(1, 1500), st.integers(1, 5))
def test_it_follows_the_tokens_whatever_the_batch(kind: str, warm: int, ramp: int, start: int) -> None:
    """During a batch warm-up the rate at a position is that of any other batch, but for what the update adds."""
    grown = config(
        6 * start, {"start": start, "tokens": ramp}, kind=kind, warmup_tokens=warm, total_tokens=4000
    )
    cursor, peak = 0, grown.optimizer.lr
    for found in rates_of_run(grown):
        tokens, size = cursor * 16, grown.batches.value_at(cursor) * 16
        assert found == rate_at(grown.schedule, peak, 4000, tokens, size)
        assert 0 < found <= peak and (
            tokens >= warm or found == pytest.approx(peak * min(1, (tokens + size) / warm))
        )
        cursor += size // 16
    assert cursor * 16 == grown.tokens == find_decay_end(grown.model_copy(
        update={"schedule": grown.schedule.model_copy(update={"total_tokens": None})}
    ))  # fmt: skip
