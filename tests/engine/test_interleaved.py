"""Interleaved 1F1B: the same bytes as 1F1B, the passes in an order without deadlocks, and the bubble of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.engine.engines import build_engine, copy_state, take_batch
from tests.parallel.test_layouts import LENGTH, VOCABULARY, config

STEPS, LIMIT = 8, 3000  # elements of a bucket: of the smallest model five
PP2 = {"pipeline": 2, "model": {"layers": 5}}
SP2 = {"tensor": 2, "sequence": True}
# Ranks, chunks of a stage, and the layout.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp2": (2, 2, PP2),
    "pp2-five-chunks": (2, 5, {"pipeline": 2, "model": {"layers": 10, "qk_norm": True}, "batch": 5}),
    "pp2-one-micro-batch": (2, 2, PP2 | {"batch": 1}),
    "pp3-two-left": (3, 2, {"pipeline": 3, "model": {"layers": 6}}),  # an odd ring, and 8 micro-batches
    "pp4": (4, 2, {"pipeline": 4, "model": {"layers": 8}}),
    "pp4-one-left": (4, 2, {"pipeline": 4, "model": {"layers": 8}, "batch": 9}),
    "pp2-dp2": (4, 2, PP2),
    "pp2-tp2-sequence": (4, 2, PP2 | SP2 | {"recompute": "selective"}),
    "pp2-tp2-overlap": (4, 2, PP2 | SP2 | {"tensor_overlap": 2}),
    "pp2-tied-full": (2, 2, PP2 | {"tied": True, "recompute": "full"}),
    "pp2-tied-dp2": (4, 2, PP2 | {"tied": True}),
    "pp2-fp8": (2, 2, PP2 | {"fp8": "delayed"}),
    "pp2-fp32": (2, 2, PP2 | {"precision": "fp32"}),
    "pp2-fp16": (2, 2, PP2 | {"precision": "fp16"}),
}


def train_twice(chunks: int, given_parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Of this rank, steps of interleaved 1F1B and of 1F1B; two are refused, one is measured and looked at before."""
    from megastable.engine.gradient_sums import GradientSums
    from megastable.engine.locators import measure_sizes

    parts = dict(given_parts)
    fp8, precision = parts.pop("fp8", None), parts.pop("precision", "bf16")
    begun, finish = set(), GradientSums.finish_sums

    def note_begun(self: GradientSums, *args: Any, **kwargs: Any) -> None:
        begun.add(len(self._works) - len(self.buckets))
        finish(self, *args, **kwargs)

    GradientSums.finish_sums = note_begun  # type: ignore[method-assign]
    found = []
    for model_chunks in (chunks, 1):
        begun.clear()
        tree = config(precision=precision, micro_batch=1, model_chunks=model_chunks, **parts)
        tree = tree.model_dump(mode="json")
        tree["optimizer"]["clip"] = 1e6  # other ranks hold a layer, and the norm is summed in another order
        if fp8:
            tree["precision"]["fp8"] = {"recipe": fp8, "backend": "emulated"}
        c = type(config()).model_validate(tree)
        engine = build_engine(c, reduce_bucket_size=LIMIT)
        random, exact, norms = torch.Generator().manual_seed(3), list[Any](), list[float]()
        for step in range(STEPS):
            tokens = torch.randint(0, VOCABULARY, (c.train.global_batch, LENGTH + 1), generator=random)
            starts = torch.rand(c.train.global_batch, LENGTH, generator=random) < 0.1
            apart = starts.int().cumsum(1).int() if step > 4 else None  # stages send other tensors then
            batch = take_batch(engine, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), apart))
            if step == 4:
                before = copy_state(engine)
                norms.append(engine.measure_step(batch[:1]).grad_norm)
                exact.append(engine.evaluate_samples(batch).tolist())
                sizes = measure_sizes(engine, batch)
                exact.append(sorted((place._replace(tick=0), size) for place, size in sizes.items()))
                after = copy_state(engine)
                assert all(torch.equal(t, after[name]) for name, t in before.items())
            measured, applied = engine.train_step(batch, 1e-2, lambda m, step=step: step not in (2, 3))
            assert applied == (step not in (2, 3)) or precision == "fp16"
            exact.append((measured.losses.tolist(), applied))
            norms.append(measured.grad_norm)
        blocks = {name.split(".")[1] for name in engine.flat_state().gather_shards("weight") if "blocks" in name}
        shards = {
            f"{engine.topology.tensor_rank}/{kind}/{name}": t
            for kind in ("weight", "exp_avg", "exp_avg_sq")
            for name, t in engine.flat_state().gather_shards(kind).items()
        }
        chunks_held = [[name for name, _ in one.named_parameters()] for one in engine.ds.module.chunks]
        found.append(
            {"exact": exact, "norms": norms, "shards": shards, "blocks": blocks, "begun": set(begun), "held": chunks_held}
        )
    return found


@pytest.mark.quick("pp2", "pp2-dp2")
@pytest.mark.parametrize("name", CASES)
def test_gives_the_same_bytes_as_1f1b(name: str) -> None:
    world, chunks, parts = CASES[name]
    ranks = run_ranks(world, train_twice, chunks, parts)
    shards: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for rank in ranks:
        interleaved, plain = rank
        assert repr(interleaved["exact"]) == repr(plain["exact"])
        assert interleaved["norms"] == pytest.approx(plain["norms"], rel=1e-6)
        assert len(interleaved["held"]) == chunks and all(interleaved["held"])
        assert interleaved["begun"] <= {0}  # a bucket is sent as soon as the last chunk's pass has filled it
        for whole, part in zip(shards, rank, strict=True):
            whole.update(part["shards"])
    assert ranks[0][0]["blocks"] != ranks[0][1]["blocks"]  # stages hold other blocks
    assert shards[0].keys() == shards[1].keys()
    assert all(torch.equal(t, shards[1][key]) for key, t in shards[0].items())
