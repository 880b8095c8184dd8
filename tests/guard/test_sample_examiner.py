"""The guard of somebody's loop names the bad samples, and them alone: the run ends, bit for bit, as one that never saw
them. What is only new is trained through."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megastable_guard import SkippableSampler
from megastable_guard.actions import Action, Cause, Verdict
from megastable_guard.conclusion import Conclusion
from megastable_guard.host_copies import ForwardState, HostCopies, StateCopy, read_forward_state
from megastable_guard.loop_guard import Guard, StepVerdict
from megastable_guard.sample_examiner import (
    ReadStep,
    SampleExaminer,
    can_train,
    choose_outlook,
    choose_sample_remedy,
    compare_states,
    judge_losses,
)
from megastable_guard.trials import HarmTrial, TrialVerdict
from tests.distributed import run_ranks
from tests.guard.test_loop_guard import as_ddp, same

WORDS, USED, LENGTH, BATCH, SAMPLES, STEPS = 512, 64, 16, 16, 4000, 150


def write_samples(seed: int, bad: Sequence[int] = (), new: Sequence[int] = ()) -> Tensor:
    """[n, LENGTH + 1] tokens of a noisy chain over the first half of the words in use. bad: every token is any word;
    new: a chain over the other half."""
    draw = torch.Generator().manual_seed(seed)
    half, chain_start = USED // 2, torch.zeros(SAMPLES, dtype=torch.long)
    chain_start[list(new)] = half
    following = torch.cat([torch.randperm(half, generator=draw), half + torch.randperm(half, generator=draw)])
    tokens = [chain_start + torch.randint(0, half, (SAMPLES,), generator=draw)]
    for _ in range(LENGTH):
        is_noise = torch.rand(SAMPLES, generator=draw) < 0.1
        noise = torch.randint(0, USED, (SAMPLES,), generator=draw)
        back = chain_start + tokens[-1] % half
        tokens.append(torch.where(is_noise, noise, following[back]))
    samples = torch.stack(tokens, 1)
    samples[list(bad)] = torch.randint(0, WORDS, (len(bad), LENGTH + 1), generator=draw)
    return samples


def read_events(run: Path, name: str) -> list[dict[str, Any]]:
    """Lines of a guarded run's journal."""
    lines = map(json.loads, (run / "journal.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


class Chain(nn.Module):
    """Mean loss of each sample, [n]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.norm = nn.Embedding(WORDS, 32), nn.Linear(32, 64), nn.BatchNorm1d(64)
        self.dropout, self.last = nn.Dropout(0.1), nn.Linear(64, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.words(tokens[:, :-1])).flatten(0, 1)).relu()
        losses = nn.functional.cross_entropy(
            self.last(self.dropout(hidden)), tokens[:, 1:].flatten(), reduction="none"
        )
        return losses.view(len(tokens), -1).mean(1)


class NamingLoop:
    """A loop with ids. skip: from the beginning; losses: gives `sample_losses` instead of a replay; ahead: tells what
    it reads next; names: gives ids; holds: calls the optimizer in any case; false_rises: nats that are added to the
    loss of steps that is told; spoilt: steps whose gradient becomes another one."""

    def __init__(
        self, samples: Tensor, seed: int = 0, skip: Sequence[int] = (),
        wrap: Callable[[Any], Any] = lambda model: model, losses: bool = False, ahead: bool = True, names: bool = True,
        holds: bool = False, false_rises: Mapping[int, float] | None = None, spoilt: Sequence[int] = (),
        after: int = 10_000, **options: Any,
    ) -> None:  # fmt: skip
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.samples, self.factors = samples, torch.ones(SAMPLES)
        torch.manual_seed(seed)
        self.model = wrap(Chain())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 2 * STEPS)
        self.guard = Guard(self.model, self.optimizer, self.scheduler, interval=20, **options)
        self.losses, self.names, self.holds = losses, names, holds
        self.false_rises, self.spoilt = false_rises or {}, set(spoilt)
        if holds:
            self.guard.hold_refused(self.scheduler)
        self.sampler = SkippableSampler(
            SAMPLES, BATCH // self.ranks, seed=seed, updates=2 * STEPS, rank=self.rank, ranks=self.ranks, after=after
        )  # fmt: skip
        if not losses:
            look_ahead = self.sampler.look_ahead if ahead else None
            self.guard.use_replay(self.replay, 4, look_ahead)
        if skip:
            self.sampler.seek(0, trained=0, skip=skip)
        self.verdicts = list[StepVerdict]()
        self.named, self.deferred, self.returned = list[int](), list[int](), list[int]()
        torch.manual_seed(seed + 1)

    def replay(self, ids: Sequence[int]) -> Tensor:
        assert self.model.training == torch.is_grad_enabled()  # a trial trains, all else measures
        torch.rand(1)
        return self.model(self.samples[list(ids)]) * self.factors[list(ids)]  # type: ignore[no-any-return]

    def read_ids(self) -> Iterator[list[int]]:
        stream = iter(self.sampler)
        while True:
            yield [next(stream) for _ in range(BATCH // self.ranks)]

    def train(self, steps: int, until_rewound: bool = False) -> NamingLoop:
        batches = self.read_ids()
        while self.guard.step < steps and not (until_rewound and self.returned):
            ids = next(batches)
            losses = self.model(self.samples[ids]) * self.factors[ids]
            losses.mean().backward()
            given: dict[str, Any] = {"sample_ids": ids} if self.names else {}
            if self.losses:
                given["sample_losses"] = losses.detach()
            step = self.guard.step + 1
            if step in self.spoilt:
                for parameter in self.model.parameters():
                    parameter.grad = 30 * torch.randn_like(parameter)
            told_loss = losses.mean().detach() + self.false_rises.get(step, 0.0)
            verdict = self.guard.check(loss=told_loss, **given)
            if verdict.apply:
                self.optimizer.step()
                self.scheduler.step()
            else:
                self.verdicts.append(verdict)
                step = self.guard.rewind() if verdict.rewind else verdict.step
                self.returned.append(step)
                skipped, deferred = self.guard.skipped, self.guard.deferred
                self.named, self.deferred = [*self.named, *skipped], [*self.deferred, *deferred]
                self.sampler.seek(step, trained=verdict.step, skip=skipped, defer=deferred)
                batches = self.read_ids()
                if self.holds:
                    self.optimizer.step()
                    self.scheduler.step()
            self.optimizer.zero_grad()
        return self

    def read_state(self) -> list[Any]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.model.parameters(), *self.model.buffers(), *moments]
        tensors = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return [*(t.detach().clone() for t in tensors), torch.get_rng_state(), self.scheduler.last_epoch]


def train_until_rewind(loop: NamingLoop, steps: int) -> None:
    """Or until the end, over updates that are refused alone."""
    seen = len(loop.verdicts)
    while loop.guard.step < steps and not any(verdict.rewind for verdict in loop.verdicts[seen:]):
        loop.returned.clear()
        loop.train(steps, until_rewound=True)


def choose_samples(seed: int, counts: Sequence[int], first: int = 100) -> list[int]:
    """Of each update from `first` on, as many as `counts` says."""
    order = list(SkippableSampler(SAMPLES, BATCH, seed=seed))
    starts = range((first - 1) * BATCH, SAMPLES, BATCH)
    return [
        order[start + number * BATCH // count]
        for start, count in zip(starts, counts, strict=False)
        for number in range(count)
    ]


def end_as_if_never_seen(wrap: Callable[[Any], Any], counts: Sequence[int]) -> tuple[bool, bool, list[bool]]:
    """Whether exactly the bad samples are named; whether the run ends as one that never saw them; its verdicts."""
    bad = choose_samples(0, counts)
    samples = write_samples(0, bad)
    guarded = NamingLoop(samples, wrap=wrap).train(STEPS)
    never = NamingLoop(samples, wrap=wrap, skip=bad).train(STEPS)
    assert not never.verdicts and guarded.verdicts
    verdicts = [verdict.rewind for verdict in guarded.verdicts]
    return sorted(guarded.named) == sorted(bad), same(guarded.read_state(), never.read_state()), verdicts


def as_is(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize("counts", [(4, 4, 4), (1, 4, 2, 3), (4,) * 12])
def test_guard_names_the_bad_samples_and_ends_as_a_run_that_never_saw_them(counts: Sequence[int]) -> None:
    assert end_as_if_never_seen(as_is, counts) == (True, True, [True])


def as_fsdp(model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in (model.first, model.last, model):
        fully_shard(layer)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(("wrap", "ranks"), [(as_ddp, 2), (as_fsdp, 2)])
def test_ranks_name_the_same_samples(wrap: Callable[[Any], Any], ranks: int) -> None:
    assert run_ranks(ranks, end_as_if_never_seen, wrap, (4, 4, 4)) == [(True, True, [True])] * ranks


@pytest.mark.parametrize("losses", [False, True])
def test_a_refused_update_loses_its_bad_samples_alone(losses: bool, tmp_path: Path) -> None:
    """By the losses of the forward passes, or by a replay."""
    bad = choose_samples(0, [7])
    loop = NamingLoop(write_samples(0, bad), losses=losses, run_dir=tmp_path).train(STEPS)
    assert [verdict.rewind for verdict in loop.verdicts] == [False]
    assert loop.named == sorted(bad) and loop.deferred == [100]
    state = loop.read_state()
    update = list(SkippableSampler(SAMPLES, BATCH))[99 * BATCH : 100 * BATCH]
    assert {index for index, _, _ in loop.sampler.state_dict()["deferred"]} == set(update) - set(bad)
    attributed = [line for line in read_events(tmp_path, "incident") if line["what"] == "attributed"]
    assert [(line["number"], line["cause"]) for line in attributed] == [(1, "data")]
    named_ids = [index for first, end in attributed[0]["positions"] for index in range(first, end)]
    assert named_ids == sorted(bad) and loop.guard.report()["skipped_samples"] == len(bad)
    # Looking at them has left no trace: the others are read after the end of this run.
    assert same(state, NamingLoop(write_samples(0, bad), names=False).train(STEPS).read_state())


def test_most_of_a_batch_is_skipped_only_if_it_is_refused_twice() -> None:
    bad = choose_samples(0, [12])
    loop = NamingLoop(write_samples(0, bad), after=20 * BATCH).train(STEPS)
    assert [(verdict.step, verdict.rewind) for verdict in loop.verdicts[:1]] == [(100, False)]
    assert len(loop.verdicts) == 2 and sorted(loop.named) == sorted(bad)
    assert loop.guard.report(loop.sampler)["deferred_samples"] == 0


@pytest.mark.parametrize("count", [4, 8, 16])
def test_new_data_is_trained_through(count: int, tmp_path: Path) -> None:
    """No sample of it is lost, though its first update was refused, and no trouble follows. Nothing is undone, but
    where that update has named samples, which are read again behind a rewind."""
    new = choose_samples(1, [count] * 100)
    loop = NamingLoop(write_samples(1, new=new), seed=1, run_dir=tmp_path).train(STEPS)
    trials = read_events(tmp_path, "branches_tried")
    assert [trial["verdict"] for trial in trials] == ["new"] and trials[0]["cost"] < 0 < trials[0]["learnt"]
    attributed = [line for line in read_events(tmp_path, "incident") if line["what"] == "attributed"]
    assert attributed[-1]["cause"] == "new_data" and not attributed[-1]["positions"]
    remembered = [kept.step for kept in loop.guard.samples._read_steps]
    assert remembered == sorted(set(remembered)) and remembered[-1] == STEPS
    policy_state = loop.guard.judge.policy.state
    assert not policy_state.watching and Action.REWIND not in [past.action for past in policy_state.taken]
    assert loop.verdicts[-1].rewind == (count < BATCH) and not loop.sampler._skipped
    assert len(loop.sampler._deferred) == (0 if count < BATCH else BATCH)
    order = list(SkippableSampler(SAMPLES, BATCH, seed=1))
    assert loop.sampler.look_ahead(16) == order[STEPS * BATCH :][:16]


def resume(first: NamingLoop, second: NamingLoop) -> NamingLoop:
    """The second goes on where the first stands, by way of files."""
    for one in ("model", "optimizer", "scheduler"):
        getattr(second, one).load_state_dict(getattr(first, one).state_dict())
    second.guard.load_state_dict(json.loads(json.dumps(first.guard.state_dict())))
    second.sampler.load_state_dict(json.loads(json.dumps(first.sampler.state_dict(first.guard.step))))
    return second


def test_a_killed_run_goes_on_without_the_bad_samples() -> None:
    bad = choose_samples(0, [4, 4, 4])
    samples = write_samples(0, bad)
    whole = NamingLoop(samples).train(STEPS).read_state()
    first = NamingLoop(samples).train(120)
    random_state, second = torch.get_rng_state(), NamingLoop(samples)
    resume(first, second)
    torch.set_rng_state(random_state)
    assert same(second.train(STEPS).read_state(), whole)


def test_a_run_killed_before_the_new_data_trains_through_it() -> None:
    samples = write_samples(1, new=choose_samples(1, [8] * 100))
    first = NamingLoop(samples, seed=1).train(STEPS, until_rewound=True)
    while not first.verdicts[-1].rewind:
        first.returned.clear()
        first.train(STEPS, until_rewound=True)
    first.train(first.guard.step + 5)
    assert first.guard.step < 99 and not resume(first, NamingLoop(samples, seed=1)).train(STEPS).verdicts


def test_what_was_named_before_stays_skipped_after_a_rewind() -> None:
    """Of an update that was refused alone, between the copy and the onset; what it gave back is read where it was."""
    bad = [*choose_samples(0, [7], first=90), *choose_samples(0, [4, 4, 4])]
    samples = write_samples(0, bad)
    guarded = NamingLoop(samples).train(STEPS)
    assert [(verdict.step, verdict.rewind) for verdict in guarded.verdicts] == [(90, False), (101, True)]
    assert sorted(set(guarded.named)) == sorted(bad)
    assert same(guarded.read_state(), NamingLoop(samples, skip=bad).train(STEPS).read_state())


def test_samples_that_are_not_finite_need_no_trial(tmp_path: Path) -> None:
    """Not even where the budget of what is skipped without one is spent."""
    bad, loops = choose_samples(0, [1, 2, 1]), list[NamingLoop]()
    for skip in ([], bad):
        loop = NamingLoop(write_samples(0), skip=skip, **({} if skip else {"run_dir": tmp_path}))
        loop.factors[bad] = torch.nan
        loop.guard.judge.policy.take_untried(60)
        loops.append(loop.train(STEPS))
    assert [(verdict.step, verdict.rewind) for verdict in loops[0].verdicts] == [
        (100, False), (101, False), (102, True)
    ]  # fmt: skip
    assert loops[0].sampler.state_dict()["skipped"] == sorted(bad)
    assert same(loops[0].read_state()[:-2], loops[1].read_state()[:-2])
    assert "trial" not in (tmp_path / "journal.jsonl").read_text()


@pytest.mark.parametrize("counts", [(7,), (4, 4, 4)])
def test_few_are_skipped_without_a_clear_trial(counts: Sequence[int]) -> None:
    bad = choose_samples(0, counts)
    for spent in (0, 60):
        loop = NamingLoop(write_samples(0, bad))
        loop.guard.judge.policy.take_untried(spent)
        loop.train(101 if len(counts) == 1 else 85)
        while not loop.verdicts:
            loop.train(loop.guard.step + 1)
        untried = [count for _, count in loop.guard.judge.policy.state.untried]
        assert untried == [0, len(bad)] if not spent else [60]
        assert loop.named == ([] if spent else sorted(bad))
        assert loop.deferred == ([100] if len(counts) == 1 else [100, 101] if spent else [])


def test_a_trial_takes_place_where_refused_updates_are_held(tmp_path: Path) -> None:
    bad, trials, states = choose_samples(0, [4, 4, 4]), list[Any](), list[Any]()
    for holds in (False, True):
        loop = NamingLoop(write_samples(0, bad), holds=holds, run_dir=tmp_path / str(holds)).train(STEPS)
        trials += read_events(tmp_path / str(holds), "branches_tried")
        states.append(loop.read_state())
    assert len(trials) == 2 and trials[0]["reason"] == trials[1]["reason"] and trials[0]["cost"] != 0
    assert same(*states)


def test_without_a_look_ahead_harmless_samples_stand_for_the_data_to_come(tmp_path: Path) -> None:
    bad = choose_samples(0, [4, 4])
    loop = NamingLoop(write_samples(0, bad), ahead=False, run_dir=tmp_path).train(STEPS)
    assert sorted(loop.named) == sorted(bad) and not loop.deferred
    assert read_events(tmp_path, "branches_tried")[-1]["verdict"] in ("bad", "noise")


def test_a_damaged_state_is_no_good_state_and_its_data_not_bad(tmp_path: Path) -> None:
    """The newest copy is damaged, too: an older one is taken. The data of the trouble is read later, as no sample of
    it is bad."""
    loop = NamingLoop(write_samples(0), run_dir=tmp_path).train(99)
    assert loop.guard.copies
    steps = loop.guard.copies.steps
    for tensor in loop.guard.copies.newest[0].weights.values():
        tensor += 0.3 * torch.randn(tensor.shape)
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter += torch.randn(parameter.shape)
    loop.train(STEPS)
    rewinds = [number for number, verdict in enumerate(loop.verdicts) if verdict.rewind]
    assert len(rewinds) == 1 and loop.returned[rewinds[0]] == steps[-2]
    assert (
        read_events(tmp_path, "incident")[-1]["summary"]["cause"] == "state"
        and not loop.named
        and loop.deferred
    )


def look_at_false_alarm(
    wrap: Callable[[Any], Any], run: Path | None = None
) -> tuple[int, list[StepVerdict], bool]:
    """How often the run was looked at, its verdicts, and whether it ends as a run that was not."""
    false_rises, looks = dict.fromkeys(range(100, 112), 1.5), list[bool]()
    loop = NamingLoop(write_samples(0), wrap=wrap, false_rises=false_rises, run_dir=run)
    examine_incident = loop.guard._examine_incident

    def count_looks(*given: Any) -> Any:
        examined = examine_incident(*given)
        looks.append(examined.is_over)
        return examined

    loop.guard._examine_incident = count_looks  # type: ignore[method-assign]
    loop.train(STEPS)
    undisturbed = NamingLoop(write_samples(0), wrap=wrap, names=False).train(STEPS)
    assert all(looks)
    return len(looks), loop.verdicts, same(loop.read_state(), undisturbed.read_state())


def test_an_alarm_without_trouble_undoes_nothing(tmp_path: Path) -> None:
    """Its look at the state before leaves no trace: weights, moments, gradients, random states, schedule. While the
    alarm lasts the run is looked at seldom; the page shows an incident that was trained through."""
    looks, verdicts, is_same = look_at_false_alarm(as_is, tmp_path)
    assert 1 <= looks <= 3 and not verdicts and is_same
    incidents = read_events(tmp_path, "incident")
    assert [line["what"] for line in incidents if line["what"] != "attributed"][:1] == ["opened"]
    summary = incidents[-1]["summary"]
    assert (summary["cause"], summary["actions"], summary["outcome"]) == ("new_data", ["apply"], "healed")
    assert "none of the" in summary["reasons"][-1] and "nats on the data to come" in summary["reasons"][-1]


@pytest.mark.parametrize("wrap", [as_ddp, as_fsdp])
def test_ranks_look_without_a_trace(wrap: Callable[[Any], Any]) -> None:
    told = run_ranks(2, look_at_false_alarm, wrap)
    assert told[0] == told[1] and told[0][0] and not told[0][1] and told[0][2]


def test_a_gradient_that_its_data_does_not_give_is_no_false_alarm(tmp_path: Path) -> None:
    """The state is as good as before, as nothing of it was applied, and no sample is bad."""
    spoilt, run = range(100, 105), tmp_path
    loop = NamingLoop(write_samples(0), spoilt=spoilt, false_rises=dict.fromkeys(spoilt, 1.5), run_dir=run)
    loop.train(102)
    assert [verdict.rewind for verdict in loop.verdicts][:2] == [False, True]
    reasons = read_events(run, "incident")[-1]["summary"]["reasons"]
    assert any("when it is computed again" in reason for reason in reasons)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_another_level_of_the_loss_is_damage_only_if_the_state_is_worse(
    is_damaged: bool, tmp_path: Path
) -> None:
    """With an ordinary gradient norm it is taken for other data."""
    loop = NamingLoop(write_samples(0), run_dir=tmp_path).train(88)
    loss_trend, norm_trend = loop.guard.judge.detector.expect_next()
    assert loss_trend and norm_trend
    if is_damaged:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape)

    def tell_ordinary_norm(*_: Any) -> tuple[float, float, bool]:
        told_loss = loss_trend.level + 0.4 + 0.01 * float(torch.randn(()))
        return told_loss, float(np.exp(norm_trend.level)), True

    loop.guard._average_over_ranks = tell_ordinary_norm  # type: ignore[method-assign]
    norms = loop.guard.samples.measure_gradient
    loop.guard.samples.measure_gradient = lambda _: norms(lambda: 1e9)  # type: ignore[method-assign]
    shifts = list[int]()
    judge_step = loop.guard.judge.judge_step

    def watch_shifts(*given: Any) -> Any:
        decision = judge_step(*given)
        shifts.extend([decision.finding.step] * (decision.finding.verdict is Verdict.SHIFT))
        return decision

    loop.guard.judge.judge_step = watch_shifts  # type: ignore[method-assign]
    loop.train(110, until_rewound=True)
    assert shifts and [verdict.rewind for verdict in loop.verdicts] == [True] * is_damaged
    if is_damaged:
        assert loop.returned == [80] and "nats on the data of before" in loop.verdicts[0].reason
        assert read_events(tmp_path, "incident")[0]["verdict"] == "damage"


def test_new_trouble_is_looked_at_though_an_alarm_was_false_a_moment_ago() -> None:
    bad = choose_samples(0, [4, 4, 4, 4], first=120)
    loop = NamingLoop(write_samples(0, bad), false_rises=dict.fromkeys(range(100, 117), 1.5))
    train_until_rewind(loop, 130)
    assert (
        loop.verdicts[-1].rewind and loop.verdicts[-1].step <= 122 and sorted(set(loop.named)) == sorted(bad)
    )


def test_steps_that_are_done_again_are_looked_at() -> None:
    loop = NamingLoop(write_samples(0), false_rises=dict.fromkeys(range(100, 140), 1.5))
    loop.train(108)
    for _ in range(2):  # the state is damaged again in the same steps
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter += torch.randn(parameter.shape)
        train_until_rewind(loop, 140)
        assert loop.verdicts[-1].rewind
        loop.false_rises = {}
        loop.train(loop.guard.step + 2)
    assert loop.verdicts[-1].step < 90


def test_a_copy_that_is_no_good_state_is_left_with_the_present_one() -> None:
    loop = NamingLoop(write_samples(0), false_rises=dict.fromkeys(range(100, 112), 1.5)).train(99)
    assert loop.guard.copies
    steps, noise = loop.guard.copies.steps, torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in loop.model.named_parameters():
            damage = 0.1 * torch.randn(parameter.shape, generator=noise)
            loop.guard.copies.newest[0].weights[name] += damage
            parameter += damage
    train_until_rewind(loop, 112)
    assert loop.returned == [steps[-2]]


def test_weights_that_autocast_has_kept_are_not_measured() -> None:
    """The whole step is inside of autocast; the state is damaged."""
    loop, rewinds = NamingLoop(write_samples(0)).train(99), list[bool]()
    loop.guard.samples.replay = lambda ids: loop.replay(ids).float()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter += torch.randn(parameter.shape)
    for ids, _ in zip(loop.read_ids(), range(8), strict=False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loop.model(loop.samples[ids]).float().mean()
            loss.backward()
            verdict = loop.guard.check(loss=loss.detach(), sample_ids=ids)
        rewinds.append(verdict.rewind)
        if verdict.rewind:
            break
        if verdict.apply:
            loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert rewinds[-1]


def test_gradients_are_put_back_and_no_others_are_left() -> None:
    """Also of parameters that no optimizer has."""
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
    copies = HostCopies(model, torch.optim.AdamW(model[0].parameters()), {}, 10, 1)
    copies.take_copy(0, read_forward_state(model))
    model[1](model[0](torch.ones(1, 3))).sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    memory = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    held = copies.hold_present(1)
    copies.restore_before(1)
    for gradient in memory:  # as DDP, whose buckets are the gradients
        gradient.zero_()
    model[2](model[1](model[0](torch.ones(2, 3)))).sum().backward()
    copies.put_back(held)
    after = [parameter.grad for parameter in model.parameters()]
    assert [one is None for one in after] == [one is None for one in gradients] == [False] * 4 + [True] * 2
    assert all(torch.equal(one, other) for one, other in zip(after[:4], gradients[:4], strict=True))  # type: ignore[arg-type]


def test_what_cannot_be_looked_at_is_refused_by_name() -> None:
    class FullyShardedDataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    model = FullyShardedDataParallel()
    guard = Guard(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"FSDP1 .* FSDP2"):
        guard.use_replay(lambda ids: torch.zeros(len(ids)))
    with pytest.raises(TypeError, match="goes back by its own seek"):
        Guard(model, torch.optim.AdamW(model.parameters()), others={"data": SkippableSampler(8, 2)})


def test_two_states_are_compared_by_both_kinds_of_data() -> None:
    good = np.linspace(2.0, 4.0, 128)
    worse_to_come = good + 0.1 * (np.arange(128) < 64)
    worse_of_before = good + 0.1 * (np.arange(128) >= 64)
    for present, is_worse in (
        (good, False),
        (worse_to_come, False),
        (worse_of_before, False),
        (good + 0.1, True),
    ):
        assert compare_states(present, good, 64, (1.0, 1.0))[0] is is_worse
    assert compare_states(good + 0.1, good, 0, (1.0, 1.0))[0]  # what comes is not known
    assert compare_states(worse_to_come[:90], good[:90], 64, (1.0, 1.0))[0]  # what was read is hardly known
    assert compare_states(good[:31], good[:31], 31, (1.0, 1.0))[0]  # nothing is
    assert compare_states(good, good, 64, (2.1, 1.0))[0] and compare_states(good, good, 64, (1.0, np.nan))[0]


def test_judge_losses_names_few_harmless_samples() -> None:
    """Heavy tails: in 200 windows of 48 harmless samples, against 256 of the same kind; and all of gross ones."""
    draw = np.random.default_rng(0)
    windows_with_named = missed = 0
    for _ in range(200):
        known, losses = draw.gamma(8.0, 0.1, 256), draw.gamma(8.0, 0.1, 48)
        windows_with_named += bool(judge_losses(np.arange(48), losses, known).bad)
        losses[[3, 30]] = 9.0, np.nan
        found = judge_losses(np.arange(48), losses, known)
        missed += not {3, 30} <= set(found.bad) or found.cause is not Cause.DATA
    assert windows_with_named <= 10 and not missed
    few_known = judge_losses(np.arange(48), np.nan_to_num(losses, nan=9.0), known[:40])
    assert few_known.cause is Cause.STATE and "48 of them cannot be judged" in few_known.reason


def make_steps(*ids: Sequence[int], first: int = 1, refused: int = 0) -> list[ReadStep]:
    return [
        ReadStep(step, tuple(own_ids), (), step != refused, 1.0) for step, own_ids in enumerate(ids, first)
    ]


def test_read_since_tells_harmless_samples_and_suspects_apart() -> None:
    """What was refused, named or read again in the window is no reference, nor older than what is compared with."""
    examiner = SampleExaminer(nn.Linear(2, 2), None)
    batches = [list(range(100 * step, 100 * step + 100)) for step in range(1, 6)]
    for kept in make_steps(*batches, [500, 600, 601], [602], refused=4):
        examiner.remember_step(kept)
    examiner.bad_by_step[3] = [333]
    window, harmless = examiner.read_since(6)
    assert [kept.ids for kept in window] == [(500, 600, 601), (602,)]
    known = [sample_id for kept in harmless for sample_id in kept.ids]
    assert known == [*range(300, 333), *range(334, 400), *range(501, 600)]
    examiner.forget_after(5)
    assert examiner.read_since(6)[0] == [] and examiner._sample_count == 300


def test_choose_outlook_takes_what_a_trial_does_not_train_on() -> None:
    coming, harmless = make_steps(range(100), range(100, 200)), make_steps(range(200, 300), range(300, 400))
    trained = np.arange(0, 100, 2)
    chosen, fillers = choose_outlook(coming, harmless, trained, 1)
    assert chosen.size == 64 and not np.isin(chosen, trained).any() and chosen[-1] == 199
    assert fillers.tolist() == [*range(200, 400)]
    chosen, fillers = choose_outlook([], harmless, trained, 1)
    assert chosen.min() >= 300 and fillers.size == 136 and not np.isin(fillers, chosen).any()
    assert choose_outlook([], harmless, trained, 2)[0].min() == 200


def test_a_crowd_is_not_lost_among_what_is_read_after_it() -> None:
    """Two steps of elevated samples, and ordinary ones behind them, which would hide the crowd if all were one."""
    examiner, lost = SampleExaminer(nn.Linear(2, 2), None), 0
    coming, harmless = (
        make_steps(*np.arange(32, 1056).reshape(-1, 16), first=3),
        make_steps(range(2000, 2256)),
    )
    window = make_steps(range(16), range(16, 32))
    for seed in range(10):
        losses = np.random.default_rng(seed).gamma(8.0, 0.1, 2256)
        losses[:32] += 0.5
        examiner.measure_losses = lambda ids, losses=losses: losses[ids]  # type: ignore[method-assign, misc]
        known = losses[2000:]
        if judge_losses(np.arange(32), losses[:32], known).bad:
            found, region = examiner.examine_window(window, coming, harmless)
            assert found.bad_positions and set(found.bad_positions) <= set(range(32)) and region == window
            lost += not judge_losses(np.arange(80), losses[:80], known).bad
    assert lost >= 5


def make_trial(verdict: TrialVerdict, pays: bool = False) -> HarmTrial:
    return HarmTrial(verdict, 0.0, 0.0, 0.0, 0.0, 4, 8, pays, False)


@pytest.mark.parametrize(
    ("verdict", "few", "pays", "may_skip", "expected"),
    [
        (None, True, False, True, "skipped"),
        (None, True, False, False, "deferred"),
        (TrialVerdict.BAD, False, False, False, "skipped"),
        (TrialVerdict.MIXED, False, False, True, "deferred"),
        (TrialVerdict.MIXED, True, False, False, "skipped"),
        (TrialVerdict.NOISE, True, False, True, "skipped"),
        (TrialVerdict.NOISE, True, False, False, "deferred"),
        (TrialVerdict.NOISE, False, False, True, "harmless"),
        (TrialVerdict.NEW, False, False, True, "harmless"),
        (TrialVerdict.NEW, True, False, True, "skipped"),
        (TrialVerdict.NEW, True, True, True, "harmless"),
    ],
)
def test_what_a_trial_shows_decides(
    verdict: TrialVerdict | None, few: bool, pays: bool, may_skip: bool, expected: str
) -> None:
    found = Conclusion(Cause.DATA, [3, 4, 9], [], "", alone=[3, 4, 9] if few else [])
    window = make_steps((1, 3), (2, 5), (4, 9), first=7)
    trial = None if verdict is None else make_trial(verdict, pays)
    remedy = choose_sample_remedy(found, trial, window, may_skip)
    assert remedy.is_harmless == (expected == "harmless")
    assert remedy.skipped == ((3, 4, 9) if expected == "skipped" else ())
    assert remedy.deferred == ((7, 9) if expected == "deferred" else ())
    nobody = choose_sample_remedy(Conclusion(Cause.STATE, [], [], ""), None, window, True)
    assert (nobody.cause, nobody.skipped, nobody.deferred) == (Cause.STATE, (), (7, 8, 9))


def test_ids_and_losses_that_do_not_fit_are_refused() -> None:
    loop = NamingLoop(write_samples(0))
    with pytest.raises(
        ValueError, match="1 of 1 ranks have given more or less sample_losses than sample_ids"
    ):
        loop.guard.check(loss=1.0, grad_norm=1.0, sample_ids=[1, 2, 3], sample_losses=[0.5, 0.5])
    loop.guard.use_replay(lambda ids: torch.zeros(()), 2)
    with pytest.raises(ValueError, match=r"losses of shape \[\] for 2 ids"):
        loop.guard.samples.measure_losses(np.array([1, 2, 3]))


def give_ids_on_one_rank() -> str:
    loop = NamingLoop(write_samples(0), wrap=as_ddp)
    try:
        loop.guard.check(loss=1.0, grad_norm=1.0, sample_ids=[1] if loop.rank else None)
    except ValueError as error:
        return str(error)
    return ""


def test_ids_of_some_ranks_alone_are_refused() -> None:
    told = run_ranks(2, give_ids_on_one_rank)
    assert told == ["1 of 2 ranks have given sample_ids: give them on all or on none"] * 2


def test_a_crowd_of_a_refused_update_is_read_later_as_no_trial_has_shown_harm() -> None:
    """Each of its samples is ordinary by itself."""
    loop = NamingLoop(write_samples(0)).train(60)
    crowd = Conclusion(Cause.DATA, [1, 2, 3], [], "together")
    loop.guard.samples.examine_refused = lambda step: crowd  # type: ignore[method-assign]
    verdict = loop.guard.check(loss=float("nan"), grad_norm=1.0, sample_ids=range(BATCH))
    assert not verdict.apply and not verdict.rewind
    assert not loop.guard.skipped and loop.guard.deferred == [61]


def test_a_trial_at_a_rate_of_zero_shows_nothing() -> None:
    """As from a copy of before the first step of a warm-up: no branch would be trained."""
    assert not can_train(make_copy(groups=[{"lr": 0.0}, {"lr": torch.tensor(0.0)}]))
    assert can_train(make_copy(groups=[{"lr": 0.0}, {"lr": 1e-5}]))
    assert not can_train(make_copy(groups=[{"lr": 1e-5}], masters=[torch.ones(1)]))


def make_copy(groups: list[dict[str, Any]], masters: Sequence[Tensor] = ()) -> StateCopy:
    return StateCopy(0, ForwardState({}, {}), {}, list(masters), [], groups, {})


def check_unevenly(what: str) -> str:
    """What is said on this rank of two, where the first gives less than the second."""
    torch.manual_seed(0)
    loop = NamingLoop(write_samples(0))
    rank, losses = dist.get_rank(), torch.ones(4)
    given: dict[str, Any] = {"sample_ids": range(4)}
    if what == "losses" and rank:
        given["sample_losses"] = losses
    if what == "length":
        given["sample_losses"] = losses[: 3 + rank]
    with pytest.raises(ValueError) as raised:
        loop.guard.check(loss=1.0, grad_norm=1.0, **given)
    return str(raised.value)


@pytest.mark.parametrize("what", ["losses", "length"])
def test_what_one_rank_gives_wrong_is_refused_on_all(what: str) -> None:
    first, second = run_ranks(2, check_unevenly, what)
    assert first == second and first.startswith("1 of 2 ranks have given")


def train_unevenly() -> tuple[list[int], list[int]]:
    """Two ranks that read two samples a step, and six: what is named of a bad batch, and the window's steps."""
    loop = NamingLoop(write_samples(0))
    rank, stream = dist.get_rank(), iter(SkippableSampler(SAMPLES, BATCH, seed=3))
    for step in range(1, 303):
        ids = [next(stream) for _ in range(8)]
        own_ids = ids[:2] if rank == 0 else ids[2:]
        losses = loop.model(loop.samples[own_ids]) * (40.0 if step == 302 else 1.0)
        losses.mean().backward()
        loop.guard.check(loss=losses.mean().detach(), grad_norm=1.0, weight=len(own_ids), sample_ids=own_ids)
        loop.optimizer.zero_grad()
    window, harmless = loop.guard.samples.read_since(302)
    return [read_step.step for read_step in window], [len(read_step.ids) for read_step in harmless]


def test_ranks_that_read_another_number_of_samples_examine_the_same_steps() -> None:
    first, second = run_ranks(2, train_unevenly)
    assert first == second and first[0] == [302] and sum(first[1]) > 200


def test_ids_are_whole_numbers() -> None:
    loop = NamingLoop(write_samples(0))
    for ids in (["a"], [1.5]):
        with pytest.raises(TypeError, match="sample_ids are whole numbers"):
            loop.guard.check(loss=1.0, grad_norm=1.0, sample_ids=ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "missing"), [({"sample_ids": [1]}, "no replay"), ({}, "no sample_ids")])
def test_half_of_what_naming_needs_is_warned_of(given: dict[str, Any], missing: str) -> None:
    loop = NamingLoop(write_samples(0), losses=bool(given))
    with pytest.warns(UserWarning, match=missing):
        loop.guard.check(loss=1.0, grad_norm=1.0, **given)
