"""What adapters share: a rewind takes the data back, stale batches are left out, a guard counts as its loop does."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megastable_guard.adapters import judged as judged_module
from megastable_guard.adapters.judged import JudgedUpdates
from megastable_guard.loop_guard import Guard
from megastable_guard.sampler import SkippableSampler


class Recorder:
    """In the place of a sampler, of which three updates were fetched."""

    def __init__(self) -> None:
        self.calls = list[tuple[int, int, list[int], list[int]]]()

    def seek(self, step: int, trained: int, *, skip: list[int], defer: list[int]) -> int:
        self.calls.append((step, trained, skip, defer))
        return 3


def build_judged() -> JudgedUpdates:
    model, judged = nn.Linear(2, 2), JudgedUpdates()
    judged.guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), interval=20)
    judged.sampler = Recorder()
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
    assert judged.sampler.calls == [(80, 92, [], [91, 92])] and judged.guard.step == 80
    for _ in range(3):
        assert judged.judge(81, loss=9.0, grad_norm=30.0) is None and not judged.guard.applies
    judge_steps(judged, 81, 85)


def test_a_guard_that_begins_in_the_middle_of_a_run_counts_as_the_loop_does() -> None:
    judge_steps(build_judged(), 501, 520)


def name_while_prefetching(sampler: SkippableSampler) -> tuple[JudgedUpdates, list[list[int]]]:
    """10 updates are judged, 15 fetched; and what they were."""
    judged = build_judged()
    judged.sampler = sampler
    judged.name_samples(lambda index: torch.tensor(float(index)))
    fetched = list(islice(sampler, 15 * sampler.batch // sampler.ranks))
    judge_steps(judged, 1, 10)
    part = sampler.batch // sampler.ranks
    return judged, [fetched[start : start + part] for start in range(0, len(fetched), part)]


@pytest.mark.parametrize("rank", [0, 1])
def test_ids_are_those_of_the_update_not_of_what_is_fetched(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judged_module, "count_ranks", lambda: 2)
    sampler = SkippableSampler(100, 4, seed=1, rank=rank, ranks=2)
    judged, updates = name_while_prefetching(sampler)
    samples = judged.guard.samples
    assert [list(kept.ids) for kept in samples._read_steps] == updates[:10]
    assert samples.ahead(6) == [*updates[10], *updates[11]][:6]
    assert samples.replay([3, 5]).tolist() == [3.0, 5.0]


def test_ranks_that_iterate_over_the_samples_of_all_have_a_part_each(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, coming = list[list[tuple[int, ...]]](), list[list[int]]()
    for rank in (0, 1):
        judged, updates = name_while_prefetching(SkippableSampler(63, 4, seed=1))
        monkeypatch.setattr(judged_module, "count_ranks", lambda: 2)
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        judged.guard.samples.forget_after(0)
        judge_steps(judged, 11, 15)
        shares.append([kept.ids for kept in judged.guard.samples._read_steps])
        coming += [judged.guard.samples.ahead(9), judged.guard.samples.ahead(1)]
        monkeypatch.undo()
    assert [sorted(one + other) for one, other in zip(*shares, strict=True)] == [
        sorted(update) for update in updates[10:]
    ]
    assert [len(ids) for ids in coming] == [1, 1, 1, 1]  # three are left in the stream


def test_what_cannot_be_named_is_refused() -> None:
    judged = build_judged()
    judged.sampler = None
    with pytest.raises(ValueError, match="names=True needs sampler="):
        judged.name_samples(lambda index: torch.zeros(()))
    judged.sampler, judged.guard = SkippableSampler(9, 3), SimpleNamespace(engine=None)
    with pytest.raises(ValueError, match="no samples in a trainer with DeepSpeed"):
        judged.name_samples(lambda index: torch.zeros(()))


def test_an_update_that_is_refused_alone_gives_its_good_samples_back() -> None:
    judged, sampler = build_judged(), SkippableSampler(4000, 8, seed=1, after=8)
    judged.sampler, order = sampler, list(SkippableSampler(4000, 8, seed=1))
    bad = order[720:724]
    judged.name_samples(lambda index: torch.tensor(9.0 if index in bad else 1 + 0.01 * (index % 7)))
    assert list(islice(sampler, 8 * 95))
    judge_steps(judged, 1, 90)
    verdict = judged.judge(91, loss=9.0, grad_norm=30.0)
    assert verdict is not None and not (verdict.apply or verdict.rewind)
    assert judged.stale == 4  # of those that were fetched behind it
    left_out = sampler.list_left_out()
    assert [len(left_out[name]) for name in ("deferred", "skipped", "dropped")] == [4, 4, 0]
    assert sampler.read_indices(92) == order[728:736]
    assert sorted(sampler.look_ahead(12)[8:]) == sorted(order[724:728])
