"""Measure the bubble of a pipeline's schedules: time lines of real steps whose passes take a known time.

    measure_bubbles(PipelineCase()) -> PipelineFound      `megastable bench pipeline --picture pipeline.png`

Every stage is a process of this machine (gloo) that trains its part of a small model. What its passes compute takes
a few milliseconds; each then waits until its time by the clock is over, so that few or busy cores do not count.
Messages, their order and who waits for whom are real.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from benchmarks.common import describe_machine, is_finite
from benchmarks.layouts import LayoutCase
from benchmarks.ranks import launch_ranks
from megastable.report.figures import draw_figure

MODEL = {
    "hidden": 32, "heads": 2, "kv_heads": 2, "ffn": 64, "sequence_length": 16, "vocab_size": 100, "vocab_multiple": 16,
}  # fmt: skip
SCHEDULES = ("1f1b", "zero_bubble", "interleaved")
NAMES = {"1f1b": "1F1B", "zero_bubble": "zero bubble (ZB-H1)", "interleaved": "interleaved"}
COLOURS = {"F": "tab:blue", "B": "tab:cyan", "W": "tab:green", "BW": "tab:cyan"}


@dataclass(frozen=True)
class PipelineCase:
    """forward, backward, weight: seconds of the passes of a micro-batch on a stage, F, B and W. rounds: steps of each
    schedule. chunks: of the model on a stage, interleaved."""

    stages: int = 4
    micro_batches: int = 8
    forward: float = 0.2
    backward: float = 0.25
    weight: float = 0.15
    rounds: int = 3
    chunks: int = 2

    def layout_case(self, schedule: str) -> LayoutCase:
        chunks = self.count_chunks(schedule)
        order = {"model_chunks": chunks} if chunks > 1 else {"schedule": schedule}
        return LayoutCase(
            self.stages, {"pipeline": self.stages} | order, model=MODEL | {"layers": chunks * self.stages},
            micro_batch=1, accumulation=self.micro_batches, kernels={"compile": False},
        )  # fmt: skip

    def count_chunks(self, schedule: str) -> int:
        """Of a stage: each takes as much less time."""
        return self.chunks if schedule == "interleaved" else 1

    @property
    def working(self) -> float:
        """Seconds of a stage's passes in a step."""
        return self.micro_batches * (self.forward + self.backward + self.weight)

    def predict_bubble(self, schedule: str) -> float:
        """Seconds of a step that are no passes (arXiv:2104.04473, section 2.2; arXiv:2401.10241, section 2.3)."""
        sign = -1 if schedule == "zero_bubble" else 1
        slot_seconds = self.forward + self.backward + sign * self.weight
        return (self.stages - 1) * slot_seconds / self.count_chunks(schedule)


@dataclass(frozen=True)
class Span:
    """A pass of a micro-batch through a chunk of a stage: F, B, W, or BW together. In seconds, by a clock that all
    processes share."""

    what: str
    micro_batch: int
    begin: float
    end: float
    chunk: int = 0


@dataclass(frozen=True)
class PipelineFound:
    """spans: of every step, by schedule; of each stage."""

    case: PipelineCase
    spans: dict[str, list[list[list[Span]]]]
    machine: dict[str, Any] = field(default_factory=dict)

    def find_best(self, schedule: str) -> list[list[Span]]:
        """The step that other processes of the machine disturbed least, of each stage."""
        return min(self.spans[schedule], key=_elapsed)

    def bubble(self, schedule: str) -> float:
        """Seconds of that step that are no passes."""
        return _elapsed(self.find_best(schedule)) - self.case.working


def _elapsed(stages: Sequence[Sequence[Span]]) -> float:
    all_spans = [span for stage in stages for span in stage]
    return max(span.end for span in all_spans) - min(span.begin for span in all_spans)


def measure_bubbles(case: PipelineCase) -> PipelineFound:
    """Train by every schedule, each stage in a process of its own. MegastableError if one fails."""
    stage_spans = launch_ranks(case.stages, record_passes, case)
    return PipelineFound(case, gather_steps(stage_spans), describe_machine(torch.device("cpu")))


def gather_steps(stage_spans: Sequence[dict[str, list[list[Span]]]]) -> dict[str, list[list[list[Span]]]]:
    """Spans by schedule and step, of each stage, from those of each stage by schedule and step."""
    return {
        schedule: [list(stages) for stages in zip(*(spans[schedule] for spans in stage_spans), strict=True)]
        for schedule in SCHEDULES
    }


def record_passes(case: PipelineCase) -> dict[str, list[list[Span]]]:
    """The passes of this stage in every step, by schedule. On a rank of a process group."""
    from megastable.engine.engine import Engine

    recorded: dict[str, list[list[Span]]] = {}
    for schedule in SCHEDULES:
        layout_case = case.layout_case(schedule)
        topology = layout_case.join_group()
        engine = Engine(layout_case.config, layout_case.deepspeed, topology)
        recorder = _Recorder(case, schedule)
        recorder.pad_passes(engine.ds)
        drawn_batches, step_spans = layout_case.draw_batches(topology.sample_rank), []
        for step in range(1 + case.rounds):
            recorder.begin_step()
            dist.barrier()
            engine.train_step(drawn_batches, 1e-4, is_finite)
            if step:  # the first one agrees on shapes
                step_spans.append(recorder.spans)
        recorded[schedule] = step_spans
    return recorded


class _Recorder:
    """Lets passes take their time, and records them."""

    def __init__(self, case: PipelineCase, schedule: str) -> None:
        self._case, self._schedule, self._is_split = case, schedule, schedule == "zero_bubble"
        self.begin_step()

    def begin_step(self) -> None:
        self.spans: list[Span] = []
        self._numbers = defaultdict[tuple[str, int], "count[int]"](count)

    def pad_passes(self, engine: Any) -> None:
        """Of DeepSpeed's engine, whose instructions are replaced."""
        from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

        from megastable.engine.zero_bubble import WeightPass

        case, instructions = self._case, dict(engine._INSTRUCTION_MAP)
        lengths: dict[type, tuple[str, float]] = {
            ForwardPass: ("F", case.forward), BackwardPass: ("BW", case.backward + case.weight),
        }  # fmt: skip
        if self._is_split:
            lengths |= {BackwardPass: ("B", case.backward), WeightPass: ("W", case.weight)}
        chunks = case.count_chunks(self._schedule)
        engine._INSTRUCTION_MAP = instructions | {
            kind: self._pad(instructions[kind], what, seconds / chunks)
            for kind, (what, seconds) in lengths.items()
        }

    def _pad(self, instruct: Callable[..., None], what: str, seconds: float) -> Callable[..., None]:
        def padded(engine: Any, **place: int) -> None:
            begin, chunk = time.monotonic(), place.get("chunk", 0)
            instruct(engine, **place)
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            micro_batch = next(self._numbers[what, chunk])  # those of a chunk follow each other
            self.spans.append(Span(what, micro_batch, begin, time.monotonic(), chunk))

        return padded


def bubble_table(found: PipelineFound) -> Table:
    """One row for each schedule."""
    case = found.case
    shape_text = f"{case.stages} stages, {case.micro_batches} micro-batches"
    pass_text = ", ".join(
        f"{name} {1e3 * seconds:g} ms"
        for name, seconds in (("F", case.forward), ("B", case.backward), ("W", case.weight))
    )
    made = Table("schedule", title=f"Bubble of a pipeline: {shape_text}; {pass_text}")
    for column_name in ("step, ms", "bubble, ms", "by the formula", "off", "of the step"):
        made.add_column(column_name, justify="right")
    for schedule in SCHEDULES:
        bubble, predicted = found.bubble(schedule), case.predict_bubble(schedule)
        step_seconds = case.working + bubble
        numbers = f"{1e3 * step_seconds:.0f}", f"{1e3 * bubble:.0f}", f"{1e3 * predicted:.0f}"
        made.add_row(
            NAMES[schedule], *numbers, f"{bubble / predicted - 1:+.1%}", f"{bubble / step_seconds:.1%}"
        )
    return made


def draw_bubbles(found: PipelineFound, path: Path) -> None:
    """Draw the passes of every stage by each schedule, with the numbers of their micro-batches."""
    with draw_figure(path, 12, 1.2 + 0.55 * len(SCHEDULES) * found.case.stages) as figure:
        all_axes = figure.subplots(len(SCHEDULES), 1, sharex=True)
        for axes, schedule in zip(all_axes, SCHEDULES, strict=True):
            _draw_stages(axes, found, schedule)
        all_axes[-1].set_xlabel(
            "milliseconds; blue: F, light blue: B (with W, if there is no green), green: W; paler: later chunks"
        )


def _draw_stages(axes: Any, found: PipelineFound, schedule: str) -> None:
    stages = found.find_best(schedule)
    first_begin = min(span.begin for stage in stages for span in stage)
    for number, stage in enumerate(stages):
        for span in stage:
            left, width = 1e3 * (span.begin - first_begin), 1e3 * (span.end - span.begin)
            axes.barh(
                number, width, 0.9, left=left, color=COLOURS[span.what], edgecolor="white", linewidth=0.5,
                alpha=0.6**span.chunk,
            )  # fmt: skip
            axes.text(left + width / 2, number, str(span.micro_batch), ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(stages)))
    axes.set_yticklabels([f"stage {number}" for number in range(len(stages))])
    axes.invert_yaxis()
    step_seconds = found.case.working + found.bubble(schedule)
    axes.set_title(
        f"{NAMES[schedule]}: {1e3 * step_seconds:.0f} ms, bubble {found.bubble(schedule) / step_seconds:.1%}"
    )
