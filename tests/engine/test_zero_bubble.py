"""The schedule ZB-H1: the same bytes as 1F1B, weight gradients at their places, and bubbles as by the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megastable.engine.gradient_sums import GradientSums
from megastable.parallel import deferred_gradients
from tests.distributed import run_ranks
from tests.engine.engines import are_same, build_engine, copy_state, take_batch
from tests.parallel.test_layouts import LENGTH, VOCABULARY, config

STEPS, LIMIT = 10, 3000  # elements of a bucket: of the smallest model five
ONE = {"micro_batch": 1}
# Ranks; the layout; how many weights of a stage's blocks have their gradients deferred, by stage.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2-dp2": (4, {"pipeline": 2} | ONE),
    "pp4": (4, {"pipeline": 4, "model": {"layers": 5, "qk_norm": True, "qkv_bias": True}} | ONE),
    "pp4-two-micro-batches": (4, {"pipeline": 4, "batch": 2, "model": {"layers": 4}} | ONE),
    "pp2-tp2": (4, {"pipeline": 2, "tensor": 2} | ONE),
    "pp2-tp2-sequence": (4, {"pipeline": 2, "tensor": 2, "sequence": True, "recompute": "selective"} | ONE),
    "pp2-tied-full": (2, {"pipeline": 2, "tied": True, "recompute": "full"} | ONE),
    "pp2-fp8-full": (2, {"pipeline": 2, "fp8": "delayed", "recompute": "full"} | ONE),
    "pp2-tp2-fp8": (4, {"pipeline": 2, "tensor": 2, "sequence": True, "fp8": "current"} | ONE),
    "pp2-fp32": (2, {"pipeline": 2, "precision": "fp32"} | ONE),
    "pp2-fp16": (2, {"pipeline": 2, "precision": "fp16"} | ONE),
}


def train_twice(parts: dict[str, Any]) -> dict[str, Any]:
    """Of this rank, ten steps by either schedule; two of them are refused, one measured before, one evaluated; what
    was deferred, and how many sums had begun when the passes ended."""
    parts = dict(parts)
    fp8, precision = parts.pop("fp8", None), parts.pop("precision", "bf16")
    found: dict[str, Any] = {"begun": [], "passes": [], "deferred": []}
    finish = GradientSums.finish_sums
    compute = deferred_gradients.DeferredGradients.compute_oldest

    def note_begun(self: GradientSums, *given: Any, **named: Any) -> None:
        found["begun"].append((len(self._works), len(self.buckets)))
        finish(self, *given, **named)

    def note_pass(self: Any) -> None:
        found["passes"].append(len(self._passes))
        found["deferred"].append(len(self._passes[0]))
        compute(self)

    GradientSums.finish_sums = note_begun  # type: ignore[method-assign]
    deferred_gradients.DeferredGradients.compute_oldest = note_pass  # type: ignore[method-assign]
    states, seen = [], []
    for schedule in ("zero_bubble", "1f1b"):
        c = config(precision=precision, schedule=schedule, **parts)
        if fp8:
            tree = c.model_dump(mode="json")
            tree["precision"]["fp8"] = {"recipe": fp8, "backend": "emulated"}
            c = type(c).model_validate(tree)
        engine = build_engine(c, reduce_bucket_size=LIMIT)
        random, told = torch.Generator().manual_seed(3), []
        for step in range(STEPS):
            tokens = torch.randint(0, VOCABULARY, (c.train.global_batch, LENGTH + 1), generator=random)
            starts = (torch.rand(c.train.global_batch, LENGTH, generator=random) < 0.1).int().cumsum(1).int()
            apart = starts if step > 6 else None  # the stages send other tensors then
            batch = take_batch(engine, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), apart))
            if step == 6:
                before = copy_state(engine)
                told.append(engine.measure_step(batch[:1]).grad_norm)
                told.append(engine.evaluate_samples(batch).tolist())
                assert are_same(before, copy_state(engine))
            measured, applied = engine.train_step(batch, 1e-2, lambda m, step=step: step not in (2, 5))
            assert applied == (step not in (2, 5)) or precision == "fp16"
            told.append((measured.losses.tolist(), measured.grad_norm, engine.kept, measured.gradients))
        seen.append(told)
        states.append(copy_state(engine))
        assert deferred_gradients._collected is None
    open(f'/tmp/wt/sim/diff{engine.topology.rank}', 'w').write('\n'.join(f'{n} {a}\n{b}' for n, (a, b) in enumerate(zip(*seen)) if a != b))
    assert repr(seen[0]) == repr(seen[1]), [(n, a, b) for n, (a, b) in enumerate(zip(*seen)) if a != b][:1]
    assert are_same(*states), [k for k in states[0] if not torch.equal(states[0][k], states[1][k])]
    return found | {"stage": engine.topology.stage, "blocks": len(engine.probe.blocks) if hasattr(engine.probe, "blocks") else None}


@pytest.mark.quick("pp2-dp2")
@pytest.mark.parametrize("name", CASES)
def test_same_bytes_as_1f1b(name: str) -> None:
    world, parts = CASES[name]
    for rank in run_ranks(world, train_twice, parts):
        print(rank)
