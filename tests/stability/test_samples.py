"""The running test of single samples: what it notices, what it lets pass, and that it goes on from its state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks.mixtures import (
    HEALTHY,
    NAMES,
    Mixture,
    alarms,
    normal,
    scattered,
    steps,
    student,
    trickle,
)
from megastable.config.stability import SampleConfig
from megastable.stability.sample_history import SUMS, CorpusState, SampleState, SampleTest
from megastable.stability.suspects import Seen, different, easy, repetitive, still_bad, suspects
from tests.tiers import examples

TEXT = Mixture(student(4))


@pytest.mark.quick("three corpora*", "normal")
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_text_raises_nothing(name: str) -> None:
    assert list(alarms(HEALTHY[name], 1500, seed=5)) == []


@pytest.mark.quick("*-0")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("of_each", "within"), [(1, 15), (4, 3)])
def test_a_trickle_is_noticed(of_each: int, within: int, seed: int) -> None:
    found = list(alarms(TEXT, 420, seed, trickle(of_each, 6.0, 400, 20)))
    (step, kind, onset), *_ = found
    assert kind == "trickle" and 400 <= step < 400 + within and 390 <= onset <= step


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(3))
def test_bad_samples_scattered_among_the_good_are_noticed(seed: int) -> None:
    found = list(alarms(Mixture(normal), 700, seed, scattered(0.01, 6.0, 400)))
    assert found and found[0][1] == "trickle" and 400 <= found[0][0] < 560


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(4))
def test_a_rate_that_has_risen_is_not_soon_taken_for_usual(seed: int) -> None:
    """One in a hundred, in tails that reach as far now and then."""
    found = list(alarms(TEXT, 700, seed, scattered(0.01, 6.0, 400)))
    assert found and found[0][1] == "trickle" and 400 <= found[0][0] < 560


def test_who_is_convicted_is_no_measure_of_what_is_usual() -> None:
    one, other = SampleTest(SampleConfig()), SampleTest(SampleConfig())
    bad = list[int]()
    for step, (losses, corpora) in enumerate(steps(Mixture(normal), 200, seed=0), start=1):
        positions, spoilt = np.arange(16) + 16 * step, losses.copy()
        if step in (150, 152):
            spoilt[3] += 6.0
            bad.append(16 * step + 3)
        one.observe(step, positions, losses, corpora, NAMES)
        other.observe(step, positions, spoilt, corpora, NAMES)
        if step == 155:
            assert [far.position for far in other.far(150) if far.loss > 6] == bad
            other.convict(bad)
    *_, fourth, fifth = other.state.corpora["code"].counts
    assert one.state.corpora["code"].counts[-2:] == [fourth, fifth]


def test_what_another_version_left_behind_is_not_taken_for_its_own() -> None:
    old = {"trickle": [{"height": 0.0, "onset": 0}] * 4}
    with pytest.raises(ValidationError):
        SampleState.model_validate(old)


@pytest.mark.parametrize("seed", range(3))
def test_three_steps_that_are_all_higher_are_noticed(seed: int) -> None:
    found = list(alarms(Mixture(normal), 420, seed, trickle(16, 1.0, 400, 3)))
    assert found and found[0][1] == "batch" and 400 <= found[0][0] <= 403


def by_norm(seed: int, factors: dict[int, float], count: int = 420) -> list[tuple[int, int]]:
    """(step, onset) of each alarm. factors: of the gradient norm, which scatters by a tenth, at some steps."""
    test, random, found = SampleTest(SampleConfig()), np.random.default_rng(seed + 1), list[tuple[int, int]]()
    for step, (losses, corpora) in enumerate(steps(Mixture(normal), count, seed), start=1):
        norm = factors.get(step, 1.0) * float(np.exp(0.1 * random.standard_normal()))
        _, alarm = test.observe(step, np.arange(16) + 16 * step, losses, corpora, NAMES, norm=norm)
        if alarm is not None:
            assert alarm.kind == "batch" and "gradient norms" in alarm.reason
            found.append((step, alarm.onset))
    return found


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_add_up_are_noticed_though_no_loss_is(seed: int) -> None:
    ((step, onset),) = by_norm(seed, {400: 2.5, 401: 2.8, 402: 2.0})
    assert step <= 402 and 398 <= onset <= 400
    # A single one, however large, and a level that is up by a fifth, are none.
    assert by_norm(seed, {400: 1e3}) == by_norm(seed, dict.fromkeys(range(390, 420), 1.2)) == []


def test_a_gradient_norm_that_is_no_number_leaves_no_trace() -> None:
    test = SampleTest(SampleConfig())
    for norm in (1.0, float("inf"), float("nan"), 0.0, 2.0):
        test.observe(1, np.arange(16), np.ones(16), np.zeros(16, np.int64), NAMES, norm=norm)
    test.observe(1, np.arange(16), np.ones(16), np.zeros(16, np.int64), NAMES, applied=False, norm=9.0)
    assert test.state.norms == [0.0, np.log(2.0)]


def test_a_rare_corpus_is_not_judged_before_it_is_known() -> None:
    test, random = SampleTest(SampleConfig()), np.random.default_rng(0)
    for step in range(1, 300):
        losses = 3 + 0.5 * random.standard_normal(16)
        corpora = np.zeros(16, np.int64)
        corpora[:1] = 2
        losses[:1] += 4.0 + 3.0 * (step > 200)
        scored, alarm = test.observe(
            step, np.arange(losses.size) + losses.size * step, losses, corpora, NAMES
        )
        assert alarm is None and np.isnan(scored.z[0]) == (step <= 256)


def test_what_is_not_finite_is_far_out_and_leaves_no_trace() -> None:
    test = SampleTest(SampleConfig())
    for step, (losses, corpora) in enumerate(steps(TEXT, 200, seed=0), start=1):
        test.observe(step, np.arange(losses.size) + losses.size * step, losses, corpora, NAMES)
    losses[3] = np.nan
    scored, _ = test.observe(201, np.arange(16), losses, corpora, NAMES)
    assert scored.z[3] > 1e5 and np.isfinite(scored.z).all() and scored.ordinary
    assert np.isfinite([x for c in test.state.corpora.values() for x in c.losses]).all()


@settings(max_examples=examples(10), deadline=None)
@given(cut=st.integers(1, 149), seed=st.integers(0, 5))
def test_it_goes_on_from_its_state(cut: int, seed: int) -> None:
    one, other = SampleTest(SampleConfig()), SampleTest(SampleConfig())
    for step, (losses, corpora) in enumerate(steps(TEXT, 150, seed), start=1):
        if step == cut:
            kept = other.state
            other = SampleTest(SampleConfig(), SampleState.model_validate_json(kept.model_dump_json()))
            assert other.state == kept
        first, second = (
            test.observe(step, np.arange(losses.size) + losses.size * step, losses, corpora, NAMES)
            for test in (one, other)
        )
        assert np.array_equal(first[0].z, second[0].z, equal_nan=True) and first[1] == second[1]
    assert one.state == other.state


def test_a_refused_step_is_no_measure_of_what_is_usual() -> None:
    test = SampleTest(SampleConfig())
    for step, (losses, corpora) in enumerate(steps(TEXT, 200, seed=0), start=1):
        test.observe(step, np.arange(losses.size) + losses.size * step, losses, corpora, NAMES)
    before = test.state
    test.observe(201, np.arange(16), losses + 9, corpora, NAMES, applied=False)
    assert test.state.corpora == before.corpora and test.state.means == before.means


def test_only_who_was_bad_and_still_is_gets_convicted() -> None:
    random = np.random.default_rng(0)
    usual = Seen(np.arange(1000), 3 + 0.4 * random.standard_normal(1000), np.zeros(1000, np.int64))
    losses = 3 + 0.4 * random.standard_normal(80)
    losses[[5, 20, 40, 60]] += 5.0
    met = Seen(np.arange(1000, 1080), losses, np.zeros(80, np.int64))
    chosen = suspects(met, usual, 6.0)
    assert sorted(chosen.tolist()) == [5, 20, 40, 60]
    again = met.of(np.array([5, 20, 40, 60]))
    again = again._replace(losses=np.array([7.5, 3.1, 6.0, 2.9]))
    assert still_bad(again, usual, 6.0).tolist() == [0, 2]


def test_text_that_repeats_itself_has_few_different_tokens() -> None:
    random = np.random.default_rng(0)
    text = random.zipf(1.3, (200, 128)) % 1000
    sentence = np.tile(text[0, :12], (3, 11))[:, :128]
    assert different(np.array([[1, 2, 1, 3], [7, 7, 7, 7]])).tolist() == [3, 1]
    assert repetitive(sentence, text).all() and not repetitive(text, text).sum() > 2


def test_only_what_is_far_below_by_half_is_easy() -> None:
    random = np.random.default_rng(0)
    usual = Seen(np.arange(600), 3 + 0.4 * random.standard_normal(600), np.zeros(600, np.int64))
    losses = 3 + 0.4 * random.standard_normal(32)
    met = Seen(np.arange(600, 632), losses, np.zeros(32, np.int64))
    few, many = losses.copy(), losses.copy()
    few[:12], many[:18] = 0.3, 0.3
    assert not easy(met, usual, 6.0) and not easy(met._replace(losses=losses - 0.8), usual, 6.0)
    assert not easy(met._replace(losses=few), usual, 6.0) and easy(met._replace(losses=many), usual, 6.0)


def test_a_trickle_that_is_told_does_not_hide_that_all_are_higher() -> None:
    test = SampleTest(SampleConfig())
    first = test._add(7, np.full(SUMS, 50.0), 6.0)
    second = test._add(8, np.zeros(SUMS), float("nan"))
    assert first is not None and first.kind == "trickle"
    assert second is not None and second.kind == "batch" and second.onset == 7


def test_the_scores_that_wait_are_counted_once() -> None:
    one = np.array([1, 0, 0, 0, 0, 0])
    known = CorpusState(counts=[12_000.0, *[0.0] * 5], newest=[(1, 4, 0, 0, 1, 0, 0), (2, 1, 0, 0, 0, 0, 0)])
    known.take_out(1, 3)
    for step in range(4, 2000):
        known.count(step, one)
    assert sum(sum(row[1:]) for row in known.newest) == 1024 and sum(known.counts) < 12_000
    assert CorpusState.model_validate_json(known.model_dump_json()) == known != CorpusState()


def test_what_is_kept_is_packed_exactly_and_an_older_list_is_read() -> None:
    losses = np.random.default_rng(0).normal(3.0, 0.5, 1000)
    losses[:4] = [np.nan, np.inf, -0.0, 5e-324]
    written = CorpusState(losses=losses).model_dump_json()
    back = CorpusState.model_validate_json(written).losses
    assert back.tobytes() == losses.tobytes() and back.flags.writeable
    assert len(written) < 0.6 * len(repr(losses.tolist()))
    assert CorpusState.model_validate({"losses": [1.5, 2.5]}).losses.tolist() == [1.5, 2.5]
    for damaged in ("AAAA", "no base64!"):
        with pytest.raises(ValidationError):
            CorpusState.model_validate({"losses": damaged})
