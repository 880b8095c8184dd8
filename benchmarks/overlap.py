"""Show how much of the messages of data parallelism is hidden: time lines of real steps over a slowed link.

    measure_overlap(OverlapCase()) -> DataOverlap      `megastable bench overlap --picture overlap.png`

Every rank trains a small model on this machine (gloo). Sums of gradients begin during the backward pass, and after it;
gathers of weights are waited for during the next forward pass, and before it. The link is slowed by a clock alone: a
message has arrived when its bytes would have been sent, one message after the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from benchmarks.common import describe_machine, is_finite
from benchmarks.layouts import LayoutCase
from benchmarks.ranks import launch_ranks
from megastable.base import activity
from megastable.parallel.mappings import Shares
from megastable.report.figures import draw_figure

MODEL = {
    "layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 768, "sequence_length": 256, "vocab_size": 1000,
    "vocab_multiple": 64,
}  # fmt: skip
BUCKET = 1_000_000  # elements: a block and a bit
WARM = 2  # steps before those that count


@dataclass(frozen=True)
class OverlapCase:
    """rate: bytes a second that leave a rank. latency: seconds of every message. rounds: steps of either kind."""

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
    """Seconds since the beginning of a step's last backward pass; end: when it was over, or had arrived."""

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


@dataclass(frozen=True)
class DataOverlap:
    """sums: of gradients, with the backward pass and the wait after it. gathers: of weights, with the next forward pass
    and the waits in it; their spans are of the same step."""

    sums: OverlapFound[OverlapCase]
    gathers: OverlapFound[OverlapCase]

    @property
    def hidden(self) -> float:
        """Share of the seconds of both that computing hides."""
        both = self.sums, self.gathers
        return 1 - sum(found.exposed for found in both) / sum(found.whole for found in both)


class TimedMessage:
    """A message that has begun. arrival: when the slowed link will have carried it, by time.monotonic()."""

    def __init__(self, work: Any, arrival: float) -> None:
        self._work, self.begin, self.end = work, time.monotonic(), arrival
        self.waits: list[tuple[float, float]] = []

    def wait(self) -> None:
        begin_time = time.monotonic()
        if not self._work.is_completed():
            self._work.wait()
            self.end = max(self.end, time.monotonic())  # the machine was slower than the link
        time.sleep(max(0.0, self.end - time.monotonic()))
        self.waits.append((begin_time, time.monotonic()))


class Recorder:
    """Records when the activities of a step and its messages begin and end; a listener of base/activity.py."""

    def __init__(
        self, case: OverlapCase, ranks: int, begin_sum: Callable[..., Any], exchange: Callable[..., None],
        begin_gather: Callable[..., Any],
    ) -> None:  # fmt: skip
        self._case, self._share = case, (ranks - 1) / ranks
        self._begin_sum, self._exchange, self._begin_gather = begin_sum, exchange, begin_gather
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        self.sums: list[TimedMessage] = []
        self.gathers: list[TimedMessage] = []
        self._unsent: list[tuple[TimedMessage, float]] = []  # with the seconds that the link takes
        self._exchanging = 0.0  # such seconds, before them
        self.entered: list[tuple[str, float]] = []
        self._free = 0.0  # when the link has carried all so far

    def enter_activity(self, name: str) -> None:
        self.entered.append((name, time.monotonic()))
        if (
            name == activity.REST
        ):  # gloo waits for the exchange before gathers begin, which the link is not to win by
            self._carry(self._exchanging)
            self._exchanging = 0.0
            for one_gather, seconds in self._unsent:
                one_gather.begin, one_gather.end = time.monotonic(), self._carry(seconds)
            self._unsent.clear()

    def end_step(self) -> None:
        """The spans are read after it."""

    def _carry(self, seconds: float) -> float:
        """When the link will have carried a message that takes so long."""
        self._free = max(self._free, time.monotonic()) + seconds
        return self._free

    def _count_seconds(self, given_bytes: int, messages: int) -> float:
        return messages * self._case.latency + given_bytes * self._share / self._case.rate

    def begin_sum(self, whole: Tensor, pieces: Sequence[Tensor], rank: int, group: Any) -> TimedMessage:
        work = self._begin_sum(whole, pieces, rank, group)
        seconds = self._count_seconds(whole.numel() * whole.element_size(), 1)
        self.sums.append(TimedMessage(work, self._carry(seconds)))
        return self.sums[-1]

    def exchange(self, shared: Sequence[Shares], group: Any) -> None:
        """The link will carry it before the gathers."""
        self._exchange(shared, group)
        given_pieces = [shares.piece for shares in shared if shares.given is not None]
        given_bytes = sum(piece.numel() * piece.element_size() for piece in given_pieces)
        self._exchanging += self._count_seconds(given_bytes, 1 if given_pieces else 0)

    def begin_gather(self, shares: Shares, group: Any) -> TimedMessage:
        """It arrives after so many seconds; `enter_activity` says when."""
        work = self._begin_gather(shares, group)
        seconds = self._count_seconds(shares.whole.numel() * shares.whole.element_size(), 1)
        self.gathers.append(TimedMessage(work, math.inf))
        self._unsent.append((self.gathers[-1], seconds))
        return self.gathers[-1]

    def find_first(self, name: str) -> float:
        """When the step entered an activity first."""
        return next(when for entered_name, when in self.entered if entered_name == name)

    def list_spans(self) -> list[Span]:
        """The last backward pass, the wait after it, and the sums; by time.monotonic()."""
        reduce_time = self.find_first(activity.REDUCE)
        backward_time = [w for name, w in self.entered if name == activity.BACKWARD and w < reduce_time][-1]
        arrived_time = max(one_sum.end for one_sum in self.sums)
        spans = [
            Span("backward", backward_time, reduce_time),
            Span("wait", reduce_time, max(reduce_time, arrived_time)),
        ]
        return spans + [Span("sum", one_sum.begin, one_sum.end) for one_sum in self.sums]

    def list_next_spans(self, gathers: Sequence[TimedMessage], overlap: bool) -> list[Span]:
        """The first forward pass, the waits in it, and the gathers that the step before has begun. Without overlap
        nothing else is done until the last has arrived."""
        forward = Span("forward", self.find_first(activity.FORWARD), self.find_first(activity.BACKWARD))
        gather_spans = [Span("gather", one_gather.begin, one_gather.end) for one_gather in gathers]
        waits = [Span("wait", *wait) for one_gather in gathers for wait in one_gather.waits]
        if not overlap:
            waits = [Span("wait", gather_spans[0].begin, max(span.end for span in gather_spans))]
        return [forward, *waits, *gather_spans]


def measure_overlap(case: OverlapCase) -> DataOverlap:
    """Train on every rank, in processes of their own. MegastableError if a rank fails."""
    return join_ranks(case, launch_ranks(case.ranks, record_steps, case))


def join_ranks(case: OverlapCase, ranks: Sequence[tuple[RankSteps, RankSteps]]) -> DataOverlap:
    """ranks: of `record_steps`."""
    machine = describe_machine(torch.device("cpu"))
    sums, gathers = (OverlapFound(case, [rank[kind] for rank in ranks], machine) for kind in (0, 1))
    return DataOverlap(sums, gathers)


def record_steps(case: OverlapCase) -> tuple[RankSteps, RankSteps]:
    """Train steps with overlap and without, in turns: the sums, and the gathers. On a rank of a process group."""
    from megastable.engine import gradient_sums, weight_gathers
    from megastable.engine.engine import Engine

    sums_module, gathers_module = cast(Any, gradient_sums), cast(Any, weight_gathers)
    layout_case = case.layout_case
    topology = layout_case.join_group()
    engine = Engine(layout_case.config, layout_case.deepspeed, topology)
    begins = sums_module.begin_sum, gathers_module.exchange_shares, gathers_module.begin_gather_slices
    recorder = Recorder(case, topology.layout.data, *begins)
    sums_module.begin_sum = recorder.begin_sum
    gathers_module.exchange_shares, gathers_module.begin_gather_slices = (
        recorder.exchange,
        recorder.begin_gather,
    )
    activity.listener = recorder
    drawn_batches = layout_case.draw_batches(topology.sample_rank)
    # Seconds of sums and of gathers in every step, without overlap and with it.
    waited: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    best_spans = step_spans = list[list[Span]]()
    dist.barrier()
    # The gate's sum aligns the ranks in every step: a barrier would let the gathers arrive before the next one.
    for step in range(2 * (WARM + case.rounds) + 1):
        overlap, before_gathers = bool(step % 2), recorder.gathers
        engine.zero.sums.overlap = overlap  # type: ignore[attr-defined]
        activity.begin_step(step)
        engine.train_step(drawn_batches, 1e-4, is_finite)
        activity.end_step(0.0)
        if step > 2 * WARM:  # it ends the step before
            step_spans.append(recorder.list_next_spans(before_gathers, not overlap))
            sum_seconds, gather_seconds = (
                sum(span.end - span.begin for span in spans if span.what == "wait") for spans in step_spans
            )
            waited[not overlap].append((sum_seconds, gather_seconds))
            if not overlap and waited[True][-1] == min(waited[True], key=sum):
                best_spans = step_spans
        step_spans = [recorder.list_spans()]
        if not overlap:
            engine.zero.wait_for_weights()
    origin, (sums, gathers) = best_spans[0][0].begin, zip(*waited[True], strict=True)
    moved = [[Span(s.what, s.begin - origin, s.end - origin) for s in spans] for spans in best_spans]
    whole_sums, whole_gathers = zip(*waited[False], strict=True)
    return RankSteps(list(sums), list(whole_sums), moved[0]), RankSteps(
        list(gathers), list(whole_gathers), moved[1]
    )


def overlap_table(found: DataOverlap) -> Table:
    """One row for the sums and one for the gathers of each rank: the pass, the messages, and what was waited for."""
    case = found.sums.case
    link_text = f"{case.rate * 8e-9:.3g} Gbit/s, {case.latency * 1e3:g} ms"
    made = Table(
        "rank", "messages", title=f"Messages over {case.ranks} data ranks, {link_text}: milliseconds"
    )
    for column_name in ("pass beside", "messages", "begun before its end", "waited for", "without overlap"):
        made.add_column(column_name, justify="right")
    rows = [("sums", steps) for steps in found.sums.ranks] + [
        ("gathers", steps) for steps in found.gathers.ranks
    ]
    for number, (what, steps) in enumerate(rows):
        beside_pass = steps.spans[0]
        messages = [span for span in steps.spans if span.what in ("sum", "gather")]
        early_count = sum(message.begin < beside_pass.end for message in messages)
        milliseconds = (beside_pass.end - beside_pass.begin, min(steps.exposed), min(steps.whole))
        pass_text, exposed_text, whole_text = (f"{1e3 * seconds:.0f}" for seconds in milliseconds)
        counts = str(len(messages)), str(early_count)
        made.add_row(str(number % case.ranks), what, pass_text, *counts, exposed_text, whole_text)
    made.caption = (
        f"hidden: {found.sums.hidden:.1%} of the time of the sums, {found.gathers.hidden:.1%} of that of the gathers, "
        f"{found.hidden:.1%} of both"
    )
    return made


COLOURS = {
    "backward": "tab:blue", "forward": "tab:cyan", "wait": "tab:red", "sum": "tab:olive", "gather": "tab:green",
}  # fmt: skip


def draw_overlap(found: DataOverlap, path: Path) -> None:
    """Draw the step of every rank that waited least: its passes and waits, and each message below."""
    with draw_figure(path, 9, 1 + 0.9 * found.sums.case.ranks) as figure:
        _draw_spans(figure.subplots(), found)


def _draw_spans(axes: Any, found: DataOverlap) -> None:
    for rank, both in enumerate(zip(found.sums.ranks, found.gathers.ranks, strict=True)):
        free_time = 0.0  # when the link has carried the message before
        for number, span in enumerate(span for steps in both for span in steps.spans):
            is_message = span.what in ("sum", "gather")
            begin_time = max(span.begin, free_time) if span.what == "gather" else span.begin
            free_time = span.end if is_message else free_time
            axes.barh(
                rank + (0.3 + 0.22 * (number % 2) if is_message else 0), 1e3 * (span.end - begin_time),
                0.18 if is_message else 0.3, left=1e3 * begin_time, color=COLOURS[span.what], edgecolor="white",
                linewidth=0.5,
            )  # fmt: skip
    axes.set_yticks([rank + 0.2 for rank in range(found.sums.case.ranks)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(found.sums.case.ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the last backward pass began")
    shares = f"{found.sums.hidden:.0%} of sums and {found.gathers.hidden:.0%} of gathers hidden"
    axes.set_title(
        "dark blue: backward pass, olive: sums of gradients; light blue: next forward pass, green: gathers;\n"
        f"red: waits ({shares})", fontsize="medium",
    )  # fmt: skip
