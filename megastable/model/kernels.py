"""Which kernels compute the model, how attention logits are made for all of them, and computing in parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megastable.config.model import ModelConfig


class AttentionScores(NamedTuple):
    """scale: factor of q k; None: 1 / sqrt(d). cap: logits z become cap tanh(z / cap) (Gemma 2, arXiv:2408.00118,
    section 2); None: as they are. window: a query sees this many keys, its own included; None: all up to its own."""

    scale: float | None = None
    cap: float | None = None
    window: int | None = None

    @classmethod
    def from_config(cls, config: ModelConfig, block: int) -> AttentionScores:
        return cls(config.score_scale, config.attention_softcap, config.window_of(block))

    def within_length(self, length: int) -> AttentionScores:
        """The same for samples of `length` tokens: without a window that none of them reaches."""
        return self if self.window is None or self.window < length else self._replace(window=None)

    def score_factor(self, width: int) -> float:
        """The factor of q k. width: of a head."""
        return 1 / math.sqrt(width) if self.scale is None else self.scale

    def make_mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [queries, keys]: which keys a query sees. Both int64, positions in the sample."""
        key_distance = queries[:, None] - keys
        is_seen = key_distance >= 0
        return is_seen if self.window is None else is_seen & (key_distance < self.window)


FULL = AttentionScores()


def softcap(z: Tensor, cap: float | None) -> Tensor:
    """cap tanh(z / cap), in the dtype of z."""
    return z if cap is None else torch.tanh(z / cap) * cap


def compute_in_parts(
    compute: Callable[..., Tensor], x: Tensor, whole: tuple[Tensor, ...], size: int, dims: tuple[int, int]
) -> Tensor:
    """What `compute` makes of x, computed for `size` rows of it at a time, and again in the backward pass.

    The gradients of `whole` are summed over the parts in fp32 and rounded once.

    Args:
        compute: (rows of x, index of the first one, *whole) -> result. It draws no random numbers.
        x: Split along its dimension `dims[0]`.
        whole: Tensors that every part needs.
        size: Rows of a part; the last one may have fewer. The same on all ranks that `compute` communicates with.
        dims: The dimension of the rows in x, and in the result.
    """
    joined_result: Tensor = _InParts.apply(compute, size, dims, x, *whole)
    return joined_result


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., Tensor],
        size: int,
        dims: tuple[int, int],
        x: Tensor,
        *whole: Tensor,
    ) -> Tensor:
        ctx.compute, ctx.size, ctx.dims = compute, size, dims
        ctx.save_for_backward(x, *whole)
        parts = enumerate(x.split(size, dims[0]))
        return torch.cat([compute(rows, index * size, *whole) for index, rows in parts], dims[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, *whole = ctx.saved_tensors
        part_gradients: list[Tensor] = []
        whole_totals = [torch.zeros(w.shape, dtype=torch.float32, device=w.device) for w in whole]
        all_parts, rows_upstream = x.split(ctx.size, ctx.dims[0]), upstream.split(ctx.size, ctx.dims[1])
        for part_index, (part_rows, part_upstream) in enumerate(zip(all_parts, rows_upstream, strict=True)):
            with torch.enable_grad():
                part_inputs = [whole_tensor.detach().requires_grad_() for whole_tensor in (part_rows, *whole)]
                part_result = ctx.compute(part_inputs[0], part_index * ctx.size, *part_inputs[1:])
            of_part, *of_whole = torch.autograd.grad(part_result, part_inputs, part_upstream)
            part_gradients.append(of_part)
            for whole_total, whole_gradient in zip(whole_totals, of_whole, strict=True):
                whole_total += whole_gradient
        rounded_totals = [total.to(w.dtype) for total, w in zip(whole_totals, whole, strict=True)]
        return None, None, None, torch.cat(part_gradients, ctx.dims[0]), *rounded_totals


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Timing(NamedTuple):
    """What a start has measured of a part of `elementwise.PARTS`: milliseconds of own kernels and of PyTorch's, or what
    is wrong with own ones. place: the device, its software and the shapes, for which it holds."""

    part: str
    place: str
    own_time: float = 0.0
    plain_time: float = 0.0
    fault: str = ""

    def __str__(self) -> str:
        times_text = f"{self.own_time:.3f} ms, PyTorch's {self.plain_time:.3f}"
        return f"{self.part} {self.fault or times_text}"


@dataclass(frozen=True)
class Kernels:
    """attention: of `cores.CORES`; loss: "reference" or "chunked"; compile: every block by torch.compile. fp8: "off",
    "emulated" or "te". elementwise: of `elementwise.PARTS`, what own kernels compute; measured: why these. grouped:
    whether all experts of a block are one product.

    notes: requested kernels that are unavailable, each with the reason and the fallback.
    """

    attention: str = "sdpa"
    loss: str = "reference"
    compile: bool = False
    fp8: str = "off"
    notes: tuple[str, ...] = ()
    elementwise: tuple[str, ...] = ()
    measured: tuple[Timing, ...] = ()
    grouped: bool = False

    def __str__(self) -> str:
        block_text = "compiled" if self.compile else "not compiled"
        fp8_text = f", FP8 {self.fp8}" if self.fp8 != "off" else ""
        own_text = f", own kernels for {', '.join(self.elementwise)}" if self.elementwise else ""
        own_text += ", experts grouped" if self.grouped else ""
        measured_text = f" ({'; '.join(map(str, self.measured))})" if self.measured else ""
        return f"attention {self.attention}, loss {self.loss}, blocks {block_text}{own_text}{measured_text}{fp8_text}"

    @property
    def replaceable(self) -> dict[str, str]:
        """What plain PyTorch can compute in place of each kind of these kernels, by kind: its name. A
        name has torch's version: after an update it is another kernel."""
        # In this order each is tried alone: own kernels first, as without compiled blocks they are not used either.
        names = {"elementwise": "own elementwise kernels"} if self.elementwise else {}
        if self.grouped:
            names["grouped"] = "grouped products of experts"
        if self.compile:
            names["compile"] = "torch.compile"
        if self.attention != "reference":
            names["attention"] = f"attention {self.attention}"
        if self.loss == "chunked":
            names["loss"] = "chunked loss"
        return {kind: f"{name} of torch {torch.__version__}" for kind, name in names.items()}

    @property
    def whole_blocks(self) -> bool:
        """Whether a block is compiled as one graph: Transformer Engine's attention cannot be part of one."""
        return self.attention != "te"


PLAIN = Kernels()
