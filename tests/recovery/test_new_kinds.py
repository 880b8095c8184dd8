"""Looks for new kinds of text in what was trained on, on texts and losses that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megastable.config.stability import SampleConfig
from megastable.data.skips import Skips
from megastable.recovery import new_kinds
from megastable.recovery.sample_replay import Trained
from megastable.stability import novelty
from megastable.stability.sample_history import Waiting

Int64s = npt.NDArray[np.int64]


class Texts:
    """Of 400 words; `other` positions of 50 others. hard: whether these are two deviations harder. corpora: of a sample
    by its position. read: positions whose tokens were asked for."""

    def __init__(self, batch: int, steps: int, other: Int64s, hard: bool = True, of: int = 1) -> None:
        self.batch, self.other, self.of = batch, other, of
        self.loader, self.read = SimpleNamespace(skips=Skips.of([])), list[int]()
        self.pools: new_kinds.Pools = {}
        random = np.random.default_rng(3)
        self.losses = random.normal(4, 0.5, batch * steps)
        if hard:
            self.losses[other] = random.normal(5, 0.2, other.size)
        self.steps = np.arange(batch * steps).reshape(steps, batch)

    def corpora(self, positions: Int64s) -> Int64s:
        return positions % self.of

    def read_tokens(self, positions: Int64s) -> Int64s:
        self.read += positions.tolist()
        rows = [np.random.default_rng(p).integers(400, size=65) for p in positions.tolist()]
        theirs = [np.random.default_rng(p).integers(400, 450, 65) for p in positions.tolist()]
        return np.where(np.isin(positions, self.other)[:, None], theirs, rows)

    def look(self, applied: bool = True, until: int | None = None, **config: float) -> list[Waiting]:
        """applied: whether the last twenty updates were. until: the step of the look; the last."""
        trained = [
            Trained(step, at, self.losses[at], applied or step <= len(self.steps) - 20)
            for step, at in enumerate(self.steps[:until], 1)
        ]
        lab: Any = self
        return new_kinds.look(trained, lab, SampleConfig.model_validate(config), self.pools)


def one_of_each(batch: int, begin: int, end: int) -> Int64s:
    """A sample of each step from the step `begin` on."""
    return np.array([batch * step + step * 7 % batch for step in range(begin - 1, end)])


def test_a_trickle_of_a_hard_kind_is_a_case() -> None:
    texts = Texts(16, 112, one_of_each(16, 101, 112))
    (case,) = texts.look()
    assert case.kind == "kind" and case.last == 112 and 101 - new_kinds.EARLIER <= case.first <= 101
    assert len(case.positions) >= 10 and np.isin(case.positions, texts.other).mean() > 0.8
    assert case.losses == texts.losses[case.positions].tolist()


def test_how_rare_a_false_case_is_to_be_is_a_setting() -> None:
    def texts() -> Texts:
        return Texts(16, 112, one_of_each(16, 101, 112))

    (case,) = texts().look(false_alarms=1.0)
    least = 1e4 / novelty.PERIOD / float(case.reason.split("once in ")[1].split(" looks")[0])
    assert texts().look(false_alarms=1.1 * least) and not texts().look(false_alarms=0.9 * least)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_new_is_no_case(seed: int) -> None:
    """The kind was there all the time."""
    other = np.flatnonzero(np.random.default_rng(seed).random(16 * 160) < 1 / 16)
    assert not Texts(16, 160, other).look()
    assert not Texts(16, 160, np.empty(0, np.int64)).look()


def test_an_easy_kind_is_no_case() -> None:
    assert not Texts(16, 112, one_of_each(16, 101, 112), hard=False).look()


def test_who_is_left_out_already_is_none() -> None:
    texts = Texts(16, 112, one_of_each(16, 101, 112))
    texts.loader.skips = Skips.of_numbers(texts.other)
    assert not texts.look() and not set(texts.read) & set(texts.other.tolist())


def test_refused_steps_are_not_looked_at() -> None:
    assert not Texts(16, 112, one_of_each(16, 101, 112)).look(applied=False)


def test_of_a_corpus_of_which_little_is_known_nothing_is_said() -> None:
    texts = Texts(16, 31, one_of_each(16, 20, 31))
    assert not texts.look() and not texts.read
    assert not Texts(16, 0, np.empty(0, np.int64)).look()


def test_corpora_are_looked_at_each_by_itself() -> None:
    other = 32 * np.arange(100, 124) + 3  # of the second of two corpora
    texts = Texts(32, 124, other, of=2)
    (case,) = texts.look()
    assert np.isin(case.positions, other).mean() > 0.8 and all(p % 2 for p in case.positions)


def test_no_more_are_read_of_a_step_or_of_all_than_are_needed() -> None:
    other = np.concatenate([1024 * step + np.arange(3, 1024, 16) for step in range(85, 90)])
    texts = Texts(1024, 90, other)
    (case,) = texts.look()
    assert case.last == 90 and 86 - new_kinds.EARLIER <= case.first <= 86
    assert len(texts.read) == novelty.POOL
    assert max(np.bincount(np.array(texts.read) // 1024)) == novelty.OF_STEP


def test_the_next_look_reads_what_came_since() -> None:
    texts = Texts(64, 124, np.empty(0, np.int64))
    texts.look(until=120)
    before = {*texts.read}
    assert len(texts.read) == len(before) == novelty.POOL
    texts.read.clear()
    texts.look(until=124)
    # One or the other is hard only now, among its contemporaries.
    assert 0 < len(texts.read) <= 5 * novelty.OF_STEP and not before & {*texts.read}
    texts.read.clear()
    texts.look(until=120)
    assert texts.read, "what fell out of the pool is forgotten"
