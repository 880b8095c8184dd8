"""Incidents of processes and files: what they cost, where the run went on, and that no sample is called bad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastable.report.postmortem import incidents_of, sentences, write_incidents
from megastable.report.postmortem.facts import collect_logs
from megastable.run.directory import RunDirectory
from megastable.run.rank_ipc import LastWords
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


def test_cost_counts_time_without_training_once(make: Make) -> None:
    root = make()
    run = RunDirectory(root)
    crash(run, 1100.0, 1, back=0)
    note(run, 1200.0, "checkpoint", step=40, name="step-40")
    crash(run, 1300.0, 2, back=40, ended={"silent": 30.0})
    first, second = incidents_of(root)
    assert (first.back_to, second.back_to) == ([0], [40])
    for evidence in (first, second):
        # The supervisor counts to the end of the first step: 21 s, of which the journal shows 20.
        assert (evidence.cost.recovery_seconds, evidence.cost.downtime_seconds) == (0.0, 21.0)
    assert first.cost.gpu_hours == pytest.approx(2 * (5 * 0.5 + 21) / 3600)
    assert (first.cost.silent_seconds, second.cost.silent_seconds) == (0.0, 30.0)
    assert second.cost.seconds == pytest.approx(5 * 0.5 + 21 + 30)
    assert "The run resumed from step 0; steps repeated: 5." in sentences.write_headline(first)


@pytest.mark.quick("data*")
@pytest.mark.parametrize(
    ("cause", "said"),
    [("data", "the same failure at the same place"), ("hardware", "one host fails among several")],
)
def test_report_does_not_call_a_supervisors_conclusion_a_bad_sample(
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
            word in text
            for word in ("were bad", "was bad", "Bad pos", "good state", "same data on the same state")
        )
    assert ("Skipped positions: 232-239" in texts[1]) == (cause == "data")
    assert not (folder / "tokens.png").exists()


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
    errors = ((9, 7.0, "peer 3 is gone"), (100, 5.0, "OutOfMemory"), (10, 6.0, "peer 4 is gone"))
    for rank, time, error in errors:
        words = LastWords(rank=rank, host="n", pid=1, time=time, step=5, cursor=40, code=1, error=error, where="a:1",
                          alone=True)  # fmt: skip
        (folder / f"rank-{rank}.json").write_text(words.model_dump_json())
    paths = ["logs/attempt-0001.log", *sorted(f"logs/attempt-0001/{path.name}" for path in folder.iterdir())]
    hung = breakdown(verdict="hang", evidence=paths).model_dump(mode="json")
    note(RunDirectory(root), 1100.0, "incident", what="opened", number=1, summary=hung)
    return root


def test_logs_of_many_ranks_show_once_what_differs(hang: Path) -> None:
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


def test_logs_that_all_differ_are_shown_in_part(tmp_path: Path) -> None:
    for rank in range(30):
        (tmp_path / f"rank-{rank}.stacks").write_text(f"rank {rank}\n\nstands at {'x' * rank}")
    (tmp_path / "sub").mkdir()
    shown, problems = collect_logs(
        tmp_path, "logs", [f"rank-{rank}.stacks" for rank in range(30)] + ["sub", "a\0b", ""]
    )
    assert [log.ranks for log in shown] == [f"rank {rank}" for rank in range(12)]
    assert len(problems) == 4 and problems[-1].startswith("18 more logs, all different")
