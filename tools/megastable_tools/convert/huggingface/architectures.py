"""The Hugging Face architectures that equal a model of ours, and the model keys that each has: hugging_face.yaml."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megastable.base.errors import ConfigError
from megastable.config.model import ExpertsConfig, ModelConfig

DENSE_LINEARS = ("gate_proj", "up_proj", "down_proj")
BIAS = "e_score_correction_bias"
# What hugging_face.yaml says: this table, and the entries of config.json that settings.py translates.
TABLES: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("hugging_face.yaml").read_text(encoding="utf-8")
)
OWN, EVERYWHERE = frozenset[str](TABLES["own"]), frozenset[str](TABLES["everywhere"])
OWN_OF_EXPERTS = frozenset[str](TABLES["own_of_experts"])


@dataclass(frozen=True)
class RoutedExperts:
    """keys: the entries of config.json that say a key of our ExpertsConfig, the first is written. has: its values of
    those that it does not say, where they are not ExpertsConfig's defaults. module: their name of a block's experts and
    router; linears: of an expert's gate, up and down. bias: the choice of experts has a bias, a tensor."""

    keys: Mapping[str, tuple[str, ...]]
    linears: tuple[str, str, str]
    has: Mapping[str, Any] = field(default_factory=dict)
    module: str = "mlp"
    bias: bool = False

    def fixed_values(self) -> dict[str, Any]:
        """The keys of `model.experts` that it fixes, with its values."""
        fields, open_keys = ExpertsConfig.model_fields.items(), OWN_OF_EXPERTS | self.keys.keys()
        return {key: of.default for key, of in fields if key not in open_keys} | dict(self.has)

    def find_differences(self, experts: ExpertsConfig) -> dict[str, Any]:
        """The keys that it has with other values only, with one of these."""
        found = {k: v for k, v in self.fixed_values().items() if getattr(experts, k) != v}
        # Where it says how many are shared, it always has some.
        return found | ({"shared": 1} if "shared" in self.keys and not experts.shared else {})


@dataclass(frozen=True)
class Architecture:
    """type: "model_type" of config.json; name: the class. norms: their names of a block's norms, by ours.

    has: its values of our model keys, where they are not ModelConfig's defaults (`qk_norm`: False). free: further keys
    that it has with any value. full_every: with a window, every n-th block attends to all unless the file says
    otherwise; 0: none does. experts: of its blocks; None: they have none. written: further entries of config.json,
    always the same. only: as in TABLES, of its own entries. defaults: values of entries that a config.json may omit.
    """

    type: str
    name: str
    norms: Mapping[str, str]
    has: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    full_every: int = 0
    experts: RoutedExperts | None = None
    only: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def fixed_values(self) -> dict[str, Any]:
        """The model keys that it fixes, with its values."""
        fields, open_keys = ModelConfig.model_fields.items(), OWN | EVERYWHERE | self.free
        open_keys |= {"experts"} if self.experts is not None else set()
        plain = {key: model_field.default for key, model_field in fields if key not in open_keys}
        return plain | {"qk_norm": False} | dict(self.has)

    def find_differences(self, config: ModelConfig) -> dict[str, Any]:
        """The model keys that it has with other values only, with one of these: `experts.KEY` of experts."""
        found = {k: v for k, v in self.fixed_values().items() if getattr(config, k) != v}
        if self.experts is not None and config.experts is not None:
            of_experts = self.experts.find_differences(config.experts)
            found |= {f"experts.{key}": value for key, value in of_experts.items()}
        return found


def _read_row(row: dict[str, Any]) -> Architecture:
    experts = {"experts": RoutedExperts(**row["experts"])} if "experts" in row else {}
    return Architecture(**row | experts | {"free": frozenset(row.get("free", ()))})


ARCHITECTURES = tuple(map(_read_row, TABLES["architectures"]))
QWEN3, LLAMA, QWEN2, OLMO2, MISTRAL, OLMO3, GEMMA2, QWEN3_MOE, MIXTRAL, OLMOE, DOTS1 = ARCHITECTURES


def architecture_of(config: ModelConfig) -> Architecture:
    """The equivalent architecture. Raises ConfigError with the options that have no equivalent."""
    kind_differences = [
        (architecture_kind, architecture_kind.find_differences(config))
        for architecture_kind in ARCHITECTURES
        if (architecture_kind.experts is None) == (config.experts is None)
    ]
    least = min(len(lacking) for _, lacking in kind_differences)
    nearest_kinds = [(kind, lacking) for kind, lacking in kind_differences if len(lacking) == least]
    if least:
        differing_keys = dict.fromkeys(key for _, lacking in nearest_kinds for key in lacking)
        ours = " with ".join(
            f"model.{differing_key}={attrgetter(differing_key)(config)}" for differing_key in differing_keys
        )
        theirs = "; ".join(
            f"{kind.name} with " + " ".join(f"{key}={model_value}" for key, model_value in lacking.items())
            for kind, lacking in nearest_kinds
        )
        raise ConfigError(f"{ours}: no supported Hugging Face architecture has this; the nearest: {theirs}")
    kind = nearest_kinds[0][0]
    if kind is GEMMA2:
        query_scalar(config)
    if kind is OLMOE and config.head_width * config.heads != config.hidden:
        raise ConfigError(
            f"model.head_dim={config.head_width}: {OLMOE.name} has heads of hidden / heads = "
            f"{config.hidden / config.heads:g} only, for its norms of queries and keys"
        )
    return kind


def query_scalar(config: ModelConfig) -> int:
    """Gemma 2's `query_pre_attn_scalar`: n of the scale 1 / sqrt(n). Raises ConfigError."""
    if config.attention_scale is None:
        return config.head_width
    n = max(1, round(config.attention_scale**-2))
    if n**-0.5 != config.attention_scale:
        raise ConfigError(
            f"model.attention_scale={config.attention_scale}: {GEMMA2.name} has 1 / sqrt(n) of a whole number n only: "
            f"the nearest is {n**-0.5!r}"
        )
    return n


# Names of tensors: the rows of ours that form each of theirs. Ours are fused where they are multiplied together (q, k
# and v; gate and up), and the vocabulary is padded; theirs are separate, without padding. Rotary embeddings are
# half-split in both, so that nothing is permuted.


@dataclass(frozen=True)
class TensorRows:
    """Rows [first, first + shape[0]) of one of our tensors are the tensor `name` of theirs."""

    name: str
    first: int
    shape: tuple[int, ...]


def map_tensor_names(config: ModelConfig) -> dict[str, tuple[TensorRows, ...]]:
    """Each of our parameters, in the model's order, with its Hugging Face tensors. `vocab_size` must be known.

    Raises ConfigError as `architecture_of`.
    """
    assert config.vocab_size is not None
    found_kind, c = architecture_of(config), config
    hidden, vocabulary_size = config.hidden, config.vocab_size
    q, key_width = c.heads * c.head_width, c.key_value_heads * c.head_width
    found = {"embedding.weight": _rows(("model.embed_tokens.weight", vocabulary_size), width=hidden)}
    for block_number in range(c.layers):
        ours, theirs = f"blocks.{block_number}", f"model.layers.{block_number}"
        attention = f"{theirs}.self_attn"
        norms = {norm: _rows((f"{theirs}.{name}.weight", hidden)) for norm, name in found_kind.norms.items()}
        found[f"{ours}.attention_norm.weight"] = norms["attention_norm"]
        found[f"{ours}.attention.qkv.weight"] = _rows(
            (f"{attention}.q_proj.weight", q), (f"{attention}.k_proj.weight", key_width),
            (f"{attention}.v_proj.weight", key_width), width=hidden,
        )  # fmt: skip
        if c.qkv_bias:
            found[f"{ours}.attention.qkv.bias"] = _rows(
                (f"{attention}.q_proj.bias", q), (f"{attention}.k_proj.bias", key_width),
                (f"{attention}.v_proj.bias", key_width),
            )  # fmt: skip
        if c.qk_norm:
            norm_widths = (q, key_width) if c.qk_norm == "full" else (c.head_width, c.head_width)
            for name, norm_width in zip(("q_norm", "k_norm"), norm_widths, strict=True):
                found[f"{ours}.attention.{name}.weight"] = _rows((f"{attention}.{name}.weight", norm_width))
        found[f"{ours}.attention.out.weight"] = _rows((f"{attention}.o_proj.weight", hidden), width=q)
        found[f"{ours}.mlp_norm.weight"] = norms["mlp_norm"]
        found |= _map_mlps(c, found_kind, block_number)
        if c.norms == "both":
            for norm in ("attention_post_norm", "mlp_post_norm"):
                found[f"{ours}.{norm}.weight"] = norms[norm]
    found["final_norm.weight"] = _rows(("model.norm.weight", hidden))
    if not c.tied:
        found["head.weight"] = _rows(("lm_head.weight", vocabulary_size), width=hidden)
    return found


def _map_mlps(c: ModelConfig, kind: Architecture, block: int) -> dict[str, tuple[TensorRows, ...]]:
    """As `map_tensor_names`, of a block's MLP or experts."""
    ours, theirs = f"blocks.{block}.mlp", f"model.layers.{block}"
    their_names, experts = kind.experts, c.experts_of(block)
    if their_names is None or experts is None:
        return _map_mlp(ours, f"{theirs}.mlp", DENSE_LINEARS, c.ffn_width, c.hidden)
    their_module, linear_names = f"{theirs}.{their_names.module}", their_names.linears
    router_rows = _rows((f"{their_module}.gate.weight", experts.count), width=c.hidden)
    block_rows = {f"{ours}.router.weight": router_rows}
    for n in range(experts.count):
        their_expert = f"{their_module}.experts.{n}"
        block_rows |= _map_mlp(f"{ours}.experts.{n}", their_expert, linear_names, c.expert_width, c.hidden)
    if shared_width := c.expert_width * experts.shared:
        their_shared = f"{their_module}.shared_experts"
        block_rows |= _map_mlp(f"{ours}.shared", their_shared, linear_names, shared_width, c.hidden)
    return block_rows


def _map_mlp(
    ours: str, theirs: str, linears: tuple[str, ...], width: int, hidden: int
) -> dict[str, tuple[TensorRows, ...]]:
    gate, up, down = (f"{theirs}.{linear}.weight" for linear in linears)
    return {
        f"{ours}.gate_up.weight": _rows((gate, width), (up, width), width=hidden),
        f"{ours}.down.weight": _rows((down, hidden), width=width),
    }


def map_biases(config: ModelConfig) -> dict[int, TensorRows]:
    """Their tensors of the bias of the choice of experts, by block; none if the architecture has no such bias."""
    names = architecture_of(config).experts
    if names is None or not names.bias:
        return {}
    return {
        block: TensorRows(f"model.layers.{block}.{names.module}.gate.{BIAS}", 0, (experts.count,))
        for block in range(config.layers)
        if (experts := config.experts_of(block)) is not None
    }


def _rows(*named: tuple[str, int], width: int | None = None) -> tuple[TensorRows, ...]:
    row_parts, first_row = list[TensorRows](), 0
    for tensor_name, count in named:
        row_parts.append(TensorRows(tensor_name, first_row, (count,) if width is None else (count, width)))
        first_row += count
    return tuple(row_parts)


def split_tensor(whole: Tensor, parts: tuple[TensorRows, ...]) -> dict[str, Tensor]:
    """Their tensors, as views of one of ours; further rows are padding."""
    return {row_part.name: whole[row_part.first : row_part.first + row_part.shape[0]] for row_part in parts}


def merge_tensors(theirs: Mapping[str, Tensor], parts: tuple[TensorRows, ...], rows: int) -> Tensor:
    """One of our tensors, fp32 with `rows` rows, from theirs; further rows are zero. The inverse of `split_tensor`."""
    whole_tensor = torch.empty((rows, *parts[0].shape[1:]))
    for row_part in parts:
        whole_tensor[row_part.first : row_part.first + row_part.shape[0]] = theirs[row_part.name]
    whole_tensor[parts[-1].first + parts[-1].shape[0] :] = 0
    return whole_tensor


# muP's scales as factors of weights, for formats that have no such scales. They are ratios of sizes: powers of two, and
# so exact, where the sizes are.


def without_mup(config: ModelConfig) -> ModelConfig:
    """The same model with muP's scales in its weights. Raises ConfigError if they cannot be there."""
    if config.mup is None:
        return config
    remedy_text = "export weights of an untied model, or train without model.mup"
    if config.tied and config.width_ratio != 1:
        raise ConfigError(
            f"model.mup with model.tied: the logits' scale 1/{config.width_ratio:g} cannot be a part of the embedding, "
            f"which is the output layer as well: {remedy_text}"
        )
    is_scaled = _attention(config) != 1 or (config.depth_ratio != 1 and config.norms != "before")
    if is_scaled and config.zero_centered_norms:
        raise ConfigError(
            "model.mup with model.zero_centered_norms: a norm that multiplies by 1 + weight takes no factor: train "
            "without one of them"
        )
    if _attention(config) != 1 and not config.qk_norm:
        raise ConfigError(
            "model.mup.base_head_dim with model.qk_norm=false: the scale of attention cannot be a part of the fused "
            "queries, keys and values: leave base_head_dim out"
        )
    return config.model_copy(update={"mup": None})


def factor_of(name: str, config: ModelConfig) -> float:
    """What the parameter `name` is multiplied by."""
    if config.mup is None:
        return 1.0
    if name == "head.weight":
        return 1 / config.width_ratio
    if name.endswith(".attention.q_norm.weight"):
        return _attention(config)
    # The last operation of a branch has its scale.
    last_weights = {
        "before": (".attention.out.weight", ".mlp.down.weight"),
        "after": (".attention_norm.weight", ".mlp_norm.weight"),
        "both": ("_post_norm.weight",),
    }
    return 1 / config.depth_ratio if name.endswith(last_weights.get(config.norms, ())) else 1.0


def are_factors_exact(config: ModelConfig) -> bool:
    """Whether no factor rounds a weight."""
    scale_factors = (config.width_ratio, config.depth_ratio, _attention(config))
    return all(math.frexp(scale_factor)[0] == 0.5 for scale_factor in scale_factors)


def _attention(config: ModelConfig) -> float:
    """muP's scale of attention over the usual one."""
    assert config.mup is not None
    return math.sqrt((config.mup.base_head_dim or config.head_width) / config.head_width)
