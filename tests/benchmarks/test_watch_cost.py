"""What watching costs is found from pairs of blocks; and everything that watches can be started and stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import watch_cost
from benchmarks.watch_cost import BLOCK, NAMES, assess, main
from tests.patience import PATIENCE


def test_a_known_cost_is_found_though_steps_become_slower() -> None:
    rows, drift = [], 0.0
    for n in range(40 * BLOCK):
        on = (n // BLOCK) % 4 in (0, 3)
        drift += 1e-4
        wall = 1.0 + drift + (0.02 if on else 0.0)
        rows.append({**dict.fromkeys(NAMES, 0.5), "wall": wall, "own": 0.001 if on else 0.0, "on": on})
    found = assess(rows)
    assert found["own"].median == pytest.approx(0.001, rel=0.02)
    assert found["wall"].median == pytest.approx(0.02, rel=0.05) and found["process"].median == 0.0


@pytest.mark.slow
def test_a_short_run_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    file = tmp_path / "found.json"
    monkeypatch.setattr(
        watch_cost, "LIMIT", 1.0
    )  # with steps so short, or a machine so busy, it says nothing
    main(["--steps", "30", "--samples", "4", "--minutes", str(PATIENCE / 60), "--json", str(file)])
    found = json.loads(file.read_text())
    assert [row["on"] for row in found["rows"]] == [n // BLOCK % 4 in (0, 3) for n in range(4 * BLOCK)]
    watched = [row["own"] for row in found["rows"] if row["on"]]
    assert min(watched) > 0 and all(row["wall"] > 0 for row in found["rows"])
    # Calls that do nothing are not counted; the step at which a block begins may still hold one.
    assert sum(row["own"] for row in found["rows"] if not row["on"]) < sum(watched) / 4
