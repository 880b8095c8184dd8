"""The fifteen gross faults and their expected answers, written down before any run."""

from __future__ import annotations

from dataclasses import replace

from drills.plan import Fault
from drills.scenario import CLEAN, FAULT_STEP, STEPS, Scenario, data, outside
from megastable_guard.actions import Cause
from megastable_guard.incident import Kind

EPOCHS, EPOCHS_STEP, FEW = 3, 40, 20  # epochs of a small corpus; step of the fault in the first one; samples
HIGH_RATE_STEPS = 50
# Steps of the broken FP8 kernel; rest of FP8, so that it returns after the repair.
BROKEN_STEPS, REST = 15, 20
# Far beyond what a hard sample does, which a kernel's mistake has no reason to stay below.
WRONG_GRADIENT = 300.0


def _inside(name: str, title: str, kind: str, causes: set[Cause], why: str) -> Scenario:
    fault = Fault.model_validate({"kind": kind, "step": FAULT_STEP})
    kinds: set[Kind | None] = {"recoverable", None} if Cause.STATE not in causes else {"recoverable"}
    return Scenario(name, title, frozenset(causes), why, frozenset(kinds), fault=fault)


# FP8 from the first step on gives such a short run another end, better or worse.
FP8 = ("precision.fp8.recipe=delayed", "precision.fp8.backend=emulated")
CLEAN_FP8 = replace(CLEAN, name="clean-fp8", title="no fault, in FP8", reference="clean-fp8", overrides=FP8)

# The baseline must be known within the first epoch.
SOON = ("stability.detector.warmup_steps=25", "stability.detector.min_values=20")
CLEAN_EPOCHS = replace(
    CLEAN,
    name="clean-epochs",
    title="no fault, three epochs",
    reference="clean-epochs",
    overrides=SOON,
    epochs=EPOCHS,
)

# A finite wrong number in weights or moments looks from outside like an instability of training itself. STATE names
# the damaged part of the run, HARDWARE the culprit; both send a person to the machine and leave the data alone.
DAMAGED = {Cause.STATE, Cause.HARDWARE}

GROSS = (
    data(
        "random-tokens",
        "a region of random tokens",
        "random",
        "the samples are bad on every state",
    ),
    data(
        "repeated-token",
        "a region of one repeated token",
        "repeated",
        "the samples are bad on every state",
    ),
    data(
        "shuffled-tokens",
        "a region of another corpus's shuffled tokens",
        "shuffled",
        "the samples are bad on every state",
    ),
    replace(
        data(
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
        # It stays up while the rate does, and recurs with every attempt at the same rate; a remedy that is right at
        # once makes it recoverable, by definition.
        frozenset({"recoverable", "lingering", "divergent"}),
        # The first time nothing has recurred yet: only the state can be blamed.
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
    Scenario(
        "attention-kernel",
        f"a fused attention kernel whose gradient of a sample is {WRONG_GRADIENT:.0f} times too large, to the end",
        frozenset({Cause.NUMERICS}),
        "the same samples on the same weights are harmless by plain PyTorch in its place",
        fault=Fault(kind="attention", step=FAULT_STEP, steps=STEPS - FAULT_STEP, factor=WRONG_GRADIENT),
        steps=STEPS - FAULT_STEP,
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
    outside("killed-rank", "kill -9 of a rank", "kill_rank", "a process was killed"),
    outside("stopped-rank", "a stopped (hung) rank", "stop_rank", "a process hangs"),
    outside(
        "damaged-checkpoint",
        "a corrupted newest checkpoint, then kill -9 of a rank",
        "damage_checkpoint",
        "the restart meets bytes that are not those that were written; the death that led to it is no storage's",
        Cause.STORAGE,
    ),
    outside("killed-supervisor", "kill -9 of the supervisor", "kill_parent", "a process was killed"),
)
