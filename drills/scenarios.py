"""Registry of all drill scenarios, selected by name."""

from __future__ import annotations

from collections.abc import Sequence

from drills.gross import CLEAN_EPOCHS, CLEAN_FP8, GROSS
from drills.scenario import CLEAN, Scenario
from drills.slow import CLEAN_ABSENT, CLEAN_BARE, CLEAN_SLOW, SLOW
from drills.thin import THIN
from megastable.base.errors import ConfigError

QUICK_STEPS, QUICK_FAULT_STEP = 96, 62
SCENARIOS = (*GROSS, *THIN)  # of the table
EVERY = (*SCENARIOS, *SLOW)
GROUPS = {
    "all": SCENARIOS,
    "gross": GROSS,
    "thin": THIN,
    "slow": SLOW,
}
QUICK = ("random-tokens", "killed-rank")
NAMES = tuple(scenario.name for scenario in EVERY)


def choose(names: Sequence[str]) -> list[Scenario]:
    """Scenarios by name or group, in the table's order; without names: all. Raises ConfigError."""
    if unknown := [name for name in names if name not in (*NAMES, *GROUPS)]:
        raise ConfigError(f"{unknown[0]}: there is no such scenario: {', '.join([*GROUPS, *NAMES])}")
    groups = {s.name for name in (names or ["all"]) for s in GROUPS.get(name, ())}
    return [scenario for scenario in EVERY if scenario.name in {*names, *groups}]


def references(chosen: Sequence[Scenario]) -> list[Scenario]:
    """The fault-free runs to compare those of `chosen` with."""
    return [
        clean
        for clean in (CLEAN, CLEAN_EPOCHS, CLEAN_FP8, CLEAN_SLOW, CLEAN_BARE, CLEAN_ABSENT)
        if any(s.reference == clean.name for s in chosen)
    ]
