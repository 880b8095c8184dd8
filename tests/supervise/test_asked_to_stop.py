"""A stop that was asked for is never an error: whichever process of a run hears the signal, in whatever moment."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megastable.base import errors
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


def imports(process: psutil.Process) -> bool:
    """Whether it has got to torch. In its first hundredths of a second Python makes an error of a SIGINT: code 1."""
    with suppress(OSError):
        return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    return False


def supervisor(run: Supervised) -> list[psutil.Process]:
    assert run.process is not None
    return [psutil.Process(run.process.pid)]


MOMENTS: dict[str, Callable[[Supervised], object]] = {
    "the supervisor starts": lambda run: run.process is not None and holds(run.process.pid),
    "the launcher starts": lambda run: any(map(imports, launchers(run))),
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
