"""What the supervisor does about every way in which processes can end; they are small programs here, told how to end.

With real training: test_supervisor.py and the drills.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megastable.base import durable, errors
from megastable.base.errors import ConfigError, DataError, SpaceError
from megastable.cluster import launcher, this_host
from megastable.cluster.launcher import TrainingCommand
from megastable.data.corpora import open_corpora
from megastable.data.skip_ledger import Ledger, read_ledger
from megastable.data.skips import Selection
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.supervisor_events import (
    Ended,
    Hang,
    HostLeftOut,
    Launched,
    SupervisorEvent,
)
from megastable.run.goodput.time_account import TimeKind
from megastable.run.goodput.watching import read_account
from megastable.run.rank_ipc import FLAG
from megastable.supervise import process_incidents, rank_files
from megastable.supervise import supervisor as module
from megastable.supervise.supervisor import Supervisor
from megastable.supervise.supervisor_journal import SupervisorJournal
from tests.conftest import tiny, write_corpus
from tests.journal import note
from tests.patience import PATIENCE
from tests.supervise.runs import Quiet

# What stands in for the training: trains from step `begin` to `until`, a hundredth of a second each, then ends.
# It imports nothing of ours: that would take ten times longer than the rest of it.
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
mark = next(a for a in sys.argv if a.startswith("--supervised="))
number, root = mark.removeprefix("--supervised=").split("@")
number, told = int(number), json.loads(Path(root, "plan.json").read_text())
journal, control, progress, logs = (Path(path) for path in told["paths"])
def note(event, **fields):
    with journal.open("a") as file:
        file.write(json.dumps({"time": time.time() + plan.get("ahead", 0), "event": event, **fields}) + "\\n")
plan = told["attempts"]
plan = plan[min(number, len(plan)) - 1]
assert json.loads(control.read_text())["attempt"] == number
supervisor = os.getppid()
if "asked" in plan:
    os.kill(os.getpid(), plan["asked"])
while plan.get("obeys") and not json.loads(control.read_text()).get("stop"):
    time.sleep(0.01)
if "tells" in plan:
    time.sleep(plan["tells"])
    os.kill(supervisor, signal.SIGTERM)
    time.sleep(0.4)
if "begin" in plan:
    note("training", step=plan["begin"])
    for step in range(plan["begin"], plan["until"] + 1):
        facts = {"attempt": number, "pid": os.getpid(), "host": "here", "time": 0, "phase": "step", "world": 1}
        facts |= {"steps": 99, "step": step, "cursor": 8 * step, "seconds": 0.01}
        facts |= {"time": time.time() + plan["ahead"]} if "ahead" in plan else {}
        progress.with_suffix(".tmp").write_text(json.dumps(facts))
        os.replace(progress.with_suffix(".tmp"), progress)
        time.sleep(0.01)
if "faulty" in plan:
    note("host_faulty", step=9, hosts=plan["faulty"], ranks=[1], reason="it computes wrong")
if "event" in plan:
    note(plan["event"])
for old, new in plan.get("moves", []):
    os.replace(old, new)
if "words" in plan:
    (logs / f"attempt-{number:04d}").mkdir(exist_ok=True)
    words = {"rank": 0, "host": plan.get("host", "here"), "pid": 1, "time": 0, "step": plan["until"], "alone": True}
    words |= {"cursor": 8 * plan["until"], "code": plan["code"], "error": plan["words"], "where": "data.py:7"}
    (logs / f"attempt-{number:04d}/rank-0.json").write_text(json.dumps(words))
if plan.get("hang"):
    time.sleep(60)
print(plan.get("prints", "the last line"), flush=True)
os._exit(plan.get("code", 0))
"""


class Ladder:
    def __init__(self, corpus: Path, folder: Path) -> None:
        self.run, self.quiet = RunDirectory(folder), Quiet()
        self.overrides: list[str] = []
        self.commands: list[list[str]] = []  # what attempts were started with
        self.config = tiny(
            corpus, folder, supervise={"hang_floor": 1.0, "hang_unknown": 30.0, "backoff_seconds": 0.1}
        )

    def supervisor(self, *hosts: str) -> Supervisor:
        """hosts: the names of several."""
        training = TrainingCommand("recipe.yaml", self.overrides)
        here = this_host.Here(self.run, training)
        here.names = list(hosts) or here.names
        return Supervisor(self.config, self.run, self.quiet, training, lambda store: here)

    def plan(self, *attempts: dict[str, Any]) -> None:
        """What the programs do, the last one again and again."""
        run = self.run
        paths = [str(path) for path in (run.journal, run.control, run.progress, run.logs)]
        (run.root / "plan.json").write_text(json.dumps({"paths": paths, "attempts": attempts}))

    def __call__(
        self, *plan: dict[str, Any], hosts: tuple[str, ...] = ()
    ) -> tuple[int, list[dict[str, Any]]]:
        """Exit code, and the ends of all attempts."""
        self.plan(*plan)
        code = self.supervisor(*hosts).supervise_run()
        return code, list(self.run.iterate_events(Ended))

    def incidents(self) -> list[tuple[str, str, str, str]]:
        found = {e["number"]: e["summary"] for e in self.run.iterate_events(IncidentEvent)}
        return [(i["verdict"], i["cause"], i["kind"], i["outcome"]) for i in found.values()]


@pytest.fixture
def ladder(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ladder]:
    def command(run: RunDirectory, number: int, *rest: Any) -> list[str]:
        ladder.commands.append(launcher.build_attempt_command(run, number, *rest))
        return [sys.executable, "-c", PROGRAM, f"{FLAG}={number}@{run.root}"]

    ladder = Ladder(corpus, tmp_path)
    monkeypatch.setattr(this_host, "build_attempt_command", command)
    monkeypatch.setattr(module, "LOOK", 0.05)  # its programs live for a few tenths of a second
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield ladder
    for number, handler in before.items():
        signal.signal(number, handler)


FINISHED = {"begin": 5, "until": 20, "event": "finished"}


def test_supervisor_restarts_after_a_crash(ladder: Ladder) -> None:
    crash = {"begin": 0, "until": 7, "code": 1, "words": "RuntimeError: boom"}
    code, ends = ladder(crash, FINISHED)
    assert code == errors.OK and [e["code"] for e in ends] == [1, 0]
    assert (ends[0]["step"], ends[0]["cursor"], ends[0]["clock"]) == (8, 56, 7)
    assert ladder.incidents() == [("crash", "process", "recoverable", "healed")]
    told = next(e["summary"] for e in ladder.run.iterate_events(IncidentEvent) if e["what"] == "closed")
    assert told["steps_lost"] == 2 and told["seconds"] > 0
    assert told["failure"] == "rank 0 on here ended with: RuntimeError: boom (data.py:7)"
    assert "the last line" in ladder.quiet.said
    assert json.loads(ladder.run.control.read_text())["attempt"] == 3  # ranks of it elsewhere must end
    assert list(ladder.run.iterate_events(SupervisorEvent))[-1]["code"] == 0


STOPPED = {"begin": 5, "until": 6, "event": "stopped", "code": errors.STOPPED}


@pytest.mark.parametrize("first", ["the launcher", "run.max_hours"])
def test_supervisor_gives_ranks_the_time_to_save_if_one_stop_comes_twice(ladder: Ladder, first: str) -> None:
    """A scheduler signals all processes one after the other; and hours that have passed are no signal."""
    plan = STOPPED | {"obeys": True, "tells": 0.6}
    if first == "the launcher":
        plan |= {"asked": signal.SIGTERM}
    else:
        ladder.config = ladder.config.model_copy(
            update={"run": ladder.config.run.model_copy(update={"max_hours": 0.5 / 3600})}
        )
    code, _ = ladder(plan)
    reason = list(ladder.run.iterate_events(SupervisorEvent))[-1]["reason"]
    assert (code, reason) == (errors.STOPPED, "stopped as asked, with a checkpoint")


def test_supervisor_skips_a_step_that_fails_again_and_then_gives_up(ladder: Ladder) -> None:
    crash = {"begin": 0, "until": 7, "code": 1, "words": "ValueError: a bad sample"}
    code, ends = ladder(crash)
    assert code == errors.UNSTABLE and len(ends) == 4
    (entry,), c = read_ledger(ladder.run.skips), ladder.config
    order = open_corpora(c.data.corpora, c.model.sequence_length, c.run.seed).train.order
    chosen = Selection(order, Ledger([entry]).exclusions)
    batch = list(range(56, 56 + c.train.global_batch))
    assert chosen.named_between(0, order.sequences[0]).tolist() == batch and entry.step == 8
    told = [e["summary"] for e in ladder.run.iterate_events(IncidentEvent)]
    assert told[-1]["positions"] == [[56, 56 + c.train.global_batch]]
    assert ladder.incidents() == [("crash", "code", "divergent", "stopped")]
    assert "with other data, too" in list(ladder.run.iterate_events(SupervisorEvent))[-1]["reason"]


@pytest.mark.slow
def test_supervisor_killed_when_it_has_skipped_skips_no_second_batch(
    ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch behind the first one is harmless."""

    class Killed(BaseException): ...

    real, killed = SupervisorJournal.journal_event, False

    def emit(self: SupervisorJournal, event: Event, say: bool | str = False) -> None:
        nonlocal killed
        killed = killed or bool(event.get("skipped"))
        if killed:
            raise Killed
        real(self, event, say)

    crash = {"begin": 0, "until": 7, "code": 1, "words": "ValueError: a bad sample"}
    with monkeypatch.context() as patch:
        patch.setattr(SupervisorJournal, "journal_event", emit)
        with pytest.raises(Killed):
            ladder(crash)
    (entry,) = read_ledger(ladder.run.skips)
    code, ends = ladder(crash, crash, crash, FINISHED)
    assert code == errors.OK and read_ledger(ladder.run.skips) == [entry]
    assert ends[-2]["skipped"] == [[56, 56 + ladder.config.train.global_batch]]
    incident = list(ladder.run.iterate_events(IncidentEvent))[-1]
    assert incident["number"] == entry.incident and ladder.incidents()[-1][1] == "data"
    assert incident["summary"]["positions"] == ends[-2]["skipped"]


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ({"code": 2}, errors.BAD_INPUT),
        ({"begin": 0, "until": 3, "event": "stopped", "code": 75}, errors.STOPPED),
        ({"begin": 0, "until": 3, "event": "unstable", "code": 76}, errors.UNSTABLE),
    ],
)
def test_supervisor_tries_nothing_again_that_would_not_change(
    ladder: Ladder, plan: dict[str, Any], code: int
) -> None:
    found, ends = ladder(plan)
    assert found == code and len(ends) == 1 and ladder.incidents() == []


def test_supervisor_leaves_out_a_host_that_computes_wrong(ladder: Ladder) -> None:
    """A spare takes its place; where nobody can, the run goes on with it, and finds it again."""
    spares = ladder.config.supervise.model_copy(update={"spares": 1})
    ladder.config = ladder.config.model_copy(update={"supervise": spares})
    wrong = {"begin": 0, "until": 9, "faulty": ["second"], "event": "handover", "code": 78}
    code, _ = ladder(wrong, wrong | {"faulty": ["third"]}, FINISHED, hosts=("first", "second", "third"))
    assert code == errors.OK
    (left,) = ladder.run.iterate_events(HostLeftOut)
    assert (left.host, left.wholly, left.reason) == ("second", True, "computes wrong")
    lineups = [list(event.hosts) for event in ladder.run.iterate_events(Launched)]
    assert lineups == [["first", "second"], ["first", "third"], ["first", "third"]]


@pytest.mark.slow
def test_supervisor_ends_a_hang_and_keeps_what_is_known_of_it(
    ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_files, "STACKS", 0.5)  # it leaves none
    code, ends = ladder({"begin": 0, "until": 9, "hang": True}, FINISHED)
    assert code == errors.OK and ends[0]["hung"] and ends[0]["what"] == "hang in step"
    assert ends[0]["code"] != 0, "by itself it would have slept for a minute, and ended with 0"
    (hang,) = ladder.run.iterate_events(Hang)
    assert hang["phase"] == "step" and hang["step"] == 9
    assert ladder.incidents() == [("hang", "process", "recoverable", "healed")]


def test_supervisor_leaves_a_finished_run_alone_and_goes_on_with_a_longer_one(ladder: Ladder) -> None:
    ladder.run.summary.write_text(json.dumps({"steps": ladder.config.train.steps}))
    assert ladder({"code": 2}) == (errors.OK, []) and not list(ladder.run.iterate_events(SupervisorEvent))
    ladder.run.summary.write_text(json.dumps({"steps": ladder.config.train.steps - 1}))
    assert ladder({"code": 2})[0] == errors.BAD_INPUT


@pytest.mark.slow
def test_supervisor_finds_attempts_that_still_run_by_their_mark(ladder: Ladder) -> None:
    """A supervisor that was killed leaves its processes; another takes the newest over, and ends the others."""
    ladder.plan({"begin": 0, "until": 0, "hang": True}, FINISHED | {"until": 150})
    old = []
    for number in (1, 2):
        note(ladder.run, "supervisor", what="started", pid=1, host="gone")
        note(ladder.run, "launched", attempt=number, command=[], log="x")
        ladder.run.control.write_text(json.dumps({"attempt": number}))
        pid = os.spawnv(
            os.P_NOWAIT, sys.executable, [sys.executable, "-c", PROGRAM, f"{FLAG}={number}@{ladder.run.root}"]
        )
        old.append(pid)
        until = time.monotonic() + PATIENCE
        while ladder.supervisor().ranks.read_progress(number) is None:
            assert time.monotonic() < until
            time.sleep(0.01)
    code = ladder.supervisor().supervise_run()
    ended = [os.waitpid(pid, 0)[1] for pid in old]
    assert code == errors.OK and ended == [signal.SIGKILL, 0]
    assert len(list(ladder.run.iterate_events(Launched))) == 2  # nothing was done twice
    assert [e["what"] for e in ladder.run.iterate_events(SupervisorEvent)][2:] == ["took over", "ended"]
    assert ladder.incidents() == [("crash", "process", "recoverable", "healed")]


def refusing(times: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A disk that is full for a while."""
    left, append = [times], durable.append_line

    def attempt(path: Path, line: str) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise DataError(f"{path} could not be written: no space left on device")
        append(path, line)

    monkeypatch.setattr(durable, "append_line", attempt)
    return lambda: left[0]


def test_supervisor_waits_for_a_full_disk_and_loses_nothing(
    ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(3, monkeypatch)
    supervisor = ladder.supervisor()
    supervisor.journal.journal_event(Ended(attempt=1))
    assert [e["attempt"] for e in ladder.run.iterate_events(Ended)] == [1]
    assert sum("make room" in line for line in ladder.quiet.said) == 1
    refusing(10**6, monkeypatch)
    supervisor.stopping = True
    with pytest.raises(SpaceError, match="make room"):
        supervisor.journal.journal_event(Ended(attempt=2))


def test_supervisor_stops_at_a_shard_cut_in_mid_run_and_goes_on_after_the_restore(
    ladder: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attempt would be refused at its start: the second one does not begin before the file is back."""
    monkeypatch.setattr(process_incidents, "RECHECK", 0.0)
    write_corpus(tmp_path / "data")
    ladder.config = tiny(tmp_path / "data", ladder.run.root, supervise={"backoff_seconds": 0.1})
    shard = tmp_path / "data/part-0.bin"
    whole, short = shard.read_bytes(), tmp_path / "short.bin"
    short.write_bytes(whole[: len(whole) // 8])
    cut: dict[str, Any] = {
        "begin": 0,
        "until": 7,
        "code": 2,
        "words": f"DataError: {shard} became shorter: restore it",
    }
    cut["moves"] = [[str(short), str(shard)]]
    code, ends = ladder(cut, FINISHED)
    assert code == errors.BAD_INPUT and len(ends) == 1
    assert ladder.incidents() == [("crash", "storage", "divergent", "stopped")]
    (told,) = {
        e["summary"]["reasons"][-1] for e in ladder.run.iterate_events(IncidentEvent) if e["what"] == "closed"
    }
    assert "restore it" in told and "luck" not in told and "transient" not in told
    assert any(line.startswith("ended with code 2: ") and "restore it" in line for line in ladder.quiet.said)
    shard.write_bytes(whole)
    code, ends = ladder(cut, FINISHED)
    assert code == errors.OK and [e["code"] for e in ends] == [2, 0]


def test_supervisor_puts_a_secret_into_no_file_and_no_argument(ladder: Ladder) -> None:
    hook = "https://localhost:1/services/hunter2"
    ladder.overrides = [f"supervise.webhook={hook}"]
    parts = ladder.config.supervise.model_copy(update={"webhook": hook})
    ladder.config = ladder.config.model_copy(update={"supervise": parts})
    assert ladder(FINISHED)[0] == errors.OK
    assert any("supervise.webhook=https://localhost:1/<redacted>" in given for given in ladder.commands)
    files = [path for path in ladder.run.root.rglob("*") if path.is_file()]
    assert len(files) > 5 and not [path for path in files if b"hunter2" in path.read_bytes()]
    assert "hunter2" not in str(ladder.commands)


def test_supervisor_adopts_a_run_that_finished_while_nobody_watched(ladder: Ladder) -> None:
    note(ladder.run, "supervisor", what="started", pid=1, host=socket.gethostname())
    note(ladder.run, "launched", attempt=1, command=[], log="x")
    note(ladder.run, "finished", steps=99)
    ladder.run.summary.write_text(json.dumps({"steps": ladder.config.train.steps}))
    code, ends = ladder({"code": 1})
    assert code == errors.OK and [e["code"] for e in ends] == [0]
    assert len(list(ladder.run.iterate_events(Launched))) == 1
    assert ladder({"code": 1}) == (errors.OK, ends)  # and now there is nothing to do


def test_supervisor_mends_a_failure_that_another_one_did_not(ladder: Ladder) -> None:
    """The supervisor was killed after it had noted the end, and before it did anything about it."""
    crash = {"begin": 0, "until": 7, "code": 1, "words": "RuntimeError: boom"}
    emit = SupervisorJournal.journal_event

    def dies(self: Supervisor, *rest: Any) -> None:
        raise ConnectionError("killed")

    def silent(self: SupervisorJournal, event: Event, say: bool | str = False) -> None:
        if event.get("what") != "ended":
            emit(self, event, say)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Supervisor, "_mend", dies)
        patch.setattr(SupervisorJournal, "journal_event", silent)
        with pytest.raises(ConnectionError):
            ladder(crash, FINISHED)
    assert ladder.incidents() == []
    assert ladder(crash, FINISHED)[0] == errors.OK
    assert ladder.incidents() == [("crash", "process", "recoverable", "healed")]


def test_supervisor_leaves_alone_processes_on_another_host(ladder: Ladder) -> None:
    note(ladder.run, "supervisor", what="started", pid=1, host="login-7")
    ladder.run.lock_run()
    with pytest.raises(ConfigError, match="ran on login-7, and its processes still train"):
        ladder({"code": 1})


@pytest.mark.quick("3600.0")
@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_supervisor_measures_the_clock_of_rank_0_for_every_attempt(
    ahead: float, ladder: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = {"first": ahead, "here": ahead}
    monkeypatch.setattr(this_host.Here, "clock_offset", lambda self, name: clocks.get(name, 7.0))
    crash = {"begin": 0, "until": 7, "code": 1, "words": "RuntimeError: boom", "ahead": ahead}
    code, _ = ladder(crash, FINISHED | {"ahead": ahead}, hosts=("first", "second"))
    assert code == errors.OK and [e["ahead"] for e in ladder.run.iterate_events(Launched)] == [ahead, ahead]
    assert all(0 <= e["silent"] < PATIENCE for e in ladder.run.iterate_events(Ended))
    account, _ = read_account(ladder.run.root)
    seconds = account.sum_seconds()
    first = next(ladder.run.iterate_events(Launched)).time or 0.0
    assert first < account.end <= time.time() < first + 1800
    assert seconds[TimeKind.TRAINING] > 0  # the steps take a hundredth of a second each: no more is known
    assert sum(seconds.values()) == pytest.approx(account.wall)
