"""AdamW with bf16 moments: 8 bytes of state per parameter instead of 12 with fp32 moments.

    optimizer = AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8)

Master weights, gradients and arithmetic are fp32; only the state kept between steps is rounded, as in DeepSeek-V3
(arXiv:2412.19437 section 3.3.3). With rounding to nearest, a second moment could no longer fall where (1 - beta2) is
below 2^-9, half of bf16's last place: at beta2 = 0.999 it would stay at its maximum. So rounding is stochastic and
unbiased (Zamirai et al., arXiv:2010.06192).

The random bits are a hash of the step number, the weight and the gradient. No generator has to be saved: a resumed,
rewound or replayed step gives the same bits under any layout. Copies of a weight on several ranks (norms under tensor
parallelism, tied embeddings) stay equal; random bits counted by position would drive them apart.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megastable.base.threads import share_items

CHUNKS = {"cpu": 1 << 17, "cuda": 1 << 24}  # elements at a time: fits a CPU's cache, fills a GPU
FUSED_CHUNKS = CHUNKS | {"cpu": 1 << 18}  # of torch's kernel, which needs no buffers
SHARED = 1 << 22  # elements for which a CPU's thread is begun
HIGH = -0x10000  # the bits of fp32 that bf16 keeps, as an int32
# Odd, with bits everywhere: the first two combine weight and gradient, the third mixes the result. Products wrap.
OF_WEIGHT, OF_GRADIENT, SPREADING = 0x6C8E9CF5, 0x3C6EF373, 0x7FEB352D


Chunk = tuple[Tensor, ...]


def is_worth_sharing(p: Tensor) -> bool:
    """Whether threads are to take chunks of it, instead of waiting for each other in every operation."""
    threads = torch.get_num_threads() if p.device.type == "cpu" else 1
    return threads > 1 and p.numel() >= threads * SHARED


class OnePass(torch.optim.Optimizer):
    """What an update can do in its own pass over memory, that would take others.

    gradient_factor: gradients count times this; they may be overwritten. low_weights: by parameter, flat, in any dtype:
    where its new weights are written as well.
    """

    gradient_factor: float = 1.0
    low_weights: Mapping[Tensor, Tensor] = MappingProxyType({})

    def update_chunks(
        self, update: Callable[[Iterable[Chunk]], None], chunk_size: int, shared: bool, p: Tensor, *tensors: Tensor
    ) -> None:  # fmt: skip
        """Have `update` called with flat parts of p and of `tensors`, as large as p, and of its low weights, which may
        be missing. shared: by every thread, with some of them."""
        low_weights = self.low_weights.get(p)
        given_tensors = (p.detach(), *tensors, *([] if low_weights is None else [low_weights]))
        chunks = list(zip(*(given.view(-1).split(chunk_size) for given in given_tensors), strict=True))
        if shared:
            share_items(update, chunks)
        else:
            update(chunks)


class AdamW(OnePass):
    """Elementwise, so it works on ZeRO's flat partitions as on whole parameters.

    State of a parameter: "step" (fp32 scalar on the CPU), "exp_avg", "exp_avg_sq" (bf16, shaped like the parameter).
    Parameters and gradients must be fp32 (TypeError otherwise) and contiguous. compiled: one kernel by torch.compile
    instead of some thirty, for a GPU; it takes seconds at the first step.
    """

    moments = torch.bfloat16

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.compiled = compiled

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param_group in self.param_groups:
            for p in param_group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch casts moments to the dtype of the weights; the cast back to bf16 is exact."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = state[kind].to(self.moments)

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if p.dtype != torch.float32 or gradient.dtype != torch.float32:
            raise TypeError(
                f"weights are {p.dtype}, gradients {gradient.dtype}: AdamW with bf16 moments needs fp32"
            )
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.zeros_like(p, dtype=self.moments)
        state["step"] += 1
        step, (beta1, beta2), lr = int(state["step"]), group["betas"], float(group["lr"])
        step_factors: Any = (
            1 - lr * group["weight_decay"], -lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step),
            self.gradient_factor,
        )  # fmt: skip
        step_key: Any = key_of(step)
        update_function: Any = _compiled(chunk_update) if self.compiled else chunk_update
        if self.compiled:  # Python numbers would be compiled in and recompiled each step
            step_factors = torch.tensor(step_factors).to(p.device, non_blocking=True)
            step_key = torch.tensor(step_key, dtype=torch.int32).to(p.device, non_blocking=True)
        chunk_size = CHUNKS.get(p.device.type, CHUNKS["cuda"])

        @torch.no_grad()  # which each thread must be told
        def update(chunks: Iterable[Chunk]) -> None:
            chunk_buffers = None if self.compiled else make_buffers(min(chunk_size, p.numel()), p.device)
            for w, g, m, v, *low in chunks:
                update_function(
                    w, g, m, v, low, step_factors, step_key, beta1, beta2, group["eps"], chunk_buffers
                )

        # A compiled kernel has its own threads, and is one operation.
        shared = not self.compiled and is_worth_sharing(p)
        self.update_chunks(update, chunk_size, shared, p, gradient, state["exp_avg"], state["exp_avg_sq"])


def make_buffers(size: int, device: torch.device) -> list[Tensor]:
    """Memory for one chunk's intermediate results: three buffers of fp32, two of int32."""
    dtypes = [torch.float32] * 3 + [torch.int32] * 2
    return [torch.empty(size, dtype=dtype, device=device) for dtype in dtypes]


def chunk_update(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    low: Sequence[Tensor],
    numbers: Any,
    key: Any,
    beta1: float,
    beta2: float,
    eps: float,
    room: list[Tensor] | None,
) -> None:
    """One step of [n] elements, in place: p, g fp32, m, v bf16. low: none, or one: the new p is copied to it.

    numbers: (1 - lr decay, -lr / (1 - beta1^step), 1 / sqrt(1 - beta2^step), factor of g); key: of the step, an int32.
    Both are Python numbers or tensors. room: buffers; None = new memory, or none at all under a compiler.
    """
    weight_factor, step_factor, bias_factor = numbers[0], numbers[1], numbers[2]
    buffers = room or make_buffers(p.numel(), p.device)
    m32, v32, a, bits, more_bits = (buffer[: p.numel()] for buffer in buffers)
    g = torch.mul(g, numbers[3], out=a)  # until the hash is made of it
    m32.copy_(m).lerp_(g, 1 - beta1)
    v32.copy_(v).mul_(beta2).addcmul_(g, g, value=1 - beta2)
    # Before the weight changes. One hash gives two 16-bit words, one for each moment.
    torch.mul(p.view(torch.int32), OF_WEIGHT, out=bits).add_(g.view(torch.int32), alpha=OF_GRADIENT).add_(key)
    torch.bitwise_right_shift(bits, 16, out=more_bits).bitwise_and_(0xFFFF)
    bits.bitwise_xor_(more_bits).mul_(SPREADING)
    torch.bitwise_right_shift(bits, 16, out=more_bits).bitwise_and_(0xFFFF)
    bits.bitwise_xor_(more_bits).bitwise_and_(0xFFFF)
    torch.sqrt(v32, out=a).mul_(bias_factor).add_(eps)
    torch.div(m32, a, out=a).mul_(step_factor)
    p.mul_(weight_factor).add_(a)
    v.copy_(_rounded(v32, more_bits))
    m.copy_(_rounded(m32, bits))
    for low_weights in low:
        low_weights.copy_(p)


def _rounded(x: Tensor, bits: Tensor) -> Tensor:
    """Round x, fp32, to a neighbour that bf16 can hold, by `bits`, uniform over [0, 2^16); overwrites both arguments.

    Added to the half that bf16 drops, the bits carry into the upper half with a probability equal to the dropped
    fraction. Numbers that bf16 can hold stay unchanged; a number beyond its largest may become infinite. A NaN could
    carry into a number, so the last term (0 or NaN) restores it; it also turns infinities into NaN.
    """
    bits.add_(x.view(torch.int32)).bitwise_and_(HIGH)
    return x.mul_(0.0).add_(bits.view(torch.float32))


def key_of(step: int) -> int:
    """The step's contribution to the hash, far from those of neighbouring steps. An int32."""
    step_key = step * 0x9E3779B9 % 2**32
    step_key = (step_key ^ step_key >> 15) * 0x85EBCA6B % 2**32
    step_key ^= step_key >> 13
    return step_key - 2**32 if step_key >= 2**31 else step_key


@functools.cache
def _compiled(update_function: Callable[..., None]) -> Any:
    # Betas and eps are constants. As symbols they are not part of the disk cache's key, although the kernel is
    # specialised on their values: a run got the moments of another run's betas (torch 2.13).
    return torch._dynamo.config.patch(specialize_float=True)(torch.compile(update_function, dynamic=True))


# torch's fused AdamW with rounding that does not depend on an element's position in its buffer.
#
# On a CPU torch's kernel computes the last `numel % 16` elements of a buffer one by one instead of in vectors, which
# rounds some second moments differently (torch 2.13). Copies of a weight in different flat buffers, such as a tied
# embedding on two pipeline stages, would drift apart. Here the last elements are padded to a vector.


LANES = 16  # fp32 numbers of the widest vector, AVX-512; narrower ones divide it


def update_fused(
    tensors: Sequence[Tensor], step: Tensor, lr: float, betas: tuple[float, float], eps: float, decay: float
) -> None:
    """AdamW's update of weight, gradient, first and second moment, flat fp32 [n], in place; an element's result does
    not depend on its position. step: this update's number, 0-d fp32 on their device."""
    rest_count = tensors[0].numel() % LANES if tensors[0].device.type == "cpu" else 0
    if rest_count < tensors[0].numel():
        _kernel([t[: t.numel() - rest_count] for t in tensors], step, lr, betas, eps, decay)
    if rest_count:
        padded_tensors = [functional.pad(t[-rest_count:], (0, LANES - rest_count)) for t in tensors]
        _kernel(padded_tensors, step, lr, betas, eps, decay)
        for full_tensor, padded_result in zip(tensors, padded_tensors, strict=True):
            full_tensor[-rest_count:] = padded_result[:rest_count]


def _kernel(
    tensors: Sequence[Tensor], step: Tensor, lr: float, betas: tuple[float, float], eps: float, decay: float
) -> None:
    w, g, m, v = tensors
    torch._fused_adamw_(
        [w], [g], [m], [v], [], [step], lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=decay, eps=eps,
        amsgrad=False, maximize=False,
    )  # fmt: skip


class FusedAdamW(OnePass, torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), elementwise: an element's update does not depend on its position.

    compiled: on a GPU a kernel by torch.compile, which alone can scale gradients and write low weights in the pass of
    the update; torch's kernel is given scaled gradients from memory. Raises ValueError when a parameter is not
    contiguous.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.01,
        compiled: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        if strided_shapes := [
            tuple(p.shape) for g in self.param_groups for p in g["params"] if not p.is_contiguous()
        ]:
            raise ValueError(
                f"FusedAdamW: parameters of shapes {strided_shapes} are not contiguous: pass p.contiguous()"
            )

        self.compiled = compiled

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param_group in self.param_groups:
            for p in param_group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, param_group)

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=p.device)
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.zeros_like(p)
        state["step"] += 1
        factor, is_compiled = self.gradient_factor, self.compiled and p.is_cuda
        on_cpu, shared = p.device.type == "cpu", is_worth_sharing(p)
        step_factors = count_factors(state["step"], group, factor) if is_compiled else None
        chunk_size = FUSED_CHUNKS.get(p.device.type, FUSED_CHUNKS["cuda"])
        # Threads that would wait for each other after every operation do so after a few large ones.
        if on_cpu and torch.get_num_threads() > 1 and not shared:
            chunk_size = p.numel()
        in_place = not on_cpu or p.numel() <= chunk_size

        @torch.no_grad()  # which each thread must be told
        def update(chunks: Iterable[Chunk]) -> None:
            scaled_buffer = p.new_empty(0 if factor == 1 or in_place else chunk_size)
            for w, g, m, v, *low in chunks:
                if is_compiled:
                    _compiled(fp32_update)(w, g, m, v, low, step_factors, *group["betas"], group["eps"])
                    continue
                if factor != 1:
                    # A CPU's cache holds a chunk, so that only the update's own bytes come from memory.
                    g = torch.mul(g, factor, out=g if in_place else scaled_buffer[: len(g)])
                update_fused(
                    (w, g, m, v), state["step"], float(group["lr"]), group["betas"], group["eps"],
                    group["weight_decay"],
                )  # fmt: skip
                for low_chunk in low:
                    low_chunk.copy_(w)

        self.update_chunks(update, chunk_size, shared, p, gradient, state["exp_avg"], state["exp_avg_sq"])


def count_factors(step: Tensor, group: dict[str, Any], factor: float) -> Tensor:
    """`fp32_update`'s numbers, fp32 [4], on the step's device and without waiting for it."""
    (beta1, beta2), lr, exact_step = group["betas"], float(group["lr"]), step.double()
    step_factors = (
        torch.full_like(exact_step, 1 - lr * group["weight_decay"]), -lr / (1 - beta1**exact_step),
        (1 - beta2**exact_step).rsqrt(), torch.full_like(exact_step, factor),
    )  # fmt: skip
    return torch.stack(step_factors).float()


def fp32_update(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    low: Sequence[Tensor],
    numbers: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One step of [n] elements with fp32 moments, for a compiler, which makes one kernel of it: 28 bytes an element,
    and those of low. Arguments as of `chunk_update`."""
    g = g * numbers[3]
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.mul_(numbers[0]).add_(m / (v.sqrt() * numbers[2] + eps) * numbers[1])
    for low_weights in low:
        low_weights.copy_(p)
