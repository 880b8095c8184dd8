"""What a run could do about a trouble: the branches that are trained from the same state, the least intrusive first.

"nothing" trains on the data as it was, "other data" has harmless samples in the places of the suspects. Every other one
has the data as it was, and a remedy: those that a run tries itself (`stability.policy.remedies`), by the same names,
whatever its recipe and its budgets allow; and a cut of the rate as deep as two.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import get_args

from megastable.attribution.remedies import NOTHING, OTHER_DATA
from megastable.base.errors import ConfigError
from megastable.config.tree import RunConfig
from megastable_guard.guard_config import RemedyName
from megastable_guard.learning_rate_limits import after_rewind
from megastable_guard.policy import ADJUSTED, REWARM_FROM

CUT_TWICE = "cut_lr_twice"
ADJUSTMENTS = frozenset({"reset_moments", "other_kernels", *ADJUSTED})  # those that not every recipe has
ORDER = (NOTHING, OTHER_DATA, *get_args(RemedyName), CUT_TWICE)

# The rate of an update: from the usual one, the updates of the branch so far, and the rate at its beginning.
ChangeRate = Callable[[float, int, float], float]


def keep_rate(usual: float, updates: int, first: float) -> float:
    return usual


@dataclass(frozen=True)
class Candidate:
    """adjustment: of engine/adjustments.py, or ""."""

    name: str
    about: str
    change_rate: ChangeRate = keep_rate
    adjustment: str = ""
    resets_moments: bool = False
    leaves_fp8: bool = False
    leaves_kernels: bool = False

    @property
    def is_remedy(self) -> bool:
        return self.name not in (NOTHING, OTHER_DATA)


def list_candidates(config: RunConfig, adjustments: Collection[str]) -> list[Candidate]:
    """All that a run with this recipe could do, the least intrusive first. adjustments: that are possible."""
    c = config.stability.policy

    def warm_up(usual: float, updates: int, first: float) -> float:
        return usual * after_rewind(0, updates, c.rewarm_steps, REWARM_FROM)

    cut, rises = c.cut_factor, f"the rate warms up again, over {c.rewarm_steps} updates"
    found = [
        Candidate(NOTHING, "the data as it was"),
        Candidate(OTHER_DATA, "harmless samples in the places of the suspects"),
        Candidate("cap_lr", "the rate no higher than at first", lambda usual, _, first: min(usual, first)),
        Candidate("rewarm", rises, warm_up),
    ]
    if "reset_moments" in adjustments:
        about = f"the optimizer's moments begin again at zero, and {rises}"
        found.append(Candidate("reset_moments", about, warm_up, resets_moments=True))
    found += [
        Candidate(name, about.removesuffix(" for the rest of the run"), adjustment=name)
        for name, about in ADJUSTED.items()
        if name in adjustments
    ]
    if config.precision.fp8 is not None:
        found.append(Candidate("leave_fp8", f"without FP8, in {config.precision.kind}", leaves_fp8=True))
    if "other_kernels" in adjustments:
        found.append(
            Candidate("other_kernels", "by plain PyTorch in place of all kernels", leaves_kernels=True)
        )
    found += [
        Candidate("cut_lr", f"the rate x {cut:g}", lambda usual, *_: cut * usual),
        Candidate(CUT_TWICE, f"the rate x {cut**2:g}", lambda usual, *_: cut**2 * usual),
    ]
    return sorted(found, key=lambda candidate: ORDER.index(candidate.name))


def choose_candidates(every: Sequence[Candidate], only: Sequence[str], choice: str) -> list[Candidate]:
    """The candidates with the names `only`, or all without any, and those that a verdict on `choice` needs. Raises
    ConfigError for a name that there is not."""
    names = [candidate.name for candidate in every]
    if unknown := [name for name in only if name not in names]:
        raise ConfigError(f"--only {unknown[0]!r}: choose from {', '.join(names)}")
    wanted = {*(only or names), choice, NOTHING, OTHER_DATA}
    return [candidate for candidate in every if candidate.name in wanted]
