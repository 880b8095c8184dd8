"""Changes how a run trains from the next update on: by name, and back again. All ranks alike."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megastable.config.tree import RunConfig
from megastable.model.loss import LossFunction

CLIP = 0.25  # of `optimizer.clip`
Z_LOSS, LEAST_Z_LOSS = 10.0, 1e-4  # times `model.z_loss`, and at least so much (PaLM's, arXiv:2204.02311)
# The second moment forgets twice as fast, and no slower than 0.95 does: arXiv:2304.13013, section 3, has lower ones
# follow gradients that change.
BETA2 = 0.95


def lower_beta2(beta2: float) -> float:
    return min(BETA2, 1 - 2 * (1 - beta2))


class Adjustments:
    """wrapper: DeepSpeed's, around the optimizer. clip: the norm that gradients are clipped to, 0: never."""

    def __init__(self, config: RunConfig, wrapper: Any, loss: LossFunction) -> None:
        self._wrapper, self._loss, self._z_loss = wrapper, loss, loss.z_loss
        self._groups = [group for group in wrapper.optimizer.param_groups if "betas" in group]
        self._betas = [group["betas"] for group in self._groups]
        o = config.optimizer
        self.clip = self._clip = o.clip
        possible = {
            "clip": o.clipping.kind == "norm" and o.clip > 0,
            "beta2": any(beta2 > 0.5 for _, beta2 in self._betas),
            "z_loss": True,
            "reset_moments": True,
        }
        self.possible = frozenset(name for name, has in possible.items() if has)

    def switch(self, names: Collection[str]) -> None:
        """Train with these changes and no others from the next update on."""
        self._loss.z_loss = max(LEAST_Z_LOSS, Z_LOSS * self._z_loss) if "z_loss" in names else self._z_loss
        for group, (beta1, beta2) in zip(self._groups, self._betas, strict=True):
            group["betas"] = (beta1, lower_beta2(beta2) if "beta2" in names else beta2)
        if "clip" in self.possible:
            self.clip = self._clip * (CLIP if "clip" in names else 1.0)
            self._wrapper.clip_grad = self.clip
