"""Measure the cost and the accuracy of hunting bad data: all of `tools/bench.py data`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

from benchmarks.data import scan_cost
from benchmarks.forensics import evaluate
from benchmarks.inspect import inspect_cost
from benchmarks.prune_speed import prune_cost


@dataclass
class Hunt:
    """The measurements, as in the JSON: empty if not made."""

    inspect: dict[str, Any] = field(default_factory=dict)
    scan: dict[str, Any] = field(default_factory=dict)
    prune: dict[str, Any] = field(default_factory=dict)
    found: list[dict[str, Any]] = field(default_factory=list)


PARTS = ("inspect", "scan", "prune", "found")


def hunt(corpus: Path, parts: tuple[str, ...], tokens: int, seeds: int, say: Callable[[str], None]) -> Hunt:
    """Measure `parts`. tokens: of the larger scan and of the corpus that is pruned; seeds: of planted corruption.

    Raises DataError for a corpus that cannot be read and a disk that is too small.
    """
    hunted = Hunt()
    with TemporaryDirectory(prefix="megastable-bench-") as folder:
        if "inspect" in parts:
            say("inspect step, 10^12 tokens")
            hunted.inspect = inspect_cost(Path(folder) / "inspect")
        if "scan" in parts:
            hunted.scan = scan_cost(
                corpus, (tokens // 4, tokens), say=lambda text: say(f"scan, {text}")
            ).as_dict()
        if "prune" in parts:
            say("prune and cp")
            hunted.prune = prune_cost(Path(folder), tokens)
        if "found" in parts:
            for seed in range(seeds):
                say(f"planted corruption, seed {seed}")
                hunted.found += [row | {"seed": seed} for row in evaluate(corpus, seed)]
    return hunted


def tables(hunted: Hunt) -> list[Table]:
    """The tables for a terminal."""
    costs = Table("what", "measured", "goal", title="What hunting costs")
    if i := hunted.inspect:
        whole = (
            f"{i['after_imports']:.2f} s after imports, {i['seconds']:.2f} s in all, {i['megabytes']:.0f} MB"
        )
        costs.add_row(f"inspect step, {i['tokens']:.0e} tokens", whole, "1 s, 300 MB")
    if s := hunted.scan:
        costs.add_row("scan, one core", f"{s['tokens_per_second'] / 1e6:.1f} M tokens/s", "10")
        first = s["learning"][-1]
        rate = first["tokens"] / first["cpu_seconds"] / 1e6
        costs.add_row(
            f"  with learning the baseline, {first['tokens']:,} tokens", f"{rate:.1f} M tokens/s", ""
        )
        costs.add_row("  four times the tokens: time per token", f"x {s['growth']:.2f}", "1")
        peaks = [run["peak_mib"] for run in s["scanning"]]
        costs.add_row("  four times the tokens: memory", f"x {s['memory']:.2f} ({peaks[0]:.0f} MiB)", "1")
    if p := hunted.prune:
        spread = f"{p['ratio']:.2f} ({p['ratio_low']:.2f} to {p['ratio_high']:.2f})"
        costs.add_row("prune apply, speed over cp's", spread, "0.5")
        costs.add_row("  both", f"{p['apply_gb_per_s']:.2f} and {p['cp_gb_per_s']:.2f} GB/s", "")
    made = [costs] if costs.row_count else []
    if hunted.found:
        found = Table(
            "planted", "way", "documents", "recall at precision 0.9", "precision at the number planted",
            "kind named right", "named by the advice", "false", "false expected", title="What a scan finds",
        )  # fmt: skip
        ways: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in hunted.found:
            ways.setdefault((row["way"], row["kind"]), []).append(row)
        for (way, kind), rows in ways.items():
            planted = f"{sum(r['planted'] for r in rows):,} in {sum(r['documents'] for r in rows):,}"
            numbers = [f"{sum(r[key] for r in rows) / len(rows):.2f}" for key in NUMBERS]
            named, false = (sum(r[key] for r in rows) for key in ("named_advised", "false_advised"))
            advice = f"{named / sum(r['planted'] for r in rows):.2f}", f"{false}"
            found.add_row(
                kind, way, planted, *numbers, *advice, f"{sum(r['expected_false'] for r in rows):.1f}"
            )
        made.append(found)
    return made


NUMBERS = ("recall", "precision", "named")
