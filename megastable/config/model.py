"""Defines the model section: sizes, architecture, initialisation and its transfer over widths and depths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megastable_guard.section import Fraction, Section


class RopeScalingConfig(Section):
    """Rotary embeddings for texts longer than those a model was first trained on (model/attention.py).

    `linear` divides every frequency by `factor` (arXiv:2306.15595). `llama3` (Llama 3.1, arXiv:2407.21783) divides
    those with fewer than `low_freq_factor` turns in `original_length` positions, keeps those with more than
    `high_freq_factor`, and blends the ones between. `yarn` (arXiv:2309.00071) does so with `beta_slow` and `beta_fast`
    turns, blends by the number of the frequency, and multiplies queries and keys by `attention_factor`.
    """

    kind: Literal["linear", "llama3", "yarn"] = Field(examples=["llama3"])
    """The method."""
    factor: float = Field(ge=1.0, examples=[8.0])
    """How much longer the texts are."""
    original_length: PositiveInt | None = Field(default=None, examples=[8192])
    """Sequence length before it was scaled; `llama3` and `yarn` need it. [tokens]"""
    low_freq_factor: PositiveFloat = 1.0
    """`llama3`: frequencies with fewer turns are divided. [turns]"""
    high_freq_factor: PositiveFloat = 4.0
    """`llama3`: frequencies with more turns are kept. [turns]"""
    beta_slow: PositiveFloat = 1.0
    """`yarn`: frequencies with fewer turns are divided. [turns]"""
    beta_fast: PositiveFloat = 32.0
    """`yarn`: frequencies with more turns are kept. [turns]"""
    attention_factor: PositiveFloat | None = Field(default=None, examples=[1.2])
    """`yarn`: factor of queries and keys; null: 0.1 ln(`factor`) + 1."""

    @model_validator(mode="after")
    def _consistent(self) -> RopeScalingConfig:
        for key_name, key_field in type(self).model_fields.items():
            if key_name not in _ROPE_KEYS[self.kind] and getattr(self, key_name) != key_field.default:
                known_keys = ", ".join(sorted(_ROPE_KEYS[self.kind] - {"kind"}))
                raise ValueError(f"kind={self.kind} has no {key_name}, only {known_keys}: leave it out")
        if self.kind != "linear" and self.original_length is None:
            raise ValueError(f"kind={self.kind} needs original_length, the length before it was scaled")
        for low_key, high_key in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low_key) >= getattr(self, high_key):
                raise ValueError(
                    f"{low_key}={getattr(self, low_key):g} must be below {high_key}={getattr(self, high_key):g}"
                )
        return self


_ROPE_KEYS = {
    "linear": frozenset({"kind", "factor"}),
    "llama3": frozenset({"kind", "factor", "original_length", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"kind", "factor", "original_length", "beta_slow", "beta_fast", "attention_factor"}),
}


class MupConfig(Section):
    """Transfer of hyperparameters from a small model: muP over widths (arXiv:2203.03466, table 8, for Adam), and over
    depths as CompleteP (arXiv:2505.01618, table 1, alpha = 1).

    Initialisation, learning rate, decay and epsilon of every group, and the scales of attention, branches and logits
    follow from the ratio of this model's sizes to those of the base, at which all of them are as without it.
    """

    base_width: PositiveInt = Field(examples=[256])
    """`model.hidden` of the model that the hyperparameters were tuned on; `ffn` and the heads' total width are in
    proportion."""
    base_layers: PositiveInt | None = Field(default=None, examples=[4])
    """`model.layers` of that model; null: widths only, no transfer over depths."""
    base_head_dim: PositiveInt | None = Field(default=None, examples=[64])
    """Width of its heads; null: as here."""
    zero_output: bool = False
    """The output layer starts at zero, unless tied (arXiv:2203.03466, section D.2): what a random one adds to the
    logits depends on the width. In short runs of ours it cost much (docs/catalogue.md)."""


class ExpertsConfig(Section):
    """Routed experts in place of a block's MLP (arXiv:1701.06538): a router scores the experts for every token, and the
    `top_k` best ones, weighted by their scores, are computed for it. Method: model/experts.py.
    """

    count: int = Field(ge=2, le=4096, examples=[8])
    """Experts of a block that the router chooses from."""
    top_k: PositiveInt = 2
    """Experts of a token."""
    ffn: PositiveInt | None = Field(default=None, examples=[512])
    """Inner width of an expert; null: `model.ffn`."""
    shared: NonNegativeInt = 0
    """Experts, of the same width, that every token has besides (DeepSeekMoE, arXiv:2401.06066)."""
    first_dense: NonNegativeInt = 0
    """The first blocks keep a dense MLP, of width `model.ffn`. [blocks]"""
    gate: Literal["softmax", "sigmoid"] = "softmax"
    """How logits become scores; `sigmoid`: DeepSeek-V3, arXiv:2412.19437."""
    normalize: bool = True
    """The scores of a token's experts are divided by their sum."""
    scale: PositiveFloat = 1.0
    """Factor of these scores."""
    bias_rate: NonNegativeFloat = 1e-3
    """After each update a bias, which only the choice of experts sees, grows by this for every expert with fewer tokens
    than the mean, and falls for the others (arXiv:2408.15664); 0: it stays as it is, in a new run at 0."""
    balance_loss: NonNegativeFloat = 1e-2
    """Weight of the loss that is 1 if all experts have as many tokens (arXiv:2101.03961); 0: none."""
    balance_over: Literal["micro_batch", "step"] = "micro_batch"
    """Whose tokens that loss counts: those of the micro-batch, or of the global batch before (arXiv:2501.11873)."""
    router_z_loss: NonNegativeFloat = 1e-3
    """Weight of mean(logsumexp(logits)²) of the router in the loss (arXiv:2202.08906); 0: none."""
    capacity: PositiveFloat | None = Field(default=None, examples=[1.25])
    """An expert takes at most this many times the mean of a micro-batch's tokens, and the others go without it; null:
    all of them."""

    @model_validator(mode="after")
    def _consistent(self) -> ExpertsConfig:
        if self.top_k > self.count:
            raise ValueError(
                f"top_k={self.top_k} of count={self.count} experts: choose no more than there are"
            )
        if self.normalize and self.top_k == 1:
            raise ValueError(
                "normalize with top_k=1: the only score is always 1, and the router learns nothing from the loss; set "
                "normalize=false"
            )
        return self


class ModelConfig(Section):
    """The GPT: RMSNorm, rotary embeddings, SwiGLU, no biases except `qkv_bias`. Sizes are those of the whole model,
    whatever the parallel layout.

    `kv_heads` divides `heads`; `heads` divides `hidden` unless `head_dim` is set; the width of a head is even.
    """

    layers: PositiveInt = 12
    """Transformer blocks."""
    hidden: PositiveInt = 768
    """Width of the residual stream."""
    heads: PositiveInt = 12
    """Query heads."""
    kv_heads: PositiveInt | None = Field(default=None, examples=[4])
    """Key/value heads (grouped-query attention, arXiv:2305.13245); null: as many as `heads`."""
    head_dim: PositiveInt | None = Field(default=None, examples=[64])
    """Width of a head; null: `hidden` / `heads`."""
    ffn: PositiveInt | None = Field(default=None, examples=[2048])
    """Inner width of the SwiGLU (arXiv:2002.05202); null: 8/3 `hidden`, rounded up to a multiple of 128."""
    sequence_length: PositiveInt = 2048
    """Length of a training sample. [tokens]"""
    vocab_size: PositiveInt | None = Field(default=None, examples=[50257])
    """Vocabulary before padding; null: the tokenizer's. [tokens]"""
    vocab_multiple: PositiveInt = 128
    """The embedding is padded to a multiple of this, the same in every parallel layout. [rows]"""
    max_positions: PositiveInt | None = Field(default=None, examples=[8192])
    """For exports: positions that an imported model was made for, if more than `sequence_length`. [tokens]"""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary embeddings (arXiv:2104.09864)."""
    rope_scaling: RopeScalingConfig | None = Field(
        default=None, examples=[{"kind": "llama3", "factor": 8.0, "original_length": 8192}]
    )
    """Scaled rotary embeddings; null: not scaled."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the RMSNorms (arXiv:1910.07467)."""
    qk_norm: Literal[True, False, "full"] = True
    """RMSNorm of queries and keys (arXiv:2302.05442), of each head; `full`: over the width of all heads, as OLMo 2
    (arXiv:2501.00656)."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, as Qwen2 (arXiv:2407.10671)."""
    norms: Literal["before", "after", "both", "mixed", "deep", "branch"] = "before"
    """Norms `before` attention and MLP, or `after` them, inside the residual branch; `both` (arXiv:2502.02732). Of the
    sum: `mixed`, in the first blocks (Mix-LN, arXiv:2412.13795); `deep`: DeepNorm (arXiv:2203.00555); `branch`:
    BranchNorm (arXiv:2305.02790)."""
    mixed_share: Fraction = 0.25
    """`norms=mixed`: share of the blocks, the first ones, with norms of the sum; the others have them before."""
    branch_steps: PositiveInt = 4000
    """`norms=branch`: updates until the branches, which start at 0, have their full size. [updates]"""
    norm_scaling: bool = False
    """The outputs of the norms of block l, from 1 on, are divided by sqrt(l) (LayerNorm scaling, arXiv:2502.05795)."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight, so that weights start at 0, as in Gemma."""
    attention_scale: PositiveFloat | None = Field(default=None, examples=[0.0625])
    """Factor of the attention logits; null: 1 / sqrt(width of a head)."""
    attention_softcap: PositiveFloat | None = Field(default=None, examples=[50.0])
    """Attention logits z become c tanh(z / c) with this c (Gemma 2, arXiv:2408.00118); null: as they are."""
    logit_softcap: PositiveFloat | None = Field(default=None, examples=[30.0])
    """The same for the logits of the vocabulary."""
    window: PositiveInt | None = Field(default=None, examples=[4096])
    """Sliding window: a token attends to this many, itself included (arXiv:2310.06825); null: to all. [tokens]"""
    full_attention_every: PositiveInt | None = Field(default=None, examples=[2])
    """With `window`, every n-th block attends to all tokens (2: Gemma 2; 4: OLMo 3); null: none."""
    activation: Literal["silu", "gelu"] = "silu"
    """Of the MLP's gate: SwiGLU or GeGLU (tanh), both arXiv:2002.05202."""
    swiglu_clamp: PositiveFloat | None = Field(default=None, examples=[7.0])
    """The MLP's gate is at most this, and its other factor within ± this (gpt-oss, arXiv:2508.10925); null: as they
    are."""
    experts: ExpertsConfig | None = Field(default=None, examples=[{"count": 8, "top_k": 2}])
    """Routed experts in place of the blocks' MLPs; null: none."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the elements dropped after the embedding, attention and MLP (arXiv:1207.0580)."""
    embedding_scale: PositiveFloat | Literal["sqrt_hidden"] = 1.0
    """Factor of the embedding; `sqrt_hidden`: sqrt(`hidden`) (arXiv:2312.16903, section 5)."""
    tied: bool = False
    """The output layer shares its weights with the embedding."""
    init: Literal["normal", "fan_in", "xavier", "small"] = "normal"
    """Standard deviation of the initial matrices: `init_std`; 1 / sqrt(inputs); sqrt(2 / (inputs + outputs)) (Glorot &
    Bengio, 2010); sqrt(2 / (5 `hidden`)) (arXiv:1910.05895)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial embedding, and with `init=normal` of all matrices."""
    residual_init: Literal["depth", "same", "zero"] = "depth"
    """Matrices that write to the residual stream: divided by sqrt(2 `layers`) (GPT-2; with `norms=deep` and DeepNorm's
    own factor), like the others, or zero."""
    mup: MupConfig | None = Field(default=None, examples=[{"base_width": 256}])
    """Transfer of hyperparameters from a smaller model; null: none."""
    z_loss: NonNegativeFloat = 1e-4
    """Weight of mean(logsumexp(logits)²) in the loss (arXiv:2204.02311); 0: none."""

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def ffn_width(self) -> int:
        return self.ffn or -(-8 * self.hidden // 3 // 128) * 128

    def experts_of(self, block: int) -> ExpertsConfig | None:
        """The routed experts of a block; None: it has a dense MLP."""
        return self.experts if self.experts is not None and block >= self.experts.first_dense else None

    @property
    def expert_width(self) -> int:
        """Inner width of a routed expert; needs `experts`."""
        assert self.experts is not None
        return self.experts.ffn or self.ffn_width

    @property
    def expert_blocks(self) -> int:
        """Blocks with routed experts."""
        return 0 if self.experts is None else max(self.layers - self.experts.first_dense, 0)

    def mlp_widths(self, of_token: bool = False) -> int:
        """Inner widths of all MLPs of all blocks together; of_token: only of those that are computed for a token."""
        dense_widths = (self.layers - self.expert_blocks) * self.ffn_width
        if self.experts is None:
            return dense_widths
        experts = (self.experts.top_k if of_token else self.experts.count) + self.experts.shared
        return dense_widths + self.expert_blocks * experts * self.expert_width

    @property
    def width_ratio(self) -> float:
        """This width over that of muP's base; 1 without muP."""
        return self.hidden / self.mup.base_width if self.mup else 1.0

    @property
    def depth_ratio(self) -> float:
        """This depth over that of muP's base; 1 without a transfer over depths."""
        return self.layers / self.mup.base_layers if self.mup and self.mup.base_layers else 1.0

    @property
    def score_scale(self) -> float:
        """Factor of q k: of the attention logits."""
        d = self.head_width
        base = (self.mup and self.mup.base_head_dim) or d
        # 1 / d in muP (arXiv:2203.03466, definition 4.1), the same as 1 / sqrt(d) at the base.
        return self.attention_scale or (1 / math.sqrt(d) if base == d else math.sqrt(base) / d)

    @property
    def embedding_factor(self) -> float:
        scale = self.embedding_scale
        return math.sqrt(self.hidden) if scale == "sqrt_hidden" else float(scale)

    def window_of(self, block: int) -> int | None:
        """The sliding window of a block, [tokens]; None: it attends to all."""
        full_every = self.full_attention_every
        return None if full_every and (block + 1) % full_every == 0 else self.window

    def placement_of(self, block: int) -> str:
        """Where a block has its norms: "before", "after", "both", or "sum", "deep", "branch" (of the sum)."""
        if self.norms != "mixed":
            return self.norms
        return "sum" if block < round(self.mixed_share * self.layers) else "before"

    @property
    def longest(self) -> int:
        """Positions that the model was made for, here or where it was imported from."""
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
        if problems := "; ".join(_contradictions(self)):
            raise ValueError(problems)
        return self


def _contradictions(m: ModelConfig) -> Iterator[str]:
    """Keys that do not go together, each with its remedy."""
    default = type(m).model_fields
    for key, needs in (("mixed_share", "mixed"), ("branch_steps", "branch")):
        if getattr(m, key) != default[key].default and m.norms != needs:
            yield f"{key} with norms={m.norms}: only norms={needs} has it; leave it out"
    if m.norm_scaling and m.norms != "before":
        yield f"norm_scaling with norms={m.norms}: it scales what norms give to attention and MLP; use norms=before"
    if m.full_attention_every is not None and m.window is None:
        yield "full_attention_every without window: all blocks attend to all tokens; set window, or leave it out"
    if m.full_attention_every == 1:
        yield "full_attention_every=1: then no block has the window; leave both out, or set 2 or more"
    if m.norms == "deep" and m.residual_init == "same":
        yield "residual_init=same with norms=deep: DeepNorm needs its own initialisation; leave residual_init out"
    if m.experts is not None and m.experts.first_dense >= m.layers:
        yield f"experts.first_dense={m.experts.first_dense} of layers={m.layers}: no block has experts; lower it"
    if m.experts is not None and m.mup is not None:
        yield "mup with experts: its rules for routers are not built; leave one of the two out"
    if m.rope_scaling is not None and m.rope_scaling.kind == "yarn" and m.rope_theta <= 1:
        yield f"rope_scaling.kind=yarn with rope_theta={m.rope_theta:g}: it needs a base above 1"
    if m.mup is None:
        return
    if m.init != "normal":
        yield f"mup with init={m.init}: muP's initialisation starts from init_std; use init=normal"
    if m.attention_scale is not None:
        yield "mup with attention_scale: muP sets the scale of attention; leave attention_scale out"
    if m.mup.base_layers is not None and m.norms not in ("before", "after", "both"):
        yield (
            f"mup.base_layers with norms={m.norms}: depths transfer by the size of residual branches, which a norm of "
            "the sum changes; use norms=before, after or both"
        )
    if m.mup.base_layers is not None and m.norm_scaling:
        yield "mup.base_layers with norm_scaling: both scale branches by depth; use one of them"
