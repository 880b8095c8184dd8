"""Scores as a table for people, and what it comes to in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megastable.drills.plan import Policy
from megastable.drills.score import TARGET, Score, within

COLUMNS = (
    "val\nloss", "minus\nclean", "steps\nlost", "batches\ndiscarded", "samples\nskipped", "seconds to\nrecover",
    "false\nalarms", "class", "cause",
)  # fmt: skip
WIDTH = 156  # columns of a terminal that show it without a wrapped line


def console() -> Console:
    """Where tables go; one that is no terminal is wide enough."""
    out = Console(markup=False, emoji=False, highlight=False)
    return out if out.is_terminal else Console(markup=False, emoji=False, highlight=False, width=WIDTH)


def table(scores: Sequence[Score]) -> Table:
    """A row per run, scenarios apart; ours in bold, and in red where it misses a target."""
    shown = Table(header_style="bold")
    shown.add_column("scenario", no_wrap=True)
    shown.add_column("policy")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in ("class", "cause") else "right", no_wrap=True)
    last = None
    for s in scores:
        if last not in (None, s.scenario):
            shown.add_section()
        title, last = "" if s.scenario == last else s.scenario, s.scenario
        ours = s.policy is Policy.OURS
        cells = [Text(title), *(Text(cell, _style(s, i) if ours else "") for i, cell in enumerate(row(s)))]
        shown.add_row(*cells)
    return shown


def _style(s: Score, column: int) -> str:
    bad = (column == 2 and not s.clean and not within(s)) or (column == 9 and s.cause_right is False)
    return "bold red" if bad else "bold"


def row(s: Score) -> list[str]:
    """The cells of a run but its scenario."""
    ours = s.policy is Policy.OURS
    return [
        s.policy,
        outcome(s),
        _difference(s),
        str(s.steps_lost) if ours else "",
        str(s.discarded),
        str(s.skipped) if ours else "",
        "" if s.seconds_to_recover is None else f"{s.seconds_to_recover:.1f}",
        str(s.false_alarms),
        _judged(s.kinds, s.kind_right),
        _judged(s.causes, s.cause_right),
    ]


def outcome(s: Score) -> str:
    """How it ended."""
    if s.ended != "finished":
        return f"{s.ended} at step {s.step}"
    return "not measured" if s.val_loss is None else f"{s.val_loss:.4f}"


def _difference(s: Score) -> str:
    return "" if s.clean or s.excess is None else f"{s.excess:+.4f}"


def _judged(found: Sequence[str], right: bool | None) -> str:
    if right is None:
        return ""
    return f"{' and '.join(dict.fromkeys(found)) or 'none'} {'✓' if right else '✗'}"


def verdict(scores: Sequence[Score]) -> str:
    """What ours comes to, in a sentence."""
    ours = [s for s in scores if s.policy is Policy.OURS and not s.clean]
    if not ours:
        return "ours was not among the policies: there is no target to meet"
    well, right = sum(map(within, ours)), sum(bool(s.cause_right) for s in ours)
    alarms = sum(s.false_alarms for s in scores if s.policy is Policy.OURS)
    return (
        f"ours: {well} of {len(ours)} within {TARGET} nat of the clean run, cause right in {right} of {len(ours)}, "
        f"{alarms} false alarms"
    )
