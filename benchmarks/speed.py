"""Compute speeds from measured seconds, and ratios of ours to the others. Pure: numbers in, a table out.

    speed = assess(samples, ours="megastable", work=work, problems={}, ...)
    print(table(speed))

Intervals are of 95%, bootstrapped over the rounds; ratios are paired by round, since every round measures all
contestants in succession, so that the machine's other load affects all alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from benchmarks.costs import Estimate, estimate_sum
from benchmarks.peers import OURS

LIMITS = {"bare": 0.95}  # minimum ratio of ours to the same model without DeepSpeed, gate and records
ALIKE = 0.02  # tolerance for first losses of contestants with the same weights


@dataclass(frozen=True)
class Work:
    """The work of one step: tokens, and FLOPs in both conventions (model/sizes.py)."""

    tokens: int
    flops_full: float
    flops_causal: float


@dataclass(frozen=True)
class Peak:
    """TFLOP/s of the device in the dtype of the products: of a measured matrix product; of the data sheet, if known."""

    measured_tflops: float
    nominal_tflops: float | None


@dataclass(frozen=True)
class Memory:
    """held: between two steps (weights, moments, buffers); step: peak that a step takes on top."""

    held_gib: float
    step_gib: float
    peak_gib: float


@dataclass(frozen=True)
class Entry:
    """A contestant's facts beside its seconds. same_weights: it started from our weights."""

    backends: str
    build_seconds: float
    first_seconds: float  # the first step, compilation included
    first_loss: float
    memory: Memory | None
    same_weights: bool = True


@dataclass(frozen=True)
class Row:
    """One contestant. problem: the reason for missing numbers. ratio: throughput of ours / its throughput.

    mfu: model FLOP utilisation by "full" and "causal" attention, of the measured peak; mfu_nominal: of the data
    sheet's.
    """

    name: str
    problem: str | None = None
    entry: Entry | None = None
    step_ms: Estimate | None = None
    tokens_per_second: Estimate | None = None
    mfu: dict[str, float] = field(default_factory=dict)
    mfu_nominal: dict[str, float] = field(default_factory=dict)
    ratio: Estimate | None = None
    limit: float | None = None
    samples_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Speed:
    """machine: hardware and software. run: the trained model. notes: for the interpretation."""

    machine: dict[str, Any]
    run: dict[str, Any]
    peak: Peak
    rounds: int
    rows: list[Row]
    notes: list[str]

    def row_of(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def assess_speed(
    order: Sequence[str],
    samples: Mapping[str, Sequence[float]],
    entries: Mapping[str, Entry],
    problems: Mapping[str, str],
    work: Work,
    peak: Peak,
    about: tuple[dict[str, Any], dict[str, Any]],
    notes: Sequence[str] = (),
) -> Speed:
    """order: names of all rows. samples: seconds per step [rounds], by name, paired; problems: of those without."""
    speed_rows = []
    for name in order:
        if name in problems or not samples.get(name):
            speed_rows.append(Row(name, problems.get(name, "not measured"), entries.get(name)))
            continue
        speed_rows.append(_row(name, samples, entries[name], work, peak))
    round_count = max((len(values) for values in samples.values()), default=0)
    return Speed(*about, peak, round_count, speed_rows, [*notes, *_differing(entries)])


def _row(name: str, samples: Mapping[str, Sequence[float]], entry: Entry, work: Work, peak: Peak) -> Row:
    seconds = np.asarray(samples[name], dtype=np.float64)
    step_estimate = estimate_sum([(seconds, 1.0)], 1.0)
    flops_by_kind = {"full": work.flops_full, "causal": work.flops_causal}

    def utilisation(tflops: float) -> dict[str, float]:
        return {kind: flops / step_estimate.median / (1e12 * tflops) for kind, flops in flops_by_kind.items()}

    speed_ratio = None
    if name != OURS and len(samples.get(OURS, ())) == len(seconds):
        speed_ratio = estimate_sum([(seconds / np.asarray(samples[OURS], dtype=np.float64), 1.0)], 1.0)
    return Row(
        name, None, entry,
        Estimate(1e3 * step_estimate.median, 1e3 * step_estimate.low, 1e3 * step_estimate.high),
        Estimate(work.tokens / step_estimate.median, work.tokens / step_estimate.high, work.tokens / step_estimate.low),
        utilisation(peak.measured_tflops),
        utilisation(peak.nominal_tflops) if peak.nominal_tflops else {},
        speed_ratio, LIMITS.get(name), (1e3 * seconds).tolist(),
    )  # fmt: skip


def _differing(entries: Mapping[str, Entry]) -> list[str]:
    """A contestant with another loss from the same weights does not do the same work."""
    if OURS not in entries:
        return []
    own, difference_notes = entries[OURS].first_loss, []
    for name, entry in entries.items():
        if entry.same_weights and not abs(entry.first_loss / own - 1) <= ALIKE:
            difference_notes.append(
                f"{name}: its first loss is {entry.first_loss:.4f}, ours {own:.4f} from the same weights and tokens: "
                "it does not compute the same"
            )
    return difference_notes


def speed_table(speed: Speed) -> Table:
    """A table of 80 columns."""
    run = speed.run
    title = f"A step of {run['tokens']:,} tokens, {run['parameters']:,} parameters; ± half of a 95% interval"
    shown_table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        min_width=min(len(title), 80),
    )
    shown_table.add_column("trains", no_wrap=True)
    for heading in ("ms a step", "tokens/s", "MFU, causal", "GiB", "ours is ×"):
        shown_table.add_column(heading, justify="right", no_wrap=True)
    for row in speed.rows:
        if row.step_ms is None or row.tokens_per_second is None or row.entry is None:
            shown_table.add_row(row.name, "see below", *[""] * 4, style="dim")
            continue
        memory = row.entry.memory
        shown_table.add_row(
            row.name, _with_width(row.step_ms), f"{row.tokens_per_second.median:,.0f}",
            f"{100 * row.mfu['full']:.1f}, {100 * row.mfu['causal']:.1f}",
            f"{memory.peak_gib:.2f}" if memory else "", _ratio(row.ratio), style="bold" if row.name == OURS else "",
        )  # fmt: skip
    return shown_table


def describe_speed(speed: Speed) -> list[str]:
    """The lines below the table: backends, reasons, the peak, limits, notes."""
    text_lines = []
    for row in speed.rows:
        if row.problem is not None:
            text_lines.append(f"{row.name}: {row.problem}")
        elif row.entry is not None:
            row_entry = row.entry
            warming = f"built in {row_entry.build_seconds:.1f} s, first step {row_entry.first_seconds:.1f} s"
            text_lines.append(f"{row.name}: {row_entry.backends}; {warming}")
    peak_text = (
        "MFU % (the attention counted as a full square, then causal) is of "
        f"{speed.peak.measured_tflops:,.2f} TFLOP/s, a matrix product measured here"
    )
    own_row = speed.row_of(OURS)
    if speed.peak.nominal_tflops and own_row.mfu_nominal:
        peak_text += (
            f"; of the data sheet's {speed.peak.nominal_tflops:,.0f} TFLOP/s ours is "
            f"{100 * own_row.mfu_nominal['full']:.1f} % (full attention), "
            f"{100 * own_row.mfu_nominal['causal']:.1f} % (causal)"
        )
    text_lines.append(peak_text)
    for row in speed.rows:
        if row.limit is not None and row.ratio is not None:
            text_lines.append(
                f"limit: ours at least × {row.limit:g} of {row.name}: × {row.ratio.median:.3f} "
                f"[{row.ratio.low:.3f}, {row.ratio.high:.3f}], {_verdict(row.ratio, row.limit)}"
            )
    return [*text_lines, *(f"note: {note}" for note in speed.notes)]


def _verdict(ratio: Estimate, limit: float) -> str:
    """Judged by the whole interval: a noisy measurement decides nothing."""
    if ratio.low >= limit:
        return "kept"
    return "NOT KEPT" if ratio.high < limit else "not decided: more rounds, or a quieter machine"


def _with_width(e: Estimate) -> str:
    half_width = (e.high - e.low) / 2
    digits = 1 if e.median < 1000 else 0
    return f"{e.median:,.{digits}f}±{half_width:,.{digits}f}"


def _ratio(e: Estimate | None) -> str:
    return "" if e is None else f"{e.median:.2f}±{(e.high - e.low) / 2:.2f}"
