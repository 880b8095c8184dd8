"""A stop that was asked for is never an error: whichever process of a run hears the signal, in whatever moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megastable.base import errors
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
def test_a_signal_ends_a_run_with_all_that_it_has(
    supervised: Supervised, moment: str, receiver: str, number: signal.Signals
) -> None:
    supervised.start()
    supervised.until(lambda: MOMENTS[moment](supervised))
    for process in RECEIVERS[receiver](supervised):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    code = supervised.finish()
    assert code == errors.STOPPED, supervised.output.read_text()[-3000:]
    # Nobody took it for a failure, and nothing goes on behind the back of whoever asked.
    assert not supervised.events("incident", "restart")
    assert not [process for process in supervised.everything() if process.is_running()]
    done = supervised.progress().get("step") or 0
    if done:
        assert newest(supervised) >= done
    advice = subprocess.run(
        [sys.executable, "-m", "megastable.cli", "status", str(supervised.run.root)],
        capture_output=True,
        text=True,
    )
    assert advice.returncode == errors.STOPPED and "to go on:" in advice.stdout
    assert advice.stdout.splitlines()[-1].startswith("megastable supervise ")


def newest(run: Supervised) -> int:
    """The step of the newest complete checkpoint."""
    return max(int(path.parent.name[5:]) for path in run.run.checkpoints.glob("step-*/manifest.json"))


def test_a_rank_hears_what_came_while_it_started_and_one_key_press_only_once() -> None:
    code = """if True:
        import os, signal, time
        from megastable.base.stop_signals import SAME, hold_stops
        hold_stops()
        os.kill(os.getpid(), signal.SIGINT)
        from megastable.training.startup import StopRequest
        stop = StopRequest()
        assert stop.wanted
        os.kill(os.getpid(), signal.SIGINT)  # from the launcher, too
        time.sleep(SAME)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise SystemExit(7)
        """
    assert subprocess.run([sys.executable, "-c", code]).returncode == 7


@pytest.mark.slow
def test_a_recipe_that_is_refused_is_said_though_a_stop_waits(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "megastable.train", str(tmp_path / "none.yaml")]
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with subprocess.Popen(words, env=environment, text=True, stderr=subprocess.PIPE) as rank:
        until(lambda: holds(rank.pid))
        rank.terminate()
        said = rank.communicate()[1]
    assert rank.returncode == errors.BAD_INPUT and "error: " in said and "none.yaml" in said


def test_a_hook_can_be_ended_by_a_signal(tmp_path: Path) -> None:
    """Though the supervisor lets signals wait while it starts, which is when it is told of its hooks."""
    code = """if True:
        import sys
        from megastable.base.stop_signals import hold_stops, release_stops
        hold_stops()
        from megastable.config.supervise import SuperviseConfig
        from megastable.supervise.notices import Notices
        failed = []
        hooks = Notices(SuperviseConfig(command=sys.argv[1]), lambda *problem: failed.append(problem))
        release_stops()
        hooks.notify("incident", "x", {})
        hooks.close(30)
        print(failed)
        """
    hook = tmp_path / "hook"  # no shell: some let all signals through
    hook.write_text(f"#!{sys.executable}\nimport os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    hook.chmod(0o700)
    done = subprocess.run([sys.executable, "-c", code, str(hook)], capture_output=True, text=True)
    assert done.stdout == f"[('command', 'was killed by signal {signal.SIGTERM:d}')]\n", done
