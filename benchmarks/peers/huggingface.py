"""transformers' model of the same shape and weights, in a typical training loop.

It uses its own attention and its own loss: cross-entropy over logits in fp32, no z-loss, so slightly less work than
ours. Tokens and labels are the same; the labels are passed shifted, and nothing is padded.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import Contestant, Task, Unavailable, make_training_step
from megastable.base.errors import ConfigError
from megastable_tools.convert.huggingface import architectures, settings


def _model(task: Task) -> tuple[nn.Module, str]:
    try:
        import transformers
    except ImportError as error:
        raise Unavailable(f"transformers is not installed ({error}); it is in the extra [hf]") from None
    c = task.config.model
    # Its vocabulary has no padding: the same rows are all tokens there.
    c = c.model_copy(update={"vocab_size": c.padded_vocab})
    try:
        name_table, told = (
            architectures.map_tensor_names(c),
            settings.settings_of(c, str(task.dtype).removeprefix("torch."), {}),
        )
    except ConfigError as error:
        raise Unavailable(str(error)) from None
    attention_kind = "sdpa"
    if task.device.type == "cuda" and importlib.util.find_spec("flash_attn"):
        attention_kind = "flash_attention_2"
    told["use_cache"] = False
    model_shape = transformers.AutoConfig.for_model(told.pop("model_type"), **told)
    with torch.device(task.device):
        # Not cast afterwards: its rotary frequencies must stay in fp32.
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(
            model_shape, dtype=task.dtype, attn_implementation=attention_kind
        )
    their_weights: dict[str, Tensor] = {}
    for name, parts in name_table.items():
        their_weights |= architectures.split_tensor(task.weights[name], parts)
    missing_names, unexpected_names = module.load_state_dict(their_weights, strict=False)
    if unexpected_names or [name for name in missing_names if not (c.tied and name == "lm_head.weight")]:
        raise Unavailable(
            f"transformers {transformers.__version__} has other parameters: {missing_names} {unexpected_names}"
        )
    peer_text = f"{type(module).__name__} of transformers {transformers.__version__}, {attention_kind}"
    return module.train(), peer_text


def _loss_of(forward: Any, task: Task) -> Any:
    # Compiled by torch below 2.14 it would write out its causal mask, which no flash kernel takes. Qwens accept
    # prepared
    # masks, and None is best: the kernel is causal by itself.
    c = task.config.model
    qwen = c.window is None and architectures.architecture_of(c) in (architectures.QWEN2, architectures.QWEN3)
    prepared_masks: dict[str, Any] = {"attention_mask": {"full_attention": None}} if qwen else {}

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        mean_loss: Tensor = forward(
            input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False, **prepared_masks
        ).loss
        return mean_loss

    return loss_of


def compiled(task: Task) -> Contestant:
    """torch.compile of the whole model, as is usual, unless the recipe says kernels.compile=false."""
    if task.config.kernels.compile is False:
        return eager(task)
    module, peer_text = _model(task)
    training_step = make_training_step(task, module, _loss_of(torch.compile(module), task))
    return Contestant(training_step, f"{peer_text}, compiled whole; AdamW fused, no masters, no z-loss")


def eager(task: Task) -> Contestant:
    module, peer_text = _model(task)
    training_step = make_training_step(task, module, _loss_of(module, task))
    return Contestant(training_step, f"{peer_text}, eager; AdamW fused, no masters, no z-loss")
