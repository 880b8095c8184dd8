"""Searches a finished record for private names once more, before it is published."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megastable.report.publish.known_words import is_known
from megastable.report.run_page import page_parts

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
    names = {name for name in private if len(name) >= SHORTEST and not is_known(name) and name not in ours}
    if not names:
        return []
    wanted = re.compile(
        rb"(?<![\w.-])(?:" + b"|".join(re.escape(name.encode()) for name in sorted(names)) + rb")(?![\w-])"
    )
    return [
        path.relative_to(site).as_posix()
        for path in sorted(site.rglob("*"))
        if path.is_file() and not (texts and path.name in TEXTS) and wanted.search(path.read_bytes())
    ]
