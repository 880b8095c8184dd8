"""The fourteen faults, and what is right about each: which cause, which class. Written down before any run was seen.

Causes (stability/policy.py) are what a person is told to look at next. `causes`: at least one of these must be named.
`tolerated`: may be named besides; anything else that is named makes the answer wrong, `data` above all: innocent data
would be left out. Where no incident was opened, as after a single refused update, the answer is what the journal says
of that update: "not reproduced" means hardware.

Classes (stability/incident.py): one jump that one action undoes is recoverable; what comes back is lingering, what
keeps coming back or drifts away divergent. None: refused before it had any effect: nothing to recover from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megastable.data.plant import Kind as Region
from megastable.drills.plan import Fault
from megastable.errors import ConfigError
from megastable.stability.incident import Kind
from megastable.stability.policy import Cause

# From outside: SIGKILL or SIGSTOP to a rank; a damaged newest checkpoint and then SIGKILL to a rank; SIGKILL to the
# process that was started, the supervisor or where there is none the launcher.
Outside = Literal["kill_rank", "stop_rank", "damage_checkpoint", "kill_parent"]

STEPS, FAULT_STEP = 160, 100
QUICK_STEPS, QUICK_FAULT_STEP = 96, 62
SAMPLES = 40  # of a bad region: two and a half batches
EPOCHS, EPOCHS_STEP, FEW = 3, 40, 20  # of a small corpus; where it is bad in the first; samples
HIGH_RATE_STEPS = 50
BROKEN_STEPS, REST = 15, 20  # of the FP8 kernel; and of FP8, so that it returns when that is mended


@dataclass(frozen=True)
class Scenario:
    """A fault that begins at step `step` and lasts for `steps`. reason: why the expected answer is the right one.
    overrides: of the recipe, under every policy. reference: the run without a fault that its loss is compared with.
    samples: of a bad region. epochs: the corpus is so small that the run goes through it as many times."""

    name: str
    title: str
    causes: frozenset[Cause]
    reason: str
    kinds: frozenset[Kind | None] = frozenset({"recoverable"})
    tolerated: frozenset[Cause] = frozenset()
    region: Region | None = None
    fault: Fault | None = None
    outside: Outside | None = None
    overrides: tuple[str, ...] = ()
    reference: str = "clean"
    step: int = FAULT_STEP
    steps: int = 1
    samples: int = SAMPLES
    epochs: int = 1

    def at(self, step: int) -> Scenario:
        """The same at another step."""
        fault = self.fault and self.fault.model_copy(update={"step": step})
        return replace(self, step=step, fault=fault)


def _data(name: str, title: str, region: Region, why: str) -> Scenario:
    return Scenario(name, title, frozenset({Cause.DATA}), why, region=region, steps=3)


def _inside(name: str, title: str, kind: str, causes: set[Cause], why: str) -> Scenario:
    fault = Fault.model_validate({"kind": kind, "step": FAULT_STEP})
    kinds: set[Kind | None] = {"recoverable", None} if Cause.STATE not in causes else {"recoverable"}
    return Scenario(name, title, frozenset(causes), why, frozenset(kinds), fault=fault)


def _outside(name: str, title: str, outside: Outside, why: str, cause: Cause = Cause.PROCESS) -> Scenario:
    also = frozenset({Cause.PROCESS}) - {cause}
    return Scenario(name, title, frozenset({cause}), why, tolerated=also, outside=outside)


CLEAN = Scenario(
    "clean", "no fault", frozenset(), "nothing happens, so nothing may be named", frozenset({None})
)

# Quantized from the first step on, so short a run ends elsewhere, for better or worse.
FP8 = ("precision.fp8.recipe=delayed", "precision.fp8.backend=emulated")
CLEAN_FP8 = replace(CLEAN, name="clean-fp8", title="no fault, in FP8", reference="clean-fp8", overrides=FP8)

# What is usual must be known in the first of the epochs.
SOON = ("stability.detector.warmup_steps=25", "stability.detector.min_values=20")
CLEAN_EPOCHS = replace(
    CLEAN,
    name="clean-epochs",
    title="no fault, three epochs",
    reference="clean-epochs",
    overrides=SOON,
    epochs=EPOCHS,
)

# A finite wrong number in weights or moments and a bad turn of training itself look the same from outside. STATE says
# which part of the run is damaged, HARDWARE who did it; both send a person to the machine and leave the data alone.
DAMAGED = {Cause.STATE, Cause.HARDWARE}

SCENARIOS = (
    _data(
        "random-tokens",
        "a region of random tokens",
        "random",
        "the samples are bad on every state",
    ),
    _data(
        "repeated-token",
        "a region of one repeated token",
        "repeated",
        "the samples are bad on every state",
    ),
    _data(
        "shuffled-tokens",
        "a region of another corpus's shuffled tokens",
        "shuffled",
        "the samples are bad on every state",
    ),
    replace(
        _data(
            "three-epochs",
            f"{FEW} random samples in the first of {EPOCHS} epochs",
            "random",
            "the samples are bad on every state, and known when they would come again",
        ),
        step=EPOCHS_STEP,
        samples=FEW,
        epochs=EPOCHS,
        overrides=SOON,
        reference=CLEAN_EPOCHS.name,
    ),
    _inside(
        "nan-gradient",
        "NaN in one rank's gradients",
        "nan_gradient",
        {Cause.HARDWARE},
        "the same samples on the same weights give finite gradients when they are done again",
    ),
    _inside(
        "inf-loss",
        "an infinite loss on one rank",
        "inf_loss",
        {Cause.HARDWARE},
        "the same samples on the same weights give a finite loss when they are done again",
    ),
    Scenario(
        "high-rate",
        f"a learning rate ten times too high for {HIGH_RATE_STEPS} steps",
        frozenset({Cause.LEARNING_RATE}),
        "other data does not help, a smaller rate does",
        # It stays up while the rate does, and comes back with every attempt at the same rate.
        frozenset({"lingering", "divergent"}),
        # The first time nothing has come back yet: the state is all that can be blamed.
        frozenset({Cause.STATE}),
        fault=Fault(kind="high_rate", step=FAULT_STEP - 30, steps=HIGH_RATE_STEPS),
        step=FAULT_STEP - 30,
        steps=HIGH_RATE_STEPS,
    ),
    Scenario(
        "fp8-kernel",
        f"an FP8 kernel that gets a tile wrong for {BROKEN_STEPS} steps",
        frozenset({Cause.NUMERICS}),
        "the same samples on the same weights are harmless without FP8, and so is FP8 when the kernel is mended",
        fault=Fault(kind="fp8", step=FAULT_STEP, steps=BROKEN_STEPS),
        overrides=(*FP8, f"stability.policy.fp8_rest={REST}"),
        reference=CLEAN_FP8.name,
        steps=BROKEN_STEPS,
    ),
    _inside(
        "corrupted-moments", "corrupted Adam moments", "moments", DAMAGED, "the state was changed in place"
    ),
    _inside(
        "flipped-bit",
        "a flipped exponent bit in a weight",
        "bit_flip",
        DAMAGED,
        "the state was changed in place",
    ),
    _outside("killed-rank", "kill -9 of a rank", "kill_rank", "a process was killed"),
    _outside("stopped-rank", "a stopped (hung) rank", "stop_rank", "a process hangs"),
    _outside(
        "damaged-checkpoint",
        "a corrupted newest checkpoint, then kill -9 of a rank",
        "damage_checkpoint",
        "the restart meets bytes that are not those that were written; the death that led to it is no storage's",
        Cause.STORAGE,
    ),
    _outside("killed-supervisor", "kill -9 of the supervisor", "kill_parent", "a process was killed"),
)
QUICK = ("random-tokens", "killed-rank")
NAMES = tuple(scenario.name for scenario in SCENARIOS)


def choose(names: Sequence[str]) -> list[Scenario]:
    """Scenarios by name, in the table's order; "all" or no name at all: every one. Raises ConfigError."""
    if unknown := [name for name in names if name not in (*NAMES, "all")]:
        raise ConfigError(f"{unknown[0]}: there is no such scenario: all, {', '.join(NAMES)}")
    every = not names or "all" in names
    return [scenario for scenario in SCENARIOS if every or scenario.name in names]


def references(chosen: Sequence[Scenario]) -> list[Scenario]:
    """The runs without a fault that those of `chosen` are compared with."""
    return [
        clean for clean in (CLEAN, CLEAN_EPOCHS, CLEAN_FP8) if any(s.reference == clean.name for s in chosen)
    ]
