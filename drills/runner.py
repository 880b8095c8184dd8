"""Run drills: real runs with planted faults, a few ranks on the CPU, under the supervisor."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psutil
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from drills.exercise import Watch
from drills.scenario import SEARCH, VARIABLE, Outside, Plan, Scenario
from drills.score import Score, find_fate, score_run
from drills.stage import Stage
from megastable.base import durable
from megastable.base.errors import MegastableError
from megastable.base.process import ROOT
from megastable.data.manifest import Manifest
from megastable.data.plant import Planted
from megastable.run.directory import RunDirectory

GONE_SECONDS = 10.0  # after SIGKILL; a process still alive then is stuck in the kernel
WORKER = "drills.worker"
POLL = 0.1
LIMIT = 1200.0  # seconds of a run; alone on two cores, each takes less than a tenth

CODE = tuple(ROOT / name for name in ("megastable", "guard", "tools", "drills"))
# Code without influence on the runs: it may change between the runs of a table.
JUDGED = ("exercise", "learning", "score", "court", "court_scenarios")
JUDGING = {ROOT / "drills" / f"{name}.py" for name in JUDGED}
PREPARING = threading.Lock()  # parallel runs share corpora
POISONS: dict[Outside | None, Literal["weight", "second_moments"]] = {
    "poison_weight": "weight",
    "poison_moments": "second_moments",
}


class Done(BaseModel):
    """Facts of a drilled run that are not in its directory. conditions: a hash of everything that decided it. struck:
    time of the fault from outside, in unix time. exit: the exit code of the started process, None if it is gone and the
    ranks continued. planted: the corruption of its corpus."""

    model_config = ConfigDict(extra="forbid")

    conditions: str
    planted: Planted | None
    struck: float | None
    exit: int | None
    wall_seconds: float


def run_drill(stage: Stage, scenario: Scenario, watch: Watch, jobs: int = 1, guarded: bool = True) -> Score:
    """One run from its start to its end, or its existing results. Leaves no process behind.

    watch: called repeatedly with the step; an exception in it ends the run. jobs: number of runs that share the
    machine. guarded: False: with the guard off, to see what the fault does by itself. Raises MegastableError for a run
    that does not start.
    """
    with PREPARING:
        corpus_folder, planted = stage.corpus_of(scenario)
    run = stage.name_run(scenario.name, guarded)
    wanted_plan = Plan(
        run=run.root,
        seed=stage.seed,
        fault=scenario.fault and scenario.fault.with_ranks(stage.ranks),
    )
    run_overrides = [*scenario.overrides, *stage.settings, f"stability.enabled={json.dumps(guarded)}"]
    run_overrides += [f"run.dir={run.root}", f"data.corpora=[{{path: {corpus_folder}}}]"]
    conditions_hash = conditions(stage, scenario, wanted_plan, run_overrides, corpus_folder)
    done = read_done(run)
    if done is None or done.conditions != conditions_hash:
        done = _run(stage, scenario, wanted_plan, run_overrides, conditions_hash, planted, watch, jobs)
    return score_run(
        run.root, scenario, stage.seed, find_fate(run.root, done.planted), struck=done.struck, code=done.exit,
        wall_seconds=done.wall_seconds,
    )  # fmt: skip


def conditions(stage: Stage, scenario: Scenario, plan: Plan, overrides: list[str], corpus: Path) -> str:
    """A hash of everything that decides a run: its settings, its data, its fault, and the code."""
    source_files = sorted(path for part in CODE for path in part.rglob("*.py") if path not in JUDGING)
    told = xxhash.xxh3_128(stage.recipe.read_bytes())
    settings = [overrides, scenario.outside, scenario.step, stage.ranks]
    told.update(
        json.dumps([*settings, plan.model_dump_json(), Manifest.load_manifest(corpus).fingerprint()]).encode()
    )
    for path in source_files:
        told.update(path.read_bytes())
    return told.hexdigest()


def read_done(run: RunDirectory) -> Done | None:
    """The facts written when the run ended; None if it did not, or they cannot be read."""
    try:
        return Done.model_validate_json(_beside(run, ".done").read_bytes())
    except (OSError, ValidationError):
        return None


def _beside(run: RunDirectory, ending: str) -> Path:
    return run.root.with_name(run.root.name + ending)


def _run(
    stage: Stage, scenario: Scenario, wanted: Plan, overrides: list[str], told: str, planted: Planted | None,
    watch: Watch, jobs: int,
) -> Done:  # fmt: skip
    run = RunDirectory(wanted.run)
    plan, log_path, note, search = (_beside(run, ending) for ending in (".json", ".log", ".done", SEARCH))
    for file in (note, log_path, search):
        file.unlink(missing_ok=True)
    shutil.rmtree(run.root, ignore_errors=True)
    run.root.mkdir(parents=True)
    plan.write_text(wanted.model_dump_json(indent=1))
    begin_time = time.monotonic()
    command_words = command(stage.recipe, overrides, stage.ranks)
    with Family(plan, command_words, log_path, environment(stage.ranks * jobs)) as family:
        struck = _attend(family, run, scenario, stage.ranks, watch)
        code = family.parent.poll()
    seconds = time.monotonic() - begin_time
    if not step_of(run) and not run.summary.exists():
        last_lines = log_path.read_text(errors="replace").strip().splitlines()[-5:]
        raise MegastableError(
            f"{run.root.name} ended before its first step. The end of its log:\n" + "\n".join(last_lines)
        )
    done = Done(conditions=told, planted=planted, struck=struck, exit=code, wall_seconds=round(seconds, 1))
    durable.write_output(note, done.model_dump_json(indent=1) + "\n")
    return done


def command(recipe: Path, overrides: list[str], ranks: int) -> list[str]:
    """The command of a run, under the supervisor."""
    supervise = str(ROOT / "launch/supervise.py")
    return [
        sys.executable, supervise, "--module", WORKER, str(recipe), *overrides, "--", "--num_gpus", str(ranks)
    ]  # fmt: skip


def environment(processes: int) -> dict[str, str]:
    """processes: number that share the cores."""
    core_count = len(os.sched_getaffinity(0))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # to find the worker
    thread_count = str(max(1, min(8, core_count // processes)))
    return {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": thread_count, "PYTHONPATH": path}


def _attend(family: Family, run: RunDirectory, scenario: Scenario, ranks: int, watch: Watch) -> float | None:
    """Follow a run to its end, and inflict the scenario's fault from outside; returns its unix time."""
    struck, end_time = None, time.monotonic() + LIMIT
    while time.monotonic() < end_time:
        is_over = family.parent.poll() is not None
        last_step = step_of(run)
        watch(last_step)
        if (
            scenario.outside is not None
            and struck is None
            and last_step >= scenario.step
            and strike(family, run, scenario, ranks - 1)
        ):
            struck = time.time()
            continue
        if is_over and scenario.outside == "kill_parent" and struck is not None:
            if not run.summary.exists() and family.parent.returncode == -signal.SIGKILL:
                family.start()  # as the service manager of the machine would
                continue
            is_over = not any(True for _ in family.members())  # the ranks may go on as orphans
        if is_over:
            break
        time.sleep(POLL)
    return struck


def step_of(run: RunDirectory) -> int:
    """Steps done so far, by rank 0's report."""
    try:
        return int(json.loads(run.progress.read_text())["step"] or 0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def strike(family: Family, run: RunDirectory, scenario: Scenario, victim: int) -> bool:
    """Whether it succeeded: processes may be missing at the moment. victim: the rank to kill or stop."""
    if scenario.outside == "kill_parent":
        family.parent.kill()
        family.parent.wait()
        return True
    if scenario.outside == "damage_checkpoint":
        # Not at the top: it imports torch, which takes longer than the rest of this tool.
        from megastable.checkpoint.store import newest_first

        damage(newest_first(run.checkpoints)[:1])
    if scenario.outside in POISONS:
        from drills.poison import poison_checkpoint

        poison_checkpoint(run.checkpoints, POISONS[scenario.outside])
    return family.strike(victim, signal.SIGSTOP if scenario.outside == "stop_rank" else signal.SIGKILL)


def damage(checkpoints: list[Path]) -> None:
    """Change bytes in the middle of the largest file, as a bad disk does: size and time stay the same."""
    for checkpoint in checkpoints:
        largest_file = max(checkpoint.iterdir(), key=lambda file: file.stat().st_size)
        status_before = largest_file.stat()
        with largest_file.open("r+b") as damaged_file:
            damaged_file.seek(status_before.st_size // 2)
            middle_piece = damaged_file.read(4096)
            damaged_file.seek(status_before.st_size // 2)
            damaged_file.write(bytes(byte ^ 0xFF for byte in middle_piece))
        os.utime(largest_file, ns=(status_before.st_atime_ns, status_before.st_mtime_ns))


class Family:
    """The processes of one drilled run, found by the environment variable that all of them inherit.

    `with Family(plan, command, log) as family`: starts the command at once, and leaves no process behind.
    """

    def __init__(self, plan: Path, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._plan, self._command, self._log = str(plan), command, log
        # Ranks are identified by RANK: a process started by a launcher may itself start drills.
        own_environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        }
        self._environment = {**own_environment, **environment, VARIABLE: self._plan}
        self.parent: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wait_until = time.monotonic() + GONE_SECONDS
        # Repeatedly: a process that is being ended may be starting another.
        while (living_members := list(self.members())) and time.monotonic() < wait_until:
            for one_member in living_members:
                with suppress(psutil.Error):
                    one_member.kill()
            psutil.wait_procs(living_members, timeout=0.5)
            self.parent.poll()
        self.parent.wait()

    def start(self) -> None:
        """Start or restart the command, in a session of its own, so that Ctrl-C reaches only this process."""
        with self._log.open("ab") as log_file:
            self.parent = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log_file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def members(self) -> Iterator[psutil.Process]:
        """All living processes."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if is_alive and process.environ().get(VARIABLE) == self._plan:
                    yield process

    def rank(self, number: int) -> psutil.Process | None:
        """The process of a rank: the oldest with its RANK, which its children inherit."""
        rank_processes = []
        for process in self.members():
            with suppress(psutil.Error):
                if process.environ().get("RANK") == str(number):
                    rank_processes.append((process.create_time(), process.pid, process))
        return min(rank_processes)[2] if rank_processes else None

    def strike(self, number: int, by: signal.Signals) -> bool:
        """Send a signal to a rank; whether there was one."""
        rank_process = self.rank(number)
        if rank_process is None:
            return False
        try:
            rank_process.send_signal(by)
        except psutil.Error:
            return False
        return True
