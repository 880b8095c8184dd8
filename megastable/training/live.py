"""Shows a run on the terminal while it trains. Rank 0 only."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from megastable.config.tree import LoggingConfig
from megastable.run.records import StepRecord


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
