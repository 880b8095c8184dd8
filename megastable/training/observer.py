"""Records and shows every step: step records, trackers, the progress line. Rank 0 only."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from megastable.base import activity
from megastable.base.hardware import memory_gib
from megastable.checkpoint.store import RunState
from megastable.config.tree import LoggingConfig, RunConfig
from megastable.data.statistics import unigram_entropy
from megastable.engine.layer_stats import LayerStatistics
from megastable.model.flops import flops_per_token
from megastable.parallel.layout import Layout
from megastable.recovery.run_parts import StepResult
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import Evaluated
from megastable.run.records import LAYER_SCHEMA, LayerRecord, Recorder, StepRecord, worst_samples
from megastable.run.step_phases import phase_columns
from megastable.training.trackers.curves import validation_values
from megastable.training.tracking import Tracking, run_point


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

    def step(self, record: StepRecord) -> None:
        """Show one step."""
        numbers = (
            f"loss {record.loss:.4f}  norm {record.grad_norm:.3f}  {record.tokens_per_second:,.0f} tokens/s"
        )
        if self.console.width >= 120 or self.progress is None:
            numbers += f"  lr {record.lr:.2e}  MFU {record.mfu_full:.1%}"
        if not record.applied:
            numbers += "  DISCARDED"
        if self.progress is not None:
            self.progress.update(self.task, completed=record.step, numbers=numbers)
        elif record.step % self.config.interval == 0 or record.step in (1, self.steps) or not record.applied:
            self.say(f"step {record.step}/{self.steps}  {numbers}")

    def say(self, text: str) -> None:
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
        begin = run_point(config, run, done.step, done.tokens, attempt)
        self.tracking = Tracking(config.logging, run, begin, self.live.say)
        self.steps = Recorder(run.steps, config.logging.flush_steps)
        self.layers = Recorder(run.layers, 1, LAYER_SCHEMA)
        self._clips: list[bool] = []

    def step(
        self,
        done: StepResult,
        statistics: LayerStatistics | None,
        z_loss: float,
        noise_scale: float | None = None,
    ) -> None:
        """Record and show a step. z_loss: the factor that it was trained with; noise_scale: of the gradients, in
        samples."""
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
            **vars(worst),
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
        self.steps.add(record)
        self.live.step(record)
        self.tracking.step(record, state.tokens)
        if statistics is not None and statistics.layers:
            rows = [
                LayerRecord(state.step, now, name, **values) for name, values in statistics.layers.items()
            ]
            self.layers.add(*rows)
            self.tracking.layers(rows)

    def validation(self, state: RunState, found: Evaluated) -> None:
        """Show an evaluation."""
        self.live.say(found.line())
        self.tracking.validation(state.step, state.tokens, validation_values(found))

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
        self.steps.flush()
        self.layers.flush()
        if compact:
            self.steps.compact()

    def close(self) -> None:
        self.flush()
        self.tracking.close()
        self.live.close()
