"""Megatron-core's GPTModel on one rank, with Transformer Engine layers if installed, else its local ones.

One rank, no pipeline: this compares its model and kernels, not its parallelism. AdamW is torch's, fused, directly on
the weights, as for the other models; its own loss, without z-loss. It starts from its own weights.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.peers import Contestant, Task, Unavailable, make_training_step, refuse_others


class _NoTracker:
    """Replaces the GPU random states for dropout."""

    fork = staticmethod(contextlib.nullcontext)


@contextlib.contextmanager
def _device(task: Task) -> Iterator[None]:
    """On a CPU, satisfy Megatron's needless requests for a GPU."""
    if task.device.type == "cuda":
        yield
        return
    from megatron.core import tensor_parallel

    before = torch.cuda.current_device, torch.Tensor.cuda, tensor_parallel.get_cuda_rng_tracker
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    tensor_parallel.get_cuda_rng_tracker = lambda: _NoTracker
    try:
        yield
    finally:
        torch.cuda.current_device, torch.Tensor.cuda, tensor_parallel.get_cuda_rng_tracker = before  # type: ignore


def build(task: Task) -> Contestant:
    """Raises Unavailable if it is not installed or does not support an option of the model."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core
            from megatron.core import parallel_state
            from megatron.core.models.gpt import GPTModel
            from megatron.core.models.gpt import gpt_layer_specs as specs
            from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
            from megatron.core.transformer.transformer_config import TransformerConfig
    except ImportError as error:
        raise Unavailable(f"megatron.core is not installed ({error})") from None
    c, on_gpu = task.config.model, task.device.type == "cuda"
    refuse_others(c, {"qk_norm": (True, False)})
    engine = on_gpu and _has_transformer_engine()
    with warnings.catch_warnings(), _device(task):
        warnings.simplefilter("ignore")
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(1, 1)
        if on_gpu:
            model_parallel_cuda_manual_seed(task.config.run.seed)
        shape = TransformerConfig(
            num_layers=c.layers, hidden_size=c.hidden, num_attention_heads=c.heads,
            num_query_groups=c.key_value_heads, kv_channels=c.head_width, ffn_hidden_size=c.ffn_width,
            normalization="RMSNorm", layernorm_epsilon=c.norm_eps, add_bias_linear=False,
            gated_linear_unit=True, activation_func=nn.functional.silu, qk_layernorm=bool(c.qk_norm),
            hidden_dropout=0.0, attention_dropout=0.0, params_dtype=task.dtype, pipeline_dtype=task.dtype,
            bf16=task.dtype == torch.bfloat16, use_cpu_initialization=not on_gpu, bias_activation_fusion=on_gpu,
            bias_dropout_fusion=on_gpu, masked_softmax_fusion=on_gpu and engine,
            gradient_accumulation_fusion=False, apply_rope_fusion=engine, cross_entropy_loss_fusion=on_gpu,
            transformer_impl="transformer_engine" if engine else "local",
        )  # fmt: skip
        if engine:
            spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=bool(c.qk_norm))
        else:
            spec = specs.get_gpt_layer_local_spec(qk_layernorm=bool(c.qk_norm), normalization="RMSNorm")
        module: nn.Module = GPTModel(
            shape, spec, vocab_size=c.padded_vocab, max_sequence_length=c.sequence_length,
            share_embeddings_and_output_weights=c.tied, position_embedding_type="rope",
            rotary_base=int(c.rope_theta),
        ).to(task.device, task.dtype)  # fmt: skip
    s = c.sequence_length
    positions = torch.arange(s, device=task.device).expand(task.config.train.micro_batch, -1)
    # Transformer Engine's attention is causal by itself; the local one needs a mask.
    mask = None if engine else torch.ones(1, 1, s, s, device=task.device).triu(1).bool()

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = module(tokens, positions, mask, labels=labels)  # [b, s]
        return losses.float().mean()

    plain_step = make_training_step(task, module, loss_of)

    def step() -> Tensor:
        with _device(task):
            return plain_step()

    which = "Transformer Engine" if engine else "local"
    said = f"GPTModel of megatron.core {megatron.core.__version__}, {which} layers; AdamW fused, no masters, no z-loss"
    return Contestant(step, said, same_weights=False, close=parallel_state.destroy_model_parallel)


def _has_transformer_engine() -> bool:
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError):  # OSError: a library of another CUDA
        return False
    return True
