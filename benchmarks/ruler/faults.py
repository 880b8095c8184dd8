"""What goes wrong in a run, or only changes: the kinds of the drills and of the court drill, gross and mild.

Data is bad, or other, at positions, so it comes again where a run goes back. A changed weight or a wrong gradient
happens once, or for some executed steps: a run that goes back does not meet it again. A wrong rate belongs to steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers.plain_torch import PlainGPT
from benchmarks.ruler.task import BATCH, HELD_OUT, POSITIONS, STEP, STEPS, VOCABULARY, Rows

Group = Literal["healthy", "bad data", "weights", "moments", "gradient", "rate", "kernel"]


@dataclass
class Data:
    """What a run reads. inputs, labels: [POSITIONS, LENGTH]; planted: positions of bad rows; held: those to be
    validated on, [n, LENGTH + 1]."""

    inputs: Rows
    labels: Rows
    held: Rows
    planted: set[int] = field(default_factory=set)


Plant = Callable[[Data, dict[str, Rows], np.random.Generator], None]


@dataclass(frozen=True)
class Fault:
    """A fault from step STEP on. steps: how long it lasts, of what happens in executed steps (gradient, hook) or in
    numbered ones (rate). plant: changes the data. update: changes the state after an update, once. gradient: changes
    gradients. hook: changes outputs of a module of the last block while it lasts."""

    name: str
    title: str
    group: Group
    plant: Plant | None = None
    update: Callable[[PlainGPT, torch.optim.Optimizer, torch.Generator], None] | None = None
    gradient: Callable[[PlainGPT], None] | None = None
    loss: float | None = None
    hook: Callable[[Tensor], Tensor] | None = None
    rate: float = 1.0
    steps: int = 1

    @property
    def is_healthy(self) -> bool:
        """Whether the right action is none."""
        return self.group == "healthy"


def lay_data(texts: dict[str, Rows], seed: int) -> Data:
    """Code in an order of the seed."""
    order = np.random.default_rng([seed, 1]).permutation(len(texts["code"]) - HELD_OUT)
    rows = texts["code"][HELD_OUT:][order[:POSITIONS]]
    return Data(rows[:, :-1].copy(), rows[:, 1:].copy(), texts["code"][:HELD_OUT])


def choose_positions(steps: int, of_each: int) -> Rows:
    """Positions of `of_each` rows of every step from the fault's on."""
    first_positions = (STEP - 1 + np.arange(steps)) * BATCH
    return (first_positions[:, None] + np.arange(of_each) * (BATCH // of_each)).ravel()


def _put(data: Data, positions: Rows, rows: Rows, bad: bool) -> None:
    data.inputs[positions], data.labels[positions] = rows[:, :-1], rows[:, 1:]
    if bad:
        data.planted |= set(positions.tolist())


def plant_text(kind: str, steps: int, of_each: int = BATCH) -> Plant:
    """Bad rows of a kind of text."""

    def plant(data: Data, texts: dict[str, Rows], draws: np.random.Generator) -> None:
        positions = choose_positions(steps, of_each)
        _put(data, positions, draws.permutation(texts[kind])[: len(positions)], bad=True)

    return plant


def plant_made(make: Callable[[Rows, np.random.Generator], Rows], steps: int, of_each: int = BATCH) -> Plant:
    """Bad rows, made of the good ones [n, LENGTH + 1] in their places."""

    def plant(data: Data, texts: dict[str, Rows], draws: np.random.Generator) -> None:
        positions = choose_positions(steps, of_each)
        good_rows = np.concatenate([data.inputs[positions], data.labels[positions, -1:]], 1)
        _put(data, positions, make(good_rows, draws), bad=True)

    return plant


def draw_noise(rows: Rows, draws: np.random.Generator) -> Rows:
    return draws.integers(3, VOCABULARY, rows.shape)


def repeat_token(rows: Rows, draws: np.random.Generator) -> Rows:
    return np.broadcast_to(draws.integers(3, VOCABULARY), rows.shape).copy()


def shuffle_tokens(rows: Rows, draws: np.random.Generator) -> Rows:
    return draws.permuted(rows, axis=1)


def move_ids(rows: Rows, draws: np.random.Generator) -> Rows:
    """As by a tokenizer with one token more."""
    return 3 + (rows - 2) % (VOCABULARY - 3)


def plant_wrong_labels(data: Data, texts: dict[str, Rows], draws: np.random.Generator) -> None:
    """Labels off by one for 10 steps."""
    positions = choose_positions(10, BATCH)
    data.labels[positions] = np.roll(data.labels[positions], 1, axis=1)
    data.planted |= set(positions.tolist())


def lay_kind(kind: str, steps: int | None, share: Callable[[float], float] = lambda progress: 1.0) -> Plant:
    """Healthy text of another kind for some steps, or to the end. share: of the rows, by the progress from 0 to 1."""

    def plant(data: Data, texts: dict[str, Rows], draws: np.random.Generator) -> None:
        first = (STEP - 1) * BATCH
        end = POSITIONS if steps is None else first + steps * BATCH
        progress = np.minimum(1.0, (np.arange(first, end) - first) / ((STEPS - STEP) * BATCH))
        positions = first + np.flatnonzero(draws.random(end - first) < np.vectorize(share)(progress))
        pool = texts[kind][HELD_OUT:]
        _put(
            data,
            positions,
            pool[draws.permutation(len(pool))[np.arange(len(positions)) % len(pool)]],
            bad=False,
        )
        data.held = np.concatenate([data.held, texts[kind][:HELD_OUT]])

    return plant


def lay_repeats(rows: int, times: int, steps: int) -> Plant:
    """For some steps, `rows` rows come again and again in another order, each `times` times."""

    def plant(data: Data, texts: dict[str, Rows], draws: np.random.Generator) -> None:
        positions = (STEP - 1) * BATCH + np.arange(steps * BATCH)
        sources = np.concatenate(
            [
                start + draws.permuted(np.tile(np.arange(rows), times))
                for start in range(int(positions[0]), int(positions[-1]) + 1, rows * times)
            ]
        )[: len(positions)]
        data.inputs[positions], data.labels[positions] = data.inputs[sources], data.labels[sources]

    return plant


def _last_block(model: PlainGPT) -> Any:
    return model.blocks[-1]


def set_weight(value: float) -> Callable[..., None]:
    def change(model: PlainGPT, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
        weight = _last_block(model).mlp.down.weight
        weight.view(-1)[int(torch.randint(weight.numel(), (), generator=draws))] = value

    return change


def flip_bit(model: PlainGPT, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    weight = _last_block(model).attention.out.weight
    place = int(torch.randint(weight.numel(), (), generator=draws))
    weight.view(-1).view(torch.int32)[place] ^= 1 << 30  # the highest bit of the exponent


def permute_embeddings(model: PlainGPT, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    chosen = torch.randperm(VOCABULARY, generator=draws)[:64]
    model.embedding.weight[chosen] = model.embedding.weight[chosen.roll(1)]


def grow_embeddings(model: PlainGPT, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    model.embedding.weight[torch.randperm(VOCABULARY, generator=draws)[:16]] *= 30


def grow_block(model: PlainGPT, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    for parameter in _last_block(model).parameters():
        parameter.mul_(3)


def clear_norm(model: PlainGPT, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    _last_block(model).mlp_norm.weight.zero_()


def shrink_moments(model: PlainGPT, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    for parameter in _last_block(model).parameters():
        optimizer.state[parameter]["exp_avg_sq"].mul_(0.01)


def spoil_moments(model: PlainGPT, optimizer: torch.optim.Optimizer, draws: torch.Generator) -> None:
    moment = optimizer.state[_last_block(model).mlp.gate_up.weight]["exp_avg"].view(-1)[:4096]
    moment.copy_(torch.randn(moment.shape, generator=draws))


def put_nan(model: PlainGPT) -> None:
    gradient = _last_block(model).mlp.down.weight.grad
    assert gradient is not None
    gradient[0, 0] = math.nan


def scale_gradients(factor: float) -> Callable[[PlainGPT], None]:
    def scale(model: PlainGPT) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    return scale


def spoil_first_row(output: Tensor) -> Tensor:
    """The gradient of the first row of attention's output is 300 times too large."""

    def spoil(gradient: Tensor) -> Tensor:
        return torch.cat([gradient[:1] * 300, gradient[1:]])

    if output.requires_grad:
        output.register_hook(spoil)
    return output


def spoil_columns(output: Tensor) -> Tensor:
    """Columns of a product are 8 times too large."""
    return torch.cat([output[..., :8] * 8, output[..., 8:]], -1)


def _state(name: str, title: str, update: Callable[..., None], group: Group = "weights") -> Fault:
    return Fault(name, title, group, update=update)


def _data(name: str, title: str, plant: Plant) -> Fault:
    return Fault(name, title, "bad data", plant=plant)


def _rate(factor: float) -> Fault:
    return Fault(
        f"rate-x{factor:.0f}",
        f"a rate {factor:.0f} times too high for 30 steps",
        "rate",
        rate=factor,
        steps=30,
    )


FAULTS = (
    Fault("clean", "nothing happens", "healthy"),
    Fault("switch", "code, then prose", "healthy", plant=lay_kind("prose", None)),
    Fault("visit", "40 steps of prose", "healthy", plant=lay_kind("prose", 40)),
    Fault("drift", "code slowly becomes prose", "healthy", plant=lay_kind("prose", None, lambda progress: progress)),
    Fault("foreign", "another language to the end", "healthy", plant=lay_kind("foreign", None)),
    Fault("mixed", "a third is prose", "healthy", plant=lay_kind("prose", None, lambda progress: 1 / 3)),
    Fault("easy", "40 steps of easy log lines", "healthy", plant=lay_kind("table", 40)),
    Fault("repeats", "the rows of 4 steps 10 times", "healthy", plant=lay_repeats(4 * BATCH, 10, 80)),
    Fault("few", "4 rows 4 times in every step: a noisy loss", "healthy", plant=lay_repeats(4, 4, STEPS - STEP)),
    _data("noise", "4 steps of random tokens", plant_made(draw_noise, 4)),
    _data("noise-4", "random tokens in 4 of 16 rows, 10 steps", plant_made(draw_noise, 10, 4)),
    _data("noise-1", "random tokens in 1 of 16 rows, 20 steps", plant_made(draw_noise, 20, 1)),
    _data("one-token", "3 steps of one repeated token", plant_made(repeat_token, 3)),
    _data("shuffled", "3 steps of shuffled tokens", plant_made(shuffle_tokens, 3)),
    _data("moved", "ids moved by one in 8 of 16 rows, 5 steps", plant_made(move_ids, 5, 8)),
    _data("hex", "hex dumps in 8 of 16 rows, 5 steps", plant_text("hex", 5, 8)),
    _data("babble", "babble in 8 of 16 rows, 5 steps", plant_text("babble", 5, 8)),
    _data("base64", "3 steps of base64", plant_text("base64", 3)),
    _data("sentence", "3 steps of one sentence", plant_text("a sentence", 3)),
    _data("sorted", "3 steps of sorted words", plant_text("sorted words", 3)),
    _data("reversed", "3 steps of reversed text", plant_text("reversed text", 3)),
    _data("labels", "labels off by one for 10 steps", plant_wrong_labels),
    _state("weight-10", "a weight becomes 10", set_weight(10.0)),
    _state("weight-100", "a weight becomes 100", set_weight(100.0)),
    _state("weight-1e4", "a weight becomes 10,000", set_weight(1e4)),
    _state("flipped-bit", "an exponent's highest bit is flipped", flip_bit),
    _state("permuted", "64 embeddings are permuted", permute_embeddings),
    _state("grown-rows", "16 embeddings grow 30 times", grow_embeddings),
    _state("grown-block", "a block's weights grow 3 times", grow_block),
    _state("cleared-norm", "a norm's weights become 0", clear_norm),
    _state("shrunk-moments", "a block's second moments shrink 100 times", shrink_moments, "moments"),
    _state("spoilt-moments", "4,096 first moments become noise", spoil_moments, "moments"),
    Fault("nan", "NaN in a gradient", "gradient", gradient=put_nan),
    Fault("inf-loss", "an infinite loss", "gradient", loss=math.inf),
    Fault("gradient-x8", "gradients x 8 for 10 steps", "gradient", gradient=scale_gradients(8.0), steps=10),
    Fault("gradient-sign", "gradients x -1 for 10 steps", "gradient", gradient=scale_gradients(-1.0), steps=10),
    _rate(3),
    _rate(10),
    _rate(30),
    Fault("attention", "attention's gradient of one row x 300, 15 steps", "kernel", hook=spoil_first_row, steps=15),
    Fault("product", "columns of a product x 8, 15 steps", "kernel", hook=spoil_columns, steps=15),
)  # fmt: skip


def hook_fault(model: PlainGPT, fault: Fault) -> nn.Module:
    """The module whose outputs a kernel's fault changes."""
    block = _last_block(model)
    module = block.attention if fault.name == "attention" else block.mlp.gate_up
    return module
