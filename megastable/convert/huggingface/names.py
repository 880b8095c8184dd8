"""Table of tensor names for export and import: the rows of our tensors that form each Hugging Face tensor. Pure.

Ours are fused where they are multiplied together (q, k and v; gate and up), and the vocabulary is padded; theirs are
separate, without padding. Rotary embeddings are half-split in both, so that nothing is permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megastable.base.errors import ConfigError
from megastable.config.model import ModelConfig


@dataclass(frozen=True)
class Architecture:
    """type: "model_type" of config.json; name: the class; norms: names of the norms of a block's two halves."""

    type: str
    name: str
    norms: tuple[str, str]


BEFORE = ("input_layernorm", "post_attention_layernorm")
QWEN3 = Architecture("qwen3", "Qwen3ForCausalLM", BEFORE)
QWEN2 = Architecture("qwen2", "Qwen2ForCausalLM", BEFORE)
LLAMA = Architecture("llama", "LlamaForCausalLM", BEFORE)
MISTRAL = Architecture("mistral", "MistralForCausalLM", BEFORE)  # read only: without its window it is a Llama
OLMO2 = Architecture("olmo2", "Olmo2ForCausalLM", ("post_attention_layernorm", "post_feedforward_layernorm"))

# By model.qk_norm, model.norms and model.qkv_bias. Other combinations have no architecture in Hugging Face.
ARCHITECTURES = {
    (True, "before", False): QWEN3, (False, "before", False): LLAMA, (False, "before", True): QWEN2,
    ("full", "after", False): OLMO2,
}  # fmt: skip
# Options that their models support, or that do not affect a trained model.
AT_HOME = frozenset(
    "layers hidden heads kv_heads head_dim ffn sequence_length max_positions vocab_size vocab_multiple rope_theta "
    "rope_scaling norm_eps qk_norm qkv_bias norms tied init_std z_loss attention".split()
)


@dataclass(frozen=True)
class TensorRows:
    """Rows [first, first + shape[0]) of one of our tensors are the tensor `name` of theirs."""

    name: str
    first: int
    shape: tuple[int, ...]


def architecture_of(config: ModelConfig) -> Architecture:
    """The equivalent architecture. Raises ConfigError with the option that has no equivalent."""
    for key, field in type(config).model_fields.items():
        value = getattr(config, key)
        if key not in AT_HOME and value != field.default:
            raise ConfigError(f"model.{key}={value}: no supported Hugging Face architecture has it")
    found = ARCHITECTURES.get((config.qk_norm, config.norms, config.qkv_bias))
    if found is None:
        homes = "; ".join(
            f"qk_norm={q} norms={n} qkv_bias={b} ({a.name})" for (q, n, b), a in ARCHITECTURES.items()
        )
        raise ConfigError(
            f"model.qk_norm={config.qk_norm} with model.norms={config.norms} and model.qkv_bias={config.qkv_bias}: no "
            f"supported Hugging Face architecture combines these; supported are: {homes}"
        )
    return found


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
        found[f"{ours}.attention_norm.weight"] = _rows((f"{theirs}.{kind.norms[0]}.weight", hidden))
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
        found[f"{ours}.mlp_norm.weight"] = _rows((f"{theirs}.{kind.norms[1]}.weight", hidden))
        found[f"{ours}.mlp.gate_up.weight"] = _rows(
            (f"{mlp}.gate_proj.weight", c.ffn_width), (f"{mlp}.up_proj.weight", c.ffn_width), width=hidden
        )
        found[f"{ours}.mlp.down.weight"] = _rows((f"{mlp}.down_proj.weight", hidden), width=c.ffn_width)
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
