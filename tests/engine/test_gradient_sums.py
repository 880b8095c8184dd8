"""Gradients summed in buckets during the backward pass: the same bytes, messages and verdicts as after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megastable.engine.gradient_sums import GradientSums
from megastable.parallel.layout import BUCKET, cut_into_buckets, limit_bucket
from tests.distributed import run_ranks
from tests.engine.engines import are_same, build_engine, copy_state, take_batch
from tests.parallel.test_layouts import BATCH, LENGTH, VOCABULARY, config

STEPS, LIMIT = 10, 3000  # elements of a bucket: of the smallest model five
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp3": (3, {"batch": 6, "micro_batch": 1}),
    "tp2-dp2": (4, {"tensor": 2}),
    "pp2-dp2": (4, {"pipeline": 2, "micro_batch": 1}),
    "tied-dp2": (2, {"tied": True, "recompute": "full"}),
    "context2": (2, {"context": 2}),
}


def train_twice(parts: dict[str, Any]) -> dict[str, Any]:
    """Of this rank, ten steps with sums during the backward pass and after it; two of them are refused, one measured
    before; and how many sums had begun when each backward pass ended."""
    found: dict[str, Any] = {"begun": [], "buckets": 0}
    finish = GradientSums.finish_sums

    def note_begun(self: GradientSums, *given: Any, **named: Any) -> None:
        found["begun"].append(len(self._works))
        finish(self, *given, **named)

    GradientSums.finish_sums = note_begun  # type: ignore[method-assign]
    states, seen = [], []
    for overlap in (True, False):
        engine = build_engine(config(precision="bf16", **parts), reduce_bucket_size=LIMIT)
        engine.zero.sums.overlap = overlap
        found["buckets"] = len(engine.zero.sums.buckets)
        # Each part of a parameter that this rank updates is averaged once.
        averaged = [place for bucket in engine.zero.sums.buckets for place in bucket.fragments]
        assert sorted(averaged) == sorted((f.group, f.offset) for f in engine.flat_state().fragments)
        random, told = torch.Generator().manual_seed(3), []
        for step in range(STEPS):
            tokens = torch.randint(
                0, VOCABULARY, (engine.config.train.global_batch, LENGTH + 1), generator=random
            )
            batch = take_batch(engine, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None))
            if step == 6:
                before = copy_state(engine)
                told.append(engine.measure_step(batch[:1]).grad_norm)
                assert are_same(before, copy_state(engine))
            measured, applied = engine.train_step(batch, 1e-2, lambda m, step=step: step not in (2, 5))
            assert applied == (step not in (2, 5))
            told.append((measured.losses.tolist(), measured.grad_norm, engine.kept, measured.gradients))
        seen.append(told)
        states.append(copy_state(engine))
    assert seen[0] == seen[1] and are_same(*states)
    return found


@pytest.mark.quick("dp3")
@pytest.mark.parametrize("name", LAYOUTS)
def test_sums_during_the_backward_pass_give_the_same_bytes(name: str) -> None:
    world, parts = LAYOUTS[name]
    for rank in run_ranks(world, train_twice, parts):
        assert rank["buckets"] > 4
        early, late = rank["begun"][: STEPS + 1], rank["begun"][STEPS + 1 :]
        assert early == [rank["buckets"]] * (STEPS + 1) and late == [0] * (STEPS + 1)


def send_too_early(_: None) -> str:
    engine = build_engine(config(precision="bf16"), reduce_bucket_size=LIMIT)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    batch = take_batch(engine, (tokens, tokens, None))
    engine.ds.gradient_accumulation_steps = lambda: 1  # a micro-batch more is to come
    engine._run_forward_and_backward = lambda given: [
        engine.ds.backward(engine.ds(*engine._inputs(m))) for m in given
    ]
    with pytest.raises(RuntimeError, match="came after its sum"):
        engine.train_step(batch, 1e-2, lambda _: True)
    return "refused"


def test_gradient_after_its_sum_is_refused() -> None:
    assert run_ranks(2, send_too_early, None) == ["refused"] * 2


@pytest.mark.parametrize("limit", [1, 5, 9, 100])
def test_buckets_hold_every_parameter_once_from_the_end(limit: int) -> None:
    sizes = [4, 1, 9, 2, 2, 7, 1]
    buckets = cut_into_buckets(sizes, limit)
    assert [number for bucket in reversed(buckets) for number in bucket] == list(range(len(sizes)))
    for bucket, later in zip(buckets[1:], buckets, strict=False):
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= limit
        assert sum(sizes[i] for i in later) + sizes[bucket[-1]] > limit  # none could have been larger
    assert cut_into_buckets([], limit) == []


def test_buckets_grow_with_the_ranks_up_to_what_is_given() -> None:
    assert [limit_bucket(500_000_000, d) for d in (2, 64, 1024)] == [BUCKET, 64_000_000, 500_000_000]
