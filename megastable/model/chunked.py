"""Head projection, cross-entropy and z-loss fused over chunks of tokens: the full logits never exist.

Gradients are computed in the forward pass, while the logits of a chunk are in memory, so nothing is computed twice (Hsu
et al., Liger Kernel, arXiv:2410.10989 section 3; the memory of logits: Wijmans et al., arXiv:2411.09009). The plain
reference is loss.py. Between forward and backward dX and dW are kept, not the softmax [tokens, vocabulary] in fp32.

Each chunk takes one small all-gather over the tensor group: logsumexp and target logit of every token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megastable.base import products
from megastable.model import sizes
from megastable.model.attention_scores import softcap
from megastable.parallel.topology import TensorParallel

# Elementwise work on a chunk goes in blocks of this many logits, to stay in a CPU's cache.
BLOCK = 2**19
GPU_BLOCK = 2**22  # for entropies, which are measured at few steps: 16 MiB in fp32


def chunked_objective(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocabulary: int,
    z_loss: float,
    tp: TensorParallel,
    compiled: bool = False,
    elements: int | None = None,
    cap: float | None = None,
    entropies: bool = False,
) -> tuple[Tensor, Tensor]:
    """(objective, samples): mean(cross-entropy) + z_loss * mean(logsumexp^2), fp32, and fp32 [2, b] without a gradient:
    the means of cross-entropy and logsumexp^2 of every sample; [3, b] with `entropies`, and that of the predictions at
    `sizes.choose_predicted_positions`, nats. They are measured apart: the rest has the same bits with and without them.

    x: [s, b, h], whole on every rank of the tensor group (see `mappings.enter`); its gradient is this rank's part.
    weight: [padded vocabulary / tensor, h], this rank's rows. labels: [b, s], int64; a label that is no token makes the
    objective infinite. vocabulary: real size; padding rows take no part in products and get a zero gradient.
    compiled: elementwise work goes through torch.compile. elements: logits at a time. cap: logits z become
    cap tanh(z / cap), in fp32.
    """
    if elements is None:
        elements = sizes.elements_on(x.device.type)
    # Asked here: inside the function gradients are off, and under no_grad `needs_input_grad` is still true.
    grads = (
        torch.is_grad_enabled() and x.requires_grad,
        torch.is_grad_enabled() and weight.requires_grad,
    )
    objective = Objective(z_loss, tp, compiled, cap, entropies)
    return _Chunked.apply(x, weight, labels, vocabulary, objective, elements, grads)


@dataclass(frozen=True)
class Objective:
    """What is computed of logits; see `chunked_objective`."""

    z_loss: float
    tp: TensorParallel
    compiled: bool
    cap: float | None
    entropies: bool


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocabulary: int,
        of: Objective,
        elements: int,
        grads: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        columns = weight.shape[0]
        offset = of.tp.rank * columns
        rows = min(max(vocabulary - offset, 0), columns)
        real = weight[:rows]
        flat = x.reshape(-1, x.shape[-1])
        local = labels.t().reshape(-1) - offset
        local = local.masked_fill((local < 0) | (local >= rows), -1)  # another rank's
        tokens = flat.shape[0]
        # By columns, not rows: all ranks of the tensor group need the same chunks.
        size = sizes.chunk_size(tokens, columns, elements)
        loss, lse = flat.new_empty((2, tokens), dtype=torch.float32)
        dx = torch.empty_like(flat) if grads[0] else None
        dw = _WeightGradient(real, many=size < tokens) if grads[1] else None
        # Rows keep the padded length: a vocabulary of 50257 would break the alignment that products need. The padding
        # is zeroed because oneDNN's bf16 products read it and multiply it by zero: a NaN there would spread.
        buffer = flat.new_empty((size, columns))
        buffer[:, rows:] = 0.0
        buffer = buffer[:, :rows]
        own, measured = list[Tensor](), _predicted_rows(x) if of.entropies else None
        for start in range(0, tokens, size):
            part = slice(start, start + size)
            logits = products.mm(flat[part], real.t(), out=buffer[: flat[part].shape[0]])
            if measured is not None:
                within = measured[(measured >= start) & (measured < start + size)] - start
                own.append(own_entropy(logits[within], of.cap))
            loss[part], lse[part] = _between(logits, local[part], of, any(grads))
            gradient = logits  # overwritten in place
            if dx is not None:
                products.mm(gradient, real, out=dx[part])
            if dw is not None:
                dw.add(gradient, flat[part])
        square = lse.pow(2)
        samples = torch.stack([loss, square]).view(2, *x.shape[:2]).mean(1)
        if own:
            entropy = joined_entropy(torch.cat(own, 1), of.tp).view(-1, x.shape[1]).mean(0)
            samples = torch.cat((samples, entropy[None]))
        ctx.save_for_backward(dx, dw and dw.total)
        ctx.x_shape, ctx.weight_shape, ctx.weight_dtype = x.shape, weight.shape, weight.dtype
        ctx.mark_non_differentiable(samples)
        return loss.mean() + of.z_loss * square.mean(), samples

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        factor = upstream.float() / ctx.x_shape[:2].numel()
        if dx is not None:
            dx = _scaled(dx, factor, torch.empty_like(dx)).view(ctx.x_shape)
        if dw is not None:
            padded = dw.new_empty(ctx.weight_shape, dtype=ctx.weight_dtype)
            _scaled(dw, factor, padded[: len(dw)])
            padded[len(dw) :] = 0.0
            dw = padded
        return dx, dw, *[None] * 5


def _scaled(gradient: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """gradient * factor, rounded once. Token gradients are kept unscaled, of order 1: divided by the number of tokens
    first, they would underflow in fp16. One dimension of the factor keeps the product in fp32: a loss scale of 65536
    is infinite in fp16."""
    if out.is_cuda:
        return torch.mul(gradient, factor.view(1, 1), out=out)
    # A CPU casts faster separately than inside a product; a few rows at a time stay in the cache.
    rows = max(1, BLOCK // gradient.shape[1])
    for given, to in zip(gradient.split(rows), out.split(rows), strict=True):
        to.copy_(given.float() * factor)
    return out


class _WeightGradient:
    """The sum over chunks of gradient^T x [rows, h]: in fp32, or in x's dtype if there is only one bf16 chunk."""

    def __init__(self, weight: Tensor, many: bool) -> None:
        self.many = many
        self.wide = _wide_products(weight)
        self.total: Tensor | None = None
        narrow = many and not self.wide and weight.dtype == torch.bfloat16 and not products.is_cast(weight)
        self._part = weight.new_empty(weight.shape) if narrow else None

    def add(self, gradient: Tensor, x: Tensor) -> None:
        """gradient [tokens, rows], x [tokens, h]."""
        transposed = gradient.t()
        if self.wide:
            if self.total is None:
                self.total = torch.mm(transposed, x, out_dtype=torch.float32)
            else:
                torch.addmm(self.total, transposed, x, out_dtype=torch.float32, out=self.total)
            return
        # A sum over thousands of unscaled tokens may leave the range of fp16, whatever the loss scale.
        if x.dtype == torch.float16 or products.is_cast(x):
            transposed, x = transposed.float(), x.float()
        if self.total is None:
            total = torch.mm(transposed, x)
            self.total = total.float() if self.many else total
        elif x.dtype == torch.float32:
            self.total.addmm_(transposed, x)
        else:
            self.total.add_(torch.mm(transposed, x, out=self._part))


def _wide_products(x: Tensor) -> bool:
    """Whether a product of x's dtype can be written in fp32."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return (
        half
        and x.is_cuda
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def _between(logits: Tensor, local: Tensor, of: Objective, wanted: bool) -> Tensor:
    """[2, tokens], fp32: cross-entropy and logsumexp. If `wanted`, the gradient of the sum over tokens of the objective
    takes the place of the logits [tokens, rows].

    local: [tokens], the column of the label, -1 for one of another rank.
    """
    if of.compiled and logits.numel():
        return _between_compiled(logits, local, of, wanted)
    step = len(logits)
    if of.tp.size == 1 and not logits.is_cuda:
        step = max(BLOCK // logits.shape[1], 1)
    # One buffer for all blocks: on a CPU, allocating a new tensor costs half as much as the softmax.
    scratch = torch.empty_like(logits[:step], dtype=torch.float32)
    parts = [
        _block(logits[start : start + step], local[start : start + step], scratch, of, wanted)
        for start in range(0, len(logits), step)
    ]
    return torch.cat(parts, 1)


def _block(logits: Tensor, local: Tensor, scratch: Tensor, of: Objective, wanted: bool) -> Tensor:
    """`_between` for a block that fits in scratch [tokens, rows], fp32."""
    index, here = local.clamp(min=0).unsqueeze(-1), local >= 0
    own = logits.new_full((2, len(local)), -torch.inf, dtype=torch.float32)
    p = scratch[: len(logits)]
    z = _capped(logits, of.cap)
    if logits.numel():
        torch.softmax(z, -1, dtype=torch.float32, out=p)
        # The largest p is at least 1 / rows: its logarithm is exact, unlike that of any other.
        own[0] = z.amax(-1) - p.amax(-1).log()
        own[1] = torch.where(here, z.gather(-1, index).squeeze(-1), -torch.inf)
    lse, target = _joined(own, of.tp)
    if wanted and logits.numel():
        scale = _slope(lse, of.z_loss)
        if of.tp.size > 1:
            scale = scale * (own[0] - lse).exp()
        if of.tp.size > 1 or of.z_loss:
            p.mul_(scale.unsqueeze(-1))
        p.scatter_add_(-1, index, -here.float().unsqueeze(-1))
        if of.cap is not None:
            p.mul_(z.div_(of.cap).square_().neg_().add_(1))  # the derivative of the cap
        logits.copy_(p)
    return torch.stack((lse - target, lse))


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    """The logits; with a cap, the capped ones in fp32."""
    return logits if cap is None else softcap(logits.float(), cap)


def _slope(lse: Tensor, z_loss: float) -> Tensor:
    """The factor of p in the gradient: d(lse + z_loss * lse^2) / d lse."""
    return 1.0 + 2.0 * z_loss * lse


def _joined(own: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """(logsumexp, target logit) of the whole vocabulary from those of every rank, fp32 [2, tokens]; -inf: has none.

    By all-gather: a maximum over ranks may drop a NaN (gloo's does), and the gate must see it.
    """
    if tp.size == 1:
        return own[0], own[1]
    ranks = [torch.empty_like(own) for _ in range(tp.size)]
    dist.all_gather(ranks, own.contiguous(), group=tp.group)
    lse, target = torch.stack(ranks, 1)
    return lse.logsumexp(0), target.amax(0)


def _predicted_rows(x: Tensor) -> Tensor:
    """Rows of [s * b] tokens at `sizes.choose_predicted_positions`, in order."""
    length, samples = x.shape[:2]
    first = torch.tensor(sizes.choose_predicted_positions(length), device=x.device) * samples
    return (first[:, None] + torch.arange(samples, device=x.device)).flatten()


@torch.no_grad()
def own_entropy(logits: Tensor, cap: float | None = None) -> Tensor:
    """Of a rank's columns of logits [tokens, rows], before a cap: logsumexp, and the entropy (nats) of the distribution
    over these columns alone; fp32 [2, tokens]. No rows: -inf and 0.

    It takes the memory of two blocks in fp32, three with a cap: on a GPU 32 or 48 MiB beside the logits.
    """
    if not logits.numel():
        return logits.new_tensor([-torch.inf, 0.0], dtype=torch.float32)[:, None].expand(2, len(logits))
    rows = max(1, (GPU_BLOCK if logits.is_cuda else BLOCK) // logits.shape[1])
    return torch.cat([_block_entropy(part, cap) for part in logits.split(rows)], 1)


def _block_entropy(logits: Tensor, cap: float | None) -> Tensor:
    """`own_entropy` of a block; a function, so that nothing of a block is alive in the next one."""
    z = softcap(logits.float(), cap)
    lse = z.logsumexp(-1)
    z = z - lse.unsqueeze(-1)
    return torch.stack((lse, -z.exp().mul_(z).sum(-1)))


@torch.no_grad()
def joined_entropy(own: Tensor, tp: TensorParallel) -> Tensor:
    """Entropy over the whole vocabulary, nats, fp32 [tokens], from `own_entropy` of every rank of the tensor group:
    that of the choice of a rank, and that within each."""
    if tp.size == 1:
        return own[1]
    ranks = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(tp.size)]
    dist.all_gather(ranks, own.contiguous(), group=tp.group)
    lse, within = torch.stack(ranks, 1)
    share = lse.softmax(0)
    return (share * within - torch.xlogy(share, share)).sum(0)


def _statistics(logits: Tensor, local: Tensor, cap: float | None) -> Tensor:
    """As in `_block`, [2, tokens]: this rank's logsumexp and target logit."""
    wide = softcap(logits.float(), cap)
    highest = wide.amax(-1, keepdim=True)
    lse = highest.squeeze(-1) + (wide - highest).exp().sum(-1).log()
    target = wide.gather(-1, local.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.stack((lse, torch.where(local >= 0, target, -torch.inf)))


def _gradient_(logits: Tensor, local: Tensor, lse: Tensor, z_loss: float, cap: float | None) -> None:
    z = softcap(logits.float(), cap)
    p = (z - lse.unsqueeze(-1)).exp()
    at_label = torch.arange(logits.shape[-1], device=logits.device) == local.unsqueeze(-1)
    gradient = p * _slope(lse, z_loss).unsqueeze(-1) - at_label.float()
    logits.copy_(gradient if cap is None else gradient * (1 - (z / cap).square()))


def _both_(logits: Tensor, local: Tensor, z_loss: float, cap: float | None) -> Tensor:
    own = _statistics(logits, local, cap)
    _gradient_(logits, local, own[0], z_loss, cap)
    return own


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _between_compiled(logits: Tensor, local: Tensor, of: Objective, wanted: bool) -> Tensor:
    if wanted and of.tp.size == 1:
        lse, target = _compiled(_both_)(logits, local, of.z_loss, of.cap)
    else:
        lse, target = _joined(_compiled(_statistics)(logits, local, of.cap), of.tp)
        if wanted:
            _compiled(_gradient_)(logits, local, lse, of.z_loss, of.cap)
    return torch.stack((lse - target, lse))
