"""Show how much of tensor parallelism's messages lies behind products: time lines of real steps over a slowed link.

    measure_tensor_overlap(TensorCase()) -> OverlapFound    `megastable bench overlap --dimension tensor`

Every rank trains a small model with sequence parallelism on this machine (gloo): by `parallel.tensor_overlap`, and with
whole messages, each waited for at once. The link is slowed by a clock, as in `overlap.py`: a message has arrived when
its bytes would have been sent, one message after the other.

A step has a hundred messages, and ranks that share busy cores wait for each other at every one. So a rank's clock is
its processor time and what it has waited for the link: other programs do not count, and all ranks count as equally
fast. With `wall` it is the time of the day, and waits are slept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from benchmarks.common import describe_machine, is_finite
from benchmarks.layouts import LayoutCase
from benchmarks.overlap import OverlapFound, RankSteps, Span
from benchmarks.ranks import launch_ranks
from megastable.base import activity
from megastable.report.figures import draw_figure

# In fp32 its products and messages on a core and a slow link are to each other as those of a 70B over eight H100.
MODEL: dict[str, Any] = {
    "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 4096, "sequence_length": 512, "vocab_size": 1000,
    "vocab_multiple": 64,
}  # fmt: skip
MICRO_BATCH = 2
WARM = 1  # steps before those that count


@dataclass(frozen=True)
class TensorCase:
    """rate: bytes a second that leave a rank. latency: seconds of every message. rounds: steps of either kind. chunks:
    `parallel.tensor_overlap`. layers: of the model. wall: see the docstring of the module."""

    ranks: int = 2
    rate: float = 125e6
    latency: float = 1e-3
    rounds: int = 3
    chunks: int = 4
    layers: int = 4
    wall: bool = False

    def choose_layout(self, chunks: int) -> LayoutCase:
        return LayoutCase(
            self.ranks, {"tensor": self.ranks, "sequence": True, "tensor_overlap": chunks},
            MODEL | {"layers": self.layers},
            precision={"kind": "fp32"}, kernels={"compile": False}, micro_batch=MICRO_BATCH, accumulation=1,
        )  # fmt: skip


class RankClock:
    """Seconds of a rank: see the docstring of the module."""

    def __init__(self, wall: bool) -> None:
        self._wall, self._waited = wall, 0.0

    def read(self) -> float:
        return time.monotonic() if self._wall else time.thread_time() + self._waited

    def wait_until(self, when: float) -> None:
        missing = max(0.0, when - self.read())
        if self._wall:
            time.sleep(missing)
        else:
            self._waited += missing


class SlowMessage:
    """A message that has begun. end: when the slowed link will have carried it."""

    def __init__(self, work: Any, end: float, clock: RankClock, waits: list[Span]) -> None:
        self._work, self._clock, self._waits = work, clock, waits
        self.begin, self.end = clock.read(), end

    def wait(self) -> None:
        begin_time = self._clock.read()
        self._work.wait()
        self._clock.wait_until(self.end)
        self._waits.append(Span("wait", begin_time, self._clock.read()))


class MessageRecorder:
    """Slows the messages of the tensor group, and records them and the waits of a step; a listener of
    base/activity.py."""

    def __init__(self, case: TensorCase) -> None:
        self._case, self._clock = case, RankClock(case.wall)
        self.waits_at_once = False
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self.messages: list[SlowMessage] = []
        self.waits: list[Span] = []
        self.entered: list[tuple[str, float]] = []
        self._free = 0.0  # when the link has carried all so far

    def enter_activity(self, name: str) -> None:
        self.entered.append((name, self._clock.read()))

    def end_step(self) -> None:
        """The spans are read after it."""

    def slow_down(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """`send`, a gather or a scatter into its first argument, over the slowed link."""

        def begin(result: Tensor, given: Tensor, *, group: Any, async_op: bool = False) -> Any:
            ranks = dist.get_world_size(group)
            if ranks == 1:
                return send(result, given, group=group, async_op=async_op)
            work = send(result, given, group=group, async_op=True)
            whole_tensor = max(result, given, key=Tensor.numel)
            sent_bytes = whole_tensor.numel() * whole_tensor.element_size() * (ranks - 1) / ranks
            self._free = (
                max(self._free, self._clock.read()) + self._case.latency + sent_bytes / self._case.rate
            )
            self.messages.append(SlowMessage(work, self._free, self._clock, self.waits))
            if self.waits_at_once or not async_op:
                self.messages[-1].wait()
            return work if self.waits_at_once else self.messages[-1]

        return begin

    def list_spans(self) -> list[Span]:
        """Both passes, the waits and the messages."""
        times = dict(reversed(self.entered))  # the first of each
        origin = times[activity.BACKWARD]
        passes = [
            Span("forward", times[activity.FORWARD], origin),
            Span("backward", origin, times[activity.REDUCE]),
        ]
        messages = [Span("message", message.begin, message.end) for message in self.messages]
        return [
            Span(span.what, span.begin - origin, span.end - origin) for span in passes + self.waits + messages
        ]


def measure_tensor_overlap(case: TensorCase) -> OverlapFound[TensorCase]:
    """Train on every rank, in processes of their own. MegastableError if a rank fails."""
    rank_steps = launch_ranks(case.ranks, record_tensor_steps, case)
    return OverlapFound(case, rank_steps, describe_machine(torch.device("cpu")))


def record_tensor_steps(case: TensorCase) -> RankSteps:
    """Train steps in chunks and with whole messages, in turns. On a rank of a process group."""
    from megastable.engine.engine import Engine
    from megastable.parallel import mappings

    layout_case = case.choose_layout(1)
    topology = layout_case.join_group()
    engines = {
        chunks: Engine(case.choose_layout(chunks).config, layout_case.deepspeed, topology)
        for chunks in {1, case.chunks}
    }
    recorder = MessageRecorder(case)
    slowed_mappings: Any = mappings
    slowed_mappings._gather = recorder.slow_down(mappings._gather)
    slowed_mappings._scatter = recorder.slow_down(mappings._scatter)
    activity.listener = recorder
    drawn_batches = layout_case.draw_batches(topology.sample_rank)
    wait_seconds: dict[bool, list[float]] = {True: [], False: []}
    best_spans: list[Span] = []
    for step in range(2 * (WARM + case.rounds)):
        overlap = bool(step % 2)
        recorder.waits_at_once = not overlap
        dist.barrier()
        activity.begin_step(step)
        engines[case.chunks if overlap else 1].train_step(drawn_batches, 1e-4, is_finite)
        activity.end_step(0.0)
        if step >= 2 * WARM:
            wait_seconds[overlap].append(sum(wait.end - wait.begin for wait in recorder.waits))
            if overlap and wait_seconds[True][-1] == min(wait_seconds[True]):
                best_spans = recorder.list_spans()
    return RankSteps(wait_seconds[True], wait_seconds[False], best_spans)


def tensor_table(found: OverlapFound[TensorCase]) -> Table:
    """One row for each rank: both passes, the messages, and what of them was waited for."""
    case = found.case
    link_text = f"{case.rate * 8e-9:.3g} Gbit/s, {case.latency * 1e3:g} ms"
    title = f"Messages of tensor parallelism over {case.ranks} ranks, {case.chunks} chunks, {link_text}: milliseconds"
    made = Table("rank", title=title)
    for column_name in ("forward", "backward", "messages", "waited for", "whole, waited for at once"):
        made.add_column(column_name, justify="right")
    for rank, steps in enumerate(found.ranks):
        forward, backward, *rest = steps.spans
        message_count = sum(span.what == "message" for span in rest)
        forward_text, backward_text, exposed_text, whole_text = (
            f"{1e3 * seconds:.0f}"
            for seconds in (-forward.begin, backward.end, min(steps.exposed), min(steps.whole))
        )
        made.add_row(str(rank), forward_text, backward_text, str(message_count), exposed_text, whole_text)
    made.caption = f"hidden behind products: {found.hidden:.1%} of the time of the messages"
    return made


def draw_tensor_overlap(found: OverlapFound[TensorCase], path: Path) -> None:
    """Draw of the step of every rank that waited least the last block's two passes: computing, waits, and each message
    below."""
    with draw_figure(path, 9, 1 + 0.9 * found.case.ranks) as figure:
        _draw_messages(figure.subplots(), found)


def _draw_messages(axes: Any, found: OverlapFound[TensorCase]) -> None:
    colours = {"forward": "tab:cyan", "backward": "tab:blue", "wait": "tab:red", "message": "tab:olive"}
    for rank, steps in enumerate(found.ranks):
        for number, span in enumerate(steps.spans):
            is_message = span.what == "message"
            bar_height = rank + 0.3 + 0.22 * (number % 2) if is_message else rank
            axes.barh(
                bar_height, 1e3 * (span.end - span.begin), 0.18 if is_message else 0.3, left=1e3 * span.begin,
                color=colours[span.what], edgecolor="white", linewidth=0.5,
            )  # fmt: skip
    forward, backward, *_ = found.ranks[0].spans
    share = 1.3e3 / found.case.layers  # the last block's and its head's, in milliseconds
    axes.set_xlim(share * forward.begin, share * backward.end)
    axes.set_yticks([rank + 0.2 for rank in range(found.case.ranks)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(found.case.ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the backward pass began")
    axes.set_title(f"cyan, blue: forward, backward; olive: messages; red: waits ({found.hidden:.0%} hidden)")
