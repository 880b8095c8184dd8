"""Choose the kernels that compute the model on this device: the recipe's, or, with a note, an available fallback.

Pure except for the check of installed packages; the same on every rank with the same software.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch

from megastable.base.installation import install_command
from megastable.config.rules import caps_logits
from megastable.config.tree import RunConfig
from megastable.model.blocked import supported
from megastable.model.kernels import DTYPES, Kernels


def choose(config: RunConfig, device: torch.device) -> Kernels:
    """The kernels of a run on this device."""
    wanted, notes = config.kernels, []
    attention: str = wanted.attention
    compiled = wanted.compile
    dtype, on_gpu = DTYPES[config.precision.kind], device.type == "cuda"
    best = "blocked" if supported(device, dtype) else "sdpa"
    if _no_attention(best, config, device, dtype):
        best = "reference"
    if attention == "auto":
        attention = best
    elif reason := _no_attention(attention, config, device, dtype):
        notes.append(f"kernels.attention={attention}: {reason}; {best} is used")
        attention = best
    fp8, told = _fp8(config, device)
    notes += told
    if compiled == "auto":
        compiled = on_gpu and _no_compilation(config, on_gpu, fp8) is None
    elif compiled and (reason := _no_compilation(config, on_gpu, fp8)):
        notes.append(f"kernels.compile=true: {reason}; nothing is compiled")
        compiled = False
    loss = "chunked" if wanted.loss == "auto" else wanted.loss
    return Kernels(attention, loss, compiled, fp8, tuple(notes))


def _no_attention(attention: str, config: RunConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why this core cannot be used."""
    if attention == "blocked" and not supported(device, dtype):
        return "it supports only CPUs, in fp32, and in bf16 where oneDNN has bf16 products"
    if config.model.attention_softcap is not None and not caps_logits(attention, device.type):
        whose = "Transformer Engine does" if attention == "te" else "torch's kernels for CPUs do"
        return f"{whose} not cap logits, as model.attention_softcap asks for"
    if attention == "te":
        fp8 = config.precision.fp8
        if fp8 is not None and fp8.recipe == "delayed":
            # It would register itself in Transformer Engine's global list, and its messages would disturb a pipeline's.
            return "with FP8's delayed scales it takes part in Transformer Engine's own reductions"
        if find_spec("transformer_engine") is None:
            return f"Transformer Engine is not installed ({install_command('gpu')})"
        if device.type != "cuda" or dtype is torch.float32:
            return "Transformer Engine computes on GPUs only, in bf16 and fp16"
        if config.segmented:
            key = "data.keep_documents_apart" if config.data.keep_documents_apart else "train.sequence_warmup"
            return f"it does not keep parts of a sample apart as {key} asks for"
    return None


def _fp8(config: RunConfig, device: torch.device) -> tuple[str, list[str]]:
    """The backend, and why it is not the one asked for."""
    wanted = config.precision.fp8
    if wanted is None:
        return "off", []
    if wanted.backend == "emulated" or (wanted.backend == "auto" and device.type == "cpu"):
        return "emulated", []
    from megastable.fp8.te import why_not

    reason = why_not(config, device)
    if reason is None:
        return "te", []
    key = f"precision.fp8.backend={wanted.backend}"
    return "emulated", [f"{key}: {reason}; FP8 is emulated, which is slower than no FP8"]


def _no_compilation(config: RunConfig, on_gpu: bool, fp8: str) -> str | None:
    """The reason why blocks cannot be compiled."""
    if fp8 == "emulated":
        return "emulated FP8 inspects values while it computes"
    if config.parallel.zero == 3:
        return "ZeRO 3 gathers the weights between the operations of a block"
    if on_gpu:
        return None if find_spec("triton") else "triton is not installed"
    named = os.environ.get("CXX")
    if not any(shutil.which(c) for c in ([named] if named else ["g++", "clang++", "c++"])):
        return "there is no C++ compiler here (g++)"
    return None
