"""What incidents of a run skip for good, incident by incident: samples of the skip ledger that no person named.

Pure, but for the order and the ledger that it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megastable.attribution.groups import robust
from megastable.attribution.harm import GUESSING, HELD_OUT, HarmTrial, TrialVerdict, choose_held_out
from megastable.data.order import Order
from megastable.data.skip_ledger import Ledger
from megastable.data.skips import NONE, Selection
from megastable_guard.policy import FEW

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
FAR = 6.0  # robust deviations above the data to come, from which a few samples are gross (attribution.threshold)
LITTLE_RATE = 0.2  # of the peak rate: with less, little harm shows, and no harm is no evidence
FARTHEST = 1 << 50  # positions that are searched for a sample


@dataclass(frozen=True)
class SkipGroup:
    """The samples that an incident skips, at positions that hold them: int64 [n], in the order of their corpora and
    tokens. step: of the incident."""

    incident: int
    step: int
    positions: Int64s

    @property
    def name(self) -> str:
        return f"incident {self.incident}"


@dataclass(frozen=True)
class TriedSamples:
    """Positions of a group that are trained on, and of those that are measured only."""

    trained: Int64s
    held_out: Int64s

    @property
    def count(self) -> int:
        return self.trained.size + self.held_out.size


def find_groups(ledger: Ledger, order: Order, selection: Selection, cursor: int) -> list[SkipGroup]:
    """The groups that are skipped now, by their incidents. selection: what the whole ledger leaves."""
    by_others = Selection(order, replace(ledger.by_others.exclusions, positions=NONE, swapped={})).sequences
    named = ledger.by_identity.ever.entries
    numbers = sorted({entry.incident for entry in named if entry.incident is not None})
    found = []
    for number in numbers:
        lines = ledger.of_incident(number).by_identity.ever
        positions = [np.empty(0, np.int64)]
        for corpus, sequences in Selection(order, lines.exclusions).sequences.items():
            out = selection.sequences.get(corpus, NONE)
            skipped = sequences.minus(out.gaps()).minus(by_others.get(corpus, NONE))
            chosen = skipped.gaps().next_kept(0, skipped.count())[0]
            positions.append(find_positions(order, corpus, chosen, cursor))
        steps = [entry.step for entry in lines.entries if entry.step is not None]
        group = SkipGroup(number, max(steps, default=0), np.concatenate(positions))
        found += [group] if group.positions.size else []
    return found


def find_positions(order: Order, corpus: int, sequences: Int64s, cursor: int) -> Int64s:
    """A position of each of n sequences of a corpus, in their order: the last one up to two passes over it after the
    cursor. Without those that the order gives nowhere there."""
    wanted = order.samples_before(cursor)[corpus] + 2 * order.sequences[corpus]
    end = max(1, cursor)
    while order.samples_before(end)[corpus] < wanted and end < FARTHEST:
        end *= 2
    positions = order.positions_of(corpus, sequences, 0, end if end < FARTHEST else max(1, cursor))
    numbers = order.locate(positions).sequence
    last = {int(number): int(position) for number, position in zip(numbers, positions, strict=True)}
    return np.array([last[n] for n in sequences.tolist() if n in last], dtype=np.int64)


def choose_tried(group: SkipGroup, slots: int) -> TriedSamples:
    """The samples of a group to be tried: all, or evenly spread ones so that at most half of `slots` are trained on."""
    n = min(group.positions.size, slots // 2 + HELD_OUT)
    chosen = group.positions[np.linspace(0, group.positions.size - 1, n).round().astype(np.int64)]
    held_out = choose_held_out(chosen)
    return TriedSamples(chosen[~np.isin(chosen, held_out)][: max(1, slots // 2)], held_out)


def put_first(batches: list[Int64s], samples: Int64s) -> list[Int64s]:
    """The batches with `samples` in their first places."""
    flat = np.concatenate(batches)
    flat[: samples.size] = samples
    return np.split(flat, np.cumsum([batch.size for batch in batches])[:-1])


def is_given_back(trial: HarmTrial, suspects: Floats, coming: Floats, vocabulary: int, share: float) -> bool:
    """Whether skipped samples do no harm: what is new, and what does none that can be measured. Not of these a few that
    are far out by themselves, as the run itself decides (`is_harmless`), and what is as hard as guessing: a low rate
    hides the harm of both.

    Args:
        suspects: their losses before the trial, [n] nats.
        coming: losses of the data to come, likewise.
        vocabulary: how many tokens there are.
        share: of the peak rate that the trial was held with.
    """
    if trial.verdict is not TrialVerdict.NOISE or share < LITTLE_RATE:
        return trial.verdict is TrialVerdict.NEW
    usual = float(np.median(suspects))
    middle, scale = robust(coming)
    few = suspects.size <= FEW and usual > middle + FAR * scale
    return not few and usual < GUESSING * math.log(vocabulary)
