"""Untrusted text shows, and nothing obeys it: not a terminal, not a browser, not a renderer of Markdown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from megastable.base.text import make_visible
from megastable.report import safe

# What does harm somewhere, more often than chance would make it.
PIECES = st.sampled_from([
    "\x1b[31m", "\x00", "\r", "\u202e", "\u2066", "\ufeff", "\u2028", "\ud800", "\U000e0041", " ", "\t", "\n", "|",
    "<script>", "</pre>", "&amp;", '"', "'", "```", "`", "# h", "- x", "1. x", "==", "**b**", "_i_", "~~~", "[a](b)",
    "<http://x.y>", "https://x.y", "www.x.y", "a@b.c", "\\", "$x$", "{{ 7 }}", "{% x %}", "]]>", "<!--", "-->",
])  # fmt: skip
HOSTILE = st.lists(PIECES | st.text(max_size=5), max_size=8).map("".join)
MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def inline(text: str) -> list[Token]:
    """What is inside the first list item of a document."""
    tokens = MARKDOWN.parse(text)
    assert [t.type for t in tokens] == [
        "bullet_list_open", "list_item_open", "paragraph_open", "inline", "paragraph_close", "list_item_close",
        "bullet_list_close",
    ]  # fmt: skip
    return tokens[3].children or []


@given(HOSTILE)
def test_what_is_visible_has_nothing_that_is_not(text: str) -> None:
    assert all(c.isprintable() or c in "\n\t" for c in safe.show_block(text))
    assert make_visible(text).isprintable()
    safe.show_block(text).encode()  # a lone surrogate could not be written


def test_escapes_are_as_python_writes_them() -> None:
    assert make_visible("a\x1b[1m\u202e\U000e0041\r\n\té") == "a\\x1b[1m\\u202e\\U000e0041\\r\\n\\té"
    assert safe.show_block("a\n\tb\x07") == "a\n\tb\\x07"
    assert safe.split_escapes("a\\x1b[b\\n") == [("a", False), ("\\x1b", True), ("[b", False), ("\\n", True)]


@given(HOSTILE)
def test_markdown_shows_the_text_and_nothing_else(text: str) -> None:
    parts = inline("- x " + safe.escape_markdown(text) + " x")
    # The comments keep addresses from becoming links.
    assert {t.type for t in parts} <= {"text", "html_inline"}
    assert {t.content for t in parts if t.type == "html_inline"} <= {"<!-- -->"}
    shown = "".join(t.content for t in parts if t.type == "text")
    assert shown == "x " + make_visible(text) + " x"


@given(HOSTILE)
def test_an_item_or_a_cell_begins_no_block(text: str) -> None:
    assert all(
        t.type in ("text", "html_inline") for t in inline("- " + (safe.escape_markdown(text).strip() or "x"))
    )
    table = f"| a | b |\n|---|---|\n| {safe.escape_markdown(text)} | end |\n"
    tokens = MARKDOWN.parse(table)
    assert [t.type for t in tokens].count("td_open") == 2
    assert tokens[-4].type == "td_close" and tokens[-5].content == "end"


@given(HOSTILE)
def test_a_fence_ends_where_it_should(text: str) -> None:
    (block,) = MARKDOWN.parse(safe.fence_text(text))
    assert block.type == "fence" and block.content == safe.show_block(text) + "\n"


@given(HOSTILE)
def test_code_is_code(text: str) -> None:
    kinds = [t.type for t in inline("- x " + safe.quote_code(text) + " x")]
    assert kinds == ["text", "code_inline", "text"] or not make_visible(text)


def test_of_a_log_colours_go_and_progress_lines_stand_below_each_other() -> None:
    content = b"\x1b[31mred\x1b[0m\r10%\r20%\r\nend\x07\xff"
    assert safe.clean_log(content) == "red\n10%\n20%\nend\\x07\ufffd"


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1"])
def test_a_cell_is_no_formula(text: str) -> None:
    assert safe.escape_cell(text) == "'" + make_visible(text)
    assert (safe.escape_cell("a=1"), safe.escape_cell(-1), safe.escape_cell(None)) == ("a=1", -1, None)
