"""What a rank is said to take: against plain counts, and how it must behave. Real steps: bench/test_footprint.py."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.config.tree import RunConfig
from megastable.parallel.layout import Layout
from megastable_tools.plan import activations
from megastable_tools.plan.memory import KINDS, PHASES, Footprint, count_taken_bytes, footprints
from megastable_tools.plan.volume import Stage, bounds, parameter_groups, parameters, stage_of
from tests.tiers import examples

MODEL = {
    "layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 8, "sequence_length": 2048, "vocab_size": 32000,
}  # fmt: skip


def planned(data: int = 1, micro_batch: int = 1, accumulation: int = 4, **sections: Any) -> list[Footprint]:
    parallel = sections.pop("parallel", {})
    model = MODEL | sections.pop("model", {})
    tree = {
        "model": model,
        "parallel": parallel,
        "train": {"micro_batch": micro_batch, "global_batch": micro_batch * accumulation * data},
    }
    config = RunConfig.model_validate(tree | sections)
    p = config.parallel
    return footprints(config, Layout(p.tensor, p.pipeline, data * p.context, p.context))


def most(*args: Any, **kwargs: Any) -> int:
    return max(f.total for f in planned(*args, **kwargs))


def test_state_of_one_process() -> None:
    (found,) = planned()
    config = RunConfig.model_validate({"model": MODEL})
    n = sum(map(sum, parameters(config.model, stage_of(bounds(config), 0), 1)))
    # bf16 weights, fp32 sums of gradients, master weights and two moments: 18 bytes a parameter (ZeRO, section 3.1).
    expected = {"weights": 2 * n, "gradients": 4 * n, "master": 4 * n, "moments": 8 * n}
    assert {kind: size for kind, size in found.at("between").items() if kind in expected} == expected


def test_before_the_first_step_zero_3_holds_a_part_and_a_layer() -> None:
    """Bytes of bf16; the largest layer is the embedding, 32,000 x 1,024."""
    (found,) = planned(4, parallel={"zero": 3})
    part = found.at("between")["weights"]
    assert found.at("layers") == dict.fromkeys(KINDS, 0) | {"weights": part + 2 * 32_000 * 1024}
    assert found.host.building == part
    (large,) = planned(4, parallel={"zero": 3}, model={"vocab_size": 1000})
    # A block: queries, keys, values, output, gate and up, down; its norms and those of queries and keys.
    block = 1024 * 2048 + 1024**2 + 3 * 1024 * 2816 + 2 * 1024 + 2 * 64
    assert large.at("layers")["weights"] == large.at("between")["weights"] + 2 * block


@pytest.mark.parametrize(
    ("zero", "kind", "copies", "on_host"),
    [(1, "bf16", 1, 0), (2, "bf16", 1, 2), (1, "fp32", 1, 2), (2, "fp16", 1, 2)],
)
def test_before_the_first_step_the_others_hold_the_weights(
    zero: int, kind: str, copies: int, on_host: int
) -> None:
    """And on the host twice, where DeepSpeed may flatten them there."""
    (found,) = planned(4, parallel={"zero": zero}, precision={"kind": kind})
    weights = found.at("between")["weights"]
    assert found.at("layers") == dict.fromkeys(KINDS, 0) | {"weights": copies * weights}
    assert found.host.building == pytest.approx(on_host * weights, rel=0.001)  # norms are not there twice
    state = found.at("optimizer")
    assert state["moments"] == state["activations"] == 0 and state["master"] == found.kinds["master"]


def test_the_first_stage_has_most_micro_batches_on_their_way() -> None:
    found = planned(parallel={"pipeline": 4}, accumulation=8)
    waiting = [sum(i.bytes for i in f.items if i.name == "gate and up" and "loss" in i.phases) for f in found]
    config = RunConfig.model_validate({"model": MODEL, "parallel": {"pipeline": 4}})
    blocks = [stage_of(bounds(config), s).blocks for s in range(4)]
    each = waiting[3] // blocks[3]
    assert waiting == [each * blocks[s] * (4 - s) for s in range(4)]
    # With fewer micro-batches than stages there are not more on their way than there are.
    few = planned(parallel={"pipeline": 4}, accumulation=2)
    assert sum(i.bytes for i in few[0].items if i.name == "gate and up" and "loss" in i.phases) == (
        each * blocks[0] * 2
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_transformer_engine_keeps_weights_in_fp8_of_every_micro_batch(recompute: str) -> None:
    """Two bytes an element, of all blocks of the stage and the four micro-batches on their way; recomputed: of one."""

    def copies(fp8: Any) -> int:
        found = planned(parallel={"pipeline": 4, "recompute": recompute}, precision={"fp8": fp8})[0]
        return sum(
            i.bytes for i in found.items if i.name == "FP8 copies of weights" and "backward" in i.phases
        )

    config = RunConfig.model_validate({"model": MODEL, "parallel": {"pipeline": 4}})
    first = stage_of(bounds(config), 0)
    matrices, _ = parameters(config.model, first, 1)
    blocks = sum(matrices[: 4 * first.blocks])
    assert copies("current") == 2 * (blocks // first.blocks if recompute == "full" else 4 * blocks)
    assert copies("off") == copies({"backend": "emulated"}) == 0
    one = 2 * 4 * 1024 * 2816  # mlp.down of one block; 2816 is the default width
    if recompute == "none":
        assert copies("current") - copies({"keep": ["blocks.0.mlp.down"]}) == one


LAYOUT = st.fixed_dictionaries(
    {
        "tensor": st.sampled_from([1, 2, 4]),
        "pipeline": st.sampled_from([1, 2, 4]),
        "context": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
    }
)
SETTINGS = st.fixed_dictionaries(
    {
        "precision": st.sampled_from([{"kind": "bf16"}, {"kind": "fp32"}]),
        "kernels": st.fixed_dictionaries(
            {"loss": st.sampled_from(["chunked", "reference"]), "compile": st.booleans()}
        ),
        "model": st.fixed_dictionaries(
            {
                "tied": st.booleans(),
                "qk_norm": st.sampled_from([True, False, "full"]),
                "norms": st.sampled_from(["before", "after"]),
            }
        ),
    }
)


@given(LAYOUT, SETTINGS, st.sampled_from([1, 2]), st.sampled_from([1, 4]))
@settings(max_examples=examples(60), deadline=None)
def test_kinds_add_up_and_more_samples_take_more(
    layout: dict[str, Any], others: dict[str, Any], data: int, accumulation: int
) -> None:
    one = planned(data, 1, accumulation, parallel=layout, **others)
    two = planned(data, 2, accumulation, parallel=layout, **others)
    for smaller, larger in zip(one, two, strict=True):
        assert all(item.bytes > 0 for item in smaller.items)
        for phase in PHASES:
            assert set(smaller.at(phase)) == set(KINDS)
            assert sum(smaller.at(phase).values()) <= smaller.total
        assert smaller.total == sum(smaller.kinds.values())
        assert sum(smaller.at("layers").values()) > 0 == smaller.at("layers")["moments"]
        assert smaller.held <= smaller.total < larger.total
        assert smaller.held <= larger.held


@pytest.mark.parametrize(
    ("size", "pinned", "wanted"), [(0, True, 0), (5, True, 8), (8, True, 8), (5, False, 5)]
)
def test_pinned_memory_is_rounded_up(size: int, pinned: bool, wanted: int) -> None:
    assert count_taken_bytes(size, pinned) == wanted


def test_batches_that_cannot_be_shared_out_are_refused() -> None:
    config = RunConfig.model_validate({"model": MODEL, "train": {"global_batch": 3}})
    with pytest.raises(ConfigError, match="global_batch"):
        footprints(config, Layout(data=2))


def test_what_is_restated_is_as_there() -> None:
    from megastable.base import free_memory
    from megastable.engine import flatstate, layer_stats, patches
    from megastable.fp8 import scale_factors
    from megastable.model import blocked, chunked
    from megastable.optim import adamw
    from megastable_tools.plan import memory

    assert (activations.ROWS, activations.KEPT) == (blocked.ROWS, blocked.KEPT)
    assert (memory.LOSS_BLOCK, memory.SCORES) == (chunked.BLOCK, blocked.ELEMENTS)
    assert {"cpu": chunked.BLOCK, "cuda": chunked.GPU_BLOCK} == memory.ENTROPY_BLOCK
    assert (memory.CHUNK, memory.FP8_CHUNK) == (flatstate.CHUNK, scale_factors.AT_ONCE)
    assert activations.SCORES == layer_stats.SCORES and memory.ALIGN == blocked.ALIGN
    assert (memory.SUM_CHUNK, memory.UPDATE_CHUNK) == (patches.CHUNK, adamw.CHUNKS)
    assert all(
        count_taken_bytes(n, pinned) == free_memory.count_taken_bytes(n, pinned)
        for n in range(40)
        for pinned in (True, False)
    )
    for length in (128, 256, 300, 1024, 8192):
        config = RunConfig.model_validate({"model": MODEL | {"sequence_length": length}})
        z = activations.sizes(config)
        capped = RunConfig.model_validate(
            {"model": MODEL | {"sequence_length": length, "attention_softcap": 50.0}}
        )
        assert activations.probabilities(capped, z) == 0
        assert activations.probabilities(config, z) == blocked.kept_size(z.samples, z.heads, length, 64)


# Muon has three groups: see the last test.
NAMES = {*get_args(OptimizerConfig.model_fields["name"].annotation)} - {"muon"}


@pytest.mark.parametrize("name", [*sorted(NAMES), "momentum"])
def test_state_of_an_optimizer_is_what_it_keeps(name: str) -> None:
    from torch import nn

    from megastable.optim.build import build
    from megastable.optim.pieces import MOMENTS, PieceOptimizer
    from megastable.parallel.sharding import Placement, place
    from megastable_tools.plan.updates import cost

    chosen = {"name": "adafactor", "adafactor": {"momentum": 0.9}} if name == "momentum" else {"name": name}
    settings = OptimizerConfig.model_validate(chosen)
    module = nn.Linear(3, 4)
    for name, parameter in module.named_parameters():
        place(parameter, Placement(name), 1)
    optimizer = build(module, settings, ModelConfig(), compiled=False)
    matrices, vectors = (
        optimizer.kinds_of(group) if isinstance(optimizer, PieceOptimizer) else MOMENTS
        for group in optimizer.param_groups
    )
    assert (cost(settings).matrices, cost(settings).vectors) == (len(matrices), len(vectors))
    (found,), (adamw,) = planned(optimizer=chosen), planned()
    all_of_adamws = adamw.at("between")["moments"]
    assert found.at("between")["moments"] == pytest.approx(
        all_of_adamws * len(matrices) / 2, abs=2e-3 * all_of_adamws
    )
    assert found.host.snapshot == pytest.approx(adamw.host.snapshot * (1 + len(matrices)) / 3, rel=0.3)


def test_torch_is_not_needed() -> None:
    code = "import sys, megastable_tools.plan.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("tied", [False, True])
def test_groups_and_state(tied: bool) -> None:
    from megastable.model.gpt import GPT
    from megastable.optim.build import build
    from megastable.optim.muon import Muon
    from megastable.parallel.topology import TensorParallel

    model = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab_size=250, tied=tied)
    settings = OptimizerConfig(name="muon")
    optimizer = build(GPT(model, TensorParallel(), "none", 1), settings, model, compiled=False)
    assert isinstance(optimizer, Muon)
    kept = [
        (sorted(p.numel() for p in group["params"]), len(optimizer.kinds_of(group)))
        for group in optimizer.param_groups
    ]
    planned = parameter_groups(RunConfig(model=model, optimizer=settings), Stage(2, first=True, last=True))
    assert [(sorted(group.sizes), group.moments) for group in planned] == kept
    assert [moments for _, moments in kept] == [1, 2, 2]
