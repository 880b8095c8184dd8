"""Where the time of a step goes, by torch.profiler: a trace, and the operations that take longest.

    found = profile(contestant.step, device, folder)    # writes trace.json (or .gz) and table.txt

On a CPU the time of an operation excludes its callees; on a GPU it is that of the kernels it launched.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch.profiler import ProfilerActivity

from megastable.report.trace_summary import TraceSummary, read_trace

STEPS = 2
LARGE = 20 << 20  # bytes above which a trace is compressed
LONGEST = 20  # operations in the table


def profile(step: Callable[[], Any], device: torch.device, folder: Path) -> TraceSummary:
    """Some steps under torch.profiler; the trace and torch's own table go into `folder`. Profiling slows them down."""
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    step()
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    trace = folder / "trace.json"
    found.export_chrome_trace(str(trace))
    if trace.stat().st_size > LARGE:
        with trace.open("rb") as plain, gzip.open(folder / "trace.json.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        trace.unlink()
        trace = trace.with_suffix(".json.gz")
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    (folder / "table.txt").write_text(found.key_averages().table(sort_by=by, row_limit=100))
    return read_trace(trace)


def table(name: str, found: TraceSummary) -> Table:
    """The operations that take longest, and the time with none of them: Python, launches, waiting."""
    title = f"{name}: a step of {1e3 * found.seconds / STEPS:,.1f} ms under the profiler"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title))
    shown.add_column("operation")
    shown.add_column("ms", justify="right")
    shown.add_column("%", justify="right")
    for one in found.operators[:LONGEST]:
        shown.add_row(one.name, f"{1e3 * one.seconds / STEPS:,.2f}", f"{100 * one.share:.1f}")
    shown.add_row("none of it", f"{1e3 * found.idle * found.seconds / STEPS:,.2f}", f"{100 * found.idle:.1f}")
    return shown
