"""Our FP8 against the real Transformer Engine, its libraries loaded: how its modules are made and what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megastable.config.tree import RunConfig
from megastable.fp8 import te
from megastable.model.gpt import GPT
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import TensorParallel

library = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed here")

CPU = torch.device("cpu")
FORWARD, BACKWARD = "scaling_fwd", "scaling_bwd"


def config(fp8: dict[str, Any], parallel: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    shape = dict(layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, sequence_length=128, vocab_size=500)
    return RunConfig.model_validate(
        {
            "model": shape | model,
            "precision": {"fp8": {"backend": "te", **fp8}},
            "train": {"global_batch": 4, "micro_batch": 2},
            "parallel": parallel or {},
        }
    )


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What delayed scaling allocates on the GPU lies on the CPU."""
    from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

    made = DelayedScalingRecipeState.__init__

    def on_cpu(self: Any, recipe: Any, **told: Any) -> None:
        made(self, recipe, **told | {"device": CPU})

    monkeypatch.setattr(DelayedScalingRecipeState, "__init__", on_cpu)


def its(module: nn.Module) -> list[str]:
    return [type(m).__name__ for m in module.modules() if type(m).__module__.startswith("transformer_engine")]


def known(module: nn.Module) -> list[tuple[int, str, Any]]:
    return [(id(p), placement_of(p).name, vars(p)["tensor_model_parallel"]) for p in module.parameters()]


FUSED = ["LayerNormLinear", "Linear", "LayerNormMLP"]
HALF = ["LayerNormLinear", "Linear", "LayerNormLinear", "Linear"]


@pytest.mark.parametrize(
    ("model_of", "wanted"),
    [
        ({}, FUSED),
        ({"norms": "after"}, ["Linear"] * 4),
        ({"norms": "both", "zero_centered_norms": True}, FUSED),
        ({"norms": "deep"}, ["Linear"] * 4),
        ({"activation": "gelu"}, HALF),
    ],
    ids=str,
)
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_its_modules_hold_our_parameters(recipe: str, model_of: dict[str, Any], wanted: list[str]) -> None:
    """its modules take our parameters, the very ones, in their order and with their marks"""
    c = config({"recipe": recipe}, **model_of)
    model = GPT(c.model, TensorParallel(), "none", 1)
    before = known(model)
    fp8 = te.apply_transformer_engine(model, c, None, CPU)
    assert known(model) == before
    assert not any(p.is_meta for p in model.parameters())
    assert its(model[1]) == wanted
    for part in model[1].modules():
        if hasattr(part, "layer_norm_weight"):
            assert part.zero_centered_gamma == c.model.zero_centered_norms
    assert len(fp8.layers) == 8


@pytest.mark.parametrize("norms", ["before", "after"])
def test_its_store_of_weight_gradients_is_ours(norms: str) -> None:
    """where its modules keep what they delay, ours is in its place"""
    c = config({"recipe": "current"}, {"pipeline": 2, "schedule": "zero_bubble"}, norms=norms)
    model = GPT(c.model, TensorParallel(), "none", 1)
    fp8 = te.apply_transformer_engine(model, c, None, CPU)
    assert isinstance(fp8, te.TransformerEngine)
    for one in fp8._fitted:
        assert isinstance(one.module.wgrad_store, te.LateGradients) and one.module.need_backward_dw()


@pytest.mark.parametrize("norms", ["before", "after"])
def test_delayed_scales_stay_ours(norms: str) -> None:
    """its quantizers read and raise our cells of delayed scaling, also after FP8 was off and on again"""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    c = config({"recipe": "delayed"}, norms=norms)
    model = GPT(c.model, TensorParallel(), "none", 1)
    fp8 = te.apply_transformer_engine(model, c, None, CPU)
    assert isinstance(fp8, te.TransformerEngine) and fp8._meters is not None
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16)  # as DeepSpeed does it later
    for on in (True, False, True):
        fp8.on = on
        with fp8.computing():
            for one in fp8._fitted:
                # What its forward asks before every product.
                one.module.init_fp8_metadata(num_gemms=len(one.layers))
        if not on:
            continue
        for one in fp8._fitted:
            for number, layer in enumerate(one.layers):
                row = fp8._meters.names.index(layer)
                quantizers = one.module.quantizers
                cells = (
                    quantizers[FORWARD][3 * number],
                    quantizers[FORWARD][3 * number + 1],
                    quantizers[BACKWARD][2 * number],
                )
                for slot, cell in enumerate(cells):
                    assert cell.scale.data_ptr() == fp8._scales[row, slot].data_ptr()
                    assert cell.amax.data_ptr() == fp8._meters.seen[row, slot].data_ptr()
    assert not FP8GlobalStateManager.quantization_state.global_amax_buffer  # it sums none of them
