"""Makes untrusted text harmless: it is shown to people, and nothing that reads it interprets it.

Text of guilty samples, names, messages and logs may hold control characters, ANSI escapes, bidirectional overrides,
HTML and Markdown. `visible` (base/text.py) comes first, whatever the file is; then the file's own escaping.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from megastable.base.text import visible

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PUNCTUATION = re.compile(r"[\\`*\[\]<>|&~#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_ADDRESS = re.compile(r"(?i)(https?|ftp|mailto)(?=:)|www(?=\.)|@")
_LIST = re.compile(r"^(\s*\d*)([-+=.)])(?=\s|$|[-=])")
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[tnr])")


def block(text: str) -> str:
    """Multi-line text, with its tabs."""
    return visible(text, keep="\n\t")


def markdown(text: str) -> str:
    """Text inside a line or a table's cell of Markdown (CommonMark and GitHub's): no markup, no link."""
    plain = _PUNCTUATION.sub(lambda found: "\\" + found[0], visible(text))
    plain = _LIST.sub(lambda found: f"{found[1]}\\{found[2]}", plain, count=1)
    # Renderers turn bare addresses into links; an empty comment prevents that.
    return _ADDRESS.sub(lambda found: f"{found[0]}<!-- -->", plain)


def fenced(text: str) -> str:
    """A code block of Markdown that no line of `text` can end."""
    shown = block(text)
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"


def code(text: str) -> str:
    """Code inside a line of Markdown."""
    shown = visible(text)
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if longest or not shown.strip() else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def cell(value: object) -> object:
    """A cell of a table for a spreadsheet: no formula."""
    if not isinstance(value, str):
        return value
    return ("'" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else "") + visible(value)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV for a spreadsheet."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([cell(name) for name in head])
    writer.writerows([cell(value) for value in row] for row in rows)
    return file.getvalue()


def log_text(content: bytes) -> str:
    """A program's output as text: colours removed, progress lines one below the other, control characters visible."""
    text = _COLOURS.sub("", content.decode("utf-8", "replace"))
    return block(text.replace("\r\n", "\n").replace("\r", "\n"))


def split_escapes(text: str) -> list[tuple[str, bool]]:
    """Split a visible text into pieces, flagged if an escape, so that a page can mark them."""
    pieces, at = list[tuple[str, bool]](), 0
    for found in _ESCAPE.finditer(text):
        pieces += [(text[at : found.start()], False), (found[0], True)]
        at = found.end()
    return [piece for piece in [*pieces, (text[at:], False)] if piece[0]]
