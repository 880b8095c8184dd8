"""Shows a run while it trains: a progress line on the terminal, curves in TensorBoard. Rank 0 only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from megastable.config.tree import LoggingConfig
from megastable.run.records import LayerRecord, StepRecord

# Record fields and the TensorBoard tags that they appear under.
CURVES = {
    "loss": "train/loss",
    "z_loss": "train/z_loss",
    "z": "train/log_partition",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "worst_loss": "train/worst_sample_loss",
    "loss_scale": "train/loss_scale",
    "clipped_fraction": "train/clipped_fraction",
    "norm_kept": "train/gradient_norm_kept",
    "parameter_norm": "norms/parameters",
    "second_moment_norm": "norms/second_moment",
    "second_moment_max": "norms/second_moment_max",
    "update_ratio": "norms/update_to_weight",
    "attention_logit": "attention/largest_logit",
    "attention_entropy": "attention/lowest_entropy",
    "fp8": "fp8/on",
    "fp8_saturation": "fp8/largest_saturation",
    "fp8_underflow": "fp8/largest_underflow",
    "tokens_per_second": "speed/tokens_per_second",
    "mfu_full": "speed/mfu_full_attention",
    "mfu_causal": "speed/mfu_causal_attention",
    "seconds": "speed/step_seconds",
    "data_seconds": "speed/data_seconds",
    "memory": "memory/gib",
}
LAYER_CURVES = [f.name for f in fields(LayerRecord) if f.default is None]


class Live:
    """Shows steps as they happen: on a terminal one updating line, elsewhere a line every `interval` steps."""

    def __init__(self, config: LoggingConfig, tensorboard: Path, steps: int, done: int) -> None:
        self.config, self.steps = config, steps
        self.console = Console()
        self.writer: Any = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(tensorboard), purge_step=done + 1)
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
        values = {tag: getattr(record, name) for name, tag in CURVES.items()}
        self._curves(
            {tag: v for tag, v in values.items() if v is not None and not math.isnan(v)}, record.step
        )

    def layers(self, records: Sequence[LayerRecord]) -> None:
        """Plot a step's layers, grouped by statistic."""
        for record in records:
            values = {
                f"{kind}/{record.name}": value for kind in LAYER_CURVES
                if (value := getattr(record, kind)) is not None and not math.isnan(value)
            }  # fmt: skip
            self._curves(values, record.step)

    def validation(self, step: int, loss: float) -> None:
        """Show an evaluation."""
        self.say(f"step {step}: validation loss {loss:.4f}")
        self._curves({"validation/loss": loss}, step)

    def _curves(self, values: dict[str, float], step: int) -> None:
        if self.writer is None:
            return
        try:
            for tag, value in values.items():
                self.writer.add_scalar(tag, value, step)
        except OSError as error:
            # Curves are optional: a full disk must not end a run. The step records have everything.
            self.writer = None
            self.say(
                f"WARNING: TensorBoard's file could not be written ({error}): no more curves in this process"
            )

    def say(self, text: str) -> None:
        """Print a line above the progress line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        if self.writer is not None:
            with suppress(OSError):
                self.writer.close()
