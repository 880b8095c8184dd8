"""The schedule ZB-H1: the same bytes as 1F1B, weight gradients in their places, and the bubble of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    TrainSchedule,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.pipeline import PipelineCase
from megastable.engine.gradient_sums import GradientSums
from megastable.engine.zero_bubble import WeightPass, ZeroBubbleSchedule
from megastable.parallel.deferred_gradients import DeferredGradients
from tests.distributed import run_ranks
from tests.engine.engines import are_same, build_engine, copy_state, take_batch
from tests.parallel.test_layouts import LENGTH, VOCABULARY, config
from tests.tiers import examples

STEPS, LIMIT = 10, 3000  # elements of a bucket: of the smallest model five
DEFERRED = 4  # products of a block
PP2, PP4, SP2 = {"pipeline": 2}, {"pipeline": 4}, {"tensor": 2, "sequence": True}
# Ranks, and the layout. Only the middle stages of four receive gradients while some are left for later.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp4": (4, PP4 | {"model": {"layers": 5, "qk_norm": True, "qkv_bias": True}}),
    "pp4-two-micro-batches": (4, PP4 | {"batch": 2, "model": {"layers": 4}}),
    "pp2-dp2": (4, PP2),
    "pp2-tp2": (4, PP2 | {"tensor": 2}),
    "pp2-tp2-sequence": (4, PP2 | SP2 | {"recompute": "selective"}),
    "pp2-tp2-chunks": (4, PP2 | SP2 | {"tensor_overlap": 4}),
    "pp2-tp2-chunks-kept-full": (
        4,
        PP2 | SP2 | {"tensor_overlap": 2, "keep_gathered": True, "recompute": "full"},
    ),
    "pp2-tied-full": (2, PP2 | {"tied": True, "recompute": "full"}),
    "pp2-fp8-full": (2, PP2 | {"fp8": "delayed", "recompute": "full"}),
    "pp2-tp2-fp8": (4, PP2 | SP2 | {"fp8": "current"}),
    "pp2-fp32": (2, PP2 | {"precision": "fp32"}),
    "pp2-fp16": (2, PP2 | {"precision": "fp16"}),
}


def train_twice(given_parts: dict[str, Any]) -> dict[str, Any]:
    """Of this rank, ten steps by either schedule; two of them are refused, one is measured and looked at before. How
    many micro-batches had gradients left at each W, how many these were, how many sums had begun when passes ended."""
    from megastable.engine.locators import measure_sizes
    from megastable.engine.rank_checks import digest_gradient

    parts = dict(given_parts)
    fp8, precision = parts.pop("fp8", None), parts.pop("precision", "bf16")
    found: dict[str, Any] = {"left": [], "deferred": set(), "begun": set()}
    finish, compute = GradientSums.finish_sums, DeferredGradients.compute_oldest

    def note_begun(self: GradientSums, *args: Any, **kwargs: Any) -> None:
        found["begun"].add(len(self._works) - len(self.buckets))
        finish(self, *args, **kwargs)

    def note_left(self: DeferredGradients) -> None:
        found["left"].append(len(self._passes))
        found["deferred"].add(len(self._passes[0]))
        compute(self)

    GradientSums.finish_sums = note_begun  # type: ignore[method-assign]
    DeferredGradients.compute_oldest = note_left  # type: ignore[method-assign]
    states, seen = [], []
    for schedule in ("zero_bubble", "1f1b"):
        tree = config(precision=precision, micro_batch=1, schedule=schedule, **parts).model_dump(mode="json")
        if fp8:
            tree["precision"]["fp8"] = {"recipe": fp8, "backend": "emulated"}
        c = type(config()).model_validate(tree)
        engine = build_engine(c, reduce_bucket_size=LIMIT)
        random, told = torch.Generator().manual_seed(3), list[Any]()
        for step in range(STEPS):
            tokens = torch.randint(0, VOCABULARY, (c.train.global_batch, LENGTH + 1), generator=random)
            starts = torch.rand(c.train.global_batch, LENGTH, generator=random) < 0.1
            apart = starts.int().cumsum(1).int() if step > 6 else None  # stages send other tensors then
            batch = take_batch(engine, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), apart))
            if step == 6:
                before = copy_state(engine)
                told += [engine.measure_step(batch[:1]).grad_norm, engine.evaluate_samples(batch).tolist()]
                sizes = measure_sizes(engine, batch)  # weights' gradients are seen later
                told.append(sorted((place._replace(tick=0), size) for place, size in sizes.items()))
                told.append(digest_gradient(engine, batch).total)
                assert are_same(before, copy_state(engine))
            measured, applied = engine.train_step(batch, 1e-2, lambda m, step=step: step not in (2, 5))
            assert applied == (step not in (2, 5)) or precision == "fp16"
            told.append((measured.losses.tolist(), measured.grad_norm, engine.kept, measured.gradients))
        seen.append(told)
        states.append(copy_state(engine))
    assert repr(seen[0]) == repr(seen[1]) and are_same(*states)
    blocks = {name.split(".")[1] for name in engine.flat_state().gather_shards("weight") if "blocks" in name}
    return found | {"stage": engine.topology.stage, "blocks": len(blocks), "batches": len(batch)}


@pytest.mark.quick("pp4-two-micro-batches", "pp2-dp2")
@pytest.mark.parametrize("name", CASES)
def test_gives_the_same_bytes_as_1f1b(name: str) -> None:
    world, parts = CASES[name]
    for rank in run_ranks(world, train_twice, parts):
        # Embeddings, head and norms are not deferred; all that is, is computed in every step, the oldest first.
        assert rank["deferred"] == {DEFERRED * rank["blocks"]}
        stage, batches = rank["stage"], rank["batches"]
        rest = min(stage, batches)
        assert rank["left"][:batches] == [stage + 1] * (batches - rest) + [*range(rest, 0, -1)]
        assert rank["begun"] <= {0}  # a bucket is sent as soon as the last W has filled it


# Without ranks: what the schedule would take


def simulate(orders: list[list[tuple[str, int]]], seconds: dict[str, float]) -> float:
    """Of a step. orders: of every stage, the passes and messages with their micro-batches. A message is received when
    both stages have come to it; only one that sends a gradient goes on."""
    peers = {"SendActivation": "RecvActivation", "RecvActivation": "SendActivation"}
    places, now = [0] * len(orders), [0.0] * len(orders)
    sent: dict[tuple[int, int], float] = {}
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                what, batch = order[places[stage]]
                if what in seconds:
                    now[stage] += seconds[what]
                elif what == "SendGrad":
                    sent[stage, batch] = now[stage]
                elif what == "RecvGrad":
                    if (stage + 1, batch) not in sent:
                        break
                    now[stage] = max(now[stage], sent[stage + 1, batch])
                else:
                    other = stage + 1 if what == "SendActivation" else stage - 1
                    if orders[other][places[other] :][:1] != [(peers[what], batch)]:
                        break
                    now[stage] = now[other] = max(now[stage], now[other])
                    places[other] += 1
                places[stage] += 1
        assert places != before, "the stages wait for each other"
    return max(now)


def list_order(stages: int, batches: int, stage: int, kind: type[TrainSchedule]) -> list[tuple[str, int]]:
    """What this stage does, in its order; micro-batches are counted, as buffers are used again."""
    numbers: dict[str, int] = {}
    order = []
    kinds = ForwardPass, BackwardPass, WeightPass, SendActivation, RecvActivation, SendGrad, RecvGrad
    for instructions in kind(batches, stages, stage):
        for name in [type(i).__name__ for i in instructions if isinstance(i, kinds)]:
            order.append((name, numbers.get(name, 0)))
            numbers[name] = numbers.get(name, 0) + 1
    return order


@given(
    st.integers(2, 6),
    st.integers(1, 12),
    st.floats(0.1, 2),
    st.floats(0.1, 2),
    st.floats(0, 1),
    st.booleans(),
)
@settings(deadline=None, max_examples=examples(100))
def test_bubble_is_that_of_the_formula(
    stages: int, more: int, forward: float, backward: float, part: float, is_split: bool
) -> None:
    """The formula of ZB-H1 holds for weight passes that are no longer than the others."""
    weight, batches = part * min(forward, backward), stages + more - 1
    seconds = {"ForwardPass": forward, "BackwardPass": backward, "WeightPass": weight}
    if not is_split:
        seconds["BackwardPass"] += weight
    kind = ZeroBubbleSchedule if is_split else TrainSchedule
    orders = [list_order(stages, batches, stage, kind) for stage in range(stages)]
    for order in orders:
        passes = [what for what, _ in order]
        assert {passes.count(what) for what in seconds if is_split or what != "WeightPass"} == {batches}
    case = PipelineCase(stages, batches, forward, backward, weight)
    expected = case.working + case.predict_bubble("zero_bubble" if is_split else "1f1b")
    assert simulate(orders, seconds) == pytest.approx(expected)
