"""Sequential test of batches: do the samples of a step together lie higher for their corpora than those of others?

The detector compares means of losses. Here every loss is first compared with the latest samples of its own corpus, in
robust sigma: that is invariant to a falling loss, a drifting corpus and a changed mix. A batch is one number, the mean
of its scores, each clipped at `CLIP`: with sixteen samples it is nearly normal for any tails, and if each sample lies
up by one sigma, it lies up by four of its own. The scatter of batches is measured, so that a wandering level counts
less. The gradient norm of a step is judged likewise, by its logarithm: text of one kind, too easy to show in the loss,
has gradients that add up. Its tail is heavy, so it is clipped sooner, and an alarm needs at least two steps.

Each step multiplies an e-value, the likelihood ratio of normal means. A cumulative sum of its logarithm (Page 1954)
reaches log A at most once in A healthy steps, as the e-detector that bounds it does: Shin, Ramdas and Rinaldo,
"E-detectors: a nonparametric framework for sequential change detection", New England Journal of Statistics in Data
Science 2024.

An alarm calls no sample bad: it names the steps to examine. Pure: the same numbers on every rank.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from megastable.config.stability import SampleConfig
from megastable_guard import scores
from megastable_guard.actions import Verdict

Floats = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

# The level of a corpus is the median of its latest `LATEST` samples (eight steps of sixteen), or `LATEST_BATCHES`
# batches if these are larger: all samples of a batch share the level's error.
LATEST, LATEST_BATCHES = 128, 2
# No sample is scored before so many are known, or so many batches if these are larger, for the scatter.
SCATTER, SCATTER_BATCHES = 256, 4
CLIP = 3.0  # sigma at which a sample is clipped in the mean of its batch
STEPS, FEWEST = 128, 24  # batches to compare with: the latest ones, and the minimum
LIFTS = np.array([1.5, 2.5, 4.0])  # sigma of batches: assumed locations of bad ones
# The scatter of n batches is enlarged by this over the root of n, one and a half standard errors of a MAD.
WIDER = 1.75
# Sigma at which the mean loss of a batch, and its gradient norm, are clipped, so that a single one raises no alarm.
FARTHEST, FARTHEST_NORM = 4.5, 3.5
NORM_FLOOR = 0.2  # least scatter of the logarithm of norms: less is chance (DetectorConfig.norm_floor)
UNPROVEN = 8  # preceding batches left out of the comparison, as they may be bad as well
# Steps of rest after an examination without result. A new level of the loss takes FIRST_REST to become normal. An
# examination costs 10 to 60 steps of time, so that repeated ones cost at most 1.5 % of a long run; after LONGEST_REST
# steps without one the next rest is short again.
FIRST_REST, LONGEST_REST = STEPS // 2, 4096


@dataclass(frozen=True)
class Alarm:
    """onset: the first step of the evidence; reason: a sentence with the numbers."""

    onset: int
    reason: str


def _packed(kept: Floats) -> str:
    """Base64 of the little-endian numbers: exact, and half as long as decimal digits."""
    return base64.b64encode(kept.astype("<f8").tobytes()).decode()


def _unpacked(given: str | Floats) -> Floats:
    if not isinstance(given, str):
        return given
    return np.frombuffer(base64.b64decode(given, validate=True), "<f8").astype(np.float64)


# Replaced, never changed, so that copies may share it; packed in all serialised forms.
Latest = Annotated[
    Floats, PlainValidator(_unpacked, json_schema_input_type=str), PlainSerializer(_packed, return_type=str)
]


class _HistoryState(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants", arbitrary_types_allowed=True)


class CorpusState(_HistoryState):
    losses: Latest = np.empty(0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CorpusState) and self.model_dump() == other.model_dump()


@pydantic_dataclass(config=ConfigDict(extra="forbid", ser_json_inf_nan="constants"))
class SumState:
    """log e-value, and the step at which it last left zero. Not a pydantic model: six of them change in every step."""

    height: float = 0.0
    onset: int = 0


Sums = Annotated[list[SumState], Field(min_length=LIFTS.size, max_length=LIFTS.size)]


class SampleState(_HistoryState):
    """The complete state of the test, from which it continues bit for bit. corpora: by name. means: of the latest
    batches. norms: logarithms of their gradient norms. batch: for each of `LIFTS`, norm likewise."""

    corpora: dict[str, CorpusState] = {}
    means: list[float] = []
    norms: list[float] = []
    batch: Sums = [SumState() for _ in LIFTS]
    norm: Sums = [SumState() for _ in LIFTS]


class Waiting(_HistoryState):
    """A case that waits for a good moment to be examined. first, last: its steps. positions, losses: of a refused
    batch. located: where the first non-finite number arose, a sentence."""

    kind: Literal["batch", "discard"]
    first: int
    last: int
    verdict: Verdict
    reason: str
    positions: list[int] = []
    losses: list[float] = []
    located: str = ""


class Rest(_HistoryState):
    """Rest after an examination without result. until: the step up to which nothing is suspected; steps: its length."""

    until: int = 0
    steps: int = 0

    def begin_rest(self, step: int) -> Rest:
        """Twice as long if it recurs soon."""
        is_soon = step < self.until + LONGEST_REST
        rest_steps = min(max(FIRST_REST, 2 * self.steps), LONGEST_REST) if is_soon else FIRST_REST
        return Rest(until=step + rest_steps, steps=rest_steps)


class WatchState(_HistoryState):
    """The state of `SampleWatch` in checkpoints and snapshots. quiet: steps on the trend, with nothing open. rest:
    in which no whole batches are suspected."""

    test: SampleState = SampleState()
    waiting: list[Waiting] = []
    quiet: int = 0
    rest: Rest = Rest()


class SampleTest:
    """One `observe_batch` per step, in order."""

    def __init__(self, config: SampleConfig, state: SampleState | None = None) -> None:
        self._limit = math.log(1e4 / config.examinations) + math.log(2 * LIFTS.size)
        self._state = _copied(SampleState() if state is None else state)

    @property
    def state(self) -> SampleState:
        """A copy: later observations do not change it."""
        return _copied(self._state)

    def observe_batch(
        self,
        step: int,
        losses: Floats,
        corpora: Int64s,
        names: Sequence[str],
        applied: bool = True,
        norm: float = math.nan,
    ) -> Alarm | None:
        """Judge the samples of a step: losses (nats) and corpora (`names[corpora]`), each [n].

        applied: whether the update was; a refused batch is evidence, but does not enter the baseline. norm: of the
        gradient before clipping, nan to ignore it.
        """
        z, scatter_count = np.full(losses.shape, np.nan), max(SCATTER, SCATTER_BATCHES * losses.size)
        for corpus_index in np.unique(corpora).tolist():
            corpus_name, mine = names[corpus_index], corpora == corpus_index
            corpus_state = self._state.corpora.setdefault(corpus_name, CorpusState())
            if len(corpus_state.losses) >= scatter_count:
                z[mine] = _scores(
                    losses[mine], corpus_state.losses, max(LATEST, LATEST_BATCHES * losses.size)
                )
            if applied:
                finite_losses = losses[mine & np.isfinite(losses)]
                corpus_state.losses = np.concatenate([corpus_state.losses, finite_losses])[-scatter_count:]
        batch_lift = self._lift(z[~np.isnan(z)], applied)
        return self._add(step, batch_lift, self._up(norm, applied))

    def _lift(self, z: Floats, applied: bool) -> float:
        """How far a batch's mean clipped score lies above those of others, in sigma of batches."""
        if not z.size:
            return math.nan
        mean_score, known_means = float(np.clip(z, -CLIP, CLIP).mean()), self._state.means
        if applied:
            self._state.means = [*known_means, mean_score][-STEPS - UNPROVEN :]
        return _above(mean_score, known_means, CLIP / 100, FARTHEST)

    def _up(self, norm: float, applied: bool) -> float:
        """The same for its gradient norm."""
        if not 0 < norm < math.inf:
            return math.nan
        log_norm, known_norms = math.log(norm), self._state.norms
        if applied:
            self._state.norms = [*known_norms, log_norm][-STEPS - UNPROVEN :]
        return _above(log_norm, known_norms, NORM_FLOOR, FARTHEST_NORM)

    def _add(self, step: int, lift: float, up: float) -> Alarm | None:
        s = self._state
        sums = [*s.batch, *s.norm]
        log_bets = [*_bets(lift), *_bets(up)]
        sum_heights = [_raise(by, term, step) for by, term in zip(sums, log_bets, strict=True)]
        highest_index = int(np.argmax(sum_heights))
        if sum_heights[highest_index] < self._limit:
            return None
        onset, what = (
            sums[highest_index].onset,
            "all samples together lie above what is usual for their corpora",
        )
        if highest_index >= LIFTS.size:
            what = "the gradient norms lie above what is usual"
        s.batch, s.norm = [SumState() for _ in LIFTS], [SumState() for _ in LIFTS]
        return Alarm(onset, f"since step {onset} {what}")


def _copied(state: SampleState) -> SampleState:
    """Lists of numbers are replaced, never changed, so that they need no copy: this runs every step."""
    return SampleState(
        corpora={
            corpus_name: corpus_state.model_copy() for corpus_name, corpus_state in state.corpora.items()
        },
        means=state.means,
        norms=state.norms,
        batch=[replace(by) for by in state.batch],
        norm=[replace(by) for by in state.norm],
    )


def _scores(losses: Floats, known: Floats, count: int) -> Floats:
    """Robust sigma above the latest of the corpus; non-finite losses get the maximum."""
    loss_centre = _median(known[-count:])
    robust_scale = max(scores.SCALE_FLOOR, 1.4826 * _median(np.abs(known - loss_centre)))
    return np.asarray(np.nan_to_num((losses - loss_centre) / robust_scale, nan=1e6, posinf=1e6, neginf=1e6))


def _above(value: float, known: list[float], floor: float, most: float) -> float:
    """How far a batch lies above earlier ones except the newest, in sigma; nan if too few are known."""
    values_before = np.array(known[:-UNPROVEN])
    if values_before.size < FEWEST:
        return math.nan
    middle = _median(values_before)
    batch_scale = max(floor, 1.4826 * _median(np.abs(values_before - middle))) * (
        1 + WIDER / math.sqrt(values_before.size)
    )
    return min(most, (value - middle) / batch_scale)


def _bets(lift: float) -> list[float]:
    """log e-value of a batch for each of `LIFTS`."""
    return [0.0 if math.isnan(lift) else by * (lift - by / 2) for by in LIFTS.tolist()]


def _median(finite: Floats) -> float:
    """Several times faster than np.median, which checks its input."""
    half_size = finite.size // 2
    partly_ordered = np.partition(finite, (half_size - 1, half_size))
    return float(
        partly_ordered[half_size]
        if finite.size % 2
        else (partly_ordered[half_size - 1] + partly_ordered[half_size]) / 2
    )


def _raise(by: SumState, term: float, step: int) -> float:
    if by.height <= 0.0:
        by.height, by.onset = 0.0, step
    by.height += term
    return by.height
