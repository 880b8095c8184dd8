"""The configuration of a run: one tree of pydantic models, handed on in parts.

    python -m megastable.config launch/recipes/quickstart.yaml model.layers=12 parallel.tensor=2

prints the resolved tree and the DeepSpeed JSON that follows from it. Reading recipes and overrides is in
`recipe.py`; the DeepSpeed side is in `deepspeed_json.py`. An unknown key, an impossible combination or a
combination that DeepSpeed is known to get wrong is a `ConfigError` that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from megastable.config.checkpoint import VitalsConfig
from megastable.config.section import Fraction, Section
from megastable.config.stability import StabilityConfig
from megastable.config.supervise import SuperviseConfig


class RopeScalingConfig(Section):
    """Rotary embeddings for longer texts than a model was first trained on; how: model/rope.py.

    factor: how much longer. linear: every frequency is divided by it (arXiv:2306.15595). llama3: those with fewer than
    low_freq_factor turns in original_length positions are, those with more than high_freq_factor are kept, the ones
    between are blended (Llama 3.1, arXiv:2407.21783).
    """

    kind: Literal["linear", "llama3"]
    factor: float = Field(ge=1.0)
    original_length: PositiveInt | None = None
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0

    @model_validator(mode="after")
    def _consistent(self) -> RopeScalingConfig:
        own = (self.original_length, self.low_freq_factor, self.high_freq_factor)
        if self.kind == "linear" and own != (None, 1.0, 4.0):
            raise ValueError("kind=linear has a factor, and nothing else: leave the other keys out")
        if self.kind == "llama3" and self.original_length is None:
            raise ValueError("kind=llama3 needs original_length, the length before it was scaled")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor:g} must be below high_freq_factor={self.high_freq_factor:g}"
            )
        return self


class ModelConfig(Section):
    """The GPT. Sizes are whole-model sizes, whatever the layout."""

    layers: PositiveInt = 12
    hidden: PositiveInt = 768
    heads: PositiveInt = 12
    kv_heads: PositiveInt | None = None  # grouped-query attention; None = heads
    head_dim: PositiveInt | None = None  # None = hidden / heads
    ffn: PositiveInt | None = None  # width of the SwiGLU; None = 8/3 hidden, rounded up to 128
    sequence_length: PositiveInt = 2048
    vocab_size: PositiveInt | None = None  # None = the tokenizer's
    vocab_multiple: PositiveInt = 128  # the embedding is padded to a multiple of it, the same in every layout
    max_positions: PositiveInt | None = (
        None  # for exports: an imported model's, if it was made for more than we train
    )
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScalingConfig | None = None
    norm_eps: PositiveFloat = 1e-5
    qk_norm: Literal[True, False, "full"] = True  # of each head; full: over the width of all heads, as OLMo 2
    qkv_bias: bool = False  # of queries, keys and values, as Qwen2
    norms: Literal["before", "after"] = "before"  # attention and MLP, inside the residual branch
    tied: bool = False
    init_std: PositiveFloat = 0.02
    z_loss: NonNegativeFloat = 1e-4  # weight of mean(logsumexp(logits)^2)

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def ffn_width(self) -> int:
        return self.ffn or -(-8 * self.hidden // 3 // 128) * 128

    @property
    def longest(self) -> int:
        """Positions that the model was made for: here, or where it was imported from."""
        return max(self.sequence_length, self.max_positions or 0)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding; `vocab_size` must be known."""
        assert self.vocab_size is not None, "the vocabulary size is taken from the corpus first"
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}: every key/value head serves the "
                "same number of query heads"
            )
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide hidden={self.hidden}: set head_dim or change one"
            )
        if self.head_width % 2:
            raise ValueError(f"head_dim={self.head_width} is odd: rotary embeddings need pairs")
        return self


class CorpusConfig(Section):
    """One corpus of the blend: a folder that `tools/prepare_data.py` made."""

    path: Path
    weight: PositiveFloat = 1.0


Corruption = Literal[
    "outside of the vocabulary", "binary data", "wrong encoding", "repetition", "encoded data", "random tokens",
    "shuffled text", "another language or register",
]  # fmt: skip


class LookAheadConfig(Section):
    """What the supervisor scans on a spare core before it is trained on; what is clearly corrupt goes on the skip
    ledger.

    score: about -log10 of the share of ordinary text that is as odd; kinds: what it must look like; share: of a sample
    that must be so; most: of the positions looked at that may be skipped, beside the first 64.
    """

    steps: NonNegativeInt = 0  # so many ahead of the run; 0 = none
    score: PositiveFloat = 5.0
    kinds: tuple[Corruption, ...] = (
        "outside of the vocabulary", "binary data", "repetition", "random tokens", "shuffled text",
    )  # fmt: skip
    share: Fraction = 0.06
    most: Fraction = 0.01


class DataConfig(Section):
    corpora: list[CorpusConfig] = Field(default_factory=list)
    skip: list[tuple[NonNegativeInt, NonNegativeInt]] = Field(default_factory=list)  # [first, end) positions
    keep_documents_apart: bool = False  # attention stays inside documents, positions restart at each
    prefetch: PositiveInt = 2  # steps made ready in the background
    accept_changed_manifest: bool = False  # go on although the corpus is not the one the checkpoint knew
    look_ahead: LookAheadConfig = LookAheadConfig()

    @field_validator("skip")
    @classmethod
    def _forward(cls, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
        for first, end in ranges:
            if end <= first:
                raise ValueError(
                    f"range [{first}, {end}) is empty or reversed: write [first, end), end not included"
                )
        return ranges


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101); weight decay is not applied to norms and biases."""

    lr: PositiveFloat = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip: NonNegativeFloat = 1.0  # global gradient norm; 0 = never
    moments: Literal["fp32", "bf16"] = "fp32"  # of Adam; master weights are fp32 in any case


class ScheduleConfig(Section):
    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 100
    decay_steps: PositiveInt | None = None  # wsd: length of the final decay; None = a tenth of the run
    total_steps: PositiveInt | None = None  # where the decay ends; None = train.steps
    floor: Fraction = 0.1  # of the peak rate


class TrainConfig(Section):
    steps: PositiveInt = 1000
    global_batch: PositiveInt = 64  # samples per step over all ranks
    micro_batch: PositiveInt = 1  # samples per rank and pass
    eval_interval: NonNegativeInt = 200  # steps; 0 = only at the end
    eval_samples: NonNegativeInt = 256  # of the validation split, always the same ones; 0 = never


class ParallelConfig(Section):
    """Data parallelism takes what tensor and pipeline leave of the world."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    context: PositiveInt = 1  # so many data-parallel ranks share every sample, each a part of its tokens
    sequence: bool = False  # Megatron sequence parallelism over the tensor group (arXiv:2205.05198)
    zero: Literal[0, 1, 2, 3] = 1
    recompute: Literal["none", "selective", "full"] = "none"  # activation checkpointing


class KernelsConfig(Section):
    """What computes: the same numbers, but for rounding. `kernel_choice.choose` says what "auto" is on a device."""

    attention: Literal["auto", "reference", "sdpa", "blocked", "te"] = "auto"
    loss: Literal["auto", "reference", "chunked"] = "auto"  # chunked: the logits never exist as a whole
    compile: Literal["auto", True, False] = "auto"  # every block by torch.compile


class Fp8Config(Section):
    """The products of the blocks' linear layers in FP8 (Micikevicius et al., arXiv:2209.05433); see fp8/.

    recipe: where scales come from. current: the largest magnitude of the tensor itself; delayed: that of the last
    `history` steps; block: that of 128 neighbours, 128 x 128 of a weight (DeepSeek-V3, arXiv:2412.19437 section 3.3).
    backend: te is Transformer Engine, emulated quantizes and multiplies what is left; auto: te where it can be had.
    formats: hybrid is E4M3 forward and E5M2 for gradients; auto: hybrid, but E4M3 throughout with blocks.
    keep_first, keep_last, keep: what stays in the precision of the rest: so many blocks of either end, and layers by
    name, such as blocks.3.mlp.down (tools/fp8_check.py recommends some).
    margin: powers of two that delayed scales leave for magnitudes which the history has not seen. When a run leaves FP8
    and returns to it: stability.policy.
    """

    recipe: Literal["current", "delayed", "block"] = "current"
    backend: Literal["auto", "te", "emulated"] = "auto"
    formats: Literal["auto", "hybrid", "e4m3"] = "auto"
    keep_first: NonNegativeInt = 0
    keep_last: NonNegativeInt = 0
    keep: tuple[str, ...] = ()
    history: int = Field(default=16, ge=1, le=1024)
    margin: int = Field(default=0, ge=0, le=8)

    @field_validator("keep", mode="before")
    @classmethod
    def _one(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given


class PrecisionConfig(Section):
    kind: Literal["bf16", "fp32", "fp16"] = "bf16"
    fp8: Fp8Config | None = None  # a recipe's name stands for that recipe: precision.fp8=delayed
    initial_scale_power: PositiveInt = 16  # fp16: the loss scale starts at 2^this
    scale_window: PositiveInt = 1000  # fp16: steps without overflow before the scale doubles

    in_a_word: ClassVar[Mapping[str, str]] = {"fp8": "recipe"}

    @field_validator("fp8", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if given in (False, "off", "none"):
            return None
        return {} if given is True else {"recipe": given} if isinstance(given, str) else given


class CheckpointConfig(Section):
    interval: NonNegativeInt = 500  # steps; 0 = only at the end and on a signal
    keep: PositiveInt = 3  # newest ones; besides, the newest healthy one and all that are pinned
    keep_every: NonNegativeInt = 0  # steps; the first one of every so many is kept for good, 0 = none
    healthy_after: NonNegativeInt = 50  # steps on trend after it, before a checkpoint counts as healthy
    asynchronous: bool = True  # the step waits for a copy in host memory only
    staging: Path | None = None  # local disk of every host: written there first, then uploaded to run.dir
    at_end: bool = True
    on_failure: Literal["continue", "stop"] = "continue"  # when a checkpoint cannot be written
    vitals: VitalsConfig = VitalsConfig()


class LoggingConfig(Section):
    tensorboard: bool = True
    interval: PositiveInt = 1  # steps between lines where there is no terminal
    norms_interval: NonNegativeInt = 50  # steps between norms of weights, moments and updates; 0 = never
    layers_interval: NonNegativeInt = 100  # steps between looks into every layer; 0 = never
    worst_samples: PositiveInt = 4  # of every step, recorded by position
    flush_steps: PositiveInt = 50  # steps in one file of step records
    peak_tflops: PositiveFloat | None = None  # per device, for MFU; None = known or measured


class RunSection(Section):
    dir: Path | None = None  # None = a new folder below runs/; given and there = resumed
    seed: NonNegativeInt = 1234
    timeout: PositiveInt = 1800  # seconds before a collective counts as hung
    deterministic: bool = False  # on GPUs: kernels whose sums have one order; slower. On a CPU all have


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
    logging: LoggingConfig = LoggingConfig()
    stability: StabilityConfig = StabilityConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    deepspeed: str = "ds_configs/zero{zero}.json"  # {zero} becomes parallel.zero

    @model_validator(mode="before")
    @classmethod
    def _as_it_was(cls, tree: Any) -> Any:
        """Checkpoints of before there was `kernels` say model.attention."""
        model = tree.get("model") if isinstance(tree, dict) else None
        if not isinstance(model, dict) or "attention" not in model:
            return tree
        rest = {key: value for key, value in model.items() if key != "attention"}
        kernels = tree.get("kernels") or {}
        if isinstance(kernels, dict):  # else the mistake is told by the field
            kernels = {"attention": model["attention"]} | kernels
        return tree | {"model": rest, "kernels": kernels}

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        if problems := _impossible(self):
            raise ValueError("\n  ".join(problems))
        return self


def _impossible(c: RunConfig) -> list[str]:
    """What cannot be, or what DeepSpeed 0.19.8 gets wrong; each with its key and its remedy."""
    m, p, bad = c.model, c.parallel, []
    for key, size in (("heads", m.heads), ("kv_heads", m.key_value_heads), ("ffn", m.ffn_width)):
        if size % p.tensor:
            bad.append(f"parallel.tensor={p.tensor} does not divide model.{key}={size}: change one of them")
    if m.vocab_multiple % p.tensor:
        bad.append(
            f"parallel.tensor={p.tensor} does not divide model.vocab_multiple={m.vocab_multiple}: the padded "
            "vocabulary is shared out by it; set vocab_multiple to a multiple of parallel.tensor"
        )
    if p.context > 1 and m.heads % (p.tensor * p.context):
        bad.append(
            f"parallel.context={p.context} x parallel.tensor={p.tensor} does not divide model.heads={m.heads}: "
            "attention shares the heads out over both; change one of them"
        )
    if m.sequence_length % p.context:
        bad.append(
            f"parallel.context={p.context} does not divide model.sequence_length={m.sequence_length}: change one of "
            "them"
        )
    if p.pipeline > m.layers:
        bad.append(
            f"parallel.pipeline={p.pipeline} needs at least one block a stage, and model.layers={m.layers}: "
            "use fewer stages"
        )
    if p.sequence and p.tensor == 1:
        bad.append(
            "parallel.sequence shares the sequence out over the tensor group: set parallel.tensor above 1"
        )
    if p.sequence and m.sequence_length % p.context == 0 and m.sequence_length // p.context % p.tensor:
        of = f" / parallel.context={p.context}" if p.context > 1 else ""
        bad.append(
            f"parallel.sequence: parallel.tensor={p.tensor} does not divide "
            f"model.sequence_length={m.sequence_length}{of}: change one of them"
        )
    if p.pipeline > 1 and p.zero > 1:
        bad.append(
            f"parallel.zero={p.zero} with parallel.pipeline={p.pipeline}: DeepSpeed's pipeline keeps whole gradients; "
            "use parallel.zero=1 or parallel.pipeline=1"
        )
    if c.precision.fp8 is not None:
        bad += _impossible_fp8(c, c.precision.fp8)
    if p.zero == 0:
        bad.append(
            "parallel.zero=0: DeepSpeed's wrappers without ZeRO have no gradient norm (fp32), sum in bf16 (bf16), "
            "or divide by a loss scale that they never multiplied by (fp16); use parallel.zero=1, which costs nothing "
            "on one data-parallel rank"
        )
    if c.train.global_batch % c.train.micro_batch:
        bad.append(
            f"train.micro_batch={c.train.micro_batch} does not divide train.global_batch={c.train.global_batch}: "
            "change one of them"
        )
    if c.optimizer.betas[0] >= 1 or c.optimizer.betas[1] >= 1:
        bad.append(f"optimizer.betas={list(c.optimizer.betas)}: both must be below 1")
    return bad


LINEARS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")  # of a block, that FP8 can compute


def _impossible_fp8(c: RunConfig, fp8: Fp8Config) -> list[str]:
    bad, layers = [], c.model.layers
    if c.precision.kind == "fp16":
        bad.append(
            "precision.fp8 with precision.kind=fp16: sums of products of E4M3 numbers are beyond fp16's range; use "
            "precision.kind=bf16"
        )
    if fp8.keep_first + fp8.keep_last >= layers:
        bad.append(
            f"precision.fp8: keep_first={fp8.keep_first} and keep_last={fp8.keep_last} leave none of the {layers} "
            "blocks to FP8: lower them, or leave precision.fp8 out"
        )
    known = {f"blocks.{i}.{linear}" for i in range(layers) for linear in LINEARS}
    if unknown := sorted(set(fp8.keep) - known):
        bad.append(
            f"precision.fp8.keep: {', '.join(unknown)}: no such linear layer; name them like blocks.0.mlp.down, with "
            f"blocks.0 to blocks.{layers - 1} and {', '.join(LINEARS)}"
        )
    return bad
