"""Makes untrusted text harmless: it is shown to people, and nothing that reads it interprets it.

Text of bad samples, names, messages and logs may hold control characters, ANSI escapes, bidirectional overrides,
HTML and Markdown. `visible` (base/text.py) comes first, whatever the file is; then the file's own escaping.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from megastable.base.text import count_noun, make_visible

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PUNCTUATION = re.compile(r"[\\`*\[\]<>|&~#$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_ADDRESS = re.compile(r"(?i)(https?|ftp|mailto)(?=:)|www(?=\.)|@")
_LIST = re.compile(r"^(\s*\d*)([-+=.)])(?=\s|$|[-=])")
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[tnr])")


def show_block(text: str) -> str:
    """Multi-line text, with its tabs."""
    return make_visible(text, keep="\n\t")


def escape_markdown(text: str) -> str:
    """Text inside a line or a table's cell of Markdown (CommonMark and GitHub's): no markup, no link."""
    plain_text = _PUNCTUATION.sub(lambda found: "\\" + found[0], make_visible(text))
    plain_text = _LIST.sub(lambda found: f"{found[1]}\\{found[2]}", plain_text, count=1)
    # Renderers turn bare addresses into links; an empty comment prevents that.
    return _ADDRESS.sub(lambda found: f"{found[0]}<!-- -->", plain_text)


def fence_text(text: str) -> str:
    """A code block of Markdown that no line of `text` can end."""
    shown_text = show_block(text)
    longest_run = max((len(tick_run) for tick_run in re.findall(r"`+", shown_text)), default=0)
    fence = "`" * max(3, longest_run + 1)
    return f"{fence}text\n{shown_text}\n{fence}"


def quote_code(text: str) -> str:
    """Code inside a line of Markdown."""
    shown_text = make_visible(text)
    longest_run = max((len(tick_run) for tick_run in re.findall(r"`+", shown_text)), default=0)
    ticks = "`" * (longest_run + 1)
    tick_pad = " " if longest_run or not shown_text.strip() else ""
    return f"{ticks}{tick_pad}{shown_text}{tick_pad}{ticks}"


def escape_cell(value: object) -> object:
    """A cell of a table for a spreadsheet: no formula."""
    if not isinstance(value, str):
        return value
    return ("'" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else "") + make_visible(value)


def write_csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV for a spreadsheet."""
    csv_buffer = io.StringIO()
    csv_writer = csv.writer(csv_buffer, lineterminator="\n")
    csv_writer.writerow([escape_cell(column_name) for column_name in head])
    csv_writer.writerows([escape_cell(cell_value) for cell_value in table_row] for table_row in rows)
    return csv_buffer.getvalue()


def clean_log(content: bytes) -> str:
    """A program's output as text: colours removed, progress lines one below the other, control characters visible."""
    text = _COLOURS.sub("", content.decode("utf-8", "replace"))
    return show_block(text.replace("\r\n", "\n").replace("\r", "\n"))


def split_escapes(text: str) -> list[tuple[str, bool]]:
    """Split a visible text into pieces, flagged if an escape, so that a page can mark them."""
    text_pieces, text_offset = list[tuple[str, bool]](), 0
    for escape_match in _ESCAPE.finditer(text):
        text_pieces += [(text[text_offset : escape_match.start()], False), (escape_match[0], True)]
        text_offset = escape_match.end()
    return [text_piece for text_piece in [*text_pieces, (text[text_offset:], False)] if text_piece[0]]


def template_environment(package: str, **options: Any) -> Environment:
    """Of the folder `templates` of a package, with the filters that all pages use."""
    page_environment = Environment(
        loader=PackageLoader(package), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, **options,
    )  # fmt: skip
    page_environment.filters |= {
        "count": lambda number: f"{number:,}", "plural": count_noun, "words": lambda text: text.replace("_", " "),
    }  # fmt: skip
    return page_environment


def html_environment(package: str) -> Environment:
    """The same for pages of HTML: all output becomes visible text, without the template's help."""

    def finalize(value: Any) -> Any:
        return show_block(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    return template_environment(package, autoescape=True, finalize=finalize)
