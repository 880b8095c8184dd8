"""Megatron-core's own GPTModel on the CPU, of a checkpoint in its format: the judge of ours."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _NoTracker:
    """In place of the random states of GPUs, which dropout would take."""

    fork = staticmethod(contextlib.nullcontext)


class _NoGpu(TorchFunctionMode):
    """Megatron's masks of windows, which it makes on a GPU, on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{k: v for k, v in (kwargs or {}).items() if (k, v) != ("device", "cuda")})


@contextlib.contextmanager
def on_the_cpu(tensor: int = 1, pipeline: int = 1) -> Any:
    """The process group of this process laid out for Megatron, which asks for a GPU where it needs none."""
    from megatron.core import parallel_state, tensor_parallel

    before = torch.cuda.current_device, torch.Tensor.cuda, tensor_parallel.get_cuda_rng_tracker
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    tensor_parallel.get_cuda_rng_tracker = lambda: _NoTracker
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel_state.initialize_model_parallel(tensor, pipeline)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.cuda.current_device, torch.Tensor.cuda, tensor_parallel.get_cuda_rng_tracker = before  # type: ignore


def build(args: Any, tensor: int = 1, pipeline: int = 1, stage: int = 0) -> Any:
    """GPTModel by the arguments of a checkpoint, as Megatron's own model provider makes it with the local spec."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=args.num_attention_heads,
            num_query_groups=args.num_query_groups, kv_channels=args.kv_channels,
            ffn_hidden_size=args.ffn_hidden_size, normalization=args.normalization,
            layernorm_epsilon=args.norm_epsilon, add_bias_linear=args.add_bias_linear, add_qkv_bias=args.add_qkv_bias,
            gated_linear_unit=args.swiglu, activation_func=torch.nn.functional.silu,
            qk_layernorm=args.qk_layernorm, hidden_dropout=args.hidden_dropout,
            attention_dropout=args.attention_dropout, params_dtype=torch.float32, pipeline_dtype=torch.float32,
            use_cpu_initialization=True, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
            bias_activation_fusion=False, transformer_impl="local", softmax_scale=args.softmax_scale,
            window_size=args.window_size, window_attn_skip_freq=args.window_attn_skip_freq,
        )  # fmt: skip
    spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    return GPTModel(
        config, spec, vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
        pre_process=stage == 0, post_process=stage == pipeline - 1,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling, rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    ).eval()  # fmt: skip


@torch.no_grad()
def logits(folder: Path, tokens: Tensor, tensor: int, pipeline: int) -> Tensor | None:
    """What Megatron's model computes of `tokens` [b, s] on this rank: fp32 logits [b, s, its part of the vocabulary];
    None on a stage before the last. Its weights are loaded strictly: every name and shape must be there."""
    rank = dist.get_rank()
    t, stage = rank % tensor, rank // tensor
    place = folder / (f"mp_rank_{t:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
    content = torch.load(place / "model_optim_rng.pt", weights_only=False)
    model = build(content["args"], tensor, pipeline, stage)
    model.load_state_dict(content["model"], strict=True)
    b, s = tokens.shape
    if stage > 0:
        hidden = torch.empty(s, b, content["args"].hidden_size)
        dist.recv(hidden, rank - tensor)
        model.set_input_tensor(hidden)
    mask = torch.ones(1, 1, s, s).triu(1).bool()
    with _NoGpu():
        found: Tensor = model(tokens, torch.arange(s).expand(b, -1), mask)
    if stage < pipeline - 1:
        dist.send(found.contiguous(), rank + tensor)
        return None
    return found


def ranks_logits(cases: list[tuple[Path, int, int]], tokens: Tensor) -> list[list[Tensor | None]]:
    """`logits` of (folder, tensor, pipeline), by case and rank; for `run_ranks`."""
    answers = []
    for folder, tensor, pipeline in cases:
        with on_the_cpu(tensor, pipeline):
            mine = logits(folder, tokens, tensor, pipeline)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        answers.append(found)
    return answers
