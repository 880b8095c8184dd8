"""Routed experts against a loop over experts in fp64; their losses against differences of the whole objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from megastable.config.model import ModelConfig
from megastable.model.experts import (
    ExpertMLP,
    balance_term,
    choose_experts,
    count_columns,
    sort_by_expert,
    z_term,
)
from megastable.model.gpt import GPT
from megastable.model.grouped import view_together
from megastable.model.sizes import count_parameters, flops_per_token
from megastable.parallel.topology import TensorParallel

HIDDEN, TOKENS, SAMPLES = 12, 9, 2


def make_mlp(**keys: Any) -> ExpertMLP:
    experts = {"count": 5, "top_k": 2, "ffn": 8} | keys
    model = ModelConfig(layers=1, hidden=HIDDEN, heads=2, vocab_size=64, experts=experts)
    mlp = ExpertMLP(model, model.experts, TensorParallel(), "mlp", recompute_core=False)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    return mlp.double()


def draw_tokens() -> Tensor:
    return torch.randn(
        TOKENS, SAMPLES, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )


def swiglu(x: Tensor, mlp: Any) -> Tensor:
    gate, up = (x @ mlp.gate_up.weight.T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ mlp.down.weight.T


def loop_over_tokens(mlp: ExpertMLP, x: Tensor) -> Tensor:
    """Token by token and choice by choice; an expert that has its share already takes no more."""
    e = mlp.config
    logits = (x.float() @ mlp.router.weight.float().T).view(-1, e.count)
    scores = logits.softmax(-1) if e.gate == "softmax" else torch.sigmoid(logits)
    most = float("inf") if e.capacity is None else max(1, int(e.capacity * len(scores) * e.top_k / e.count))
    taken, rows = [0] * e.count, []
    for token, score in zip(x.reshape(-1, x.shape[-1]), scores, strict=True):
        wanted = score if mlp.bias is None else score + mlp.bias
        chosen = sorted(range(e.count), key=lambda j: -float(wanted[j].detach()))[: e.top_k]
        total = sum(score[j] for j in chosen) if e.normalize else 1.0
        row = torch.zeros_like(token)
        for j in chosen:
            taken[j] += 1
            if taken[j] <= most:
                row = row + e.scale * score[j] / total * swiglu(token, mlp.experts[j])
        rows.append(row if mlp.shared is None else row + swiglu(token, mlp.shared))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(
    "keys",
    [{}, {"gate": "sigmoid", "scale": 2.5}, {"top_k": 1, "normalize": False}, {"top_k": 5}, {"shared": 2},
     {"capacity": 0.6}, {"normalize": False, "shared": 1}, {"count": 40, "top_k": 3}],
)  # fmt: skip
@pytest.mark.parametrize("biased", [False, True])
def test_sorted_tokens_equal_a_loop(keys: dict[str, Any], biased: bool) -> None:
    mlp = make_mlp(**keys, balance_loss=0.0, router_z_loss=0.0)
    if biased:
        mlp.bias = torch.linspace(-0.3, 0.3, mlp.config.count)
    x = draw_tokens().requires_grad_()
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    leaves = [x, *mlp.parameters()]
    y, wanted = mlp(x), loop_over_tokens(mlp, x)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)  # weights of choices are fp32
    # An expert without tokens has a gradient of zeros here, and none in the loop.
    loop_gradients = torch.autograd.grad(wanted, leaves, upstream, allow_unused=True)
    for got, want in zip(torch.autograd.grad(y, leaves, upstream), loop_gradients, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_the_routers_losses_are_added_to_the_gradient(gate: str) -> None:
    """Against the objective written out: what comes down, plus both losses times the scale of the engine."""
    mlp = make_mlp(gate=gate, balance_loss=0.3, router_z_loss=0.2)
    mlp.loss_scale = 7.0
    x = draw_tokens()
    got = torch.autograd.grad(mlp(x).sum(), mlp.router.weight)[0]
    logits = (x.float() @ mlp.router.weight.float().T).view(-1, 5)
    scores = logits.softmax(-1) if gate == "softmax" else torch.sigmoid(logits)
    chosen = torch.nn.functional.one_hot(scores.topk(2).indices, 5).sum(1).float()
    shares, even = chosen.sum(0) / chosen.sum(), scores / scores.sum(-1, keepdim=True)
    losses = 0.3 * 5 * (shares * even.mean(0)).sum() + 0.2 * logits.logsumexp(-1).square().mean()
    objective = loop_over_tokens(mlp, x).sum() + 7.0 * losses
    torch.testing.assert_close(
        got, torch.autograd.grad(objective, mlp.router.weight)[0], rtol=1e-5, atol=1e-6
    )


def test_what_a_router_chose_is_written_once_however_often_it_is_computed() -> None:
    mlp, x = make_mlp(), draw_tokens()
    measured = torch.zeros(count_columns(5))
    mlp(x, measured)
    first = measured.clone()
    mlp(x, measured)
    assert torch.equal(first, measured)
    assert float(measured[:5].sum()) == 2 * TOKENS * SAMPLES
    assert float(measured[-1]) == TOKENS * SAMPLES


def share_storage(mlp: ExpertMLP, kind: str) -> None:
    """The weights of experts one after the other in one buffer, as an optimizer lays them; or with a gap; or apart;
    or from an address on that no kernel reads."""
    parameters = list(mlp.experts.parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters) + 3, dtype=parameters[0].dtype)
    begin = int(kind == "odd")
    for number, parameter in enumerate(parameters):
        begin += 3 * (kind == "gap" and number == 4)
        if kind != "apart":
            buffer[begin : begin + parameter.numel()] = parameter.detach().flatten()
            parameter.data = buffer[begin : begin + parameter.numel()].view(parameter.shape)
        begin += parameter.numel()


@pytest.mark.parametrize("kind", ["flat", "gap", "apart", "odd"])
@pytest.mark.parametrize("count", [5, 40])
def test_grouped_products_are_those_of_a_loop(kind: str, count: int) -> None:
    mlp, x = make_mlp(count=count, shared=1).float(), draw_tokens().float()
    share_storage(mlp, kind)
    together = view_together([expert.down.weight.detach() for expert in mlp.experts])
    assert (together.data_ptr() == mlp.experts[0].down.weight.data_ptr()) == (kind == "flat")
    found = []
    for grouped in (False, True):
        mlp.grouped = grouped
        given = x.clone().requires_grad_()
        y = mlp(given)
        found.append([y, *torch.autograd.grad(y.square().sum(), [given, *mlp.parameters()])])
    for of_loop, of_groups in zip(*found, strict=True):
        torch.testing.assert_close(of_groups, of_loop, rtol=1e-5, atol=1e-6)


def test_a_bias_shifts_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    config = make_mlp(count=4, normalize=False).config
    routing = choose_experts(logits, torch.tensor([0.0, 0.0, 0.0, 5.0]), config)
    assert routing.chosen.tolist() == [[3, 0]]
    torch.testing.assert_close(routing.weights, logits.softmax(-1)[:, [3, 0]])


def test_sigmoid_scores_that_are_all_zero_have_gradients() -> None:
    """Where a router has learnt to score no expert, its losses must lead back."""
    logits = torch.full((3, 4), -200.0, requires_grad=True)
    routing = choose_experts(logits, None, make_mlp(count=4, gate="sigmoid").config)
    loss = balance_term(routing.scores, torch.full((4,), 0.25), 3) + z_term(routing.logits, 3)
    (gradient,) = torch.autograd.grad(loss + routing.weights.sum(), logits)
    assert torch.isfinite(routing.scores).all() and torch.isfinite(gradient).all() and (gradient < 0).all()


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_past_logits_choose_and_the_present_ones_weigh_and_learn(gate: str) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], requires_grad=True)
    past_logits = torch.tensor([[0.0, 1.0, 2.0, 1.5]], requires_grad=True)
    config = make_mlp(count=4, normalize=False, gate=gate).config
    routing = choose_experts(logits, None, config, past_logits)
    assert routing.chosen.tolist() == [[2, 3]]
    scores = logits.softmax(-1) if gate == "softmax" else logits.sigmoid()
    assert torch.equal(routing.weights, scores[:, [2, 3]])
    assert choose_experts(
        logits, torch.tensor([0.0, 5.0, 0.0, 0.0]), config, past_logits
    ).chosen.tolist() == [[1, 2]]
    routing.weights.sum().backward()
    assert logits.grad is not None and logits.grad[0, 2] > 0 and past_logits.grad is None


@settings(max_examples=60, deadline=None)
@given(data=st.data(), experts=st.integers(1, 6), choices=st.integers(1, 3), tokens=st.integers(1, 9))
def test_choices_are_sorted_without_loss(
    data: st.DataObject, experts: int, choices: int, tokens: int
) -> None:
    numbers = st.lists(st.integers(0, experts - 1), min_size=choices * tokens, max_size=choices * tokens)
    chosen = torch.tensor(data.draw(numbers)).view(tokens, choices)
    capacity = data.draw(st.none() | st.floats(0.1, 3.0))
    places, counts = sort_by_expert(chosen, experts, capacity)
    most = tokens * choices if capacity is None else max(1, int(capacity * tokens * choices / experts))
    wanted = [[p for p, c in enumerate(chosen.flatten().tolist()) if c == e][:most] for e in range(experts)]
    assert counts.tolist() == [len(part) for part in wanted]
    assert places.tolist() == [place for part in wanted for place in part]


def test_parameters_and_work_are_counted() -> None:
    model = ModelConfig(
        layers=3, hidden=32, heads=2, ffn=64, sequence_length=16, vocab_size=128,
        experts={"count": 4, "top_k": 2, "ffn": 16, "shared": 1, "first_dense": 1},
    )  # fmt: skip
    gpt = GPT(model, TensorParallel(), "none", None)
    assert sum(p.numel() for p in gpt.parameters()) == count_parameters(model)
    active = sum(
        p.numel() for name, p in gpt.named_parameters()
        if p.dim() > 1 and not name.startswith("0.") and not any(f".experts.{j}." in name for j in (2, 3))
    )  # fmt: skip
    attention = 24 * 2 * 16 * 16 / 2 * 3
    assert flops_per_token(model, causal=False) == 6 * active + attention


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"top_k": 6}, "choose no more than there are"), ({"top_k": 1}, "set normalize=false"),
     ({"top_k": 1, "gate": "sigmoid"}, "set normalize=false"), ({"first_dense": 1}, "no block has experts")],
)  # fmt: skip
def test_impossible_experts_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_mlp(**keys)
