"""The table of expected goodput: the page has what the model says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.expected_goodput import main

PAGE = Path(__file__).parents[2] / "docs/goodput.md"


def rows(text: str) -> list[list[str]]:
    """Lines of percentages, without those of dice."""
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [cells[:9] for cells in found if len(cells) >= 9 and "%" in cells[1]]


def test_expected_goodput_is_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    told, page = capsys.readouterr().out, PAGE.read_text(encoding="utf-8")
    assert len(rows(told)) == 30 and rows(told) == rows(page)
    assert [line for line in told.splitlines() if re.match("[0-9,]+ GPUs", line) and line not in page] == []
