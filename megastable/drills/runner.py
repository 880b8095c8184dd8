"""Real runs with planted faults: two ranks on the CPU through the deepspeed launcher, ours under its supervisor."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megastable.checkpoint.store import newest_first
from megastable.drills.plan import Plan, Policy
from megastable.drills.processes import Family
from megastable.drills.scenarios import Scenario
from megastable.drills.score import Score, score
from megastable.drills.stage import OVERRIDES, RANKS, Stage
from megastable.errors import MegastableError
from megastable.recipe import ROOT
from megastable.rundir import RunDirectory
from megastable.supervise.processes import LAUNCHER, free_port

WORKER = "megastable.drills.worker"
VICTIM = 1  # the rank that is killed or stopped
POLL = 0.1
LIMIT = 300.0  # seconds of a run; none takes a quarter of it
HUNG = 20.0  # seconds without a step, after which a run that nobody looks after is given up

Watch = Callable[[int], None]


def drill(stage: Stage, scenario: Scenario, policy: Policy, watch: Watch) -> Score:
    """One run from its start to its end; `watch` is told the steps as they are done. Leaves no process behind.

    Raises MegastableError for a run that does not begin.
    """
    corpus, bad = stage.corpus_of(scenario)
    name = f"{scenario.name}-{policy}"
    run = RunDirectory(stage.folder / "runs" / name)
    shutil.rmtree(run.root, ignore_errors=True)
    run.root.mkdir(parents=True)
    plan, log = run.root.with_suffix(".json"), run.root.with_suffix(".log")
    log.unlink(missing_ok=True)
    wanted = Plan(policy=policy, run=run.root, seed=stage.seed, fault=scenario.fault)
    plan.write_text(wanted.model_dump_json(indent=1))
    overrides = [*OVERRIDES[policy], *scenario.overrides]
    overrides += [f"run.dir={run.root}", f"data.corpora=[{{path: {corpus}}}]"]
    begin = time.monotonic()
    with Family(plan, command(policy, stage.recipe, overrides), log, environment()) as family:
        struck = _attend(family, run, scenario, policy, watch)
    seconds = time.monotonic() - begin
    if not step_of(run) and not run.summary.exists():
        said = log.read_text(errors="replace").strip().splitlines()[-5:]
        raise MegastableError(f"{name} ended before its first step. Its last words:\n" + "\n".join(said))
    return score(run.root, scenario, policy, stage.seed, bad=bad, struck=struck, wall_seconds=seconds)


def command(policy: Policy, recipe: Path, overrides: list[str]) -> list[str]:
    """What starts a run: the supervisor for ours, the bare launcher for the others."""
    ranks = ["--num_gpus", str(RANKS)]
    if policy is Policy.OURS:
        supervise = str(ROOT / "launch/supervise.py")
        return [sys.executable, supervise, "--module", WORKER, str(recipe), *overrides, "--", *ranks]
    port = ["--master_port", str(free_port())]
    return [*LAUNCHER, *ranks, *port, "--module", WORKER, str(recipe), *overrides]


def environment() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    return {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, min(8, cores // RANKS)))}


def _attend(
    family: Family, run: RunDirectory, scenario: Scenario, policy: Policy, watch: Watch
) -> float | None:
    """Follow a run to its end, and do to it from outside what the scenario wants; when that was, in unix time."""
    struck, end = None, time.monotonic() + LIMIT
    step, moved = 0, time.monotonic()
    while time.monotonic() < end:
        over = family.parent.poll() is not None
        now = step_of(run)
        if now != step:
            step, moved = now, time.monotonic()
            watch(step)
        if (
            scenario.outside is not None
            and struck is None
            and step >= scenario.step
            and strike(family, run, scenario)
        ):
            struck, moved = time.time(), time.monotonic()
            continue
        if over and scenario.outside == "kill_parent" and struck is not None:
            if (
                policy is Policy.OURS
                and not run.summary.exists()
                and family.parent.returncode == -signal.SIGKILL
            ):
                family.start()  # as the service manager of the machine would
                continue
            over = not any(True for _ in family.members())  # the ranks may go on as orphans
        if over or (policy is not Policy.OURS and struck is not None and time.monotonic() - moved > HUNG):
            break
        time.sleep(POLL)
    return struck


def step_of(run: RunDirectory) -> int:
    """Steps done so far, as rank 0 says."""
    try:
        return int(json.loads(run.progress.read_text())["step"] or 0)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def strike(family: Family, run: RunDirectory, scenario: Scenario) -> bool:
    """Whether it could be done: processes may not be there just now."""
    if scenario.outside == "kill_parent":
        family.parent.kill()
        family.parent.wait()
        return True
    if scenario.outside == "damage_checkpoint":
        damage(newest_first(run.checkpoints)[:1])
    return family.strike(VICTIM, signal.SIGSTOP if scenario.outside == "stop_rank" else signal.SIGKILL)


def damage(checkpoints: list[Path]) -> None:
    """Change bytes in the middle of the largest file, as a bad disk does: size and time say nothing of it."""
    for checkpoint in checkpoints:
        largest = max(checkpoint.iterdir(), key=lambda file: file.stat().st_size)
        before = largest.stat()
        with largest.open("r+b") as file:
            file.seek(before.st_size // 2)
            piece = file.read(4096)
            file.seek(before.st_size // 2)
            file.write(bytes(byte ^ 0xFF for byte in piece))
        os.utime(largest, ns=(before.st_atime_ns, before.st_mtime_ns))
