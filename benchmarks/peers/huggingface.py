"""transformers' model of the same shape and weights, in a typical training loop, alone and under DeepSpeed.

It uses its own attention and its own loss: cross-entropy over logits in fp32, no z-loss, so slightly less work than
ours. Tokens and labels are the same; the labels are passed shifted, and nothing is padded.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import RATE, Contestant, Task, Unavailable, adamw, trained
from megastable.base.errors import ConfigError
from megastable.model.flops import parameters
from megastable_tools.convert.huggingface import architectures, names, settings


def _model(task: Task) -> tuple[nn.Module, str]:
    try:
        import transformers
    except ImportError as error:
        raise Unavailable(f"transformers is not installed ({error}); it is in the extra [hf]") from None
    c = task.config.model
    # Its vocabulary has no padding: the same rows are all tokens there.
    c = c.model_copy(update={"vocab_size": c.padded_vocab})
    try:
        table, told = names.table(c), settings.settings_of(c, str(task.dtype).removeprefix("torch."), {})
    except ConfigError as error:
        raise Unavailable(str(error)) from None
    attention = "sdpa"
    if task.device.type == "cuda" and importlib.util.find_spec("flash_attn"):
        attention = "flash_attention_2"
    told["use_cache"] = False
    shape = transformers.AutoConfig.for_model(told.pop("model_type"), **told)
    with torch.device(task.device):
        # Not cast afterwards: its rotary frequencies must stay in fp32.
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(
            shape, dtype=task.dtype, attn_implementation=attention
        )
    theirs: dict[str, Tensor] = {}
    for name, parts in table.items():
        theirs |= names.split(task.weights[name], parts)
    missing, unexpected = module.load_state_dict(theirs, strict=False)
    if unexpected or [name for name in missing if not (c.tied and name == "lm_head.weight")]:
        raise Unavailable(
            f"transformers {transformers.__version__} has other parameters: {missing} {unexpected}"
        )
    said = f"{type(module).__name__} of transformers {transformers.__version__}, {attention}"
    return module.train(), said


def _loss_of(forward: Any, task: Task) -> Any:
    # Compiled by torch below 2.14 it would write out its causal mask, which no flash kernel takes. Qwens accept
    # prepared
    # masks, and None is best: the kernel is causal by itself.
    c = task.config.model
    qwen = c.window is None and architectures.architecture_of(c) in (architectures.QWEN2, architectures.QWEN3)
    masks: dict[str, Any] = {"attention_mask": {"full_attention": None}} if qwen else {}

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = forward(
            input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False, **masks
        ).loss
        return value

    return loss_of


def compiled(task: Task) -> Contestant:
    """torch.compile of the whole model, as is usual, unless the recipe says kernels.compile=false."""
    if task.config.kernels.compile is False:
        return eager(task)
    module, said = _model(task)
    step = trained(task, module, _loss_of(torch.compile(module), task))
    return Contestant(step, f"{said}, compiled whole; AdamW fused, no masters, no z-loss")


def eager(task: Task) -> Contestant:
    module, said = _model(task)
    step = trained(task, module, _loss_of(module, task))
    return Contestant(step, f"{said}, eager; AdamW fused, no masters, no z-loss")


def under_deepspeed(task: Task) -> Contestant:
    """The model, compiled, under ZeRO-1 with a typical configuration: bf16, clipping, otherwise DeepSpeed's
    defaults (gradients accumulate in bf16, masters and moments are fp32).

    engine/ is the only folder of the package that trains with DeepSpeed; a peer should not depend on it.
    """
    import deepspeed

    module, said = _model(task)
    c, kind = task.config, task.config.precision.kind
    told = {
        "train_micro_batch_size_per_gpu": c.train.micro_batch,
        "gradient_accumulation_steps": len(task.batches),
        "gradient_clipping": c.optimizer.clip,
        "bf16": {"enabled": kind == "bf16"},
        # Its default bucket, 500M gradients for any model, would dominate the memory of a small one.
        "zero_optimization": {"stage": 1, "reduce_bucket_size": min(500_000_000, parameters(c.model))},
        "steps_per_print": 1 << 60,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=adamw(module, c.optimizer), config=told, dist_init_required=False
        )
    compiled = c.kernels.compile is not False
    if compiled:
        engine.module.compile()
    loss_of, n = _loss_of(engine, task), len(task.batches)

    def step() -> Tensor:
        total: Any = 0.0
        for tokens, labels in task.inputs():
            loss = loss_of(tokens, labels)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / n
        assert isinstance(total, Tensor)
        return total

    for group in engine.optimizer.param_groups:
        group["lr"] = RATE
    how = "compiled whole" if compiled else "eager"
    return Contestant(
        step, f"{said}, {how}; {type(engine.optimizer).__name__}, fp32 masters, bf16 sums, no z-loss",
        close=engine.destroy,
    )  # fmt: skip
