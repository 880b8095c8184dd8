"""A stop that was asked for is never an error: whichever process of a run hears the signal, in whatever moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megastable.base import errors
from megastable.base.process import STOPS
from megastable.cluster.this_host import LocalAttempt
from megastable.run.directory import RunDirectory
from megastable.run.rank_ipc import FLAG, make_mark
from tests.patience import until
from tests.supervise.test_supervisor import Supervised, settings

STEPS = 24


@pytest.fixture
def supervised(corpus: Path, tmp_path: Path) -> Iterator[Supervised]:
    found = Supervised(settings(corpus, tmp_path / "run"), tmp_path, STEPS)
    yield found
    found.end()


def holds(pid: int) -> bool:
    """Whether a process lets signals that ask for a stop wait, as it does while it starts."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.partition("SigBlk:")[2].split()[0], 16) & 1 << (signal.SIGTERM - 1))
    return False


def launchers(run: Supervised) -> list[psutil.Process]:
    """The deepspeed launcher: the process that was started, and the one that has started the ranks."""
    ranks = {process.pid for process in run.ranks().values()}
    mine = [*ranks, run.process.pid if run.process is not None else 0]
    return [process for process in run.everything() if process.pid not in mine and _launches(process)]


def _launches(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any(word.startswith("deepspeed.launcher") for word in process.cmdline())
    return False


def supervisor(run: Supervised) -> list[psutil.Process]:
    assert run.process is not None
    return [psutil.Process(run.process.pid)]


MOMENTS: dict[str, Callable[[Supervised], object]] = {
    "the supervisor starts": lambda run: run.process is not None and holds(run.process.pid),
    "the launcher starts": launchers,
    "the ranks start": lambda run: (
        len(ranks := run.ranks()) == 2 and all(holds(rank.pid) for rank in ranks.values())
    ),
    "the engine is built": lambda run: run.progress().get("phase") == "starting",
    "steps": lambda run: (run.progress().get("step") or 0) >= 2,
    "a checkpoint": lambda run: run.progress().get("phase") == "checkpoint",
}
RECEIVERS: dict[str, Callable[[Supervised], list[psutil.Process]]] = {
    "the supervisor": supervisor,
    "the launcher": launchers,
    "one rank": lambda run: list(run.ranks().values())[-1:],
    "all ranks": lambda run: list(run.ranks().values()),
    "everybody": lambda run: [*supervisor(run), *launchers(run), *run.ranks().values()],
}
TABLE = [
    ("the supervisor starts", "the supervisor"),
    *(("the launcher starts", receiver) for receiver in ("the supervisor", "the launcher", "everybody")),
    *((moment, receiver) for moment in list(MOMENTS)[2:] for receiver in RECEIVERS),
]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.quick("the supervisor starts-the supervisor-*")
@pytest.mark.parametrize(("moment", "receiver"), TABLE)
def test_signal_ends_a_run_with_all_that_it_has(
    supervised: Supervised, moment: str, receiver: str, number: signal.Signals
) -> None:
    supervised.start()
    supervised.until(lambda: MOMENTS[moment](supervised))
    for process in RECEIVERS[receiver](supervised):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    assert supervised.finish() == errors.STOPPED, supervised.output.read_text()[-3000:]
    # Nobody took it for a failure, and nothing goes on behind the back of whoever asked.
    assert not supervised.events("incident", "restart")
    assert not [process for process in supervised.everything() if process.is_running()]
    if done := supervised.progress().get("step"):
        saved = supervised.run.checkpoints.glob("step-*/manifest.json")
        assert max(int(path.parent.name[5:]) for path in saved) >= done
    words = [sys.executable, "-m", "megastable.cli", "status", str(supervised.run.root)]
    advice = subprocess.run(words, capture_output=True, text=True)
    assert advice.returncode == errors.STOPPED and "to go on:" in advice.stdout
    assert advice.stdout.splitlines()[-1].startswith("megastable supervise ")


@pytest.mark.slow
def test_everybody_is_asked_and_ranks_take_longer_than_the_launcher_would_wait(
    supervised: Supervised,
) -> None:
    supervised.start()
    supervised.until(lambda: MOMENTS["steps"](supervised))
    everybody, ranks = RECEIVERS["everybody"](supervised), supervised.ranks().values()
    for rank in ranks:
        rank.suspend()
    for process in everybody:
        process.send_signal(signal.SIGTERM)
    time.sleep(35)
    for rank in ranks:
        rank.resume()
    assert supervised.finish() == errors.STOPPED, supervised.output.read_text()[-3000:]
    (stopped,) = supervised.events("stopped")
    assert (supervised.run.checkpoints / f"step-{stopped['step']}/manifest.json").exists()


def marked_processes(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if mark in process.cmdline()]


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("whom", [0, 1])
def test_launcher_holds_a_signal_that_asks_for_a_stop_and_the_attempt_tells(
    tmp_path: Path, whom: int, number: signal.Signals
) -> None:
    """DeepSpeed's launcher would kill each rank 30 seconds later, whether it has saved or not."""
    run = RunDirectory(tmp_path)
    mark = f"{FLAG}={make_mark(run, 1)}"
    sleep = "import time; time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{sleep}', *sys.argv[1:]])"
    attempt = LocalAttempt.start_launcher(run, 1, [sys.executable, "-c", parent, mark], tmp_path / "log")
    try:
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOPS)
        until(lambda: len(marked_processes(mark)) == 2 and attempt.poll_processes())
        assert not attempt.asked
        process = marked_processes(mark)[whom]
        process.send_signal(number)
        until(lambda: attempt.poll_processes() and attempt.asked)
        assert len(marked_processes(mark)) == 2
    finally:
        attempt.kill_all()


def test_signal_that_waits_for_a_rank_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that starts holds it, too: its launcher has sent it because another rank has failed."""
    run = RunDirectory(tmp_path)
    mark = f"{FLAG}={make_mark(run, 1)}"
    monkeypatch.setenv("RANK", "0")
    words = [sys.executable, "-c", "import time; time.sleep(600)", "--local_rank=0", mark]
    rank = LocalAttempt.start_launcher(run, 1, words, tmp_path / "log")
    attempt = LocalAttempt(run, 1)
    try:
        (process,) = until(lambda: marked_processes(mark))
        process.send_signal(signal.SIGTERM)
        assert attempt.poll_processes() and not attempt.asked
        assert attempt.poll_processes() and not attempt.asked  # by what the first look has found
        assert process.is_running()
    finally:
        rank.kill_all()
