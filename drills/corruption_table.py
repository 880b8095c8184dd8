"""What became of faults of single bits, as a table with a sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from drills.corruption_score import Outcome, Total

HEADERS = ("layout", "found", "steps", "by", "rank\nnamed", "undone", "not found, but")
LEFT = ("layout", "by", "not found, but")


def table(outcomes: Sequence[Outcome]) -> Table:
    """A row per kind of fault and layout, kinds apart; what must be found and was not, or is wrong, in red."""
    shown = Table(header_style="bold")
    shown.add_column("fault", no_wrap=True)
    for header in HEADERS:
        shown.add_column(header, justify="left" if header in LEFT else "right")
    ordered = sorted(outcomes, key=lambda o: _kinds(outcomes).index(o.planned.kind))
    last = None
    for (kind, _), found in groupby(ordered, key=lambda o: (o.planned.kind, o.planned.layout)):
        of = list(found)
        if last not in (None, kind) and len({o.planned.layout for o in outcomes}) > 1:
            shown.add_section()
        cells = [Text(text, "bold red" if bad else "") for text, bad in row(of)]
        shown.add_row(Text("" if kind == last else kind), *cells)
        last = kind
    return shown


def _kinds(outcomes: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(o.planned.kind for o in outcomes))


def row(of: Sequence[Outcome]) -> list[tuple[str, bool]]:
    """The cells of a kind in a layout, except for the kind, and whether they miss a target."""
    found = [o for o in of if o.found]
    undone = [o for o in found if o.undone is not None]
    counted = any(o.counts for o in of)
    steps = sorted({o.steps for o in found if o.steps is not None})
    suspected = sum(o.naming == "suspected" for o in found)
    named = _share(found, lambda o: o.right)
    return [
        (of[0].planned.layout, False),
        # In brackets: nothing that is there is expected to find it.
        (_share(of, lambda o: bool(o.found)) if counted else f"({len(found)}/{len(of)})",
         any(o.counts and not o.found for o in of)),
        ("" if not steps else f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}-{steps[-1]}", False),
        (", ".join(dict.fromkeys(_by(o) for o in found)), False),
        (f"{named} ({suspected} with others)" if suspected else named, any(not o.right for o in found)),
        (_share(undone, lambda o: o.undone is True), any(not o.undone for o in undone)),
        (", ".join(_counted([_instead(o) for o in of if not o.found])), any(o.ended == "hung" for o in of)),
    ]  # fmt: skip


def _share(of: Sequence[Outcome], right: Callable[[Outcome], bool]) -> str:
    return f"{sum(map(right, of))}/{len(of)}" if of else ""


def _by(o: Outcome) -> str:
    name = o.found.replace("_", " ")
    return f"{name} ({o.verdict})" if o.verdict else name


def _instead(o: Outcome) -> str:
    """What became of a fault that was not found."""
    if not o.changes and o.ended != "hung":
        return "did not happen"
    if o.harmless:
        return "left no trace"
    if o.ended != "finished":
        return o.ended
    return f"guard: {', '.join(dict.fromkeys(o.guard))}" if o.guard else ""


def _counted(texts: Sequence[str]) -> list[str]:
    found = [text for text in texts if text]
    return [
        text if found.count(text) == 1 else f"{text} (x{found.count(text)})" for text in dict.fromkeys(found)
    ]


def told(o: Outcome) -> str:
    """What became of a fault, in a few words."""
    if not o.found:
        return f"not found{', ' if _instead(o) else ''}{_instead(o)}"
    undone = {True: ", undone", False: ", not undone", None: ""}[o.undone]
    return f"found by {_by(o)} after {o.steps} steps, rank {o.naming}{undone}"


def verdict(of: Total) -> str:
    """The result in a sentence."""
    extra = [f"{of.hung} hung"] if of.hung else []
    extra += [f"{of.absent} did not happen"] if of.absent else []
    others = of.faults - of.counted
    return (
        f"{of.found} of {of.counted} faults that must be found were"
        f"{f', and {of.found_at_all - of.found} of {others} others' if others else ''}; "
        f"the right rank named in {of.right} of {of.found_at_all}, "
        f"{of.undone} of {of.can_be_undone} undone to the bytes of the clean run; "
        f"{of.harmless} left no trace{''.join(f', {text}' for text in extra)}; "
        f"{of.false_alarms} false alarms, with {of.clean} clean runs"
    )
