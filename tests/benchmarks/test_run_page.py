"""The benchmark of the run page measures all that it names, of a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.run_page import MEANING, main
from tests.patience import PATIENCE


@pytest.mark.slow
def test_every_figure_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    file = tmp_path / "found.json"
    main(["--steps", "3000", "--rounds", "2", "--patience", str(PATIENCE), "--json", str(file)])
    found = json.loads(file.read_text())
    shown = capsys.readouterr().out
    alone = {"first_paint", "first_contentful_paint", "ready", "script_memory", "news", "news_slowest"}
    expected = MEANING.keys() - (alone if "not measured in a browser" in shown else set())
    assert found.keys() == expected | {"steps", "files"} and found["steps"] == 3000 and found["files"] == 60
    assert all(found[key] > 0 for key in expected)
    assert found["first_peak"] >= found["rss"] / 2 and found["first_all_cpu"] >= found["first_start_cpu"]
