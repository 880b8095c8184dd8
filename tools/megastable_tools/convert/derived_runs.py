"""Convert a checkpoint to a new run in another layout, offline: without training, a GPU or the target's ranks.

Training reads checkpoints of any layout, so resuming needs no reshaping. This serves programs that read files: a
rehearsal of a planned layout, a smaller copy for fewer hosts, fresh moments. Everything is copied tensor by
tensor, so weights, moments, step, schedule and cursor stay exactly the same.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from megastable.base.errors import CheckpointError, ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.files import CHUNK
from megastable.checkpoint.new_run import (
    NONE,
    OptimizerTensors,
    Whole,
    origin_of,
    refuse_existing,
    write_run,
)
from megastable.checkpoint.store import LayoutState, RunState
from megastable.checkpoint.whole import WholeState, live_changes_of, next_run_of, run_of
from megastable.config import deepspeed_json, recipe
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.optim import schedule
from megastable.parallel.layout import Layout
from megastable.run.changes import select_holding
from megastable.run.directory import FREE, RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.people_events import ChangeMeasured
from megastable.run.events.reading import read_events
from megastable_guard.policy import Policy
from megastable_guard.policy_state import describe_limit
from megastable_guard.step_judge import GuardState
from megastable_tools.convert.inspecting import field_differences


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
        quoted_run = shlex.quote(str(self.out))
        quoted_recipe = shlex.quote(str(self.out / "recipe.yaml"))
        return f"megastable supervise {quoted_recipe} run.dir={quoted_run} -- --num_gpus {self.layout.world}"

    @property
    def text(self) -> str:
        """The result, what it lacks, and how to continue it."""
        text_lines = [f"{self.checkpoint}: step {self.step}, {self.layout}"]
        if self.averaged:
            steps = ", ".join(f"{step:,}" for step in self.averaged)
            text_lines = [
                f"{self.checkpoint}: the mean of {len(self.averaged)} checkpoints, of steps {steps}; {self.layout}",
                f"It is the state of no step: schedule and data go on after step {self.step:,}, and its loss is not "
                "known before it is evaluated.",
            ]
        if not self.optimizer:
            text_lines.append("Without the optimizer's state: training continues with fresh moments.")
        if self.ledgers is None:
            text_lines.append(
                "The checkpoint was not in its run: copy skips.jsonl and blends.jsonl, if the run had them, "
                f"to {self.out} before continuing, or it reads other samples."
            )
        return "\n".join([*text_lines, f"Continue: {self.command}"])

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
    what data-parallel ranks and heads allow, replicas and expert parallelism to what ranks and ZeRO do; what orders the
    passes of stages is left out without them, model chunks also where there are too few blocks. A micro-batch must
    divide a rank's share of the global batch.
    """
    names = ("tensor", "pipeline", "zero", "data")
    given = {name: size for name in names if (size := getattr(sizes, name)) is not None}
    tensor, pipeline, zero, data = (given.get(name, getattr(old, name)) for name in names)
    recipe_tree = run.model_dump(mode="json")
    sequence = run.parallel.sequence and tensor > 1
    context = gcd(run.parallel.context, data, run.model.heads // max(tensor, 1))
    replicas = gcd(run.parallel.replicas, data) if zero == 1 else 1
    expert = gcd(run.parallel.expert, data) if zero < 3 else 1
    recipe_tree["parallel"] |= {
        "tensor": tensor, "pipeline": pipeline, "zero": zero, "sequence": sequence, "context": context,
        "replicas": replicas, "expert": expert,
    }  # fmt: skip
    if not sequence:
        recipe_tree["parallel"]["tensor_overlap"] = 1
    if pipeline == 1:
        recipe_tree["parallel"]["schedule"] = "1f1b"
    if pipeline == 1 or pipeline * run.parallel.model_chunks > run.model.layers:
        recipe_tree["parallel"]["model_chunks"] = 1
    if sizes.micro_batch is not None:
        recipe_tree["train"]["micro_batch"] = sizes.micro_batch
    made = recipe.validate_tree(recipe_tree, f"tensor={tensor} pipeline={pipeline} zero={zero} data={data}")
    if data < 1:
        raise ConfigError(f"--data {data}: at least one data-parallel rank is needed")
    deepspeed_json.size_of_data_parallel(made, Layout(tensor, pipeline, data, context).world)
    return made, data


def reshape_checkpoint(
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
    run, data_ranks = laid_out(run_of(checkpoint), state.layout, sizes)
    state = state.model_copy(update={"layout": state.layout.model_copy(update={"data": data_ranks})})
    held = OptimizerTensors(whole.kinds_of, whole.shared)
    # What people have changed live and still holds, and what was measured of it by then.
    live_changes = live_changes_of(checkpoint)
    change_numbers = {live_change.change for live_change in live_changes}
    journal_path = RunDirectory(checkpoint.resolve().parent.parent).journal
    measured = [
        event for event in read_events(journal_path, b'"change_measured"')
        if isinstance(event, ChangeMeasured) and event.change in change_numbers and (event.step or 0) <= state.step
    ]  # fmt: skip
    return write_run_of(
        out, run, state, whole.read_tensor, ledgers_of(checkpoint),
        optimizer=held if optimizer and whole.stateful else None, expert_state=whole.expert_state,
        origin=origin_of(checkpoint, how="reshaped" if optimizer else "exported"), watch=watch,
        people=[*live_changes, *measured],
    )  # fmt: skip


def describe_import(out: Path, checkpoint: Path) -> Made:
    """The result of an import, which needs no ledgers."""
    run_state = store.read_state(checkpoint)
    return Made(out, checkpoint, run_state.step, run_state.layout, run_state.adam_step > 0, out)


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
    expert_state: Mapping[str, Tensor] = NONE,
    people: Sequence[Event] = (),
) -> Made:
    """`write_run`, with its result described."""
    new_checkpoint = write_run(
        out, run, state, whole, optimizer=optimizer, origin=origin, expert_state=expert_state, ledgers=ledgers,
        people=people, watch=watch,
    )  # fmt: skip
    new_layout = store.read_state(new_checkpoint).layout
    return Made(out, new_checkpoint, state.step, new_layout, optimizer is not None, ledgers)


def ledgers_of(checkpoint: Path) -> Path | None:
    """The run directory of a checkpoint, None for one that was copied elsewhere."""
    folder = checkpoint.resolve().parent
    is_of_run = folder.name == "checkpoints" and (folder.parent / "recipe.yaml").is_file()
    return folder.parent if is_of_run else None


# Branch a run at a checkpoint of its constant phase: a new run whose learning rate decays from there on. One long run
# at a constant rate then gives a finished model at any length, for the cost of each decay (Hu et al.,
# arXiv:2404.06395, section 4; Hägele et al., arXiv:2405.18392, section 3). Weights, moments, data order, skips and
# position continue as the parent's would; only the schedule and the length of the run differ.


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
        text_lines = [
            f"The learning rate goes on at {self.rate:.3g} and falls to {self.floor:.3g} over {self.decay_steps} "
            f"updates; the run ends at step {self.steps}.",
            *(f"In force, as in the parent: {limit_text}." for limit_text in self.limits),
            *(
                f"Changed live in the parent, and for good in the branch's recipe: {change_text}."
                for change_text in self.changes
            ),
        ]
        return "\n".join([*text_lines, self.made.text])

    @property
    def facts(self) -> dict[str, Any]:
        """The same for JSON."""
        return self.made.facts | {
            "rate": self.rate, "floor": self.floor, "decay_steps": self.decay_steps, "steps": self.steps,
            "limits": list(self.limits), "changes": list(self.changes),
        }  # fmt: skip


def make_decaying_config(
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
    done = schedule.measure_progress(old, state.updates, state.trained_tokens)
    if done < schedule.warmup_length(old):
        unit = "tokens" if old.by_tokens else "updates"
        raise ConfigError(
            f"{where} is in the warm-up, of {schedule.warmup_length(old)} {unit}: the peak rate was not reached. "
            "Branch at a later checkpoint"
        )
    present = schedule.rate_at(old, peak, schedule.find_decay_end(run), done)
    if not math.isclose(present, peak, rel_tol=1e-9):
        raise ConfigError(
            f"{where} is past the constant phase of schedule.kind={old.kind}: the rate is {present:.3g}, the peak "
            f"{peak:.3g}. Branch at an earlier checkpoint; a run to branch from has schedule.kind=constant or wsd"
        )
    recipe_tree = run.model_dump(mode="json")
    decay_tokens = (run.batches.reach_after(state.cursor, steps) - state.cursor) * run.model.sequence_length
    unit, decay_length = ("tokens", decay_tokens) if old.by_tokens else ("steps", steps)
    recipe_tree["schedule"] |= {
        "kind": "wsd", "decay": kind, f"decay_{unit}": decay_length, f"total_{unit}": done + decay_length,
        "floor": old.floor if floor is None else floor,
    }  # fmt: skip
    recipe_tree["train"]["steps"] = state.step + steps
    return recipe.validate_tree(recipe_tree, f"branch at step {state.step}")


def limits_of(run: RunConfig, state: store.RunState) -> tuple[str, ...]:
    """What lowers the rate below the schedule's at `state`, in words."""
    if not run.stability.enabled or run.stability.dry_run:
        return ()
    try:
        policy_memory = GuardState.model_validate(state.stability.get("guard", {})).policy
    except ValidationError:
        return ()  # a restart drops it, too
    rate_policy = Policy(run.stability.policy, policy_memory)
    limit_texts = [describe_limit(limit) for limit in policy_memory.limits if limit.holds]
    rate_share = rate_policy.limit_rate(state.updates, run.optimizer.lr) / run.optimizer.lr
    if rate_share < 1 and not limit_texts:
        limit_texts = [f"the learning rate warms up: {rate_share:.3g} times the scheduled one at first"]
    return tuple(limit_texts)


def branch_run(
    checkpoint: Path,
    out: Path,
    steps: int,
    kind: DecayKind = "linear",
    floor: float | None = None,
    *,
    watch: Callable[[int], None] = lambda _: None,
) -> Branch:
    """Make the run `out` of a verified checkpoint, in the same layout: see `make_decaying_config`. watch: as of
    `write_run`. Raises CheckpointError, ConfigError; then nothing is left of `out`."""
    refuse_existing(out)
    whole, state, old = WholeState(checkpoint), store.read_state(checkpoint), next_run_of(checkpoint)
    run = make_decaying_config(old, state, steps, kind, floor)
    moment_tensors = OptimizerTensors(whole.kinds_of, whole.shared) if whole.stateful else None
    made = write_run_of(
        out, run, state, whole.read_tensor, ledgers_of(checkpoint), optimizer=moment_tensors,
        expert_state=whole.expert_state,
        origin=origin_of(checkpoint, how="branched", decay_steps=steps, decay=kind), watch=watch,
    )  # fmt: skip
    peak = run.optimizer.lr
    held = select_holding(live_changes_of(checkpoint), state.step + 1)
    changes = {key: f"{key}={json.dumps(value)}" for change in held for key, value in change.new.items()}
    return Branch(
        made, peak, peak * run.schedule.floor, steps, run.train.steps, limits_of(old, state), tuple(changes.values())
    )  # fmt: skip


# Average the weights of several checkpoints. The last few checkpoints of one run: LAWA (Kaddour, arXiv:2209.14981).
# Runs that diverged from a common start: model soups (Wortsman et al., arXiv:2203.05482). Runs without a common start
# have no useful mean. Adam's moments belong to the weights at which they were gathered, so a mean has none.


def average_checkpoints(
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
    parts = normalize_weights(len(checkpoints), weights)
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
    run_state = states[newest].model_copy(update={"vitals": None, "recent_losses": []})
    new_run = write_run_of(
        out, runs[newest], run_state, average_tensors(given, parts), ledgers_of(checkpoints[newest]), optimizer=None,
        origin={"how": "averaged", "shares": parts, "sources": [origin_of(path) for path in checkpoints]},
        expert_state=average_expert_state([tensors for _, tensors in given], parts), watch=watch,
    )  # fmt: skip
    return replace(new_run, averaged=tuple(sorted(run_state.step for run_state in states)))


def normalize_weights(count: int, weights: Sequence[float] | None) -> list[float]:
    """Weights of `count` checkpoints, 1 in all: equal, or in proportion to `weights`. Raises ConfigError."""
    if weights is None:
        return [1 / count] * count
    if len(weights) != count:
        raise ConfigError(f"--weights: {len(weights)} numbers for {count} checkpoints: give one for each")
    if bad := [w for w in weights if not (math.isfinite(w) and w > 0)]:
        raise ConfigError(f"--weights: {bad[0]} is not a number above 0: leave that checkpoint out instead")
    weight_sum = sum(weights)
    if not math.isfinite(weight_sum):
        raise ConfigError("--weights: they are too large to be added: divide all of them by the same number")
    return [w / weight_sum for w in weights]


def check_alike(given: Sequence[tuple[str, WholeState]]) -> None:
    """Raises CheckpointError unless all hold tensors of the same names and shapes. given: (name for messages,
    tensors)."""
    (first_called, first), *other_states = given
    for called, other in other_states:
        missing_names = sorted(set(first.names) - set(other.names))
        extra_names = sorted(set(other.names) - set(first.names))
        if missing_names or extra_names:
            what = f"has no {missing_names[0]!r}" if missing_names else f"has {extra_names[0]!r} besides"
            raise CheckpointError(f"{called}: {what}, unlike {first_called}: they are of different models")
        for name in first.names:
            if first.shape_of(name) != other.shape_of(name):
                raise CheckpointError(
                    f"{called}: {name} is {other.shape_of(name)}, in {first_called} {first.shape_of(name)}: they are "
                    "of different models"
                )


def average_tensors(
    given: Sequence[tuple[str, WholeState]], parts: Sequence[float]
) -> Callable[[str, str], Tensor]:
    """`whole(name, kind)` of the mean, for `checkpoint.new_run.write_run`.

    Sums are in fp64 and rounded to fp32 once, so the mean of copies of one checkpoint is that checkpoint, byte by byte.
    Memory: one tensor in fp64, and one in fp32. Raises CheckpointError for non-finite weights.
    """

    def whole(name: str, kind: str) -> Tensor:
        # A sum starts at -0.0: 0.0 would lose the sign of a -0.0.
        tensor_sum = torch.full(given[0][1].shape_of(name), -0.0, dtype=torch.float64)
        for (state_name, state_tensors), state_share in zip(given, parts, strict=True):
            tensor = state_tensors.read_tensor(name, kind).flatten()
            for total_chunk, chunk in zip(tensor_sum.view(-1).split(CHUNK), tensor.split(CHUNK), strict=True):
                if not bool(chunk.isfinite().all()):
                    raise CheckpointError(
                        f"{state_name}: {name} holds values that are not finite: leave this checkpoint out"
                    )
                total_chunk.add_(chunk.double(), alpha=state_share)
        return tensor_sum.float()

    return whole


def average_expert_state(given: Sequence[WholeState], parts: Sequence[float]) -> dict[str, Tensor]:
    """The mean of the routers' state, in fp64 and rounded to fp32 once; only what all of them have."""
    states = [whole_state.expert_state for whole_state in given]
    common_names = set.intersection(*map(set, states))
    return {
        name: torch.stack([state[name].double() * part for state, part in zip(states, parts, strict=True)])
        .sum(0)
        .float()
        for name in sorted(common_names)
    }


# Runs that start from another framework's checkpoint


def with_vocabulary(run: RunConfig) -> RunConfig:
    """`run` with its corpora's vocabulary size, if the recipe has none. Raises ConfigError, DataError."""
    if run.model.vocab_size is not None:
        return run
    if not run.data.corpora:
        raise ConfigError(
            "model.vocab_size is missing, and there are no data.corpora to take it from: set it to the number of "
            "tokens in the checkpoint's vocabulary, without padding"
        )
    size = open_corpora(run.data.corpora, run.model.sequence_length, run.run.seed).vocab_size
    return run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": size})})


def state_of(run: RunConfig, order_fingerprint: str = "", **given: Any) -> RunState:
    """The state of a run that has read no data yet; `given` sets further fields."""
    p = run.parallel
    start_layout = LayoutState(
        tensor=p.tensor, pipeline=p.pipeline, context=p.context, replicas=p.replicas, expert=p.expert,
        zero=p.zero, precision=run.precision.kind, data=deepspeed_json.size_of_data_parallel(run, p.least_ranks),
    )  # fmt: skip
    return RunState(order_fingerprint=order_fingerprint, layout=start_layout, **given)
