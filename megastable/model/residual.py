"""How attention and MLP join the residual stream: where the norms are, and with which factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megastable.config.model import ModelConfig

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Residual:
    """One block's: x [s, b, hidden] and a branch f, attention or MLP, give the new x.

    placement, with n the norm and m a second one:
    - "before": x + c f(n(x)) (Xiong et al., arXiv:2002.04745)
    - "after": x + c n(f(x)) (OLMo 2, arXiv:2501.00656, section 3; Swin v2, arXiv:2111.09883)
    - "both": x + c m(f(n(x))) (peri-LN, arXiv:2502.02732; Gemma 2, arXiv:2408.00118)
    - "sum": n(x + f(x)) (post-LN, arXiv:1706.03762)
    - "deep": n(a x + f(x)) with a = (2 layers)^(1/4) (DeepNorm, arXiv:2203.00555, section 3)
    - "branch": n(x + g f(x)), g growing from 0 to 1 (BranchNorm, arXiv:2305.02790, section 3)
    shortcut: a. branch: c, of depth transfer. norm: factor of n's result, of LayerNorm scaling.
    """

    placement: str
    shortcut: float = 1.0
    branch: float = 1.0
    norm: float = 1.0

    @classmethod
    def of(cls, config: ModelConfig, block: int) -> Residual:
        placement = config.placement_of(block)
        return cls(
            placement,
            shortcut=(2 * config.layers) ** 0.25 if placement == "deep" else 1.0,
            branch=1 / config.depth_ratio,
            norm=(block + 1) ** -0.5 if config.norm_scaling else 1.0,
        )

    @property
    def norms_input(self) -> bool:
        """Whether attention and MLP get the result of a norm."""
        return self.placement in ("before", "both")

    @property
    def of_sum(self) -> bool:
        """Whether the norm is of the sum of stream and branch."""
        return self.placement in ("sum", "deep", "branch")

    def join(
        self, x: Tensor, branch: Layer, norm: Layer, second: Layer | None, drop: Layer, grown: Tensor | None
    ) -> Tensor:
        """second: m. drop: dropout of what is added. grown: g, fp32 scalar."""
        if self.of_sum:
            y = branch(x)
            if grown is not None:
                y = (y * grown).to(x.dtype)
            return norm((x if self.shortcut == 1.0 else x * self.shortcut) + drop(y))
        y = branch(norm(x)) if self.norms_input else norm(branch(x))
        if second is not None:
            y = second(y)
        return x + drop(y if self.branch == 1.0 else y * self.branch)
