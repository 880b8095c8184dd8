"""A recorded run through detector and policy: what would have been done, without a run to do it to."""

from __future__ import annotations

import csv
import math
import string
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.config.stability import StabilityConfig
from megastable.report.traces import Episode, episodes, read_trace
from megastable_guard.actions import Action
from megastable_guard.guard import BacktestDecision, Recorded, simulate
from megastable_guard.signals import Verdict
from tests.guard.traces import Run, healthy, spike
from tests.tiers import examples

FIRST, SECOND, LENGTH = 250, 450, 40


def recorded(run: Run) -> list[Recorded]:
    return [Recorded(s.step, s.loss, s.grad_norm) for s in run]


def judged(rows: list[Recorded], **stability: Any) -> list[BacktestDecision]:
    config = StabilityConfig.model_validate(stability)
    snapshots = config.snapshots
    found = list(simulate(rows, config, interval=snapshots.interval, keep=snapshots.keep))
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


def test_in_a_healthy_run_nothing_is_done() -> None:
    assert acted(judged(recorded(healthy(600, seed=1)))) == []


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


@pytest.mark.parametrize("broken", [{"loss": math.nan}, {"loss": math.inf}, {"grad_norm": math.inf}])
def test_one_step_that_is_not_finite_is_discarded(broken: dict[str, float]) -> None:
    rows = recorded(healthy(600, seed=1))
    rows[FIRST] = rows[FIRST]._replace(**broken)
    (discard,) = acted(judged(rows))
    assert (discard.step, discard.verdict, discard.action) == (FIRST, Verdict.NON_FINITE, Action.DISCARD)


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


@pytest.mark.parametrize("fp8", [False, True])
def test_where_nobody_is_examined_no_rate_is_cut_and_fp8_is_not_left(fp8: bool) -> None:
    """A recording says nothing of who was guilty: its spikes may all have been bad data."""
    run = healthy(1200, seed=1)
    for at in range(FIRST, 1200, 150):
        run = spike(run, at, length=LENGTH)
    config = StabilityConfig.model_validate({"policy": {"recur_steps": 300}})
    found = acted(list(simulate(recorded(run), config, fp8, interval=10, keep=4)), Action.DISCARD)
    assert len(found) >= 5 and {j.action for j in found} == {Action.REWIND}


def test_a_run_that_stays_broken_climbs_the_whole_ladder() -> None:
    rows = [
        r._replace(loss=math.nan) if r.step >= FIRST else r for r in recorded(healthy(FIRST + 24, seed=1))
    ]
    ladder = acted(judged(rows), Action.DISCARD)
    assert ladder[0].action is Action.REWIND
    assert all(j.verdict is Verdict.NON_FINITE for j in ladder)


@pytest.mark.parametrize("every", [1, 10])
def test_a_sparse_recording_without_norms_and_with_gaps(every: int) -> None:
    """Every tenth step was logged: steps are numbers, not counts; the snapshots lie as far apart as they can."""
    run = spike(healthy(600, seed=1), FIRST, length=LENGTH)
    rows = [Recorded(1000 + s.step * every, s.loss) for s in run]
    (rewind,) = acted(judged(rows), Action.DISCARD)
    assert rewind.action is Action.REWIND and 0 <= (rewind.step - 1000) / every - FIRST <= 5


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


def test_nothing_recorded() -> None:
    assert judged([]) == []


# Episodes

KINDS = st.tuples(st.sampled_from(Verdict), st.sampled_from(Action))


@given(st.lists(st.tuples(KINDS, st.integers(1, 3))))
def test_episodes_partition_what_is_not_plain(kinds: list[tuple[tuple[Verdict, Action], int]]) -> None:
    """Every step that is worth a word is in one episode, in order; an episode is as long as it can be."""
    plain = (Verdict.HEALTHY, Action.APPLY)
    one_by_one = [kind for kind, count in kinds for _ in range(count)]
    steps = [
        BacktestDecision(10 * i, verdict, action, f"{i}") for i, (verdict, action) in enumerate(one_by_one)
    ]
    found = episodes(steps)
    covered: list[BacktestDecision] = []
    for episode in found:
        part = [j for j in steps if episode.first.step <= j.step <= episode.last]
        assert part[0] == episode.first and len(part) == episode.steps
        assert {(j.verdict, j.action) for j in part} == {(part[0].verdict, part[0].action)}
        covered += part
    assert covered == [j for j in steps if (j.verdict, j.action) != plain]
    for one, other in pairwise(found):
        same = (one.first.verdict, one.first.action) == (other.first.verdict, other.first.action)
        assert not (same and other.first.step == one.last + 10)


def test_an_episode_is_told_by_its_first_step() -> None:
    steps = [BacktestDecision(s, Verdict.SPIKE, Action.APPLY, f"reason {s}") for s in (5, 6, 7)]
    assert episodes(steps) == [Episode(steps[0], 7, 3)]


# Traces


def trace(folder: Path, content: str | bytes) -> Path:
    path = folder / "trace.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ("step,loss,grad_norm\n1,2.5,0.5\n2,2.4,\n", [Recorded(1, 2.5, 0.5), Recorded(2, 2.4)]),
        ("step,loss\n1,2.5\n", [Recorded(1, 2.5)]),
        ("lr,time,grad_norm,loss,step\n1e-3,x,0.5,2.5,7\n", [Recorded(7, 2.5, 0.5, 1e-3)]),
        ("step, loss, grad_norm\n 1, 2.5 , 0.5\n", [Recorded(1, 2.5, 0.5)]),
        ("step,loss\r\n1,2.5\r\n\r\n10,2.4\r\n", [Recorded(1, 2.5), Recorded(10, 2.4)]),
        ("\ufeffstep,loss\n1.0,2.5", [Recorded(1, 2.5)]),  # as a spreadsheet saves it
        ('"step","loss"\n"1","2.5"\n', [Recorded(1, 2.5)]),
        ("step,loss,grad_norm\n0,1e308,-1e308\n1,-inf,Infinity\n", None),
        ("step,loss,grad_norm\n-3,1e400,nan\n", [Recorded(-3, math.inf, math.nan)]),
        (f"step,loss\n{2**53},1\n", [Recorded(2**53, 1.0)]),
    ],
)
def test_traces(content: str, rows: list[Recorded] | None, tmp_path: Path) -> None:
    found = read_trace(trace(tmp_path, content))
    if rows is not None:
        assert str(found) == str(rows)  # nan is nan
    judged(found)


@pytest.mark.parametrize("text", ["nan", "NaN", "", "  "])
def test_a_loss_that_is_nan_or_empty(text: str, tmp_path: Path) -> None:
    """pandas leaves a nan out when it writes a CSV file."""
    (row,) = read_trace(trace(tmp_path, f"step,loss,grad_norm\n5,{text},\n"))
    assert row.step == 5 and math.isnan(row.loss) and row.grad_norm is None
    assert [j.action for j in judged([row])] == [Action.DISCARD]


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
    rows = read_trace(trace(tmp_path, f"step,loss\n{lines}\n"), told.append)
    assert [(row.step, None if math.isnan(row.loss) else row.loss) for row in rows] == kept
    assert len(told) == len(said) and all(part in line for part, line in zip(said, told))


def test_a_run_that_is_logged_every_tenth_step_among_others_is_not_acted_on(tmp_path: Path) -> None:
    run = healthy(300, seed=1)
    text = "".join(f"{s.step},{s.loss if s.step % 10 == 0 else ''},\n" for s in run)
    assert acted(judged(read_trace(trace(tmp_path, f"step,loss,grad_norm\n{text}")))) == []


def nans(folder: Path, rows: list[tuple[int, str, str, str]]) -> list[int]:
    """Steps of the lines without a loss that are no gap."""
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    return [
        r.step for r in read_trace(trace(folder, f"step,loss,grad_norm,lr\n{text}")) if math.isnan(r.loss)
    ]


@pytest.mark.parametrize(("earlier", "acted_on"), [((), 1), ((100, 101, 102, 103), 2)])
def test_losses_that_are_missing_at_the_end_are_nans_whatever_was_missing_before(
    earlier: tuple[int, ...], acted_on: int, tmp_path: Path
) -> None:
    run = healthy(303, seed=1)
    missing = {*earlier, 300, 301, 302}
    text = "".join(f"{s.step},{'' if s.step in missing else s.loss},{s.grad_norm}\n" for s in run)
    found = acted(judged(read_trace(trace(tmp_path, f"step,loss,grad_norm\n{text}"))))
    assert {j.step for j in found} <= missing and found[-1].step == 302
    assert [j.action for j in found].count(Action.REWIND) == acted_on


@settings(max_examples=examples(60))
@given(
    phases=st.lists(st.tuples(st.integers(1, 12), st.integers(12, 25)), min_size=1, max_size=3),
    bursts=st.lists(st.tuples(st.integers(4, 9), st.integers(1, 4)), max_size=1),
    more=st.integers(0, 11),
    column=st.sampled_from(("norm", "rate", "")),
)
def test_a_missing_loss_is_a_nan_where_the_cadence_has_one(
    tmp_path_factory: pytest.TempPathFactory, phases: list[tuple[int, int]],
    bursts: list[tuple[int, int]], more: int, column: str,
) -> None:  # fmt: skip
    """Every n-th loss is logged, n another one in every phase; in the first phase some of them in a row are nans."""
    logged = np.cumsum([every for every, count in phases for _ in range(count)]).tolist()
    lost = {logged[at + i] for at, count in bursts for i in range(count)}
    end, told = logged[-1] + more, {"norm": ("0.5", ""), "rate": ("", "0.001"), "": ("", "")}[column]
    rows = [(s, "2.5" if s in logged and s not in lost else "", *told) for s in range(1, end + 1)]
    due = set(range(logged[-1], end + 1, phases[-1][0])) - {logged[-1]}
    assert nans(tmp_path_factory.getbasetemp(), rows) == sorted((lost if column else set()) | due)


HEAD = "step,loss,grad_norm\n1,2.5,0.5\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no column loss and step"),
        ("\n\n", "no column loss and step"),
        ("step,loss\n", "no steps in it"),
        ("step,loss\n\n\n", "no steps in it"),
        ("step,grad_norm\n1,2\n", "no column loss"),
        ("iteration,loss\n1,2\n", "no column step"),
        ("Step;loss\n1;2\n", "no column loss and step"),
        (HEAD + "2,high,0.5\n", "line 3: could not convert string to float: 'high'"),
        (HEAD + "2,2.5,low\n", "line 3: could not convert string to float: 'low'"),
        (HEAD + "two,2.5,0.5\n", "line 3: .*'two'"),
        (HEAD + ",2.5,0.5\n", "line 3: the step is ''"),
        (HEAD + "1.5,2.5,0.5\n", "line 3: the step is '1.5', not a whole number"),
        (HEAD + "1e400,2.5,0.5\n", "line 3: the step is '1e400', not a whole number"),
        (HEAD + "1e300,2.5,0.5\n", "line 3: the step is '1e300', not a whole number below"),
        (HEAD + "nan,2.5,0.5\n", "line 3: the step is 'nan'"),
        (HEAD + "-inf,2.5,0.5\n", "line 3: the step is '-inf'"),
        (HEAD + "1,2.5,0.5\n", "line 3: step 1 after 1, and half of all lines go back: sort it"),
        (HEAD + "5,2.5,0.5\n3,2.5,0.5\n2,2.5,0.5\n", "line 4: step 3 after 5"),
        (HEAD + "2,2.5,0.5,7\n", "line 3: not as many fields"),
        (HEAD + "2,2.\n", "line 3: not as many fields"),  # cut off while it was written
        (HEAD + " \n", "line 3: not as many fields"),
        (HEAD + "2,2,5,0,5\n", "line 3: not as many fields"),
        (HEAD + '2,"2.5\n3,2.4,0.5\n', "line 4: "),
        (HEAD + "2,2.5,\x00\n", "line 3: could not convert"),
        (b"\x80\x04\x95binary\xff\xfe", "cannot be read: .*utf-8"),
        (HEAD.encode("utf-16"), "cannot be read: .*utf-8"),
        (HEAD + "x" * 200_000 + ",1,1\n", "cannot be read: field larger than field limit"),
    ],
)  # fmt: skip
def test_bad_traces(content: str | bytes, message: str, tmp_path: Path) -> None:
    csv.field_size_limit(1 << 17)  # Python's own: tables of text raise it for the whole process
    path = trace(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))


@settings(max_examples=examples(200))
@given(st.lists(st.text(alphabet=string.digits[:4] + '.-e,\n"\r\x00 infa', max_size=12), max_size=6))
def test_any_text_is_a_trace_or_a_message(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = trace(tmp_path_factory.getbasetemp(), "\n".join(["step,loss,grad_norm", *lines]))
    rows = None
    with suppress(DataError):
        rows = read_trace(path)
    if rows is not None:
        assert rows and all(a.step < b.step for a, b in pairwise(rows))


def test_traces_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(DataError, match=f"{path} cannot be read"):
            read_trace(path)
