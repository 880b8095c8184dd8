"""Table of tensor names for export and import: the rows of our tensors that form each Hugging Face tensor. Pure.

Ours are fused where they are multiplied together (q, k and v; gate and up), and the vocabulary is padded; theirs are
separate, without padding. Rotary embeddings are half-split in both, so that nothing is permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megastable.config.model import ModelConfig
from megastable_tools.convert.huggingface.architectures import architecture_of


@dataclass(frozen=True)
class TensorRows:
    """Rows [first, first + shape[0]) of one of our tensors are the tensor `name` of theirs."""

    name: str
    first: int
    shape: tuple[int, ...]


def table(config: ModelConfig) -> dict[str, tuple[TensorRows, ...]]:
    """Each of our parameters, in the model's order, with its Hugging Face tensors. `vocab_size` must be known.

    Raises ConfigError as `architecture_of`.
    """
    assert config.vocab_size is not None
    kind, c = architecture_of(config), config
    hidden, vocabulary = config.hidden, config.vocab_size
    q, kv = c.heads * c.head_width, c.key_value_heads * c.head_width
    found = {"embedding.weight": _rows(("model.embed_tokens.weight", vocabulary), width=hidden)}
    for i in range(c.layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        norms = {norm: _rows((f"{theirs}.{name}.weight", hidden)) for norm, name in kind.norms.items()}
        found[f"{ours}.attention_norm.weight"] = norms["attention_norm"]
        found[f"{ours}.attention.qkv.weight"] = _rows(
            (f"{attention}.q_proj.weight", q), (f"{attention}.k_proj.weight", kv),
            (f"{attention}.v_proj.weight", kv), width=hidden,
        )  # fmt: skip
        if c.qkv_bias:
            found[f"{ours}.attention.qkv.bias"] = _rows(
                (f"{attention}.q_proj.bias", q),
                (f"{attention}.k_proj.bias", kv),
                (f"{attention}.v_proj.bias", kv),
            )
        if c.qk_norm:
            widths = (q, kv) if c.qk_norm == "full" else (c.head_width, c.head_width)
            for name, width in zip(("q_norm", "k_norm"), widths, strict=True):
                found[f"{ours}.attention.{name}.weight"] = _rows((f"{attention}.{name}.weight", width))
        found[f"{ours}.attention.out.weight"] = _rows((f"{attention}.o_proj.weight", hidden), width=q)
        found[f"{ours}.mlp_norm.weight"] = norms["mlp_norm"]
        found[f"{ours}.mlp.gate_up.weight"] = _rows(
            (f"{mlp}.gate_proj.weight", c.ffn_width), (f"{mlp}.up_proj.weight", c.ffn_width), width=hidden
        )
        found[f"{ours}.mlp.down.weight"] = _rows((f"{mlp}.down_proj.weight", hidden), width=c.ffn_width)
        if c.norms == "both":
            for norm in ("attention_post_norm", "mlp_post_norm"):
                found[f"{ours}.{norm}.weight"] = norms[norm]
    found["final_norm.weight"] = _rows(("model.norm.weight", hidden))
    if not c.tied:
        found["head.weight"] = _rows(("lm_head.weight", vocabulary), width=hidden)
    return found


def _rows(*named: tuple[str, int], width: int | None = None) -> tuple[TensorRows, ...]:
    parts, first = list[TensorRows](), 0
    for name, count in named:
        parts.append(TensorRows(name, first, (count,) if width is None else (count, width)))
        first += count
    return tuple(parts)


def split(whole: Tensor, parts: tuple[TensorRows, ...]) -> dict[str, Tensor]:
    """Their tensors, as views of one of ours; further rows are padding."""
    return {part.name: whole[part.first : part.first + part.shape[0]] for part in parts}


def merge(theirs: Mapping[str, Tensor], parts: tuple[TensorRows, ...], rows: int) -> Tensor:
    """One of our tensors, fp32 with `rows` rows, from theirs; further rows are zero. The inverse of `split`."""
    whole = torch.empty((rows, *parts[0].shape[1:]))
    for part in parts:
        whole[part.first : part.first + part.shape[0]] = theirs[part.name]
    whole[parts[-1].first + parts[-1].shape[0] :] = 0
    return whole
