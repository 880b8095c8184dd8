"""A learning rate that jumps is found by a trial, and limited in updates alone: the schedule goes on as it was."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastable_guard.actions import Action
from megastable_guard.guard_config import GuardConfig, PolicyConfig
from megastable_guard.loop_guard import Guard
from megastable_guard.policy import Policy
from megastable_guard.rate_limits import RateLimiter, read_rate
from tests.guard.test_sample_examiner import (
    BATCH,
    STEPS,
    NamingLoop,
    choose_samples,
    read_events,
    resume,
    write_samples,
)

JUMPED, LASTS, TIMES = 100, 40, 30.0  # the step whose rate jumps, for how many steps, and how high


class JumpingLoop(NamingLoop):
    """Whose schedule jumps for some steps. Its last samples are not read before its end."""

    def __init__(self, samples: Tensor, times: float = TIMES, jumped: int = JUMPED, **options: Any) -> None:
        super().__init__(samples, **options)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(  # type: ignore[assignment]
            self.optimizer, lambda update: times if jumped - 1 <= update < jumped - 1 + LASTS else 1.0
        )
        self.guard.others["scheduler"] = self.scheduler
        assert self.guard.copies is not None
        self.guard.copies.others = self.guard.others

    def measure(self) -> float:
        """Mean loss of samples that are not read."""
        with torch.no_grad():
            self.model.eval()
            losses = self.model(self.samples[self.sampler.look_ahead(STEPS * BATCH)[-64 * BATCH :]])
            self.model.train()
        return float(losses.mean())


@pytest.mark.parametrize("holds_tensor", [False, True])
def test_limiter_lowers_rates_during_updates_alone(holds_tensor: bool) -> None:
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    rates: list[Any] = [0.5, torch.tensor(0.25) if holds_tensor else 0.25]
    groups = [{"params": [weight], "lr": rate} for weight, rate in zip(weights, rates, strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=(0.0, 0.0), weight_decay=0.0, eps=0.0, foreach=False)
    limiter = RateLimiter([optimizer])
    for share in (0.5, 1.0):
        before = [weight.detach().clone() for weight in weights]
        limiter.share = share
        for weight in weights:
            weight.grad = torch.ones(2)
        optimizer.step()
        moved = [float((old - new.detach())[0]) for old, new in zip(before, weights, strict=True)]
        assert moved == pytest.approx([0.5 * share, 0.25 * share])
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]
        assert optimizer.param_groups[1]["lr"] is rates[1]


def test_limiter_follows_the_policy() -> None:
    limiter, policy = RateLimiter([]), Policy(PolicyConfig())
    assert limiter.choose_share(policy, 10, 0.3) == 0.3 and limiter.share == 1.0
    assert limiter.choose_share(policy, 10, 0.0) == 0.0 and limiter.share == 1.0
    (capped,) = [offer.policy for offer in policy.offer_remedies(10, 0.1, 0.3) if offer.name == "cap_lr"]
    assert limiter.choose_share(capped, 11, 0.3) == pytest.approx(0.1) and limiter.share == pytest.approx(
        1 / 3
    )


def test_limiter_lowers_a_rate_that_groups_share_once() -> None:
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=rate)
    RateLimiter([optimizer]).share = 0.5
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    assert [weight.tolist() for weight in weights] == [[0.75, 0.75]] * 2
    assert all(float(group["lr"]) == 0.5 for group in optimizer.param_groups)


def test_an_update_that_raises_an_error_does_not_lower_the_rate_for_ever() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    RateLimiter([optimizer]).share = 0.5

    def run_out_of_memory() -> float:
        raise MemoryError

    for _ in range(2):
        with pytest.raises(MemoryError):
            optimizer.step(run_out_of_memory)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == 0.5 and optimizer.param_groups[0]["lr"] == 1.0


def test_read_rate_is_the_largest_of_all_groups() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.0, torch.tensor(0.25))]
    assert (
        read_rate([torch.optim.SGD(groups), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.125)]) == 0.25
    )


@pytest.mark.parametrize("keep", [0, 3])
def test_a_refused_update_that_is_made_all_the_same_is_warned_of_once(keep: int) -> None:
    """Not where nothing is changed, and not where the optimizer is held."""
    for is_held in (True, False):
        weights = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
        guard = Guard(weights, optimizer, keep=keep)
        if is_held:
            guard.hold_refused()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for loss in (4.0, math.nan, 4.0, math.nan):
                weights(torch.ones(2)).sum().backward()
                guard.check(loss=loss, grad_norm=1.0)
                if math.isfinite(loss):
                    optimizer.step()
                optimizer.zero_grad()
                optimizer.step()
            assert not warned
            for _ in range(2):
                weights(torch.ones(2)).sum().backward()
                optimizer.step()
        assert [
            "only if verdict.apply, or call guard.hold_refused(scheduler)" in str(w.message) for w in warned
        ] == [True][is_held:]


def test_trials_and_rewinds_are_no_refused_updates_that_are_made() -> None:
    bad = choose_samples(0, (4, 4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop = NamingLoop(write_samples(0, bad)).train(STEPS)
    assert any(verdict.rewind for verdict in loop.verdicts) and sorted(loop.named) == sorted(bad)


def test_a_rate_that_jumps_is_limited(tmp_path: Path) -> None:
    """No data is lost, and the run ends as well as without the jump."""
    samples = write_samples(0)
    clean, unlimited = JumpingLoop(samples, times=1.0), JumpingLoop(samples, names=False)
    clean.train(STEPS), unlimited.train(STEPS)
    loop = JumpingLoop(samples, run_dir=tmp_path)
    loop.train(STEPS)
    assert loop.guard.judge.policy.state.taken[-1].action is Action.CAP_LR
    assert not loop.named and not loop.deferred and not loop.sampler._skipped
    (trial,) = read_events(tmp_path, "branches_tried")
    assert trial["chosen"] == "cap_lr" and trial["steps"] == 16
    attributed = [line for line in read_events(tmp_path, "incident") if line["what"] == "attributed"]
    assert attributed[-1]["cause"] == "learning_rate"
    assert loop.optimizer.param_groups[0]["lr"] == loop.optimizer.param_groups[0]["initial_lr"]
    assert loop.measure() < clean.measure() + 0.02 < unlimited.measure()


def test_a_limit_holds_in_a_resumed_run() -> None:
    samples = write_samples(0)
    whole = JumpingLoop(samples).train(STEPS)
    first = JumpingLoop(samples).train(JUMPED + 12)
    random_state = torch.get_rng_state()
    second = resume(first, JumpingLoop(samples))
    torch.set_rng_state(random_state)
    assert second.guard.judge.policy.state.limits
    second.train(STEPS)
    assert all(
        torch.equal(one, other)
        for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True)
    )


def test_a_rate_that_jumps_right_behind_a_copy_is_capped_at_that_of_before() -> None:
    """The copy of after step 100 holds the rate of step 101 already."""
    loop = JumpingLoop(write_samples(0), jumped=101)
    loop.train(STEPS)
    (limit,) = loop.guard.judge.policy.state.limits
    assert loop.guard.judge.policy.state.taken[-1].action is Action.CAP_LR and limit.value == pytest.approx(
        0.01
    )


def test_a_limit_is_lifted(tmp_path: Path) -> None:
    """After `cut_rest` steps on the trend the rate comes back, over `rewarm_steps` updates; the journal says so."""
    policy = PolicyConfig(cut_rest=5, rewarm_steps=4, verify_steps=4)
    loop = JumpingLoop(write_samples(0), config=GuardConfig(policy=policy), run_dir=tmp_path)
    shares = list[float]()
    check = loop.guard.check

    def check_and_note(**given: Any) -> Any:
        verdict = check(**given)
        shares.append(loop.guard.rates.share)
        return verdict

    loop.guard.check = check_and_note  # type: ignore[method-assign]
    loop.train(STEPS)
    assert read_events(tmp_path, "rate_lifted")
    assert min(shares) == pytest.approx(1 / TIMES) and shares[-1] == 1.0


def test_a_rate_that_jumps_and_helps_is_left_alone(tmp_path: Path) -> None:
    """Training on harmless samples at it is no worse than not training."""
    loop = JumpingLoop(write_samples(0), times=2.5, run_dir=tmp_path).train(STEPS)
    assert not loop.guard.judge.policy.state.limits and not loop.named
