"""Defines the configuration of a run: one tree of pydantic models, passed on in parts.

    python -m megastable.config launch/recipes/quickstart.yaml model.layers=12 parallel.tensor=2

prints the resolved tree and the DeepSpeed JSON that follows from it. Reading recipes and overrides is in
`recipe.py`; the DeepSpeed side is in `deepspeed_json.py`. An unknown key, an impossible combination or a
combination that DeepSpeed is known to get wrong is a `ConfigError` that names the key.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.config.rules import find_impossible
from megastable.config.stability import StabilityConfig
from megastable.config.supervise import SuperviseConfig
from megastable.config.training import (
    CheckpointConfig,
    ParallelConfig,
    PositiveSeconds,
    PrecisionConfig,
    StoreUrl,
    TrainConfig,
    WholeSeconds,
)
from megastable.config.warmups import Stages, stage_batches, stage_pieces
from megastable_guard.section import Fraction, Section


class ProfileConfig(Section):
    """A trace of a few steps by torch.profiler, written to `profiles/` of the run directory (docs/profiling.md)."""

    start: PositiveInt = 200
    """First step that is traced; `from` means the same. [step]"""
    steps: PositiveInt = Field(default=3, le=100)
    """Length of the trace. [steps]"""
    ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1)
    """Ranks that write a trace. [ranks]"""

    @model_validator(mode="before")
    @classmethod
    def _from_is_start(cls, given: Any) -> Any:
        # No field of a class can be called so.
        if not isinstance(given, dict) or "from" not in given:
            return given
        if "start" in given:
            raise ValueError("start and from mean the same: give one of them")
        return {"start" if key == "from" else key: value for key, value in given.items()}


LM_EVAL = (
    "lm_eval run --model hf --model_args pretrained={model} --tasks arc_easy --device {device} "
    "--output_path {results}"
)


class EvalConfig(Section):
    """The supervisor's evaluation of checkpoints by a program, such as lm-evaluation-harness: in processes of its own,
    which training never waits for."""

    command: str | None = Field(default=None, examples=[LM_EVAL])
    """The program; null: none. No shell reads it. {model} becomes the folder of the exported checkpoint, {results} the
    JSON file that it writes, {step} and {device} what they say."""
    interval: PositiveInt = 1000
    """The first checkpoint at or after each multiple of it is evaluated, and the last one. [steps]"""
    timeout: PositiveSeconds = 7200.0
    """Time limit of the export, and of the program. [seconds]"""
    device: str = Field(default="cpu", min_length=1, examples=["cuda:0"])
    """Passed on to the program; with `cpu` it sees no GPU."""
    threads: PositiveInt = 1
    """Threads that the program's numeric libraries may use. [threads]"""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of the exported weights."""
    scratch: Path | None = Field(default=None, examples=["/tmp"])
    """Folder for the exported checkpoint, which is deleted afterwards; null: the run directory."""

    @field_validator("command")
    @classmethod
    def _can_be_split(cls, command: str | None) -> str | None:
        if command is None:
            return None
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"{error}: close the quotes") from None
        if not words:
            raise ValueError("it is empty: null for none")
        if missing := [name for name in ("{model}", "{results}") if name not in command]:
            raise ValueError(f"{' and '.join(missing)} must be in it: where the program finds or puts them")
        return command

    def fill_command(self, model: Path, results: Path, step: int) -> list[str]:
        """The command with its places filled in."""
        command_words = shlex.split(self.command or "")
        values = {"model": str(model), "results": str(results), "step": str(step), "device": self.device}
        for place_name, place_value in values.items():
            command_words = [
                command_word.replace(f"{{{place_name}}}", place_value) for command_word in command_words
            ]
        return [os.path.expanduser(command_words[0]), *command_words[1:]]


class CorpusConfig(Section):
    """One corpus of the blend: a folder that `megastable prepare` made, here or in an object store."""

    path: Path = Field(examples=["data/mine"])
    """The folder."""
    url: StoreUrl | None = Field(default=None, examples=["s3://bucket/mine"])
    """Where the folder is in an object store; `path` is then a local folder of every host, to which shards are fetched
    (docs/object-stores.md)."""
    cache_gib: PositiveFloat | None = Field(default=None, examples=[500.0])
    """With `url`: shards that `path` holds at most; null: all. [GiB]"""
    weight: PositiveFloat = 1.0
    """Share of the blend, relative to the weights of the other corpora."""

    @field_validator("path")
    @classmethod
    def _is_local(cls, path: Path) -> Path:
        if (scheme := path.parts[0] if path.parts else "").endswith(":") and len(scheme) > 2:
            raise ValueError(
                f"{scheme}// is a URL: give it as url, and as path a local folder for its shards"
            )
        return path

    @model_validator(mode="after")
    def _limits_a_url(self) -> CorpusConfig:
        if self.cache_gib is not None and self.url is None:
            raise ValueError("cache_gib limits what is fetched from a url: give one, or leave cache_gib out")
        return self


class ValidationConfig(Section):
    """A set of validation samples of its own: a folder that `megastable prepare` made, with the corpora's tokenizer."""

    path: Path = Field(examples=["data/held-out"])
    """The folder; all of its text counts, or its validation split if the run trains on the rest of it."""
    name: str | None = Field(default=None, min_length=1, max_length=100, examples=["held-out"])
    """Name of its loss; null: that of its manifest."""


Corruption = Literal[
    "outside of the vocabulary", "binary data", "wrong encoding", "repetition", "encoded data", "random tokens",
    "shuffled text", "another language or register",
]  # fmt: skip


class LookAheadConfig(Section):
    """The supervisor's scan ahead of training on a spare core; clearly corrupt text goes on the skip ledger."""

    steps: NonNegativeInt = 0
    """Steps to scan ahead of the run; 0: none. [steps]"""
    score: PositiveFloat = 5.0
    """Oddity from which text counts as corrupt: about -log10 of the share of ordinary text that is as odd."""
    kinds: tuple[Corruption, ...] = (
        "outside of the vocabulary", "binary data", "repetition", "random tokens", "shuffled text",
    )  # fmt: skip
    """Kinds of corruption to look for."""
    share: Fraction = 0.06
    """Share of a sample that must be corrupt."""
    most: Fraction = 0.01
    """Share of the scanned positions that may be skipped, besides the first 64."""


class DataConfig(Section):
    """The corpora, and how samples are made of them (docs/data.md)."""

    corpora: list[CorpusConfig] = Field(default_factory=list, examples=[[{"path": "data/mine"}]])
    """The blend; at least one corpus is needed to train."""
    validation: list[ValidationConfig] = Field(default_factory=list, examples=[[{"path": "data/held-out"}]])
    """Validation samples of your own, in place of the splits that the corpora set aside (docs/evaluation.md)."""
    skip: list[tuple[NonNegativeInt, NonNegativeInt]] = Field(default_factory=list, examples=[[[1200, 1300]]])
    """Ranges [first, end) of the sample order that are never trained on, `end` not included. [samples]"""
    keep_documents_apart: bool = False
    """Attention stays inside documents, and positions restart at each."""
    prefetch: int = Field(default=2, ge=1, le=1000)
    """Steps that are prepared in the background. [steps]"""
    accept_changed_manifest: bool = False
    """Resume although the corpus is not the one that the checkpoint was trained on."""
    look_ahead: LookAheadConfig = LookAheadConfig()

    @field_validator("skip")
    @classmethod
    def _forward(cls, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        for range_first, range_end in ranges:
            if range_end <= range_first:
                raise ValueError(
                    f"range [{range_first}, {range_end}) is empty or reversed: write [first, end), end not included"
                )
        return ranges


class ScheduleConfig(Section):
    """The learning rate: linear warm-up to `optimizer.lr`, then a decay to `floor`.

    It counts applied updates, or with `warmup_tokens` their tokens, and then all lengths are in tokens: with a batch
    warm-up the two are not the same.
    """

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the decay (`cosine`: arXiv:1608.03983; `wsd`, constant and then a final decay: arXiv:2404.06395)."""
    warmup_steps: NonNegativeInt | None = 100
    """Length of the warm-up; null with `warmup_tokens`. [steps]"""
    warmup_tokens: NonNegativeInt | None = Field(default=None, examples=[1_000_000])
    """Length of the warm-up, in place of `warmup_steps`; 0: none. [tokens]"""
    decay_steps: PositiveInt | None = Field(default=None, examples=[100])
    """`wsd`: length of the final decay; null: a tenth of the run. [steps]"""
    decay_tokens: PositiveInt | None = Field(default=None, examples=[1_000_000])
    """As `decay_steps`, with `warmup_tokens`. [tokens]"""
    decay: Literal["linear", "cosine", "sqrt"] = "linear"
    """`wsd`: shape of the final decay; `sqrt`: 1 - the root of the share done (arXiv:2405.18392, section 3)."""
    total_steps: PositiveInt | None = Field(default=None, examples=[1000])
    """Where the decay ends; null: `train.steps`. [steps]"""
    total_tokens: PositiveInt | None = Field(default=None, examples=[10_000_000])
    """As `total_steps`, with `warmup_tokens`. [tokens]"""
    floor: Fraction = 0.1
    """Learning rate at the end of the decay, as a share of `optimizer.lr`."""

    @property
    def by_tokens(self) -> bool:
        """Whether it counts tokens of applied updates, not the updates."""
        return self.warmup_tokens is not None

    @model_validator(mode="before")
    @classmethod
    def _tokens_in_place_of_steps(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("warmup_tokens") is not None:
            return {"warmup_steps": None} | given
        return given

    @model_validator(mode="after")
    def _one_clock(self) -> ScheduleConfig:
        lengths = ("warmup", "decay", "total")
        steps = [
            f"{length_key}_steps"
            for length_key in lengths
            if getattr(self, f"{length_key}_steps") is not None
        ]
        tokens = [
            f"{length_key}_tokens"
            for length_key in lengths
            if getattr(self, f"{length_key}_tokens") is not None
        ]
        if tokens and "warmup_tokens" not in tokens:
            raise ValueError(
                f"{tokens[0]} counts tokens: give warmup_tokens in place of warmup_steps, 0 for none"
            )
        if tokens and steps:
            given, other = steps[0], steps[0].replace("steps", "tokens")
            raise ValueError(
                f"{given} counts steps, and {' and '.join(tokens)} tokens: all of a schedule counts "
                f"one or the other; set {given}=null" + ("" if other in tokens else f" and give {other}")
            )
        if not tokens and self.warmup_steps is None:
            raise ValueError(
                "the length of the warm-up is missing: give warmup_steps or warmup_tokens, 0 for none"
            )
        return self


class KernelsConfig(Section):
    """Implementations that compute the same, up to rounding. `auto` is resolved at start-up (docs/speed.md)."""

    attention: Literal["auto", "reference", "sdpa", "blocked", "te"] = "auto"
    """Attention: plain PyTorch (`reference`), PyTorch's fused one (`sdpa`), ours in blocks (`blocked`), Transformer
    Engine's (`te`)."""
    loss: Literal["auto", "reference", "chunked"] = "auto"
    """Cross entropy; `chunked`: never materializes all logits."""
    compile: Literal["auto", True, False] = "auto"
    """Compile every block with torch.compile."""
    elementwise: Literal["auto", "torch", "triton"] = "auto"
    """QK-norm with RoPE, residual with norm, SwiGLU: by PyTorch's operations (`torch`), or by own kernels (`triton`, on
    GPUs). `auto`: by own ones where a measurement at the start finds them faster; not with `run.deterministic`."""
    experts: Literal["auto", "loop", "grouped"] = "auto"
    """Experts of a block: each a product of its own (`loop`), or all one (`grouped`). `auto`: grouped in bf16 on GPUs
    from Hopper on."""


TrackerName = Literal["tensorboard", "wandb", "mlflow", "jsonl", "command"]


class LoggingConfig(Section):
    """Recording and console output, and their intervals."""

    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Where curves and incidents are shown (docs/trackers.md)."""
    per_layer_scalars: bool = False
    """Trackers show every layer by itself; else the distribution over all layers."""
    project: str = Field(default="megastable", min_length=1, max_length=100, examples=["my-models"])
    """Project of wandb, experiment of MLflow."""
    tracker_command: str | None = Field(default=None, examples=["python my_tracker.py"])
    """For the tracker `command`: a program that gets each record as a line of JSON on its standard input."""
    tracker_timeout: WholeSeconds = 60
    """Time in which a tracker must answer; else it is given up, and training goes on without it. [seconds]"""
    interval: PositiveInt = 1
    """Steps between lines on a console that is no terminal. [steps]"""
    norms_interval: NonNegativeInt = 50
    """Steps between norms of weights, moments and updates; 0: never. [steps]"""
    layers_interval: NonNegativeInt = 100
    """Steps between statistics of every layer; 0: never. [steps]"""
    worst_samples: PositiveInt = 4
    """Samples of highest loss recorded at every step, by position. [samples]"""
    flush_steps: PositiveInt = 50
    """Steps until their records are written, as one file. [steps]"""
    peak_tflops: PositiveFloat | None = Field(default=None, examples=[989.0])
    """Peak of a device, for MFU; null: looked up or measured. [TFLOP/s]"""
    profile: ProfileConfig | None = Field(default=None, examples=[{"start": 200, "steps": 3, "ranks": [0]}])
    """A trace of a few steps; null: none."""
    nvtx: bool = False
    """Mark steps and phases for Nsight Systems (nsys) in every step; on GPUs only."""
    memory_history: NonNegativeInt = 0
    """Allocations on a GPU, with stacks, that the snapshot on out-of-memory has beside the blocks. [allocations]"""

    @field_validator("trackers", mode="before")
    @classmethod
    def _one_tracker(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else () if given is None else given

    @model_validator(mode="after")
    def _has_a_command(self) -> LoggingConfig:
        if "command" in self.trackers and not (self.tracker_command or "").strip():
            raise ValueError(
                "trackers has command, but no program is given: logging.tracker_command='python my_tracker.py'"
            )
        return self


class RunSection(Section):
    """The run directory and the processes."""

    dir: Path | None = Field(default=None, examples=["runs/mine"])
    """Run directory; one that exists is resumed; null: a new folder below `runs/`."""
    name: str | None = Field(
        default=None, min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$", examples=["mine"]
    )
    """Name of the run in trackers and on pages; null: that of its directory."""
    seed: int = Field(default=1234, ge=0, lt=2**32)
    """Seed of initial weights and of the data order; below 2^32."""
    timeout: WholeSeconds = 1800
    """When a collective counts as hung. [seconds]"""
    rendezvous: WholeSeconds = 60
    """Time for all ranks to meet at the start, from the first one on. [seconds]"""
    max_hours: PositiveFloat | None = Field(default=None, examples=[23.5])
    """Stop with a checkpoint and exit code 75 after this time, as before an allocation ends; null: never. [hours]"""
    deterministic: bool = False
    """On GPUs, use only kernels that sum in a fixed order: bit-exact, but slower. CPUs always do."""


class RunConfig(Section):
    """The whole tree."""

    run: RunSection = RunSection()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    kernels: KernelsConfig = KernelsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    logging: LoggingConfig = LoggingConfig()
    stability: StabilityConfig = StabilityConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    deepspeed: str = "ds_configs/zero{zero}.json"
    """File of DeepSpeed's own settings; `{zero}` becomes `parallel.zero`."""

    @property
    def batches(self) -> Stages:
        """The global batch of the step that begins at a cursor. [samples]"""
        return stage_batches(self.train.global_batch, self.train.batch_warmup, self.model.sequence_length)

    @property
    def pieces(self) -> Stages:
        """Length of the pieces that the sample at a position is cut into. [tokens]"""
        return stage_pieces(self.model.sequence_length, self.train.sequence_warmup)

    @property
    def tokens(self) -> int:
        """Length of the run, if nothing is skipped. [tokens]"""
        return self.batches.reach_after(0, self.train.steps) * self.model.sequence_length

    @property
    def segmented(self) -> bool:
        """Whether attention may be restricted to parts of a sample: documents, or the pieces of a warm-up."""
        return self.data.keep_documents_apart or self.train.sequence_warmup is not None

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        tree_parts = self.model, self.parallel, self.precision, self.optimizer, self.train
        if problems := "\n  ".join(find_impossible(*tree_parts)):
            raise ValueError(problems)
        if self.checkpoint.upload is not None and self.run.dir is None:
            raise ValueError(
                f"checkpoint.upload={self.checkpoint.upload} without run.dir: every start would be a new run, which "
                "cannot share the URL with the one before; set run.dir"
            )
        return self
