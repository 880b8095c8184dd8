"""Compute the costs of the stability system as shares of a step, from measured seconds. Pure: numbers in, a table
out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

Floats = npt.NDArray[np.float64]
Term = tuple[Floats, float]  # values [rounds], and the weight of their median

# Limits as shares of a step: the gate with its NaN checks; all judgement of a step, samples included; everything.
GATE_LIMIT, GUARD_LIMIT, LIMIT = 0.005, 0.005, 0.02
RESAMPLES = 2000

# By component: the stopwatches to sum, and the two kinds of step to subtract.
COMPONENTS: dict[str, tuple[tuple[str, ...], tuple[str, str] | None]] = {
    "gate": (("norm", "collect", "finite", "losses", "counters", "rest"), ("gate", "bare")),
    "guard": (("judge", "samples", "signs", "settle"), ("guard", "gate")),
    "hardware": (("ballot", "seal"), ("hardware", "guard")),
    "snapshot": (("take",), ("snapshot", "guard")),
    "norms": (("statistics",), None),
    "layers": (("look", "tell"), ("layers", "guard")),
    "trends": (("trend",), None),
    "tensors": (("tensors",), None),
    "probe": (("probe",), None),
    "records": (("write",), None),
}
MEANING = {
    "gate": "gate with NaN checks",
    "norm": "norm, our part of it",
    "collect": "sample losses summed",
    "finite": "are they finite",
    "losses": "sample losses made",
    "counters": "counters kept",
    "rest": "rest of the gate",
    "guard": "detector, policy, record",
    "judge": "detector and policy",
    "samples": "test of whole batches",
    "signs": "signs of the start",
    "settle": "record, carrying out",
    "hardware": "watch over memory",
    "ballot": "before the update",
    "seal": "after it",
    "snapshot": "snapshot in memory",
    "norms": "weight, moment norms",
    "layers": "look into every layer",
    "look": "activations, gradients",
    "tell": "weights, records",
    "trends": "look at slow signals",
    "trend": "look and judgement",
    "tensors": "norm of every tensor",
    "probe": "loss of the probe",
    "records": "file of step records",
    "everything": "everything on",
}


@dataclass(frozen=True)
class Estimate:
    """A median, or a sum of some, with its 95% interval, bootstrapped over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Cost:
    """A component: milliseconds per occurrence, and share of a bare step, spread over `every` steps.

    parts: of `direct_ms`, medians. For a component only measured directly, both figures are the same.
    """

    name: str
    every: int
    direct_ms: Estimate
    paired_ms: Estimate
    direct_share: Estimate
    paired_share: Estimate
    parts: dict[str, float]


@dataclass(frozen=True)
class Total:
    """Shares of a bare step, with their limits."""

    direct: Estimate
    paired: Estimate
    limit: float


@dataclass(frozen=True)
class Costs:
    """steps_ms: whole steps by kind; totals: "gate", "guard" and "everything"."""

    steps_ms: dict[str, Estimate]
    components: list[Cost]
    totals: dict[str, Total]


def estimate_sum(terms: Sequence[Term], factor: float) -> Estimate:
    """The sum of the weighted medians, times `factor`; the values of all terms are paired by round."""
    round_count = len(terms[0][0])
    drawn = np.random.default_rng(0).integers(0, round_count, (RESAMPLES, round_count))
    sums = factor * np.sum([weight * np.median(values[drawn], axis=1) for values, weight in terms], axis=0)
    low, high = np.quantile(sums, (0.025, 0.975)).tolist()
    return Estimate(factor * sum(weight * float(np.median(values)) for values, weight in terms), low, high)


def assess_costs(
    samples: Mapping[str, Sequence[float]], kinds: Sequence[str], intervals: Mapping[str, int]
) -> Costs:
    """Costs from measurements.

    samples: seconds [rounds], by kind of step (`kinds`) and by stopwatch. intervals: steps between two occurrences of a
    component that does not run at every step; 0 = never.
    """
    seconds = {name: np.asarray(values, dtype=np.float64) for name, values in samples.items()}
    of_step = 1 / float(np.median(seconds["bare"]))
    components: list[Cost] = []
    direct_terms: list[Term] = []
    paired_terms: list[Term] = []
    for name, (watches, steps) in COMPONENTS.items():
        every = intervals.get(name, 1)
        if not every:
            continue
        direct = [(seconds[watch], 1 / every) for watch in watches]
        paired = [(seconds[steps[0]] - seconds[steps[1]], 1 / every)] if steps else direct
        direct_terms += direct
        paired_terms += paired
        cost = Cost(
            name,
            every,
            estimate_sum(direct, 1000 * every),
            estimate_sum(paired, 1000 * every),
            estimate_sum(direct, of_step),
            estimate_sum(paired, of_step),
            {watch: 1000 * float(np.median(seconds[watch])) for watch in watches},
        )
        components.append(cost)
    gate, guard = components[:2]
    totals = {
        "gate": Total(gate.direct_share, gate.paired_share, GATE_LIMIT),
        "guard": Total(guard.direct_share, guard.paired_share, GUARD_LIMIT),
        "everything": Total(estimate_sum(direct_terms, of_step), estimate_sum(paired_terms, of_step), LIMIT),
    }
    steps_ms = {kind: estimate_sum([(seconds[kind], 1.0)], 1000) for kind in kinds}
    return Costs(steps_ms, components, totals)


def cost_table(costs: Costs) -> Table:
    """A table: component, duration, frequency, share of a step; sums and limits at the end."""
    bare_ms = costs.steps_ms["bare"].median
    shown_table = Table(
        title=f"Of a step of {bare_ms:,.1f} ms without any of it; ± half of a 95% interval",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    shown_table.add_column("component", no_wrap=True)
    for heading in ("every", "direct ms", "paired ms", "direct %", "paired %"):
        shown_table.add_column(heading, justify="right", no_wrap=True)
    for cost in costs.components:
        paired_too = COMPONENTS[cost.name][1] is not None
        shown_table.add_row(
            MEANING[cost.name], str(cost.every), f"{cost.direct_ms.median:.3f}",
            _with_width(cost.paired_ms, 1, 1) if paired_too else "", f"{100 * cost.direct_share.median:.3f}",
            _with_width(cost.paired_share, 100, 2) if paired_too else "",
        )  # fmt: skip
        for part, part_ms in cost.parts.items() if len(cost.parts) > 1 else ():
            share_text = f"{100 * part_ms / cost.every / bare_ms:.3f}"
            shown_table.add_row(f"  {MEANING[part]}", "", f"{part_ms:.3f}", "", share_text, style="dim")
    shown_table.add_section()
    for name, total in costs.totals.items():
        direct_text, paired_text = f"{100 * total.direct.median:.3f}", _with_width(total.paired, 100, 2)
        limit_text = f"limit {100 * total.limit:g} %"
        shown_table.add_row(MEANING[name], "", "", limit_text, direct_text, paired_text, style="bold")
    return shown_table


def _with_width(e: Estimate, factor: float, digits: int) -> str:
    middle_value, half_width = factor * e.median, factor * (e.high - e.low) / 2
    digits = digits if half_width < 10 else 0  # digits beyond that width mean nothing
    return f"{middle_value:.{digits}f}±{half_width:.{digits}f}"
