"""Changes how a run trains from the next update on: by name, and back again. All ranks alike."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from torch import nn

from megastable.config.tree import RunConfig
from megastable.engine.logit_clipping import LogitClipping
from megastable.model.loss import LossFunction
from megastable.model.mlp import MLP, gated, swiglu

CLIP = 0.25  # of `optimizer.clip`
Z_LOSS, LEAST_Z_LOSS = 10.0, 1e-4  # times `model.z_loss`, and at least so much (PaLM's, arXiv:2204.02311)
# The second moment forgets twice as fast, and no slower than 0.95 does: arXiv:2304.13013, section 3, has lower ones
# follow gradients that change.
BETA2 = 0.95
# Of the logits, as Kimi K2 was trained with from the start to 15.5T tokens (arXiv:2507.20534, section 2.1). Not
# relative to the good state: what bf16 and softmax bear does not depend on it, and a name in a checkpoint is enough.
QK_CLIP = 100.0
# DeepSeek-V4's (`swiglu_limit`), taken up against spikes. gpt-oss has 7 (arXiv:2508.10925), but from the start: the
# wider one takes less from weights that were trained without.
SWIGLU_CLAMP = 10.0
CLAMPED = partial(gated, gelu=False, clamp=SWIGLU_CLAMP)


def lower_beta2(beta2: float) -> float:
    return min(BETA2, 1 - 2 * (1 - beta2))


class Adjustments:
    """wrapper: DeepSpeed's, around the optimizer. fp8: by what layers compute in it, see `Kernels`.

    clip: the norm that gradients are clipped to, 0: never.
    """

    def __init__(
        self, config: RunConfig, wrapper: Any, loss: LossFunction, qk_clip: LogitClipping, module: nn.Module,
        fp8: str,
    ) -> None:  # fmt: skip
        self._wrapper, self._loss, self._z_loss = wrapper, loss, loss.z_loss
        self._groups = [group for group in wrapper.optimizer.param_groups if "betas" in group]
        self._betas = [group["betas"] for group in self._groups]
        self._qk_clip, o, m = qk_clip, config.optimizer, config.model
        decays = ((group, group["weight_decay"]) for group in wrapper.optimizer.param_groups)
        # Of the recipe's: muP has more for some groups.
        self._decays = [(group, decay / o.weight_decay) for group, decay in decays if decay]
        self._mlps = [part for part in module.modules() if isinstance(part, MLP)]
        self.clip = self._clip = o.clip
        self._clips = o.clipping.kind == "norm"
        possible = {
            "clip": self._clips and o.clip > 0,
            "beta2": any(beta2 > 0.5 for _, beta2 in self._betas),
            "z_loss": True,
            # Norms undo what is done to the weights, and a cap bounds the logits already.
            "qk_clip": o.qk_clip is None and not m.qk_norm and m.attention_softcap is None,
            # Transformer Engine may have fused the MLP.
            "swiglu_clamp": m.activation == "silu" and m.swiglu_clamp is None and fp8 != "te",
            "reset_moments": True,
        }
        self.possible = frozenset(name for name, has in possible.items() if has)
        self.now: tuple[str, ...] = ()

    def follow(self, config: RunConfig) -> None:
        """Take the recipe's values from `config` from the next update on; what was switched applies to these."""
        o = config.optimizer
        self._z_loss, self._clip = config.model.z_loss, o.clip
        self._betas = [o.betas for _ in self._groups]
        for group, share in self._decays:
            group["weight_decay"] = share * o.weight_decay
        self.switch(self.now)

    def switch(self, names: Collection[str]) -> None:
        """Train with these changes and no others from the next update on, as far as they are possible."""
        was, self.now = self.now, tuple(names)
        self._loss.z_loss = max(LEAST_Z_LOSS, Z_LOSS * self._z_loss) if "z_loss" in names else self._z_loss
        for group, (beta1, beta2) in zip(self._groups, self._betas, strict=True):
            group["betas"] = (beta1, lower_beta2(beta2) if "beta2" in names else beta2)
        if self._clips:
            self.clip = self._clip * (CLIP if "clip" in names else 1.0)
            self._wrapper.clip_grad = self.clip
        if "qk_clip" in self.possible:
            self._qk_clip.switch(QK_CLIP if "qk_clip" in names else None)
        clamped = "swiglu_clamp" in names
        if "swiglu_clamp" in self.possible and clamped != ("swiglu_clamp" in was):
            for mlp in self._mlps:
                mlp.activation = CLAMPED if clamped else swiglu
