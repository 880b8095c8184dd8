"""One search for guilty samples, from the suspects of an incident to the ends of a bad region. Collective.

Measures by the laboratory (evidence.py), decides by stability/: individuals and crowds (groups.py, scores.py), how far
the region goes (region.py), and who is guilty by likeness alone where time does not allow to measure all (likeness.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.data.skips import Selection, Skips
from megastable.stability import attribution, groups, region, scores
from megastable.stability.attribution import Conclusion, Suspect
from megastable.stability.likeness import ENOUGH_ALIKE, GOLDEN, Likeness, separation
from megastable.stability.region import Region, Side
from megastable.stability.scores import Conviction, Scale, Score, ScoredSamples

if TYPE_CHECKING:
    from megastable.recovery.sample_replay import GradientNorms, Known, Laboratory, Trained

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SHOWN = 2  # guilty samples whose own gradients are measured, as evidence
CALIBRATING = 1024  # harmless samples of a corpus whose tokens are read
REACH = 1 << 20  # positions ahead that are looked at, at most: what is bad all the way is the state
THINNEST, FEW = (
    0.125,
    3,
)  # share of bad samples below which no region is looked for; fewer of them are individuals
PULL = 2.0  # of the gradient norm of an ordinary batch, from which on a batch ahead is bad: clean ones have up to 1.5
SOLID_END = 2  # clean spots in a row that end a region whose batches are all bad
INSIDE = 8  # batches inside a region of a crowd, evenly spread, whose gradients must all be extraordinary
LEARNT = 4096  # bad samples, evenly spread, that what they are like is learnt from, at most: it takes the cube of that


class ExaminedBatch(NamedTuple):
    """A batch that was looked at: positions, z, losses and scores of its samples, [n] each."""

    positions: Int64s
    z: Floats
    losses: Floats
    scores: Floats


class Examination:
    """Of `window`, the steps since the onset. history, between: applied steps before it, up to the present state and
    after it. cursor: the position that the state has come to; selection: what is skipped already."""

    def __init__(
        self,
        laboratory: Laboratory,
        window: Sequence[Trained],
        history: Sequence[Trained],
        between: Sequence[Trained],
        cursor: int,
        selection: Skips | Selection,
        adjacent: bool,
    ) -> None:
        self.lab, self.config, self.size = laboratory, laboratory.config, laboratory.batch
        self.window, self.steps = window, window[: self.config.window]
        self.behind = [*history, *between][::-1]
        self.between, self.selection, self.adjacent = len(between), selection, adjacent
        self.forwards = 0
        self.alone = np.empty(0, np.int64)  # convicted each by its own loss
        self.shared = 0.0  # z by which the present state puts ordinary samples above what was recorded
        self.together: float | None = None  # gradient of a batch of the guilty, over an ordinary one's
        self.pull = math.inf  # norm of a batch's gradient ahead, from which on a region goes on there
        self.positions = np.concatenate([t.positions for t in self.steps])
        self.corpora = laboratory.corpora(self.positions)
        self.losses = self._losses(self.positions)
        self.known: Known = laboratory.known(history, self.corpora, cursor, selection)
        self.usual = groups.by_corpus(self.known.losses, self.known.corpora)
        self.known_z = groups.deviations(self.known.losses, self.known.corpora)
        self.scale = Scale(self._harmless())

    # What is measured

    def _losses(self, positions: Int64s) -> Floats:
        self.forwards += math.ceil(positions.size / self.size)
        return self.lab.losses(positions)

    def norm(self, positions: Int64s) -> float:
        """Of the gradient of a batch."""
        self.forwards += region.FORWARD
        return self.lab.gradient_norm(positions)

    def _harmless(self) -> ScoredSamples:
        """Those that scores are calibrated on: the latest, but for those of right before the window, as a region may
        begin before anybody notices."""
        chosen = list[Int64s]()
        for corpus in np.unique(self.corpora).tolist():
            mine = np.flatnonzero((self.known.corpora == corpus) & np.isfinite(self.known_z))
            late = min(self.config.behind * self.size, max(0, mine.size - 4 * groups.ENOUGH))
            chosen.append(mine[: mine.size - late][-CALIBRATING:])
        at = np.concatenate([np.empty(0, np.int64), *chosen])
        return self.lab.samples(self.known.positions[at], self.known_z[at])

    def _z(self, positions: Int64s, losses: Floats) -> Floats:
        return groups.far_out(losses, self.lab.corpora(positions), self.usual)

    # Who is guilty

    def judge(self, shift: float = 0.0) -> tuple[Conviction, Floats]:
        """Of the window, and z. shift: how far harmless samples on the same state lie from what was recorded, in z, but
        for what they share with all of the window."""
        c, significance = self.config, self.config.significance
        if self.adjacent:
            significance = c.adjacent_significance
        losses = groups.lowered(self.losses, self.corpora, self.usual, self.shared)
        z, p = groups.compare(losses, self.corpora, self.known.losses, self.known.corpora)
        if shift > 0:
            z = z - shift
            p = np.where(z > c.threshold, p, 1.0)
        alone = groups.guilty_by_loss(z, p, c.threshold)
        self.alone = self.positions[alone]
        error = groups.shared_error({k: u for k, u in self.usual.items() if (self.corpora == k).any()})
        suspects = self.lab.samples(self.positions, z)
        return scores.judge(self.scale, suspects, alone, error, significance, c.innocent), z

    def conclude(self, recurred: bool) -> Conclusion:
        """All experiments."""
        judged, z = self.judge()
        if judged.guilty.any() and (shared := groups.shared_shift(z, judged.guilty)) > 0:
            self.shared = shared
            judged, z = self.judge()
        guilty, inferred, found = self.positions[judged.guilty], np.empty(0, np.int64), None
        norms, by_gradient = dict[int, float](), not guilty.size
        gradients = self.lab.batch_norms(self.steps, self.known)
        if gradients is not None and gradients.extraordinary.any():
            self.pull = PULL * gradients.whole
        crowd = self._alike(judged.guilty, gradients)
        if crowd is not None:
            judged, by_gradient = crowd, True
            guilty = self.positions[judged.guilty]
        elif by_gradient and gradients is not None:
            guilty, norms = self._by_gradient(z, gradients)
            if guilty.size:
                judged = self._accuse(np.isin(self.positions, guilty))
        measured = dict(
            zip(self.positions.tolist(), zip(self.losses.tolist(), z.tolist(), strict=True), strict=True)
        )
        if guilty.size >= (FEW if by_gradient else 1) and judged.score is not None and self.config.region:
            judged, guilty, growth = self._grown(judged, guilty, by_gradient)
            if growth is not None and growth.ahead.endless:
                # As bad wherever one looks: that is the state. Unless some are worse than all of these.
                if not by_gradient:
                    judged, _ = self.judge(growth.level())
                    guilty = self.positions[judged.guilty]
                if crowd is not None:
                    guilty = np.empty(0, np.int64)  # the like of them is everywhere, and was before
            elif growth is not None and guilty.size:
                guilty, inferred, found = growth.named(guilty)
                measured |= growth.measured
        if guilty.size and not by_gradient:
            worst = sorted(guilty.tolist(), key=lambda p: -measured[p][1] if p in measured else 0.0)
            for p in worst[: min(SHOWN, self.config.gradients)]:
                norms[p] = self.lab.gradient_norm(np.array([p]))
        norms = {p: norm for p, norm in norms.items() if not math.isnan(norm)}
        suspects = [Suspect(p, loss, deviation, norms.get(p)) for p, (loss, deviation) in measured.items()]
        return self._told(suspects, guilty, inferred, found, judged, recurred)

    def _grown(
        self, judged: Conviction, guilty: Int64s, by_gradient: bool
    ) -> tuple[Conviction, Int64s, Growth | None]:
        """How far the guilty go on, None where that cannot be told; and who they are.

        Where clean samples ahead lie higher, too, that is the state's doing: what was found by then, the region and its
        ends, too, is not worth anything, and all is judged anew, once.
        """
        growth = Growth(self, judged, guilty, self.forwards)
        shift = growth.shift()
        if by_gradient or not shift > 0:
            return judged, guilty, growth
        self.shared += shift
        judged, _ = self.judge()
        guilty = self.positions[judged.guilty]
        if judged.score is None:
            return judged, guilty, None
        again = Growth(self, judged, guilty, growth.begin)
        return judged, guilty, None if again.shift() > 0 else again

    def _accuse(self, guilty: Bools) -> Conviction:
        """Those whose gradient convicts them, to look for their like."""
        _, z = self.judge()
        score = Score(self.scale, self.lab.samples(self.positions[guilty], z[guilty]))
        if not score.harmless.size:
            return Conviction(guilty, 1.0, None, np.inf)
        return Conviction(guilty, 1.0, score, float(np.quantile(score.harmless, 1 - region.STRAY)))

    def _alike(self, guilty: Bools, gradients: GradientNorms | None) -> Conviction | None:
        """Those who are bad together: a batch has an extraordinary gradient, and many of it are like each other. None
        where that names nobody beside `guilty`, those who are by their losses."""
        if gradients is None or not gradients.extraordinary.any():
            return None
        batches = [
            t.positions for t, bad in zip(gradients.batches, gradients.extraordinary, strict=True) if bad
        ]
        accused = guilty if guilty.sum() >= groups.CROWD else np.isin(self.positions, np.concatenate(batches))
        suspects = self.lab.samples(self.positions, np.zeros(self.positions.size))
        judged = scores.judge_alike(self.scale, suspects, accused, self.config.innocent)
        everyone = judged.guilty | guilty
        # What losses tell as well, they tell better.
        if judged.score is None or everyone.sum() == guilty.sum():
            return None
        self.together = float(np.nanmax(gradients.norms)) / gradients.whole
        return judged._replace(guilty=everyone)

    def _by_gradient(self, z: Floats, gradients: GradientNorms) -> tuple[Int64s, dict[int, float]]:
        guilty, norm = self.lab.by_gradient(gradients, self.known)
        norms = dict.fromkeys(guilty.tolist(), norm)
        if guilty.size:
            # What its gradient proves of one, its loss says of its like.
            like = attribution.LIKE * float(np.nanmin(z[np.isin(self.positions, guilty)], initial=np.inf))
            if math.isfinite(like) and like > attribution.TELLING:
                losses = groups.lowered(self.losses, self.corpora, self.usual, self.shared)
                _, p = groups.compare(losses, self.corpora, self.known.losses, self.known.corpora)
                bad = groups.guilty_by_loss(z, p, min(like, self.config.threshold))
                guilty = np.union1d(guilty, self.positions[bad])
        return guilty, norms

    def _told(
        self,
        suspects: list[Suspect],
        guilty: Int64s,
        inferred: Int64s,
        found: Region | None,
        judged: Conviction,
        recurred: bool,
    ) -> Conclusion:
        steps, window = self.steps, self.window
        examined = (
            f"the first {len(steps)} of {len(window)}" if len(steps) < len(window) else f"the {len(steps)}"
        )
        kinds = int(np.isin(self.known.corpora, self.corpora).sum())
        told = attribution.conclude(
            suspects, guilty.tolist(), recurred and not self.adjacent, kinds,
            f"{examined} steps since the onset", judged.p, inferred.tolist(), found,
            self.together,
        )  # fmt: skip
        expected = np.full(self.losses.shape, np.nan)
        for corpus, usual in self.usual.items():
            # What all share is the state's, and speaks for no sample.
            expected[self.corpora == corpus] = usual.centre + self.shared * usual.scale
        tripped = np.concatenate([t.losses for t in steps])
        told = replace(told, alone=np.intersect1d(guilty, self.alone).tolist())
        return attribution.weighed(told, judged.p, attribution.odds_of_data(self.losses, tripped, expected))


def half(positions: Int64s, size: int) -> Bools:
    """Of which half samples are: neighbours are of one, as they may be of one text. By multiples of the golden ratio,
    or every second batch, or every eighth, would be of one half, too."""
    return np.asarray((positions // size).astype(np.uint64) * GOLDEN >> np.uint64(63) == 0)


class Growth:
    """How far the guilty of a window go on, ahead and behind. begin: forward passes of the examination, from which on
    they count against the budget."""

    def __init__(self, examination: Examination, judged: Conviction, guilty: Int64s, begin: int) -> None:
        assert judged.score is not None
        self.of, self.score, self.bar = examination, judged.score, judged.bar
        self.accused = judged.guilty
        e, self.size = examination, examination.size
        self.looked: dict[int, ExaminedBatch] = {}
        self.pulls: dict[int, bool] = {}  # whether the gradient of a batch ahead is extraordinary
        self.follows = False  # whether such batches belong to the region
        self.tells: tuple[Likeness, float] | None = None  # with the likeness from which on a sample is bad
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
        farthest = min(region.FARTHEST, REACH // self.size)
        self.ahead: Side = region.grow(self._ahead, self.size, self.share, self._left, farthest)
        if self.ahead.found and self.ahead.reach and not self.ahead.clean:
            # Nobody saw it end: of rare corpora there is not so much within reach.
            self.ahead = replace(self.ahead, found=False, endless=True)
        self.ahead = self._followed(farthest)
        self.looked_behind: dict[int, ExaminedBatch] = {}
        self.back: Side = region.grow(self._behind, self.size, self.share, len(e.behind))

    @property
    def _left(self) -> int:
        """Forward passes."""
        return max(0, self.budget - (self.of.forwards - self.begin))

    def _ahead(self, number: int) -> int | None:
        """Bad samples of a batch ahead, of the corpora of the guilty."""
        positions = self._batch(number)
        if positions.size < self.size:
            return None
        if number not in self.looked:
            self._measure(number, positions)
        bad = int(self._bad(self.looked[number]).sum())
        return self.size if self.follows and 2 * bad < self.size and self._pulling(number) else bad

    def _pulling(self, number: int) -> bool:
        """Whether the gradient of a batch ahead is extraordinary, as one of the window's is."""
        positions = self._batch(number)
        if number not in self.pulls:
            self.pulls[number] = positions.size == self.size and self.of.norm(positions) > self.of.pull
        return self.pulls[number]

    def _followed(self, farthest: int) -> Side:
        """How far the region goes on by the gradients of batches, where right beyond its seeming end it goes on
        with samples that are bad together, and not like those of the window."""
        if self.ahead.endless or not math.isfinite(self.of.pull) or not self._pulling(self.ahead.reach + 1):
            return self.ahead
        self.follows = True
        budget = self._left // (region.FORWARD + 1)
        # Batches of further epochs have the bad samples, too, among others.
        found = region.grow(self._ahead, self.size, 1.0, budget, farthest, enough=SOLID_END)
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
        """The same of what was recorded before the window: costs no model time."""
        if number >= len(self.of.behind):
            return None
        step, known = self.of.behind[number], self.of.known
        z = self.of._z(step.positions, step.losses)
        if number >= self.of.between:  # among its contemporaries
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
        """How far clean samples ahead lie above what was recorded, in z, where that is no luck: the state is not good,
        then. They are the better measure, as the same state measured them, and none was trained on."""
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
        """The z of the farthest samples ahead, where all are bad."""
        if not self.ahead.endless:
            return 0.0
        return float(np.nanmedian(np.concatenate([self.looked[n].z for n in sorted(self.looked)[-4:]])))

    def named(self, guilty: Int64s) -> tuple[Int64s, Int64s, Region]:
        """All that are guilty, those inferred, and the region.

        Where likeness tells the kinds apart it decides, of measured samples, too: their losses overlap those of
        harmless ones. So only as many are measured as that takes; where it does not, as many as the budget allows.
        """
        e, reach = self.of, self.ahead.reach
        before = [b for n, b in self.looked_behind.items() if n < self.back.reach]
        together = self._learn_together(guilty, reach)
        if together:
            reach += 1  # the next batch may hold the region's last few
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
            named = named[named >= guilty.min()]  # what gradients show is told by fine differences
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
        """Which positions are of samples like those that are known to be bad."""
        assert self.tells is not None
        likeness, cut = self.tells
        return np.asarray(self._like(positions, likeness) >= cut)

    def _look_inside(self, reach: int, enough: float) -> None:
        """Measure batches inside, evenly spread, until `enough` bad samples are known, or the budget is spent."""
        for number in region.spread(0, reach, reach):
            bad = sum(int(self._bad(b).sum()) for n, b in self.looked.items() if n < reach)
            if bad >= enough or self.of.forwards - self.begin >= self.budget:
                break
            if number not in self.looked:
                self._measure(number, self._batch(number))

    def _window(self) -> ExaminedBatch:
        """The suspects that led here."""
        e = self.of
        z = e._z(e.positions, e.losses) - e.shared
        return ExaminedBatch(
            e.positions, z, e.losses, self.score.of(e.lab.samples(e.positions, z), self.accused)
        )

    def _learn_together(self, guilty: Int64s, reach: int) -> bool:
        """Learn what the samples of a crowd are like where there is one all over a long region: its batches have
        extraordinary gradients, wherever one looks. Whether that tells them."""
        if not self.follows or reach * self.size < 4 * ENOUGH_ALIKE:
            return False
        if not all(self._pulling(n) for n in region.spread(0, reach, INSIDE)):
            return False
        spread = region.spread(0, reach, math.ceil(LEARNT / self.size))
        self._learn(np.concatenate([self._batch(n) for n in spread]), guilty)
        return self.tells is not None

    def _learn(self, bad: Int64s, guilty: Int64s, inside: Sequence[Int64s] = ()) -> None:
        """What tells samples like those that are bad from harmless ones, if anything does. guilty: more that are bad,
        of the window: few may be ordinary among them; inside: measured ones of the region, of either kind."""
        lab, usual = self.of.lab, [u for c, u in self.of.scale.usual.items() if c in self.corpora]
        both = np.union1d(bad, guilty)
        both = both[sorted(region.spread(0, both.size, LEARNT))]
        if not usual or min(np.bincount(half(both, self.size), minlength=2)) < ENOUGH_ALIKE // 4:
            return
        learnt, kept = (np.concatenate([getattr(u, of).tokens for u in usual]) for of in ("learnt", "kept"))
        found = Likeness(lab.tokens(both), half(both, self.size), learnt)
        # Those beyond the region are of the same days as those inside.
        beyond = [self.looked[n].positions for n in self.ahead.clean[1:]]
        # Of either line both for choosing a cut and for trying it, as `separation` takes every second one for that.
        harmless = [
            found.of(kept, np.arange(len(kept)) // 2 % 2 == 0),
            *(self._like(p, found) for p in beyond),
        ]
        every = self._like(np.unique(np.concatenate([bad, *inside])), found)
        cut = separation(self._like(bad, found), np.concatenate(harmless), every[np.isfinite(every)])
        self.tells = None if cut is None else (found, cut)

    def _like(self, positions: Int64s, likeness: Likeness) -> Floats:
        """Of samples; -inf of other corpora than those of the guilty, of whose harmless samples it knows nothing, and
        of those of which too little is known."""
        corpora = self.of.lab.corpora(positions)
        known = self.of.scale.judges(corpora) & np.isin(corpora, self.corpora)
        found = np.full(positions.size, -np.inf)
        found[known] = likeness.of(self.of.lab.tokens(positions[known]), half(positions[known], self.size))
        return found

    def _infer(self, numbers: list[int]) -> Int64s:
        """Who is guilty of the batches ahead that were not measured: the like of those that were."""
        batches = [self._batch(number) for number in numbers]
        return np.concatenate([np.empty(0, np.int64), *(p[self._alike(p)] for p in batches)])

    def _probes(self) -> tuple[tuple[int, int, int], ...]:
        """Ahead and behind: where was looked, at how many samples, and how many of them were bad."""
        every = [*self.looked.values(), *self.looked_behind.values()]
        told = ((int(b.positions[0]), b.positions.size, int(self._bad(b).sum())) for b in every)
        return tuple(sorted(told))

    def _how(self, every: Int64s, inferred: Int64s) -> str:
        """How both ends were found, in a sentence."""
        budget = f"{self.of.config.region} steps of time (stability.attribution.region)"
        front = region.end_in_words(self.ahead, int(every.max()), budget)
        if self.back.reach == 0:
            rear = "nobody before the window is like them"
        else:
            rear = (
                f"it begins {self.back.reach} steps before the window, at position {int(every.min())}, by recorded "
                f"losses{'' if self.back.found else ' (the record goes no further back)'}"
            )
        by = ", by the gradients of batches" if self.follows else ""
        return f"{front}{by}; {rear}{region.inferred_in_words(inferred.size)}"
