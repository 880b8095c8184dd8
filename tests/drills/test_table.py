"""Scores as people see them."""

from __future__ import annotations

import io
import math
from typing import Any

from rich.console import Console

from megastable.drills.plan import Policy
from megastable.drills.score import Score
from megastable.drills.table import COLUMNS, WIDTH, outcome, row, table, verdict

GOOD = Score(
    scenario="random-tokens", policy=Policy.OURS, seed=1, ended="finished", step=160, val_loss=3.5, excess=0.0123,
    steps_lost=11, discarded=2, skipped=40, innocent=0, seconds_to_recover=1.25, false_alarms=0, kinds=["recoverable"],
    causes=["data"], kind_right=True, cause_right=True, wall_seconds=31.0,
)  # fmt: skip


def of(policy: Policy = Policy.OURS, **changes: Any) -> Score:
    blank = {"kind_right": None, "cause_right": None, "seconds_to_recover": None}
    return GOOD.model_copy(update={"policy": policy, **({} if policy is Policy.OURS else blank), **changes})


def shown(scores: list[Score]) -> str:
    console = Console(width=WIDTH, file=io.StringIO(), force_terminal=False)
    console.print(table(scores))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_column_has_a_cell() -> None:
    for s in (GOOD, of(Policy.NOTHING), of(ended="dead", val_loss=None, excess=None)):
        assert len(row(s)) == len(COLUMNS) + 1
    assert row(GOOD) == ["ours", "3.5000", "+0.0123", "11", "2", "40", "1.2", "0", "recoverable ✓", "data ✓"]
    assert row(of(Policy.NOTHING)) == ["nothing", "3.5000", "+0.0123", "", "2", "", "", "0", "", ""]
    assert row(of(causes=[], cause_right=False))[-1] == "none ✗"


def test_how_a_run_ended() -> None:
    assert outcome(of(val_loss=3.25)) == "3.2500" and row(of(excess=-0.02))[2] == "-0.0200"
    assert row(of(scenario="clean", excess=0.0))[1:3] == ["3.5000", ""]
    assert row(of(Policy.CLIPPING, ended="dead", step=101, val_loss=None, excess=None))[1:3] == [
        "dead at step 101",
        "",
    ]
    assert row(of(Policy.NOTHING, val_loss=math.nan, excess=math.nan))[1] == "nan"
    assert row(of(Policy.NOTHING, excess=None))[2] == ""


def test_the_table_has_a_title_per_scenario_and_a_row_per_run() -> None:
    text = shown(
        [of(scenario="clean"), *(of(p) for p in Policy), *(of(p, scenario="killed-rank") for p in Policy)]
    )
    assert text.count("random-tokens") == text.count("killed-rank") == text.count("clean  ") == 1
    for policy in Policy:
        assert text.count(f" {policy} ") == (3 if policy is Policy.OURS else 2)


def test_what_it_comes_to() -> None:
    scores = [
        of(scenario="clean", false_alarms=1),
        GOOD,
        of(excess=0.5, cause_right=False),
        of(Policy.NOTHING, excess=9.0),
    ]
    told = "ours: 1 of 2 within 0.02 nat of the clean run, cause right in 1 of 2, 1 false alarms"
    assert verdict(scores) == told
    assert "no target" in verdict([of(Policy.NOTHING)])
