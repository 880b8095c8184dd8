"""Writes the page of runs as one self-contained file, with the pages of their incidents inside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megastable.base import durable
from megastable.report.run_page import page_parts, run_panel
from megastable.report.run_page.run_reader import RunReader, told_apart

COLUMNS = 6000  # of a plot: what a zoom can still tell apart
LINES = 5000  # of the journal
PAGES = 24 << 20  # bytes of incidents' pages


def write_page(runs: Sequence[Path], output: Path) -> list[str]:
    """Write the page of run directories. Returns what could not be read. Raises DataError."""
    readers = told_apart([whole(run) for run in runs])
    durable.write_output(output, page_parts.self_contained(content(readers)))
    return [problem for reader in readers for problem in reader.head()["problems"]]


def whole(run: Path) -> RunReader:
    """A reader that has read all of a run. Raises DataError."""
    reader = RunReader(run)
    reader.look(now=True)
    return reader


def content(readers: Sequence[RunReader], public: bool = False) -> dict[str, Any]:
    """What a server would answer, by run. The plots are those by step; they hold the other axes, too. public: without
    advice to whoever has the run."""
    room, runs = PAGES, list[dict[str, Any]]()
    for reader in readers:
        panel = reader.panel()
        panel["journal"] = run_panel.journal(reader, most=LINES)
        pages = dict[str, str]()
        # The newest first: those are asked for.
        for case in reversed(panel["incidents"]):
            page = incident_page(reader, case["page"])
            if page is not None and len(page) <= room:
                pages[case["page"]] = page
                room -= len(page)
        head = reader.head() | ({"advice": ""} if public else {})
        runs.append({
            "head": head, "panel": panel, "plots": reader.plots("step", None, None, COLUMNS),
            "heat": reader.heat("step", None, None), "machines": reader.machine_maps("step", None, None),
            "pages": pages,
        })  # fmt: skip
    return {"runs": runs}


def incident_page(reader: RunReader, folder: str | None) -> str | None:
    """The page of an incident, None if there is none."""
    if folder is None:
        return None
    try:
        return (reader.run.incidents / folder / run_panel.REPORT).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
