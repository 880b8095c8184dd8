"""Average the weights of several checkpoints into a new run.

The last few checkpoints of one run: LAWA (Kaddour, arXiv:2209.14981). Runs that diverged from a common start: model
soups (Wortsman et al., arXiv:2203.05482). Runs without a common start have no useful mean. Adam's moments
belong to the weights at which they were gathered, so a mean has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megastable.base.errors import CheckpointError, ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.new_run import origin_of, refuse_existing
from megastable.checkpoint.pieces import CHUNK
from megastable.checkpoint.whole import WholeState, run_of
from megastable.run.directory import FREE
from megastable_tools.convert.diff import field_differences
from megastable_tools.convert.reshaping import Made, ledgers_of, write_run_of


def average(
    checkpoints: Sequence[Path],
    out: Path,
    weights: Sequence[float] | None = None,
    watch: Callable[[int], None] = lambda _: None,
) -> Made:
    """Make the run `out` from the mean of verified checkpoints. State, recipe and layout are those of the newest one
    (the last one given, if there are several). watch: as for `write_run`. Raises CheckpointError, ConfigError; then
    nothing of `out` is left.
    """
    refuse_existing(out)
    if len(checkpoints) < 2:
        raise ConfigError("a mean needs at least two checkpoints: give more, or use export for a single one")
    parts = shares(len(checkpoints), weights)
    states, runs = [store.read_state(path) for path in checkpoints], [run_of(path) for path in checkpoints]
    newest = max(range(len(states)), key=lambda i: (states[i].step, i))
    given = [(str(path), WholeState(path)) for path in checkpoints]
    check_alike(given)
    for path, run in zip(checkpoints, runs, strict=True):
        for key, own, other in field_differences(runs[newest].model.model_dump(), run.model.model_dump()):
            if f"model.{key}" not in FREE:
                raise CheckpointError(
                    f"{path}: model.{key} is {other}, in {checkpoints[newest]} {own}: they are of different models"
                )
    # Vitals and losses belong to another state than the mean.
    state = states[newest].model_copy(update={"vitals": None, "recent_losses": []})
    made = write_run_of(
        out, runs[newest], state, mean(given, parts), ledgers_of(checkpoints[newest]), optimizer=None,
        origin={"how": "averaged", "shares": parts, "sources": [origin_of(path) for path in checkpoints]},
        watch=watch,
    )  # fmt: skip
    return replace(made, averaged=tuple(sorted(state.step for state in states)))


def shares(count: int, weights: Sequence[float] | None) -> list[float]:
    """Weights of `count` checkpoints, 1 in all: equal, or in proportion to `weights`. Raises ConfigError."""
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise ConfigError(f"--weights: {len(weights)} numbers for {count} checkpoints: give one for each")
    if bad := [w for w in weights if not (math.isfinite(w) and w > 0)]:
        raise ConfigError(f"--weights: {bad[0]} is not a number above 0: leave that checkpoint out instead")
    total = sum(weights)
    if not math.isfinite(total):
        raise ConfigError("--weights: they are too large to be added: divide all of them by the same number")
    return [w / total for w in weights]


def check_alike(given: Sequence[tuple[str, WholeState]]) -> None:
    """Raises CheckpointError unless all hold tensors of the same names and shapes. given: (name for messages,
    tensors)."""
    (first_called, first), *rest = given
    for called, other in rest:
        missing, beyond = (
            sorted(set(first.names) - set(other.names)),
            sorted(set(other.names) - set(first.names)),
        )
        if missing or beyond:
            what = f"has no {missing[0]!r}" if missing else f"has {beyond[0]!r} besides"
            raise CheckpointError(f"{called}: {what}, unlike {first_called}: they are of different models")
        for name in first.names:
            if first.shape(name) != other.shape(name):
                raise CheckpointError(
                    f"{called}: {name} is {other.shape(name)}, in {first_called} {first.shape(name)}: they are of "
                    "different models"
                )


def mean(given: Sequence[tuple[str, WholeState]], parts: Sequence[float]) -> Callable[[str, str], Tensor]:
    """`whole(name, kind)` of the mean, for `checkpoint.new_run.write_run`.

    Sums are in fp64 and rounded to fp32 once, so the mean of copies of one checkpoint is that checkpoint, byte by byte.
    Memory: one tensor in fp64, and one in fp32. Raises CheckpointError for non-finite weights.
    """

    def whole(name: str, kind: str) -> Tensor:
        # A sum starts at -0.0: 0.0 would lose the sign of a -0.0.
        total = torch.full(given[0][1].shape(name), -0.0, dtype=torch.float64)
        for (called, tensors), part in zip(given, parts, strict=True):
            if not _add(total.view(-1), tensors.tensor(name, kind).flatten(), part):
                raise CheckpointError(
                    f"{called}: {name} holds values that are not finite: leave this checkpoint out"
                )
        return total.float()

    return whole


def _add(total: Tensor, tensor: Tensor, part: float) -> bool:
    """Add `part` of a tensor; whether it is finite."""
    for begin in range(0, len(tensor), CHUNK):
        piece = tensor[begin : begin + CHUNK].double()
        if not bool(piece.isfinite().all()):
            return False
        total[begin : begin + CHUNK].add_(piece, alpha=part)
    return True
