"""The supervisor at work: real launchers and ranks, killed and stopped from outside; they end with the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megastable.base import errors
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.goodput.time_account import TimeKind
from megastable.run.goodput.watching import read_account
from tests.conftest import tiny
from tests.distributed import run_ranks, train
from tests.patience import PATIENCE
from tests.training.test_resume import identical

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(
    os.environ.get("MEGASTABLE_KILLS", "1")
)  # further random ones; ten were measured (docs/stability-method.md)
STEPS = 32 + 8 * KILLS


class Supervised:
    """A run under `launch/supervise.py`, with what this process does to it."""

    def __init__(self, config: RunConfig, folder: Path, steps: int) -> None:
        self.run = RunDirectory(folder / "run")
        self.recipe = folder / "recipe.yaml"
        tree = config.model_dump(mode="json") | {"supervise": {"hang_floor": 4.0, "backoff_seconds": 1.0}}
        tree["run"]["dir"] = str(self.run.root)
        tree["train"]["steps"] = steps
        self.recipe.write_text(yaml.safe_dump(tree))
        self.output = folder / "output.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *more: str) -> list[str]:
        return [sys.executable, "launch/supervise.py", str(self.recipe), *more, "--", "--num_gpus", "2"]

    def start(self) -> None:
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.command(), cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def finish(self, timeout: float = PATIENCE) -> int:
        assert self.process is not None
        return self.process.wait(timeout)

    def again(self, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*more), cwd=ROOT, text=True, capture_output=True, timeout=PATIENCE)

    def until(self, what: Callable[[], Any], timeout: float = PATIENCE) -> Any:
        end = time.monotonic() + timeout
        while not (found := what()):
            assert time.monotonic() < end, self.output.read_text()[-3000:]
            assert self.process is None or self.process.poll() is None, self.output.read_text()[-3000:]
            time.sleep(0.02)
        return found

    def progress(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.run.progress.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def at(self, step: int, attempt: int) -> None:
        """Wait until an attempt has done `step`."""
        self.until(
            lambda: self.progress().get("attempt") == attempt and (self.progress()["step"] or 0) >= step
        )

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in psutil.process_iter():
            try:
                arguments = process.cmdline()
                if (
                    any(a.startswith("--local_rank") for a in arguments)
                    and f"run.dir={self.run.root}" in arguments
                ):
                    found[int(process.environ()["RANK"])] = process
            except psutil.Error:
                continue
        return found

    def everything(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if any(str(self.run.root) in a for a in process.cmdline()) and process.pid != os.getpid():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def events(self, *names: str) -> list[Event]:
        return [e for e in self.run.iterate_events() if e.event in names]

    def healed(self, count: int) -> None:
        """Until so many incidents are over: a failure before that would belong to the one that is open."""
        self.until(lambda: [e for e in self.events("incident") if e["what"] == "closed"][count - 1 :])

    def stop_in_a_step(self, process: psutil.Process) -> None:
        """SIGSTOP to rank 0, whose progress is watched: in a save it would be waited for longer than a test can."""
        while True:
            process.suspend()
            if self.progress().get("phase") == "step":
                return
            process.resume()
            time.sleep(0.05)

    def kill(self, *processes: psutil.Process | subprocess.Popen[bytes]) -> None:
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def end(self) -> None:
        """Leave nothing behind, whatever the test came to."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for _ in range(50):
            if not (left := self.everything()):
                return
            self.kill(*left)
            time.sleep(0.1)


@pytest.fixture
def supervised(corpus: Path, tmp_path: Path) -> Iterator[Supervised]:
    found = Supervised(settings(corpus, tmp_path / "run"), tmp_path, STEPS)
    yield found
    found.end()


def settings(corpus: Path, run: Path) -> RunConfig:
    # Steps of a quarter of a second on one core: something is always under way when something is killed.
    return tiny(
        corpus, run, train={"steps": STEPS, "global_batch": 64}, checkpoint={"interval": 4, "keep": 3},
        schedule={"warmup_steps": 5, "total_steps": STEPS},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout((18 + 2 * KILLS) * PATIENCE + 60)  # for each wait of the test
def test_supervisor_ends_with_the_same_bytes_whatever_is_killed(
    supervised: Supervised, corpus: Path, tmp_path: Path
) -> None:
    s = supervised
    run_ranks(2, train, settings(corpus, tmp_path / "plain"))

    # A rank is killed
    s.start()
    s.at(6, attempt=1)
    assert s.again().returncode == errors.BAD_INPUT  # a second supervisor
    s.kill(s.ranks()[1])
    s.at(9, attempt=2)
    (failed,) = s.events("ended")
    # On a busy machine the launcher may have reaped the rank before anybody looked.
    assert failed["rank"] == 1 and "rank 1 on " in failed["failure"]
    assert (failed["what"], failed["signal"]) in (("SIGKILL", 9), ("rank lost", None))
    s.healed(1)

    # The supervisor is killed: its processes go on, and another one takes over
    assert s.process is not None
    s.kill(s.process)
    s.process.wait()
    before = s.progress()["step"]
    s.start()
    s.until(lambda: s.events("supervisor")[-1]["what"] == "took over")
    s.at(before + 2, attempt=2)
    assert len(s.events("launched")) == 2

    # A rank hangs: the other one waits for it, and leaves its stacks
    s.stop_in_a_step(s.ranks()[0])
    hang = s.until(lambda: s.events("hang"))[0]
    assert [Path(path).name for path in hang["stacks"]] == ["rank-1.stacks"]
    assert hang["silent"][0].startswith("rank 0 on ") and "stopped by a signal" in hang["silent"][0]
    stacks = (s.run.root / hang["stacks"][0]).read_text()
    assert stacks.startswith("rank 1 on ") and "train.py" in stacks
    s.at(before + 3, attempt=3)
    s.healed(3)

    # All of it is killed at once: supervisor, launcher, ranks
    s.kill(s.process, *s.everything())
    s.process.wait()
    s.start()
    s.at(before + 4, attempt=4)
    s.healed(4)

    # Asked to stop, it saves; the same command goes on
    s.process.send_signal(signal.SIGTERM)
    assert s.finish() == errors.STOPPED
    assert s.events("stopped") and not s.ranks()
    s.start()
    for attempt in range(5, 5 + KILLS):
        s.until(lambda number=attempt: s.progress().get("attempt") == number)
        if (
            attempt % 2 == 0
        ):  # once it has got further; else while it starts: five of those in a row are given up
            s.at(1 + max(e["clock"] for e in s.events("ended")), attempt)
        time.sleep(random.random())
        victim = random.choice([*s.ranks().values(), s.process])
        s.kill(victim)
        if victim is s.process:
            s.process.wait()
            s.kill(*s.everything())
            s.start()
    assert s.finish() == errors.OK, s.output.read_text()[-3000:]
    assert identical(tmp_path / f"plain/checkpoints/step-{STEPS}", s.run.checkpoints / f"step-{STEPS}") >= 3

    # All of it is told, once, and over
    incidents = {e["number"]: e["summary"] for e in s.events("incident")}
    assert list(incidents) == list(range(1, len(incidents) + 1)) and len(incidents) >= 4
    assert {i["outcome"] for i in incidents.values()} == {"healed"}
    assert [i["verdict"] for i in incidents.values()][:3] == ["crash", "crash", "hang"]
    assert {i["cause"] for i in incidents.values()} == {"process"}
    account, problems = read_account(s.run.root)
    seconds = account.sum_seconds()
    assert problems == [] and sum(seconds.values()) == pytest.approx(account.wall, rel=1e-6)
    assert seconds[TimeKind.TRAINING] > 0 and seconds[TimeKind.REDONE] > 0 and seconds[TimeKind.HANG] > 0
    assert incidents[1]["seconds"] > 0 and incidents[1]["evidence"][0] == "logs/attempt-0001.log"
    reports = [s.run.incidents / f"{number:04d}" / "postmortem.md" for number in incidents]
    assert all(path.exists() for path in reports), [str(path) for path in reports if not path.exists()]
    assert s.again().stdout.startswith("nothing to do")
    assert s.again("model.layers=3").returncode == errors.BAD_INPUT
