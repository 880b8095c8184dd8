"""50,000 healthy steps of real training, half of them with names, with schedules that people use: nothing is done."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from megastable_guard import Guard

pytestmark = pytest.mark.slow
SIZE, BATCH, STEPS, WARM_UP, STAGE = 64, 32, 5000, 200, 1600
Schedule = Callable[[int], float]


def cosine(step: int) -> float:
    return min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))


def warm_up_stable_decay(step: int) -> float:
    return min(1.0, (step + 1) / WARM_UP, (STEPS - step) / (STEPS / 5))


def constant(step: int) -> float:
    return 1.0


def drops(step: int) -> float:
    return 0.2 ** sum(step >= drop_step for drop_step in (2000, 3500))


def learn_gradually(step: int) -> float:
    return step / STEPS


def learn_in_stages(step: int) -> float:
    return 0.3 * (step >= STAGE)


def learn_one_task(step: int) -> float:
    return 0.0


def restart(step: int) -> float:
    """Cosines that begin again, at ten times the rate with which the last one ended."""
    return min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * (step % 1000) / 1000))


def train(
    schedule: Schedule, curriculum: Schedule, is_told: bool, folder: Path, names: bool = False
) -> tuple[Guard, float]:
    """Modular sums; a curriculum says how many of them have a third summand. Returns the guard, and the last loss.

    Args:
        is_told: whether the guard is told of the stages of a curriculum.
        names: whether the guard knows the samples, and may measure them.
    """
    torch.manual_seed(1)
    inputs = torch.randint(0, SIZE, (STEPS * BATCH, 3))
    shares = torch.tensor([curriculum(step) for step in range(STEPS)]).repeat_interleave(BATCH)
    are_harder = torch.rand(STEPS * BATCH) < shares
    inputs[:, 2] = inputs[:, 2] // 2 + SIZE // 2 * are_harder  # which tells them
    targets = (inputs[:, 0] + inputs[:, 1] + are_harder * inputs[:, 2]) % SIZE
    model = nn.Sequential(
        nn.Embedding(SIZE, 16),
        nn.Flatten(),
        nn.Linear(48, 64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, SIZE),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    guard = Guard(model, optimizer, scheduler, interval=100, keep=2, run_dir=folder)
    if names:
        guard.use_replay(
            lambda ids: nn.functional.cross_entropy(model(inputs[ids]), targets[ids], reduction="none"),
            at_once=BATCH,
            ahead=lambda count: range(guard.step * BATCH, min(guard.step * BATCH + count, STEPS * BATCH)),
        )
    for step in range(STEPS):
        sample_ids = range(step * BATCH, (step + 1) * BATCH)
        loss = nn.functional.cross_entropy(model(inputs[sample_ids]), targets[sample_ids])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        is_mixed = is_told and curriculum is learn_in_stages and step == STAGE
        verdict = guard.check(
            loss=loss.detach(), grad_norm=norm, mixed=is_mixed, sample_ids=list(sample_ids) if names else None
        )
        if verdict.apply:
            optimizer.step()
            scheduler.step()
    return guard, loss.item()


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize(
    ("schedule", "curriculum"),
    [
        (cosine, learn_one_task),
        (warm_up_stable_decay, learn_gradually),
        (constant, learn_in_stages),
        (drops, learn_one_task),
        (restart, learn_one_task),
    ],
)
def test_nothing_is_done_in_healthy_steps(
    schedule: Schedule, curriculum: Schedule, names: bool, tmp_path: Path
) -> None:
    guard, last_loss = train(schedule, curriculum, True, tmp_path, names)
    assert guard.updates == guard.step == STEPS
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["training"]  # no alert either
    assert last_loss < math.log(SIZE) - 0.5  # it did learn


@pytest.mark.filterwarnings("ignore:megastable guard")
def test_another_stage_that_the_guard_is_not_told_of_is_trouble_to_it(tmp_path: Path) -> None:
    guard, _ = train(constant, learn_in_stages, False, tmp_path)
    assert STEPS - 20 < guard.updates < STEPS  # it does not hold the run up
