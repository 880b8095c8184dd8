"""Defines a sheet. Values of rows are plain: text, numbers (numpy's too), booleans, lists of these, or None."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Kind = Literal["text", "count", "number", "share", "score"]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """kind: how values are shown, a share (0 to 1) in per cent; wide: not in a terminal's table; limit: of scores, bad
    from here, very bad from twice as much (without one, colours scale to the sheet's largest). words: it renders as
    text a number under another key of the row, and programs get only that number."""

    key: str
    title: str
    kind: Kind = "text"
    help: str = ""
    wide: bool = False
    limit: float | None = None
    words: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"column {self.key}: no kind {self.kind!r}")

    @property
    def numeric(self) -> bool:
        return self.kind != "text"


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a text, such as a token. heat: 0 to 1, its colour; hint: details, such as its loss."""

    text: str
    heat: float | None = None
    hint: str = ""

    @property
    def level(self) -> int:
        """The heat in tenths, 0 to 9; 0 if there is none."""
        if self.heat is None or not self.heat > 0:
            return 0
        return int(min(10 * self.heat, 9))


@dataclass(frozen=True, slots=True)
class Passage:
    title: str
    spans: Sequence[Span]

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


@dataclass(frozen=True, slots=True)
class Histogram:
    """counts: one fewer than edges, which ascend. marks: (value, label) such as a limit. column: the key of its column,
    so that a bar can select rows; the first and the last bar include what is beyond them."""

    title: str
    edges: Sequence[float]
    counts: Sequence[int]
    marks: Sequence[tuple[float, str]] = ()
    note: str = ""
    column: str = ""

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or not self.counts:
            raise ValueError(
                f"histogram {self.title}: {len(self.counts)} counts between {len(self.edges)} edges"
            )
        rising = all(low < high for low, high in zip(self.edges, self.edges[1:]))
        if not rising or not all(map(math.isfinite, self.edges)):
            raise ValueError(f"histogram {self.title}: its edges do not rise, or are not finite")


class CommandNote(str):
    """A note that is a command to copy: a terminal has it on a line of its own, without breaks."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """passages: texts of a row, by its index. Rows may have keys that no column shows: JSON has them, and with `shard`
    and `document` the page offers a plan. legend: the meaning of the texts' heat. counts: the key whose distinct values
    are counted, if one may have several rows, and their name: ("position", "sample"). facts: for people, name and text;
    data: the same for programs, with units in the keys."""

    title: str
    lead: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()
    passages: Mapping[int, Sequence[Passage]] = field(default_factory=dict)
    histograms: Sequence[Histogram] = ()
    notes: Sequence[str] = ()
    legend: str = "heat of a token"
    counts: tuple[str, str] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = [column.key for column in self.columns]
        if len(set(keys)) != len(keys):
            raise ValueError(f"columns with the same key: {keys}")
        if beyond := [number for number in self.passages if not 0 <= number < len(self.rows)]:
            raise ValueError(f"passages of rows that there are not: {beyond[:5]}")
