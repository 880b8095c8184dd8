"""Shows a court: a table and sentences for people, a tree for programs, a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from megastable.base.text import plural
from megastable.report.figures import save
from megastable.report.postmortem.facts import StepRow
from megastable.report.postmortem.passes import passes
from megastable.report.postmortem.pictures import STYLE, draw_branches
from megastable.report.postmortem.trial_facts import BranchFacts, TrialFacts
from megastable_tools.forensics.court.hold_court import CourtRecord
from megastable_tools.forensics.court.verdict import describe_verdict
from megastable_tools.forensics.history import History

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


def court_picture(record: CourtRecord, history: History, path: Path) -> None:
    """Losses of the branches and of the run, and of the data to come after each branch. The format follows from the
    name (.png, .svg, .pdf). Raises DataError when it cannot be written."""
    import matplotlib

    first, verdict = record.case.first_step - 1, record.verdict
    branches = [
        BranchFacts(
            name=row.name, cost=row.intrusive, loss=row.loss, difference=row.difference, error=row.difference_error,
            losses=row.losses, norms=row.norms,
        )
        for row in verdict.rows
    ]  # fmt: skip
    trial = TrialFacts(
        step=first,
        snapshot=first,
        steps=record.steps,
        chosen=verdict.best,
        before=record.before,
        branches=branches,
    )
    rows = [StepRow.model_validate(asdict(done)) for done in history.steps(first, trial.last)]
    with matplotlib.rc_context(STYLE):
        save(draw_branches(trial, passes(rows)), path)


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "not finite"


def _with_error(value: float, error: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:+.3f} ± {error:.3f}" if math.isfinite(value) else f"{value:+}"
