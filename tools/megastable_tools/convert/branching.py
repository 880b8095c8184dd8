"""Branch a run at a checkpoint of its constant phase: a new run whose learning rate decays from there on.

One long run at a constant rate then gives a finished model at any length, for the cost of each decay (Hu et al.,
arXiv:2404.06395, section 4; Hägele et al., arXiv:2405.18392, section 3). Weights, moments, data order, skips and
position continue as the parent's would; only the schedule and the length of the run differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from megastable.base.errors import ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.new_run import OptimizerTensors, origin_of, refuse_existing
from megastable.checkpoint.whole import WholeState, live_changes_of, next_run_of
from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.optim import schedule
from megastable.run.changes import holding
from megastable_guard.guard import GuardState
from megastable_guard.learning_rate_limits import words
from megastable_guard.policy import Policy
from megastable_tools.convert.reshaping import Made, ledgers_of, write_run_of

DecayKind = Literal["linear", "cosine", "sqrt"]


@dataclass(frozen=True)
class Branch:
    """A new run whose rate decays from `rate` to `floor`, over `decay_steps` updates. steps: its length. limits: what
    lowers the rate below that of the schedule, in words: it holds in the branch, too. changes: what people have changed
    live, KEY=VALUE each: its recipe has it, for good."""

    made: Made
    rate: float
    floor: float
    decay_steps: int
    steps: int
    limits: tuple[str, ...]
    changes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The rates, what lowers them, and the run."""
        lines = [
            f"The learning rate goes on at {self.rate:.3g} and falls to {self.floor:.3g} over {self.decay_steps} "
            f"updates; the run ends at step {self.steps}.",
            *(f"In force, as in the parent: {limit}." for limit in self.limits),
            *(
                f"Changed live in the parent, and for good in the branch's recipe: {it}."
                for it in self.changes
            ),
        ]
        return "\n".join([*lines, self.made.text])

    @property
    def facts(self) -> dict[str, Any]:
        """The same for JSON."""
        return self.made.facts | {
            "rate": self.rate, "floor": self.floor, "decay_steps": self.decay_steps, "steps": self.steps,
            "limits": list(self.limits), "changes": list(self.changes),
        }  # fmt: skip


def decaying(
    run: RunConfig, state: store.RunState, steps: int, kind: DecayKind = "linear", floor: float | None = None
) -> RunConfig:
    """The recipe of a run that decays from `state` of `run` on, over `steps` updates, to `floor` times the peak rate;
    None: as in `run`.

    Raises ConfigError if the schedule of `run` is not in its constant phase there, so that the rate would jump.
    """
    where = f"step {state.step} ({state.updates} updates)"
    if steps < 1:
        raise ConfigError(f"--decay-steps {steps}: at least one update is needed")
    old, peak = run.schedule, run.optimizer.lr
    done = schedule.progress(old, state.updates, state.trained_tokens)
    if done < schedule.warmup(old):
        unit = "tokens" if old.by_tokens else "updates"
        raise ConfigError(
            f"{where} is in the warm-up, of {schedule.warmup(old)} {unit}: the peak rate was not reached. Branch at a "
            "later checkpoint"
        )
    present = schedule.rate(old, peak, schedule.total(run), done)
    if not math.isclose(present, peak, rel_tol=1e-9):
        raise ConfigError(
            f"{where} is past the constant phase of schedule.kind={old.kind}: the rate is {present:.3g}, the peak "
            f"{peak:.3g}. Branch at an earlier checkpoint; a run to branch from has schedule.kind=constant or wsd"
        )
    tree = run.model_dump(mode="json")
    tokens = (run.batches.reach(state.cursor, steps) - state.cursor) * run.model.sequence_length
    unit, last = ("tokens", tokens) if old.by_tokens else ("steps", steps)
    tree["schedule"] |= {
        "kind": "wsd", "decay": kind, f"decay_{unit}": last, f"total_{unit}": done + last,
        "floor": old.floor if floor is None else floor,
    }  # fmt: skip
    tree["train"]["steps"] = state.step + steps
    return recipe.validate(tree, f"branch at step {state.step}")


def limits_of(run: RunConfig, state: store.RunState) -> tuple[str, ...]:
    """What lowers the rate below the schedule's at `state`, in words."""
    if not run.stability.enabled or run.stability.dry_run:
        return ()
    try:
        memory = GuardState.model_validate(state.stability.get("guard", {})).policy
    except ValidationError:
        return ()  # a restart drops it, too
    policy = Policy(run.stability.policy, memory)
    found = [words(limit) for limit in memory.limits if limit.holds]
    share = policy.rate(state.updates, run.optimizer.lr) / run.optimizer.lr
    if share < 1 and not found:
        found = [f"the learning rate warms up: {share:.3g} times the scheduled one at first"]
    return tuple(found)


def branch(
    checkpoint: Path,
    out: Path,
    steps: int,
    kind: DecayKind = "linear",
    floor: float | None = None,
    *,
    watch: Callable[[int], None] = lambda _: None,
) -> Branch:
    """Make the run `out` of a verified checkpoint, in the same layout: see `decaying`. watch: as of `write_run`.
    Raises CheckpointError, ConfigError; then nothing is left of `out`."""
    refuse_existing(out)
    whole, state, old = WholeState(checkpoint), store.read_state(checkpoint), next_run_of(checkpoint)
    run = decaying(old, state, steps, kind, floor)
    tensors = OptimizerTensors(whole.kinds_of, whole.shared) if whole.stateful else None
    made = write_run_of(
        out, run, state, whole.tensor, ledgers_of(checkpoint), optimizer=tensors,
        origin=origin_of(checkpoint, how="branched", decay_steps=steps, decay=kind), watch=watch,
    )  # fmt: skip
    peak = run.optimizer.lr
    held = holding(live_changes_of(checkpoint), state.step + 1)
    changes = {key: f"{key}={json.dumps(value)}" for change in held for key, value in change.new.items()}
    return Branch(
        made, peak, peak * run.schedule.floor, steps, run.train.steps, limits_of(old, state), tuple(changes.values())
    )  # fmt: skip
