"""Silent faults as people see them."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from drills.corruption_bits import Change
from drills.corruption_plan import Planned
from drills.corruption_score import Clean, Outcome, total
from drills.corruption_table import HEADERS, row, table, told, verdict

PLANNED = Planned(layout="dp3", kind="weight/sign", position=0, seed=1, step=24, rank=1)
GOOD = Outcome(
    planned=PLANNED, expected=True, changes=[Change(tensor="weight of a")], ended="finished", same=True,
    found="replicas_differ", steps=0, naming="named", ranks=[[1]], seconds=3.0,
)  # fmt: skip
MISSED: dict[str, Any] = {"found": "", "steps": None, "naming": None, "ranks": [], "same": False}


def of(kind: str = "weight/sign", layout: str = "dp3", **changes: Any) -> Outcome:
    planned = PLANNED.model_copy(update={"kind": kind, "layout": layout})
    return GOOD.model_copy(update={"planned": planned, **changes})


def cells(*outcomes: Outcome) -> list[str]:
    return [text for text, _ in row(outcomes)]


def red(*outcomes: Outcome) -> set[str]:
    return {header for header, (_, bad) in zip(HEADERS, row(outcomes), strict=True) if bad}


def test_three_positions_add_up() -> None:
    assert cells(of(), of(steps=2), of(steps=1)) == ["dp3", "3/3", "0-2", "replicas differ", "3/3", "3/3", ""]
    mixed = of(), of(naming="suspected", found="replay_differs", verdict="transient"), of(**MISSED)
    assert cells(*mixed) == [
        "dp3", "2/3", "0", "replicas differ, replay differs (transient)", "2/2 (1 with others)", "2/2", "",
    ]  # fmt: skip
    assert cells(of(naming="unknown", same=False)) == ["dp3", "1/1", "0", "replicas differ", "0/1", "0/1", ""]
    assert cells(of("column/zero", ended="handed over", same=None))[5] == ""


def test_what_became_of_those_that_were_not_found() -> None:
    trace = of(**MISSED | {"same": True})
    hung, absent = of(**MISSED, ended="hung"), of(**MISSED, changes=[])
    noticed = of(**MISSED, guard=["unknown", "refused"])
    assert cells(trace, hung, absent)[-1] == "left no trace, hung, did not happen"
    assert cells(noticed, noticed, of(**MISSED))[-1] == "guard: unknown, refused (x2)"
    assert cells(of(**MISSED, ended="failed"))[-1] == "failed"
    assert cells(of(**MISSED, expected=False))[1] == "(0/1)" and cells(trace, of(**MISSED))[1] == "0/2"


def test_what_misses_a_target_is_red() -> None:
    assert red(of()) == set()
    assert red(of(), of(**MISSED)) == {"found"}
    assert red(of(**MISSED, expected=False)) == red(of(**MISSED | {"same": True})) == set()
    assert red(of(naming="wrong")) == {"rank\nnamed"} and red(of(same=False)) == {"undone"}
    assert red(of(**MISSED, ended="hung")) == {"found", "not found, but"}


def test_a_row_per_kind_and_layout() -> None:
    console = Console(width=160, file=io.StringIO(), force_terminal=False)
    both = [of(), of(), of(layout="dp2"), of("master/sign", "dp2", **MISSED)]
    console.print(table([*both, of("weight/sign", "dp2")]))
    assert isinstance(console.file, io.StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if "dp" in line]
    assert len(lines) == 3
    assert "weight/sign" in lines[0] and "dp3" in lines[0] and "2/2" in lines[0]
    assert "weight/sign" not in lines[1] and "dp2" in lines[1] and "2/2" in lines[1]
    assert "master/sign" in lines[2] and "0/1" in lines[2]


def test_in_a_few_words() -> None:
    assert told(of()) == "found by replicas differ after 0 steps, rank named, undone"
    assert told(of(same=False, naming="wrong")).endswith("rank wrong, not undone")
    assert told(of(**MISSED)) == "not found" and told(of(**MISSED, ended="hung")) == "not found, hung"


def test_what_it_comes_to() -> None:
    clean = [Clean(layout="dp3", seed=1, findings=[], incidents=[], seconds=3.0)]
    every = [of(), of(naming="wrong"), of(**MISSED), of(**MISSED, expected=False), of(expected=False)]
    assert verdict(total(every, clean)) == (
        "2 of 3 faults that must be found were, and 1 of 2 others; the right rank named in 2 of 3, 3 of 3 undone to "
        "the bytes of the clean run; 0 left no trace; 0 false alarms, with 1 clean runs"
    )
    assert "; 0 left no trace, 1 hung; " in verdict(total([of(**MISSED, ended="hung")], clean))
