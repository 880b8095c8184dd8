"""A recorded run through detector and policy: what would have been done, without a run to do it to."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.config.stability import StabilityConfig
from megastable.report.traces import read_csv_trace
from megastable_guard.actions import Action, Verdict
from megastable_guard.step_judge import BacktestDecision, Recorded, simulate_guard
from tests.guard.traces import SyntheticRun, healthy, spike
from tests.tiers import examples

FIRST, SECOND, LENGTH = 250, 450, 40


def recorded(run: SyntheticRun) -> list[Recorded]:
    return [Recorded(s.step, s.loss, s.grad_norm) for s in run]


def judged(rows: list[Recorded], **stability: Any) -> list[BacktestDecision]:
    config = StabilityConfig.model_validate(stability)
    snapshots = config.snapshots
    found = list(simulate_guard(rows, config, interval=snapshots.interval, keep=snapshots.keep))
    assert [j.step for j in found] == [r.step for r in rows]
    return found


def acted(found: list[BacktestDecision], *but: Action) -> list[BacktestDecision]:
    return [j for j in found if j.action not in (Action.APPLY, *but)]


@pytest.fixture
def one() -> list[Recorded]:
    return recorded(spike(healthy(600, seed=1), FIRST, length=LENGTH))


@pytest.fixture
def two() -> list[Recorded]:
    return recorded(spike(spike(healthy(600, seed=1), FIRST, length=LENGTH), SECOND, length=LENGTH))


def test_a_spike_is_rewound_once_and_the_rest_of_it_marked(one: list[Recorded]) -> None:
    found = judged(one)
    (rewind,) = acted(found, Action.DISCARD)
    assert rewind.action is Action.REWIND and FIRST <= rewind.step <= FIRST + 5
    assert all(FIRST <= j.step < rewind.step for j in found if j.action is Action.DISCARD)
    rest = [j for j in found if rewind.step < j.step < FIRST + LENGTH]
    assert all(j.verdict is not Verdict.HEALTHY and j.action is Action.APPLY for j in rest)
    assert {j.reason for j in rest} == {
        f"part of the excursion that the action at step {rewind.step} would have undone"
    }
    assert all(j.verdict is Verdict.HEALTHY for j in found if not FIRST <= j.step < FIRST + LENGTH + 10)


def test_two_spikes_are_rewound_each(two: list[Recorded]) -> None:
    steps = [j.step for j in judged(two) if j.action is Action.REWIND]
    assert len(steps) == 2 and all(0 <= s - at <= 5 for s, at in zip(steps, (FIRST, SECOND)))


def test_without_snapshots_it_is_handed_over(one: list[Recorded]) -> None:
    (handover,) = acted(judged(one, snapshots={"interval": 0}), Action.DISCARD)
    assert handover.action is Action.HANDOVER and "there is no snapshot" in handover.reason


@pytest.mark.parametrize(
    ("policy", "actions"),
    [
        ({"rewinds": 1}, [Action.REWIND, Action.ALERT]),
        ({"rewinds": 1, "last_resort": "stop"}, [Action.REWIND, Action.STOP]),
        ({"rewinds": 0}, [Action.ALERT, Action.ALERT]),
        ({"rewinds": 0, "last_resort": "stop"}, [Action.STOP, Action.STOP]),
        ({"rewinds": 1, "budget_window": 100}, [Action.REWIND, Action.REWIND]),
    ],
)
def test_what_is_spent_pauses_the_remedy_and_the_recording_goes_on(
    policy: dict[str, Any], actions: list[Action], two: list[Recorded]
) -> None:
    """After a stop a person has started it again, with new budgets."""
    found = acted(judged(two, policy=policy), Action.DISCARD)
    assert [j.action for j in found] == actions
    for j in found:
        assert ("are spent" in j.reason) == (j.action in (Action.ALERT, Action.STOP))


@settings(max_examples=examples(20))
@given(
    st.lists(st.tuples(st.floats(), st.none() | st.floats(), st.integers(1, 2**40)), min_size=1, max_size=200)
)
def test_no_numbers_break_it(numbers: list[tuple[float, float | None, int]]) -> None:
    step, rows = 0, []
    for loss, norm, gap in numbers:
        step += gap
        rows.append(Recorded(step, loss, norm))
    for j in judged(rows):
        assert not (j.verdict is Verdict.HEALTHY and j.action is Action.DISCARD)


# Traces


def trace(folder: Path, content: str | bytes) -> Path:
    path = folder / "trace.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ("step,loss,grad_norm\n1,2.5,0.5\n2,2.4,\n", [Recorded(1, 2.5, 0.5), Recorded(2, 2.4)]),
        ("lr,time,grad_norm,loss,step\n1e-3,x,0.5,2.5,7\n", [Recorded(7, 2.5, 0.5, 1e-3)]),
        ("step,loss\r\n1,2.5\r\n\r\n10,2.4\r\n", [Recorded(1, 2.5), Recorded(10, 2.4)]),
        ("\ufeffstep,loss\n1.0,2.5", [Recorded(1, 2.5)]),  # as a spreadsheet saves it
        ("step,loss,grad_norm\n-3,1e400,nan\n", [Recorded(-3, math.inf, math.nan)]),
    ],
)
def test_read_trace_takes_what_people_export(content: str, rows: list[Recorded], tmp_path: Path) -> None:
    found = read_csv_trace(trace(tmp_path, content))
    assert str(found) == str(rows)  # nan is nan
    judged(found)


@pytest.mark.parametrize(
    ("lines", "kept", "said"),
    [
        ("1,3\n2,\n3,\n4,2", [(1, 3), (4, 2)], ["2 lines without a loss"]),  # logged every third step
        ("1,3\n2,\n3,", [(1, 3), (2, None), (3, None)], []),  # it ended so
        ("1,3\n2,nan\n3,2", [(1, 3), (2, None), (3, 2)], []),
        ("1,3\n2,2\n3,9\n2,2.1\n3,1\n4,1", [(1, 3), (2, 2), (3, 9), (4, 1)], ["2 lines are skipped"]),
        ("1,3\n2,\n3,\n2,2.1\n3,1\n4,1", [(1, 3), (2, None), (3, None), (4, 1)], ["2 lines are skipped"]),
        ("1,3\n2,\n3,3\n4,4\n3,2\n5,1", [(1, 3), (3, 3), (4, 4), (5, 1)], ["1 lines w", "1 lines are"]),
    ],
)
def test_gaps_and_restarts_of_real_logs(
    lines: str, kept: list[tuple[int, float | None]], said: list[str], tmp_path: Path
) -> None:
    told: list[str] = []
    rows = read_csv_trace(trace(tmp_path, f"step,loss\n{lines}\n"), told.append)
    assert [(row.step, None if math.isnan(row.loss) else row.loss) for row in rows] == kept
    assert len(told) == len(said) and all(part in line for part, line in zip(said, told))


HEAD = "step,loss,grad_norm\n1,2.5,0.5\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no column loss and step"),
        ("step,loss\n", "no steps in it"),
        ("step,grad_norm\n1,2\n", "no column loss"),
        (HEAD + "2,high,0.5\n", "line 3: could not convert string to float: 'high'"),
        (HEAD + "1.5,2.5,0.5\n", "line 3: the step is '1.5', not a whole number"),
        (HEAD + "1e300,2.5,0.5\n", "line 3: the step is '1e300', not a whole number below"),
        (HEAD + "1,2.5,0.5\n", "line 3: step 1 after 1, and half of all lines go back: sort it"),
        (HEAD + "2,2.5,0.5,7\n", "line 3: not as many fields"),
        (HEAD + "2,2.\n", "line 3: not as many fields"),  # cut off while it was written
        (HEAD + '2,"2.5\n3,2.4,0.5\n', "line 4: "),
        (b"\x80\x04\x95binary\xff\xfe", "cannot be read: .*utf-8"),
        (HEAD + "x" * 200_000 + ",1,1\n", "cannot be read: field larger than field limit"),
    ],
)  # fmt: skip
def test_bad_traces(content: str | bytes, message: str, tmp_path: Path) -> None:
    csv.field_size_limit(1 << 17)  # Python's own: tables of text raise it for the whole process
    path = trace(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        read_csv_trace(path)
    assert str(caught.value).startswith(str(path))
