"""Show how much of the sums of gradients lies behind the backward pass: time lines of real steps over a slowed link.

    measure_overlap(OverlapCase()) -> OverlapFound      `megastable bench overlap --picture overlap.png`

Every rank trains a small model on this machine (gloo), with sums that begin during the backward pass and after it. The
link is slowed by a clock alone: a sum has arrived when its bytes would have been sent, one sum after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from benchmarks.common import describe_machine, is_finite
from benchmarks.layouts import LayoutCase
from benchmarks.ranks import launch_ranks
from megastable.base import activity
from megastable.report.figures import draw_figure

MODEL = {
    "layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 768, "sequence_length": 256, "vocab_size": 1000,
    "vocab_multiple": 64,
}  # fmt: skip
BUCKET = 1_000_000  # elements: a block and a bit
WARM = 2  # steps before those that count


@dataclass(frozen=True)
class OverlapCase:
    """rate: bytes a second that leave a rank. latency: seconds of every sum. rounds: steps of either kind."""

    ranks: int = 4
    rate: float = 125e6
    latency: float = 1e-3
    rounds: int = 10

    @property
    def layout_case(self) -> LayoutCase:
        return LayoutCase(
            self.ranks, model=MODEL, zero={"reduce_bucket_size": BUCKET}, kernels={"compile": False}
        )  # fmt: skip


Case = TypeVar("Case")


@dataclass(frozen=True)
class Span:
    """Seconds since the beginning of the last backward pass; end: when it was over, or had arrived."""

    what: str
    begin: float
    end: float


@dataclass(frozen=True)
class RankSteps:
    """Of one rank. exposed: seconds that each step waited for messages, with overlap; whole: without. spans: of the
    step with overlap that waited least, in seconds since its (last) backward pass began."""

    exposed: list[float]
    whole: list[float]
    spans: list[Span]


@dataclass(frozen=True)
class OverlapFound(Generic[Case]):
    case: Case
    ranks: list[RankSteps]
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def exposed(self) -> float:
        """Of the step of every rank that other processes of the machine disturbed least."""
        return median(min(rank.exposed) for rank in self.ranks)

    @property
    def whole(self) -> float:
        return median(min(rank.whole) for rank in self.ranks)

    @property
    def hidden(self) -> float:
        """Share of the messages' seconds that computing hides."""
        return 1 - self.exposed / self.whole


class TimedSum:
    """A sum that has begun. arrival: when the slowed link will have carried it, by time.monotonic()."""

    def __init__(self, work: Any, arrival: float) -> None:
        self._work, self.begin, self.end = work, time.monotonic(), arrival

    def wait(self) -> None:
        if not self._work.is_completed():
            self._work.wait()
            self.end = max(self.end, time.monotonic())  # the machine was slower than the link
        time.sleep(max(0.0, self.end - time.monotonic()))


class Recorder:
    """Records when the activities of a step and its sums begin and end; a listener of base/activity.py."""

    def __init__(self, case: OverlapCase, ranks: int, begin_sum: Callable[..., Any]) -> None:
        self._case, self._ranks, self._begin_sum = case, ranks, begin_sum
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self.sums: list[TimedSum] = []
        self.entered: list[tuple[str, float]] = []
        self._free = 0.0  # when the link has carried all so far

    def enter_activity(self, name: str) -> None:
        self.entered.append((name, time.monotonic()))

    def end_step(self) -> None:
        """The spans are read after it."""

    def begin_sum(self, whole: Tensor, pieces: Sequence[Tensor], rank: int, group: Any) -> TimedSum:
        work = self._begin_sum(whole, pieces, rank, group)
        sent_bytes = whole.numel() * whole.element_size() * (self._ranks - 1) / self._ranks
        self._free = max(self._free, time.monotonic()) + self._case.latency + sent_bytes / self._case.rate
        self.sums.append(TimedSum(work, self._free))
        return self.sums[-1]

    def list_spans(self) -> list[Span]:
        """The last backward pass, the wait after it, and the sums."""
        reduce_time = next(when for name, when in self.entered if name == activity.REDUCE)
        backward_time = [w for name, w in self.entered if name == activity.BACKWARD and w < reduce_time][-1]
        arrived_time = max(one_sum.end for one_sum in self.sums)
        spans = [
            Span("backward", 0.0, reduce_time - backward_time),
            Span("wait", reduce_time - backward_time, max(reduce_time, arrived_time) - backward_time),
        ]
        return spans + [Span("sum", s.begin - backward_time, s.end - backward_time) for s in self.sums]


def measure_overlap(case: OverlapCase) -> OverlapFound[OverlapCase]:
    """Train on every rank, in processes of their own. MegastableError if a rank fails."""
    rank_steps = launch_ranks(case.ranks, record_steps, case)
    return OverlapFound(case, rank_steps, describe_machine(torch.device("cpu")))


def record_steps(case: OverlapCase) -> RankSteps:
    """Train steps with sums during the backward pass and after it, in turns. On a rank of a process group."""
    from megastable.engine import gradient_sums
    from megastable.engine.engine import Engine

    sums_module: Any = gradient_sums
    layout_case = case.layout_case
    topology = layout_case.join_group()
    engine = Engine(layout_case.config, layout_case.deepspeed, topology)
    recorder = Recorder(case, topology.layout.data, sums_module.begin_sum)
    sums_module.begin_sum, activity.listener = recorder.begin_sum, recorder
    drawn_batches = layout_case.draw_batches(topology.sample_rank)
    wait_seconds: dict[bool, list[float]] = {True: [], False: []}
    best_spans: list[Span] = []
    for step in range(2 * (WARM + case.rounds)):
        overlap = bool(step % 2)
        engine.zero.sums.overlap = overlap  # type: ignore[attr-defined]
        dist.barrier()
        activity.begin_step(step)
        engine.train_step(drawn_batches, 1e-4, is_finite)
        activity.end_step(0.0)
        step_spans = recorder.list_spans()
        if step >= 2 * WARM:
            wait_seconds[overlap].append(step_spans[1].end - step_spans[1].begin)
            if overlap and wait_seconds[True][-1] == min(wait_seconds[True]):
                best_spans = step_spans
    return RankSteps(wait_seconds[True], wait_seconds[False], best_spans)


def overlap_table(found: OverlapFound[OverlapCase]) -> Table:
    """One row for each rank: the backward pass, the sums, and what of them was waited for."""
    link_text = f"{found.case.rate * 8e-9:.3g} Gbit/s, {found.case.latency * 1e3:g} ms"
    made = Table("rank", title=f"Sums of gradients over {found.case.ranks} ranks, {link_text}: milliseconds")
    for column_name in ("last backward pass", "sums", "begun in it", "waited for", "without overlap"):
        made.add_column(column_name, justify="right")
    for rank, steps in enumerate(found.ranks):
        backward, _, *sums = steps.spans
        early_count = sum(one_sum.begin < backward.end for one_sum in sums)
        milliseconds = (backward.end, min(steps.exposed), min(steps.whole))
        backward_text, exposed_text, whole_text = (f"{1e3 * seconds:.0f}" for seconds in milliseconds)
        made.add_row(str(rank), backward_text, str(len(sums)), str(early_count), exposed_text, whole_text)
    made.caption = f"hidden behind the backward pass: {found.hidden:.1%} of the time of the sums"
    return made


def draw_overlap(found: OverlapFound[OverlapCase], path: Path) -> None:
    """Draw the step of every rank that waited least: the backward pass, the wait after it, and each sum below."""
    span_colours = {"backward": "tab:blue", "wait": "tab:red", "sum": "tab:olive"}
    with draw_figure(path, 9, 1 + 0.9 * found.case.ranks) as figure:
        _draw_spans(figure.subplots(), found, span_colours)


def _draw_spans(axes: Any, found: OverlapFound[OverlapCase], colours: dict[str, str]) -> None:
    for rank, steps in enumerate(found.ranks):
        for number, span in enumerate(steps.spans):
            bar_height = rank if span.what != "sum" else rank + 0.3 + 0.22 * (number % 2)
            axes.barh(
                bar_height, 1e3 * (span.end - span.begin), 0.3 if span.what != "sum" else 0.18, left=1e3 * span.begin,
                color=colours[span.what], edgecolor="white", linewidth=0.5,
            )  # fmt: skip
    axes.set_yticks([rank + 0.2 for rank in range(found.case.ranks)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(found.case.ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the last backward pass began")
    axes.set_title(f"blue: backward pass; olive: sums of gradients; red: wait ({found.hidden:.0%} hidden)")
