"""torch's fused AdamW with rounding that does not depend on an element's position in its buffer.

On a CPU torch's kernel computes the last `numel % 16` elements of a buffer one by one instead of in vectors, which
rounds some second moments differently (torch 2.13). Copies of a weight in different flat buffers, such as a tied
embedding on two pipeline stages, would drift apart. Here the last elements are padded to a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LANES = 16  # fp32 numbers of the widest vector, AVX-512; narrower ones divide it


def update(
    tensors: Sequence[Tensor], step: Tensor, lr: float, betas: tuple[float, float], eps: float, decay: float
) -> None:
    """AdamW's update of weight, gradient, first and second moment, flat fp32 [n], in place; an element's result does
    not depend on its position. step: this update's number, 0-d fp32 on their device."""
    rest = tensors[0].numel() % LANES if tensors[0].device.type == "cpu" else 0
    if rest < tensors[0].numel():
        _kernel([t[: t.numel() - rest] for t in tensors], step, lr, betas, eps, decay)
    if rest:
        padded = [functional.pad(t[-rest:], (0, LANES - rest)) for t in tensors]
        _kernel(padded, step, lr, betas, eps, decay)
        for whole, done in zip(tensors, padded, strict=True):
            whole[-rest:] = done[:rest]


def _kernel(
    tensors: Sequence[Tensor], step: Tensor, lr: float, betas: tuple[float, float], eps: float, decay: float
) -> None:
    w, g, m, v = tensors
    torch._fused_adamw_(
        [w], [g], [m], [v], [], [step], lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=decay, eps=eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip


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
            state = self.state[p]
            _kernel(
                (w, g, m, v), state["step"], group["lr"], group["betas"], group["eps"], group["weight_decay"]
            )
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
