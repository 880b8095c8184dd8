"""Puts the page of runs together: for a server, or as one self-contained file with the pages of its incidents."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from megastable.base import durable
from megastable.report.run_page import run_reader
from megastable.report.run_page.run_reader import RunReader, told_apart
from megastable.report.sheet.page import embed_json, hash_source

HERE = Path(__file__).parent
STATIC, VENDOR = HERE / "static", HERE / "vendor"
SCRIPTS = (
    "dom.js", "format.js", "source.js", "state.js", "marks.js", "plot.js", "charts.js", "heat.js", "machines.js",
    "strips.js", "headline.js", "incidents.js", "lists.js", "keys.js", "page.js",
)  # fmt: skip
EXPERTS = "experts.js"  # of pages of runs with experts
BODY = '<main id="page">%s</main>\n<noscript>This page needs JavaScript.</noscript>\n'


@cache
def join_styles() -> str:
    """uPlot's style and the page's."""
    return f"{_text(VENDOR / 'uPlot.min.css')}\n{_text(STATIC / 'page.css')}"


@cache
def join_scripts(experts: bool = True) -> str:
    """uPlot, with the licence text it requires, and our scripts in one scope. experts: of runs that have some."""
    ours = "\n".join(
        _text(STATIC / script_name) for script_name in (*SCRIPTS, *([EXPERTS] if experts else []))
    )
    licence = _text(VENDOR / "LICENSE")
    return f'/* uPlot\n{licence}\n*/\n{_text(VENDOR / "uPlot.iife.min.js")}\n(() => {{\n"use strict";\n{ours}}})();\n'


def render_served(told: Sequence[str]) -> str:
    """The page of a server. What it shows it asks for; until that is there, `told` stands in its place."""
    heading_lines = "".join(f"<h1>{html.escape(heading_line)}</h1>" for heading_line in told)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>megastable</title>\n'
        '<link rel="icon" href="data:,">\n<link rel="stylesheet" href="page.css">\n</head>\n<body>\n'
        f'{BODY % heading_lines}<script src="page.js"></script>\n</body>\n</html>\n'
    )


def self_contained(data: dict[str, Any]) -> str:
    """The page as one file that needs no network. data: what a server would answer (source.js)."""
    has_experts = any("experts" in run["heat"] for run in data["runs"])
    page_style, code, page_data = (
        f"\n{join_styles()}",
        f"\n{join_scripts(has_experts)}",
        embed_json(_finite(data)),
    )
    policy = (
        f"default-src 'none'; script-src '{hash_source(code)}'; style-src 'unsafe-inline'; img-src data:; "
        "frame-src 'self'; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>megastable</title>\n'
        f'<link rel="icon" href="data:,">\n<style>{page_style}</style>\n</head>\n<body>\n{BODY % ""}'
        f'<script type="application/json" id="data">{page_data}</script>\n<script>{code}</script>\n</body>\n</html>\n'
    )


def as_json(value: Any) -> bytes:
    """For a browser, which knows no nan: numbers that are not finite are null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {field_name: _finite(value_below) for field_name, value_below in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(value_below) for value_below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


COLUMNS = 6000  # of a plot: what a zoom can still tell apart
LINES = 5000  # of the journal
PAGES = 24 << 20  # bytes of incidents' pages


def write_page(runs: Sequence[Path], output: Path) -> list[str]:
    """Write the page of run directories. Returns what could not be read. Raises DataError."""
    readers = told_apart([read_whole(run) for run in runs])
    durable.write_output(output, self_contained(build_content(readers)))
    return [problem for reader in readers for problem in reader.read_head()["problems"]]


def read_whole(run: Path) -> RunReader:
    """A reader that has read all of a run. Raises DataError."""
    reader = RunReader(run)
    reader.look_again(now=True)
    return reader


def build_content(readers: Sequence[RunReader], public: bool = False) -> dict[str, Any]:
    """What a server would answer, by run. The plots are those by step; they hold the other axes, too. public: without
    advice to whoever has the run."""
    room, runs = PAGES, list[dict[str, Any]]()
    for reader in readers:
        panel = reader.read_panel()
        panel["journal"] = run_reader.build_journal(reader, most=LINES)
        pages = dict[str, str]()
        # The newest first: those are asked for.
        for folder in filter(None, [case["page"] for case in reversed(panel["incidents"])]):
            with suppress(OSError, UnicodeDecodeError):
                page = (reader.run.incidents / folder / run_reader.REPORT).read_text(encoding="utf-8")
                if len(page) <= room:
                    pages[folder] = page
                    room -= len(page)
        head = reader.read_head() | ({"advice": ""} if public else {})
        runs.append({
            "head": head, "panel": panel, "plots": reader.read_plots("step", None, None, COLUMNS),
            "heat": reader.read_heat("step", None, None), "machines": reader.machine_maps("step", None, None),
            "pages": pages,
        })  # fmt: skip
    return {"runs": runs}
