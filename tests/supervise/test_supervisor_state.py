"""What a supervisor knows from the journal is what it would know, had it been there."""

from __future__ import annotations

from typing import Any

from megastable.run.events.reading import event_of
from megastable.supervise.supervisor_journal import SupervisorState
from megastable_guard.incident import Breakdown, Incident


def told(*events: dict[str, Any]) -> SupervisorState:
    memory = SupervisorState()
    for event in events:
        memory.add_event(event_of(event))
    return memory


def incident(number: int, outcome: str = "open", verdict: str = "crash") -> dict[str, Any]:
    summary = {"number": number, "step": 5, "onset": 5, "verdict": verdict, "kind": "recoverable"}
    summary["outcome"] = outcome
    return {"event": "incident", "what": "opened", "number": number, "summary": summary}


def ended(what: str, clock: int, **more: Any) -> dict[str, Any]:
    return {
        "event": "ended",
        "what": what,
        "step": clock + 1,
        "host": "a",
        "clock": clock,
        "time": 5.0,
        **more,
    }


STARTED = {"event": "supervisor", "what": "started", "pid": 3, "host": "a"}
OVER = STARTED | {"what": "ended"}
LAUNCHED = {"event": "launched", "attempt": 1}


def test_predecessor_is_a_supervisor_that_did_not_say_goodbye() -> None:
    assert told(STARTED).predecessor == (3, "a") and told(STARTED, OVER).predecessor is None


def test_evaluated_is_undone_by_a_rollback() -> None:
    """Or a run that a person rolled back from its end would count as complete without the evaluation of the new one."""
    end, back = {"event": "tasks_evaluated", "of_step": 8}, {"event": "rolled_back", "step": 6, "reason": "x"}
    assert told(end, back).evaluated == 6 and told(end, back, end).evaluated == 8
    assert told({"event": "tasks_evaluated", "of_step": 4}, back).evaluated == 4


def test_failures_count_until_a_person_starts_it_again() -> None:
    took_over = STARTED | {"what": "took over"}
    memory = told(STARTED, LAUNCHED, ended("SIGKILL", 7), took_over, LAUNCHED | {"attempt": 2}, ended("", 9))
    assert [f.what for f in memory.failures] == ["SIGKILL"] and memory.clock == 9 and memory.attempt == 2
    assert told(STARTED, ended("SIGKILL", 7), OVER, STARTED).failures == []


def test_under_way_until_the_end_is_noted() -> None:
    assert told(LAUNCHED).under_way and not told(LAUNCHED, ended("x", 1)).under_way
    memory = told(LAUNCHED, {"event": "stopped"}, LAUNCHED | {"attempt": 2})
    assert memory.under_way and memory.since_launch == []


def test_open_has_only_incidents_of_the_supervisor() -> None:
    memory = told(incident(1, verdict="spike"), incident(2), incident(3), incident(2, "healed"))
    assert memory.number == 3 and list(memory.open) == [3]
    assert isinstance(memory.open[3], Incident) and memory.open[3].verdict is Breakdown.CRASH


def test_unfit_is_an_attempt_on_fewer_hosts_that_dies_before_its_first_step() -> None:
    whole, fewer = LAUNCHED | {"hosts": ["a", "b"]}, LAUNCHED | {"attempt": 2, "hosts": ["a"]}
    died = ended("OutOfMemoryError", 7, code=1, trained=False)
    memory = told(STARTED, whole, ended("SIGKILL", 7), fewer, died)
    assert memory.unfit == {1: 1} and [f.host for f in memory.failures] == ["a", None]
    for other in (died | {"trained": True}, died | {"code": None}, died | {"gone": ["a"]}):
        memory = told(STARTED, whole, ended("SIGKILL", 7), fewer, other)
        assert not memory.unfit and memory.failures[-1].host == "a"
    memory = told(STARTED, whole, died)  # as many as ever
    assert not memory.unfit and memory.failures[-1].host == "a"


def test_newly_left_out_is_remembered_until_the_next_failure() -> None:
    bar = {"event": "host_left_out", "host": "b", "until": 9.0, "wholly": False, "strikes": 1}
    assert told(STARTED, LAUNCHED, ended("host gone", 7), bar).newly_left_out == {"b"}
    assert told(STARTED, LAUNCHED, ended("host gone", 7), bar, ended("host gone", 8)).newly_left_out == set()
    assert told(STARTED, LAUNCHED).launched and not told(STARTED, LAUNCHED, OVER, STARTED).launched
