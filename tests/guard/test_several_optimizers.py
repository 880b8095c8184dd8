"""The guard of a loop with several optimizers, one of which updates fp32 copies of the weights. A rewound run
ends, bit for bit, as one that never saw the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from megastable_guard.host_copies import HostCopies, find_inner_optimizers, local_part, read_forward_state
from megastable_guard.loop_guard import Guard
from tests.distributed import run_ranks

SIZE, STEPS, BAD = 64, 120, (80, 81)


class MasterAdam(torch.optim.AdamW):
    """Updates fp32 copies of bf16 weights, as mixed-precision optimizers do."""

    def __init__(self, weights: list[Tensor], **options: Any) -> None:
        self.weights = weights
        super().__init__([weight.detach().float().requires_grad_() for weight in weights], **options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        masters = self.param_groups[0]["params"]
        for master, weight in zip(masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step()
        with torch.no_grad():
            for master, weight in zip(masters, self.weights, strict=True):
                weight.copy_(master)


class Container:
    """Holds several, as torchtitan's and Megatron's do."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def optimizer(self) -> Any:
        raise AssertionError("there are several")


def build_model() -> nn.Module:
    torch.manual_seed(7)
    head = nn.Linear(32, SIZE, dtype=torch.bfloat16)
    return nn.ModuleDict(
        {"body": nn.Sequential(nn.Embedding(SIZE, 16), nn.Flatten(), nn.Linear(64, 32)), "head": head}
    )


def read_batch(number: int, is_bad: bool) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    inputs = torch.randint(0, SIZE, (32, 4), generator=draw)
    return inputs, torch.randint(0, SIZE, (32,), generator=draw) if is_bad else inputs[:, :2].sum(1) % SIZE


def train_several(guarded: bool) -> tuple[list[Tensor], list[int], list[int]]:
    model = build_model()
    model["body"].register_buffer("balance", torch.zeros(1))  # changes behind an update, as expert biases do
    parts = nn.ModuleList([model["body"], model["head"]])  # type: ignore[index]
    muon = torch.optim.SGD(model["body"].parameters(), lr=0.3, momentum=0.9)  # type: ignore[index]
    optimizers = [muon, MasterAdam(list(model["head"].parameters()), lr=3e-3)]  # type: ignore[index]
    guard = Guard(parts, optimizers, interval=20) if guarded else None
    numbers = [number for number in range(1, STEPS + 20) if guarded or number not in BAD]
    refused, rewound, step = list[int](), list[int](), 0
    while step < STEPS:
        number = numbers[step]
        inputs, targets = read_batch(number, guarded and number in BAD)
        output = model["head"](model["body"](inputs).bfloat16()).float()  # type: ignore[index]
        loss = nn.functional.cross_entropy(output, targets) * (8 if guarded and number in BAD else 1)
        for optimizer in optimizers:
            optimizer.zero_grad()
        model.zero_grad()
        loss.backward()
        step += 1
        verdict = guard.check(loss=loss.detach()) if guard else None
        if verdict is None or verdict.apply:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.99  # a schedule of the loop's own
            model["body"].balance += 1
        elif verdict.rewind and guard:
            rewound.append(step)
            step, late = guard.rewind(), guard.deferred
            numbers = [number for place, number in enumerate(numbers, 1) if place not in late]
        else:
            refused.append(step)
    state = [
        value
        for optimizer in optimizers
        for moments in optimizer.state.values()
        for value in moments.values()
    ]
    masters = optimizers[1].param_groups[0]["params"]
    state += [torch.tensor(optimizer.param_groups[0]["lr"]) for optimizer in optimizers]
    return (
        [
            t.detach()
            for t in (*model.parameters(), *model.buffers(), *masters, *state)
            if isinstance(t, Tensor)
        ],
        refused,
        rewound,
    )


def test_several_optimizers_and_their_fp32_weights_are_rewound() -> None:
    state, refused, rewound = train_several(True)
    expected, _, _ = train_several(False)
    assert (refused, rewound) == ([80], [81]) and len(state) > 12
    assert all(torch.equal(one, other) for one, other in zip(state, expected, strict=True))


def test_hold_refused_and_drop_update_reach_every_optimizer() -> None:
    model = build_model()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model.children()]
    guard = Guard(model, optimizers, keep=0)
    guard.hold_refused()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert not guard.check(loss=float("nan"), grad_norm=1.0).apply
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    guard.drop_update()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_find_inner_optimizers_looks_into_containers() -> None:
    one, two = (torch.optim.SGD(part.parameters(), lr=0.1) for part in build_model().children())
    assert find_inner_optimizers(Container([one, two])) == [one, two]
    assert find_inner_optimizers((Container([one]), two)) == [one, two]
    with pytest.raises(TypeError, match="object is not an optimizer of torch and wraps none"):
        find_inner_optimizers([one, object()])


def rewind_average() -> list[bool]:
    """On a rank of two: whether a sharded average goes back, and whether its copy is in host memory, a part of it."""
    model, average = (fully_shard(nn.Linear(8, 4)) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    copies = HostCopies(model, optimizer, {"average": average}, interval=1, capacity=2)
    before = [local_part(parameter).clone() for parameter in average.parameters()]
    copies.take_copy(5, read_forward_state(model))
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.fill_(7.0)
    (kept_weight, _) = copies.restore_before(6).others["average"].values()
    after = [local_part(parameter) for parameter in average.parameters()]
    is_same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    return [*is_same, type(kept_weight) is Tensor and kept_weight.shape == (2, 8)]


def test_a_sharded_average_of_the_weights_is_rewound() -> None:
    assert run_ranks(2, rewind_average) == [[True] * 3] * 2
