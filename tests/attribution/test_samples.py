"""The running test of batches: what it notices, what it lets pass, and that it goes on from its state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megastable.attribution.sample_history import CorpusState, SampleState, SampleTest, WatchState
from megastable.config.stability import SampleConfig
from tests.attribution.mixtures import HEALTHY, NAMES, Mixture, alarms, normal, steps, student, trickle
from tests.tiers import examples

TEXT = Mixture(student(4))


@pytest.mark.quick("three corpora*", "normal")
@pytest.mark.parametrize("name", HEALTHY)
def test_sample_test_raises_nothing_of_healthy_text(name: str) -> None:
    assert list(alarms(HEALTHY[name], 1500, seed=5)) == []


@pytest.mark.parametrize("seed", range(3))
def test_sample_test_notices_steps_that_are_all_higher_and_gradients_that_add_up(seed: int) -> None:
    found = list(alarms(Mixture(normal), 420, seed, trickle(16, 1.0, 400, 3)))
    assert found and 400 <= found[0][0] <= 403 and 398 <= found[0][-1] <= 402
    ((step, onset),) = by_norm(seed, {400: 2.5, 401: 2.8, 402: 2.0})
    assert step <= 402 and 398 <= onset <= 400
    # A single one, however large, and a level that is up by a fifth, are none.
    assert by_norm(seed, {400: 1e3}) == by_norm(seed, dict.fromkeys(range(390, 420), 1.2)) == []


def by_norm(seed: int, factors: dict[int, float]) -> list[tuple[int, int]]:
    """(step, onset) of each alarm. factors: of the gradient norm, which scatters by a tenth, at some steps."""
    test, random, found = SampleTest(SampleConfig()), np.random.default_rng(seed + 1), list[tuple[int, int]]()
    for step, (losses, corpora) in enumerate(steps(Mixture(normal), 420, seed), start=1):
        norm = factors.get(step, 1.0) * float(np.exp(0.1 * random.standard_normal()))
        alarm = test.observe_batch(step, losses, corpora, NAMES, norm=norm)
        if alarm is not None:
            assert "gradient norms" in alarm.reason
            found.append((step, alarm.onset))
    return found


def test_sample_test_learns_nothing_of_refused_steps_and_numbers_that_are_none() -> None:
    test = SampleTest(SampleConfig())
    for norm in (1.0, float("inf"), float("nan"), 0.0, 2.0):
        test.observe_batch(1, np.ones(16), np.zeros(16, np.int64), NAMES, norm=norm)
    test.observe_batch(1, np.ones(16), np.zeros(16, np.int64), NAMES, applied=False, norm=9.0)
    assert test.state.norms == [0.0, np.log(2.0)]
    test = SampleTest(SampleConfig())
    for step, (losses, corpora) in enumerate(steps(TEXT, 200, seed=0), start=1):
        test.observe_batch(step, losses, corpora, NAMES)
    before = test.state
    test.observe_batch(201, losses + 9, corpora, NAMES, applied=False)
    assert test.state.corpora == before.corpora and test.state.means == before.means
    losses[3] = np.nan
    assert (
        test.observe_batch(202, losses, corpora, NAMES) is None
    )  # clipped, one sample of sixteen raises nothing
    assert np.isfinite([x for c in test.state.corpora.values() for x in c.losses]).all()


@settings(max_examples=examples(10), deadline=None)
@given(cut=st.integers(1, 149), seed=st.integers(0, 5))
def test_sample_test_goes_on_from_its_state(cut: int, seed: int) -> None:
    one, other = SampleTest(SampleConfig()), SampleTest(SampleConfig())
    for step, (losses, corpora) in enumerate(steps(TEXT, 150, seed), start=1):
        if step == cut:
            kept = other.state
            other = SampleTest(SampleConfig(), SampleState.model_validate_json(kept.model_dump_json()))
            assert other.state == kept
        first, second = (test.observe_batch(step, losses, corpora, NAMES) for test in (one, other))
        assert first == second
    assert one.state == other.state


@pytest.mark.parametrize(("step", "judged"), [(256, False), (257, True)])
def test_sample_test_does_not_judge_a_rare_corpus_before_it_is_known(step: int, judged: bool) -> None:
    test, random, corpora = SampleTest(SampleConfig()), np.random.default_rng(0), np.arange(16) // 15
    for number in range(1, step):
        losses = 3 + 4 * corpora + 0.5 * random.standard_normal(16)
        assert test.observe_batch(number, losses, corpora, NAMES) is None
    other = SampleTest(SampleConfig(), test.state)
    test.observe_batch(step, losses, corpora, NAMES)
    other.observe_batch(step, losses + 100 * corpora, corpora, NAMES)
    assert (other.state.means != test.state.means) == judged


def test_watch_state_is_packed_exactly_and_refused_if_damaged() -> None:
    losses = np.random.default_rng(0).normal(3.0, 0.5, 1000)
    losses[:4] = [np.nan, np.inf, -0.0, 5e-324]
    written = CorpusState(losses=losses).model_dump_json()
    back = CorpusState.model_validate_json(written).losses
    assert back.tobytes() == losses.tobytes() and back.flags.writeable
    assert len(written) < 0.6 * len(repr(losses.tolist()))
    strange: list[Any] = [
        {"test": {"corpora": {"code": {"losses": text}}}} for text in ("AAAA", "no base64!")
    ]
    for damaged in [*strange, {"test": {"batch": []}}, {"other": 1}, {"test": 3}, {"waiting": [3]}, "text"]:
        with pytest.raises(ValidationError):
            WatchState.model_validate(damaged)
