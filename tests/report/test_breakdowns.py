"""Incidents of processes and files: what they cost, where the run went on, and that nobody is called guilty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megastable.data.skip_ledger import AnyEntry, SampleEntry, SkipEntry, append_all
from megastable.report.postmortem import incidents_of, sentences, write_incidents
from megastable.report.postmortem.facts import Evidence
from megastable.report.postmortem.logs import TAIL, logs
from megastable.run.directory import RunDirectory
from tests.report.runs import Make, breakdown, note


def crash(run: RunDirectory, at: float, number: int, back: int, **change: Any) -> None:
    """A process that ended at `at`, and another one that trains 20 s later, from step `back` on."""
    end = {"attempt": number, "what": "killed", "failure": "k"} | change.pop("ended", {})
    note(run, at, "ended", **end)
    known = breakdown(number=number, **change)

    def tell(time: float, what: str, **fields: Any) -> None:
        note(run, time, "incident", what=what, number=number, summary=known.model_dump(mode="json"), **fields)

    tell(at + 0.1, "opened")
    note(run, at + 1, "launched", attempt=number + 1)
    if back:
        note(run, at + 19, "resumed", step=back, checkpoint=f"step-{back}", cursor=8 * back)
    note(run, at + 20, "training", step=back, cursor=8 * back, world=2)
    known.seconds, known.steps_lost = 21.0, 5
    tell(at + 21, "restarted", step=back)
    known.outcome = "healed"
    tell(at + 60, "closed")


def test_time_without_training_is_counted_once_and_incidents_are_not_mixed_up(make: Make) -> None:
    root = make()
    run = RunDirectory(root)
    crash(run, 1100.0, 1, back=0)
    note(run, 1200.0, "checkpoint", step=40, name="step-40")
    crash(run, 1300.0, 2, back=40)
    first, second = incidents_of(root)
    assert (first.back_to, second.back_to) == ([0], [40])
    for evidence in (first, second):
        # The supervisor counts to the end of the first step: 21 s, of which the journal shows 20.
        assert (evidence.cost.recovery_seconds, evidence.cost.downtime_seconds) == (0.0, 21.0)
        assert evidence.cost.gpu_hours == pytest.approx(2 * (5 * 0.5 + 21) / 3600)
    assert "The run resumed from step 0; steps repeated: 5." in sentences.headline(first)


def test_a_damaged_checkpoint_names_the_step_of_the_older_one_only(make: Make) -> None:
    root = make()
    run = RunDirectory(root)
    damaged = breakdown(verdict="damaged_checkpoint", cause="storage", outcome="healed")
    note(run, 1100.0, "resumed", step=20, checkpoint="step-20", cursor=160)
    note(run, 1101.0, "incident", what="closed", step=20, number=1, summary=damaged.model_dump(mode="json"))
    note(run, 9000.0, "resumed", step=50, checkpoint="step-50", cursor=400)
    (evidence,) = incidents_of(root)
    assert (evidence.back_to, evidence.healed_at) == ([20], None)


def test_time_that_nobody_noticed_is_lost_too(make: Make) -> None:
    root = make()
    crash(RunDirectory(root), 30_000.0, 1, back=0, ended={"silent": 28_800.0})
    (evidence,) = incidents_of(root)
    assert (evidence.cost.silent_seconds, evidence.cost.downtime_seconds) == (28_800.0, 21.0)
    assert evidence.cost.seconds == pytest.approx(28_821.0 + 5 * 0.5)
    assert "from the last progress until that was noticed: 8 h 0 min" in sentences.cost_explained(evidence)


def test_a_hang_was_silent_once(make: Make) -> None:
    root = make()
    note(RunDirectory(root), 1100.0, "hang", attempt=1, phase="step", waited=30.0, limit=30.0, step=45)
    crash(RunDirectory(root), 1100.5, 1, back=0, verdict="hang", ended={"silent": 36.0})
    (evidence,) = incidents_of(root)
    assert (evidence.cost.silent_seconds, evidence.cost.downtime_seconds) == (30.0, 21.0)


def test_a_stop_that_was_asked_for_is_no_outage(make: Make) -> None:
    root = make()
    run = RunDirectory(root)
    crash(run, 1100.0, 1, back=0)
    closed = (root / "journal.jsonl").read_text().splitlines()[-1]
    (root / "journal.jsonl").write_text(
        "\n".join((root / "journal.jsonl").read_text().splitlines()[:-1]) + "\n"
    )
    note(run, 1130.0, "ended", attempt=2, code=75, what="", failure="", silent=1.0)
    note(run, 90_000.0, "launched", attempt=3)
    note(run, 90_010.0, "training", step=46, cursor=368, world=2)
    note(
        run,
        90_020.0,
        "incident",
        **{k: v for k, v in json.loads(closed).items() if k not in ("time", "event")},
    )
    (evidence,) = incidents_of(root)
    assert evidence.cost.downtime_seconds == 21.0


@pytest.mark.quick("data*")
@pytest.mark.parametrize(
    ("cause", "said"),
    [("data", "the same failure at the same place"), ("hardware", "one host fails among several")],
)
def test_what_a_supervisor_concludes_is_not_called_what_attribution_does(
    make: Make, cause: str, said: str
) -> None:
    positions = [(232, 240)] if cause == "data" else []
    known = breakdown(cause=cause, positions=positions, reasons=["3 times in a row"]).model_dump(mode="json")
    root = make()
    note(RunDirectory(root), 1100.0, "incident", what="closed", number=1, summary=known)
    (folder,) = write_incidents(root)
    texts = [(folder / name).read_text() for name in ("report.html", "postmortem.md")]
    for text in texts:
        assert said in text
        assert not any(
            word in text for word in ("guilty", "Guilty", "good state", "same data on the same state")
        )
    assert ("Skipped positions: 232-239" in texts[1]) == (cause == "data")
    assert not (folder / "tokens.png").exists()


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([SkipEntry(first=232, end=240, reason="a crash")], "Skipped: 8 samples."),
        (
            [SampleEntry(corpus="c", fingerprint="f", tokens=[[0, 9]], reason="a crash", incident=1)],
            "Skipped in this and every later epoch: 8 samples.",
        ),
    ],
)
def test_what_was_skipped_by_position_is_not_said_to_stay_out(
    make: Make, entries: list[AnyEntry], said: str
) -> None:
    """A supervisor of before wrote positions, and no incident."""
    root, known = make(), breakdown(cause="data", positions=[(232, 240)]).model_dump(mode="json")
    note(RunDirectory(root), 1100.0, "incident", what="closed", number=1, summary=known)
    append_all(root / "skips.jsonl", entries)
    (evidence,) = incidents_of(root)
    assert said in sentences.headline(evidence)


# Logs


@pytest.fixture
def hang(make: Make) -> Path:
    """128 ranks that hang, of which the one with the number 64 stands elsewhere, and 3 that said why."""
    root = make()
    folder = root / "logs/attempt-0001"
    folder.mkdir(parents=True)
    (root / "logs/attempt-0001.log").write_text("a line\n" * 400_000)
    for rank in range(128):
        where = "wait" if rank == 64 else "all_reduce"
        stack = f"Thread 0x{rank:x} (most recent call first):\n" + f'  File "x.py", line 5 in {where}\n' * 50
        (folder / f"rank-{rank}.stacks").write_text(
            f"rank {rank} on node-{rank // 8}, process {rank}\n\n{stack}"
        )
    for rank, time, error in (
        (9, 7.0, "peer 3 is gone"),
        (100, 5.0, "OutOfMemory"),
        (10, 6.0, "peer 4 is gone"),
    ):
        known = {
            "rank": rank,
            "host": "n",
            "pid": 1,
            "time": time,
            "step": 5,
            "cursor": 40,
            "code": 1,
            "where": "a:1",
        }
        (folder / f"rank-{rank}.json").write_text(json.dumps(known | {"error": error, "alone": True}))
    paths = ["logs/attempt-0001.log", *sorted(f"logs/attempt-0001/{path.name}" for path in folder.iterdir())]
    hung = breakdown(verdict="hang", evidence=paths)
    note(
        RunDirectory(root), 1100.0, "incident", what="opened", number=1, summary=hung.model_dump(mode="json")
    )
    return root


def test_of_many_ranks_what_differs_is_shown_once_and_in_order(hang: Path) -> None:
    (evidence,) = incidents_of(hang)
    assert [(log.file, log.ranks) for log in evidence.logs] == [
        ("log-attempt-0001.log", ""),
        ("log-attempt-0001-rank-100.json", "rank 100"),  # the first cause
        ("log-attempt-0001-rank-10.json", "ranks 9-10"),
        ("log-attempt-0001-rank-0.stacks", "ranks 0-63, 65-127"),
        ("log-attempt-0001-rank-64.stacks", "rank 64"),
    ]
    assert [t.text for t in sentences.follow_ups(evidence) if t.command.startswith("less")] == [
        "Read the log, and the stacks below: where every rank stood."
    ]


def test_the_evidence_has_the_tails_of_logs_only(hang: Path) -> None:
    (folder,) = write_incidents(hang)
    evidence = Evidence.model_validate_json((folder / "evidence.json").read_bytes())
    assert len(evidence.logs[0].tail.splitlines()) == TAIL
    assert (
        (folder / "evidence.json").stat().st_size < 30_000 < (folder / evidence.logs[0].file).stat().st_size
    )
    text = (folder / "postmortem.md").read_text()
    assert "rank-0.stacks`, the same of ranks 0-63, 65-127 (" in text
    assert len(list(folder.glob("log-*"))) == 5


def test_of_logs_that_all_differ_some_are_shown(tmp_path: Path) -> None:
    for rank in range(30):
        (tmp_path / f"rank-{rank}.stacks").write_text(f"rank {rank}\n\nstands at {'x' * rank}")
    (tmp_path / "sub").mkdir()
    shown, problems = logs(
        tmp_path, "logs", [f"rank-{rank}.stacks" for rank in range(30)] + ["sub", "a\0b", ""]
    )
    assert [log.ranks for log in shown] == [f"rank {rank}" for rank in range(12)]
    assert len(problems) == 4 and problems[-1].startswith("18 more logs, all different")
