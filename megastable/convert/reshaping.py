"""A checkpoint as a new run in another layout, without training, without a GPU and without the ranks that it is for.

Training reads checkpoints of any layout, so nothing has to be reshaped to go on. This is for what reads files: a
rehearsal of tomorrow's layout, a smaller copy for fewer hosts, fresh moments. Everything comes through tensor by
tensor, so weights, moments, step, schedule and cursor are exactly the old ones.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from megastable.base.errors import ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.new_run import Whole, origin_of, write_run
from megastable.checkpoint.target import refuse_existing
from megastable.checkpoint.whole import WholeState, run_of
from megastable.config import deepspeed_json, recipe
from megastable.config.tree import RunConfig
from megastable.parallel.layout import Layout


@dataclass(frozen=True)
class Made:
    """A run directory that was made. checkpoint: the folder in it; ledgers: the run whose skips and blends it goes on
    with, None where there was none to be found."""

    out: Path
    checkpoint: Path
    step: int
    layout: store.LayoutState
    optimizer: bool
    ledgers: Path | None

    @property
    def command(self) -> str:
        """What goes on from it, on one host."""
        out = shlex.quote(str(self.out))
        recipe = shlex.quote(str(self.out / "recipe.yaml"))
        return f"python launch/supervise.py {recipe} run.dir={out} -- --num_gpus {self.layout.world}"


@dataclass(frozen=True)
class Sizes:
    """Of a layout: tensor- and pipeline-parallel ranks, stage of ZeRO, data-parallel ranks, samples per rank and pass;
    None = as it is."""

    tensor: int | None = None
    pipeline: int | None = None
    zero: int | None = None
    data: int | None = None
    micro_batch: int | None = None


AS_IT_IS = Sizes()


def laid_out(run: RunConfig, old: store.LayoutState, sizes: Sizes) -> tuple[RunConfig, int]:
    """`run`, whose layout is `old`, in another one, and how many data-parallel ranks that has. Raises ConfigError for
    one that cannot be, naming every key in the way.

    Sequence parallelism, which is over the tensor group, ends where there is none; context parallelism goes as far as
    data-parallel ranks and heads can be shared out. A micro-batch must divide what a rank gets of the global batch.
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
    """Make the run `out` of a verified checkpoint. optimizer: with Adam's moments, where it has some. watch: as of
    `write_run`. Raises CheckpointError, ConfigError; then nothing is left of `out`.
    """
    refuse_existing(out)
    whole, state = WholeState(checkpoint), store.read_state(checkpoint)
    run, data = laid_out(run_of(checkpoint), state.layout, sizes)
    state = state.model_copy(update={"layout": state.layout.model_copy(update={"data": data})})
    return write_run_of(
        out, run, state, whole.tensor, ledgers_of(checkpoint), optimizer=optimizer and len(whole.kinds) > 1,
        origin=origin_of(checkpoint, how="reshaped" if optimizer else "exported"), watch=watch,
    )  # fmt: skip


def write_run_of(
    out: Path,
    run: RunConfig,
    state: store.RunState,
    whole: Whole,
    ledgers: Path | None,
    *,
    optimizer: bool,
    origin: dict[str, Any],
    watch: Callable[[int], None],
) -> Made:
    """`write_run`, and what to say of it."""
    written = write_run(
        out, run, state, whole, optimizer=optimizer, origin=origin, ledgers=ledgers, watch=watch
    )
    layout = store.read_state(written).layout
    return Made(out, written, state.step, layout, optimizer, ledgers)


def ledgers_of(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in, None for one that was copied elsewhere."""
    run = checkpoint.resolve().parent.parent
    return (
        run if checkpoint.resolve().parent.name == "checkpoints" and (run / "recipe.yaml").is_file() else None
    )
