"""Records every step: layer statistics, signs and trends, step records, trackers, progress line, refused updates."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor

from megastable.base import activity
from megastable.base.collectives import mark_collective
from megastable.base.errors import UnstableError
from megastable.base.hardware import memory_gib
from megastable.checkpoint.store import RunState
from megastable.config.tree import LoggingConfig, RunConfig
from megastable.data.samples import unigram_entropy
from megastable.engine.engine import Engine
from megastable.engine.layer_stats import LayerStatistics
from megastable.engine.measured import Measured
from megastable.model.sizes import flops_per_token
from megastable.parallel.layout import Layout
from megastable.recovery.recovery import Recovery
from megastable.recovery.run_parts import StepResult
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import Discarded
from megastable.run.events.training_events import Evaluated, Unstable
from megastable.run.log import RunLog
from megastable.run.records import LAYER_SCHEMA, LayerRecord, Recorder, StepRecord, worst_samples
from megastable.run.step_phases import phase_columns
from megastable.training.trackers.points import validation_values
from megastable.training.tracking import Tracking, run_point
from megastable.warnings.expert_loads import list_rows, read_choices, summarise_loads


class Live:
    """Shows steps as they happen: on a terminal one updating line, elsewhere a line every `interval` steps."""

    def __init__(self, config: LoggingConfig, steps: int, done: int) -> None:
        self.config, self.steps = config, steps
        self.console = Console()
        self.progress: Progress | None = None
        if self.console.is_terminal:
            self.progress = Progress(
                MofNCompleteColumn(), TimeRemainingColumn(compact=True), BarColumn(bar_width=20),
                TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)), console=self.console,
            )  # fmt: skip
            self.task = self.progress.add_task("", total=steps, completed=done, numbers="")
            self.progress.start()

    def show_step(self, record: StepRecord) -> None:
        """Show one step."""
        progress_text = (
            f"loss {record.loss:.4f}  norm {record.grad_norm:.3f}  {record.tokens_per_second:,.0f} tokens/s"
        )
        if self.console.width >= 120 or self.progress is None:
            progress_text += f"  lr {record.lr:.2e}  MFU {record.mfu_full:.1%}"
        if not record.applied:
            progress_text += "  REFUSED"
        if self.progress is not None:
            self.progress.update(self.task, completed=record.step, numbers=progress_text)
        elif record.step % self.config.interval == 0 or record.step in (1, self.steps) or not record.applied:
            self.print_line(f"step {record.step}/{self.steps}  {progress_text}")

    def print_line(self, text: str) -> None:
        """Print a line above the progress line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()


class Observer:
    """Keeps and shows the steps of a run. peak: TFLOP/s of a device, for MFU; done: where the run stands before them;
    attempt: of the supervisor."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        layout: Layout,
        device: torch.device,
        peak: float,
        done: RunState,
        attempt: int | None = None,
    ) -> None:
        self.config, self.layout, self.device, self.peak = config, layout, device, peak
        self.attempt = attempt
        self.live = Live(config.logging, config.train.steps, done.step)
        first_point = run_point(config, run, done.step, done.tokens, attempt)
        self.tracking = Tracking(config.logging, run, first_point, self.live.print_line)
        self.steps = Recorder(run.steps, config.logging.flush_steps)
        self.layers = Recorder(run.layers, 1, LAYER_SCHEMA)
        self._clips: list[bool] = []

    def record_step(
        self,
        done: StepResult,
        statistics: LayerStatistics | None,
        z_loss: float,
        noise_scale: float | None = None,
        expert_bias: Tensor | None = None,
    ) -> None:
        """Record and show a step. z_loss: the factor that it was trained with; noise_scale: of the gradients, in
        samples; expert_bias: of routers, after the step, [layers, experts]."""
        state, batch, measured = done.state, done.batch, done.measured
        c, now = self.config, time.time()
        worst = worst_samples(
            measured.losses.tolist(), batch.positions.tolist(), c.logging.worst_samples, c.train.micro_batch,
            self.layout.samples,
        )  # fmt: skip
        per_second = batch.positions.size * c.model.sequence_length / done.seconds
        flops = per_second / self.layout.world / (self.peak * 1e12)
        clipped = done.applied and done.kept != 1
        self._clips.append(clipped)
        occasional: dict[str, Any] = {}
        if statistics is not None:
            occasional = statistics.overall | {"clipped_fraction": sum(self._clips) / len(self._clips)}
            self._clips.clear()
        expert_rows: dict[str, dict[str, float]] = {}
        if measured.choices is not None and expert_bias is not None:
            layer_loads = read_choices(measured.choices.numpy(), expert_bias.shape[1])
            occasional |= summarise_loads(layer_loads)
            if statistics is not None and statistics.layers:
                expert_rows = list_rows(layer_loads, expert_bias.double().cpu().numpy())
        record = StepRecord(
            step=state.step,
            time=now,
            first_position=batch.first,
            next_position=batch.next,
            skipped=batch.skipped,
            samples=batch.positions.size,
            piece=batch.piece,
            applied=done.applied,
            finite=measured.finite,
            clipped=clipped,
            loss=measured.loss,
            z_loss=float(measured.squares.mean()) * z_loss,
            z=float(measured.squares.mean().sqrt()),
            grad_norm=measured.grad_norm,
            lr=done.lr,
            **worst,
            seconds=done.seconds,
            data_seconds=done.waited,
            tokens_per_second=per_second,
            mfu_full=flops * flops_per_token(c.model, causal=False),
            mfu_causal=flops * flops_per_token(c.model, causal=True),
            memory=memory_gib(self.device),
            loss_scale=measured.loss_scale,
            token_entropy=None if measured.counts is None else unigram_entropy(measured.counts.numpy()),
            predictive_entropy=None if measured.entropies is None else float(measured.entropies.mean()),
            norm_kept=done.kept if done.applied else None,
            noise_scale=noise_scale,
            fp8=None if measured.fp8 is None else float(measured.fp8),
            attempt=self.attempt,
            **occasional,
        )
        record = self._with_phases(record)
        self.steps.add_records(record)
        self.live.show_step(record)
        self.tracking.send_step(record, state.tokens)
        if statistics is not None and statistics.layers:
            rows = [
                LayerRecord(state.step, now, layer_name, **layer_row)
                for layer_name, layer_row in (statistics.layers | expert_rows).items()
            ]
            self.layers.add_records(*rows)
            self.tracking.send_layers(rows)

    def record_validation(self, state: RunState, found: Evaluated) -> None:
        """Show an evaluation."""
        self.live.print_line(found.format_line())
        self.tracking.send_validation(state.step, state.tokens, validation_values(found))

    def _with_phases(self, record: StepRecord) -> StepRecord:
        """The record with its phases, if they are known already; on a GPU those of earlier steps are, which wait to be
        written."""
        rows = [*self.steps.pending, record]
        while activity.spent:
            before, spent = activity.spent.popleft()
            for place, row in enumerate(rows):
                # The oldest of its number: the order is the same, and a step may be done again.
                if isinstance(row, StepRecord) and row.step == before + 1 and row.other_seconds is None:
                    rows[place] = replace(row, **phase_columns(spent, row.seconds, row.data_seconds))
                    break
        *self.steps.pending, last = rows
        assert isinstance(last, StepRecord)
        return last

    def flush(self, compact: bool = False) -> None:
        """Write pending records; if the disk refuses, that is logged, and they stay in memory. compact: afterwards make
        few files of step records of many."""
        self.steps.flush_records()
        self.layers.flush_records()
        if compact:
            self.steps.compact_records()

    def close(self) -> None:
        self.flush()
        self.tracking.close()
        self.live.close()


def is_due(interval: int, step: int) -> bool:
    """Whether something that happens every `interval` steps (0 = never) happens at this one."""
    return interval > 0 and step % interval == 0


class StepRecorder:
    """Of one rank. observer: keeps and shows the steps, None if another rank does. Collective."""

    def __init__(
        self,
        config: LoggingConfig,
        engine: Engine,
        recovery: Recovery,
        log: RunLog,
        observer: Observer | None,
    ) -> None:
        self.config, self.engine, self.recovery, self.log = config, engine, recovery, log
        self.observer = observer
        self._look = False  # whether to record layers in the current step

    def begin_step(self, state: RunState) -> None:
        """Before the step after `state`."""
        # Also at the second refused update, to see the trouble per layer.
        next_step = state.step + 1
        self._look = is_due(self.config.layers_interval, next_step) or state.discards_in_a_row == 1
        signs, trend_measures = self.recovery.watches.signs, self.recovery.watches.trends.prepare_step(state)
        needs_norms = is_due(self.config.norms_interval, next_step) or signs.needs_norms(next_step)
        self.engine.measures_update = self._look or trend_measures or needs_norms
        if self._look or signs.is_look(next_step):
            self.engine.probe.watch_step()

    def record_step(self, done: StepResult) -> None:
        """Measure, judge and record a finished step."""
        state, step_measures, batch = done.state, done.measured, done.batch
        sign_watch, layer_statistics = self.recovery.watches.signs, None
        if self._look or is_due(self.config.norms_interval, state.step) or sign_watch.needs_norms(state.step):
            layer_statistics = self.engine.collect_statistics()
        in_incident = self.recovery.incident_log.incident is not None
        sign_watch.judge_step(state, layer_statistics, in_incident)
        self.recovery.watches.trends.judge_step(state, done.lr, done.applied, in_incident)
        noise_watch = self.recovery.watches.noise
        noise_watch.observe_step(step_measures, state.step, done.applied)
        if self.observer is not None:
            routing = self.engine.routing
            self.observer.record_step(
                done, layer_statistics, self.engine.loss.z_loss, noise_watch.state.samples,
                None if routing is None else routing.bias,
            )  # fmt: skip
        if not done.applied:
            verdict, reason = self.recovery.explain_refusal(step_measures)
            self.log.emit_event(Discarded(
                step=state.step, verdict=verdict, reason=reason, first_position=batch.first,
                next_position=batch.next, loss=step_measures.loss, grad_norm=step_measures.grad_norm,
                loss_scale=step_measures.loss_scale,
            ))  # fmt: skip

    def record_validation(self, state: RunState, found: Evaluated) -> None:
        """An evaluation at `state`."""
        assert found.loss is not None
        self.recovery.watches.trends.after_evaluation(state, found.loss)
        if self.observer is not None:
            self.observer.record_validation(state, found)

    @property
    def pending(self) -> Sequence[StepRecord | LayerRecord]:
        """Step records that are on no disk yet."""
        return () if self.observer is None else self.observer.steps.pending

    def flush(self, compact: bool = False) -> None:
        if self.observer is not None:
            self.observer.flush(compact)


def end_if_all_refused(done: StepResult, recovery: Recovery) -> None:
    """After a step that was not undone. Raises UnstableError if `stability.max_discards` updates in a row were refused,
    and nothing else was done about it."""
    state = done.state
    if state.discards_in_a_row < recovery.settings.max_discards:
        return
    _, reason = recovery.explain_refusal(done.measured)
    recovery.log.emit_event(Unstable(step=state.step, discards=state.discards_in_a_row))
    advice = explain_refusals(recovery.run, state, done.measured, recovery.config.precision.kind == "fp16")
    text = f"{state.discards_in_a_row} updates in a row were refused ({reason}), up to step {state.step}: {advice}"
    raise mark_collective(UnstableError(text))


def explain_refusals(run: RunDirectory, state: RunState, measured: Measured, fp16: bool) -> str:
    """Why every update of late was refused, as far as it is known, and what to do.

    Args:
        run: where the evidence is.
        state: the state after the last of them.
        measured: what was measured of the last of them.
        fp16: whether the run computes in fp16, whose loss scale may be the cause.
    """
    untouched_text = "no update was ever applied: the weights are those that the run began with"
    if fp16 and math.isfinite(measured.loss) and not measured.finite:
        scale_text = f"a loss scale of {measured.loss_scale:g}"
        overflow_text = (
            f"gradients still overflow fp16 at {scale_text}, which is halved at every overflow. Begin lower "
            "(precision.initial_scale_power), raise stability.max_discards, or set precision.kind=bf16"
            if measured.overflow
            else f"gradients overflow fp16 even at {scale_text}, the lowest: no scale can help. Set precision.kind=bf16"
        )
        return overflow_text if state.updates else f"{untouched_text}, and {overflow_text}"
    if not state.updates:
        return (
            f"{untouched_text}, so these, the recipe or the data are to blame. Look at {run.journal}; then change "
            "model.init_std, the imported weights or precision.kind, or skip the data (data.skip)"
        )
    return (
        f"the weights or the optimizer's state are damaged, or the data is. Look at {run.journal}; the checkpoints in "
        f"{run.checkpoints} are finite: lower optimizer.lr, or skip the data (data.skip)"
    )
