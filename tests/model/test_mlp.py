"""SwiGLU against its definition."""

from __future__ import annotations

import torch

from megastable.config.model import ModelConfig
from megastable.engine.adjustments import CLAMPED, SWIGLU_CLAMP
from megastable.model.mlp import MLP, swiglu
from megastable.parallel.topology import TensorParallel


def test_swiglu_is_silu_of_the_first_half_times_the_second() -> None:
    gate, up = torch.randn(2, 5, 8, dtype=torch.float64)
    wanted = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(swiglu(torch.cat((gate, up), -1)), wanted)


def test_swiglu_gradients() -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (x,))


def test_a_clamp_taken_up_later_is_its_definition_forward_and_backward() -> None:
    gate, up = 8 * torch.randn(2, 500, 8, dtype=torch.float64)
    x, c = torch.cat((gate, up), -1).requires_grad_(), SWIGLU_CLAMP
    y = CLAMPED(x)
    held, share = torch.where(gate > c, c, gate), up.abs().clamp(max=c) * up.sign()
    sigmoid = 1 / (1 + (-held).exp())
    torch.testing.assert_close(y, held * sigmoid * share)
    (found,) = torch.autograd.grad(y.sum(), x)
    by_gate = share * sigmoid * (1 + held * (1 - sigmoid)) * (gate <= c)
    torch.testing.assert_close(found, torch.cat((by_gate, held * sigmoid * (up.abs() <= c)), -1))
    assert int((gate > c).sum()) > 100 and int((up.abs() > c).sum()) > 100


def test_mlp_is_down_of_swiglu() -> None:
    config = ModelConfig(hidden=16, heads=2, ffn=24)
    mlp = MLP(config, TensorParallel(), "mlp", recompute_core=False)
    gate, up, down = torch.randn(24, 16), torch.randn(24, 16), torch.randn(16, 24)
    with torch.no_grad():
        mlp.gate_up.weight.copy_(torch.cat((gate, up)))
        mlp.down.weight.copy_(down)
    x = torch.randn(4, 2, 16)
    wanted = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(mlp(x), wanted, rtol=1e-4, atol=1e-3)
