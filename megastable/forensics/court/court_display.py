"""Shows a court: a table and sentences for people, a tree for programs, a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from megastable.base.text import plural
from megastable.forensics.court.hold_court import CourtRecord
from megastable.forensics.court.verdict import CourtRow, describe_verdict
from megastable.report.branch_picture import DrawnBranch, draw_branches

EXACT = 1e-6  # nats: the records have losses in fp32
LEGEND = (
    "loss: of the data to come, at the end of a branch; difference: that minus the loss after other data, with its "
    "standard error; learnt: by how much suspects that no branch was trained on are easier than after other data; "
    "norm: the highest gradient norm; intrusive: from 0. Nats. (…): counts only where other data does harm, too"
)


def describe_case(record: CourtRecord) -> Iterator[str]:
    """What was tried, in sentences."""
    case = record.case
    yield f"{case.title}: {case.told}"
    replay = f"{plural(len(case.steps), 'step')} replayed from {case.checkpoint.name}"
    if case.steps:
        exact = "as recorded" if record.differs <= EXACT else f"losses differ by {record.differs:.2g} at most"
        replay += f" ({exact})"
    yield (
        f"{replay}; branches of {plural(record.steps, 'step')} from step {case.first_step} on, with "
        f"{plural(record.suspects, 'suspect')}; the data to come has a loss of {record.before:.4f} before them"
    )


def draw_table(record: CourtRecord) -> Table:
    """A row for every branch."""
    table = Table()
    for name in ("branch", "what it does"):
        table.add_column(name)
    for name in ("loss", "difference", "learnt", "norm", "intrusive"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in record.verdict.rows:
        marks = [
            mark
            for mark, name in (("best", record.verdict.best), ("run", record.verdict.choice))
            if name == row.name
        ]
        name = row.name if row.counts else f"({row.name})"
        table.add_row(
            f"{name} <- {', '.join(marks)}" if marks else name, row.about, _number(row.loss),
            _with_error(row.difference, row.difference_error), _with_error(row.learnt, row.learnt_error),
            f"{row.highest_norm:.3g}", str(row.intrusive),
        )  # fmt: skip
    return table


def describe_outcome(record: CourtRecord) -> Iterator[str]:
    """The verdicts, in sentences."""
    yield f"suspects: {record.verdict.trial.reason}"
    yield f"verdict: {describe_verdict(record.verdict)}"


def court_tree(record: CourtRecord) -> dict[str, Any]:
    """For programs. Losses in nats; the run's choice and the best branch by their names."""
    case, verdict = record.case, record.verdict
    return {
        "title": case.title, "run_did": case.told, "checkpoint": str(case.checkpoint), "first_step": case.first_step,
        "steps": record.steps, "replayed_steps": len(case.steps), "replay_differs": record.differs,
        "suspects": record.suspects, "loss_before": record.before, "choice": verdict.choice, "best": verdict.best,
        "choice_worse": verdict.worse, "choice_worse_error": verdict.worse_error, "good": verdict.is_good,
        "other_data_harms": verdict.harmed_anyway, "trial": verdict.trial.facts,
        "branches": [row.facts for row in verdict.rows],
    }  # fmt: skip


def court_picture(record: CourtRecord, path: Path) -> None:
    """Raises DataError when it cannot be written."""
    named = {record.verdict.best, record.verdict.choice}
    drawn = [_drawn(row, row.name in named) for row in record.verdict.rows]
    draw_branches(record.case.first_step, drawn, record.before, record.case.title, path)


def _drawn(row: CourtRow, bold: bool) -> DrawnBranch:
    return DrawnBranch(row.name, row.losses, row.norms, row.loss, bold)


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def _with_error(value: float, error: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:+.3f} ± {error:.3f}" if math.isfinite(value) else f"{value:+}"
