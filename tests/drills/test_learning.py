"""Drills of learning: which runs there are, and scores as people see them."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drills import learning
from drills.learning import COLUMNS, LearningDrill, describe_ends
from drills.plan import Policy
from drills.scenario import CLEAN
from drills.score import Fate, Score, within
from drills.stage import Stage
from megastable.report.text_output import WIDEST

DRILL = LearningDrill(["trickle", "random-tokens"], [Policy.CLIPPING, Policy.OURS], [1, 2], jobs=3)

GOOD = Score(
    scenario="random-tokens", policy=Policy.OURS, seed=1, ended="finished", step=160, val_loss=3.5, excess=0.0123,
    steps_lost=11, discarded=2, fate=Fate(planted=40, convicted=38, lost=0, deferred=4), seconds_to_recover=1.25,
    false_alarms=0, kinds=["recoverable"], causes=["data"], kind_right=True, cause_right=True, wall_seconds=31.0,
    incidents=1, rewinds=2, exit=0,
)  # fmt: skip


def of(policy: Policy = Policy.OURS, **changes: Any) -> Score:
    blank = {"kind_right": None, "cause_right": None, "seconds_to_recover": None}
    return GOOD.model_copy(update={"policy": policy, **({} if policy is Policy.OURS else blank), **changes})


def row(scores: list[Score]) -> list[str]:
    """The cells but the name of the scenario."""
    return [column.describe(scores) for column in COLUMNS][1:]


def test_the_clean_runs_first_then_every_scenario_policy_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Stage, "prepare", lambda stage: done.append((stage.folder, stage.seed)))
    monkeypatch.setattr(learning, "drill", lambda stage, *more: done.append((stage.seed, *more)) or GOOD)
    exercises = DRILL.plan_exercises(tmp_path)
    assert [one.name for one in exercises] == [
        f"{name}, {policy}, seed {seed}"
        for name in ("clean", "random-tokens", "trickle")
        for policy in ("clipping", "ours")
        for seed in (1, 2)
    ]
    assert done == [(tmp_path, 1), (tmp_path, 2)]
    watch = print
    assert exercises[3].run(watch) == [GOOD] and exercises[3].steps == 160
    assert done[2] == (2, CLEAN, Policy.OURS, watch, 3)


def shown(scores: list[Score]) -> str:
    console = Console(width=WIDEST, file=io.StringIO(), force_terminal=False)
    console.print(DRILL.show_table(scores))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_column_has_a_cell() -> None:
    assert row([GOOD]) == [
        "ours", "3.5000", "+0.0123", "38/40", "0", "4", "11", "2", "1", "2", "0", "0", "0", "0", "", "0", "1.2", "0",
        "recoverable ✓", "data ✓",
    ]  # fmt: skip
    theirs = row([of(Policy.NOTHING)])
    assert [cell for cell in theirs if cell] == ["nothing", "3.5000", "+0.0123", "2", "0"]
    assert row([of(causes=[], cause_right=False)])[-1] == "none ✗"
    assert (
        row([of(warnings=3, warned=False)])[13] == "3 ✗" and row([of(warnings=1, warned=True)])[13] == "1 ✓"
    )


def test_the_seeds_of_a_run_are_one_row_and_what_is_the_same_stands_once() -> None:
    seeds = [
        of(),
        of(seed=2, val_loss=3.6, excess=-0.001, discarded=3),
        of(seed=3, excess=0.4, causes=["state"], cause_right=False),
    ]
    cells = row(seeds)
    assert cells[1:3] == ["3.5333", "+0.0123 -0.0010 +0.4000"] and cells[7] == "2 3 2" and cells[6] == "11"
    assert cells[-1] == "data ✓ data ✓ state ✗"
    seeds[0] = of(ended="stopped", step=120, val_loss=None, excess=None)
    assert row(seeds)[1] == "stopped at step 120"
    text = shown([*seeds, of(Policy.NOTHING), of(Policy.NOTHING, seed=2)])
    assert "alerts" not in text and "winds" in text and "cuts" not in text
    assert "alerts" in shown([of(), of(scenario="b", alerts=1)])
    assert text.count(" ours ") == text.count(" nothing ") == text.count("random-tokens") == 1


def test_what_misses_a_target_is_red() -> None:
    def red(**changes: Any) -> set[str]:
        told = DRILL.show_table([of(seed=2), of(**changes)])
        cells = {str(c.header): next(iter(c.cells)) for c in told.columns}
        return {name for name, cell in cells.items() if "red" in str(getattr(cell, "style", ""))}

    assert red() == set()
    assert red(excess=0.5) == {"minus\nclean"} and red(cause_right=False) == {"cause"}
    assert red(fate=Fate(lost=1)) == {"clean\nlost"}


def test_how_a_run_ended() -> None:
    assert describe_ends([of(val_loss=3.25)]) == "3.2500" and row([of(excess=-0.02)])[2] == "-0.0200"
    assert row([of(scenario="clean", excess=0.0)])[1:3] == ["3.5000", ""]
    assert row([of(Policy.CLIPPING, ended="dead", step=101, val_loss=None, excess=None)])[1:3] == [
        "dead at step 101",
        "",
    ]
    assert row([of(Policy.NOTHING, val_loss=math.nan, excess=math.nan)])[1] == "nan"
    assert row([of(Policy.NOTHING, excess=None)])[2] == ""


def test_the_table_has_a_title_per_scenario_and_a_row_per_run() -> None:
    text = shown(
        [of(scenario="clean"), *(of(p) for p in Policy), *(of(p, scenario="killed-rank") for p in Policy)]
    )
    assert text.count("random-tokens") == text.count("killed-rank") == text.count("clean  ") == 1
    for policy in Policy:
        assert text.count(f" {policy} ") == (3 if policy is Policy.OURS else 2)


def test_a_run_that_ends_better_than_the_clean_one_is_no_miss_and_is_called_better() -> None:
    """A nan is neither."""
    scores = [of(scenario="clean"), of(excess=-0.05), of(excess=-0.015), of(excess=math.nan)]
    assert [within(s) for s in scores[1:]] == [True, True, False]
    assert "2 of 3 at most 0.02 nat worse" in DRILL.describe_verdict(
        scores
    ) and "1 of them better" in DRILL.describe_verdict(scores)
    text = shown(scores)
    assert "-0.0500 better" in text and "-0.0150 better" not in text


def test_what_it_comes_to() -> None:
    scores = [
        of(scenario="clean", false_alarms=1),
        GOOD,
        of(excess=0.5, cause_right=False),
        of(Policy.NOTHING, excess=9.0),
    ]
    told = (
        "ours: 1 of 2 at most 0.02 nat worse than the clean run (or warned of, where that is asked for), cause right "
        "in 1 of 2, 0 clean samples lost for good, 1 false alarms"
    )
    assert DRILL.describe_verdict(scores) == told
    assert "no target" in DRILL.describe_verdict([of(Policy.NOTHING)])
