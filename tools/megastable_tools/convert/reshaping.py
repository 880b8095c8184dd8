"""Convert a checkpoint to a new run in another layout, offline: without training, a GPU or the target's ranks.

Training reads checkpoints of any layout, so resuming needs no reshaping. This serves programs that read files: a
rehearsal of a planned layout, a smaller copy for fewer hosts, fresh moments. Everything is copied tensor by
tensor, so weights, moments, step, schedule and cursor stay exactly the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from megastable.base.errors import ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.new_run import OptimizerTensors, Whole, origin_of, refuse_existing, write_run
from megastable.checkpoint.whole import WholeState, live_changes_of, run_of
from megastable.config import deepspeed_json, recipe
from megastable.config.tree import RunConfig
from megastable.parallel.layout import Layout
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.people_events import ChangeMade, ChangeMeasured
from megastable.run.events.reading import read_events


@dataclass(frozen=True)
class Made:
    """A new run directory. checkpoint: the folder in it; ledgers: the run from which skips and blends were copied, None
    if it was not found. averaged: the steps of the checkpoints whose mean it is."""

    out: Path
    checkpoint: Path
    step: int
    layout: store.LayoutState
    optimizer: bool
    ledgers: Path | None
    averaged: tuple[int, ...] = ()

    @property
    def command(self) -> str:
        """The command that continues it, on one host."""
        out = shlex.quote(str(self.out))
        recipe = shlex.quote(str(self.out / "recipe.yaml"))
        return f"megastable supervise {recipe} run.dir={out} -- --num_gpus {self.layout.world}"

    @property
    def text(self) -> str:
        """The result, what it lacks, and how to continue it."""
        lines = [f"{self.checkpoint}: step {self.step}, {self.layout}"]
        if self.averaged:
            steps = ", ".join(f"{step:,}" for step in self.averaged)
            lines = [
                f"{self.checkpoint}: the mean of {len(self.averaged)} checkpoints, of steps {steps}; {self.layout}",
                f"It is the state of no step: schedule and data go on after step {self.step:,}, and its loss is not "
                "known before it is evaluated.",
            ]
        if not self.optimizer:
            lines.append("Without the optimizer's state: training continues with fresh moments.")
        if self.ledgers is None:
            lines.append(
                "The checkpoint was not in its run: copy skips.jsonl and blends.jsonl, if the run had them, "
                f"to {self.out} before continuing, or it reads other samples."
            )
        return "\n".join([*lines, f"Continue: {self.command}"])

    @property
    def facts(self) -> dict[str, Any]:
        """The result for JSON."""
        return {
            "run": str(self.out), "checkpoint": str(self.checkpoint), "step": self.step,
            "layout": self.layout.model_dump(), "world": self.layout.world, "optimizer": self.optimizer,
            "averaged": list(self.averaged), "ledgers": None if self.ledgers is None else str(self.ledgers),
            "command": self.command,
        }  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Of a layout: tensor- and pipeline-parallel ranks, stage of ZeRO, data-parallel ranks, samples per rank and pass;
    None = unchanged."""

    tensor: int | None = None
    pipeline: int | None = None
    zero: int | None = None
    data: int | None = None
    micro_batch: int | None = None


AS_IT_IS = Sizes()


def laid_out(run: RunConfig, old: store.LayoutState, sizes: Sizes) -> tuple[RunConfig, int]:
    """`run`, whose layout is `old`, in another layout, and the number of data-parallel ranks. Raises ConfigError for an
    invalid one, naming every key in the way.

    Sequence parallelism, which needs a tensor group, is switched off without one; context parallelism is reduced to
    what data-parallel ranks and heads allow. A micro-batch must divide a rank's share of the global batch.
    """
    tensor, pipeline, zero, data = (
        getattr(old if getattr(sizes, name) is None else sizes, name)
        for name in ("tensor", "pipeline", "zero", "data")
    )
    tree = run.model_dump(mode="json")
    sequence = run.parallel.sequence and tensor > 1
    context = gcd(run.parallel.context, data, run.model.heads // max(tensor, 1))
    tree["parallel"] |= {
        "tensor": tensor, "pipeline": pipeline, "zero": zero, "sequence": sequence, "context": context,
    }  # fmt: skip
    if sizes.micro_batch is not None:
        tree["train"]["micro_batch"] = sizes.micro_batch
    made = recipe.validate(tree, f"tensor={tensor} pipeline={pipeline} zero={zero} data={data}")
    if data < 1:
        raise ConfigError(f"--data {data}: at least one data-parallel rank is needed")
    deepspeed_json.data_parallel(made, Layout(tensor, pipeline, data, context).world)
    return made, data


def reshape(
    checkpoint: Path,
    out: Path,
    sizes: Sizes = AS_IT_IS,
    *,
    optimizer: bool = True,
    watch: Callable[[int], None] = lambda _: None,
) -> Made:
    """Make the run `out` of a verified checkpoint. optimizer: with its state, where it has some. watch: as of
    `write_run`. Raises CheckpointError, ConfigError; then nothing is left of `out`.
    """
    refuse_existing(out)
    whole, state = WholeState(checkpoint), store.read_state(checkpoint)
    run, data = laid_out(run_of(checkpoint), state.layout, sizes)
    state = state.model_copy(update={"layout": state.layout.model_copy(update={"data": data})})
    held = OptimizerTensors(whole.kinds_of, whole.shared)
    return write_run_of(
        out, run, state, whole.tensor, ledgers_of(checkpoint), optimizer=held if optimizer and whole.stateful else None,
        origin=origin_of(checkpoint, how="reshaped" if optimizer else "exported"), watch=watch,
        people=_people_of(checkpoint, state.step),
    )  # fmt: skip


def _people_of(checkpoint: Path, step: int) -> list[ChangeMade | ChangeMeasured]:
    """What people have changed live and still holds after a step, and what was measured of it by then."""
    changes = live_changes_of(checkpoint)
    numbers = {change.change for change in changes}
    journal = RunDirectory(checkpoint.resolve().parent.parent).journal
    measured = [
        event for event in read_events(journal, b'"change_measured"')
        if isinstance(event, ChangeMeasured) and event.change in numbers and (event.step or 0) <= step
    ]  # fmt: skip
    return [*changes, *measured]


def describe_import(out: Path, checkpoint: Path) -> Made:
    """The result of an import, which needs no ledgers."""
    state = store.read_state(checkpoint)
    return Made(out, checkpoint, state.step, state.layout, state.adam_step > 0, out)


def write_run_of(
    out: Path,
    run: RunConfig,
    state: store.RunState,
    whole: Whole,
    ledgers: Path | None,
    *,
    optimizer: OptimizerTensors | None,
    origin: dict[str, Any],
    watch: Callable[[int], None],
    people: Sequence[Event] = (),
) -> Made:
    """`write_run`, with its result described."""
    written = write_run(
        out,
        run,
        state,
        whole,
        optimizer=optimizer,
        origin=origin,
        ledgers=ledgers,
        people=people,
        watch=watch,
    )
    layout = store.read_state(written).layout
    return Made(out, written, state.step, layout, optimizer is not None, ledgers)


def ledgers_of(checkpoint: Path) -> Path | None:
    """The run directory of a checkpoint, None for one that was copied elsewhere."""
    run = checkpoint.resolve().parent.parent
    return (
        run if checkpoint.resolve().parent.name == "checkpoints" and (run / "recipe.yaml").is_file() else None
    )
