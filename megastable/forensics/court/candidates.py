"""What a run could do about a trouble: the branches that are trained from the same state, the least intrusive first.

"nothing" trains on the data as it was, "other data" has harmless samples in the places of the suspects. Every other one
has the data as it was, and one change: of the rate, of the optimizer's state, or of the recipe.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megastable.base.errors import ConfigError
from megastable.config import recipe
from megastable.config.tree import RunConfig

NOTHING, OTHER_DATA = "nothing", "other data"
HALF_RATE, QUARTER_RATE, CAPPED_RATE, WARMUP = "half rate", "quarter rate", "capped rate", "warm-up"
BETA2, CLIP, Z_LOSS, MOMENTS, NO_FP8 = "lower beta2", "quarter clip", "z-loss", "new moments", "no FP8"
BEGIN = 0.1  # share of the rate at which the warm-up begins
LEAST_Z_LOSS = 1e-4  # PaLM's (arXiv:2204.02311, section 5)
USUAL_BETA2 = 0.95  # a second moment that forgets no slower than this follows gradients that change

# The rate of an update: from the usual one, the number of the update in the branch, their number, and the rate at the
# beginning of the branch.
ChangeRate = Callable[[float, int, int, float], float]


def keep_rate(rate: float, update: int, updates: int, first: float) -> float:
    return rate


@dataclass(frozen=True)
class Candidate:
    """intrusive: from 0. changes: of the recipe, by key. new_moments: the optimizer's moments begin again."""

    name: str
    about: str
    intrusive: int
    change_rate: ChangeRate = keep_rate
    changes: dict[str, Any] = field(default_factory=dict)
    new_moments: bool = False

    @property
    def is_remedy(self) -> bool:
        return self.name not in (NOTHING, OTHER_DATA)


def list_candidates(config: RunConfig) -> list[Candidate]:
    """All that a run with this recipe could do, the least intrusive first."""
    o = config.optimizer
    found = [
        Candidate(NOTHING, "the data as it was", 0),
        Candidate(OTHER_DATA, "harmless samples in the places of the suspects", 1),
        Candidate(CAPPED_RATE, "the rate no higher than at first", 2, lambda rate, n, of, first: min(rate, first)),
        Candidate(HALF_RATE, "the rate x 0.5", 3, lambda rate, n, of, first: 0.5 * rate),
        Candidate(QUARTER_RATE, "the rate x 0.25", 4, lambda rate, n, of, first: 0.25 * rate),
        Candidate(WARMUP, f"the rate rises again, from {BEGIN} times itself", 4, _warm_up),
    ]  # fmt: skip
    beta1, beta2 = o.betas
    lower = min(USUAL_BETA2, 1 - 2 * (1 - beta2))
    if o.reads("betas") and lower > beta1:
        about = f"optimizer.betas[1] from {beta2:g} to {lower:g}"
        found.append(Candidate(BETA2, about, 5, changes={"optimizer.betas": [beta1, lower]}))
    if o.reads("clip") and o.clip > 0:
        about = f"optimizer.clip from {o.clip:g} to {o.clip / 4:g}"
        found.append(Candidate(CLIP, about, 5, changes={"optimizer.clip": o.clip / 4}))
    z_loss = max(LEAST_Z_LOSS, 10 * config.model.z_loss)
    about = f"model.z_loss from {config.model.z_loss:g} to {z_loss:g}"
    found.append(Candidate(Z_LOSS, about, 6, changes={"model.z_loss": z_loss}))
    found.append(
        Candidate(MOMENTS, "both moments and their bias correction begin again", 7, new_moments=True)
    )
    if config.precision.fp8 is not None:
        found.append(Candidate(NO_FP8, "precision.fp8=null", 8, changes={"precision.fp8": None}))
    return found


def choose_candidates(config: RunConfig, only: Sequence[str], always: Sequence[str]) -> list[Candidate]:
    """The candidates with these names, all of them without any, and those that a verdict needs. Raises ConfigError for
    a name that there is not."""
    every = list_candidates(config)
    names = [candidate.name for candidate in every]
    if unknown := [name for name in only if name not in names]:
        raise ConfigError(f"--only {unknown[0]!r}: choose from {', '.join(names)}")
    wanted = {*(only or names), *always, NOTHING, OTHER_DATA}
    return [candidate for candidate in every if candidate.name in wanted]


def change_recipe(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """The recipe with some keys changed. Raises ConfigError if that cannot be."""
    tree = config.model_dump(mode="json")
    for key, value in changes.items():
        section, name = key.split(".")
        tree[section][name] = value
    return recipe.validate(tree, f"a branch with {', '.join(changes)}")


def _warm_up(rate: float, update: int, updates: int, first: float) -> float:
    return rate * (BEGIN + (1 - BEGIN) * min(1.0, update / max(1, updates - 1)))
