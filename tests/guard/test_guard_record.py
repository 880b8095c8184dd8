"""What a guarded run leaves behind is read by megastable's own readers: journal, step records, status, pages, reports;
of one process, of several in a row, and of one that was killed."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.report.postmortem import incidents_of, sentences, write_incidents
from megastable.report.postmortem.pictures import draw_steps
from megastable.report.run_page.run_reader import RunReader
from megastable.run.events.event import Event
from megastable.run.events.reading import KINDS
from megastable.run.records import SCHEMA, read_newest_records
from megastable.supervise.standing import State
from megastable.supervise.status import read_status
from megastable_guard import SkippableSampler, run_files, step_files
from megastable_guard.actions import Action, Cause, Decision, Finding, Signals, Verdict
from megastable_guard.guard_config import PolicyConfig
from megastable_guard.guard_record import GuardRecord
from megastable_guard.loop_guard import Guard
from megastable_guard.policy import Policy
from megastable_guard.policy_state import PolicyState
from megastable_guard.step_files import GuardedStep, StepFiles
from tests.distributed import run_ranks
from tests.guard.test_loop_guard import BURST, STEPS, Loop, as_ddp
from tests.guard.test_rate_limits import JumpingLoop
from tests.guard.test_sample_examiner import write_samples
from tests.journal import events

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import os, signal, sys
from pathlib import Path
from tests.guard.test_loop_guard import BURST, Loop
loop = Loop(True, run_dir=Path(sys.argv[1])).train(int(sys.argv[2]), BURST)
loop.guard.record.files.flush_steps(loop.guard.step)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "held":
    print("held", flush=True)
    sys.stdin.read()
"""


def told(run: Path) -> list[tuple[str, Any]]:
    """The events of a journal: name, with what it says of an incident or an alert; and step."""
    return [
        (" ".join(filter(None, [event.event, event.get("what")])), event.get("step")) for event in events(run)
    ]


def start_writer(run: Path, steps: int, how: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", WRITER, str(run), str(steps), how]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'guard'}:{ROOT / 'tools'}"}
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def get_guard(loop: Loop) -> Guard:
    assert loop.guard is not None
    return loop.guard


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a refused update at step 60, and a rewind at 101."""
    run = tmp_path_factory.mktemp("guarded") / "mine"
    get_guard(Loop(True, run_dir=run).train(STEPS, {60: 30.0, **BURST})).finish_run()
    return run


def test_the_journal_has_events_that_megastable_knows(finished: Path) -> None:
    assert told(finished) == [
        ("training", 0), ("discarded", 60), ("incident opened", 60), ("incident closed", 76), ("discarded", 100),
        ("incident opened", 100), ("discarded", 101), ("incident opened", 101), ("incident rewound", 101),
        ("incident closed", 116), ("finished", None),
    ]  # fmt: skip
    for event in events(finished):
        declared = {
            name for kind in type(event).__mro__ if issubclass(kind, Event) for name in kind.__annotations__
        }
        assert type(event) is KINDS[event.event]
        assert set(event.keys()) - {"event", "time", "summary", "number"} <= declared
        assert "None" not in event.format_line()


def test_step_records_are_read_as_megastable_reads_its_own(finished: Path) -> None:
    table = read_newest_records(finished / "steps")
    assert table.column("step").to_pylist() == list(range(1, STEPS + 1))
    assert [row["step"] for row in table.to_pylist() if not row["applied"]] == [
        60
    ]  # 100 and 101 were done again
    first = {row["step"]: row for row in read_newest_records(finished / "steps", newest=False).to_pylist()}
    assert [step for step, row in first.items() if not row["applied"]] == [60, 100, 101]
    (opened, *_), (refused, *_) = events(finished, "training"), events(finished, "discarded")
    assert first[60]["loss"] == np.float32(refused["loss"]) and first[60]["time"] > opened["time"] - 1
    assert 0 < first[60]["lr"] < 3e-3 and first[60]["seconds"] > 0 and first[60]["finite"]


def test_status_and_the_run_page_of_a_guarded_run(finished: Path) -> None:
    status = read_status(finished)
    assert (status.state, status.step, status.refused, status.steps_lost) == (State.FINISHED, STEPS, 3, 21)
    assert [case.outcome for case in status.incidents] == ["healed", "healed"] and not status.problems
    reader = RunReader(finished)
    head, panel = reader.read_head(), reader.read_panel()
    assert head["word"] == "finished" and not head["problems"]
    names = [figure["name"] for figure in head["figures"]]
    assert "steps lost" in names and not {"tokens", "MFU", "checkpoint"} & set(names)
    assert "?" not in {figure["value"] for figure in head["figures"]}
    assert [(case["onset"], case["back_to"]) for case in panel["incidents"]] == [(60, None), (100, 80)]
    plots = reader.read_plots("step", None, None, 300)
    assert plots["undone"]["count"] == 19 and plots["refused"]["count"] == 3
    assert "clipped" not in plots["accepted"]["series"]


def test_the_postmortem_of_a_guarded_run(finished: Path) -> None:
    refused, rewound = incidents_of(finished)
    assert refused.incident.actions == ["discard"] and refused.incident.steps_lost == 0
    assert rewound.incident.actions == ["discard", "rewind"] and rewound.back_to == [80]
    assert not refused.problems and not rewound.problems
    assert rewound.cost.step_seconds and len(rewound.passes) == 2
    folders = write_incidents(finished)
    text = (folders[1] / "postmortem.md").read_text()
    assert (
        "rewound in memory to step 80" in text
        and "learning rate" not in text
        and "None" not in text.replace("None.", "")
    )
    assert {"report.html", "plot.png"} <= {path.name for path in folders[1].iterdir()}
    assert ">, " not in (folders[1] / "report.html").read_text()


@pytest.mark.parametrize("is_limited", [True, False])
def test_a_page_tells_of_a_learning_rate_that_jumped(is_limited: bool, tmp_path: Path) -> None:
    """From what to what, and shows it; with the limit that a trial has chosen, and without names, which has none."""
    loop = JumpingLoop(write_samples(0), names=is_limited, run_dir=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.train(140)
    (evidence,), (folder,) = incidents_of(tmp_path), write_incidents(tmp_path)
    text, figure = (folder / "postmortem.md").read_text(), vars(draw_steps)["__wrapped__"](evidence)
    assert [axis.get_ylabel() for axis in figure.axes][2:] == ["learning rate"]
    assert "rose from 0.01 to 0.3 at step 100." in text
    last_text = (
        "continued with the learning rate capped at its value there"
        if is_limited
        else "Nothing more was done"
    )
    assert (
        last_text in text
        and ("Reason: from 0.3 to 0.01: the learning rate stays at or below" in text) is is_limited
    )
    assert evidence.incident.actions == ["rewind"] + (["cap_lr"] if is_limited else ["rewind", "alert"])
    assert evidence.incident.kind == ("recoverable" if is_limited else "divergent")
    assert ("Begin the next run of this size with a lower peak rate, or a longer" in text) is is_limited
    assert ("Find out why the learning rate rose. With check(sample_ids=)" in text) is not is_limited


def test_what_to_do_next_names_nothing_that_the_loop_has_not(finished: Path) -> None:
    """No recipe, and no command that needs one."""
    (evidence, _), told_texts = incidents_of(finished), list[str]()
    for cause in Cause:
        for outcome in ("open", "healed", "stopped"):
            changes = {"cause": cause.value, "outcome": outcome, "actions": ["rewind", "alert"]}
            incident = evidence.incident.model_copy(update=changes)
            steps_told = sentences.follow_ups(evidence.model_copy(update={"incident": incident}))
            told_texts += [f"{text} {command}" for text, command in steps_told]
    told_text = "\n".join(told_texts)
    assert "until a budget of PolicyConfig comes back" in told_text and "lower beta2 or the rate" in told_text
    assert not re.search(r"stability\.|schedule\.|optimizer\.|backtest|layers\.csv|inspect", told_text)
    spent = Policy(PolicyConfig(rewinds=0)).decide_on_step(Finding(9, Verdict.SPIKE, 2.0, 9), 0)
    assert "(policy.budget_window) are spent" in spent.reason


def test_report_is_json_and_a_text(finished: Path, tmp_path: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    guard = get_guard(Loop(True).train(STEPS, {60: 30.0, **BURST}))
    report = guard.report()
    usual = guard.record.read_state()["losses"]  # of the newest applied steps, each once
    assert [step for step, _ in usual] == list(range(STEPS - 19, STEPS + 1))
    counts = {"steps": STEPS, "updates": STEPS - 1, "refused": 3, "rewinds": 1, "steps_lost": 21, "alerts": 0}
    assert json.loads(json.dumps(report)) == report and counts.items() <= report.items()
    assert counts.items() <= summary.items()  # with and without a directory
    text = str(report)
    assert f"{STEPS} steps, 159 updates applied, 3 refused; 1 rewinds, 21 steps lost; 0 alerts" in text
    assert "incident 2, step 100: spike, discard, rewind, healed: loss" in text
    assert "data of 2 steps left for later" in text and "samples deferred" not in text


def test_a_second_run_in_the_same_directory(tmp_path: Path) -> None:
    """Its incidents have numbers of their own, its steps are the newest, and what was open is over."""
    former = Loop(True, run_dir=tmp_path).train(61, {60: 30.0})  # still there, as in a notebook
    newer = Loop(True, run_dir=tmp_path).train(80, {70: 30.0})
    assert told(tmp_path)[:5] == [
        ("training", 0), ("discarded", 60), ("incident opened", 60), ("incident closed", 0), ("training", 0),
    ]  # fmt: skip
    first, second = incidents_of(tmp_path)
    assert (first.incident.outcome, first.incident.onset) == ("stopped", 60)
    assert first.incident.reasons[-1] == "its process ended before it was proven to be over"
    assert (second.incident.outcome, second.incident.onset) == ("open", 70)
    report = get_guard(newer).report()  # of its own ones
    assert [case["number"] for case in report["incidents"]] == [2] and report["refused"] == 1
    with RunReader(tmp_path).records.hold_table() as held:
        assert len(held.steps) == 61 + 70  # all of the former one, when the newer one began
    get_guard(former).finish_run()  # does not free the directory of the other
    assert tmp_path.resolve() in run_files._LOCKS
    del newer
    gc.collect()
    assert tmp_path.resolve() not in run_files._LOCKS
    table = RunReader(tmp_path).records
    with table.hold_table() as held:
        assert int(held.steps["undone"].sum()) == 61 and len(held.steps) == 61 + 80


def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    """With a journal whose last line is torn. An incident that is open in the checkpoint keeps its number."""
    run = tmp_path / "run"
    writer = start_writer(run, 100, "killed")
    assert writer.wait(60) == -signal.SIGKILL
    with (run / "journal.jsonl").open("a") as journal:
        journal.write('{"time": 1795949460.003, "event": "incid')
    status = read_status(run)
    assert (status.state, status.step) == (State.INTERRUPTED, 100)
    assert status.advice == "start its script again, with the checkpoint that it wrote last"
    whole, rest = Loop(True).train(100, BURST), Loop(True, run_dir=run)
    for name in ("model", "optimizer", "scheduler"):
        getattr(rest, name).load_state_dict(getattr(whole, name).state_dict())
    get_guard(rest).load_state_dict(json.loads(json.dumps(get_guard(whole).state_dict())))
    rest.train(STEPS)
    get_guard(rest).finish_run()
    assert [line for line in told(run) if line[0] in ("resumed", "training")] == [
        ("training", 0), ("resumed", 100), ("training", 100)
    ]  # fmt: skip
    (evidence,) = incidents_of(run)
    assert evidence.incident.outcome == "healed" and not evidence.problems
    closed = [event["summary"]["outcome"] for event in events(run, "incident") if event["what"] == "closed"]
    assert closed == ["healed"]
    assert (run / "journal.jsonl.torn").read_text().endswith('"incid\n')
    report = get_guard(rest).report()
    assert (report["refused"], report["incident_count"], report["steps"]) == (1, 1, STEPS)
    assert read_newest_records(run / "steps").column("step").to_pylist() == list(range(1, STEPS + 1))
    assert read_status(run).state is State.FINISHED


def drive(guard: Guard, steps: int, bad: Sequence[int]) -> None:
    """Up to a step; each of the bad ones stands out once."""
    left = {*bad}
    while guard.step < steps:
        step = guard.step + 1
        factor = 8.0 if step in left else 1.0
        left -= {step}
        if guard.check(loss=4.0 * factor + 0.01 * math.sin(step), grad_norm=factor).rewind:
            guard.rewind()


@pytest.mark.parametrize(
    ("saved", "count"), [(55, 2), (62, 1), (90, 3)]
)  # before an incident, in it, after it
def test_report_of_a_resumed_run_has_what_its_journal_has(saved: int, count: int, tmp_path: Path) -> None:
    """Twice it goes on from the same checkpoint; the first time it is killed after an incident that is over, the second
    time in one, with two refused updates. The report counts as `megastable status` does."""
    guard = get_guard(Loop(True, run_dir=tmp_path))
    drive(guard, saved, (60,))
    state = json.loads(json.dumps(guard.state_dict()))
    for steps, bad in ((50, (10, 11, 12, 13)), (14, (10, 12)), (50, ())):
        guard = get_guard(Loop(True, run_dir=tmp_path))
        guard.load_state_dict(state)
        drive(guard, saved + 1, ())
        outcomes = [incident["outcome"] for incident in guard.report()["incidents"]]
        assert outcomes == ["open"] if saved == 62 else "open" not in outcomes
        drive(guard, saved + steps, [saved + number for number in bad])
    report, status, told_incidents = guard.report(), read_status(tmp_path), [*incidents_of(tmp_path)]
    lines = [name for name, _ in told(tmp_path)]
    assert report["refused"] == status.refused == lines.count("discarded") > 5
    assert report["steps_lost"] == status.steps_lost > 0
    assert report["rewinds"] == lines.count("incident rewound") > 0
    assert [(case["number"], case["outcome"]) for case in report["incidents"]] == [
        (evidence.incident.number, evidence.incident.outcome) for evidence in told_incidents
    ]
    assert report["incident_count"] == len(told_incidents) == count and report["steps"] == saved + 50


def test_a_running_one_is_seen_and_keeps_others_out(tmp_path: Path) -> None:
    writer = start_writer(tmp_path / "run", 20, "held")
    assert writer.stdout is not None and writer.stdout.readline() == "held\n"
    try:
        status = read_status(tmp_path / "run")
        assert (status.state, status.step, status.trainer.pid) == (State.RUNNING, 20, writer.pid)
        with pytest.raises(RuntimeError, match="another process trains here"):
            Loop(True, run_dir=tmp_path / "run").train(1)
    finally:
        writer.communicate("")
    assert writer.returncode == 0


def train_ranks(folder: Path) -> tuple[Mapping[str, Any], bool]:
    guard = get_guard(Loop(True, wrap=as_ddp, run_dir=folder).train(STEPS, BURST))
    is_writer = guard.record.files is not None
    guard.finish_run()
    return guard.report(), is_writer


def test_the_first_rank_writes(tmp_path: Path) -> None:
    (first, writes), (second, writes_too) = run_ranks(2, train_ranks, tmp_path)
    assert writes and not writes_too
    for report in (first, second):
        report["incidents"][0].pop("seconds")
    assert first == second and events(tmp_path, "training")[0]["world"] == 2
    assert len(events(tmp_path, "finished")) == 1 and len(read_newest_records(tmp_path / "steps")) == STEPS


def fail_on_ranks(folder: Path) -> tuple[str, str]:
    """What this rank raises: for a directory that cannot be made, and one in which somebody trains. It goes on with
    another one."""
    messages = list[str]()
    for name in ("a file", "held"):
        loop = Loop(True, wrap=as_ddp, run_dir=folder / name)
        with pytest.raises((OSError, RuntimeError)) as raised:
            loop.train(1)
        messages.append(str(raised.value))
    get_guard(loop).record.run_dir = folder / "mine"
    assert get_guard(loop.train(2)).step == 2
    return messages[0], messages[1]


def test_what_the_first_rank_cannot_write_ends_all_ranks(tmp_path: Path) -> None:
    """The others would wait for it."""
    (tmp_path / "a file").write_text("")
    writer = start_writer(tmp_path / "held", 2, "held")
    assert writer.stdout is not None and writer.stdout.readline() == "held\n"
    try:
        first, second = run_ranks(2, fail_on_ranks, tmp_path)
    finally:
        writer.communicate("")
    assert first == second
    assert first[0].startswith(f"run_dir={tmp_path / 'a file'}: the first rank cannot write there ([Errno ")
    assert first[1].startswith(f"run_dir={tmp_path / 'held'}: another process trains here")
    assert [event["world"] for event in events(tmp_path / "mine", "training")] == [2]


@pytest.mark.filterwarnings("ignore:megastable guard")
def test_an_alert_ends_with_its_process(tmp_path: Path) -> None:
    guard = get_guard(Loop(True, run_dir=tmp_path, keep=0).train(80))
    assert any(guard.check(loss=9.0, grad_norm=50.0).alert for _ in range(8))
    assert read_status(tmp_path).alert
    Loop(True, run_dir=tmp_path).train(1)
    assert not read_status(tmp_path).alert


@pytest.mark.filterwarnings("ignore:megastable guard")
def test_an_alert_begins_and_is_over(tmp_path: Path) -> None:
    """Without copies to go back to. What was journaled is what `report` counts; also after a resume from before it."""
    loop = Loop(True, run_dir=tmp_path, keep=0).train(80)
    guard = get_guard(loop)
    saved = guard.state_dict()
    with pytest.warns(UserWarning, match="megastable guard, step 8"):
        assert any(guard.check(loss=9.0, grad_norm=50.0).alert for _ in range(8))
    loop.train(200)
    lines = [name for name, _ in told(tmp_path)]
    assert lines.count("alert begun") == lines.count("alert over") == guard.report()["alerts"] == 1
    assert lines.index("alert begun") < lines.index("incident closed") < lines.index("alert over")
    (evidence,) = incidents_of(tmp_path)
    assert (evidence.incident.kind, evidence.incident.outcome) == ("divergent", "healed")
    assert evidence.incident.actions[-1] == "alert" and not read_status(tmp_path).alert
    guard.load_state_dict(saved)
    assert guard.report()["alerts"] == 0
    loop.train(81)
    assert guard.report()["alerts"] == guard.report()["incident_count"] == 1


def test_a_number_that_is_not_finite_is_recorded(tmp_path: Path) -> None:
    guard = get_guard(Loop(True, run_dir=tmp_path).train(60))
    guard.check(loss=float("nan"), grad_norm=float("inf"))
    (event,) = events(tmp_path, "discarded")
    assert (event["loss"], event["grad_norm"], event["verdict"]) == ("nan", "inf", "non_finite")
    row = read_newest_records(tmp_path / "steps").to_pylist()[-1]
    assert (row["step"], row["finite"], row["applied"], row["grad_norm"]) == (61, False, False, float("inf"))
    for _ in range(2):
        guard.check(loss=float("nan"), grad_norm=1.0)
    (incident,) = guard.report()["incidents"]
    assert (incident["actions"], incident["batches_discarded"]) == (["discard", "rewind"], 3)
    assert incident["loss_peak"] is None and incident["norm_peak"] == 1.0


def test_bad_samples_that_were_named(tmp_path: Path) -> None:
    """By their index in the dataset."""
    guard = get_guard(Loop(True, run_dir=tmp_path).train(60, {60: 30.0}))
    guard.record.note_cause(Cause.DATA, "they are hard on the good state", [7, 9, 8, 30])
    guard.record.note_cause(Cause.DATA, "one more", [8, 31])
    (evidence,) = incidents_of(tmp_path)
    assert evidence.incident.bad == [(7, 10), (30, 32)] and not evidence.problems
    report, sampler = guard.report(), SkippableSampler(100, 2)
    assert report["skipped_samples"] == 5 and report["skipped_ids"] == [[7, 10], [30, 32]]
    sampler.seek(0, 0, skip=[5, 6, 40])
    report = guard.report(sampler)
    assert report["skipped_samples"] == 3 and report["skipped_ids"] == [[5, 7], [40, 41]]
    assert report["dropped_ids"] == []
    guard.record.note_cleared([7, 31])
    guard.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert guard.report()["skipped_ids"] == [[8, 10], [30, 31]]
    (folder,) = write_incidents(tmp_path)
    text = (folder / "postmortem.md").read_text()
    assert "5 samples were bad." in text and "Bad samples, by index: 7-9, 30-31" in text
    assert "document" not in text and "Look at these samples of the dataset" in text


def test_a_disk_that_refuses_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waited is written later, in order."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(run_files, "append_line", refuse)
        full_disk.setattr(step_files, "write_file", refuse)
        with pytest.warns(UserWarning, match="cannot be written to .*No space left") as warned:
            loop = Loop(True, run_dir=tmp_path).train(90, {60: 30.0})
        assert len(warned) == 1 and not (tmp_path / "journal.jsonl").exists()
    get_guard(loop).finish_run()
    assert [name for name, _ in told(tmp_path)] == [
        "training", "discarded", "incident opened", "incident closed", "finished"
    ]  # fmt: skip
    assert len(read_newest_records(tmp_path / "steps")) == 90


def step_of(number: int) -> GuardedStep:
    return GuardedStep(number, 1000.0 + number, number % 3 > 0, True, 1.0 / number, 1e300, 1e-3, 0.5)


def test_step_files_stay_few_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushed at odd times, by two processes; every row once, in order, and nothing is written without news."""
    monkeypatch.setattr(step_files, "GROUP", 100)
    for begin in (1, 301):
        files = StepFiles(tmp_path)
        for number in range(begin, begin + 300):
            files.rows.append(step_of(number))
            if number % 7 == 0:
                files.flush_rows()
        files.flush_rows()
        names = sorted(tmp_path.iterdir())
        files.flush_rows()
        assert sorted(tmp_path.iterdir()) == names
    assert len(names) == 2 * 3 and sum(path.stat().st_size for path in names) < 600 * 35 + 6 * 900
    table = read_newest_records(tmp_path)
    assert table.column("step").to_pylist() == list(range(1, 601))
    assert table.column("applied").to_pylist() == [number % 3 > 0 for number in range(1, 601)]
    assert table.column("time").to_pylist() == [1000.0 + number for number in range(1, 601)]
    assert np.allclose(table.column("loss").to_numpy(), 1 / np.arange(1, 601)) and table.schema == SCHEMA


def test_step_files_of_a_process_that_dies_between_two(tmp_path: Path) -> None:
    """Before it has removed the older one; and the clock is set back meanwhile."""
    files = StepFiles(tmp_path)
    for begin, end, clock in ((1, 11, 0.0), (11, 16, -500.0), (16, 21, -900.0)):
        files.rows += [step_of(number)._replace(time=1000.0 + number + clock) for number in range(begin, end)]
        older = {path: path.read_bytes() for path in tmp_path.iterdir()}
        files.flush_rows()
        for path, content in older.items():
            path.write_bytes(content)
        assert read_newest_records(tmp_path).column("step").to_pylist() == list(range(1, end))
    assert len(list(tmp_path.iterdir())) == 3


def test_what_was_usual_before_an_incident() -> None:
    """Applied steps before its onset, which may be long before it was noticed; none that a rewind undoes."""
    record, policy = GuardRecord(None), PolicyState()
    for step in range(1, 18):
        loss = 1.0 if step < 8 else 3.0
        healthy = Finding(step, Verdict.HEALTHY, 0.0, step)
        record.note_step(Decision(Action.APPLY, healthy, ""), Signals(step, loss, 1.0, 1e-3), True, policy)
    drift = Finding(18, Verdict.DRIFT, 2.0, 8)
    record.note_step(Decision(Action.REWIND, drift, "up"), Signals(18, 9.0, 1.0, 1e-3), False, policy)
    (incident,) = record.state.incidents
    assert (incident.loss_before, incident.loss_peak, incident.steps_lost) == (1.0, 9.0, 0)
    assert record.read_state()["losses"][-1] == [17, 3.0]
    record.note_rewind(drift, 5, 5, 0.25)
    assert (incident.steps_lost, incident.seconds, record.state.deferred) == (13, 0.25, 5)
    assert [step for step, _ in record.read_state()["losses"]] == [1, 2, 3, 4, 5]


def test_a_run_goes_on_after_its_end_and_after_a_load(tmp_path: Path) -> None:
    loop = Loop(True, run_dir=tmp_path).train(5)
    guard = get_guard(loop)
    guard.finish_run()
    guard.finish_run()
    assert (tmp_path / "summary.json").exists()
    loop.train(7)
    assert not (tmp_path / "summary.json").exists()
    guard.load_state_dict(guard.state_dict())
    loop.train(9)
    assert told(tmp_path) == [
        ("training", 0), ("finished", None), ("training", 5), ("resumed", 7), ("training", 7)
    ]  # fmt: skip
    del loop, guard
    gc.collect()
    assert len(read_newest_records(tmp_path / "steps")) == 9


def test_steps_wait_for_the_next_flush(tmp_path: Path) -> None:
    """So a step costs microseconds: nothing is opened in most of them."""
    guard = get_guard(Loop(True, run_dir=tmp_path).train(5))
    assert not list((tmp_path / "steps").iterdir())
    assert guard.record.files is not None
    guard.record.files._due = 0.0
    guard.check(loss=4.0, grad_norm=1.0)
    assert len(read_newest_records(tmp_path / "steps")) == 6
