"""What a rank is said to take: against plain counts, and how it must behave. Real steps: bench/test_footprint.py."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.config.tree import RunConfig
from megastable.parallel.layout import Layout
from megastable_tools.plan import activations
from megastable_tools.plan.memory import KINDS, PHASES, Footprint, list_footprints
from megastable_tools.plan.partition import parameter_sizes, stage_bounds, stage_of
from tests.tiers import examples

MODEL = {
    "layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 8, "sequence_length": 2048, "vocab_size": 32000,
}  # fmt: skip


def planned(data: int = 1, micro_batch: int = 1, accumulation: int = 4, **sections: Any) -> list[Footprint]:
    parallel = sections.pop("parallel", {})
    model = MODEL | sections.pop("model", {})
    train = {"micro_batch": micro_batch, "global_batch": micro_batch * accumulation * data}
    config = RunConfig.model_validate({"model": model, "parallel": parallel, "train": train} | sections)
    p = config.parallel
    return list_footprints(config, Layout(p.tensor, p.pipeline, data * p.context, p.context))


def test_footprints_of_one_process() -> None:
    (found,) = planned()
    config = RunConfig.model_validate({"model": MODEL})
    n = sum(map(sum, parameter_sizes(config.model, stage_of(config, stage_bounds(config), 0), 1)))
    # bf16 weights, fp32 sums of gradients, master weights and two moments: 18 bytes a parameter (ZeRO, section 3.1).
    expected = {"weights": 2 * n, "gradients": 4 * n, "master": 4 * n, "moments": 8 * n}
    assert {kind: size for kind, size in found.bytes_at("between").items() if kind in expected} == expected


@pytest.mark.parametrize(("zero", "data", "bytes_each"), [(1, 1, 0), (1, 2, 2), (2, 4, 1), (3, 2, 0)])
def test_footprints_count_weights_that_are_passed_on(zero: int, data: int, bytes_each: float) -> None:
    """ZeRO 1 and 2 send and receive, after an update, a rank's own part of the bf16 weights."""
    (found,) = planned(data, parallel={"zero": zero})
    (single,) = planned()
    parameters = single.bytes_at("between")["weights"] // 2
    passed_on = sum(found.bytes_at("exchange").values()) - sum(found.bytes_at("between").values())
    assert passed_on == pytest.approx(bytes_each * parameters, rel=1e-4)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("zero", [1, 3])
def test_footprints_count_fp8_weights(recompute: str, zero: int) -> None:
    """Two bytes an element, of all blocks of the stage, for a whole step; emulated one, in the passes. Where none are
    kept, those of a micro-batch on its way, or of one recomputed block; emulated none."""
    parallel = {"pipeline": 1 if zero == 3 else 4, "recompute": recompute, "zero": zero}

    def copies(fp8: Any, phase: Any = "backward") -> int:
        found = planned(parallel=parallel, precision={"fp8": fp8})[0]
        fp8_copies = [i for i in found.items if i.name == "FP8 copies of weights"]
        return sum(i.bytes for i in fp8_copies if phase in i.phases)

    config = RunConfig.model_validate({"model": MODEL, "parallel": parallel})
    first = stage_of(config, stage_bounds(config), 0)
    matrices, _ = parameter_sizes(config.model, first, 1)
    blocks = sum(matrices[: 4 * first.blocks])
    is_kept = zero < 3 and recompute != "full"
    assert copies("current") == 2 * (blocks // first.blocks if recompute == "full" else blocks)
    assert copies("current", "update") == 2 * blocks * is_kept
    assert copies("off") == copies({"backend": "emulated"}, "update") == 0
    assert copies({"backend": "emulated"}) == blocks * is_kept
    one = 2 * 1024 * 2816  # mlp.down of one block; 2816 is the default width
    if recompute == "none":
        assert copies("current") - copies({"keep": ["blocks.0.mlp.down"]}) == one


def test_footprints_count_fp8_weights_of_the_experts_of_a_rank() -> None:
    """Casts of three quarters of the experts fewer where four ranks share them out."""

    def copies(expert: int) -> int:
        model = {"experts": {"count": 8, "top_k": 2, "ffn": 64}}
        parallel = {"expert": expert}
        (found,) = planned(4, model=model, parallel=parallel, precision={"fp8": {"backend": "emulated"}})
        return sum(i.bytes for i in found.items if i.name == "FP8 copies of weights")

    assert copies(1) - copies(4) == MODEL["layers"] * 6 * 3 * 1024 * 64


def test_what_an_operation_leaves_is_there_when_the_backward_pass_goes_on() -> None:
    """Three bytes were saved for the last operation, and eight are left of it when the first one needs its four."""
    first, last = (activations.Saved(name, size, 1) for name, size in (("first", 10), ("last", 3)))
    operations = [activations.SavedOperation((first,), 4), activations.SavedOperation((last,), 2, left=8)]
    assert activations.count_backward_bytes(operations) == 8 - 3 + 4


def test_transformer_engine_keeps_for_weight_gradients_what_it_gathers() -> None:
    """The emulation keeps its own part of two inputs of a block, and gathers again; a layer gathered by Transformer
    Engine is whole, in bf16 at most."""
    parallel = {"tensor": 2, "pipeline": 2, "sequence": True, "schedule": "zero_bubble"}

    def kept(fp8: Any) -> int:
        found = planned(parallel=parallel, precision={"fp8": fp8})[1]
        return sum(i.bytes for i in found.items if i.name.startswith("deferred") and "watch" in i.phases)

    config = RunConfig.model_validate({"model": MODEL, "parallel": parallel})
    blocks = stage_of(config, stage_bounds(config), 1).blocks
    assert kept("current") - kept({"backend": "emulated"}) == 2 * (2048 - 1024) * 1024 * 2 * blocks
    assert kept("off") == kept({"backend": "emulated"}) > 0


@pytest.mark.parametrize("chunks", [2, 4])
def test_model_chunks_keep_more_passes(chunks: int) -> None:
    """p (1 + (p - 1) / (p v)) micro-batches on the first stage, where 1F1B has p."""

    def kept(**more: int) -> int:
        model = {"layers": 16, "vocab_size": 1000}
        found = planned(accumulation=16, model=model, parallel={"pipeline": 4} | more)[0]
        return sum(i.bytes for i in found.items if i.name == "gate and up" and "loss" in i.phases)

    assert kept(model_chunks=chunks) == pytest.approx(kept() * (1 + 3 / (4 * chunks)), rel=0.06)


ONE_OF = st.sampled_from
LAYOUT = st.fixed_dictionaries(
    {"tensor": ONE_OF([1, 2, 4]), "pipeline": ONE_OF([1, 2, 4]), "context": ONE_OF([1, 2]),
     "recompute": ONE_OF(["none", "selective", "full"])}
)  # fmt: skip
MODELS = st.fixed_dictionaries(
    {"tied": st.booleans(), "qk_norm": ONE_OF([True, False, "full"]), "norms": ONE_OF(["before", "after"])}
)
KERNELS = st.fixed_dictionaries({"loss": ONE_OF(["chunked", "reference"]), "compile": st.booleans()})
PRECISION = ONE_OF([{"kind": "bf16"}, {"kind": "fp32"}])
SETTINGS = st.fixed_dictionaries({"precision": PRECISION, "kernels": KERNELS, "model": MODELS})


@given(LAYOUT, SETTINGS, st.sampled_from([1, 2]), st.sampled_from([1, 4]))
@settings(max_examples=examples(60), deadline=None)
def test_footprints_add_up(
    layout: dict[str, Any], others: dict[str, Any], data: int, accumulation: int
) -> None:
    one = planned(data, 1, accumulation, parallel=layout, **others)
    two = planned(data, 2, accumulation, parallel=layout, **others)
    for smaller, larger in zip(one, two, strict=True):
        assert all(item.bytes > 0 for item in smaller.items)
        for phase in PHASES:
            assert set(smaller.bytes_at(phase)) == set(KINDS)
            assert sum(smaller.bytes_at(phase).values()) <= smaller.total
        assert smaller.total == sum(smaller.kinds.values())
        assert sum(smaller.bytes_at("layers").values()) > 0 == smaller.bytes_at("layers")["moments"]
        assert smaller.held <= smaller.total < larger.total
        assert smaller.held <= larger.held


def test_restated_constants_are_as_there() -> None:
    from megastable.engine import flatstate, layer_stats, micro_batch_sums
    from megastable.fp8 import scale_factors
    from megastable.model import blocked, ring
    from megastable.model import loss as losses
    from megastable.optim import adamw
    from megastable_tools.plan import memory

    assert (activations.ROWS, activations.KEPT) == (blocked.ROWS, blocked.KEPT)
    assert activations.RING_ELEMENTS == ring.ELEMENTS
    assert (memory.LOSS_BLOCK, memory.SCORES) == (losses.BLOCK, blocked.ELEMENTS)
    assert {"cpu": losses.BLOCK, "cuda": losses.GPU_BLOCK} == memory.ENTROPY_BLOCK
    assert (memory.CHUNK, memory.FP8_CHUNK) == (flatstate.CHUNK, scale_factors.AT_ONCE)
    assert activations.SCORES == layer_stats.SCORES and memory.ALIGN == blocked.ALIGN
    assert (micro_batch_sums.CHUNKS["cpu"], adamw.CHUNKS) == (memory.SUM_CHUNK, memory.UPDATE_CHUNK)
    assert adamw.FUSED_CHUNKS["cpu"] == memory.FUSED_CHUNK
    for length in (128, 256, 300, 1024, 8192):
        config = RunConfig.model_validate({"model": MODEL | {"sequence_length": length}})
        z = activations.shape_sizes_of(config)
        capped = RunConfig.model_validate(
            {"model": MODEL | {"sequence_length": length, "attention_softcap": 50.0}}
        )
        assert activations.count_probabilities(capped, z) == 0
        assert activations.count_probabilities(config, z) == blocked.kept_size(z.samples, z.heads, length, 64)


# Muon has three groups: see the last test.
NAMES = {*get_args(OptimizerConfig.model_fields["name"].annotation)} - {"muon"}


@pytest.mark.parametrize("name", [*sorted(NAMES), "momentum"])
def test_cost_is_the_state_that_an_optimizer_keeps(name: str) -> None:
    from torch import nn

    from megastable.optim.build import build_optimizer
    from megastable.optim.pieces import MOMENTS, PieceOptimizer
    from megastable.parallel.sharding import Placement, set_placement
    from megastable_tools.plan.updates import update_cost_of

    chosen = {"name": "adafactor", "adafactor": {"momentum": 0.9}} if name == "momentum" else {"name": name}
    settings = OptimizerConfig.model_validate(chosen)
    module = nn.Linear(3, 4)
    for name, parameter in module.named_parameters():
        set_placement(parameter, Placement(name), 1)
    optimizer = build_optimizer(module, settings, ModelConfig(), compiled=False)
    matrices, vectors = (
        optimizer.kinds_of(group) if isinstance(optimizer, PieceOptimizer) else MOMENTS
        for group in optimizer.param_groups
    )
    cost = update_cost_of(settings)
    assert (cost.matrices, cost.vectors) == (len(matrices), len(vectors))
    (found,), (adamw,) = planned(optimizer=chosen), planned()
    all_of_adamws = adamw.bytes_at("between")["moments"]
    assert found.bytes_at("between")["moments"] == pytest.approx(
        all_of_adamws * len(matrices) / 2, abs=2e-3 * all_of_adamws
    )
    assert found.host.snapshot == pytest.approx(adamw.host.snapshot * (1 + len(matrices)) / 3, rel=0.3)
