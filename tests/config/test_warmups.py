"""The warm-ups of batch and length as functions of the position, and what a recipe may not say of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.config.warmups import Stages


def config(length: int = 32, **parts: Any) -> RunConfig:
    tree = {"model": {"sequence_length": length, "vocab_size": 250}} | parts
    return recipe.validate_tree(tree, "test")


@st.composite
def stages(draw: st.DrawFn) -> Stages:
    values = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    firsts = draw(st.lists(st.integers(0, 300), min_size=len(values) - 1, max_size=len(values) - 1))
    return Stages((0, *sorted(firsts)), tuple(values))


@settings(deadline=None)
@given(stages(), st.integers(0, 400), st.integers(0, 60), st.integers(0, 900))
def test_stages_against_a_walk(s: Stages, cursor: int, steps: int, further: int) -> None:
    def naive(position: int) -> int:
        return next(
            v for first, v in reversed(list(zip(s.firsts, s.values, strict=True))) if first <= position
        )

    walked = [cursor]
    for _ in range(steps):
        walked.append(walked[-1] + naive(walked[-1]))
    assert [s.value_at(position) for position in walked] == [naive(position) for position in walked]
    assert [s.reach_after(cursor, n) for n in range(steps + 1)] == walked
    count, at = 0, cursor
    while at + naive(at) <= cursor + further:
        at, count = at + naive(at), count + 1
    assert s.count_steps(cursor, cursor + further) == count and s.count_steps(cursor, cursor - 1) == 0


@settings(deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 10**5),
    st.sampled_from([1, 32, 100]),
)
def test_batches_grow_as_megatrons(start: int, times: int, by: int, tokens: int, length: int) -> None:
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
            assert c.batches.value_at(position) == start + by * min(times, over), position


@settings(deadline=None)
@given(st.integers(1, 6), st.sampled_from([1, 3, 8]), st.integers(1, 10**5))
def test_pieces_are_the_largest_halving_below_linear_pacing(halvings: int, start: int, tokens: int) -> None:
    full = start << halvings
    c = config(full, train={"sequence_warmup": {"start": start, "tokens": tokens}})
    edges = {position + near for position in c.pieces.firsts for near in (-1, 0, 1)}
    for position in {*edges, 0, 10**6} - {-1}:
        paced = min(full, start + (full - start) * position * full / tokens)
        length = c.pieces.value_at(position)
        assert full % length == 0 and (length <= paced + 1e-6 < 2 * length or length == full), position
