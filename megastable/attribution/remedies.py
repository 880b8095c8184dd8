"""Chooses a remedy from branches that began on the same state: one for each, and what happens without.

The branch "other data" has harmless samples in the places of the suspects, "nothing" has the data as it was; every
other one has the data as it was, and a remedy. All are measured on the same samples of the data to come.

Remedies are tried only where other data does not help: training on from the good state makes the model worse,
whatever it reads. Without that condition a lower rate would always win over a few steps, as noise shrinks with it.

The least intrusive branch wins that is not clearly worse than the best. A remedy must also be clearly better than both
branches without one.

A corpus of which samples were bad again and again is left out if that clearly helps the others: the branch without
any of its samples against the one without the bad ones, on the data to come of the other corpora.

Pure. `recovery/replay_trials.py` trains the branches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megastable.attribution.harm import GAIN, HARM, SURE, Floats, Int32s, mean_difference

NOTHING, OTHER_DATA = "nothing", "other data"
WITHOUT_BAD, WITHOUT_CORPUS = "without the suspects", "without the corpus"
# Of tokens that count as rare until now: how often in the window, times as often as before, and how many at most.
FREQUENT, MORE_OFTEN, NAMED = 4, 4.0, 16
TOLERANCE = 0.01  # nats: smaller differences are those of another choice of samples


@dataclass(frozen=True)
class RemedyTrial:
    """What branches with remedies have shown. chosen: the name of a branch. gain: nats by which the data to come is
    easier after it than after the better of the branches without a remedy, with its standard error."""

    chosen: str
    gain: float
    gain_error: float
    steps: int

    @property
    def has_remedy(self) -> bool:
        return self.chosen not in (NOTHING, OTHER_DATA)

    @property
    def reason(self) -> str:
        """As a sentence."""
        if not self.has_remedy:
            return f"{self.steps} steps from the same state: no remedy is clearly better than {self.chosen}"
        return (
            f"{self.steps} steps from the same state, with the same data: with this remedy the data to come is "
            f"{self.gain:.3f} ± {self.gain_error:.3f} nats easier than without any, and with other data"
        )


@dataclass(frozen=True)
class CorpusTrial:
    """What branches without a corpus, and without its bad samples alone, have shown. gain: nats by which the data to
    come of the other corpora is easier after the first than more of these explain, with its standard error. helps:
    clearly."""

    corpus: str
    helps: bool
    gain: float
    gain_error: float
    steps: int

    @property
    def chosen(self) -> str:
        """The name of a branch."""
        return WITHOUT_CORPUS if self.helps else WITHOUT_BAD

    @property
    def reason(self) -> str:
        """As a sentence."""
        told = "it is left out" if self.helps else "it is kept"
        return (
            f"{self.steps} steps without corpus {self.corpus}, and the same steps without its bad samples alone, from "
            f"the same state: without it the data to come of the other corpora is {self.gain:.3f} ± "
            f"{self.gain_error:.3f} nats easier than reading more of them explains: {told}"
        )


def judge_corpus(
    corpus: str, without: Floats, control: Floats, before: Floats, more: float, steps: int
) -> CorpusTrial:
    """Whether a corpus is to be left out. Whatever it is, others are learnt faster without it, as more of them is read:
    at most in proportion.

    Args:
        without, control, before: losses of the data to come of the other corpora, [n] nats: after `steps` steps without
            the corpus, after the same without its bad samples, and on the state that both began with.
        more: samples of other corpora in the first branch, over those in the second.
    """
    learnt, _ = mean_difference(before, control)
    expected = before - more * (before - control) if learnt > 0 else control
    gain, error = mean_difference(expected, without)
    helps = bool(np.isfinite(without).all()) and gain > max(GAIN, SURE * error)
    return CorpusTrial(corpus, helps, gain, error, steps)


def find_rare_tokens(window: Int32s, ordinary: Int32s) -> list[int]:
    """Tokens that are far more frequent than before: Adam's second moments of their rows have decayed, and cannot have
    kept up (Wortsman et al., arXiv:2304.13013, section 3). The most frequent first, `NAMED` at most.

    Args:
        window, ordinary: token ids of samples in question, and of harmless ones; [n, l] and [m, l].
    """
    size = int(max(window.max(initial=-1), ordinary.max(initial=-1))) + 1
    count, usual = (np.bincount(ids.ravel(), minlength=size) for ids in (window, ordinary))
    expected = usual * (window.size / max(1, ordinary.size))
    found = np.flatnonzero((count >= FREQUENT) & (count >= MORE_OFTEN * (expected + 1)))
    return found[np.argsort(-count[found], kind="stable")][:NAMED].tolist()


def harms_anyway(control: Floats, before: Floats) -> bool:
    """Whether training on harmless data makes the data to come harder. control: its losses after that; before: on the
    state that it began with; [n] nats each."""
    harm, error = mean_difference(control, before)
    return harm > max(HARM, SURE * error)


def choose_remedy(branches: Mapping[str, Floats], steps: int) -> RemedyTrial:
    """The branch to go on with.

    Args:
        branches: losses of the data to come at the end of each, [n] nats, by name, the least intrusive first; those of
            `NOTHING` and `OTHER_DATA` among them.
        steps: their length.
    """
    best = min(branches, key=lambda name: _level(branches[name]))
    without = min((NOTHING, OTHER_DATA), key=lambda name: _level(branches[name]))
    for name, losses in branches.items():
        gain, error = mean_difference(branches[without], losses)
        if name not in (NOTHING, OTHER_DATA) and not gain > max(HARM, SURE * error):
            continue
        behind, behind_error = mean_difference(losses, branches[best])
        if behind <= max(TOLERANCE, SURE * behind_error):
            return RemedyTrial(name, gain, error, steps)
    return RemedyTrial(without, 0.0, 0.0, steps)


def _level(losses: Floats) -> float:
    return float(losses.mean()) if np.isfinite(losses).all() else math.inf
