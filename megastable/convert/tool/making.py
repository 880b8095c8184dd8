"""`reshape`, `export`, `branch` and `average`: make new runs, and say how to continue them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megastable.base.errors import CheckpointError, ConfigError
from megastable.base.progress_bar import bar
from megastable.checkpoint.target import refuse_existing
from megastable.checkpoint.whole import WholeState
from megastable.convert.average import average
from megastable.convert.branching import Branch, DecayKind, branch
from megastable.convert.reshaping import AS_IT_IS, Made, Sizes, reshape
from megastable.convert.tool.verifying import checkpoints_of, good


def make_reshaped(
    checkpoint: Path, out: Path, sizes: Sizes = AS_IT_IS, optimizer: bool = True, silent: bool = False
) -> Made:
    """`reshape` with finding, verification and a progress bar."""
    refuse_existing(out)
    found = good(checkpoint, silent)
    with bar("writing", written_bytes(found, optimizer), silent) as watch:
        return reshape(found, out, sizes, optimizer=optimizer, watch=watch)


def make_branch(
    checkpoint: Path,
    out: Path,
    steps: int,
    kind: DecayKind = "linear",
    floor: float | None = None,
    silent: bool = False,
) -> Branch:
    """`branch` with finding, verification and a progress bar."""
    refuse_existing(out)
    found = good(checkpoint, silent)
    with bar("writing", written_bytes(found, True), silent) as watch:
        return branch(found, out, steps, kind, floor, watch=watch)


def make_average(
    paths: Sequence[Path], weights: str | None = None, last: int | None = None, silent: bool = False
) -> Made:
    """`average` of all `paths` but the last one, the output. last: the newest `last` of one run instead."""
    *given, out = paths
    if not given:
        raise ConfigError("name the checkpoints, then the new directory: average A B OUT")
    refuse_existing(out)
    if last is not None:
        if len(given) != 1:
            raise ConfigError("--last K takes one run: average --last 5 RUN OUT")
        there = checkpoints_of(given[0])
        if len(there) < last:
            raise CheckpointError(
                f"{given[0]}: {len(there)} checkpoints, --last {last} needs more: give fewer"
            )
        given = there[:last][::-1]
    numbers = None if weights is None else numbers_of(weights)
    checkpoints = [good(path, silent) for path in given]
    if len(checkpoints) < 2:
        raise ConfigError("a mean needs at least two checkpoints: give more, or use export for a single one")
    with bar("averaging", written_bytes(checkpoints[0], False), silent) as watch:
        return average(checkpoints, out, numbers, watch)


def numbers_of(text: str) -> list[float]:
    """0.1,0.2 as numbers. Raises ConfigError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--weights {text}: expected numbers with commas between, e.g. 0.1,0.2,0.7"
        ) from None


def written_bytes(checkpoint: Path, optimizer: bool) -> int:
    """Bytes of weights, and of the optimizer's flat state if it exists and is wanted."""
    whole = WholeState(checkpoint)
    return 4 * sum(
        math.prod(whole.shape(name)) * (len(whole.kinds_of(name)) if optimizer else 1) for name in whole.names
    )


def text_of(made: Made) -> str:
    """The result, what it lacks, and how to continue it."""
    lines = [f"{made.checkpoint}: step {made.step}, {made.layout}"]
    if made.averaged:
        steps = ", ".join(f"{step:,}" for step in made.averaged)
        lines = [
            f"{made.checkpoint}: the mean of {len(made.averaged)} checkpoints, of steps {steps}; {made.layout}",
            f"It is the state of no step: schedule and data go on after step {made.step:,}, and its loss is not known "
            "before it is evaluated.",
        ]
    if not made.optimizer:
        lines.append("Without the optimizer's state: training continues with fresh moments.")
    if made.ledgers is None:
        lines.append(
            "The checkpoint was not in its run: copy skips.jsonl and blends.jsonl, if the run had them, "
            f"to {made.out} before continuing, or it reads other samples."
        )
    return "\n".join([*lines, f"Continue: {made.command}"])


def text_of_branch(branch: Branch) -> str:
    """The rates of a branch, what lowers them, and the run."""
    lines = [
        f"The learning rate goes on at {branch.rate:.3g} and falls to {branch.floor:.3g} over {branch.decay_steps} "
        f"updates; the run ends at step {branch.steps}.",
        *(f"In force, as in the parent: {limit}." for limit in branch.limits),
        *(f"Changed live in the parent, and for good in the branch's recipe: {it}." for it in branch.changes),
    ]
    return "\n".join([*lines, text_of(branch.made)])


def dict_of_branch(branch: Branch) -> dict[str, Any]:
    """The same for JSON."""
    return dict_of(branch.made) | {
        "rate": branch.rate, "floor": branch.floor, "decay_steps": branch.decay_steps, "steps": branch.steps,
        "limits": list(branch.limits), "changes": list(branch.changes),
    }  # fmt: skip


def dict_of(made: Made) -> dict[str, Any]:
    """The result for JSON."""
    return {
        "run": str(made.out), "checkpoint": str(made.checkpoint), "step": made.step,
        "layout": made.layout.model_dump(), "world": made.layout.world, "optimizer": made.optimizer,
        "averaged": list(made.averaged),
        "ledgers": None if made.ledgers is None else str(made.ledgers), "command": made.command,
    }  # fmt: skip
