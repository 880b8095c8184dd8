"""Vocabulary-parallel cross-entropy with z-loss and per-sample losses, in fp32.

The logits [s, b, v / tensor] stay split; only maxima, sums and target logits cross the tensor group
(Megatron-LM, arXiv:1909.08053 section 3). z-loss: mean of logsumexp^2 (PaLM, arXiv:2204.02311 section 5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base.products import linear
from megastable.model import sizes
from megastable.model.attention_scores import softcap
from megastable.model.chunked import chunked_objective, joined_entropy, own_entropy
from megastable.model.in_parts import in_parts
from megastable.parallel.topology import TensorParallel


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocabulary: int, tp: TensorParallel
    ) -> tuple[Tensor, Tensor]:
        columns = logits.shape[-1]
        offset = tp.rank * columns
        wide = logits.to(torch.float32, copy=True)
        if vocabulary < offset + columns:
            wide[..., max(vocabulary - offset, 0) :] = -torch.inf  # padding of the vocabulary is no token
        highest = wide.amax(-1)
        if tp.size > 1:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=tp.group)
        wide -= highest.unsqueeze(-1)
        local = labels - offset
        elsewhere = (local < 0) | (local >= columns)
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        target = wide.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0.0)
        total = wide.exp_().sum(-1)
        if tp.size > 1:
            both = torch.stack((target, total))
            dist.all_reduce(both, group=tp.group)
            target, total = both
        log_total = total.log()
        softmax = wide.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, elsewhere)
        ctx.dtype = logits.dtype
        return log_total - target, log_total + highest

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_lse: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, elsewhere = ctx.saved_tensors
        grad = softmax * (grad_loss + grad_lse).unsqueeze(-1)
        at_target = grad_loss.masked_fill(elsewhere, 0.0).unsqueeze(-1)
        grad.scatter_add_(-1, local, -at_target)
        return grad.to(ctx.dtype), None, None, None


def cross_entropy(
    logits: Tensor, labels: Tensor, vocabulary: int, tp: TensorParallel | None = None
) -> tuple[Tensor, Tensor]:
    """(loss, logsumexp) per token, fp32 of the shape of `labels`; differentiable in both.

    logits: [..., padded vocabulary / tensor], this rank's columns. labels: [...], int64 token ids.
    vocabulary: real size; columns beyond it are padding and take no part.
    """
    return _CrossEntropy.apply(logits, labels, vocabulary, tp or TensorParallel())


Features = tuple[Tensor, Tensor]  # x [s, b, hidden] and the weight that makes logits of it


def project(given: Features, cap: float | None = None) -> Tensor:
    """Logits [s, b, padded vocabulary / tensor], in fp32 if they are capped (Gemma 2, arXiv:2408.00118, section 2)."""
    logits = linear(*given)
    return logits if cap is None else softcap(logits.float(), cap)


@torch.no_grad()
def projected(given: Features) -> Iterator[Tensor]:
    """Logits before a cap, [n, padded vocabulary / tensor], of n tokens at a time, as few as `chunked_objective` holds
    in memory."""
    x, weight = given[0].flatten(0, 1), given[1]
    for part in x.split(sizes.chunk_size(len(x), len(weight), sizes.elements_on(x.device.type))):
        yield linear(part, weight)


@dataclass
class LossFunction:
    """`(logits, labels) -> mean(cross-entropy) + z_loss * mean(logsumexp^2)`, for DeepSpeed and for us.

    Given features instead of logits it computes the same, chunk by chunk (chunked.py). compiled: with torch.compile.
    plain: by `cross_entropy`, a few tokens at a time, in place of chunked.py. cap: of the logits that it makes of
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
            objective, samples = chunked_objective(
                *given, labels, self.vocabulary, self.z_loss, self.tp, self.compiled, cap=self.cap,
                entropies=self.entropies,
            )  # fmt: skip
            self.samples.append(samples)
            return objective
        loss, lse = (
            self._of_features(given, labels)
            if isinstance(given, tuple)
            else self._of_logits(given, labels.t())
        )
        square = lse.pow(2)
        numbers = [loss.detach(), square.detach()]
        if self.entropies:
            numbers.append(self._predicted(given).view(-1, loss.shape[1]))
        self.samples.append(torch.stack([of.mean(0) for of in numbers]))
        return loss.mean() + self.z_loss * square.mean()

    def _of_logits(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(logits, labels, self.vocabulary, self.tp)

    @torch.no_grad()
    def _predicted(self, given: Tensor | Features) -> Tensor:
        """Entropy of what is predicted at `sizes.choose_predicted_positions`, nats, fp32 [positions * b]."""
        features = isinstance(given, tuple)
        at = sizes.choose_predicted_positions(len(given[0] if isinstance(given, tuple) else given))
        parts = projected((given[0][at], given[1])) if isinstance(given, tuple) else [given[at].flatten(0, 1)]
        own = list[Tensor]()
        for part in parts:
            rows = min(max(self.vocabulary - self.tp.rank * part.shape[1], 0), part.shape[1])
            own.append(own_entropy(part[:, :rows], self.cap if features else None))
        return joined_entropy(torch.cat(own, 1), self.tp)

    def _of_features(self, given: Features, labels: Tensor) -> Tensor:
        """Loss and logsumexp of every token, [2, s, b], with as many logits in memory as chunked.py has."""
        (x, weight), rows = given, labels.t()

        def of_tokens(part: Tensor, first: int, weight: Tensor) -> Tensor:
            logits = project((part, weight), self.cap)
            return torch.stack(self._of_logits(logits, rows[first : first + len(part)]))

        length, samples = x.shape[:2]
        size = sizes.chunk_size(length * samples, len(weight), sizes.elements_on(x.device.type))
        return in_parts(of_tokens, x, (weight,), max(1, size // samples), (0, 1))
