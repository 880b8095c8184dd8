"""The search for the samples of a trickle, on texts and losses that are made up, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megastable.config.stability import StabilityConfig
from megastable.data.skips import Skips
from megastable.recovery.sample_replay import Laboratory
from megastable.recovery.trickle import Trickle
from megastable.stability.actions import Cause
from megastable.stability.attribution import Conclusion
from megastable.stability.sample_history import Waiting
from megastable.stability.signals import Verdict
from megastable.stability.suspects import Seen

Int64s = npt.NDArray[np.int64]
BATCH, FIRST, NOW = 16, 2000, 2096  # six steps since the onset; what comes before FIRST is harmless


class Texts:
    """Any of 400 tokens, and a loss of 4 that scatters by 0.5 but for the positions of `lifted`; those of `other` are
    of 50 other tokens. tokens_read: positions whose tokens were asked for."""

    def __init__(self, other: set[int], lifted: dict[int, float]) -> None:
        self.batch, self.other, self.lifted = BATCH, np.array(sorted(other)), lifted

    def corpora(self, positions: Int64s) -> Int64s:
        return np.zeros(positions.size, np.int64)

    def losses(self, positions: Int64s) -> npt.NDArray[np.float64]:
        usual = np.random.default_rng(1).normal(4, 0.5, 10_000)
        return np.array([4 + self.lifted[p] if p in self.lifted else usual[p] for p in positions.tolist()])

    def tokens(self, positions: Int64s) -> Int64s:
        if not positions.size:
            return np.empty((0, 65), np.int64)
        rows = [np.random.default_rng(p).integers(0, 400, 65) for p in positions.tolist()]
        theirs = [np.random.default_rng(p).integers(400, 450, 65) for p in positions.tolist()]
        is_other = np.isin(positions, self.other)
        return np.where(is_other[:, None], theirs, rows)

    samples = Laboratory.samples

    def conclude(self, accused: list[int] | None = None, budget: int = 32) -> tuple[Conclusion, int]:
        """accused: of being a new kind. budget: batches ahead."""
        met, usual = np.arange(FIRST, NOW), np.arange(FIRST)
        kind: Any = "trickle" if accused is None else "kind"
        case = Waiting(
            kind=kind, first=1, last=6, verdict=Verdict.TRICKLE, reason="more of them", positions=accused or [],
            losses=self.losses(np.array(accused or [], np.int64)).tolist(),
        )  # fmt: skip
        lab: Any = self
        kept: Any = Skips.of([])
        seen, before = (Seen(p, self.losses(p), self.corpora(p)) for p in (met, usual))
        search = Trickle(lab, StabilityConfig(), seen, before, case, NOW, kept)
        return search.conclude(budget), search.looked


def every(period: int, end: int) -> list[int]:
    return list(range(FIRST + 3, end, period))


@pytest.mark.parametrize("lift", [1.0, 1.75])
def test_a_kind_that_is_moderately_hard_is_named_for_what_its_worst_ones_have_in_common(lift: float) -> None:
    """One of eight; four are far out by their losses, the others by less than any bound for a single one."""
    bad = every(8, NOW + 160)
    lifted = {p: 3.5 if at < 4 else lift for at, p in enumerate(bad)}
    found, looked = Texts(set(bad), lifted).conclude()
    assert found.cause is Cause.DATA and found.guilty == bad
    assert 10 < looked <= 10 + 6, "until no more come"


def test_harmless_samples_of_the_kind_of_spoilt_ones_are_let_alone() -> None:
    """Another dialect, one of eight, ordinary losses: of its samples four are spoilt."""
    kind = every(8, NOW + 160)
    lifted = {
        p: 3.5 if at < 4 else float(np.random.default_rng(p).normal(0.1, 0.5)) for at, p in enumerate(kind)
    }
    found, _ = Texts(set(kind), lifted).conclude()
    assert found.cause is Cause.DATA and found.guilty == kind[:4]


def test_one_spoilt_sample_says_nothing_of_its_kind() -> None:
    kind = every(8, NOW + 160)
    found, _ = Texts(set(kind), {p: 4.0 if at == 0 else 1.0 for at, p in enumerate(kind)}).conclude()
    assert found.guilty == kind[:1]


def test_what_is_all_over_the_samples_ahead_is_no_trickle() -> None:
    kind = [*every(8, NOW), *range(NOW, NOW + 1000)]
    found, _ = Texts(set(kind), {p: 3.5 if at < 4 else 1.0 for at, p in enumerate(kind)}).conclude()
    assert found.guilty == kind[:4]
    found, _ = Texts(set(kind), dict.fromkeys(kind, 3.5)).conclude()
    assert found.cause is Cause.STATE and not found.guilty


def moderate(positions: list[int], by: float) -> dict[int, float]:
    """By so much harder than others, whose deviation is 0.5, and as scattered."""
    return {p: float(np.random.default_rng(p).normal(by, 0.5)) for p in positions}


@pytest.mark.quick("1.25-0")
@pytest.mark.parametrize("ahead", [0, 10])
@pytest.mark.parametrize("by", [0.75, 1.25])
def test_a_new_kind_is_named_where_it_is_worse_and_nobody_else(by: float, ahead: int) -> None:
    """None is far out by itself; those that are easier than most are let alone. A stranger is accused as well."""
    bad = every(8, NOW + 16 * ahead)
    texts = Texts(set(bad), moderate(bad, by))
    found, looked = texts.conclude([*every(8, NOW)[:8], FIRST + 40])
    assert found.cause is Cause.DATA and set(found.guilty) <= set(bad)
    assert texts.losses(np.array(found.guilty)).min() > 3.8, "who is easier than usual is let alone"
    assert len(found.guilty) >= 0.8 * len(bad) and ahead + 4 <= looked <= ahead + 6


def test_a_new_kind_that_is_no_worse_than_others_is_let_alone() -> None:
    """The hardest of it were looked at; the rest of it is as easy as anybody."""
    kind = every(4, NOW + 160)
    texts = Texts(set(kind), moderate(kind, 0.0))
    met = np.array(every(4, NOW))
    found, _ = texts.conclude(met[texts.losses(met) > 4.2].tolist())
    assert found.cause is Cause.STATE and not found.guilty and "no worse" in found.reason


def test_a_few_of_a_new_kind_are_no_crowd() -> None:
    kind = every(24, NOW)
    found, looked = Texts(set(kind), moderate(kind, 1.5)).conclude(kind)
    assert len(kind) == 4 and found.cause is Cause.STATE and not found.guilty and not looked


def test_a_new_kind_that_comes_to_stay_is_let_alone() -> None:
    kind = [*every(8, NOW), *(p for p in range(NOW, NOW + 1000) if p % 3)]
    found, _ = Texts(set(kind), moderate(kind, 1.0)).conclude(every(8, NOW))
    assert found.cause is Cause.STATE and not found.guilty


def test_who_is_far_out_ahead_but_of_another_kind_is_not_named_with_it() -> None:
    bad, other = every(8, NOW), list(range(NOW + 5, NOW + 60, 9))
    found, _ = Texts(set(bad), moderate(bad, 1.0) | dict.fromkeys(other, 6.0)).conclude(bad)
    assert found.guilty and not set(found.guilty) & set(other)


def test_a_kind_that_was_there_before_is_nobody() -> None:
    kind = [*range(3, FIRST, 8), *every(8, NOW + 160)]
    found, _ = Texts(set(kind), moderate(kind, 1.0)).conclude(every(8, NOW))
    assert found.cause is Cause.STATE and not found.guilty


@pytest.mark.quick("1")
@pytest.mark.parametrize("budget", [32, 1, 0])
def test_a_new_kind_that_has_come_to_stay_convicts_nobody_whatever_is_left_for_looking_ahead(
    budget: int,
) -> None:
    kind = [*every(8, NOW), *(p for p in range(NOW, NOW + 1000) if p % 3)]
    found, looked = Texts(set(kind), moderate(kind, 1.0)).conclude(every(8, NOW), budget)
    assert found.guilty == [] and looked <= budget


def test_a_new_kind_that_is_hardly_harder_convicts_nobody() -> None:
    bad = every(8, NOW)
    found, _ = Texts(set(bad), moderate(bad, 0.2)).conclude(bad)
    assert found.guilty == []
