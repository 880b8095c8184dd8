"""Shows sheets, the results of a command that inspects data, in a terminal, a browser, a spreadsheet or as JSON.

The positions of a step, the documents of an incident, ten thousand suspects of a scan: rows, with texts below them.
Text of documents is untrusted: every output shows it, and none interprets it.
"""

from __future__ import annotations

from megastable.report.sheet.model import (
    Column,
    CommandNote,
    Histogram,
    Passage,
    Sheet,
    Span,
    as_csv,
    as_json,
)
from megastable.report.sheet.output import render_console
from megastable.report.sheet.page import as_html

__all__ = [
    "Column", "CommandNote", "Histogram", "Passage", "Sheet", "Span", "as_csv", "as_html", "as_json", "render_console",
]  # fmt: skip
