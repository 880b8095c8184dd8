"""Finds how far a bad region extends beyond the steps of an incident, ahead and behind. Collective.

Measures with sample_replay.py; stability/ decides how far the region extends (region.py), and which samples are guilty
by likeness alone if there is no time to measure all (likeness.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.stability import groups, region
from megastable.stability.likeness import ENOUGH_ALIKE, GOLDEN, Likeness, separation
from megastable.stability.region import Region, Side
from megastable.stability.scores import Conviction

if TYPE_CHECKING:
    from megastable.recovery.examination import Examination

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

REACH = 1 << 20  # most positions ahead that are searched: if all are bad, it is the state
# Share of bad samples below which no region is searched for; they are individuals.
THINNEST, FEW = 0.125, 3
SOLID_END = 2  # consecutive clean spots that end a region whose batches are all bad
INSIDE = 8  # evenly spread batches inside a region of a crowd, whose gradients must all be extraordinary
LEARNT = 4096  # most bad samples, evenly spread, that likeness is learnt from: the cost is cubic


class ExaminedBatch(NamedTuple):
    """A batch that was measured: positions, z, losses and scores of its samples, [n] each."""

    positions: Int64s
    z: Floats
    losses: Floats
    scores: Floats


def half(positions: Int64s, size: int) -> Bools:
    """Splits samples in two halves; neighbours, perhaps of one text, share one. Multiples of the golden ratio, as a
    plain modulus could put every second or eighth batch entirely in one half."""
    return np.asarray((positions // size).astype(np.uint64) * GOLDEN >> np.uint64(63) == 0)


class Growth:
    """How far the guilty of a window extend, ahead and behind. begin: forward passes of the examination so far; later
    ones count against the budget."""

    def __init__(self, examination: Examination, judged: Conviction, guilty: Int64s, begin: int) -> None:
        assert judged.score is not None
        self.of, self.score, self.bar = examination, judged.score, judged.bar
        self.accused = judged.guilty
        e, self.size = examination, examination.size
        self.looked: dict[int, ExaminedBatch] = {}
        self.pulls: dict[int, bool] = {}  # whether a batch ahead has an extraordinary gradient
        self.follows = False  # whether such batches belong to the region
        self.tells: tuple[Likeness, float] | None = None  # with the likeness above which a sample is bad
        self.measured: dict[int, tuple[float, float]] = {}
        self.budget = region.FORWARD * e.config.region
        self.begin = begin
        self.corpora = np.unique(e.lab.corpora(guilty))
        self._cursor = int(max(t.positions.max() for t in e.steps)) + 1
        self._line = np.empty(0, np.int64)
        mine = e.positions[np.isin(e.corpora, self.corpora)]
        between = np.count_nonzero((mine >= guilty.min()) & (mine <= guilty.max()))
        share = guilty.size / max(int(between), self.size)
        self.share = min(1.0, max(THINNEST if guilty.size >= FEW else 2 * THINNEST, share))
        self.ahead: Side = region.grow(self._ahead, self.size, self.share, self._left)
        if self.ahead.found and self.ahead.reach and not self.ahead.clean:
            # No end was found: of rare corpora too little is within reach.
            self.ahead = replace(self.ahead, found=False, endless=True)
        self.ahead = self._followed()
        self.looked_behind: dict[int, ExaminedBatch] = {}
        self.back: Side = region.grow(self._behind, self.size, self.share, len(e.behind))

    @property
    def _left(self) -> int:
        """Forward passes left."""
        return max(0, self.budget - (self.of.forwards - self.begin))

    def _ahead(self, number: int) -> int | None:
        """Number of bad samples in a batch ahead, of the guilty's corpora."""
        positions = self._batch(number)
        if positions.size < self.size:
            return None
        if number not in self.looked:
            self._measure(number, positions)
        bad = int(self._bad(self.looked[number]).sum())
        return self.size if self.follows and 2 * bad < self.size and self._pulling(number) else bad

    def _pulling(self, number: int) -> bool:
        """Whether the gradient of a batch ahead is extraordinary, as one in the window is."""
        positions = self._batch(number)
        if number not in self.pulls:
            self.pulls[number] = positions.size == self.size and self.of.norm(positions) > self.of.pull
        return self.pulls[number]

    def _followed(self) -> Side:
        """How far the region extends by batch gradients, if beyond its apparent end come samples that are bad together
        but unlike those of the window."""
        if self.ahead.endless or not math.isfinite(self.of.pull) or not self._pulling(self.ahead.reach + 1):
            return self.ahead
        self.follows = True
        budget = self._left // (region.FORWARD + 1)
        # Batches of further epochs have the bad samples among others, too.
        found = region.grow(self._ahead, self.size, 1.0, budget, enough=SOLID_END)
        self.follows = found.found and not found.endless and bool(found.clean)
        return found if self.follows else self.ahead

    def _batch(self, number: int) -> Int64s:
        wanted = (number + 1) * self.size
        while self._line.size < wanted and self._cursor - int(self.of.positions.max()) < REACH:
            more, self._cursor = self.of.selection.next_kept(self._cursor, max(wanted, 4 * self.size))
            more = more[np.isin(self.of.lab.corpora(more), self.corpora)]
            self._line = np.concatenate([self._line, more])
        return self._line[wanted - self.size : wanted]

    def _measure(self, number: int, positions: Int64s) -> None:
        losses = self.of._losses(positions)
        z = self.of._z(positions, losses) - self.of.shared
        self.looked[number] = ExaminedBatch(
            positions, z, losses, self.score.of(self.of.lab.samples(positions, z))
        )

    def _behind(self, number: int) -> int | None:
        """The same before the window, from recorded losses: costs no model time."""
        if number >= len(self.of.behind):
            return None
        step, known = self.of.behind[number], self.of.known
        z = self.of._z(step.positions, step.losses)
        if number >= self.of.between:  # compared with samples of its own time
            order = np.argsort(known.positions, kind="stable")
            at = np.searchsorted(known.positions, step.positions, sorter=order)
            at = order[np.minimum(at, order.size - 1)] if order.size else at
            same = known.positions[at] == step.positions if order.size else np.zeros(z.shape, dtype=bool)
            z = np.where(same, self.of.known_z[at] if order.size else z, z)
        found = self.score.of(self.of.lab.samples(step.positions, z))
        self.looked_behind[number] = ExaminedBatch(step.positions, z, step.losses, found)
        return int(self._bad(self.looked_behind[number]).sum())

    def _clean(self) -> list[ExaminedBatch]:
        return [batch for number, batch in self.looked.items() if number in self.ahead.clean]

    def shift(self) -> float:
        """How far clean samples ahead lie above what was recorded, in z, if significantly: then the state is bad. They
        are the better reference: measured on the same state, and none was trained on."""
        batches = self._clean()
        if not batches:
            return 0.0
        z = np.concatenate([batch.z for batch in batches])
        z = z[np.isfinite(z)]
        if z.size < groups.ENOUGH // 2:
            return 0.0
        middle, width = groups.robust(z)
        error = groups.shared_error(self.of.usual)
        noise = math.hypot(error, groups.MEDIAN_ERROR * width / math.sqrt(z.size))
        return middle if middle > 3 * noise else 0.0

    def level(self) -> float:
        """The z of the farthest samples ahead, if all are bad."""
        if not self.ahead.endless:
            return 0.0
        return float(np.nanmedian(np.concatenate([self.looked[n].z for n in sorted(self.looked)[-4:]])))

    def named(self, guilty: Int64s) -> tuple[Int64s, Int64s, Region]:
        """All guilty samples, the inferred ones, and the region.

        Where likeness separates the kinds it decides, also about measured samples, as losses overlap with those of
        harmless ones. Then only as many are measured as it needs; else as many as the budget allows.
        """
        e, reach = self.of, self.ahead.reach
        before = [b for n, b in self.looked_behind.items() if n < self.back.reach]
        together = self._learn_together(guilty, reach)
        if together:
            reach += 1  # the next batch may hold the last few of the region
        for enough in (ENOUGH_ALIKE, 4 * ENOUGH_ALIKE, math.inf):
            if self.tells is None:
                self._look_inside(reach, enough)
                inside = [*(self.looked[n] for n in sorted(self.looked) if n < reach), *before]
                bad = [b.positions[self._bad(b)] for b in inside]
                self._learn(np.concatenate([guilty[:0], *bad]), guilty, [b.positions for b in inside])
        inside = [*(self.looked[n] for n in sorted(self.looked) if n < reach), *before]
        judged, inferred = inside, np.empty(0, np.int64)
        if self.tells is not None:
            judged = [self._window(), *inside]
            inferred = self._infer([n for n in range(reach) if n not in self.looked])
        named = np.unique(np.concatenate([guilty, *(b.positions[self._bad(b)] for b in judged)]))
        if together:
            named = named[named >= guilty.min()]  # samples found by gradients differ only subtly
        every = np.concatenate([named, inferred])
        for batch in inside:
            for p, loss, z in zip(
                batch.positions.tolist(), batch.losses.tolist(), batch.z.tolist(), strict=True
            ):
                self.measured[p] = loss, z
        steps = (e.forwards - self.begin) / region.FORWARD
        count = (e.forwards - self.begin) * self.size
        found = Region(
            int(every.min()), int(every.max()) + 1, self._how(every, inferred), count, round(steps, 1),
            self.ahead.found, self._probes(),
        )  # fmt: skip
        return named, inferred, found

    def _bad(self, batch: ExaminedBatch) -> Bools:
        if self.tells is None:
            return np.asarray(batch.scores >= self.bar)
        return self._alike(batch.positions)

    def _alike(self, positions: Int64s) -> Bools:
        """Which positions hold samples like the known bad ones."""
        assert self.tells is not None
        likeness, cut = self.tells
        return np.asarray(self._like(positions, likeness) >= cut)

    def _look_inside(self, reach: int, enough: float) -> None:
        """Measure evenly spread batches inside until `enough` bad samples are known or the budget is spent."""
        for number in region.spread(0, reach, reach):
            bad = sum(int(self._bad(b).sum()) for n, b in self.looked.items() if n < reach)
            if bad >= enough or self.of.forwards - self.begin >= self.budget:
                break
            if number not in self.looked:
                self._measure(number, self._batch(number))

    def _window(self) -> ExaminedBatch:
        """The suspects of the window."""
        e = self.of
        z = e._z(e.positions, e.losses) - e.shared
        return ExaminedBatch(
            e.positions, z, e.losses, self.score.of(e.lab.samples(e.positions, z), self.accused)
        )

    def _learn_together(self, guilty: Int64s, reach: int) -> bool:
        """Learn the likeness of a crowd that fills a long region, where every batch has an extraordinary gradient.
        Whether that separates them."""
        if not self.follows or reach * self.size < 4 * ENOUGH_ALIKE:
            return False
        if not all(self._pulling(n) for n in region.spread(0, reach, INSIDE)):
            return False
        spread = region.spread(0, reach, math.ceil(LEARNT / self.size))
        self._learn(np.concatenate([self._batch(n) for n in spread]), guilty)
        return self.tells is not None

    def _learn(self, bad: Int64s, guilty: Int64s, inside: Sequence[Int64s] = ()) -> None:
        """Learn to separate samples like the bad ones from harmless ones, if possible. guilty: more bad ones, of the
        window, where few may be ordinary; inside: measured ones of the region, of both kinds."""
        lab, usual = self.of.lab, [u for c, u in self.of.scale.usual.items() if c in self.corpora]
        both = np.union1d(bad, guilty)
        both = both[sorted(region.spread(0, both.size, LEARNT))]
        if not usual or min(np.bincount(half(both, self.size), minlength=2)) < ENOUGH_ALIKE // 4:
            return
        learnt, kept = (np.concatenate([getattr(u, of).tokens for u in usual]) for of in ("learnt", "kept"))
        found = Likeness(lab.tokens(both), half(both, self.size), learnt)
        # Those beyond the region are of the same time as those inside.
        beyond = [self.looked[n].positions for n in self.ahead.clean[1:]]
        # Both kinds for choosing a cut and for testing it: `separation` tests on every second one.
        harmless = [
            found.of(kept, np.arange(len(kept)) // 2 % 2 == 0),
            *(self._like(p, found) for p in beyond),
        ]
        every = self._like(np.unique(np.concatenate([bad, *inside])), found)
        cut = separation(self._like(bad, found), np.concatenate(harmless), every[np.isfinite(every)])
        self.tells = None if cut is None else (found, cut)

    def _like(self, positions: Int64s, likeness: Likeness) -> Floats:
        """Likeness of samples; -inf for corpora without guilty samples, whose harmless samples it has not seen, and for
        samples with too few known tokens."""
        corpora = self.of.lab.corpora(positions)
        known = self.of.scale.judges(corpora) & np.isin(corpora, self.corpora)
        found = np.full(positions.size, -np.inf)
        found[known] = likeness.of(self.of.lab.tokens(positions[known]), half(positions[known], self.size))
        return found

    def _infer(self, numbers: list[int]) -> Int64s:
        """Guilty samples in unmeasured batches ahead, by likeness to measured ones."""
        batches = [self._batch(number) for number in numbers]
        return np.concatenate([np.empty(0, np.int64), *(p[self._alike(p)] for p in batches)])

    def _probes(self) -> tuple[tuple[int, int, int], ...]:
        """Ahead and behind: positions searched, samples measured, and bad ones among them."""
        every = [*self.looked.values(), *self.looked_behind.values()]
        told = ((int(b.positions[0]), b.positions.size, int(self._bad(b).sum())) for b in every)
        return tuple(sorted(told))

    def _how(self, every: Int64s, inferred: Int64s) -> str:
        """How both ends were found, as a sentence."""
        budget = f"{self.of.config.region} steps of time (stability.attribution.region)"
        front = region.end_in_words(self.ahead, int(every.max()), budget)
        if self.back.reach == 0:
            rear = "no sample before the window is like them"
        else:
            rear = (
                f"it begins {self.back.reach} steps before the window, at position {int(every.min())}, by recorded "
                f"losses{'' if self.back.found else ' (the record goes no further back)'}"
            )
        by = ", by the gradients of batches" if self.follows else ""
        return f"{front}{by}; {rear}{region.inferred_in_words(inferred.size)}"
