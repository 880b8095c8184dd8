"""The table of expected goodput: the page has what the model says. And how a long run is measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import goodput_speed
from benchmarks.expected_goodput import main
from megastable.run.goodput.time_account import TimeKind

PAGE = Path(__file__).parents[2] / "docs/goodput.md"


def rows(text: str) -> list[list[str]]:
    """Lines of percentages, without those of dice."""
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [cells[:9] for cells in found if len(cells) >= 9 and "%" in cells[1]]


def test_the_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    told, page = capsys.readouterr().out, PAGE.read_text(encoding="utf-8")
    assert len(rows(told)) == 30 and rows(told) == rows(page)
    assert [line for line in told.splitlines() if re.match("[0-9,]+ GPUs", line) and line not in page] == []


@pytest.mark.slow
def test_dice_are_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--gpus", "10000", "--trials", "1"])
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if "%" in line and "|" in line]
    played = [line for line in lines if line[-2].strip()]
    assert len(played) == 10
    for line in played:
        assert float(line[-2].strip(" %")) == pytest.approx(float(line[2].strip(" *%")), abs=1.5)


def test_the_run_that_is_measured_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput_speed, "SAVES", 100)
    monkeypatch.setattr(goodput_speed, "RESTARTS", 200)
    first, again, account = goodput_speed.measure(500)
    seconds = account.seconds()
    assert first > 0 and again > 0 and seconds[TimeKind.TRAINING] == pytest.approx(500)
    assert seconds[TimeKind.EVALUATION] == pytest.approx(2.5) and seconds[TimeKind.UNKNOWN] == 0
    assert seconds[TimeKind.START_UP] == pytest.approx(177, abs=0.1)
