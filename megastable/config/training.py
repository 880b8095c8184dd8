"""Sections of the configuration: length and batch of a run, its layout over ranks, its precision and its checkpoints.

Types of keys that have a unit come first: times, steps or a time, numbers of samples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megastable.config.warmups import BatchWarmup, SequenceWarmup
from megastable_guard.section import Section

LONGEST = 10**9  # seconds, 31 years: timers and timeouts of Python and torch overflow beyond a few billion
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}  # of a time in words
Seconds = Annotated[float, Field(ge=0.0, le=LONGEST)]
PositiveSeconds = Annotated[float, Field(gt=0.0, le=LONGEST)]
WholeSeconds = Annotated[int, Field(ge=1, le=LONGEST)]
SampleCount = Annotated[int, Field(ge=0, le=10**6)]  # read at once, whole


def _store_url(given: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s?#]+", given):
        raise ValueError("it is not the URL of a folder in an object store, such as s3://bucket/folder")
    return given.rstrip("/")


StoreUrl = Annotated[str, AfterValidator(_store_url)]


@dataclass(frozen=True)
class InWords:
    """What a key accepts, where its type does not say it."""

    words: str


def seconds_of(text: str) -> float | None:
    """Seconds of a time such as `90s`, `30min` or `1.5h`; None if it is none, or not above 0."""
    time_match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*", text)
    seconds = float(time_match[1]) * UNITS[time_match[2]] if time_match else 0.0
    return seconds if 0 < seconds <= LONGEST else None


def _steps_or_time(given: Any) -> Any:
    if isinstance(given, str) and seconds_of(given) is not None:
        return given.strip()
    try:
        steps = int(given)
    except (TypeError, ValueError, OverflowError):
        steps = -1
    if steps < 0 or (isinstance(given, float) and given != steps):
        raise PydanticCustomError("steps_or_time", "expected steps or a time")
    return steps


StepsOrTime = Annotated[
    NonNegativeInt | str,
    BeforeValidator(_steps_or_time),
    InWords("whole number at least 0, or a time above 0 in s, min or h"),
]


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
    if `context` is above 1 and not a ring; `context`, in a ring twice that, divides `model.sequence_length`; `pipeline`
    is at most `model.layers`, and above 1 needs `zero` = 1; `replicas` divides the data-parallel ranks, and above 1
    needs bf16, `zero` = 1 and an optimizer other than muon; `expert` divides the data-parallel ranks and
    `model.experts.count`, and above 1 needs `zero` of 1 or 2, `replicas` = 1, an optimizer other than muon, and
    no clipping of workers; `sequence` needs `tensor` above 1, which divides `model.sequence_length` / `context`;
    `tensor_overlap` above 1 needs `sequence`, and divides what that leaves a rank of the sequence; `schedule` =
    `zero_bubble` needs `pipeline` above 1; `model_chunks` above 1 needs `pipeline` above 1 and `schedule` = `1f1b`, and
    `pipeline` x `model_chunks` is at most `model.layers`.
    """

    tensor: PositiveInt = 1
    """Tensor-parallel size (arXiv:1909.08053). [ranks]"""
    pipeline: PositiveInt = 1
    """Pipeline stages (arXiv:1806.03377). [ranks]"""
    context: PositiveInt = 1
    """Data-parallel ranks that share every sample, each a part of its tokens. [ranks]"""
    context_by: Literal["ulysses", "ring"] = "ulysses"
    """How attention sees the tokens of the other `context` ranks: by exchanging tokens for heads, and back
    (`ulysses`, arXiv:2309.14509), or by sending keys and values round (`ring`, arXiv:2310.01889); which costs what:
    docs/scaling.md#context."""
    sequence: bool = False
    """Sequence parallelism over the tensor group (arXiv:2205.05198)."""
    keep_gathered: bool = False
    """Under `sequence`, keep what the blocks' layers gather along the sequence until the backward pass. Otherwise they
    keep their own part and gather again: `tensor` times less memory, a quarter more messages. `recompute` = `full`
    gathers again anyway, with the block."""
    tensor_overlap: PositiveInt = 1
    """Under `sequence`, chunks in which the blocks' layers send along the sequence, each while the product of another
    one is computed (docs/scaling.md#overlap-of-tensor-parallelism); layers in FP8 send the whole. [chunks]"""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage (arXiv:1910.02054); 0 is refused, as DeepSpeed is wrong without it: 1 costs nothing on one rank."""
    replicas: PositiveInt = 1
    """Groups of neighbouring data-parallel ranks, such as a host, in each of which ZeRO shares out the whole state
    (hybrid sharding, arXiv:2304.11277, section 3.2.2): weights are gathered inside a group only, and gradients summed
    inside first (docs/scaling.md#replicas). [groups]"""
    expert: PositiveInt = 1
    """Neighbouring data-parallel ranks that share out the experts of every block, and send each other the tokens
    (arXiv:2006.16668; docs/experts.md#expert-parallelism). [ranks]"""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: of nothing, of the attention's core and the SwiGLU (arXiv:2205.05198), or of whole
    blocks (arXiv:1604.06174)."""
    schedule: Literal["1f1b", "zero_bubble"] = "1f1b"
    """Order of the passes on pipeline stages: `1f1b` (arXiv:2006.09503), or `zero_bubble`, ZB-H1 of arXiv:2401.10241:
    weight gradients of the blocks' layers are computed while a stage would wait. The same numbers, more memory on the
    later stages (docs/scaling.md#pipelines)."""

    model_chunks: PositiveInt = 1
    """Chunks of the model on each pipeline stage: above 1, interleaved 1F1B (arXiv:2104.04473, section 2.2.2). As
    much less bubble, as many times the messages between stages, more memory (docs/scaling.md#pipelines). [chunks]"""

    @property
    def is_ring(self) -> bool:
        """Whether keys and values go round the ranks that share a sample."""
        return self.context > 1 and self.context_by == "ring"

    @property
    def least_ranks(self) -> int:
        """The fewest ranks that it can be laid out on; all numbers of ranks are multiples of it."""
        return self.tensor * self.pipeline * lcm(self.context, self.replicas, self.expert)

    @property
    def gathers_again(self) -> bool:
        """Whether the backward pass gathers the inputs of the blocks' layers, of which only shards are kept."""
        return self.sequence and not self.keep_gathered and self.recompute != "full"


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


class VitalsConfig(Section):
    """The vitals that a checkpoint stores, and the changes that make a state a different one (checkpoint/vitals.py).

    Numbers are read back bit for bit, whatever the layout; only the order of a sum differs. Moments kept in bf16 are
    rounded: `size_change` is 2^-8 there. Losses are computed in fp32 when saved and when checked, and rounding moves
    single samples either way.
    """

    probes: SampleCount = 32
    """Samples whose losses are stored, the first of the order; each save and each start costs a forward pass over them;
    0: none, sizes of weights and moments only. [samples]"""
    size_change: PositiveFloat = 1e-4
    """Relative change of a tensor's norm or largest magnitude that makes it a different one."""
    loss_change: PositiveFloat = 0.005
    """Median change of the probes' losses that makes it a different state. [nats per token]"""
    loss_change_low: PositiveFloat = 0.05
    """As `loss_change`, if one of the two was computed in 16 bits. [nats per token]"""
    rise: PositiveFloat = 0.5
    """Excess of the loss over the previous checkpoint's and the latest training losses that prevents a healthy mark,
    however steady later steps are. [nats per token]"""
    worse: PositiveFloat = 0.5
    """How much worse than when trained on, beyond four times their scatter, the latest samples must be on a resumed
    state before its checkpoint is blamed for trouble soon after. [nats per token]"""


class CheckpointConfig(Section):
    """When checkpoints are written and which are kept (docs/checkpoints.md)."""

    interval: StepsOrTime = 500
    """Steps between checkpoints, or the time, by the clock of rank 0: `90s`, `30min`, `2h`; 0: only at the end and on
    a signal. [steps]"""
    keep: PositiveInt = 3
    """Newest checkpoints kept, besides the newest healthy one and all pinned ones. [checkpoints]"""
    keep_every: NonNegativeInt = 0
    """Keep one checkpoint for good per this many steps, the first; 0: none. [steps]"""
    healthy_after: NonNegativeInt = 50
    """Steps on trend after a checkpoint before it counts as healthy. [steps]"""
    asynchronous: bool = True
    """Write in the background: the step waits only for a copy in host memory."""
    staging: Path | None = Field(default=None, examples=["/scratch/megastable"])
    """Local disk of every host, to write to before uploading to `run.dir`; null: write to `run.dir`."""
    upload: StoreUrl | None = Field(default=None, examples=["s3://bucket/runs/mine"])
    """Folder in an object store to which checkpoints and the run's records are uploaded behind training, and from which
    a run is brought back whose directory is gone; needs `run.dir`; null: none (docs/object-stores.md)."""
    at_end: bool = True
    """Write a checkpoint after the last step."""
    on_failure: Literal["continue", "stop"] = "continue"
    """Reaction when a checkpoint cannot be written."""
    vitals: VitalsConfig = VitalsConfig()

    @property
    def steps_between(self) -> int:
        """Steps from one checkpoint to the next; 0 if time decides, or if there are none."""
        return 0 if isinstance(self.interval, str) else self.interval

    @property
    def seconds_between(self) -> float | None:
        """Seconds from the begin of one checkpoint to that of the next; None if they do not decide."""
        return seconds_of(self.interval) if isinstance(self.interval, str) else None
