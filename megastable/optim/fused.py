"""torch's fused AdamW with rounding that does not depend on an element's position in its buffer.

On a CPU torch's kernel computes the last `numel % 16` elements of a buffer one by one instead of in vectors, which
rounds some second moments differently (torch 2.13). Copies of a weight in different flat buffers, such as a tied
embedding on two pipeline stages, would drift apart. Here the last elements are padded to a vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LANES = 16  # fp32 numbers of the widest vector, AVX-512; narrower ones divide it


class FusedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), elementwise: an element's update does not depend on its position.

    Raises ValueError when a parameter is not contiguous.
    """

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        if strided := [
            tuple(p.shape) for g in self.param_groups for p in g["params"] if not p.is_contiguous()
        ]:
            raise ValueError(
                f"FusedAdamW: parameters of shapes {strided} are not contiguous: pass p.contiguous()"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rests = [
            (group, p, self._rest(p))
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and p.device.type == "cpu" and p.numel() % LANES
        ]
        super().step()
        for group, p, (w, g, m, v) in rests:
            state, (beta1, beta2) = self.state[p], group["betas"]
            torch._fused_adamw_(
                [w], [g], [m], [v], [], [state["step"]],
                lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
                amsgrad=False, maximize=False,
            )  # fmt: skip
            for whole, rest in ((p, w), (state["exp_avg"], m), (state["exp_avg_sq"], v)):
                n = whole.numel() % LANES
                whole.view(-1)[-n:] = rest[:n]
        return loss

    def _rest(self, p: Tensor) -> list[Tensor]:
        """The elements after the last whole vector of weight, gradient and both moments, each padded to a vector."""
        n, state = p.numel() % LANES, self.state.get(p, {})
        rests = []
        for whole in (p, p.grad, state.get("exp_avg"), state.get("exp_avg_sq")):
            rest = p.new_zeros(LANES)
            if whole is not None:  # moments start at zero
                rest[:n] = whole.reshape(-1)[-n:]
            rests.append(rest)
        return rests
