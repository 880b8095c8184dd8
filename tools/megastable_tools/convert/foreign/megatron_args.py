"""Translate Megatron's arguments, as stored in its checkpoints, into our model's configuration, and back. Pure.

Megatron stores all of its arguments, under names that changed over the years; only those that define the model's
computation are read. An argument that our model does not support is refused by name; megatron.yaml has the names, and
the values that are supported.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megastable.base.errors import CheckpointError, ConfigError
from megastable.base.text import make_visible
from megastable.config.keys import read_names
from megastable.config.model import ModelConfig, RopeScalingConfig
from megastable.config.tree import RunConfig
from megastable_tools.convert.foreign.unpickle import parse_number
from megastable_tools.convert.huggingface.architectures import EVERYWHERE, OWN

Args = Mapping[str, Any]

NAMES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("megatron.yaml").read_text(encoding="utf-8"))
CENTERED = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")  # two names of zero_centered_norms
WHY = read_names()["megatron_without_key"] | NAMES["why"]
# Model keys that must agree, and where they stand.
_PLACES = {name: ours.partition("; ")[0] for name, ours in read_names()["megatron"].items()}
SAME = {
    key: tuple(place_name for place_name, ours in _PLACES.items() if ours == f"model.{key}")
    for key in ("layers", "hidden", "heads", "head_dim", "ffn", "rope_theta", "norm_eps")
}
# The meaning of Megatron's use_rope_scaling, beside a factor (megatron/core, RotaryEmbedding._apply_scaling).
LLAMA3 = RopeScalingConfig(kind="llama3", factor=8, original_length=8192)
LINEAR = RopeScalingConfig(kind="linear", factor=1)  # rotary_seq_len_interpolation_factor
# Choices of the model that Megatron's GPT has, too, with some or all values.
CHOICES = frozenset(
    "qk_norm qkv_bias zero_centered_norms attention_scale window full_attention_every".split()
)
AT_HOME = OWN | EVERYWHERE | CHOICES


def model_of(args: Args, where: object) -> dict[str, Any]:
    """Our model by the arguments: keys of `ModelConfig`, except the vocabulary. Raises CheckpointError."""
    for key, allowed in NAMES["only"].items():
        value = allowed[0] if args.get(key) is None else args[key]
        is_plain = type(value) in (int, float, str, list)
        if not any(value is other or (is_plain and value == other) for other in allowed):
            raise CheckpointError(f"{where}: {key}={make_visible(value, 100)}: not supported: {WHY[key]}")
    kind = args.get("position_embedding_type", "rope")
    if kind != "rope" and args.get("use_rotary_position_embeddings") is not True:
        raise CheckpointError(
            f"{where}: position_embedding_type={make_visible(kind, 100)}: this model has rotary embeddings (rope)"
        )
    found: dict[str, Any] = {}
    if args:
        model_fields = ModelConfig.model_fields.items()
        found |= {key: model_field.default for key, model_field in model_fields if key not in AT_HOME}
        found |= {"qkv_bias": args.get("add_qkv_bias") is True, "rope_scaling": _scaling(args, where)}
        found |= {"zero_centered_norms": any(bool(args.get(name)) for name in CENTERED)}
        found |= _windows(args, where)
    for key, argument_names in SAME.items():
        numbers = (parse_number(args.get(name)) for name in argument_names)
        if (value := next((number for number in numbers if number is not None), None)) is not None:
            found[key] = value if key in ("rope_theta", "norm_eps") else int(value)
    has_groups = args.get("group_query_attention") is True
    group_count = parse_number(args.get("num_query_groups")) if has_groups else found.get("heads")
    if group_count is not None:
        found["kv_heads"] = int(group_count)
    if isinstance(has_norm := args.get("qk_layernorm"), bool):
        found["qk_norm"] = has_norm
    if isinstance(is_untied := args.get("untie_embeddings_and_output_weights"), bool):
        found["tied"] = not is_untied
    if args:
        scale = _positive(args, "softmax_scale", where)
        found["attention_scale"] = None if scale == _usual_scale(found.get("head_dim")) else scale
    sequence_length = parse_number(args.get("seq_length"))
    positions = parse_number(args.get("max_position_embeddings"))
    if longest_sequence := sequence_length or positions:
        found["sequence_length"] = int(longest_sequence)
    if positions:
        found["max_positions"] = int(positions)
    return found


def _scaling(args: Args, where: object) -> dict[str, Any] | None:
    """`rope_scaling`. Raises CheckpointError for two kinds at once."""
    linear = _positive(args, "rotary_seq_len_interpolation_factor", where) or 1
    if args.get("use_rope_scaling") is not True:
        return None if linear == 1 else LINEAR.model_dump() | {"factor": float(linear)}
    if linear != 1:
        raise CheckpointError(
            f"{where}: rotary_seq_len_interpolation_factor={linear:g} with use_rope_scaling: only one of them is known"
        )
    rope_factor = parse_number(args.get("rope_scaling_factor")) or LLAMA3.factor
    return LLAMA3.model_dump() | {"factor": float(rope_factor)}


def _positive(args: Args, key: str, where: object) -> float | None:
    """An argument that is None or a number above 0."""
    argument_value = parse_number(args.get(key))
    if args.get(key) is not None and not (argument_value and argument_value > 0):
        raise CheckpointError(f"{where}: {key}={make_visible(args[key], 100)}: it must be a number above 0")
    return argument_value


def _windows(args: Args, where: object) -> dict[str, int | None]:
    """`window` and `full_attention_every`: Megatron counts the tokens before a token, here it is included."""
    size, every = args.get("window_size"), args.get("window_attn_skip_freq")
    if size is None:
        return {"window": None, "full_attention_every": None}
    is_whole = isinstance(size, tuple | list) and [type(window_part) for window_part in size] == [int, int]
    if not is_whole or size[0] < 0 or size[1] != 0:
        raise CheckpointError(
            f"{where}: window_size={make_visible(size, 100)}: not supported: it must be the number of tokens before, "
            "and 0"
        )
    if every is not None and (type(every) is not int or every < 2):
        raise CheckpointError(
            f"{where}: window_attn_skip_freq={make_visible(every, 100)}: not supported: either all layers have the "
            "window, or all but every n-th: a number n of 2 or more"
        )
    return {"window": size[0] + 1, "full_attention_every": every}


def _usual_scale(width: int | None) -> float | None:
    return width**-0.5 if width else None


def list_missing_arguments(found: Args) -> list[str]:
    """The missing arguments that a recipe needs."""
    argument_names = {key: names[0] for key, names in SAME.items()}
    argument_names |= {"qk_norm": "qk_layernorm", "tied": "untie_embeddings_and_output_weights"}
    return [argument_name for key, argument_name in argument_names.items() if key not in found]


def dropout_of(args: Args) -> str:
    """The dropout used in training, as "key=value"; "" for none."""
    keys = ("hidden_dropout", "attention_dropout")
    dropout_values = {key: parse_number(args.get(key)) or 0 for key in keys}
    return ", ".join(f"{dropout_value}={value:g}" for dropout_value, value in dropout_values.items() if value)


def vocabulary_of(args: Args, rows: int, tensor: int) -> dict[str, int]:
    """vocab_size and a vocab_multiple that pads it to their `rows`, if possible."""
    known_size = parse_number(args.get("vocab_size"))
    size = int(known_size) if known_size and known_size <= rows else rows
    divisible_by = int(parse_number(args.get("make_vocab_size_divisible_by")) or 0) * tensor
    vocab_multiple = next(m for m in (128, divisible_by, rows) if m > 0 and -(-size // m) * m == rows)
    return {"vocab_size": size, "vocab_multiple": vocab_multiple}


def list_contradictions(found: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Contradictions between arguments and recipe, as "key=ours, Megatron's ...". Lengths may differ."""
    our_settings = {
        **model.model_dump(),
        "kv_heads": model.key_value_heads, "head_dim": model.head_width, "ffn": model.ffn_width,
    }  # fmt: skip
    if model.attention_scale == _usual_scale(model.head_width):
        our_settings["attention_scale"] = None
    return [
        f"model.{key}={our_settings[key]}, in the checkpoint {argument_value}"
        for key, argument_value in found.items()
        if key not in ("sequence_length", "max_positions") and our_settings[key] != argument_value
    ]


def check_home(run: RunConfig, tensor: int, pipeline: int, local: bool = False) -> None:
    """Raises ConfigError for a model that Megatron (local: its own implementation) does not support, or a layout that
    does not divide it."""
    c = run.model
    assert c.vocab_size is not None
    if c.experts is not None:
        raise ConfigError(
            "model.experts: experts are not exported to Megatron; `megastable convert to-hf` has them"
        )
    for key, model_field in type(c).model_fields.items():
        if key not in AT_HOME and getattr(c, key) != model_field.default:
            raise ConfigError(f"model.{key}={getattr(c, key)}: Megatron's GPT has no known equivalent")
    if c.qk_norm == "full":
        raise ConfigError("model.qk_norm=full: Megatron's QK-norm is per head; it has no equivalent")
    scaling = c.rope_scaling or LINEAR
    if scaling.kind != "linear" and scaling.model_copy(update={"factor": LLAMA3.factor}) != LLAMA3:
        raise ConfigError(
            f"model.rope_scaling=({scaling}): Megatron supports only kind=linear and Llama 3.1's scaling: kind=llama3 "
            "with original_length=8192, low_freq_factor=1, high_freq_factor=4, and any factor"
        )
    if local and c.zero_centered_norms:
        raise ConfigError(
            "model.zero_centered_norms=True: of Megatron's implementations only transformer_engine has such norms"
        )
    if min(tensor, pipeline) < 1:
        raise ConfigError(f"tensor={tensor}, pipeline={pipeline}: sizes must be at least 1")
    for key, size in (("heads", c.heads), ("ffn", c.ffn_width), ("vocab_multiple", c.vocab_multiple)):
        if size % tensor:
            raise ConfigError(f"tensor={tensor} does not divide model.{key}={size}: use another size")
    if c.key_value_heads % tensor and tensor % c.key_value_heads:
        raise ConfigError(
            f"tensor={tensor} and model.kv_heads={c.key_value_heads}: neither divides the other: use another size"
        )
    if c.layers % pipeline:
        raise ConfigError(
            f"pipeline={pipeline} does not divide model.layers={c.layers}: use another number of stages"
        )


def flags_of(model: ModelConfig, local: bool = False) -> list[str]:
    """Options to give to Megatron beside --use-checkpoint-args, which does not set these. local: for its own
    implementation, whose fused softmax ignores windows."""
    option_words = []
    if model.window is not None:
        option_words += ["--window-size", f"{model.window - 1},0"]
        option_words += ["--no-masked-softmax-fusion"] if local else []
    if model.full_attention_every is not None:
        option_words += ["--window-attn-skip-freq", str(model.full_attention_every)]
    if model.attention_scale is not None:
        option_words += ["--softmax-scale", repr(model.attention_scale)]
    return option_words


def args_of(run: RunConfig, tensor: int, pipeline: int, implementation: str, step: int) -> Namespace:
    """Arguments for Megatron's --use-checkpoint-args, under the names of 2023 to 2026. `vocab_size` must be known."""
    c = run.model
    is_linear = c.rope_scaling is not None and c.rope_scaling.kind == "linear"
    rope_factor = c.rope_scaling.factor if c.rope_scaling else LLAMA3.factor
    rope_theta = int(c.rope_theta) if c.rope_theta == int(c.rope_theta) else c.rope_theta
    return Namespace(
        num_layers=c.layers, encoder_num_layers=c.layers, hidden_size=c.hidden, ffn_hidden_size=c.ffn_width,
        num_attention_heads=c.heads, group_query_attention=c.key_value_heads != c.heads,
        num_query_groups=c.key_value_heads, kv_channels=c.head_width,
        seq_length=c.sequence_length, encoder_seq_length=c.sequence_length,
        max_position_embeddings=c.longest,
        position_embedding_type="rope", add_position_embedding=True, use_rotary_position_embeddings=False,
        rotary_base=rope_theta, rotary_percent=1.0, rotary_interleaved=False,
        rotary_seq_len_interpolation_factor=rope_factor if is_linear else None,
        use_rope_scaling=c.rope_scaling is not None and not is_linear,
        rope_scaling_factor=LLAMA3.factor if is_linear else rope_factor, no_rope_freq=None,
        normalization="RMSNorm", norm_epsilon=c.norm_eps, layernorm_epsilon=c.norm_eps,
        apply_layernorm_1p=c.zero_centered_norms, layernorm_zero_centered_gamma=c.zero_centered_norms,
        apply_residual_connection_post_layernorm=False,
        add_bias_linear=False, add_qkv_bias=c.qkv_bias, swiglu=True, squared_relu=False, openai_gelu=False,
        quick_geglu=False, qk_layernorm=bool(c.qk_norm), qk_l2_norm=False, multi_latent_attention=False,
        softmax_type="vanilla", softmax_scale=c.attention_scale,
        window_size=None if c.window is None else (c.window - 1, 0), window_attn_skip_freq=c.full_attention_every,
        num_experts=None, mtp_num_layers=None,
        untie_embeddings_and_output_weights=not c.tied, attention_dropout=0.0, hidden_dropout=0.0,
        apply_query_key_layer_scaling=False, init_method_std=c.init_std,
        vocab_size=c.vocab_size, padded_vocab_size=c.padded_vocab,
        make_vocab_size_divisible_by=c.vocab_multiple // tensor,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=None, expert_model_parallel_size=1,
        transformer_impl=implementation, bf16=run.precision.kind == "bf16", fp16=run.precision.kind == "fp16",
        data_parallel_random_init=False, iteration=step, consumed_train_samples=0, consumed_valid_samples=0,
    )  # fmt: skip
