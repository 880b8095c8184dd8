"""Searches a finished record for private names once more, before it is published."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from pathlib import Path

from megastable.base.text import visible
from megastable.report.postmortem import safe
from megastable.report.publish.redaction import is_common
from megastable.report.run_page import page_parts
from megastable.run.directory import as_json

SHORTEST = 5  # characters: shorter names are in every large file by chance
TEXTS = (
    "samples.txt",
    "report.html",
    "evidence.json",
    "postmortem.md",
    "run.html",
)  # that show samples, if asked


def leaks(site: Path, private: Iterable[str], texts: bool = False) -> list[str]:
    """The files of a record that have a private name as a word of its own. texts: samples are published, which may name
    anything."""
    # The page's own script and style name nothing of this machine.
    ours = page_parts.script() + page_parts.style()
    names = {name for name in private if len(name) >= SHORTEST and not is_common(name) and name not in ours}
    if not names:
        return []
    forms = sorted({form for name in names for form in _forms(name)})
    wanted = re.compile(
        rb"(?<![\w.-])(?:" + b"|".join(re.escape(form.encode()) for form in forms) + rb")(?![\w-])"
    )
    return [
        path.relative_to(site).as_posix()
        for path in sorted(site.rglob("*"))
        if path.is_file() and not (texts and path.name in TEXTS) and wanted.search(path.read_bytes())
    ]


def _forms(name: str) -> set[str]:
    """A name as it stands in pages, tables and JSON."""
    return {name, visible(name), html.escape(name), safe.markdown(name), as_json(name)[1:-1]}
