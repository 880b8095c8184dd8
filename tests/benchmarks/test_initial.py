"""The command that measures how fast initial weights are drawn, on small ones."""

from __future__ import annotations

import pytest

from benchmarks import initial


def test_a_row_for_every_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(initial, "SHAPES", {"attention.qkv": (96, 32), "mlp.down": (32, 64)})
    initial.main([1, 3], 1)
    shown = capsys.readouterr().out
    assert all(shown.count(name) == 1 for name in ("whole tensors", "1 threads", "3 threads"))
