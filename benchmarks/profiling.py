"""Break down a step's time by category, from torch.profiler's events.

    found = profile(contestant.step, device, folder)    # writes trace.json (or .gz) and table.txt

On a CPU the time of an operation excludes its callees; on a GPU it is that of the kernels it launched.
"""

from __future__ import annotations

import gzip
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch.profiler import ProfilerActivity

STEPS = 2
LARGE = 20 << 20  # bytes above which a trace is compressed
ELEMENTWISE, COPIES, OTHER, IDLE = "norms and elementwise", "copies", "other", "none of it"

# By any name on the path from the outermost operation to the kernel; the first match wins.
OUTSIDE = (
    ("optimizer", r"Optimizer\.|adam|multi_tensor|clip_grad|_foreach_norm|LpNorm"),
    ("communication", r"c10d::|nccl|gloo|all_?reduce|all_?gather|reduce_scatter|broadcast_"),
    ("loss", r"cross_?entropy|chunked|nll_loss|log_?softmax|logsumexp"),
    ("attention", r"scaled_dot_product|flash|fmha|sdpa|attention|blocked"),
)
# By the name of the operation or kernel itself.
INSIDE = (
    (
        "matrix products",
        r"::_?(mm|addmm|bmm|baddbmm|matmul|linear|_addmm_activation)$|gemm|cutlass|nvjet|xmma|linear_pointwise|mkl",
    ),
    (
        COPIES,
        r"::(copy_|_to_copy|clone|contiguous|cat|_foreach_copy_|zero_|fill_|zeros|_foreach_zero_)$"
        r"|memcpy|memset|CatArray|copy_kernel",
    ),
    (
        ELEMENTWISE,
        r"^aten::|triton|cpp_fused|CompiledFxGraph|CompiledFunction|Torch-Compiled|elementwise|reduce_kernel"
        r"|embedding|Norm",
    ),
)
CATEGORIES = (
    "matrix products",
    "attention",
    "loss",
    ELEMENTWISE,
    "optimizer",
    "communication",
    COPIES,
    OTHER,
    IDLE,
)


def category(path: Sequence[str]) -> str:
    """The category of an operation by its path: from the outermost caller to itself (or its kernel).

    The products of a loss that includes the projection are matrix products, like those of a separate head.
    """
    for name, pattern in OUTSIDE:
        if any(re.search(pattern, part, re.IGNORECASE) for part in path):
            product = any(re.search(INSIDE[0][1], part, re.IGNORECASE) for part in path[-2:])
            return INSIDE[0][0] if name == "loss" and product else name
    for name, pattern in INSIDE:
        if re.search(pattern, path[-1], re.IGNORECASE):
            return name
    return OTHER


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of one step, by category; "none of it" is the rest of the step: Python, launches, waiting."""

    step_ms: float
    by_category: dict[str, float]


def break_down(spent: Iterable[tuple[Sequence[str], float]], seconds: float, steps: int) -> Breakdown:
    """spent: (path, microseconds) of every operation in `steps` steps that took `seconds`."""
    found: dict[str, float] = defaultdict(float)
    for path, microseconds in spent:
        found[category(path)] += microseconds / 1e3 / steps
    step_ms = 1e3 * seconds / steps
    found[IDLE] = max(0.0, step_ms - sum(found.values()))
    return Breakdown(step_ms, {name: found.get(name, 0.0) for name in CATEGORIES})


def profile(step: Callable[[], Any], device: torch.device, folder: Path) -> Breakdown:
    """Some steps under torch.profiler; the trace and torch's own table go into `folder`. Profiling slows them down."""
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    step()
    with torch.profiler.profile(activities=activities) as found:
        begun = time.perf_counter()
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begun
    trace = folder / "trace.json"
    found.export_chrome_trace(str(trace))
    if trace.stat().st_size > LARGE:
        with trace.open("rb") as plain, gzip.open(folder / "trace.json.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        trace.unlink()
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    (folder / "table.txt").write_text(found.key_averages().table(sort_by=by, row_limit=100))
    return break_down(_spent(found.events() or (), on_gpu), seconds, STEPS)


def _spent(events: Iterable[Any], on_gpu: bool) -> Iterable[tuple[list[str], float]]:
    for event in events:
        if event.device_type.name != "CPU":
            continue
        path, above = [event.name], event.cpu_parent
        while above is not None:
            path.insert(0, above.name)
            above = above.cpu_parent
        if on_gpu:
            for kernel in event.kernels:
                yield [*path, kernel.name], kernel.duration
        else:
            yield path, event.self_cpu_time_total


def table(name: str, found: Breakdown) -> Table:
    title = f"{name}: a step of {found.step_ms:,.1f} ms under the profiler"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title))
    shown.add_column("category")
    shown.add_column("ms", justify="right")
    shown.add_column("%", justify="right")
    for kind, milliseconds in found.by_category.items():
        shown.add_row(kind, f"{milliseconds:,.2f}", f"{100 * milliseconds / found.step_ms:.1f}")
    return shown
