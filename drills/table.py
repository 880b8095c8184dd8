"""Present scores as a table with a summary sentence. A row covers the runs of all seeds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from drills.plan import Policy
from drills.score import TARGET, Score, better, within

HEADERS = (
    "policy", "val\nloss", "minus\nclean", "bad\nfound", "clean\nlost", "put\noff", "steps\nlost", "batches\nrefused",
    "inci-\ndents", "re-\nwinds", "cuts", "hand-\novers", "alerts", "warn-\nings", "led\nby", "exit",
    "seconds to\nrecover", "false\nalarms", "class", "cause",
)  # fmt: skip
LEFT = ("policy", "class", "cause")
WIDTH = 220  # columns of a terminal that show three seeds without a wrapped line


def console() -> Console:
    """The console for tables; wide enough if it is not a terminal."""
    out = Console(markup=False, emoji=False, highlight=False)
    return out if out.is_terminal else Console(markup=False, emoji=False, highlight=False, width=WIDTH)


def table(scores: Sequence[Score]) -> Table:
    """A row per scenario and policy, scenarios apart; ours in bold, and in red if it misses a target. Empty columns are
    left out."""
    rows = [(key, list(found)) for key, found in groupby(scores, key=lambda s: (s.scenario, s.policy))]
    told = [row(seeds) for _, seeds in rows]
    filled = [i for i, cells in enumerate(zip(*told, strict=True)) if i < 2 or set(cells) - {"", "0"}]
    shown = Table(header_style="bold")
    shown.add_column("scenario", no_wrap=True)
    for i in filled:
        column = HEADERS[i]
        shown.add_column(column, justify="left" if column in LEFT else "right", no_wrap=True)
    last = None
    for ((scenario, policy), seeds), texts in zip(rows, told, strict=True):
        if last not in (None, scenario):
            shown.add_section()
        title, last = "" if scenario == last else scenario, scenario
        ours = policy is Policy.OURS
        cells = [Text(texts[i], _style(seeds, HEADERS[i]) if ours else "") for i in filled]
        shown.add_row(Text(title), *cells)
    return shown


def _style(seeds: Sequence[Score], column: str) -> str:
    missed = {
        "minus\nclean": any(not s.clean and not within(s) for s in seeds),
        "clean\nlost": any(s.fate.lost for s in seeds),
        "cause": any(s.cause_right is False for s in seeds),
    }
    return "bold red" if missed.get(column) else "bold"


def row(seeds: Sequence[Score]) -> list[str]:
    """The cells of the runs of a scenario under a policy, except its name."""
    ours = seeds[0].policy is Policy.OURS

    def each(cells: Sequence[str], always: bool = False) -> str:
        """Cells that are equal for all seeds are shown once."""
        return " ".join(dict.fromkeys(cells) if len(set(cells)) == 1 else cells) if ours or always else ""

    return [
        seeds[0].policy,
        outcome(seeds),
        each([_difference(s) for s in seeds], always=True),
        each([f"{s.fate.convicted}/{s.fate.planted}" if s.fate.planted else "" for s in seeds]),
        each([str(s.fate.lost) for s in seeds]),
        each([str(s.fate.deferred) for s in seeds]),
        each([str(s.steps_lost) for s in seeds]),
        each([str(s.discarded) for s in seeds], always=True),
        each([str(s.incidents) for s in seeds]),
        each([str(s.rewinds) for s in seeds]),
        each([str(s.cuts) for s in seeds]),
        each([str(s.handovers) for s in seeds]),
        each([str(s.alerts) for s in seeds]),
        each([_warned(s) for s in seeds]),
        each(["" if s.begin is None else "never ✗" if s.lead is None else str(s.lead) for s in seeds]),
        each(["" if s.exit is None else str(s.exit) for s in seeds]),
        each(["" if s.seconds_to_recover is None else f"{s.seconds_to_recover:.1f}" for s in seeds]),
        each([str(s.false_alarms) for s in seeds], always=True),
        each([_judged(s.kinds, s.kind_right) for s in seeds]),
        each([_judged(s.causes, s.cause_right) for s in seeds]),
    ]


def outcome(seeds: Sequence[Score]) -> str:
    """How they ended: the mean loss, or the outcome of those without one."""
    losses = [s.val_loss for s in seeds if s.ended == "finished" and s.val_loss is not None]
    if len(losses) == len(seeds):
        return f"{fmean(losses):.4f}"
    without = [s for s in seeds if s.ended != "finished" or s.val_loss is None]
    told = ["not measured" if s.ended == "finished" else f"{s.ended} at step {s.step}" for s in without]
    return ", ".join(dict.fromkeys(told))


def _difference(s: Score) -> str:
    if s.clean or s.excess is None:
        return ""
    return f"{s.excess:+.4f}{' better' if better(s) else ''}"


def _warned(s: Score) -> str:
    mark = "" if s.warned is None else " ✓" if s.warned else " ✗"
    return f"{s.warnings}{mark}"


def _judged(found: Sequence[str], right: bool | None) -> str:
    if right is None:
        return ""
    return f"{' and '.join(dict.fromkeys(found)) or 'none'} {'✓' if right else '✗'}"


def verdict(scores: Sequence[Score]) -> str:
    """The result of ours, in a sentence."""
    ours = [s for s in scores if s.policy is Policy.OURS and not s.clean]
    if not ours:
        return "ours was not among the policies: there is no target to meet"
    well, right = sum(map(within, ours)), sum(bool(s.cause_right) for s in ours)
    gained = sum(within(s) and better(s) for s in ours)
    every = [s for s in scores if s.policy is Policy.OURS]
    alarms, lost = sum(s.false_alarms for s in every), sum(s.fate.lost for s in every)
    return (
        f"ours: {well} of {len(ours)} at most {TARGET} nat worse than the clean run (or warned of, where that is asked "
        f"for){', ' + str(gained) + ' of them better by more than that' if gained else ''}, "
        f"cause right in {right} of {len(ours)}, {lost} clean samples lost for good, {alarms} false alarms"
    )
