"""What is told of a fault, from made-up journals."""

from __future__ import annotations

from typing import Any

import pytest

from drills.corruption_bits import Change
from drills.corruption_plan import Planned
from drills.corruption_score import Clean, Outcome, ending, findings, incidents, judge, naming, total

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
) -> Outcome:  # fmt: skip
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
