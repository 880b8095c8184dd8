"""Sums up how long the phases of steps took, and traces of torch.profiler: the operators that take longest,
communication alongside computation, idle time.

On a GPU the operators are its kernels and copies; on a CPU each operation's own time, without that of those it calls.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from megastable.base.errors import DataError
from megastable.base.text import count_noun
from megastable.run.record_files import read_files
from megastable.run.records import SCHEMA
from megastable.run.step_phases import COLUMNS, METADATA, OTHER, of_trace, phase_of, step_of

READ = pa.schema([SCHEMA.field(name) for name in ("step", "time", "seconds", *COLUMNS.values())])


@dataclass(frozen=True)
class PhaseShare:
    """A phase in all steps: its share of their time, and the seconds of one step: mean, median, 99th percentile."""

    phase: str
    share: float
    mean: float
    p50: float
    p99: float


@dataclass(frozen=True)
class PhaseSummary:
    """phases: in the order of a step; steps: how many have phases, the first and last of them; without: how many have
    none; problems: files that could not be read. Steps that were done again count each time."""

    phases: list[PhaseShare]
    whole: PhaseShare
    steps: int
    first: int
    last: int
    without: int
    problems: list[str]


def read_phases(folder: Path, last: int | None = None) -> PhaseSummary:
    """The phases of the steps recorded in `folder`, or of the `last` ones. Raises DataError if none has any."""
    read_records = read_files(folder, READ)
    unread = [read_record for read_record in read_records if read_record.problem]
    problems = [f"{folder / r.file.name}: not a readable record file ({r.problem})" for r in unread]
    record_tables = [read.table for read in read_records if read.table is not None]
    if not record_tables:
        damaged_text = ""
        if problems:
            damaged_text = f" ({count_noun(len(problems), 'file')} cannot be read: {problems[0]})"
        raise DataError(f"{folder}: no step records{damaged_text}: has this run done a step?")
    table = pa.concat_tables(record_tables).sort_by("time")
    if last is not None:
        table = table.slice(max(0, len(table) - last))
    known = table.filter(table.column(COLUMNS[OTHER]).is_valid())
    if not len(known):
        raise DataError(f"{folder}: {count_noun(len(table), 'step')}, none with phases")
    step_seconds = _numbers(known, "seconds")
    seconds_by_phase = {phase: _numbers(known, column_name) for phase, column_name in COLUMNS.items()}
    total_seconds = float(step_seconds.sum()) or 1.0
    step_numbers = known.column("step").to_numpy()
    return PhaseSummary(
        [_share(phase, phase_seconds, total_seconds) for phase, phase_seconds in seconds_by_phase.items()],
        _share("step", step_seconds, total_seconds), len(known), int(step_numbers.min()), int(step_numbers.max()),
        len(table) - len(known), problems,
    )  # fmt: skip


def _numbers(table: pa.Table, column: str) -> np.ndarray:
    return np.nan_to_num(table.column(column).to_numpy().astype(float), posinf=0.0)


def _share(phase: str, seconds: np.ndarray, total: float) -> PhaseShare:
    p50, p99 = np.percentile(seconds, [50, 99])
    return PhaseShare(phase, float(seconds.sum()) / total, float(seconds.mean()), float(p50), float(p99))


ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
COMMUNICATION = re.compile(
    r"nccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter|AllReduce|AllGather", re.IGNORECASE
)


class BusyTime(NamedTuple):
    """[begin, end), microseconds."""

    begin: float
    end: float


@dataclass(frozen=True)
class Operator:
    """An operation or a kernel: how often, its own seconds, and their share of the trace."""

    name: str
    count: int
    seconds: float
    share: float


@dataclass(frozen=True)
class TraceSummary:
    """steps: in the trace. seconds: of it. communication: seconds with any; overlapped: the share of these during
    which something is computed, too, None without communication. idle: share of the trace with neither. phases: seconds
    of the host in each. operators: the longest first."""

    file: str
    rank: int
    device: str
    steps: list[int]
    seconds: float
    communication: float
    overlapped: float | None
    idle: float
    phases: dict[str, float] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)


def read_trace(path: Path) -> TraceSummary:
    """The summary of a trace file (.json or .json.gz). Raises DataError if it is not one."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as trace_file:
            content = json.load(trace_file)
        timed_events = [e for e in content["traceEvents"] if e.get("ph") == "X" and e.get("dur") is not None]
        trace_facts = content.get(METADATA) or {}
        return _summary(path, trace_facts, timed_events)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not a trace of torch.profiler ({type(error).__name__}: {error})") from None


def _summary(path: Path, facts: dict[str, Any], events: Sequence[dict[str, Any]]) -> TraceSummary:
    marks = [e for e in events if e.get("cat") == "user_annotation"]
    steps = sorted(e["ts"] for e in marks if step_of(e["name"]) is not None)
    device = [e for e in events if e.get("cat") in ON_DEVICE]
    spans = list(_device(device) if device else _host(events))
    if not spans:
        raise ValueError("it has no operations")
    begin = steps[0] if steps else min(one.begin for _, one, _ in spans)
    ends = [e["ts"] + e["dur"] for e in marks if step_of(e["name"]) is not None]
    end = max(*ends, *(one.end for _, one, _ in spans)) if device or not ends else max(ends)
    clipped = [
        (name, BusyTime(max(one.begin, begin), min(one.end, end)), talks) for name, one, talks in spans
    ]
    inside = [(name, one, talks) for name, one, talks in clipped if one.begin < one.end]
    sums, wall = sum_busy((one, talks) for _, one, talks in inside), end - begin
    known = of_trace(path.name)
    phases = defaultdict[str, float](float)
    for mark_event in marks:
        if (phase := phase_of(mark_event["name"])) is not None:
            phases[phase] += mark_event["dur"] / 1e6
    return TraceSummary(
        file=path.name, rank=int(facts.get("rank", known[1] if known else 0)), device="cuda" if device else "cpu",
        steps=[int(n) for n in facts.get("steps", [])] or sorted({n for e in marks if (n := step_of(e["name"]))}),
        seconds=wall / 1e6, communication=sums.talking / 1e6,
        overlapped=sums.both / sums.talking if sums.talking else None,
        idle=1 - (sums.talking + sums.computing - sums.both) / wall,
        phases=dict(phases), operators=_operators(inside, wall),
    )  # fmt: skip


Span = tuple[str, BusyTime, bool]
"""Name, when, and whether it is communication."""


def _device(events: Iterable[dict[str, Any]]) -> Iterator[Span]:
    for e in events:
        yield e["name"], BusyTime(e["ts"], e["ts"] + e["dur"]), COMMUNICATION.search(e["name"]) is not None


def _host(events: Iterable[dict[str, Any]]) -> Iterator[Span]:
    """What every thread does at each moment: the innermost operation; it is communication if it is called by such."""
    calls_by_thread = defaultdict[Any, list[dict[str, Any]]](list)
    for e in events:
        is_mark = e.get("cat") == "user_annotation"
        if e.get("cat") == "cpu_op" or (is_mark and COMMUNICATION.search(e["name"])):
            calls_by_thread[e.get("pid"), e.get("tid")].append(e)
    for thread_calls in calls_by_thread.values():
        thread_calls.sort(key=lambda e: (e["ts"], -e["dur"]))
        stack: list[tuple[str, float, bool]] = []  # name, end, communication
        at = 0.0
        for e in [*thread_calls, {"name": "", "ts": float("inf"), "dur": 0.0}]:
            while stack and stack[-1][1] <= e["ts"]:
                name, end, is_communication = stack.pop()
                if end > at:
                    yield name, BusyTime(at, end), is_communication
                    at = end
            if stack and e["ts"] > at:
                yield stack[-1][0], BusyTime(at, e["ts"]), stack[-1][2]
            at = max(at, e["ts"])
            end = e["ts"] + e["dur"]
            outer_end, is_inside = (stack[-1][1], stack[-1][2]) if stack else (end, False)
            is_communication = is_inside or bool(COMMUNICATION.search(e["name"]))
            stack.append((e["name"], min(end, outer_end), is_communication))


def _operators(spans: Iterable[Span], wall: float) -> list[Operator]:
    call_counts, spent = defaultdict[str, int](int), defaultdict[str, float](float)
    for name, one, _ in spans:
        call_counts[name] += 1
        spent[name] += one.end - one.begin
    order = sorted(spent, key=lambda name: -spent[name])
    return [Operator(name, call_counts[name], spent[name] / 1e6, spent[name] / wall) for name in order]


class BusySums(NamedTuple):
    """Microseconds with any communication, with any computation, and with both."""

    talking: float
    computing: float
    both: float


def sum_busy(times: Iterable[tuple[BusyTime, bool]]) -> BusySums:
    """times: when, and whether it is communication; they may overlap."""
    time_edges = sorted(
        (at, talks, change)
        for busy_time, talks in times
        for at, change in ((busy_time.begin, 1), (busy_time.end, -1))
    )
    busy_sums, running, edge_before = [0.0, 0.0, 0.0], [0, 0], 0.0
    for at, talks, change in time_edges:
        for n, is_busy in enumerate((running[True], running[False], running[True] and running[False])):
            busy_sums[n] += at - edge_before if is_busy else 0.0
        running[talks] += change
        edge_before = at
    return BusySums(*busy_sums)
