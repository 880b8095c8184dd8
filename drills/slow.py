"""Faults that grow slowly, written down before the runs that are reported: a warning must come before the loss shows
them. Nothing acts on a slow signal, so these runs only report what they would do (`stability.dry_run`)."""

from __future__ import annotations

from dataclasses import replace

from drills.plan import Fault
from drills.scenario import CLEAN, Scenario

STEPS, FAULT_STEP = 400, 200
# The faults change weights as training could, but between two updates: memory is not watched.
LONG = (
    "train.steps=400",
    "schedule.total_steps=600",
    "stability.dry_run=true",
    "stability.hardware.state=false",
)
BARE = (*LONG, "model.qk_norm=false")
STALE = (*LONG, "optimizer.betas=[0.9,0.999]")

CLEAN_SLOW = replace(CLEAN, name="clean-slow", reference="clean-slow", overrides=LONG)
CLEAN_BARE = replace(
    CLEAN, name="clean-bare", title="no fault, without QK-norm", reference="clean-bare", overrides=BARE
)
CLEAN_ABSENT = replace(
    CLEAN, name="clean-absent", title="half of the vocabulary is absent", reference="clean-absent", overrides=STALE,
    fault=Fault(kind="rare_tokens", step=STEPS + 1),
)  # fmt: skip


def _slow(
    name: str,
    title: str,
    trend: str,
    kind: str,
    factor: float,
    why: str,
    clean: Scenario,
    step: int = FAULT_STEP,
) -> Scenario:
    steps = STEPS - step
    fault = Fault.model_validate({"kind": kind, "step": step, "steps": steps, "factor": factor})
    return Scenario(
        name, title, frozenset(), why, frozenset({None}), fault=fault, overrides=clean.overrides, step=step,
        steps=steps, reference=clean.name, trend=trend,
    )  # fmt: skip


SLOW = (
    _slow(
        "entropy-collapse", "gains of QK-norm grow by 0.8 % a step", "entropy", "growing_gains", 1.008,
        "attention looks at ever fewer tokens", CLEAN_SLOW,
    ),
    _slow(
        "flat-attention", "gains of QK-norm shrink by 0.8 % a step", "flatness", "growing_gains", 0.992,
        "attention looks at all tokens alike", CLEAN_SLOW,
    ),
    _slow(
        "growing-outputs", "output weights of a block's MLP grow by 2 % a step", "outputs", "growing_outputs", 1.02,
        "what the MLP adds outgrows the residual stream", CLEAN_SLOW,
    ),
    _slow(
        "growing-logits", "weights of q and k grow by 1 % a step, without QK-norm", "logits", "growing_logits", 1.01,
        "attention logits grow exponentially", CLEAN_BARE,
    ),
    _slow(
        "stale-moments", "absent tokens come one by one, then ever more, with beta2 0.999", "tokens", "rare_tokens",
        1.0, "their rows' second moments are nearly zero", CLEAN_ABSENT, step=250,
    ),
    _slow(
        "dying-block", "the output weights of a block lose 2 % a step, and are not trained", "layers", "dying_block",
        0.98, "the block fades from the residual stream", CLEAN_SLOW,
    ),
)  # fmt: skip
