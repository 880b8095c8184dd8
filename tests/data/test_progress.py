"""Without a terminal, progress is a line now and then."""

from __future__ import annotations

import pytest

from megastable_tools.prepare import progress
from megastable_tools.prepare.progress import Meter


def test_lines_come_at_intervals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for interval, lines in ((0.0, 2), (1e9, 0)):
        monkeypatch.setattr(progress, "SECONDS_PER_LINE", interval)
        with Meter(5_000_000, silent=False) as meter:
            meter.update(1_000_000, 10, 1_000)
            meter.update(5_000_000, 50, 5_000)
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == lines
        if lines:
            assert "prepared 1.0 MB of 5.0 MB" in shown.err
            assert "tokens/s" in shown.err


def test_a_silent_meter_says_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.0)
    with Meter(10, silent=True) as meter:
        meter.update(10, 1, 1)
    assert capsys.readouterr() == ("", "")
