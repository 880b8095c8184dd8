"""Sums up a trace of torch.profiler: the operators that take longest, communication beside computation, idle time.

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

from megastable.base.errors import DataError
from megastable.run.trace_names import METADATA, of_trace, phase_of, step_of

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
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = json.load(file)
        events = [e for e in content["traceEvents"] if e.get("ph") == "X" and e.get("dur") is not None]
        facts = content.get(METADATA) or {}
        return _summary(path, facts, events)
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
    inside = [
        (name, clip, talks) for name, one, talks in spans if (clip := _clipped(one, begin, end)) is not None
    ]
    talking = merged(one for _, one, talks in inside if talks)
    computing = merged(one for _, one, talks in inside if not talks)
    both = length(intersection(talking, computing))
    wall = end - begin
    known = of_trace(path.name)
    phases = defaultdict[str, float](float)
    for event in marks:
        if (phase := phase_of(event["name"])) is not None:
            phases[phase] += event["dur"] / 1e6
    return TraceSummary(
        file=path.name, rank=int(facts.get("rank", known[1] if known else 0)), device="cuda" if device else "cpu",
        steps=[int(n) for n in facts.get("steps", [])] or sorted({n for e in marks if (n := step_of(e["name"]))}),
        seconds=wall / 1e6, communication=length(talking) / 1e6,
        overlapped=both / length(talking) if talking else None,
        idle=1 - (length(talking) + length(computing) - both) / wall,
        phases=dict(phases), operators=_operators(inside, wall),
    )  # fmt: skip


Span = tuple[str, BusyTime, bool]
"""Name, when, and whether it is communication."""


def _device(events: Iterable[dict[str, Any]]) -> Iterator[Span]:
    for e in events:
        yield e["name"], BusyTime(e["ts"], e["ts"] + e["dur"]), COMMUNICATION.search(e["name"]) is not None


def _host(events: Iterable[dict[str, Any]]) -> Iterator[Span]:
    """What every thread does at each moment: the innermost operation; it is communication if it is called by such."""
    threads = defaultdict[Any, list[dict[str, Any]]](list)
    for e in events:
        if e.get("cat") == "cpu_op" or (
            e.get("cat") == "user_annotation" and COMMUNICATION.search(e["name"])
        ):
            threads[e.get("pid"), e.get("tid")].append(e)
    for calls in threads.values():
        calls.sort(key=lambda e: (e["ts"], -e["dur"]))
        stack: list[tuple[str, float, bool]] = []  # name, end, communication
        at = 0.0
        for e in [*calls, {"name": "", "ts": float("inf"), "dur": 0.0}]:
            while stack and stack[-1][1] <= e["ts"]:
                name, end, talks = stack.pop()
                if end > at:
                    yield name, BusyTime(at, end), talks
                    at = end
            if stack and e["ts"] > at:
                yield stack[-1][0], BusyTime(at, e["ts"]), stack[-1][2]
            at = max(at, e["ts"])
            end = e["ts"] + e["dur"]
            within = (stack[-1][1], stack[-1][2]) if stack else (end, False)
            stack.append((e["name"], min(end, within[0]), within[1] or bool(COMMUNICATION.search(e["name"]))))


def _operators(spans: Iterable[Span], wall: float) -> list[Operator]:
    counts, spent = defaultdict[str, int](int), defaultdict[str, float](float)
    for name, one, _ in spans:
        counts[name] += 1
        spent[name] += one.end - one.begin
    order = sorted(spent, key=lambda name: -spent[name])
    return [Operator(name, counts[name], spent[name] / 1e6, spent[name] / wall) for name in order]


def _clipped(one: BusyTime, begin: float, end: float) -> BusyTime | None:
    clip = BusyTime(max(one.begin, begin), min(one.end, end))
    return clip if clip.begin < clip.end else None


def merged(intervals: Iterable[BusyTime]) -> list[BusyTime]:
    """Their union, in order, without overlaps."""
    found: list[BusyTime] = []
    for one in sorted(intervals):
        if found and one.begin <= found[-1].end:
            found[-1] = BusyTime(found[-1].begin, max(found[-1].end, one.end))
        else:
            found.append(one)
    return found


def intersection(a: Sequence[BusyTime], b: Sequence[BusyTime]) -> list[BusyTime]:
    """What is in both; each is in order and without overlaps."""
    found, i, j = list[BusyTime](), 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i].begin, b[j].begin), min(a[i].end, b[j].end)
        if begin < end:
            found.append(BusyTime(begin, end))
        if a[i].end < b[j].end:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[BusyTime]) -> float:
    return sum(one.end - one.begin for one in intervals)
