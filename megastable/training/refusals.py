"""Ends a run whose updates are all refused. Collective."""

from __future__ import annotations

import math

from megastable.base.collectives import shared
from megastable.base.errors import UnstableError
from megastable.checkpoint.store import RunState
from megastable.engine.measured import Measured
from megastable.recovery.recovery import Recovery
from megastable.recovery.run_parts import StepResult
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import Unstable


def end_if_all_refused(done: StepResult, recovery: Recovery) -> None:
    """After a step that was not undone. Raises UnstableError if `stability.max_discards` updates in a row were refused,
    and nothing else was done about it."""
    state = done.state
    if state.discards_in_a_row < recovery.settings.max_discards:
        return
    _, reason = recovery.refusal(done.measured)
    recovery.log.emit(Unstable(step=state.step, discards=state.discards_in_a_row))
    fp16 = recovery.config.precision.kind == "fp16"
    raise shared(
        UnstableError(
            f"{state.discards_in_a_row} updates in a row were refused ({reason}), up to step {state.step}: "
            f"{explain_refusals(recovery.run, state, done.measured, fp16)}"
        )
    )


def explain_refusals(run: RunDirectory, state: RunState, measured: Measured, fp16: bool) -> str:
    """Why every update of late was refused, as far as it is known, and what to do.

    Args:
        run: where the evidence is.
        state: the state after the last of them.
        measured: what was measured of the last of them.
        fp16: whether the run computes in fp16, whose loss scale may be the cause.
    """
    untouched = "no update was ever applied: the weights are those that the run began with"
    if fp16 and math.isfinite(measured.loss) and not measured.finite:
        scale = f"a loss scale of {measured.loss_scale:g}"
        told = (
            f"gradients still overflow fp16 at {scale}, which is halved at every overflow. Begin lower "
            "(precision.initial_scale_power), raise stability.max_discards, or set precision.kind=bf16"
            if measured.overflow
            else f"gradients overflow fp16 even at {scale}, the lowest: no scale can help. Set precision.kind=bf16"
        )
        return told if state.updates else f"{untouched}, and {told}"
    if not state.updates:
        return (
            f"{untouched}, so these, the recipe or the data are to blame. Look at {run.journal}; then change "
            "model.init_std, the imported weights or precision.kind, or skip the data (data.skip)"
        )
    return (
        f"the weights or the optimizer's state are damaged, or the data is. Look at {run.journal}; the checkpoints in "
        f"{run.checkpoints} are finite: lower optimizer.lr, or skip the data (data.skip)"
    )
