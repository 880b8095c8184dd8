"""Sequential test of single samples: are they worse than their corpus? Uses the per-sample losses of every step.

A step's mean hides one bad sample of sixteen, and the detector is right to let it pass. Over many steps that is a
trickle: samples far above their corpus become more frequent. Two tests run on the same scores:

    trickle   the rate of samples in the tail of their corpus has risen
    batch     the samples of a step together lie slightly higher for their corpora than those of other steps

A score is the loss against the latest samples of the same corpus, in robust sigma: it is invariant to a falling loss, a
drifting corpus and a changed mix. The scores of each corpus are counted in each part of its tail, with slow forgetting;
a corpus with too few samples is not judged. Each step multiplies an e-value: how much more probable its scores are if a
share of the samples is bad, against the predictive distribution of the counts (Dirichlet-multinomial, so that a short
history has little weight). A cumulative sum of its logarithm (Page 1954) reaches log A at most once in A healthy steps,
as the e-detector that bounds it does: Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for sequential
change detection", New England Journal of Statistics in Data Science 2024.

A batch is one number, the mean of its scores, each clipped at `CLIP`: with sixteen samples it is nearly normal for any
tails, and if each sample lies up by one sigma, it lies up by four of its own. The scatter of batches is measured, so
that a wandering level counts less. Its e-value is the likelihood ratio of normal means. The gradient norm of a step is
judged likewise, by its logarithm: text of one kind, too easy to show in the loss, has gradients that add up. Its tail
is heavy, so it is clipped sooner, and an alarm needs at least two steps.

An alarm convicts no sample: it names the steps to examine. Samples are shuffled within a corpus, so a trickle present
from the first step on is part of the corpus, and is not detected here. Pure: the same numbers on every rank.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, PrivateAttr
from pydantic.dataclasses import dataclass as pydantic_dataclass

from megastable.config.stability import SampleConfig
from megastable.stability import groups
from megastable.stability.signals import Verdict

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Samples for the level of a corpus (a median), and for its scatter (required before a sample is scored): eight and
# sixteen steps of sixteen. With larger batches, this many batches: all samples of one share the error of both.
LATEST, LATEST_BATCHES = 128, 2
SCATTER, SCATTER_BATCHES = 256, 4
EDGES = np.array([3.0, 4.0, 6.0, 9.0, 14.0])  # sigma: the parts of the tail; below is the bulk
# Prior counts: Student t of 3 degrees in each part, with the weight of this many samples.
PRIOR_WEIGHT = 200.0
PRIOR = PRIOR_WEIGHT * np.array([0.0214, 0.0076, 0.0076, 0.0023, 0.00074, 0.00026])
PRIOR[0] = PRIOR_WEIGHT - PRIOR[1:].sum()
# Assumed locations of bad samples: near, in between, or far out. Those of one kind hardly differ.
BAD = np.array(
    [
        [0.0, 0.35, 0.35, 0.2, 0.07, 0.03],
        [0.0, 0.05, 0.15, 0.35, 0.3, 0.15],
        [0.0, 0.02, 0.05, 0.13, 0.3, 0.5],
    ]
)
SHARES = np.array([1 / 256, 1 / 64, 1 / 16, 1 / 4])  # assumed shares of bad samples, if any are bad
SUMS = BAD.shape[0] * SHARES.size
MEMORY = 8192.0  # samples of a corpus after which its counts have half the weight
# The newest samples are not counted yet, otherwise a rate that has risen would soon be normal: this many, but at most
# this share of the counts, as a short history needs them.
NEWEST, NEWEST_SHARE = 1024, 0.1
REMEMBERED = 512  # samples in the tails that are stored individually, since the onset of the sums
ORDINARY = (
    1.0  # sigma: the median of a healthy step lies within a third of it, that of a damaged state far above
)
LIFTED = 0.5  # sigma: a median of sixteen exceeds it one time in twenty
CLIP = 3.0  # sigma at which a sample is clipped in the mean of its batch
STEPS, FEWEST = 128, 24  # batches to compare with: the latest ones, and the minimum
LIFTS = np.array([1.5, 2.5, 4.0])  # sigma of batches: assumed locations of bad ones
# The scatter of n batches is enlarged by this over the root of n, one and a half standard errors of a MAD; and the
# sigma at which a batch is clipped: a single one raises no alarm.
WIDER, FARTHEST = 1.75, 4.5
# The same for gradient norms, and the minimum scatter of their logarithm: less is chance (DetectorConfig.norm_floor).
FARTHEST_NORM, NORM_FLOOR = 3.5, 0.2
UNPROVEN = 8  # preceding batches left out of the comparison, as they may be bad as well
# Steps of rest after an examination without result. A new level of the loss takes FIRST_REST to become normal. An
# examination costs 10 to 60 steps of time, so that repeated ones cost at most 1.5 % of a long run; after LONGEST_REST
# steps without one the next rest is short again.
FIRST_REST, LONGEST_REST = STEPS // 2, 4096
SHORT_REST = 4  # if there were too few samples to run a forward pass


class AlarmKind(StrEnum):
    TRICKLE = "trickle"
    BATCH = "batch"


@dataclass(frozen=True)
class Alarm:
    """kind; onset: the first step of the evidence; reason: a sentence with the numbers."""

    kind: AlarmKind
    onset: int
    reason: str


class Scored(NamedTuple):
    """The scores of a step. z: fp64 [n], robust sigma above the latest of its corpus, nan if too few are known. lift:
    how far the samples together lie above those of other batches, in sigma of batches, nan if unknown."""

    z: Floats
    lift: float

    @property
    def ordinary(self) -> bool:
        """Whether most samples are ordinary: then the state does not explain the others."""
        known = self.z[~np.isnan(self.z)]
        return bool(known.size and float(np.median(known)) < ORDINARY)


def _packed(kept: Floats) -> str:
    """Base64 of the little-endian numbers: exact, and half as long as decimal digits."""
    return base64.b64encode(kept.astype("<f8").tobytes()).decode()


def _unpacked(given: Any) -> Floats:
    """The inverse; also accepts a list, the format of older versions."""
    if isinstance(given, str):
        return np.frombuffer(base64.b64decode(given, validate=True), "<f8").astype(np.float64)
    return np.array(given, np.float64)


# Replaced, never changed, so that copies may share it; packed in all serialised forms.
Latest = Annotated[
    Floats,
    PlainValidator(_unpacked, json_schema_input_type=str | list[float]),
    PlainSerializer(_packed, return_type=str),
]


class _HistoryState(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants", arbitrary_types_allowed=True)


class Far(_HistoryState):
    """A sample in the tail of its corpus: its step, its position, its loss (nats) and the part of the tail."""

    step: int
    position: int
    loss: float
    part: int


class CorpusState(_HistoryState):
    """State of a corpus. losses: the latest, nats; counts: scores in each part, bulk first, slowly forgotten; newest:
    the not yet counted scores of the latest steps, oldest first, each with its step in front."""

    losses: Latest = np.empty(0)
    counts: list[float] = [0.0] * (EDGES.size + 1)
    newest: list[tuple[int, ...]] = []
    _size: int = PrivateAttr(0)  # scores in `newest`, too many to add up at every step

    def model_post_init(self, _: object) -> None:
        self._size = sum(sum(row[1:]) for row in self.newest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CorpusState) and self.model_dump() == other.model_dump()

    def count(self, step: int, parts: Int64s) -> None:
        """Add the scores of a step to the waiting ones, and count those that have waited long enough."""
        self.newest = [*self.newest, (step, *parts.tolist())]
        self._size += int(parts.sum())
        counts = np.array(self.counts)
        while self.newest and self._size > min(NEWEST, NEWEST_SHARE * counts.sum()):
            row = np.array(self.newest.pop(0)[1:])
            counts = counts * 0.5 ** (row.sum() / MEMORY) + row
            self._size -= int(row.sum())
        self.counts = counts.tolist()

    def take_out(self, step: int, part: int) -> None:
        """Remove a score of `step` in this part of the tail, if it is still waiting."""
        for at, row in enumerate(self.newest):
            if row[0] == step and row[part + 1] > 0:
                left = (*row[: part + 1], row[part + 1] - 1, *row[part + 2 :])
                self.newest = [*self.newest[:at], left, *self.newest[at + 1 :]]
                self._size -= 1


@pydantic_dataclass(config=ConfigDict(extra="forbid", ser_json_inf_nan="constants"))
class SumState:
    """log e-value, and the step at which it last left zero. Not a pydantic model: 36 of them change in every step."""

    height: float = 0.0
    onset: int = 0


class SampleState(_HistoryState):
    """The complete state of the test, from which it continues bit for bit. corpora: by name. means: of the latest
    batches. norms: logarithms of their gradient norms. far: samples in the tails, by corpus, not yet known to be
    ordinary. trickle: for each row of `BAD` and of `SHARES`; batch: for each of `LIFTS`, norm likewise."""

    corpora: dict[str, CorpusState] = {}
    means: list[float] = []
    norms: list[float] = []
    far: dict[str, list[Far]] = {}
    trickle: Annotated[list[SumState], Field(min_length=SUMS, max_length=SUMS)] = [
        SumState() for _ in range(SUMS)
    ]
    batch: Annotated[list[SumState], Field(min_length=LIFTS.size, max_length=LIFTS.size)] = [
        SumState() for _ in range(LIFTS.size)
    ]
    norm: Annotated[list[SumState], Field(min_length=LIFTS.size, max_length=LIFTS.size)] = [
        SumState() for _ in range(LIFTS.size)
    ]


class Waiting(_HistoryState):
    """A case that waits for a good moment to be examined. first, last: its steps. positions, losses: refused, in the
    tails since the onset of a trickle, or of a new kind of text. proven: whether the weights on which a batch was
    refused are good, as shown by the next batch (None: that was no better, and neither was trained on). located: where
    the first non-finite number arose, a sentence."""

    kind: Literal["trickle", "kind", "batch", "discard", "easy"]
    first: int
    last: int
    verdict: Verdict
    reason: str
    positions: list[int] = []
    losses: list[float] = []
    proven: bool | None = None
    located: str = ""


class Rest(_HistoryState):
    """Rest after an examination without result. until: the step up to which nothing is suspected; steps: its length."""

    until: int = 0
    steps: int = 0

    def after(self, step: int) -> Rest:
        """Twice as long if it recurs soon."""
        soon = step < self.until + LONGEST_REST
        steps = min(max(FIRST_REST, 2 * self.steps), LONGEST_REST) if soon else FIRST_REST
        return Rest(until=step + steps, steps=steps)

    def briefly(self, step: int) -> Rest:
        """A short rest: the missing samples may arrive soon."""
        steps = min(max(SHORT_REST, 2 * self.steps), FIRST_REST)
        return Rest(until=step + steps, steps=steps)


class WatchState(_HistoryState):
    """The state of sample_watch.py in checkpoints and snapshots. easy: the same test of the losses' negatives. quiet:
    steps on the trend, with nothing open. looked: batches examined ahead. rest: step until which no whole
    batches are suspected; rested: the length of that rest. kinds: the same for new kinds of text.
    """

    test: SampleState = SampleState()
    easy: SampleState = SampleState()
    waiting: list[Waiting] = []
    quiet: int = 0
    looked: int = 0
    rest: int = 0
    rested: int = 0
    kinds: Rest = Rest()


class SampleTest:
    """One `observe` per step, in order. lifted: maximum false alarms of `batch` per 10,000 healthy steps."""

    def __init__(
        self, config: SampleConfig, state: SampleState | None = None, lifted: float | None = None
    ) -> None:
        self.config = config
        self._limits = {
            AlarmKind.TRICKLE: math.log(1e4 / config.false_alarms) + math.log(SUMS),
            AlarmKind.BATCH: math.log(1e4 / (config.examinations if lifted is None else lifted))
            + math.log(2 * LIFTS.size),
        }
        self._state = _copied(SampleState() if state is None else state)

    @property
    def state(self) -> SampleState:
        """A copy: later observations do not change it."""
        return _copied(self._state)

    def observe(
        self,
        step: int,
        positions: Int64s,
        losses: Floats,
        corpora: Int64s,
        names: Sequence[str],
        applied: bool = True,
        norm: float = math.nan,
    ) -> tuple[Scored, Alarm | None]:
        """Judge the samples of a step: positions, losses (nats) and corpora (`names[corpora]`), each [n].

        applied: whether the update was; a refused batch is evidence, but does not enter the baseline. norm: of the
        gradient before clipping, nan to ignore it.
        """
        z, judged = np.full(losses.shape, np.nan), np.zeros(losses.size, bool)
        scatter, tail = max(SCATTER, SCATTER_BATCHES * losses.size), np.zeros(SUMS)
        members = {names[index]: corpora == index for index in np.unique(corpora).tolist()}
        for name, mine in members.items():
            if name not in self._state.corpora:
                self._state.corpora[name] = CorpusState()
            known = self._state.corpora[name]
            if len(known.losses) >= scatter:
                z[mine] = _scores(losses[mine], known.losses, max(LATEST, LATEST_BATCHES * losses.size))
                judged |= mine & (sum(known.counts) >= self.config.known)
            if applied:
                finite = losses[mine & np.isfinite(losses)]
                known.losses = np.concatenate([known.losses, finite])[-scatter:]
        # A common lift of all samples is left to the other test.
        scored = ~np.isnan(z)
        lifted = max(0.0, _median(z[scored]) - LIFTED) if scored.any() else 0.0
        for name, mine in members.items():
            mine = mine & scored
            if not mine.any():
                continue
            known, part = self._state.corpora[name], np.searchsorted(EDGES, z[mine] - lifted, side="right")
            parts = np.bincount(part, minlength=EDGES.size + 1)
            if judged[mine].any():
                tail += _evidence(parts, np.array(known.counts))
            if part.any():
                self._remember(step, name, positions[mine], losses[mine], part)
            if applied:
                known.count(step, parts)
        lift = self._lift(z[scored], applied)
        up = self._up(norm, applied)
        self._settle(step)  # after an alarm, its evidence is kept
        return Scored(z, lift), self._add(step, tail, lift, up)

    def convict(self, positions: Iterable[int]) -> None:
        """Remove bad samples from the baseline, if they were not counted yet."""
        convicted = set(positions)
        for name, far in self._state.far.items():
            known = self._state.corpora[name]
            for one in (one for one in far if one.position in convicted):
                known.take_out(one.step, one.part)
            self._state.far[name] = [one for one in far if one.position not in convicted]

    def far(self, first: int) -> list[Far]:
        """Samples in the tails met since the step `first`, oldest first."""
        every = (one for far in self._state.far.values() for one in far if one.step >= first)
        return sorted(every, key=lambda one: (one.step, one.position))

    def _remember(self, step: int, name: str, positions: Int64s, losses: Floats, part: Int64s) -> None:
        for at in np.flatnonzero(part):
            one = Far(step=step, position=int(positions[at]), loss=float(losses[at]), part=int(part[at]))
            self._state.far[name] = [*self._state.far.get(name, []), one][-REMEMBERED:]

    def _settle(self, step: int) -> None:
        """Forget counted samples from before the onset of all sums."""
        onset = min((by.onset for by in self._state.trickle if by.height > 0), default=step)
        for name, far in self._state.far.items():
            newest = self._state.corpora[name].newest
            since = min(onset, newest[0][0] if newest else step)
            if far and far[0].step < since:
                self._state.far[name] = [one for one in far if one.step >= since]

    def _lift(self, z: Floats, applied: bool) -> float:
        """How far a batch's mean clipped score lies above those of others, in sigma of batches."""
        if not z.size:
            return math.nan
        mean, known = float(np.clip(z, -CLIP, CLIP).mean()), self._state.means
        if applied:
            self._state.means = [*known, mean][-STEPS - UNPROVEN :]
        return _above(mean, known, CLIP / 100, FARTHEST)

    def _up(self, norm: float, applied: bool) -> float:
        """The same for its gradient norm."""
        if not 0 < norm < math.inf:
            return math.nan
        value, known = math.log(norm), self._state.norms
        if applied:
            self._state.norms = [*known, value][-STEPS - UNPROVEN :]
        return _above(value, known, NORM_FLOOR, FARTHEST_NORM)

    def _add(self, step: int, tail: Floats, lift: float, up: float = math.nan) -> Alarm | None:
        s = self._state
        heights = [_raise(by, term, step) for by, term in zip(s.trickle, tail.tolist(), strict=True)]
        sums = [*s.batch, *s.norm]
        bets = [*_bets(lift), *_bets(up)]
        together = [_raise(by, term, step) for by, term in zip(sums, bets, strict=True)]
        highest = int(np.argmax(heights))
        if heights[highest] >= self._limits[AlarmKind.TRICKLE]:
            share, onset = float(SHARES[highest % SHARES.size]), s.trickle[highest].onset
            since = step - onset + 1
            s.trickle = [SumState() for _ in heights]
            reason = (
                f"since step {onset}, for {since} steps, samples far above their corpus come more often than "
                f"before: about {share:.1%} of all"
            )
            return Alarm(
                AlarmKind.TRICKLE, onset, reason
            )  # if the other alarm is due as well, it follows at the next step
        highest = int(np.argmax(together))
        if together[highest] >= self._limits[AlarmKind.BATCH]:
            onset, what = (
                sums[highest].onset,
                "all samples together lie above what is usual for their corpora",
            )
            if highest >= LIFTS.size:
                what = "the gradient norms lie above what is usual"
            s.batch, s.norm = [SumState() for _ in LIFTS], [SumState() for _ in LIFTS]
            return Alarm(AlarmKind.BATCH, onset, f"since step {onset} {what}")
        return None


def _copied(state: SampleState) -> SampleState:
    """Lists of numbers are replaced, never changed, so that they need no copy: this runs every step."""
    return SampleState(
        corpora={name: known.model_copy() for name, known in state.corpora.items()},
        means=state.means,
        norms=state.norms,
        far=dict(state.far),
        trickle=[replace(by) for by in state.trickle],
        batch=[replace(by) for by in state.batch],
        norm=[replace(by) for by in state.norm],
    )


def _scores(losses: Floats, known: Floats, count: int) -> Floats:
    """Robust sigma above the latest of the corpus; non-finite losses get the maximum."""
    centre = _median(known[-count:])
    scale = max(groups.SCALE_FLOOR, 1.4826 * _median(np.abs(known - centre)))
    return np.asarray(np.nan_to_num((losses - centre) / scale, nan=1e6, posinf=1e6, neginf=1e6))


def _above(value: float, known: list[float], floor: float, most: float) -> float:
    """How far a batch lies above earlier ones except the newest, in sigma; nan if too few are known."""
    before = np.array(known[:-UNPROVEN])
    if before.size < FEWEST:
        return math.nan
    middle = _median(before)
    scale = max(floor, 1.4826 * _median(np.abs(before - middle))) * (1 + WIDER / math.sqrt(before.size))
    return min(most, (value - middle) / scale)


def _bets(lift: float) -> list[float]:
    """log e-value of a batch for each of `LIFTS`."""
    return [0.0 if math.isnan(lift) else by * (lift - by / 2) for by in LIFTS.tolist()]


def _median(finite: Floats) -> float:
    """Several times faster than np.median, which checks its input."""
    half = finite.size // 2
    ordered = np.partition(finite, (half - 1, half))
    return float(ordered[half] if finite.size % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _evidence(parts: Int64s, counts: Floats) -> Floats:
    """log e-value of a step for each row of `BAD` and of `SHARES`, fp64 [rows * shares]: its scores in each part of the
    tail against the earlier `counts`."""
    total = np.log1p(-SHARES) * parts[0] + np.zeros((BAD.shape[0], 1))
    weight, size = PRIOR + counts, PRIOR_WEIGHT + counts.sum()
    for part in np.flatnonzero(parts[1:]) + 1:
        # Each sample is predicted from those before it, including those of its own step.
        usual = (weight[part] + np.arange(parts[part])) / (size + np.arange(parts[part]))
        ratio = BAD[:, part, None, None] / usual - 1
        total += np.log1p(SHARES[:, None] * ratio).sum(axis=2)
    return total.ravel()


def _raise(by: SumState, term: float, step: int) -> float:
    if by.height <= 0.0:
        by.height, by.onset = 0.0, step
    by.height += term
    return by.height
