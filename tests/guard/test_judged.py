"""What adapters share: a rewind takes the data back, stale batches are left out, a guard counts as its loop does."""

from __future__ import annotations

import torch
from torch import nn

from megastable_guard.adapters.judged import JudgedUpdates
from megastable_guard.loop_guard import Guard


class Recorder:
    """In the place of a sampler, of which three updates were fetched."""

    def __init__(self) -> None:
        self.calls = list[tuple[int, int, list[int]]]()

    def seek(self, step: int, trained: int, *, defer: list[int]) -> int:
        self.calls.append((step, trained, defer))
        return 3


def build_judged() -> JudgedUpdates:
    model, judged = nn.Linear(2, 2), JudgedUpdates()
    judged.guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), interval=20)
    judged.sampler = Recorder()  # type: ignore[assignment]
    return judged


def judge_steps(judged: JudgedUpdates, first: int, last: int) -> None:
    for step in range(first, last + 1):
        verdict = judged.judge(
            step, loss=4 - step / 1000 + 0.01 * (step % 3), grad_norm=1 + 0.01 * (step % 5)
        )
        assert verdict is not None and verdict.apply and judged.guard.step == step


def test_a_rewind_takes_the_data_back_and_stale_updates_are_left_out() -> None:
    judged = build_judged()
    judge_steps(judged, 1, 90)
    verdicts = [judged.judge(step, loss=9.0, grad_norm=30.0) for step in (91, 92)]
    assert [verdict.rewind for verdict in verdicts if verdict] == [False, True]
    assert judged.sampler.calls == [(80, 92, [91, 92])] and judged.guard.step == 80  # type: ignore[union-attr]
    for _ in range(3):
        assert judged.judge(81, loss=9.0, grad_norm=30.0) is None and not judged.guard.applies
    judge_steps(judged, 81, 85)


def test_a_guard_that_begins_in_the_middle_of_a_run_counts_as_the_loop_does() -> None:
    judge_steps(build_judged(), 501, 520)
