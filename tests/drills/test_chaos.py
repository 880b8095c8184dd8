"""Plans of faults, and what became of them as a table."""

from __future__ import annotations

import io
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from drills.chaos import (
    PHASES,
    STARTING,
    ChaosDrill,
    ClusterOutcome,
    ClusterSetup,
    Planned,
    judge,
    plan,
    spread,
)
from drills.cluster_faults import KINDS, NAMES, Place, choose
from megastable.base.errors import ConfigError

HOSTS = ["first", "second", "third"]
SAID = {"found": 2.04, "verdict": "rank 1 on second was killed by SIGKILL", "blamed": "second"}
ENDED: dict[str, Any] = {"exit": 0, "same": True, "cost": 31.26}


def planned(kind: str = "killed-rank", seconds: float = 0.0) -> Planned:
    return Planned(number=3, kind=kind, host="second", phase="step", step=17, seconds=seconds)


def became(kind: str = "killed-rank", seconds: float = 0.0, **changes: Any) -> ClusterOutcome:
    said: Any = tuple({**SAID, **changes}[name] for name in SAID)
    ended = {name: changes.get(name, value) for name, value in ENDED.items()}
    return judge(choose([kind])[0], planned(kind, seconds), said, **ended)


def drill(faults: int) -> ChaosDrill:
    return ChaosDrill(ClusterSetup(None, 100, 2), KINDS, plan(KINDS, HOSTS, 1, faults, 100), one_run=False)


def cells(one: ClusterOutcome) -> list[str]:
    return [column.describe([one]) for column in ChaosDrill.columns]


@given(seed=st.integers(), faults=st.integers(0, 40), steps=st.integers(1, 500), hosts=st.integers(2, 3))
def test_a_plan_is_fair_and_possible(seed: int, faults: int, steps: int, hosts: int) -> None:
    names = HOSTS[:hosts]
    found = plan(KINDS, names, seed, faults, steps)
    assert found == plan(KINDS, names, seed, faults, steps)
    assert [one.number for one in found] == list(range(1, faults + 1))
    for attribute, values in (("kind", NAMES), ("phase", (STARTING, *PHASES))):
        early = {kind.name for kind in KINDS if kind.early}  # they strike in a step
        counts = Counter(
            getattr(one, attribute) for one in found if attribute == "kind" or one.kind not in early
        )
        assert max(counts[value] for value in values) - min(counts[value] for value in values) <= 1
        assert set(counts) <= set(values)
    for kind in KINDS:
        mine = [one for one in found if one.kind == kind.name]
        places = kind.places(names, "first")
        hit = Counter(one.host for one in mine)
        assert set(hit) <= set(places) and max(hit[p] for p in places) - min(hit[p] for p in places) <= 1
        least, most = kind.seconds or (0, 0)
        assert all(least <= one.seconds <= most for one in mine)
    assert all(0 < one.step <= steps for one in found if one.phase != STARTING)
    assert all(one.step == 0 for one in found if one.phase == STARTING)
    if steps >= 10:
        assert all(steps / 10 <= one.step <= steps * 0.9 for one in found if one.step)


def test_seeds_differ() -> None:
    plans = {tuple(plan(KINDS, HOSTS, seed, 12, 100)) for seed in range(20)}
    assert len(plans) == 20
    assert len({tuple(one.kind for one in found) for found in plans}) > 15


def test_the_head_is_where_it_is_said_to_be() -> None:
    for one in plan(KINDS, HOSTS, 1, 60, 100, head="third"):
        (kind,) = choose([one.kind])
        assert kind.place is not Place.HEAD or one.host == "third"
        assert kind.place is not Place.OTHER or one.host != "third"


def test_what_cannot_be_planned() -> None:
    with pytest.raises(
        ConfigError, match="cut-link happens to any host but the supervisor's, and there is only first"
    ):
        plan(choose(["killed-rank", "cut-link"]), ["first"], 1, 4, 100)
    assert len(plan(choose(["killed-rank"]), ["first"], 1, 4, 100)) == 4
    for kinds, steps in ((KINDS[:0], 10), (KINDS, 0)):
        with pytest.raises(ConfigError, match="nothing can be planned"):
            plan(kinds, HOSTS, 1, 4, steps)


def test_a_fault_is_judged_by_its_verdict_and_its_end() -> None:
    good = became()
    assert (good.expected, good.verdict_right, good.end_right, good.right) == ("second", True, True, True)
    assert not became(blamed="first").right and became(blamed="first").end_right
    for changes in (
        {"same": False},
        {"same": None},
        {"exit": 76, "same": None},
        {"exit": None, "same": None},
    ):
        assert (became(**changes).verdict_right, became(**changes).end_right) == (True, False)
    # All hosts back, and nothing noticed: right where that may be, and the bytes are the same.
    silent = {"found": None, "verdict": "", "blamed": None}
    assert became("flapping-link", 2, **silent).right and not became(**silent).right
    assert not became("flapping-link", 2, **silent, same=False).right
    # A host that stays away cannot end with the same bytes.
    gone = {"verdict": "host second is gone"}
    assert became("cut-link", **gone, exit=80, same=None).right
    assert not became("cut-link", **gone).right and not became("cut-link", **gone, exit=1, same=None).right


def test_cells() -> None:
    assert cells(became()) == [
        "3", "killed-rank", "second", "step", "17", "2.0", "rank 1 on second was killed by SIGKILL", "second", "second",
        "yes", "+31.3",
    ]  # fmt: skip
    silent = became("full-disk", 7.5, found=None, verdict="", blamed=None, same=False, cost=None)
    assert cells(silent) == [
        "3", "full-disk (7.5 s)", "second", "step", "17", "", "none", "nobody", "nobody", "no", "",
    ]  # fmt: skip
    ends = [became(exit=80), became(exit=None), became(same=None)]
    assert [cells(one)[9] for one in ends] == ["exit 80", "never ended", "unknown"]


def shown(rows: list[ClusterOutcome], colours: bool = False) -> str:
    console = Console(width=200, file=io.StringIO(), force_terminal=colours, color_system="standard")
    planned = [row.planned.model_copy(update={"number": number}) for number, row in enumerate(rows, 1)]
    numbered = [row.model_copy(update={"planned": one}) for row, one in zip(rows, planned, strict=True)]
    console.print(drill(2).show_table(numbered))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_every_fault_and_what_is_wrong_in_red() -> None:
    rows = [became(), became("cut-link", verdict="host second is gone", exit=80, same=None)]
    text = shown(rows)
    assert all(
        word in text
        for word in (
            *" ".join(c.header for c in ChaosDrill.columns).split(),
            "exit 80",
            "host second is gone",
        )
    )
    red = "\x1b[1;31m"
    assert red not in shown(rows, colours=True)
    assert f"{red}first" in shown([became(blamed="first")], colours=True)
    assert f"{red}no" in shown([became(same=False)], colours=True)


def test_a_verdict_is_no_markup() -> None:
    assert "[bold]" in shown([became(verdict="[bold]SIGKILL[/bold]")])


def test_the_summary_counts() -> None:
    rows = [became(), became(found=7.25, same=False), became(found=None, verdict="", blamed=None)]
    assert (
        drill(3).describe_verdict(rows)
        == "3 faults: 2 runs ended as they should, 2 verdicts right, found after at most 7.2 s"
    )
    assert drill(3).describe_verdict([]) == "0 faults: 0 runs ended as they should, 0 verdicts right"
    assert drill(1).is_met(rows[:1]) and not drill(2).is_met(rows[:1]) and not drill(3).is_met(rows)


def test_rows_are_json() -> None:
    one = became(cost=None)
    (told,) = json.loads(json.dumps(drill(1).report([one])))
    assert told["planned"]["kind"] == "killed-rank" and told["cost"] is None and told["verdict_right"] is True
    assert told.pop("right") and ClusterOutcome.model_validate(told) == one


def test_faults_of_one_run_are_spread_over_its_steps() -> None:
    planned = spread(plan(KINDS, HOSTS, 1, 8, 100), 1000)
    steps = [one.step for one in planned]
    assert steps == sorted(set(steps)) and steps[0] > 50 and steps[-1] < 950
    assert STARTING not in {one.phase for one in planned}
