"""Events of the journal: typed, in words, and read from any journal whatever it holds; and the log that writes them."""

from __future__ import annotations

import json
import logging
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base import durable
from megastable.base.errors import DataError, SpaceError
from megastable.base.text import make_visible
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event, Other
from megastable.run.events.reading import KINDS, event_of, event_of_line, find_latest, read_events
from megastable.run.events.stability_events import Discarded, Handover, IncidentEvent, NoSnapshots, RateLifted
from megastable.run.events.supervisor_events import Ended, Hang
from megastable.run.events.training_events import Finished, Imported, Warned
from megastable.run.log import RunLog

# In journals that there are: a name may come, none may go or change.
NAMES = """alert baseline_reset batch_changed batch_far_off blend_changed branches_tried change_made
change_measured change_refused checkpoint checkpoint_failed checkpoint_healthy checkpoint_recovered
checkpoint_rejected checkpoint_suspect clipping_reset config_changed discard_examined discarded ended evaluated
exchanges_undone fell_back finished gradients_doubted handover hang hook_failed host_faulty host_left_out
host_proven host_slow hosts_awaited imported incident incident_later kernels_left kernels_tried_again launched
length_changed located look_ahead_failed look_ahead_spent looked_ahead memory_dropped memory_off memory_refused
memory_resume messages_differ mix_changed moments_reset no_snapshots note order_changed probed rate_cut rate_lifted
rate_warmup records_lost replay_differs replicas_differ reshaped restart resumed returned rolled_back
samples_dropped samples_examined settings_adjusted skips_added skips_foreign skips_given_back
skips_read skips_refused snapshot_rejected state_changed stopped supervisor tasks_evaluated
tasks_failed tasks_skipped training trend unstable warning would wrong_copy""".split()
FIELDS = sorted({name for kind in KINDS.values() for name in kind.__annotations__} | {"sentence", "self"})
WHAT = ["opened", "attributed", "released", "rewound", "restarted", "handed over", "closed", "over", "ended"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(WHAT),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=5,
)


def test_kinds_are_those_of_all_journals_and_can_be_told_and_sent() -> None:
    assert sorted(KINDS) == NAMES and all(name == kind.NAME for name, kind in KINDS.items())
    for name in NAMES:
        event = event_of_line(json.dumps({"event": name, "step": 3}).encode())
        copy = pickle.loads(pickle.dumps(event))
        assert event.format_sentence() and type(copy) is type(event) and copy == event


@given(
    st.sampled_from([*KINDS, "of another version"]) | JSON,
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), JSON, max_size=6),
)
def test_event_of_line_tells_any_object(name: Any, fields: dict[str, Any]) -> None:
    event = event_of_line(json.dumps({"event": name, **fields}).encode())
    told = event.format_sentence()
    assert isinstance(event, Other) == (name not in NAMES) and bool(told) == (name in NAMES)
    assert told == make_visible(told) and len(told) <= 2000 and event.format_line().endswith(told)
    for base in type(event).__mro__:
        for field in base.__annotations__ if issubclass(base, Event) else ():
            getattr(event, field)
    assert set(event.keys()) == {"event", *fields} and event.event == (name if isinstance(name, str) else "")


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"null", b"[1]", b"\xff", b'"event"', b"[" * 100_000, b'{"event": "tra', b'{"step": 1}'],
)
def test_event_of_line_gives_no_event_without_a_name(line: bytes) -> None:
    event = event_of_line(line)
    assert (
        isinstance(event, Other) and (event.event, event.format_line()) == ("", "") and "event" not in event
    )


def test_event_fields_are_of_their_kinds_or_none() -> None:
    event = Ended.from_fields(
        {"event": "ended", "attempt": 2, "clock": "9", "silent": "nan", "hung": 1, "skipped": [[1, 5]]}
    )
    assert (event.attempt, event.clock, event.hung, event.host, event.skipped) == (
        2,
        None,
        None,
        None,
        [(1, 5)],
    )
    assert event.silent is not None and math.isnan(event.silent)
    assert (event["clock"], event.get("host"), "host" in event) == ("9", None, False)  # as the journal has it
    wrong = Ended.from_fields(
        {"event": "ended", "attempt": True, "skipped": [[1]], "code": 2.0, "signal": 10**400}
    )
    assert (wrong.attempt, wrong.skipped, wrong.code, wrong.signal) == (None, [], 2, None)
    incident = event_of({"event": "incident", "summary": "over", "region": None, "suspects": 5})
    assert isinstance(incident, IncidentEvent)
    assert (incident.summary, incident.region, incident.suspects) == ({}, None, [])


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"event": "discarded", "step": 9, "loss": 8.7942, "grad_norm": "inf", "reason": "up"},
         "step 9: update refused, loss 8.794, gradient norm inf: up"),
        ({"event": "skips_added", "documents": 3, "samples": 0},
         "3 documents are named, whose samples were skipped already, as a person asked"),
        ({"event": "ended", "attempt": 2, "code": 0, "failure": ""}, "attempt 2 finished"),
        ({"event": "ended", "attempt": 2, "failure": "rank 1 was killed"}, "attempt 2 ended: rank 1 was killed"),
        ({"event": "hang", "phase": "step", "waited": 61.2, "limit": 60}, "no progress for 61 s in step, 60 s is the"),
        ({"event": "incident", "what": "attributed", "number": 3, "cause": "state", "reason": "b",
          "deferred": [[0, 9], [12, 14]], "returns": [[90, 99], [101, 103]], "lost": 1},
         "incident 3: cause: state: b; 11 samples deferred; read again from position 90, 1 sample skipped in this epoch"
         ": no room to read them later"),
        ({"event": "incident", "what": "released", "number": 2, "step": 9, "reason": "it was the rate",
          "positions": [[5, 8]], "next_epoch": [[1, 2]]}, "step 9: incident 2: 4 skipped samples found harmless, "),
        ({"event": "kernels_tried_again", "step": 50, "kernels": ["attention sdpa"], "now": []},
         "step 50: computes by plain PyTorch: attention sdpa, which was left, is no longer in use"),
        ({"event": "alert", "what": "over", "step": 70}, "step 70: the alert is over"),
        ({"event": "samples_examined", "step": 30, "first": 5, "last": 25}, "step 30: samples of steps 5 to 25 exam"),
        ({"event": "warning", "step": 5, "text": "a\x1b[31m\nb"}, "step 5: warning: a\\x1b[31m\\nb"),
    ],
)  # fmt: skip
def test_event_line_says_what_happened(event: dict[str, Any], said: str) -> None:
    assert event_of(event).format_line().startswith(said)


def test_latest_gives_the_newest_summary_of_every_incident() -> None:
    lines: list[dict[str, Any]] = [
        {"event": "incident", "summary": {"number": 1, "outcome": "open"}}, {"event": "incident", "summary": 5},
        {"event": "unstable", "summary": {"number": 3}}, {"event": "incident", "summary": {"number": "x"}},
        {"event": "incident", "summary": {"number": 1, "outcome": "healed"}},
    ]  # fmt: skip
    assert find_latest(map(event_of, lines)) == {1: {"number": 1, "outcome": "healed"}}


def test_read_events_leaves_out_a_torn_end_and_what_is_not_wanted(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    assert list(read_events(journal)) == []
    journal.write_bytes(b'{"event": "stopped"}\n\nrubbish\n{"event": "finished", "steps": 2}\n{"event": "st')
    assert [event.event for event in read_events(journal)] == ["stopped", "", "finished"]
    assert [event.event for event in read_events(journal, b'"finished"', b'"training"')] == ["finished"]
    with pytest.raises(DataError, match="cannot be read"):
        read_events(tmp_path)


def test_log_writes_fields_in_the_order_in_which_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not given is not there, what is given as None is null; reading.py knows lines by this."""
    monkeypatch.setattr("time.time", lambda: 7.12345)
    log, run = RunLog(RunDirectory(tmp_path)), RunDirectory(tmp_path)
    log.emit_event(Discarded(step=3, verdict="spike", reason="up", first_position=8, next_position=16, loss=math.nan,
                       grad_norm=math.inf, loss_scale=1.0))  # fmt: skip
    log.emit_event(Hang(attempt=1, phase="step", waited=1.5, limit=1.0, step=None, silent=(), stacks=["a"]))
    log.emit_event(Imported(step=0, **{"source": "x", "time": 1.25, "how": "averaged"}))
    assert run.journal.read_text().splitlines() == [
        '{"time": 7.123, "event": "discarded", "step": 3, "verdict": "spike", "reason": "up", "first_position": 8, '
        '"next_position": 16, "loss": "nan", "grad_norm": "inf", "loss_scale": 1.0}',
        '{"time": 7.123, "event": "hang", "attempt": 1, "phase": "step", "waited": 1.5, "limit": 1.0, "step": null, '
        '"silent": [], "stacks": ["a"]}',
        '{"time": 1.25, "event": "imported", "step": 0, "source": "x", "how": "averaged"}',
    ]
    first, hang, _ = run.iterate_events()
    assert isinstance(first, Discarded) and first.loss is not None and math.isnan(first.loss)
    assert isinstance(hang, Hang) and hang.step is None and hang.stacks == ["a"] and hang.time == 7.123


def test_log_writes_and_tells_in_one_call(tmp_path: Path) -> None:
    said, run = list[str](), RunDirectory(tmp_path)
    log = RunLog(run, said.append)
    log.emit_event(RateLifted(step=9, reason="200 steps"), say=True)
    log.emit_event(Warned(step=9, text="odd"), say="WARNING: odd")
    log.emit_event(Warned(step=10, text="odd"))
    log.commit_event(Handover(step=10, before=4), say=True)
    log.say_line("and a line")
    assert said == [
        "step 9: a limit of the learning rate is lifted: 200 steps", "WARNING: odd",
        "step 10: handed over to a checkpoint from before step 4", "and a line",
    ]  # fmt: skip
    other = RunLog(run, said.append, active=False)
    other.emit_event(Warned(step=11, text="odd"), say=True)
    other.commit_event(Handover(before=5), say="gone")
    other.say_line("nothing")
    assert len(said) == 4 and [e.event for e in run.iterate_events()] == [
        "rate_lifted",
        "warning",
        "warning",
        "handover",
    ]


def test_log_refuses_to_go_on_where_a_restart_would_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a restart depends on is not told as done where it is not on the disk; other events wait in memory."""

    def full(path: Path, line: str) -> None:
        raise DataError("full")

    said, run = list[str](), RunDirectory(tmp_path)
    log = RunLog(run, said.append)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(durable, "append_line", full)
        log.emit_event(NoSnapshots(bytes=5, budget=1.5), say="no room")
        with pytest.raises(SpaceError, match="not know of this: handover"):
            log.commit_event(Handover(before=5), say="handed over")
    assert said == ["no room"] and log.waiting and "no_snapshots" in caplog.text
    RunLog(run).emit_event(Finished(steps=1, val_loss=None))  # another log of the same directory
    assert [e.event for e in run.iterate_events()] == [
        "no_snapshots",
        "handover",
        "finished",
    ] and not log.waiting
