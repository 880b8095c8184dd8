"""Tables and a picture of the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.ruler.contestants import BOUNDS, WATCHERS
from benchmarks.ruler.faults import FAULTS, Fault
from benchmarks.ruler.task import STEPS

Results = dict[tuple[str, int, str, str], dict[str, Any]]  # by size, seed, contestant and fault
NEAR = 0.02  # nats per token: within which a contestant is as good as the best
CLIPPING = "clipping"


def find_excess(results: Results, size: str, seed: int, name: str, fault: Fault) -> float | None:
    """Validation loss less that of the reference, nats per token: its own clean run, or on a healthy change the run
    that clips and does nothing. inf: the run is dead. None: not measured, or there is no reference."""
    facts = results.get((size, seed, name, fault.name))
    if fault.is_healthy and (name in BOUNDS or (fault.name == "clean" and name == CLIPPING)):
        return None
    reference = results.get(
        (size, seed, CLIPPING, fault.name) if fault.is_healthy else (size, seed, name, "clean")
    )
    if facts is None or reference is None or reference["loss"] is None:
        return None
    if "error" in facts:
        return None
    return math.inf if facts["loss"] is None else facts["loss"] - reference["loss"]


def list_cells(results: Results) -> list[tuple[str, int]]:
    """Sizes and seeds that were measured."""
    return sorted(
        {(size, seed) for size, seed, _, _ in results}, key=lambda cell: (cell[0] != "small", cell[1])
    )


def list_names(results: Results) -> list[str]:
    measured = {name for _, _, name, _ in results}
    return [
        *(n for n in (*BOUNDS, *WATCHERS) if n in measured),
        *sorted(n for n in measured if n.startswith("ours")),
    ]


def collect_excess(results: Results, name: str, fault: Fault) -> list[float]:
    """Over sizes and seeds."""
    all_excess = (find_excess(results, size, seed, name, fault) for size, seed in list_cells(results))
    return [excess for excess in all_excess if excess is not None]


def find_misses(results: Results, name: str) -> list[tuple[str, str, int, float]]:
    """Where a contestant is more than NEAR behind the best: fault, size, seed, and by how much."""
    missed = []
    for fault in FAULTS:
        if fault.is_healthy:
            continue
        for size, seed in list_cells(results):
            own = find_excess(results, size, seed, name, fault)
            others = [find_excess(results, size, seed, other, fault) for other in list_names(results)]
            best = min((excess for excess in others if excess is not None), default=math.inf)
            if own is not None and own > best + NEAR:
                missed.append((fault.name, size, seed, own - best))
    return missed


def _write_excess(values: Sequence[float]) -> str:
    if not values:
        return ""
    dead = sum(map(math.isinf, values))
    if dead:
        return "dead" if dead == len(values) else f"dead {dead}/{len(values)}"
    return f"{np.mean(values):+.3f}"


def summarize_contestant(results: Results, name: str) -> dict[str, float]:
    """Sums and means over all runs of a contestant. mean: of excess, at most 1 each, as of a dead run; worst: of those
    that live. behind: runs with a fault that end more than NEAR behind the best. false: actions in healthy
    runs, and before a fault, where they count once for all faults. lost: harmless rows that were not trained on, a
    run. bad: planted rows that were, a run. undone: steps, a run. time: steps computed, over those of a run."""
    faulty = [(key, facts) for key, facts in results.items() if key[2] == name]
    healthy_names = {fault.name for fault in FAULTS if fault.is_healthy}
    all_excess = [
        excess for fault in FAULTS if not fault.is_healthy for excess in collect_excess(results, name, fault)
    ]
    finite_excess = [excess for excess in all_excess if math.isfinite(excess)]
    count = max(1, len(faulty))
    return {
        "mean": float(np.mean([min(1.0, excess) for excess in all_excess])) if all_excess else math.nan,
        "dead": len(all_excess) - len(finite_excess),
        "worst": max(finite_excess, default=math.nan),
        "behind": len(find_misses(results, name)),
        "false": sum(
            facts["refused"] + facts["rewinds"] - (facts["early"] if key[3] != "clean" else 0)
            for key, facts in faulty
            if key[3] in healthy_names
        ),
        "lost": sum(facts.get("lost", 0) for _, facts in faulty) / count,
        "bad": sum(facts.get("bad_trained", 0) for _, facts in faulty) / count,
        "undone": sum(facts["undone"] + facts["refused"] for _, facts in faulty) / count,
        "time": sum(facts["computed"] + facts.get("measured", 0.0) for _, facts in faulty) / count / STEPS,
    }


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("mean", "mean excess, 1 at most", lambda x: f"{x:+.3f}"),
    ("worst", "worst", lambda x: f"{x:+.3f}"),
    ("dead", "dead runs", lambda x: f"{x:.0f}"),
    ("behind", f"> {NEAR} behind the best", lambda x: f"{x:.0f}"),
    ("false", "false actions", lambda x: f"{x:.0f}"),
    ("lost", "harmless rows lost", lambda x: f"{x:.1f}"),
    ("bad", "bad rows trained on", lambda x: f"{x:.1f}"),
    ("undone", "steps lost", lambda x: f"{x:.1f}"),
    ("time", "time", lambda x: f"{x:.2f}"),
)


def list_rows(results: Results) -> Iterator[tuple[Fault, dict[str, tuple[str, bool]]]]:
    """By fault, of every contestant: its excess as text, and whether that is within NEAR of the best, which says
    nothing of a healthy change."""
    names = list_names(results)
    for fault in FAULTS:
        excess = {name: collect_excess(results, name, fault) for name in names}
        means = {name: float(np.mean(values)) for name, values in excess.items() if values}
        if means:
            bar = -math.inf if fault.is_healthy else min(means.values()) + NEAR
            yield (
                fault,
                {name: (_write_excess(excess[name]), means.get(name, math.inf) <= bar) for name in names},
            )


def show_tables(console: Console, results: Results, expected: int) -> None:
    """Excess by fault and contestant, the contestants in sum, and where ours is behind."""
    names = list_names(results)
    cells = list_cells(results)
    console.print(
        "Validation loss less that of the own clean run, nats per token; of healthy changes, less that of a run that "
        f"only clips. Means of {len(cells)} runs: {', '.join(f'{size} {seed}' for size, seed in cells)}. "
        f"{len(results)} of {expected} results are there."
    )
    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("fault")
    for name in names:
        table.add_column(name, justify="right")
    group = ""
    for fault, row in list_rows(results):
        if fault.group != group:
            group = fault.group
            table.add_row(f"[bold]{group}")
        table.add_row(
            fault.name, *(f"[bold]{text}[/]" if is_near else text for text, is_near in row.values())
        )
    console.print(table)
    summary = Table(box=None, header_style="bold", padding=(0, 1))
    summary.add_column("contestant")
    for _, title, _ in COLUMNS:
        summary.add_column(title, justify="right")
    for name in names:
        sums = summarize_contestant(results, name)
        summary.add_row(name, *(write(sums[column]) for column, _, write in COLUMNS))
    console.print(summary)
    for name in (name for name in names if name.startswith("ours")):
        missed = find_misses(results, name)
        console.print(
            f"{name} is more than {NEAR} behind the best in {len(missed)} runs" + (":" if missed else ".")
        )
        for fault_name, size, seed, gap in sorted(missed, key=lambda miss: -miss[3]):
            console.print(f"  {fault_name}, {size}, seed {seed}: {gap:+.3f}")


def write_markdown(results: Results) -> str:
    """Both tables, for a page. Bold: within NEAR of the best."""
    names = list_names(results)
    lines = ["| fault | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for fault, row in list_rows(results):
        cells = [f"**{text}**" if is_near else text for text, is_near in row.values()]
        lines.append(f"| {fault.title} | " + " | ".join(cells) + " |")
    titles = [title for _, title, _ in COLUMNS]
    lines += ["", "| contestant | " + " | ".join(titles) + " |", "|---|" + "---|" * len(titles)]
    for name in names:
        sums = summarize_contestant(results, name)
        lines.append(f"| {name} | " + " | ".join(write(sums[column]) for column, _, write in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def draw_picture(path: Path, results: Results) -> None:
    """The table as a heat map."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list_names(results)
    faults = [fault for fault in FAULTS if any(collect_excess(results, name, fault) for name in names)]
    values = np.full((len(faults), len(names)), np.nan)
    figure, axes = plt.subplots(figsize=(2.2 + 0.78 * len(names), 1.2 + 0.27 * len(faults)))
    for row, fault in enumerate(faults):
        for column, name in enumerate(names):
            excess = collect_excess(results, name, fault)
            if not excess:
                continue
            values[row, column] = min(1.0, np.mean(excess))
            axes.text(column, row, _write_excess(excess), ha="center", va="center", fontsize=7)
    scaled = np.sign(values) * np.sqrt(np.abs(values) / 0.3)
    axes.imshow(scaled, cmap="RdYlGn_r", vmin=-1, vmax=1, aspect="auto", alpha=0.75)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="left", fontsize=8)
    axes.set_yticks(range(len(faults)), [f"{fault.title}" for fault in faults], fontsize=7)
    axes.xaxis.tick_top()
    for edge in [row for row in range(1, len(faults)) if faults[row].group != faults[row - 1].group]:
        axes.axhline(edge - 0.5, color="black", linewidth=0.8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)
