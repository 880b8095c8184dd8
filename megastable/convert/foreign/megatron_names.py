"""Translate names and layouts of Megatron-core's GPTModel to ours and back. Pure.

Megatron numbers layers within their pipeline stage. Under Transformer Engine the norms before attention and MLP belong
to the linear layers that follow them; in Megatron's local implementation they are separate modules. The rows
of the fused q, k and v are ordered by query group: all q heads of a group, its k head, its v head (ours: all q, all k,
all v; megatron/core/transformer/attention.py, SelfAttention.get_query_key_value_tensors).
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from megastable.base.errors import CheckpointError
from megastable.base.text import visible
from megastable.config.model import ModelConfig
from megastable.parallel.sharding import Placement

TOP = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "final_norm.weight": "decoder.final_layernorm.weight",
    "head.weight": "output_layer.weight",
}
LAYER = {
    "attention.qkv.weight": "self_attention.linear_qkv.weight",
    "attention.qkv.bias": "self_attention.linear_qkv.bias",
    "attention.q_norm.weight": "self_attention.q_layernorm.weight",
    "attention.k_norm.weight": "self_attention.k_layernorm.weight",
    "attention.out.weight": "self_attention.linear_proj.weight",
    "mlp.gate_up.weight": "mlp.linear_fc1.weight",
    "mlp.down.weight": "mlp.linear_fc2.weight",
}
NORMS = {  # by implementation
    "transformer_engine": {
        "attention_norm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "mlp_norm.weight": "mlp.linear_fc1.layer_norm_weight",
    },
    "local": {
        "attention_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "pre_mlp_layernorm.weight",
    },
}
# Our names by theirs, of either implementation
_TOP = {other: mine for mine, other in TOP.items()}
_LAYER = {other: mine for table in (LAYER, *NORMS.values()) for mine, other in table.items()}
_FUSED = ("attention.qkv.weight", "attention.qkv.bias")
_OURS = re.compile(r"blocks\.(\d+)\.(.+)")
_THEIRS = re.compile(r"decoder\.layers\.(\d{1,5})\.(.+)")


def theirs(name: str, first: int, implementation: str) -> str:
    """Their name of one of our parameters, on a stage that starts with layer `first`."""
    block = _OURS.fullmatch(name)
    if block is None:
        return TOP[name]
    return f"decoder.layers.{int(block[1]) - first}.{(LAYER | NORMS[implementation])[block[2]]}"


def ours(name: str, first: int, where: object) -> str:
    """The inverse of `theirs`, for either implementation. Raises CheckpointError for an unsupported name."""
    layer = _THEIRS.fullmatch(name)
    if layer is None and name in _TOP:
        return _TOP[name]
    if layer is not None and layer[2] in _LAYER:
        return f"blocks.{int(layer[1]) + first}.{_LAYER[layer[2]]}"
    before = name.startswith(("language_model.", "transformer."))
    raise CheckpointError(
        f"{where}: {visible(name, 200)} has no home in this model: "
        + (
            "it is of Megatron before its core"
            if before
            else "it has no biases but those of q, k and v, no experts and no learnt positions"
        )
    )


def layer_of(name: str) -> int | None:
    """The number of the layer in one of their names."""
    layer = _THEIRS.fullmatch(name)
    return int(layer[1]) if layer else None


def placement(name: str, of: Placement) -> Placement:
    """The placement of one of their tensors, given ours in `of`: groups of q, k, v stay together."""
    return Placement(name, 0, (sum(of.sections),)) if name.endswith(_FUSED) else of


def to_theirs(name: str, whole: Tensor, config: ModelConfig) -> Tensor:
    """One of our whole tensors, in their row order."""
    if not name.endswith(_FUSED):
        return whole
    k, d = config.key_value_heads, config.head_width
    parts = whole.split((config.heads * d, k * d, k * d))
    return torch.cat([part.view(k, -1, *whole.shape[1:]) for part in parts], 1).reshape(whole.shape)


def to_ours(name: str, whole: Tensor, config: ModelConfig) -> Tensor:
    """The inverse of `to_theirs`."""
    if not name.endswith(_FUSED):
        return whole
    k, d = config.key_value_heads, config.head_width
    groups = whole.reshape(k, -1, *whole.shape[1:]).split((config.heads // k * d, d, d), 1)
    return torch.cat([part.reshape(-1, *whole.shape[1:]) for part in groups])
