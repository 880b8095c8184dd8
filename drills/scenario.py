"""Definition of a drill scenario: a fault, its place, and the expected answer; the faults are in gross.py and thin.py.

Causes (guard's actions) direct a person's attention. `causes`: at least one of these must be named.
`tolerated`: may be named as well; any other named cause makes the answer wrong, `data` above all: innocent data
would be skipped. If no incident was opened, as after a single refused update, the answer is the journal's entry on
that update: "not reproduced" means hardware.

Classes (guard's incident): one jump undone by one action is recoverable; a recurring one is lingering; one that
keeps recurring or drifts away is divergent. None: refused before it had any effect: nothing to recover from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from drills.corrupt_texts import Text
from drills.plan import Fault
from megastable.data.plant import Kind as Region
from megastable_guard.actions import Cause
from megastable_guard.incident import Kind

# From outside: SIGKILL or SIGSTOP to a rank; a damaged newest checkpoint and then SIGKILL to a rank; a newest one with
# right hashes over wrong content (poison.py) and then SIGKILL to a rank; SIGKILL to the started process, the
# supervisor or, without one, the launcher.
Outside = Literal[
    "kill_rank", "stop_rank", "damage_checkpoint", "poison_weight", "poison_moments", "kill_parent"
]

STEPS, FAULT_STEP = 160, 100
GLOBAL_BATCH = 16
SAMPLES = 40  # of a bad region: two and a half batches


@dataclass(frozen=True)
class Scenario:
    """A fault that begins at step `step` and lasts for `steps`. reason: why the expected answer is the right one.
    overrides: of the recipe, under every policy. reference: the fault-free run to compare the loss with. samples: of a
    bad region; of_each: number in each step, consecutive ones without it; text: its kind, if it is text. epochs: number
    of passes over a small corpus. warning: the expected answer is a warning near the start, not a loss as good as the
    reference's. trend: the slow signal that must be warned of before the loss shows the fault."""

    name: str
    title: str
    causes: frozenset[Cause]
    reason: str
    kinds: frozenset[Kind | None] = frozenset({"recoverable"})
    tolerated: frozenset[Cause] = frozenset()
    region: Region | None = None
    text: Text | None = None
    of_each: int | None = None
    fault: Fault | None = None
    outside: Outside | None = None
    overrides: tuple[str, ...] = ()
    reference: str = "clean"
    step: int = FAULT_STEP
    steps: int = 1
    samples: int = SAMPLES
    epochs: int = 1
    warning: bool = False
    trend: str = ""

    def at(self, step: int) -> Scenario:
        """The same at another step."""
        fault = self.fault and self.fault.model_copy(update={"step": step})
        return replace(self, step=step, fault=fault)


def data(name: str, title: str, region: Region, why: str) -> Scenario:
    """A region of bad samples."""
    return Scenario(name, title, frozenset({Cause.DATA}), why, region=region, steps=3)


def outside(name: str, title: str, outside: Outside, why: str, *causes: Cause) -> Scenario:
    """A fault inflicted from outside; the death of a process may be named as well."""
    right = frozenset(causes or {Cause.PROCESS})
    return Scenario(name, title, right, why, tolerated=frozenset({Cause.PROCESS}) - right, outside=outside)


CLEAN = Scenario(
    "clean", "no fault", frozenset(), "nothing happens, so nothing may be named", frozenset({None})
)
