"""The whole model in one process: against tests/reference.py, under recomputation, and who may see whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from megastable.config.model import ModelConfig
from megastable.model import gpt
from megastable.model.block_parts import keys_of_samples
from megastable.model.gpt import GPT
from megastable.model.init import initialise_weights
from megastable.model.kernels import PLAIN, Kernels
from megastable.model.loss import LossFunction
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import TensorParallel
from tests import reference
from tests.parallel.compiling import without_kernels
from tests.shapes import shape_of

VOCABULARY, LENGTH, BATCH, Z = 50, 24, 3, 0.01
# Of the four pairs of a head one is kept, one blended, two are divided.
LLAMA_3 = {"kind": "llama3", "factor": 8.0, "original_length": 16}
YARN = {"kind": "yarn", "factor": 8.0, "original_length": 64, "beta_fast": 8.0}
UPDATES = 3  # of `norms=branch`
GEMMA_2: dict[str, Any] = dict(
    norms="both", zero_centered_norms=True, activation="gelu", embedding_scale="sqrt_hidden", tied=True, qk_norm=False,
    attention_scale=0.2, attention_softcap=2.0, logit_softcap=5.0, window=7, full_attention_every=2,
)  # fmt: skip


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = dict(
        layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, sequence_length=LENGTH, vocab_size=VOCABULARY,
        vocab_multiple=32, init_std=0.2, z_loss=Z,
    )  # fmt: skip
    return ModelConfig(**fields | changes)


def build(
    c: ModelConfig, recompute: str = "none", dtype: torch.dtype = torch.float32, kernels: Kernels = PLAIN
) -> GPT:
    loss = LossFunction(VOCABULARY, c.z_loss, TensorParallel(), cap=c.logit_softcap)
    model = GPT(c, TensorParallel(), recompute, seed=7, loss=loss, kernels=kernels).to(dtype)
    gpt.set_updates(model, c, UPDATES)
    with torch.no_grad():  # norms start at one: their gradients are a weaker test there
        for index, p in enumerate(model.parameters()):
            if p.dim() == 1:
                p.copy_(1 + 0.3 * torch.sin(torch.arange(len(p)) + index))
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels, segments, each [b, s]."""
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=g)
    segments = (torch.rand(BATCH, LENGTH, generator=g) < 0.2).int().cumsum(1).int()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), segments


def stream(tokens: Tensor, segments: Tensor | None) -> gpt.Stream:
    return tokens if segments is None else (tokens, segments)


def gradients(model: GPT, inputs: gpt.Stream, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(inputs, labels)
    loss.backward()
    grads = {placement_of(p).name: p.grad for p in model.parameters() if p.grad is not None}
    assert len(grads) == len(list(model.parameters()))
    return loss.detach(), grads


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "wide-heads": {"kv_heads": None, "head_dim": 16},
    "olmo2": {"qk_norm": "full", "norms": "after"},
    "full-qk-norm": {"qk_norm": "full", "head_dim": 16},
    "qwen2": {"qk_norm": False, "qkv_bias": True},
    "biases-and-norms": {"qkv_bias": True, "qk_norm": "full"},
    "linear-rope": {"rope_scaling": {"kind": "linear", "factor": 4}},
    "llama3-rope": {"rope_scaling": LLAMA_3, "rope_theta": 300.0},
    "yarn-rope": {"rope_scaling": YARN, "rope_theta": 300.0},
    "both": {"norms": "both"},
    "mixed": {"norms": "mixed", "mixed_share": 0.5, "residual_init": "same"},
    "deep": {"norms": "deep", "init": "xavier"},
    "branch": {"norms": "branch", "branch_steps": 10},
    "norm-scaling": {"norm_scaling": True},
    "zero-centered": {"zero_centered_norms": True, "qk_norm": "full"},
    "windows-and-cap": {"window": 5, "full_attention_every": 2, "attention_softcap": 1.5},
    "logit-cap": {"logit_softcap": 2.0},
    "clamp": {"swiglu_clamp": 0.3},
    "gelu": {"activation": "gelu", "swiglu_clamp": 0.3},
    "scales": {"attention_scale": 0.1, "embedding_scale": 3.0},
    "mup": {"mup": {"base_width": 8, "base_layers": 1, "base_head_dim": 2}},
    "gemma2": GEMMA_2,
}


@pytest.mark.parametrize("attention", ["reference", "sdpa", "blocked"])
@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_model_has_the_logits_loss_and_gradients_of_the_reference(
    name: str, apart: bool, attention: str
) -> None:
    c = config(**ARCHITECTURES[name])
    if c.attention_softcap and attention == "sdpa":
        pytest.skip("refused: torch's kernels for CPUs do not cap logits")
    # The blocked core with the chunked loss, as a run on a CPU has them.
    kernels = Kernels(attention, "chunked" if attention == "blocked" else "reference")
    model, (tokens, labels, segments) = build(c, kernels=kernels), batch()
    held = segments if apart else None
    loss, grads = gradients(model, stream(tokens, held), labels)

    weights = {placement_of(p).name: p.detach().clone().requires_grad_() for p in model.parameters()}
    shape = shape_of(c)
    shape.updates = UPDATES
    wanted = reference.logits(weights, shape, tokens, held)
    with torch.no_grad():
        logits = model(stream(tokens, held))
    assert logits.shape == (LENGTH, BATCH, c.padded_vocab)
    torch.testing.assert_close(logits.transpose(0, 1)[..., :VOCABULARY], wanted, rtol=1e-4, atol=1e-4)
    objective, _ = reference.losses(wanted, labels, Z)
    assert float(loss) == pytest.approx(float(objective.detach()), rel=1e-6)
    assert grads.keys() == weights.keys()
    for name, g in zip(weights, torch.autograd.grad(objective, list(weights.values())), strict=True):
        assert float((grads[name] - g).norm() / g.norm()) < 1e-5, name


@pytest.mark.parametrize("apart", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": "full", "norms": "after"}], ids=["plain", "olmo2"])
def test_recompute_changes_no_bit(
    recompute: str, apart: bool, dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    tokens, labels, segments = batch()
    inputs = stream(tokens, segments if apart else None)
    loss, grads = gradients(build(config(**changes), dtype=dtype), inputs, labels)
    again, recomputed = gradients(build(config(**changes), recompute, dtype), inputs, labels)
    assert torch.equal(loss, again)
    for name, g in grads.items():
        assert torch.equal(recomputed[name], g), name


@pytest.mark.parametrize("tied", [False, True])
def test_layers_are_the_model(tied: bool) -> None:
    """Run one after the other, as a pipeline does, with the same names and bytes of the parameters."""
    c = config(tied=tied)
    entries = gpt.list_layers(c, TensorParallel(), "none")
    assert [entry.is_block for entry in entries] == [False, True, True, False, False]
    assert [entry.tied for entry in entries] == [tied, False, False, False, tied]
    model = GPT(c, TensorParallel(), "none", seed=7)
    modules = [entry.build() for entry in entries]
    for module in modules:
        initialise_weights(module, c, TensorParallel(), seed=7)
    tokens, _, segments = batch()
    x: Any = (tokens, segments)
    with torch.no_grad():
        for index, module in enumerate(modules):
            last = tied and index == len(modules) - 1
            x = gpt.Readout().tied_head(module, x) if last else module(x)  # type: ignore[arg-type]
        assert torch.equal(x, model((tokens, segments)))
    assert len(model) == (4 if tied else 5)


@pytest.mark.quick("plain")
@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, 1),
        ({"norm_scaling": True}, 2),
        ({"norms": "branch"}, 1),
        ({"norms": "mixed"}, 2),
        (GEMMA_2, 2),
        ({"dropout": 0.2}, 1),
    ],
    ids=["plain", "norm-scaling", "branch", "mixed", "gemma2", "dropout"],
)
def test_blocks_are_compiled_once_for_every_kind(changes: dict[str, Any], kinds: int) -> None:
    """Twelve blocks, more than torch would compile again; a later step, with other numbers, compiles nothing. With
    LayerNorm scaling the first block has no factor. The final norm is a graph, and so is what follows the embedding's
    look-up, if anything does."""
    c = config(layers=12, hidden=16, ffn=24, **changes)
    tokens, labels, _ = batch()
    keys = keys_of_samples(torch.arange(BATCH), 5)
    inputs = (tokens, keys, keys) if c.dropout else tokens
    wanted = gradients(build(c, kernels=Kernels("blocked")), inputs, labels)
    torch._dynamo.reset()
    counters.clear()
    with without_kernels():
        model = build(c, kernels=Kernels("blocked", compile=True))
        for updates in (UPDATES + 1, UPDATES):
            gpt.set_updates(model, c, updates)
            loss, grads = gradients(model, inputs, labels)
    ends = 1 + (c.embedding_factor != 1.0 or c.dropout > 0)
    assert counters["stats"]["unique_graphs"] == kinds + ends and not counters["graph_break"]
    assert float(loss) == pytest.approx(float(wanted[0]), rel=1e-5)
    for name, g in grads.items():
        torch.testing.assert_close(g, wanted[1][name], rtol=1e-3, atol=1e-6)
    torch._dynamo.reset()
