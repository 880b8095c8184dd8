"""Settings of single optimizers. Defaults are those of their papers."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from megastable.config.section import Fraction, Section


class SpamConfig(Section):
    """`spam` (arXiv:2501.06842)."""

    interval: PositiveInt = 500
    """Updates from one reset of the moments to the next. [updates]"""
    threshold: PositiveFloat = 5000.0
    """Elements of the gradient whose square is above this times their second moment are clipped to it."""
    warmup: NonNegativeInt = 150
    """Length of the warm-up after every reset, on top of the schedule's; at most `interval`. [updates]"""


class StableSpamConfig(Section):
    """`stable_spam` (arXiv:2502.17055)."""

    interval: PositiveInt = 1000
    """Updates from one reset of the moments to the next. [updates]"""
    max_decay: Fraction = 0.999
    """Decay rate of the average of a tensor's largest |gradient|, above which elements are scaled down; below 1."""
    norm_decays: tuple[Fraction, Fraction] = (0.7, 0.9)
    """Decay rates of the averages of a tensor's gradient norm and of its square; both below 1."""


class AdafactorConfig(Section):
    """`adafactor` (arXiv:1804.04235). The rate is the schedule's."""

    decay_exponent: PositiveFloat = 0.8
    """The second moment's decay rate at update t is 1 - t^-this."""
    clip: PositiveFloat = 1.0
    """Largest root mean square of a tensor's step, before the rate."""
    momentum: Fraction = 0.0
    """Decay rate of an average of steps; below 1. 0: none, which saves 4 bytes per parameter."""
