"""The warm-ups of batch and length as functions of the position, and what a recipe may not say of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.config import recipe
from megastable.config.deepspeed_json import accumulation, data_parallel
from megastable.config.tree import RunConfig
from megastable.config.warmups import Stages


def config(length: int = 32, **parts: Any) -> RunConfig:
    tree = {"model": {"sequence_length": length, "vocab_size": 250}} | parts
    return recipe.validate(tree, "test")


@st.composite
def stages(draw: st.DrawFn) -> Stages:
    values = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    firsts = draw(st.lists(st.integers(0, 300), min_size=len(values) - 1, max_size=len(values) - 1))
    return Stages((0, *sorted(firsts)), tuple(values))


@settings(deadline=None)
@given(stages(), st.integers(0, 400), st.integers(0, 60), st.integers(0, 900))
def test_cursors_against_a_walk(s: Stages, cursor: int, steps: int, further: int) -> None:
    def naive(position: int) -> int:
        return next(
            v for first, v in reversed(list(zip(s.firsts, s.values, strict=True))) if first <= position
        )

    walked = [cursor]
    for _ in range(steps):
        walked.append(walked[-1] + naive(walked[-1]))
    assert [s.at(position) for position in walked] == [naive(position) for position in walked]
    assert [s.reach(cursor, n) for n in range(steps + 1)] == walked
    count, at = 0, cursor
    while at + naive(at) <= cursor + further:
        at, count = at + naive(at), count + 1
    assert s.steps(cursor, cursor + further) == count and s.steps(cursor, cursor - 1) == 0


@settings(deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 10**5),
    st.sampled_from([1, 32, 100]),
)
def test_the_batch_grows_as_megatrons(start: int, times: int, by: int, tokens: int, length: int) -> None:
    """Megatron-LM's num_microbatches_calculator: so many whole intervals of samples are over, so many increments."""
    full = start + times * by
    c = config(length, train={
        "global_batch": full, "batch_warmup": {"start": start, "increment": by, "tokens": tokens},
    })  # fmt: skip
    around = {
        p
        for i in range(times + 1)
        for p in range(i * tokens // times // length - 1, i * tokens // times // length + 2)
    }
    for position in around | {0, 10**6}:
        if position >= 0:
            over = position * length * times // tokens
            assert c.batches.at(position) == start + by * min(times, over), position


@settings(deadline=None)
@given(st.integers(1, 6), st.sampled_from([1, 3, 8]), st.integers(1, 10**5))
def test_pieces_are_the_largest_halving_below_linear_pacing(halvings: int, start: int, tokens: int) -> None:
    full = start << halvings
    c = config(full, train={"sequence_warmup": {"start": start, "tokens": tokens}})
    edges = {position + near for position in c.pieces.firsts for near in (-1, 0, 1)}
    for position in {*edges, 0, 10**6} - {-1}:
        paced = min(full, start + (full - start) * position * full / tokens)
        length = c.pieces.at(position)
        assert full % length == 0 and (length <= paced + 1e-6 < 2 * length or length == full), position


def test_without_a_warmup_all_is_constant() -> None:
    c = config()
    assert c.batches == Stages.constant(64) and c.pieces == Stages.constant(32) and not c.segmented
    assert c.tokens == 64 * 32 * c.train.steps
    assert config(train={"sequence_warmup": {"start": 8, "tokens": 1}}).segmented


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ({"batch_warmup": {"start": 64, "tokens": 9}}, "start=64 by 64 the batch never grows to train.global_batch=64"),
        ({"batch_warmup": {"start": 24, "tokens": 9}}, "an increment that divides the difference"),
        ({"batch_warmup": {"start": 8, "increment": 16, "tokens": 9}}, "start=8 by 16 the batch never grows"),
        ({"batch_warmup": {"start": 8, "tokens": 9}, "micro_batch": 16}, "micro_batch=16 does not divide start=8"),
        ({"batch_warmup": {"start": 8, "tokens": 0}}, "train.batch_warmup.tokens"),
        ({"sequence_warmup": {"start": 32, "tokens": 9}}, "choose one of 16, 8, 4, 2, 1"),
        ({"sequence_warmup": {"start": 12, "tokens": 9}}, "model.sequence_length=32 must be start times a power of 2"),
        ({"sequence_warmup": {"start": 64, "tokens": 9}}, "model.sequence_length=32 must be start times a power of 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(train: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(train=train)


def test_every_batch_must_divide_over_the_ranks() -> None:
    c = config(train={"batch_warmup": {"start": 8, "tokens": 900}, "micro_batch": 4})
    assert (data_parallel(c, 2), accumulation(c, 2)) == (2, 8)
    with pytest.raises(ConfigError) as error:
        data_parallel(c, 4)
    assert str(error.value) == (
        "train.batch_warmup: batches of 8, 24, 40, 56 occur, which are not multiples of train.micro_batch=4 x 4 "
        "data-parallel ranks: make start and increment multiples of 16, or run on fewer ranks until the warm-up is over"
    )
    shared = config(
        train={"batch_warmup": {"start": 8, "tokens": 900}, "micro_batch": 4}, parallel={"context": 2},
        model={"sequence_length": 32, "vocab_size": 250},
    )  # fmt: skip
    assert data_parallel(shared, 4) == 4  # two of them share their samples


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ({"warmup_tokens": 9, "warmup_steps": 9}, "set warmup_steps=null"),
        ({"warmup_tokens": 9, "total_steps": 9}, "set total_steps=null and give total_tokens"),
        ({"warmup_tokens": 9, "decay_steps": 9}, "set decay_steps=null and give decay_tokens"),
        ({"total_tokens": 9}, "total_tokens counts tokens: give warmup_tokens"),
        ({"decay_tokens": 9, "total_steps": 9}, "decay_tokens counts tokens: give warmup_tokens"),
        ({"warmup_steps": None}, "the length of the warm-up is missing"),
    ],
)
def test_a_schedule_has_one_clock(schedule: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(schedule=schedule)


def test_a_frozen_schedule_by_tokens_is_read_again() -> None:
    c = config(schedule={"warmup_tokens": 0, "kind": "wsd", "decay_tokens": 7, "total_tokens": 90})
    assert c.schedule.by_tokens and recipe.validate(c.model_dump(mode="json"), "again") == c
