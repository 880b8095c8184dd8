"""Routed experts: a router chooses for every token the MLPs that are computed for it, and how much each counts.

Shazeer et al., arXiv:1701.06538; Switch Transformer, arXiv:2101.03961 (balance loss, capacity); ST-MoE,
arXiv:2202.08906 (z-loss of the router); DeepSeekMoE, arXiv:2401.06066 (fine-grained and shared experts); DeepSeek-V3,
arXiv:2412.19437, and arXiv:2408.15664 (sigmoid scores, a bias in place of a balance loss).

The order of work: scores [s, b, experts] in fp32, of this rank's own tokens; the choice, which a bias shifts but the
weights do not see; the tokens of each expert side by side, and its products; every token's results again in its place,
weighted and summed. Every expert is computed in every micro-batch, if need be for no tokens, so that each of its
weights always has a gradient: sums over ranks wait for all of them.

Experts are MLPs of their own, whose weights are split over the tensor group like those of a dense MLP. Tokens, weights
and choices enter and leave the tensor-parallel region once for all experts together.

Expert parallelism (GShard, arXiv:2006.16668): neighbouring data ranks have an equal part of the experts each. A rank
sends every row to the rank that has its expert, and gets the result back. Capacities drop choices before that, so every
layout drops the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megastable.base.products import linear
from megastable.config.model import ExpertsConfig, ModelConfig
from megastable.model.block_parts import MLP
from megastable.model.elementwise import Elementwise
from megastable.model.grouped import multiply_groups
from megastable.parallel.mappings import (
    count_rows,
    enter_tensor_region,
    gather_sequence,
    leave_tensor_region,
    return_rows,
    send_rows,
    share_weight,
)
from megastable.parallel.sharding import Placement, set_placement, split_over_experts
from megastable.parallel.topology import WHOLE, ContextParallel, TensorParallel

# What a router is measured by in a micro-batch, behind the numbers of every expert.
TOTALS = ("squared_logsumexp", "entropy", "dropped", "tokens")


def count_columns(experts: int) -> int:
    """Numbers that a router's choices of a micro-batch are measured by, see `ExpertMLP.forward`."""
    return 2 * experts + len(TOTALS)


class Routing(NamedTuple):
    """What a router says of tokens [...]: chosen, int64 [..., k], the experts of each; weights, fp32 [..., k], how much
    each counts; scores and logits of all experts, fp32 [..., experts], scores adding up to 1."""

    chosen: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


def choose_experts(
    logits: Tensor, bias: Tensor | None, config: ExpertsConfig, past_logits: Tensor | None = None
) -> Routing:
    """Route tokens by their logits, fp32 [..., experts]. bias: fp32 [experts], added to the scores for the choice.
    past_logits: of older weights, fp32 [..., experts], which choose instead; how much the chosen experts count, and so
    all gradients, remain those of `logits`."""
    score = partial(torch.softmax, dim=-1) if config.gate == "softmax" else torch.sigmoid
    own_scores = score(logits)
    with torch.no_grad():
        biased_scores = own_scores if past_logits is None else score(past_logits)
        if bias is not None:
            biased_scores = biased_scores + bias
        chosen_experts = biased_scores.topk(config.top_k, -1).indices
    choice_weights = own_scores.gather(-1, chosen_experts)
    if config.normalize:
        choice_weights = choice_weights / choice_weights.sum(-1, keepdim=True).clamp_min(1e-20)
    even_scores = own_scores
    if config.gate == "sigmoid":
        even_scores = own_scores / own_scores.sum(-1, keepdim=True).clamp_min(1e-20)
    return Routing(chosen_experts, choice_weights * config.scale, even_scores, logits)


def balance_term(scores: Tensor, shares: Tensor, tokens: int) -> Tensor:
    """The balance loss, fp32 []: 1 if scores or shares are even. scores: [..., experts], of this rank's part of
    `tokens`. shares: of the tokens' choices that each expert has, adding up to 1, without gradients."""
    mean_scores = scores.flatten(0, -2).sum(0) / tokens
    return len(shares) * (shares * mean_scores).sum()


def z_term(logits: Tensor, tokens: int) -> Tensor:
    """mean(logsumexp(logits)²) over `tokens`, of which `logits` [..., experts] are this rank's part; fp32 []."""
    return logits.logsumexp(-1).square().sum() / tokens


class _AddLoss(torch.autograd.Function):
    """x itself; the backward pass adds the gradient of `scale` times a loss to that of what comes after x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return gradient, torch.full((), ctx.scale, dtype=dtype, device=device), None


class _TakeRows(torch.autograd.Function):
    """x [n, h] -> the tokens of `places`, int64 [m]: place k t + i is the i-th choice of token t.

    The backward pass sums over a token's choices in their order, where a scatter on a GPU would add in any.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.choices, ctx.tokens = choices, len(x)
        return x.index_select(0, places // choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        by_place = gradient.new_zeros(ctx.tokens * ctx.choices, gradient.shape[-1])
        by_place.index_copy_(0, places, gradient)
        return by_place.view(ctx.tokens, ctx.choices, -1).sum(1), None, None


class Dispatch(NamedTuple):
    """The choices of n tokens, sorted by expert; m of them, n k unless a capacity drops some.

    places: int64 [m], place k t + i is the i-th choice of token t. counts: int64 [experts], how many each expert has.
    """

    places: Tensor
    counts: Tensor


def sort_by_expert(chosen: Tensor, experts: int, capacity: float | None) -> Dispatch:
    """Sort the choices, int64 [n, k], of n tokens by expert, and within one by token. capacity: an expert takes the
    first ones, so many times the mean."""
    flat_choices = chosen.flatten()
    expert_counts = torch.bincount(flat_choices, minlength=experts)
    sorted_places = flat_choices.argsort(stable=True)
    if capacity is not None:
        most_choices = max(1, int(capacity * len(flat_choices) / experts))
        first_of_expert = expert_counts.cumsum(0) - expert_counts
        place_in_expert = (
            torch.arange(len(sorted_places), device=sorted_places.device)
            - first_of_expert[flat_choices[sorted_places]]
        )
        sorted_places, expert_counts = (
            sorted_places[place_in_expert < most_choices],
            expert_counts.clamp_max(most_choices),
        )
    return Dispatch(sorted_places, expert_counts)


class Router(nn.Module):
    """Tokens [s, b, hidden] -> logits, fp32 [s, b, experts]. Under sequence parallelism of this rank's own tokens.

    past: older weights, fp32 [experts, hidden], that choose in training; the engine sets them."""

    def __init__(self, config: ModelConfig, experts: int, tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.tp = tp if tp.sequence else TensorParallel()
        self.weight = nn.Parameter(torch.empty(experts, config.hidden))
        set_placement(self.weight, Placement(f"{name}.weight"), tp.size)
        self.past: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), share_weight(self.weight, self.tp).float())

    @torch.no_grad()
    def compute_past_logits(self, x: Tensor) -> Tensor | None:
        return F.linear(x.float(), self.past) if self.training and self.past is not None else None


class ExpertMLP(nn.Module):
    """x [s, b, hidden] (or its sequence shard) -> the same shape. Of the experts, this rank has those of `cp.experts`.

    grouped: whether all experts are one product. bias: fp32 [experts], see `choose_experts`. shares: fp32 [experts], of
    the global batch before, for the balance loss over steps. balance_weight, z_weight: of the router's losses, at first
    the configuration's. loss_scale: what the gradients of losses are multiplied by. measured: of the micro-batches of a
    step. The engine sets bias, shares, scale and measured; without one they are None, and 1.
    """

    def __init__(
        self, config: ModelConfig, experts: ExpertsConfig, tp: TensorParallel, name: str, recompute_core: bool,
        own: Elementwise = Elementwise(), cp: ContextParallel = WHOLE, grouped: bool = False,  # noqa: B008
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.tp, self.cp, self.grouped = experts, tp, cp, grouped
        self.router = Router(config, experts.count, tp, f"{name}.router")
        width = config.expert_width
        own_count = experts.count // cp.experts.size
        first_number = cp.experts.rank * own_count
        self.experts = nn.ModuleList(
            _make_expert(config, width, tp, f"{name}.experts.{number}", recompute_core, own)
            for number in range(first_number, first_number + own_count)
        )
        for weight in self.experts.parameters() if cp.experts.size > 1 else ():
            split_over_experts(weight)
        shared_width = width * experts.shared
        self.shared = (
            _make_expert(config, shared_width, tp, f"{name}.shared", recompute_core, own)
            if shared_width
            else None
        )
        self.bias: Tensor | None = None
        self.shares: Tensor | None = None
        self.balance_weight, self.z_weight = experts.balance_loss, experts.router_z_loss
        self.loss_scale = 1.0
        self.measured: list[Tensor] | None = None

    def begin_micro_batch(self, device: torch.device) -> Tensor | None:
        """Where to write what its router chooses in a micro-batch of a training step, see `forward`."""
        if self.measured is None:
            return None
        self.measured.append(torch.zeros(count_columns(self.config.count), device=device))
        return self.measured[-1]

    def forward(self, x: Tensor, measured: Tensor | None = None) -> Tensor:
        """measured: fp32 [2 experts + 4], gets the choices of every expert, the sums of its scores, and `TOTALS`, of
        this rank's part of the tokens. Written, not added to: a recomputation writes the same once more."""
        past_logits = self.router.compute_past_logits(x)
        routing = choose_experts(self.router(x), self.bias, self.config, past_logits)
        own_counts = torch.bincount(routing.chosen.flatten(), minlength=self.config.count).float()
        choice_weights = routing.weights
        if torch.is_grad_enabled() and (router_loss := self._weigh_losses(routing, own_counts)) is not None:
            choice_weights = _AddLoss.apply(choice_weights, router_loss, self.loss_scale)
        chosen_experts = routing.chosen
        if self.tp.size > 1:
            choice_weights = enter_tensor_region(choice_weights, self.tp)
            if self.tp.sequence:
                chosen_experts = gather_sequence(chosen_experts, self.tp)
        entered_x = enter_tensor_region(x, self.tp)
        all_tokens = entered_x.reshape(-1, entered_x.shape[-1])
        token_choices = self.config.top_k
        dispatch = sort_by_expert(
            chosen_experts.view(-1, token_choices), self.config.count, self.config.capacity
        )
        if measured is not None:
            dropped_choices = len(all_tokens) * token_choices - len(dispatch.places)
            self._measure(routing, own_counts, dropped_choices, measured)
        sorted_rows = _TakeRows.apply(all_tokens, dispatch.places, token_choices)
        expert_results = self._reach_experts(sorted_rows, dispatch.counts)
        by_place = expert_results.new_zeros(len(all_tokens) * token_choices, expert_results.shape[-1])
        by_place = by_place.index_copy(0, dispatch.places, expert_results).view(
            len(all_tokens), token_choices, -1
        )
        y = (by_place * choice_weights.view(len(all_tokens), token_choices, 1)).sum(1).to(x.dtype)
        if self.shared is not None:
            y = y + self.shared(all_tokens)
        return leave_tensor_region(y.view_as(entered_x), self.tp)

    def _reach_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [m, hidden] of the tokens of each expert, side by side -> the experts' results, of the same shape, of
        this rank's experts and those of others. Collective over the ranks that share them out."""
        if self.cp.experts.size == 1:
            return self._compute_experts(rows, counts)
        row_exchange = count_rows(counts, self.cp.experts)
        own_results = self._compute_experts(send_rows(rows, row_exchange), row_exchange.counts)
        return return_rows(own_results, row_exchange)

    def _compute_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [m, hidden] of the tokens of each of this rank's experts, side by side -> the experts' results, of the
        same shape."""
        own_experts = [expert for expert in self.experts if isinstance(expert, MLP)]
        product_kinds = {part.product for expert in own_experts for part in (expert.gate_up, expert.down)}
        # What replaces a product, as FP8 and traces do, multiplies one matrix at a time.
        if not self.grouped or product_kinds != {linear}:
            row_parts = zip(own_experts, rows.split(counts.tolist()), strict=True)
            return torch.cat([expert(part) for expert, part in row_parts])
        row_ends = counts.cumsum(0).int()
        gate_up = multiply_groups(rows, row_ends, [expert.gate_up.weight for expert in own_experts])
        inner_rows = own_experts[0].run_activation(gate_up)
        return multiply_groups(inner_rows, row_ends, [expert.down.weight for expert in own_experts])

    def _weigh_losses(self, routing: Routing, own_counts: Tensor) -> Tensor | None:
        """The weighted losses of this rank's part of the tokens, fp32 []; None without. own_counts: fp32 [experts], how
        often these tokens have chosen each."""
        sharing_ranks = self.tp.size if self.tp.sequence else 1
        token_count = routing.chosen[..., 0].numel() * sharing_ranks
        loss_terms = []
        if self.balance_weight:
            expert_shares = self._find_shares(own_counts)
            loss_terms.append(self.balance_weight * balance_term(routing.scores, expert_shares, token_count))
        if self.z_weight:
            loss_terms.append(self.z_weight * z_term(routing.logits, token_count))
        return sum(loss_terms[1:], loss_terms[0]) if loss_terms else None

    @torch.no_grad()
    def _find_shares(self, own_counts: Tensor) -> Tensor:
        """Of all choices that each expert has, fp32 [experts], as `balance_over` says."""
        if self.config.balance_over == "step" and self.shares is not None:
            return self.shares
        if self.config.balance_over == "step":
            return torch.full_like(own_counts, 1 / len(own_counts))
        choice_counts = own_counts.clone()  # the sums below replace it
        if self.tp.sequence and self.tp.size > 1:
            dist.all_reduce(choice_counts, group=self.tp.group)
        if self.cp.size > 1:
            dist.all_reduce(choice_counts, group=self.cp.group)
        return choice_counts / choice_counts.sum()

    @torch.no_grad()
    def _measure(self, routing: Routing, own_counts: Tensor, dropped: int, measured: Tensor) -> None:
        flat_scores = routing.scores.flatten(0, -2)
        sharing_ranks = self.tp.size if self.tp.sequence else 1  # that all count what is dropped
        token_totals = torch.stack(
            (
                routing.logits.logsumexp(-1).square().sum(),
                -torch.special.xlogy(flat_scores, flat_scores).sum(),
                flat_scores.new_tensor(dropped / sharing_ranks),
                flat_scores.new_tensor(float(len(flat_scores))),
            )
        )
        measured.copy_(torch.cat((own_counts, flat_scores.sum(0), token_totals)))


def _make_expert(
    config: ModelConfig, width: int, tp: TensorParallel, name: str, recompute_core: bool, own: Elementwise
) -> MLP:
    """An MLP of `width` for tokens [n, hidden] inside of the tensor-parallel region, whose results are partial sums."""
    expert = MLP(config, tp, name, recompute_core, own, width)
    for part in (expert.gate_up, expert.down):
        part.stay_inside()
    return expert
