"""What is told of a silent fault, from made-up journals, and as people see it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from drills.corruption import (
    Clean,
    CorruptionDrill,
    FaultOutcome,
    ending,
    findings,
    incidents,
    judge,
    naming,
    total,
)
from drills.corruption_plan import Change, Planned

STRUCK = 1000.0
FAULT = Planned(layout="dp3", kind="master/sign", position=0, seed=1, step=24, rank=1)
LASTING = FAULT.model_copy(update={"kind": "column/zero"})
CHANGES = (Change(tensor="weight of head.weight", element=7, before=1.0, after=-1.0),)


def event(name: str, step: int, time: float = STRUCK + 1, **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": time, "step": step, **fields}


def judged(
    *events: dict[str, Any], planned: Planned = FAULT, errors: tuple[str, ...] = ("", "", ""),
    same: bool | None = False, changes: tuple[Change, ...] = CHANGES, expected: bool = True,
    struck: float | None = STRUCK,
) -> FaultOutcome:  # fmt: skip
    return judge(planned, expected, changes, events, errors, same, 3.25, struck)


def incident(number: int, cause: str) -> dict[str, Any]:
    return event("incident", 24, what="opened", number=number, summary={"cause": cause})


def test_found_named_and_undone() -> None:
    differ = event("replicas_differ", 30, proven=20, ranks=[1], reason="copies differ")
    told = judged(event("checkpoint", 20, 1.0), differ, incident(1, "hardware"), same=True)
    assert (told.found, told.steps, told.naming, told.ranks) == ("replicas_differ", 6, "named", [[1]])
    assert told.undone and told.right and told.counts and not told.harmless and told.ended == "finished"
    assert told.guard == told.early == [] and told.reason == "copies differ" and told.seconds == 3.2


def test_copies_that_differ_are_noticed_one_step_later() -> None:
    assert judged(event("replicas_differ", 23, ranks=[1])).steps == 0
    assert judged(event("replicas_differ", 24, ranks=[1])).steps == 0


@pytest.mark.parametrize("name", ["state_changed", "replay_differs", "gradients_doubted", "replicas_differ"])
def test_every_kind_of_finding_counts(name: str) -> None:
    told = judged(event(name, 25, verdict="transient", ranks=[1], reason="why"))
    assert (told.found, told.verdict, told.steps, told.right) == (name, "transient", 1, True)


def test_a_doubt_that_was_cleared_is_no_finding() -> None:
    told = judged(event("gradients_doubted", 24, verdict="data", ranks=[]))
    assert (told.found, told.steps, told.naming, told.undone) == ("", None, None, None)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([[1]], "named"), ([[0, 1]], "suspected"), ([[]], "unknown"), ([[0]], "wrong"), ([[0, 2]], "wrong"),
        ([[], [1]], "named"), ([[0, 1], [1]], "named"), ([[1], [0]], "wrong"), ([[], [0, 1, 2]], "suspected"),
    ],
)  # fmt: skip
def test_who_is_named(told: list[list[int]], expected: str) -> None:
    assert naming(told, 1) == expected
    outcome = judged(*(event("replay_differs", 25, ranks=ranks) for ranks in told))
    assert outcome.naming == expected and outcome.right == (expected in ("named", "suspected"))


def test_a_rejected_point_is_of_an_earlier_step_and_told_last() -> None:
    rejected = event("snapshot_rejected", 20, reason="other bytes")
    told = judged(rejected, event("state_changed", 26, ranks=[1]))
    assert (told.found, told.steps, told.early) == ("state_changed", 2, [])
    alone = judged(rejected)
    assert (alone.found, alone.steps, alone.naming) == ("snapshot_rejected", 0, "unknown")


def test_what_was_said_before_the_fault_is_a_false_alarm() -> None:
    early = event("replicas_differ", 24, STRUCK - 1, ranks=[1])
    told = judged(early)
    assert (told.found, told.early) == ("", ["replicas_differ"])
    assert judged(early, struck=None).early == ["replicas_differ"]
    # When the fault struck is not known of a run that was ended.
    assert judged(early, struck=None, errors=("", "hung", "hung")).early == []
    of = total([told], [])
    assert (of.false_alarms, of.met) == (1, False)


def test_not_found_and_only_the_guard_noticed() -> None:
    told = judged(event("discarded", 24), incident(1, "unknown"), incident(1, "data"))
    assert (told.found, told.guard, told.same) == ("", ["data", "refused"], False)
    found = judged(incident(1, "hardware"), event("state_changed", 24, ranks=[1]))
    assert found.guard == []


def test_how_a_run_ends() -> None:
    assert ending(["", ""]) == "finished" and ending(["HandoverError"] * 3) == "handed over"
    assert ending(["UnstableError", "UnstableError"]) == "unstable" and ending(["hung", "hung"]) == "hung"
    assert (
        ending(["RuntimeError", "waited for another rank"]) == ending(["HandoverError", "died"]) == "failed"
    )


def test_a_run_that_hangs_is_not_undone() -> None:
    told = judged(planned=FAULT, errors=("hung",) * 3, same=None)
    assert (told.ended, told.found, told.undone, told.harmless, told.counts) == (
        "hung",
        "",
        None,
        False,
        True,
    )
    found = judged(event("replicas_differ", 24, ranks=[1]), errors=("hung",) * 3, same=None)
    assert found.found and found.undone is False
    assert (total([told, found], []).hung, total([told, found], []).found) == (2, 1)


def test_what_lasts_cannot_be_undone() -> None:
    ended = ("HandoverError",) * 3
    told = judged(event("replay_differs", 30, ranks=[0, 1]), planned=LASTING, errors=ended, same=None)
    assert (told.ended, told.undone, told.naming) == ("handed over", None, "suspected")
    assert judged(event("replay_differs", 30, ranks=[1]), errors=ended, same=None).undone is False


def test_a_fault_without_a_trace_needs_not_be_found() -> None:
    told = judged(same=True)
    assert told.harmless and not told.counts
    of = total([told], [])
    assert (of.counted, of.harmless, of.met) == (0, 1, True)


def test_a_fault_that_did_not_happen_is_a_failure_of_the_drill() -> None:
    told = judged(same=True, changes=(), struck=None)
    assert not told.harmless and told.counts
    assert (total([told], []).absent, total([told], []).met) == (1, False)


def test_targets() -> None:
    right = judged(event("state_changed", 24, ranks=[1]), same=True)
    wrong = judged(event("state_changed", 24, ranks=[0]), same=True)
    missed, other = judged(), judged(expected=False)
    clean = [Clean(layout="dp3", seed=1, findings=[], incidents=[], seconds=3.0)]
    assert total([right] * 19 + [missed], clean).met and not total([right] * 18 + [missed], clean).met
    assert total([right] * 19 + [wrong], clean).met and not total([right] * 18 + [wrong], clean).met
    of = total([right] * 19 + [missed, other, other], clean)
    assert (of.faults, of.counted, of.found, of.found_at_all, of.right) == (22, 20, 19, 19, 19) and of.met
    assert (of.can_be_undone, of.undone, of.clean, of.false_alarms) == (19, 19, 1, 0)
    alarm = [clean[0].model_copy(update={"findings": ["state_changed"]})]
    assert total([right], alarm).false_alarms == 1 and not total([right], alarm).met


def test_of_a_clean_run() -> None:
    events = [event("gradients_doubted", 9, verdict="data"), event("replicas_differ", 9), incident(1, "data")]
    assert findings(events) == ["replicas_differ"] and incidents(events) == ["data"]


# As people see it

PLANNED = Planned(layout="dp3", kind="weight/sign", position=0, seed=1, step=24, rank=1)
GOOD = FaultOutcome(
    planned=PLANNED, expected=True, changes=[Change(tensor="weight of a")], ended="finished", same=True,
    found="replicas_differ", steps=0, naming="named", ranks=[[1]], seconds=3.0,
)  # fmt: skip
MISSED: dict[str, Any] = {"found": "", "steps": None, "naming": None, "ranks": [], "same": False}


def of(kind: str = "weight/sign", layout: str = "dp3", **changes: Any) -> FaultOutcome:
    planned = PLANNED.model_copy(update={"kind": kind, "layout": layout})
    return GOOD.model_copy(update={"planned": planned, **changes})


def cells(*outcomes: FaultOutcome) -> list[str]:
    return [column.describe(outcomes) for column in CorruptionDrill.columns][1:]


def red(*outcomes: FaultOutcome) -> set[str]:
    return {column.header for column in CorruptionDrill.columns if column.is_missed(outcomes)}


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


def test_a_missed_target_is_red() -> None:
    assert red(of()) == set()
    assert red(of(), of(**MISSED)) == {"found"}
    assert red(of(**MISSED, expected=False)) == red(of(**MISSED | {"same": True})) == set()
    assert red(of(naming="wrong")) == {"rank\nnamed"} and red(of(same=False)) == {"undone"}
    assert red(of(**MISSED, ended="hung")) == {"found", "not found, but"}


def test_a_row_per_kind_and_layout() -> None:
    console = Console(width=160, file=io.StringIO(), force_terminal=False)
    both = [of(), of(), of(layout="dp2"), of("master/sign", "dp2", **MISSED)]
    console.print(CorruptionDrill([], [1], False).show_table([*both, of("weight/sign", "dp2")]))
    assert isinstance(console.file, io.StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if "dp" in line]
    assert len(lines) == 3
    assert "weight/sign" in lines[0] and "dp3" in lines[0] and "2/2" in lines[0]
    assert "weight/sign" not in lines[1] and "dp2" in lines[1] and "2/2" in lines[1]
    assert "master/sign" in lines[2] and "0/1" in lines[2]


def test_in_a_few_words() -> None:
    assert of().describe() == "found by replicas differ after 0 steps, rank named, undone, 3 s"
    assert of(same=False, naming="wrong").describe().endswith("rank wrong, not undone, 3 s")
    assert of(**MISSED).describe() == "not found, 3 s"
    assert of(**MISSED, ended="hung").describe() == "not found, hung, 3 s"


def test_what_it_comes_to() -> None:
    clean = [Clean(layout="dp3", seed=1, findings=[], incidents=[], seconds=3.0)]
    every = [of(), of(naming="wrong"), of(**MISSED), of(**MISSED, expected=False), of(expected=False)]
    assert total(every, clean).describe() == (
        "2 of 3 faults that must be found were, and 1 of 2 others; the right rank named in 2 of 3, 3 of 3 undone to "
        "the bytes of the clean run; 0 left no trace; 0 false alarms, with 1 clean runs"
    )
    assert "; 0 left no trace, 1 hung; " in total([of(**MISSED, ended="hung")], clean).describe()
