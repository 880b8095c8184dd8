"""Routing against its own history: what is healthy raises nothing, and each fault is named by its place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.config.tree import RunConfig
from megastable.warnings.routing import (
    BIAS_EVERY,
    KNOWN,
    LASTING,
    OVER,
    Routed,
    RoutingHistory,
    RoutingSign,
    RoutingWatch,
)

LAYERS, EXPERTS, TOP_K, RATE = 3, 8, 2, 0.01
AT = KNOWN + 40  # step of a fault


class Routers:
    """Simulated routers: shares of choices around levels of their own. The first layer is dense."""

    def __init__(self, seed: int, tokens: int = 512, scatter: float = 0.1) -> None:
        self.chance, self.tokens, self.scatter = np.random.default_rng(seed), tokens, scatter
        self.shares = self.chance.dirichlet(np.full(EXPERTS, 8.0), LAYERS)
        self.entropy, self.z = self.chance.uniform(1.0, 2.0, LAYERS), self.chance.uniform(0.8, 3.0, LAYERS)
        self.bias = np.zeros((LAYERS, EXPERTS))

    def route(self, step: int) -> Routed:
        noise = np.exp(self.scatter * self.chance.standard_normal(self.shares.shape))
        shares = self.shares * noise
        choices = np.zeros((LAYERS, 2 * EXPERTS + 4))
        for layer in range(1, LAYERS):
            # Of each token, the choices are of different experts.
            even = np.minimum(shares[layer] / shares[layer].sum() * TOP_K, 1.0)
            counts = self.chance.binomial(self.tokens, even)
            counts[counts.argmax()] += TOP_K * self.tokens - counts.sum()
            wobble = 1 + self.scatter * self.chance.uniform(-0.5, 0.5, 2)
            entropy, z = self.entropy[layer] * wobble[0], self.z[layer] * wobble[1]
            choices[layer] = [*counts, *counts, self.tokens * z**2, self.tokens * entropy, 0, self.tokens]
        self.bias += RATE * np.sign(self.chance.standard_normal(self.bias.shape))
        return Routed(choices, EXPERTS, self.bias.copy() if step % BIAS_EVERY == 0 else None)


def judge(
    routers: Routers, last: int, change: Callable[[int], None] = lambda step: None, first: int = 1,
    history: RoutingHistory | None = None,
) -> list[RoutingSign]:  # fmt: skip
    """All signs of some steps. change: what happens before each."""
    known, found_signs = history if history is not None else RoutingHistory(), list[RoutingSign]()
    for step in range(first, last + 1):
        change(step)
        found_signs += known.judge_update(step, routers.route(step), RATE)
    return found_signs


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), tokens=st.sampled_from([16, 64, 512]), scatter=st.floats(0.02, 0.3),
    drift=st.floats(-0.002, 0.002),
)  # fmt: skip
def test_noise_small_batches_and_slow_drift_are_no_sign(
    seed: int, tokens: int, scatter: float, drift: float
) -> None:
    routers = Routers(seed, tokens, scatter)

    def move(step: int) -> None:
        routers.entropy *= 1 - abs(drift)
        routers.z *= 1 + drift

    assert judge(routers, 250, move) == []


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_another_language_is_no_sign(seed: int) -> None:
    routers = Routers(seed)

    def switch(step: int) -> None:
        if step >= AT and (step - AT) % 60 == 0:
            routers.shares = routers.chance.dirichlet(np.full(EXPERTS, 16.0), LAYERS)
            routers.entropy *= routers.chance.uniform(0.85, 1.15)
            routers.z *= routers.chance.uniform(0.7, 1.4)

    assert judge(routers, AT + 150, switch) == []


@pytest.mark.parametrize("seed", range(6))
def test_an_expert_that_is_busy_in_bursts_is_told_of_hardly_more_than_once(seed: int) -> None:
    """One for a language that comes in a tenth of the batches, up to 24 in a row."""
    routers, left = Routers(seed), 0
    usual, busy = routers.shares.copy(), routers.shares.copy()
    busy[1, 3], usual[1, 3] = 50.0, 0.0

    def alternate(step: int) -> None:
        nonlocal left
        if left == 0 and routers.chance.random() < 1 / 120:
            left = int(routers.chance.integers(2, 25))
        routers.shares = busy if left else usual
        left = max(0, left - 1)

    told = judge(routers, 6000, alternate)
    assert len([sign for sign in told if sign.signal == "expert_load" and sign.expert == 3]) <= 2
    assert len(told) <= 6


def crowd(routers: Routers) -> None:
    routers.shares[1, 3] = 100.0


def starve(routers: Routers) -> None:
    routers.shares[1, 3] = 0.0


def sharpen(routers: Routers) -> None:
    routers.entropy[2] *= 0.4


def enlarge(routers: Routers) -> None:
    routers.z[2] = 3 * routers.z[2] + 1


FAULTS: dict[str, tuple[Callable[[Routers], None], str]] = {
    "expert_load": (crowd, "blocks.1.mlp.experts.3"),
    "expert_idle": (starve, "blocks.1.mlp.experts.3"),
    "router_entropy": (sharpen, "blocks.2.mlp.router"),
    "router_logits": (enlarge, "blocks.2.mlp.router"),
}


@pytest.mark.parametrize("signal", FAULTS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.sampled_from([64, 512]))
def test_what_lasts_is_named(signal: str, seed: int, tokens: int) -> None:
    routers, (fault, place) = Routers(seed, tokens), FAULTS[signal]
    loads = np.minimum(routers.shares / routers.shares.sum(1, keepdims=True), 1 / TOP_K) * EXPERTS
    usual = loads[1, 3] if signal.startswith("expert") else routers.entropy[2]
    usual = routers.z[2] if signal == "router_logits" else usual
    told = judge(routers, AT + 30, lambda step: fault(routers) if step == AT else None)
    first = next(sign for sign in told if sign.signal == signal)
    assert first.where == place and place in first.reason and f"since step {AT}" in first.reason
    assert (first.since, first.before, first.step) == (AT, AT - 1, AT + LASTING[signal] - 1)
    assert first.usual == pytest.approx(usual, rel=0.3)
    assert [sign.signal for sign in told].count(signal) == 1  # told once
    assert "balance_loss" in first.remedies
    assert ("no_balance_loss" in first.remedies) == (not signal.startswith("expert"))


@pytest.mark.parametrize("signal", FAULTS)
def test_what_does_not_last_is_not_told(signal: str) -> None:
    routers, (fault, _) = Routers(7), FAULTS[signal]
    usual = routers.shares.copy(), routers.entropy.copy(), routers.z.copy()

    def burst(step: int) -> None:
        routers.shares, routers.entropy, routers.z = (numbers.copy() for numbers in usual)
        if step >= AT and (step - AT) % 2 ** (LASTING[signal] - 1) < LASTING[signal] - 1:
            fault(routers)

    history = RoutingHistory()
    assert judge(routers, AT + LASTING[signal] - 1, burst, history=history) == []
    assert not history.streaks


def test_an_idle_expert_must_have_had_many_choices() -> None:
    """Of 16 tokens, an expert of a quarter of an even load has one choice a step."""
    routers = Routers(1, tokens=16, scatter=0.0)
    routers.shares[:] = 1 / EXPERTS
    history = RoutingHistory()
    told = judge(routers, AT + 30, lambda step: starve(routers) if step == AT else None, history=history)
    assert [sign.signal for sign in told] == ["expert_idle"]
    rare = Routers(1, tokens=16, scatter=0.0)
    rare.shares[:] = 1 / EXPERTS
    rare.shares[1, 3] = 0.35 / EXPERTS
    told = judge(rare, AT + LASTING["expert_idle"] + 4, lambda step: starve(rare) if step == AT else None)
    assert told == []
    few = Routers(1, scatter=0.0)
    few.shares[1, 3] = 0.1 / EXPERTS
    assert judge(few, AT + 60, lambda step: starve(few) if step == AT else None) == []


def test_a_bias_may_be_wrong_since_the_last_look_though_updates_were_refused() -> None:
    """A snapshot of after it may have it already: the replay would make it again."""
    routers, history = Routers(3), RoutingHistory()
    look = AT // BIAS_EVERY * BIAS_EVERY
    assert judge(routers, look, history=history) == []
    routers.bias[1, 3] += 1.0
    (sign,) = judge(routers, look + BIAS_EVERY, first=look + BIAS_EVERY - 1, history=history)
    assert sign.before == look


@pytest.mark.parametrize("amount", [1.0, -5.0, 0.2])
def test_a_bias_moves_no_farther_than_its_rate(amount: float) -> None:
    def push(step: int) -> None:
        if step == AT:
            routers.bias[1, 3] += amount

    routers, history = Routers(3), RoutingHistory()
    (sign,) = judge(routers, AT + 30, push, history=history)
    look = -(-AT // BIAS_EVERY) * BIAS_EVERY
    assert (sign.where, sign.signal, sign.step) == ("blocks.1.mlp.experts.3", "expert_bias", look)
    assert sign.before == look - BIAS_EVERY and sign.before < AT and not history.standing
    back = Routed(routers.route(1).choices, EXPERTS, np.zeros((LAYERS, EXPERTS)))
    again = Routed(back.choices, EXPERTS, np.full((LAYERS, EXPERTS), amount))
    assert sign.is_repeated(again) and not sign.is_repeated(back)


def test_biases_that_were_reset_are_no_sign() -> None:
    routers, history = Routers(3), RoutingHistory()
    judge(routers, 40, history=history)
    history = RoutingHistory.model_validate(history.model_dump())  # as by a rewind or a restart
    routers.bias[:] += 1.0
    assert judge(routers, 80, first=41, history=history) == []
    history.begin_again()
    routers.bias[:] += 1.0
    assert judge(routers, 120, first=81, history=history) == []


def test_nothing_is_judged_before_enough_is_known() -> None:
    routers = Routers(5)
    fault_step = KNOWN - LASTING["expert_load"]
    assert judge(routers, KNOWN, lambda step: crowd(routers) if step == fault_step else None) == []
    quiet, history = Routers(5), RoutingHistory()
    for step in range(1, AT + 40):
        if step == AT:
            crowd(quiet)
        assert not history.judge_update(step, quiet.route(step), RATE, warns=False)


def test_a_warning_stands_until_it_is_over() -> None:
    routers, history = Routers(2), RoutingHistory()
    usual = routers.shares.copy()
    judge(routers, AT + 10, lambda step: crowd(routers) if step == AT else None, history=history)
    assert [name.split()[0] for name in history.standing] == ["expert_load"]
    routers.shares = usual
    within = OVER * LASTING["expert_load"]
    judge(routers, AT + 10 + within - 1, first=AT + 11, history=history)
    assert history.standing
    judge(routers, AT + 10 + within, first=AT + 10 + within, history=history)
    assert not history.standing and not history.streaks


def test_what_lasts_becomes_usual() -> None:
    routers, history = Routers(2), RoutingHistory()
    told = judge(routers, AT + 400, lambda step: sharpen(routers) if step == AT else None, history=history)
    assert len(told) == 1 and not history.standing
    assert history.levels[1][EXPERTS] == pytest.approx(routers.entropy[2], rel=0.1)


def test_the_state_goes_on_as_it_was() -> None:
    ends = []
    for stop in (None, AT + 3):
        routers, history, told = Routers(4), RoutingHistory(), list[RoutingSign]()
        for step in range(1, AT + 31):
            if step == AT:
                crowd(routers)
            told += history.judge_update(step, routers.route(step), RATE)
            if step == stop:
                history = RoutingHistory.model_validate(json.loads(json.dumps(history.model_dump())))
        ends.append((told, history.model_dump()))
    assert ends[0] == ends[1] and ends[0][0]


def test_a_replay_is_asked_whether_it_came_half_of_the_way() -> None:
    def routed(load: float, entropy: float, z: float) -> Routed:
        counts = [load, *[(EXPERTS - load) / (EXPERTS - 1)] * (EXPERTS - 1)]
        return Routed(np.array([[*counts, *counts, z**2, entropy, 0.0, 1.0]]), EXPERTS, None)

    up = RoutingSign("expert_load", 0, 0, 5, 9, 1.0, 3.0, 1.5)
    assert up.is_repeated(routed(2.1, 1, 1)) and not up.is_repeated(routed(1.9, 1, 1))
    down = RoutingSign("router_entropy", 0, None, 5, 9, 2.0, 1.0, 1.5)
    assert down.is_repeated(routed(1, 1.4, 9)) is True and not down.is_repeated(routed(1, 1.6, 0))
    larger = RoutingSign("router_logits", 0, None, 5, 9, 1.0, 9.0, 1.5)
    assert larger.is_repeated(routed(1, 1, 6.0)) and not larger.is_repeated(routed(1, 9, 4.0))


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def watch_of(start: int = 0) -> tuple[RoutingWatch, list[Any], Any]:
    config = RunConfig.model_validate(
        {
            "model": {"experts": {"count": EXPERTS, "top_k": TOP_K, "bias_rate": RATE}},
            "stability": {"trends": {"start": start}},
        }
    )
    told = list[Any]()
    engine: Any = SimpleNamespace(routing=SimpleNamespace(bias=torch.zeros(LAYERS, EXPERTS), newest=None))
    log: Any = SimpleNamespace(emit_event=lambda event, say: told.append(event))
    return RoutingWatch(config, engine, log), told, engine


def run_watch(watch: RoutingWatch, routers: Routers, engine: Any, first: int, last: int, fault: int) -> None:
    for step in range(first, last + 1):
        if step == fault:
            crowd(routers)
        routed = routers.route(step)
        engine.routing.bias = torch.from_numpy(routers.bias)
        measured: Any = SimpleNamespace(choices=torch.from_numpy(routed.choices))
        watch.after_update(measured, step, 1e-3)


@pytest.mark.usefixtures("alone")
def test_a_run_is_told_once_and_a_rewind_forgets() -> None:
    watch, told, engine = watch_of()
    routers = Routers(2)
    run_watch(watch, routers, engine, 1, AT - 1, 0)
    saved = watch.state_dict()
    run_watch(watch, routers, engine, AT, AT + 7, AT)
    assert watch.newest is not None and watch.newest.where == "blocks.1.mlp.experts.3"
    (event,) = told
    assert (event.what, event.signal, event.step) == ("warned", "expert_load", AT + 7)
    assert "blocks.1.mlp.experts.3" in event.text and event.remedy and watch.standing
    watch.accept_sign()
    pause = watch.state.pause.end
    assert pause > AT + 7
    run_watch(watch, routers, engine, AT + 8, AT + 9, 0)
    assert watch.newest is None and len(told) == 1
    watch.rewound(AT - 1, saved)
    assert not watch.standing and watch.newest is None and watch.state.pause.end == pause
    assert watch.state.updates == AT - 1


@pytest.mark.usefixtures("alone")
def test_the_start_of_a_run_is_not_judged() -> None:
    watch, told, engine = watch_of(start=AT + 60)
    run_watch(watch, Routers(2), engine, 1, AT + 50, AT)
    assert not told and watch.state.updates == AT + 50
