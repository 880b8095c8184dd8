"""Defines the section `optimizer`: the rule, clipping, settings of single rules. Defaults are those of their papers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from megastable_guard.section import Fraction, Section

_ADAMS = frozenset({"adamw", "stable_adamw", "spam", "stable_spam", "lamb", "muon"})
# Of the keys below `optimizer` that not all rules, or kinds of clipping, read: those that do. The others leave them be.
RULES_WITH: Mapping[str, frozenset[str]] = {
    "betas": _ADAMS,
    "eps": _ADAMS,
    "moments": frozenset({"adamw"}),
    "momentum": frozenset({"sgd", "muon"}),
    "spam": frozenset({"spam"}),
    "stable_spam": frozenset({"stable_spam"}),
    "adafactor": frozenset({"adafactor"}),
}
CLIPPINGS_WITH: Mapping[str, frozenset[str]] = {
    "clip": frozenset({"norm", "adagc", "worker"}),
    "clipping.threshold": frozenset({"value", "adagc", "zclip", "agc"}),
    "clipping.decay": frozenset({"adagc", "zclip"}),
    "clipping.warmup": frozenset({"adagc", "zclip"}),
}


Density = Annotated[float, Field(gt=0.0, le=1.0)]


class SpamConfig(Section):
    """`spam` (arXiv:2501.06842)."""

    interval: PositiveInt = 500
    """Updates from one reset of the moments to the next. [updates]"""
    threshold: PositiveFloat = 5000.0
    """Elements of the gradient whose square is above this times their second moment are clipped to it."""
    warmup: NonNegativeInt = 150
    """Length of the warm-up after every reset, on top of the schedule's; at most `interval`. [updates]"""
    density: Density = 1.0
    """Sparse momentum (section 3.3): share of each matrix's elements that have moments and are trained in a period,
    drawn again at every reset; 1: all."""


class StableSpamConfig(Section):
    """`stable_spam` (arXiv:2502.17055)."""

    interval: PositiveInt = 1000
    """Updates from one reset of the moments to the next. [updates]"""
    max_decay: Fraction = 0.999
    """Decay rate of the average of a tensor's largest |gradient|, above which elements are scaled down; below 1."""
    norm_decays: tuple[Fraction, Fraction] = (0.7, 0.9)
    """Decay rates of the averages of a tensor's gradient norm and of its square; both below 1."""
    density: Density = 1.0
    """Sparse momentum, as of `spam`."""


class AdafactorConfig(Section):
    """`adafactor` (arXiv:1804.04235). The rate is the schedule's."""

    decay_exponent: PositiveFloat = 0.8
    """The second moment's decay rate at update t is 1 - t^-this."""
    clip: PositiveFloat = 1.0
    """Largest root mean square of a tensor's step, before the rate."""
    momentum: Fraction = 0.0
    """Decay rate of an average of steps; below 1. 0: none, which saves 4 bytes per parameter."""


class ClippingConfig(Section):
    """Gradient clipping, after the gate has judged the gradients as they were. A kind's name stands for the section:
    `optimizer.clipping=adagc`.

    `value` needs `threshold`; `norm` and `worker` have `optimizer.clip` instead of it. `decay` (below 1) and `warmup`
    (at least 2 for `zclip`) are those of `adagc` and `zclip`. `worker` needs bf16, `parallel.zero` = 1, and no tied
    embeddings over pipeline stages.
    """

    kind: Literal["norm", "value", "adagc", "zclip", "agc", "worker"] = "norm"
    """What is clipped: the global norm (`norm`, arXiv:1211.5063); every element (`value`); each tensor by its own norms
    so far (`adagc`, arXiv:2502.11034); outliers among the global norms (`zclip`, arXiv:2504.02507); rows by the norm of
    their weights (`agc`, arXiv:2102.06171); the norm of each data-parallel rank's gradient before they are averaged
    (`worker`, arXiv:1712.01887, section 3.2)."""
    threshold: PositiveFloat | None = Field(default=None, examples=[0.01])
    """Largest magnitude of an element (`value`); times the average norm (`adagc`, null: 1.05); standard deviations
    (`zclip`, null: 2.5); times the norm of the weights (`agc`, null: 0.01)."""
    decay: Fraction | None = Field(default=None, examples=[0.98])
    """Decay rate of the averages; null: 0.98 (`adagc`), 0.97 (`zclip`)."""
    warmup: NonNegativeInt | None = Field(default=None, examples=[100])
    """Updates before it begins; null: 100 (`adagc`, which clips by `optimizer.clip` until then), 25 (`zclip`, which
    clips nothing until then). [updates]"""


class OptimizerConfig(Section):
    """The optimizer over fp32 master weights (docs/catalogue.md). Norms and biases have no weight decay."""

    name: Literal[
        "adamw", "stable_adamw", "spam", "stable_spam", "adafactor", "lamb", "sgd", "muon"
    ] = "adamw"  # fmt: skip
    """The rule: AdamW (arXiv:1711.05101), StableAdamW (arXiv:2304.13013), SPAM, Stable-SPAM, Adafactor, LAMB
    (arXiv:1904.00962), SGD with momentum, Muon (arXiv:2502.16982) for the matrices of blocks and AdamW for the rest."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the first and second moment; both below 1. Not of `adafactor`, `sgd`."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment. Not of `adafactor`, `sgd`."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay: each update shrinks the weights by this times the learning rate."""
    decay_embeddings: bool = True
    """Weight decay of the embedding as well; OLMo 2 has none (arXiv:2501.00656, section 3)."""
    clip: NonNegativeFloat = 1.0
    """Norm to clip to, where `clipping` uses it; 0: never."""
    clipping: ClippingConfig = Field(default=ClippingConfig(), examples=["adagc"])
    """What is clipped: a kind's name or a section."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Precision of AdamW's moments; master weights are fp32 in any case."""
    momentum: Fraction | None = Field(default=None, examples=[0.95])
    """Decay rate of the momentum; null: 0.9 for `sgd`, 0.95 for `muon`. Not of the others."""
    qk_clip: PositiveFloat | None = Field(default=None, examples=[100.0])
    """Largest attention logit of a head: after an update, scale down the query and key weights of heads that exceeded
    it in the step (QK-clip, arXiv:2507.20534 section 2.1, with 100); null: never. Not with `model.qk_norm`."""
    spam: SpamConfig = SpamConfig()
    stable_spam: StableSpamConfig = StableSpamConfig()
    adafactor: AdafactorConfig = AdafactorConfig()

    in_a_word: ClassVar[Mapping[str, str]] = {"clipping": "kind"}

    def reads_key(self, key: str) -> bool:
        """Whether the rule, or the kind of clipping, reads a key of this section, such as `clipping.decay`."""
        rules, kinds = RULES_WITH.get(key), CLIPPINGS_WITH.get(key)
        return (rules is None or self.name in rules) and (kinds is None or self.clipping.kind in kinds)

    @field_validator("clipping", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if given in (False, "off", "none"):
            raise ValueError("optimizer.clip=0 is what turns clipping off")
        return {"kind": given} if isinstance(given, str) else given
