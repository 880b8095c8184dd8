"""How steps are computed: by which kernels on this device, and how else they can be, without FP8 or by plain PyTorch.

The recipe's kernels are chosen, or, with a note, an available fallback; the same on every rank with the same software.
Plain PyTorch computes the same with few and old operations: products of matrices, softmax, elementwise work. What it
cannot take the place of: the library of the products themselves, Transformer Engine's linear layers, the optimizer.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import nn

from megastable.base.process import install_command
from megastable.config.rules import caps_logits, writes_scores
from megastable.config.tree import RunConfig
from megastable.engine.elementwise_choice import choose_parts
from megastable.fp8.controller import Fp8
from megastable.model.blocked import is_supported
from megastable.model.gpt import Block, Embedding, FinalNorm
from megastable.model.grouped import ALIGNED, can_group
from megastable.model.kernels import DTYPES, Kernels
from megastable.model.loss import LossFunction


def choose_kernels(config: RunConfig, device: torch.device) -> Kernels:
    """The kernels of a run on this device."""
    wanted_kernels, fallback_notes = config.kernels, []
    attention_core: str = wanted_kernels.attention
    is_compiled = wanted_kernels.compile
    dtype, on_gpu = DTYPES[config.precision.kind], device.type == "cuda"
    best_core = "blocked" if is_supported(device, dtype) and not config.parallel.is_ring else "sdpa"
    if _no_attention(best_core, config, device, dtype):
        best_core = "reference"
    if attention_core == "auto":
        attention_core = best_core
    elif reason := _no_attention(attention_core, config, device, dtype):
        fallback_notes.append(f"kernels.attention={attention_core}: {reason}; {best_core} is used")
        attention_core = best_core
    if on_gpu and config.parallel.is_ring and writes_scores(config.model, config.segmented):
        fallback_notes.append(
            "parallel.context_by=ring: there is no fused kernel for documents, windows or caps in a ring; scores are "
            "written out, which is slow"
        )
    fp8_backend, fp8_notes = _fp8(config, device)
    fallback_notes += fp8_notes
    if is_compiled == "auto":
        is_compiled = on_gpu and _no_compilation(config, on_gpu, fp8_backend) is None
    elif is_compiled and (reason := _no_compilation(config, on_gpu, fp8_backend)):
        fallback_notes.append(f"kernels.compile=true: {reason}; nothing is compiled")
        is_compiled = False
    loss_kind = "chunked" if wanted_kernels.loss == "auto" else wanted_kernels.loss
    own_parts, own_notes = choose_parts(config, device)
    is_grouped = wanted_kernels.experts == "grouped" or (
        wanted_kernels.experts == "auto" and can_group(device, dtype)
    )
    if is_grouped and (reason := _no_groups(config, dtype)):
        is_grouped = False
        if wanted_kernels.experts == "grouped":
            fallback_notes.append(f"kernels.experts=grouped: {reason}; each expert is a product of its own")
    all_notes = *fallback_notes, *own_notes
    return Kernels(
        attention_core, loss_kind, is_compiled, fp8_backend, all_notes, own_parts, grouped=is_grouped
    )


def _no_groups(config: RunConfig, dtype: torch.dtype) -> str | None:
    """The reason why experts cannot be one product."""
    if config.model.experts is None:
        return "the model has no experts"
    if config.precision.fp8 is not None:
        return "FP8 has a scale for each matrix"
    if config.parallel.zero == 3:
        return "ZeRO 3 gathers the weights of one module at a time"
    if config.parallel.schedule == "zero_bubble":
        return "products whose weight gradients come later are single ones"
    fitting = ALIGNED // dtype.itemsize
    widths = config.model.hidden, config.model.expert_width // config.parallel.tensor
    if any(width % fitting for width in widths):
        return (
            f"it needs model.hidden and the width of a tensor rank's experts to be multiples of {fitting}, and they "
            f"are {widths[0]} and {widths[1]}"
        )
    return None


def _no_attention(attention: str, config: RunConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why this core cannot be used."""
    if config.parallel.is_ring:
        # Where torch's kernels do not do, ring attention writes the scores out in parts.
        is_known = attention in ("sdpa", "reference")
        return None if is_known else "it has no log-sum-exps, which parallel.context_by=ring needs"
    if attention == "blocked" and not is_supported(device, dtype):
        return "it supports only CPUs, in fp32, and in bf16 where oneDNN has bf16 products"
    if config.model.attention_softcap is not None and not caps_logits(attention, device.type):
        refusing_kernels = "Transformer Engine does" if attention == "te" else "torch's kernels for CPUs do"
        return f"{refusing_kernels} not cap logits, as model.attention_softcap asks for"
    if attention == "te":
        fp8_config = config.precision.fp8
        if fp8_config is not None and fp8_config.recipe == "delayed":
            # It would register itself in Transformer Engine's global list, and its messages would disturb a pipeline's.
            return "with FP8's delayed scales it takes part in Transformer Engine's own reductions"
        if find_spec("transformer_engine") is None:
            return f"Transformer Engine is not installed ({install_command('gpu')})"
        if device.type != "cuda" or dtype is torch.float32:
            return "Transformer Engine computes on GPUs only, in bf16 and fp16"
        if config.segmented:
            apart = config.data.keep_documents_apart
            asking_key = "data.keep_documents_apart" if apart else "train.sequence_warmup"
            return f"it does not keep parts of a sample apart as {asking_key} asks for"
    return None


def _fp8(config: RunConfig, device: torch.device) -> tuple[str, list[str]]:
    """The backend, and why it is not the one asked for."""
    wanted_fp8 = config.precision.fp8
    if wanted_fp8 is None:
        return "off", []
    if wanted_fp8.backend == "emulated" or (wanted_fp8.backend == "auto" and device.type == "cpu"):
        return "emulated", []
    from megastable.fp8.te import why_not

    reason = why_not(config, device)
    if reason is None:
        return "te", []
    backend_key = f"precision.fp8.backend={wanted_fp8.backend}"
    return "emulated", [f"{backend_key}: {reason}; FP8 is emulated, which is slower than no FP8"]


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


@dataclass(frozen=True)
class Numerics:
    """fp8: whether layers compute in FP8. plain: the kinds of kernels (of `Kernels.replaceable`) in whose place plain
    PyTorch computes."""

    fp8: bool
    plain: frozenset[str] = frozenset()


class NumericsSwitch:
    """Switches this rank's part of a model between steps. Weights, random numbers and dropout masks do not depend on
    it. All ranks switch alike."""

    def __init__(self, module: nn.Module, kernels: Kernels, loss: LossFunction, fp8: Fp8 | None) -> None:
        self.kernels, self._loss, self._fp8 = kernels.replaceable, loss, fp8
        self._blocks = [part for part in module.modules() if isinstance(part, Block)]
        self._ends = [part for part in module.modules() if isinstance(part, Embedding | FinalNorm)]
        self._compiled, self._plain = loss.compiled, frozenset[str]()

    @property
    def now(self) -> Numerics:
        return Numerics(self._fp8 is not None and self._fp8.on, self._plain)

    def kinds_of(self, names: Collection[str]) -> frozenset[str]:
        """The kinds of this run's kernels with these names; others are not in use."""
        return frozenset(
            kernel_kind for kernel_kind, kernel_name in self.kernels.items() if kernel_name in names
        )

    def switch_to(self, to: Numerics) -> None:
        """Compute so from the next step on. Delayed scales of FP8 lose their history where FP8 is switched."""
        if self._fp8 is not None:
            self._fp8.on = to.fp8
        if to.plain == self._plain:
            return
        self._plain = to.plain
        for block in self._blocks:
            block.compute_plainly(
                "attention" in to.plain,
                "compile" in to.plain,
                own="elementwise" in to.plain,
                grouped="grouped" in to.plain,
            )
        for end_part in self._ends:
            end_part.plain = "compile" in to.plain
        self._loss.plain = "loss" in to.plain
        self._loss.compiled = self._compiled and "compile" not in to.plain
