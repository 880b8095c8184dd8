"""Sections of the configuration: length and batch of a run, its layout over ranks, and its precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from megastable.config.units import SampleCount
from megastable.config.warmups import BatchWarmup, SequenceWarmup
from megastable_guard.section import Section


class TrainConfig(Section):
    """Length, batch and evaluation. `micro_batch` divides `global_batch`; together with the number of ranks they
    determine the gradient accumulation."""

    steps: PositiveInt = 1000
    """Length of the run. [steps]"""
    global_batch: int = Field(default=64, ge=1, le=10**6)
    """Batch of a step, over all ranks. [samples]"""
    micro_batch: PositiveInt = 1
    """Batch of one forward pass on a rank. [samples]"""
    batch_warmup: BatchWarmup | None = Field(default=None, examples=[{"start": 8, "tokens": 1_000_000}])
    """A smaller global batch at the start of the run; null: none."""
    sequence_warmup: SequenceWarmup | None = Field(
        default=None, examples=[{"start": 64, "tokens": 1_000_000}]
    )
    """Shorter sequences at the start of the run; null: none."""
    eval_interval: NonNegativeInt = 200
    """Steps between evaluations; 0: only at the end. [steps]"""
    eval_samples: SampleCount = 256
    """Samples of the validation split, always the same ones; 0: never evaluate. [samples]"""
    eval_samples_per_corpus: SampleCount | None = Field(default=None, examples=[256])
    """In a blend, samples of each corpus for a loss of its own; null: `eval_samples` over the number of corpora at the
    start of the run; 0: none. The same for each set of `data.validation`. [samples]"""


class ParallelConfig(Section):
    """The model's layout over ranks; data parallelism takes the rest of them.

    `tensor` divides `model.heads`, `kv_heads`, `ffn` and `vocab_multiple`; `tensor` x `context` divides `model.heads`
    if `context` is above 1; `context` divides `model.sequence_length`; `pipeline` is at most `model.layers`, and above
    1 needs `zero` = 1; `sequence` needs `tensor` above 1, which divides `model.sequence_length` / `context`.
    """

    tensor: PositiveInt = 1
    """Tensor-parallel size (arXiv:1909.08053). [ranks]"""
    pipeline: PositiveInt = 1
    """Pipeline stages (arXiv:1806.03377). [ranks]"""
    context: PositiveInt = 1
    """Data-parallel ranks that share every sample, each a part of its tokens (arXiv:2309.14509). [ranks]"""
    sequence: bool = False
    """Sequence parallelism over the tensor group (arXiv:2205.05198)."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage (arXiv:1910.02054); 0 is refused, as DeepSpeed is wrong without it: 1 costs nothing on one rank."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: of nothing, of the attention's core and the SwiGLU (arXiv:2205.05198), or of whole
    blocks (arXiv:1604.06174)."""


class Fp8Config(Section):
    """The products of the blocks' linear layers in FP8 (arXiv:2209.05433; docs/fp8.md). When a run leaves FP8 and
    returns to it: `stability.policy`.

    `keep_first` + `keep_last` is below `model.layers`. A recipe's name stands for the section:
    `precision.fp8=delayed`.
    """

    recipe: Literal["current", "delayed", "block"] = "current"
    """Where scales come from: the tensor's own largest magnitude (`current`), that of the last `history` steps
    (`delayed`), or that of 128 neighbours, 128 x 128 of a weight (`block`, arXiv:2412.19437, section 3.3)."""
    backend: Literal["auto", "te", "emulated"] = "auto"
    """Transformer Engine (`te`), or quantize and multiply what is left (`emulated`); `auto`: `te` where available."""
    formats: Literal["auto", "hybrid", "e4m3"] = "auto"
    """`hybrid`: E4M3 forward, E5M2 for gradients; `auto`: `hybrid`, but E4M3 throughout with `block`."""
    keep_first: NonNegativeInt = 0
    """First blocks that stay in the precision of the rest. [blocks]"""
    keep_last: NonNegativeInt = 0
    """Last blocks that stay in the precision of the rest. [blocks]"""
    keep: tuple[str, ...] = Field(default=(), examples=[["blocks.3.mlp.down"]])
    """Linear layers that stay in the precision of the rest; `megastable fp8-check` recommends some."""
    history: int = Field(default=16, ge=1, le=1024)
    """`delayed`: steps over which the largest magnitude is taken. [steps]"""
    margin: int = Field(default=0, ge=0, le=8)
    """`delayed`: headroom for magnitudes that the history has not seen. [powers of 2]"""

    @field_validator("keep", mode="before")
    @classmethod
    def _one(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given


class PrecisionConfig(Section):
    """Precision of computing; master weights and gradient sums are fp32."""

    kind: Literal["bf16", "fp32", "fp16"] = "bf16"
    """Precision of weights and activations."""
    fp8: Fp8Config | None = Field(default=None, examples=["current"])
    """FP8 for the blocks' linear layers: a recipe's name or a section; null: none."""
    initial_scale_power: int = Field(default=16, ge=1, le=32)
    """fp16: the loss scale starts at 2 to this power."""
    scale_window: PositiveInt = 1000
    """fp16: steps without overflow before the loss scale doubles. [steps]"""

    in_a_word: ClassVar[Mapping[str, str]] = {"fp8": "recipe"}

    @field_validator("fp8", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if given in (False, "off", "none"):
            return None
        return {} if given is True else {"recipe": given} if isinstance(given, str) else given
