"""How steps are computed, and how else they can be: without FP8, or by plain PyTorch in place of the run's kernels.

Plain PyTorch computes the same with few and old operations: products of matrices, softmax, elementwise work. What it
cannot take the place of: the library of the products themselves, Transformer Engine's linear layers, the optimizer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from megastable.fp8.controller import Fp8
from megastable.model.gpt import Block
from megastable.model.kernels import Kernels
from megastable.model.loss import LossFunction


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
        self._compiled, self._plain = loss.compiled, frozenset[str]()

    @property
    def now(self) -> Numerics:
        return Numerics(self._fp8 is not None and self._fp8.on, self._plain)

    def kinds_of(self, names: Collection[str]) -> frozenset[str]:
        """The kinds of this run's kernels with these names; others are not in use."""
        return frozenset(kind for kind, name in self.kernels.items() if name in names)

    def switch(self, to: Numerics) -> None:
        """Compute so from the next step on. Delayed scales of FP8 lose their history where FP8 is switched."""
        if self._fp8 is not None:
            self._fp8.on = to.fp8
        if to.plain == self._plain:
            return
        self._plain = to.plain
        for block in self._blocks:
            block.compute_plainly("attention" in to.plain, "compile" in to.plain)
        self._loss.plain = "loss" in to.plain
        self._loss.compiled = self._compiled and "compile" not in to.plain
