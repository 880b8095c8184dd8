"""What became of faults of a cluster, as a table with a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from rich.table import Table
from rich.text import Text

from drills.chaos import Planned
from drills.cluster_faults import Kind
from megastable.base.errors import HOST_GONE, OK

HEADERS = (
    "#",
    "fault",
    "on",
    "in",
    "at step",
    "found\nafter s",
    "verdict",
    "blamed",
    "expected",
    "same\nbytes",
    "cost s",
)
LEFT = ("fault", "on", "in", "verdict", "blamed", "expected", "same\nbytes")
NOBODY = "nobody"


class Row(BaseModel):
    """A fault and its run. found: seconds from the fault to the verdict, None without one; verdict: a sentence, empty
    without one. blamed: the host it names; expected: the one that it had to name; harmless: whether there need not be a
    verdict. exit: code of the supervisor, None if
    it never ended. same: whether the bytes are those of an undisturbed run, None if it has not ended as one. cost:
    seconds that the run took longer than an undisturbed one."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    planned: Planned
    found: float | None
    verdict: str
    blamed: str | None
    expected: str | None
    harmless: bool
    exit: int | None
    same: bool | None
    cost: float | None
    verdict_right: bool
    end_right: bool

    @property
    def right(self) -> bool:
        return self.verdict_right and self.end_right


def row(
    kind: Kind,
    planned: Planned,
    *,
    found: float | None,
    verdict: str,
    blamed: str | None,
    exit: int | None,
    same: bool | None,
    cost: float | None,
    spared: bool = False,
) -> Row:
    """Judge what became of a fault. spared: whether a host can take the place of another."""
    return Row(
        planned=planned, found=found, verdict=verdict, blamed=blamed, expected=kind.blamed(planned.host),
        harmless=kind.harmless, exit=exit,
        same=same, cost=cost, verdict_right=kind.accepts(verdict, blamed, planned.host),
        end_right=(exit == OK and same is True) if kind.back or spared else exit == HOST_GONE,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """A row per fault; what is wrong in red."""
    shown = Table(header_style="bold")
    for header in HEADERS:
        left = header in LEFT
        shown.add_column(header, justify="left" if left else "right", no_wrap=header != "verdict")
    for one in rows:
        wrong = set[str]()
        if not one.verdict_right:
            wrong |= {"verdict", "blamed"}
        if not one.end_right:
            wrong.add("same\nbytes")
        styles = ["bold red" if header in wrong else "" for header in HEADERS]
        shown.add_row(*(Text(cell, style) for cell, style in zip(cells(one), styles, strict=True)))
    return shown


def cells(one: Row) -> list[str]:
    """The cells of a row, under `HEADERS`."""
    p = one.planned
    return [
        str(p.number),
        f"{p.kind} ({p.seconds:g} s)" if p.seconds else p.kind,
        p.host,
        p.phase,
        str(p.step),
        "" if one.found is None else f"{one.found:.1f}",
        one.verdict or "none",
        one.blamed or NOBODY,
        f"{one.expected} or {NOBODY}" if one.expected and one.harmless else one.expected or NOBODY,
        _end(one),
        "" if one.cost is None else f"{one.cost:+.1f}",
    ]


def _end(one: Row) -> str:
    if one.exit is None:
        return "never ended"
    if one.exit != OK:
        return f"exit {one.exit}"
    return {True: "yes", False: "no", None: "unknown"}[one.same]


def summary(rows: Sequence[Row]) -> str:
    """The result in a sentence."""
    named = sum(one.verdict_right for one in rows)
    ended = sum(one.end_right for one in rows)
    found = [one.found for one in rows if one.found is not None]
    longest = f", found after at most {max(found):.1f} s" if found else ""
    return f"{len(rows)} faults: {ended} runs ended as they should, {named} verdicts right{longest}"
