"""Vocabulary-parallel cross-entropy with z-loss and per-sample losses, in fp32: plain, and fused with the head.

`cross_entropy`: the logits [s, b, v / tensor] stay split; only maxima, sums and target logits cross the tensor group
(Megatron-LM, arXiv:1909.08053 section 3). z-loss: mean of logsumexp^2 (PaLM, arXiv:2204.02311 section 5).

`chunked_objective`: the head's projection and the loss over chunks of tokens: the full logits never exist. Gradients
are computed in the forward pass, while the logits of a chunk are in memory, so nothing is computed twice (Hsu et al.,
Liger Kernel, arXiv:2410.10989 section 3; the memory of logits: Wijmans et al., arXiv:2411.09009). Between forward and
backward dX and dW are kept, not the softmax [tokens, vocabulary] in fp32. Each chunk takes one small all-gather over
the tensor group: logsumexp and target logit of every token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megastable.base import products
from megastable.base.products import linear
from megastable.model import sizes
from megastable.model.kernels import compute_in_parts, softcap
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
    has_gradients = torch.is_grad_enabled()
    wanted_gradients = has_gradients and x.requires_grad, has_gradients and weight.requires_grad
    objective = Objective(z_loss, tp, compiled, cap, entropies)
    return _Chunked.apply(x, weight, labels, vocabulary, objective, elements, wanted_gradients)


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
        rank_columns = weight.shape[0]
        column_offset = of.tp.rank * rank_columns
        real_rows = min(max(vocabulary - column_offset, 0), rank_columns)
        real_weight = weight[:real_rows]
        flat_x = x.reshape(-1, x.shape[-1])
        local_labels = labels.t().reshape(-1) - column_offset
        is_elsewhere = (local_labels < 0) | (local_labels >= real_rows)  # on another rank
        local_labels = local_labels.masked_fill(is_elsewhere, -1)
        token_count = flat_x.shape[0]
        # By columns, not rows: all ranks of the tensor group need the same chunks.
        chunk_tokens = sizes.chunk_size(token_count, rank_columns, elements)
        loss, lse = flat_x.new_empty((2, token_count), dtype=torch.float32)
        dx = torch.empty_like(flat_x) if grads[0] else None
        dw = _WeightGradient(real_weight, many=chunk_tokens < token_count) if grads[1] else None
        # Rows keep the padded length: a vocabulary of 50257 would break the alignment that products need. The padding
        # is zeroed because oneDNN's bf16 products read it and multiply it by zero: a NaN there would spread.
        logit_buffer = flat_x.new_empty((chunk_tokens, rank_columns))
        logit_buffer[:, real_rows:] = 0.0
        logit_buffer = logit_buffer[:, :real_rows]
        own_entropies, measured_rows = list[Tensor](), _predicted_rows(x) if of.entropies else None
        for chunk_start in range(0, token_count, chunk_tokens):
            chunk_end = chunk_start + chunk_tokens
            chunk_slice = slice(chunk_start, chunk_end)
            chunk_x = flat_x[chunk_slice]
            logits = products.mm(chunk_x, real_weight.t(), out=logit_buffer[: len(chunk_x)])
            if measured_rows is not None:
                is_in_chunk = (measured_rows >= chunk_start) & (measured_rows < chunk_end)
                chunk_rows = measured_rows[is_in_chunk] - chunk_start
                own_entropies.append(measure_own_entropy(logits[chunk_rows], of.cap))
            loss[chunk_slice], lse[chunk_slice] = _between(logits, local_labels[chunk_slice], of, any(grads))
            logit_gradient = logits  # overwritten in place
            if dx is not None:
                products.mm(logit_gradient, real_weight, out=dx[chunk_slice])
            if dw is not None:
                dw.add(logit_gradient, chunk_x)
        squared_lse = lse.pow(2)
        sample_means = torch.stack([loss, squared_lse]).view(2, *x.shape[:2]).mean(1)
        if own_entropies:
            mean_entropy = join_entropy(torch.cat(own_entropies, 1), of.tp).view(-1, x.shape[1]).mean(0)
            sample_means = torch.cat((sample_means, mean_entropy[None]))
        ctx.save_for_backward(dx, dw and dw.total)
        ctx.x_shape, ctx.weight_shape, ctx.weight_dtype = x.shape, weight.shape, weight.dtype
        ctx.mark_non_differentiable(sample_means)
        return loss.mean() + of.z_loss * squared_lse.mean(), sample_means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        token_factor = upstream.float() / ctx.x_shape[:2].numel()
        if dx is not None:
            dx = _scaled(dx, token_factor, torch.empty_like(dx)).view(ctx.x_shape)
        if dw is not None:
            padded_gradient = dw.new_empty(ctx.weight_shape, dtype=ctx.weight_dtype)
            _scaled(dw, token_factor, padded_gradient[: len(dw)])
            padded_gradient[len(dw) :] = 0.0
            dw = padded_gradient
        return dx, dw, *[None] * 5


def _scaled(gradient: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """gradient * factor, rounded once. Token gradients are kept unscaled, of order 1: divided by the number of tokens
    first, they would underflow in fp16. One dimension of the factor keeps the product in fp32: a loss scale of 65536
    is infinite in fp16."""
    if out.is_cuda:
        return torch.mul(gradient, factor.view(1, 1), out=out)
    # A CPU casts faster separately than inside a product; a few rows at a time stay in the cache.
    row_count = max(1, BLOCK // gradient.shape[1])
    for gradient_rows, out_rows in zip(gradient.split(row_count), out.split(row_count), strict=True):
        out_rows.copy_(gradient_rows.float() * factor)
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
        transposed_gradient = gradient.t()
        if self.wide:
            if self.total is None:
                self.total = torch.mm(transposed_gradient, x, out_dtype=torch.float32)
            else:
                torch.addmm(self.total, transposed_gradient, x, out_dtype=torch.float32, out=self.total)
            return
        # A sum over thousands of unscaled tokens may leave the range of fp16, whatever the loss scale.
        if x.dtype == torch.float16 or products.is_cast(x):
            transposed_gradient, x = transposed_gradient.float(), x.float()
        if self.total is None:
            first_total = torch.mm(transposed_gradient, x)
            self.total = first_total.float() if self.many else first_total
        elif x.dtype == torch.float32:
            self.total.addmm_(transposed_gradient, x)
        else:
            self.total.add_(torch.mm(transposed_gradient, x, out=self._part))


def _wide_products(x: Tensor) -> bool:
    """Whether a product of x's dtype can be written in fp32."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not x.is_cuda or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 0)


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
    label_index, is_here = local.clamp(min=0).unsqueeze(-1), local >= 0
    own_statistics = logits.new_full((2, len(local)), -torch.inf, dtype=torch.float32)
    p = scratch[: len(logits)]
    z = _capped(logits, of.cap)
    if logits.numel():
        torch.softmax(z, -1, dtype=torch.float32, out=p)
        # The largest p is at least 1 / rows: its logarithm is exact, unlike that of any other.
        own_statistics[0] = z.amax(-1) - p.amax(-1).log()
        own_statistics[1] = torch.where(is_here, z.gather(-1, label_index).squeeze(-1), -torch.inf)
    lse, target_logit = _joined(own_statistics, of.tp)
    if wanted and logits.numel():
        softmax_scale = _slope(lse, of.z_loss)
        if of.tp.size > 1:
            softmax_scale = softmax_scale * (own_statistics[0] - lse).exp()
        if of.tp.size > 1 or of.z_loss:
            p.mul_(softmax_scale.unsqueeze(-1))
        p.scatter_add_(-1, label_index, -is_here.float().unsqueeze(-1))
        if of.cap is not None:
            p.mul_(z.div_(of.cap).square_().neg_().add_(1))  # the derivative of the cap
        logits.copy_(p)
    return torch.stack((lse - target_logit, lse))


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
    rank_statistics = [torch.empty_like(own) for _ in range(tp.size)]
    dist.all_gather(rank_statistics, own.contiguous(), group=tp.group)
    lse, target_logit = torch.stack(rank_statistics, 1)
    return lse.logsumexp(0), target_logit.amax(0)


def _predicted_rows(x: Tensor) -> Tensor:
    """Rows of [s * b] tokens at `sizes.choose_predicted_positions`, in order."""
    sample_length, sample_count = x.shape[:2]
    first_rows = torch.tensor(sizes.choose_predicted_positions(sample_length), device=x.device) * sample_count
    return (first_rows[:, None] + torch.arange(sample_count, device=x.device)).flatten()


@torch.no_grad()
def measure_own_entropy(logits: Tensor, cap: float | None = None) -> Tensor:
    """Of a rank's columns of logits [tokens, rows], before a cap: logsumexp, and the entropy (nats) of the distribution
    over these columns alone; fp32 [2, tokens]. No rows: -inf and 0.

    It takes the memory of two blocks in fp32, three with a cap: on a GPU 32 or 48 MiB beside the logits.
    """
    if not logits.numel():
        return logits.new_tensor([-torch.inf, 0.0], dtype=torch.float32)[:, None].expand(2, len(logits))
    row_count = max(1, (GPU_BLOCK if logits.is_cuda else BLOCK) // logits.shape[1])
    return torch.cat([_block_entropy(logit_rows, cap) for logit_rows in logits.split(row_count)], 1)


def _block_entropy(logits: Tensor, cap: float | None) -> Tensor:
    """`measure_own_entropy` of a block; a function, so that nothing of a block is alive in the next one."""
    z = softcap(logits.float(), cap)
    lse = z.logsumexp(-1)
    z = z - lse.unsqueeze(-1)
    return torch.stack((lse, -z.exp().mul_(z).sum(-1)))


@torch.no_grad()
def join_entropy(own: Tensor, tp: TensorParallel) -> Tensor:
    """Entropy over the whole vocabulary, nats, fp32 [tokens], from `measure_own_entropy` of every rank of the tensor
    group: that of the choice of a rank, and that within each."""
    if tp.size == 1:
        return own[1]
    rank_entropies = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(tp.size)]
    dist.all_gather(rank_entropies, own.contiguous(), group=tp.group)
    lse, entropy_within = torch.stack(rank_entropies, 1)
    rank_share = lse.softmax(0)
    return (rank_share * entropy_within - torch.xlogy(rank_share, rank_share)).sum(0)


def _statistics(logits: Tensor, local: Tensor, cap: float | None) -> Tensor:
    """As in `_block`, [2, tokens]: this rank's logsumexp and target logit."""
    wide_logits = softcap(logits.float(), cap)
    highest_logit = wide_logits.amax(-1, keepdim=True)
    lse = highest_logit.squeeze(-1) + (wide_logits - highest_logit).exp().sum(-1).log()
    target_logit = wide_logits.gather(-1, local.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.stack((lse, torch.where(local >= 0, target_logit, -torch.inf)))


def _gradient_(logits: Tensor, local: Tensor, lse: Tensor, z_loss: float, cap: float | None) -> None:
    z = softcap(logits.float(), cap)
    p = (z - lse.unsqueeze(-1)).exp()
    at_label = torch.arange(logits.shape[-1], device=logits.device) == local.unsqueeze(-1)
    logit_gradient = p * _slope(lse, z_loss).unsqueeze(-1) - at_label.float()
    logits.copy_(logit_gradient if cap is None else logit_gradient * (1 - (z / cap).square()))


def _both_(logits: Tensor, local: Tensor, z_loss: float, cap: float | None) -> Tensor:
    own_statistics = _statistics(logits, local, cap)
    _gradient_(logits, local, own_statistics[0], z_loss, cap)
    return own_statistics


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _between_compiled(logits: Tensor, local: Tensor, of: Objective, wanted: bool) -> Tensor:
    if wanted and of.tp.size == 1:
        lse, target_logit = _compiled(_both_)(logits, local, of.z_loss, of.cap)
    else:
        lse, target_logit = _joined(_compiled(_statistics)(logits, local, of.cap), of.tp)
        if wanted:
            _compiled(_gradient_)(logits, local, lse, of.z_loss, of.cap)
    return torch.stack((lse - target_logit, lse))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocabulary: int, tp: TensorParallel
    ) -> tuple[Tensor, Tensor]:
        rank_columns = logits.shape[-1]
        column_offset = tp.rank * rank_columns
        wide_logits = logits.to(torch.float32, copy=True)
        if vocabulary < column_offset + rank_columns:  # padding of the vocabulary is no token
            wide_logits[..., max(vocabulary - column_offset, 0) :] = -torch.inf
        highest_logit = wide_logits.amax(-1)
        if tp.size > 1:
            dist.all_reduce(highest_logit, op=dist.ReduceOp.MAX, group=tp.group)
        wide_logits -= highest_logit.unsqueeze(-1)
        local_labels = labels - column_offset
        is_elsewhere = (local_labels < 0) | (local_labels >= rank_columns)
        local_labels = local_labels.masked_fill(is_elsewhere, 0).unsqueeze(-1)
        target_logit = wide_logits.gather(-1, local_labels).squeeze(-1).masked_fill(is_elsewhere, 0.0)
        exp_total = wide_logits.exp_().sum(-1)
        if tp.size > 1:
            target_and_total = torch.stack((target_logit, exp_total))
            dist.all_reduce(target_and_total, group=tp.group)
            target_logit, exp_total = target_and_total
        log_total = exp_total.log()
        softmax = wide_logits.div_(exp_total.unsqueeze(-1))
        ctx.save_for_backward(softmax, local_labels, is_elsewhere)
        ctx.dtype = logits.dtype
        return log_total - target_logit, log_total + highest_logit

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_lse: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local_labels, is_elsewhere = ctx.saved_tensors
        logit_gradient = softmax * (grad_loss + grad_lse).unsqueeze(-1)
        at_target = grad_loss.masked_fill(is_elsewhere, 0.0).unsqueeze(-1)
        logit_gradient.scatter_add_(-1, local_labels, -at_target)
        return logit_gradient.to(ctx.dtype), None, None, None


def cross_entropy(
    logits: Tensor, labels: Tensor, vocabulary: int, tp: TensorParallel | None = None
) -> tuple[Tensor, Tensor]:
    """(loss, logsumexp) per token, fp32 of the shape of `labels`; differentiable in both.

    logits: [..., padded vocabulary / tensor], this rank's columns. labels: [...], int64 token ids.
    vocabulary: real size; columns beyond it are padding and take no part.
    """
    return _CrossEntropy.apply(logits, labels, vocabulary, tp or TensorParallel())


Features = tuple[Tensor, Tensor]  # x [s, b, hidden] and the weight that makes logits of it


def project_features(given: Features, cap: float | None = None) -> Tensor:
    """Logits [s, b, padded vocabulary / tensor], in fp32 if they are capped (Gemma 2, arXiv:2408.00118, section 2)."""
    logits = linear(*given)
    return logits if cap is None else softcap(logits.float(), cap)


@torch.no_grad()
def project_in_chunks(given: Features) -> Iterator[Tensor]:
    """Logits before a cap, [n, padded vocabulary / tensor], of n tokens at a time, as few as `chunked_objective` holds
    in memory."""
    x, weight = given[0].flatten(0, 1), given[1]
    for token_rows in x.split(sizes.chunk_size(len(x), len(weight), sizes.elements_on(x.device.type))):
        yield linear(token_rows, weight)


@dataclass
class LossFunction:
    """`(logits, labels) -> mean(cross-entropy) + z_loss * mean(logsumexp^2)`, for DeepSpeed and for us.

    Given features instead of logits it computes the same, chunk by chunk. compiled: with torch.compile. plain: by
    `cross_entropy`, a few tokens at a time, in place of `chunked_objective`. cap: of the logits that it makes of
    features; those that it is given are capped already.

    Every call leaves the per-sample means in `samples`: a list of fp32 [2, b] (cross-entropy, logsumexp^2), one
    for each micro-batch, which the engine collects: DeepSpeed itself hands on only one scalar. entropies: [3, b], with
    the entropy of the prediction (nats), in the mean over `sizes.choose_predicted_positions`.
    """

    vocabulary: int
    z_loss: float
    tp: TensorParallel
    compiled: bool = False
    cap: float | None = None
    plain: bool = False
    entropies: bool = False
    samples: list[Tensor] = field(default_factory=list)

    def __call__(self, given: Tensor | Features, labels: Tensor) -> Tensor:
        """Logits [s, b, v / tensor] or features; labels [b, s]."""
        if isinstance(given, tuple) and not self.plain:
            objective, sample_means = chunked_objective(
                *given, labels, self.vocabulary, self.z_loss, self.tp, self.compiled, cap=self.cap,
                entropies=self.entropies,
            )  # fmt: skip
            self.samples.append(sample_means)
            return objective
        if isinstance(given, tuple):
            loss, lse = self._of_features(given, labels)
        else:
            loss, lse = cross_entropy(given, labels.t(), self.vocabulary, self.tp)
        squared_lse = lse.pow(2)
        token_numbers = [loss.detach(), squared_lse.detach()]
        if self.entropies:
            token_numbers.append(self._predicted(given).view(-1, loss.shape[1]))
        self.samples.append(torch.stack([token_number.mean(0) for token_number in token_numbers]))
        return loss.mean() + self.z_loss * squared_lse.mean()

    @torch.no_grad()
    def _predicted(self, given: Tensor | Features) -> Tensor:
        """Entropy of what is predicted at `sizes.choose_predicted_positions`, nats, fp32 [positions * b]."""
        features = isinstance(given, tuple)
        at = sizes.choose_predicted_positions(len(given[0] if isinstance(given, tuple) else given))
        parts = (
            project_in_chunks((given[0][at], given[1]))
            if isinstance(given, tuple)
            else [given[at].flatten(0, 1)]
        )
        own = list[Tensor]()
        for part in parts:
            rows = min(max(self.vocabulary - self.tp.rank * part.shape[1], 0), part.shape[1])
            own.append(measure_own_entropy(part[:, :rows], self.cap if features else None))
        return join_entropy(torch.cat(own, 1), self.tp)

    def _of_features(self, given: Features, labels: Tensor) -> Tensor:
        """Loss and logsumexp of every token, [2, s, b], with as many logits in memory as `chunked_objective` has."""
        (x, weight), label_rows = given, labels.t()

        def of_tokens(part: Tensor, first: int, weight: Tensor) -> Tensor:
            logits = project_features((part, weight), self.cap)
            part_labels = label_rows[first : first + len(part)]
            return torch.stack(cross_entropy(logits, part_labels, self.vocabulary, self.tp))

        sample_length, sample_count = x.shape[:2]
        elements = sizes.elements_on(x.device.type)
        chunk_tokens = sizes.chunk_size(sample_length * sample_count, len(weight), elements)
        return compute_in_parts(of_tokens, x, (weight,), max(1, chunk_tokens // sample_count), (0, 1))
