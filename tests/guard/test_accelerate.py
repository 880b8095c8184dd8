"""The guard in a loop that Accelerate prepares, without a trainer: two ranks, two micro-batches, a scheduler that steps
once a rank, and a loader whose data goes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megastable_guard import Guard, SkippableSampler
from tests.distributed import run_ranks
from tests.guard.test_adapters import Sums

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow
SIZE, BATCH, STEPS, WORDS = 6000, 8, 150, 64
BAD = (100, 101, 130, 131)  # steps


def train(guarded: bool, folder: Path) -> list[Tensor]:
    """On this rank: the loop of Accelerate's documentation, with the guard between clipping and the update."""
    batch = 2 * 2 * BATCH  # the loader of every rank goes over all samples, and takes its own
    order = list(SkippableSampler(SIZE, batch, seed=1))
    bad = [index for step in BAD for index in order[(step - 1) * batch : step * batch]]
    sampler = SkippableSampler(SIZE, batch, seed=1, updates=2 * STEPS, after=10**6)
    sampler.seek(0, 0, skip=() if guarded else bad)
    torch.manual_seed(0)
    layers = [nn.Embedding(WORDS, 16), nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.GELU(), nn.Linear(32, WORDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * 2 * STEPS)
    loader = DataLoader(
        Sums(bad), batch_size=BATCH, sampler=sampler, generator=torch.Generator(), drop_last=True
    )
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    guard = Guard(model, optimizer, scheduler, interval=20, run_dir=folder, keep=3 if guarded else 0)
    torch.manual_seed(accelerator.process_index)
    batches, loss_sum = iter(loader), 0.0
    while guard.step < STEPS:
        with accelerator.accumulate(model):
            inputs, targets, weights = next(batches)
            losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
            loss = (losses * weights).mean()
            accelerator.backward(loss)
            loss_sum += loss.item() / 2
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                verdict, loss_sum = guard.check(loss=loss_sum, grad_norm=norm), 0.0
                if verdict.rewind:
                    sampler.seek(guard.rewind(), trained=verdict.step, defer=guard.deferred)
                    batches = iter(loader)
                if not verdict.apply:
                    optimizer.zero_grad()
                    continue
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert guarded or guard.updates == STEPS
    assert scheduler.scheduler.last_epoch == 2 * STEPS
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *moments, torch.get_rng_state()]
    return [tensor.detach().clone() for tensor in tensors]


def test_a_loop_of_accelerate_ends_as_one_that_never_saw_the_data(tmp_path: Path) -> None:
    guarded, plain = (
        run_ranks(2, train, is_guarded, tmp_path / str(is_guarded)) for is_guarded in (True, False)
    )
    for one, other in zip(guarded, plain, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    lines = [json.loads(line) for line in (tmp_path / "True/journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("what") == "rewound"] == [101, 129]
    lines = [json.loads(line) for line in (tmp_path / "False/journal.jsonl").read_text().splitlines()]
    assert {line["event"] for line in lines} <= {"training", "finished"}
