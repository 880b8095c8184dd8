"""Slurm in words and decisions: what becomes of a job, how long it has, how agents are started in it. Pure.

Tried with Slurm 22.05 (tests/launch/test_slurm.py). What that showed, and this relies on:

- At the notice of a preemption, and at `scancel --signal=TERM`, only the steps get SIGTERM, which are the agents. An
  agent must tell the head to stop, and go on until the head ends it. With `--batch`, only the batch shell gets it.
- A job that Slurm is ending, to cancel or to requeue it, is COMPLETING while its script is still running.
- ExcNodeList may be changed only while a job is pending, which it is from the moment it has been requeued.
- A job that loses a node is requeued, and asks for as many nodes as it was submitted with. The lost node needs no
  exclusion: Slurm gives it to no job before it is back. With `--no-kill` the job would go on with fewer nodes, and
  never get the lost one back; without its script, if that was there, it would be RUNNING until its time limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from megastable.base.errors import HOST_GONE, OK, STOPPED

UNSET = "(null)"  # of a fact
MARGIN_SECONDS = 600.0  # before the job's end, for the last checkpoint; of a short job, a tenth
# Which task of which step a process is: true of the agent, and not of the ranks that its launcher starts. A library
# that finds them in a rank (MPI, PMI) takes it for a task of srun. What tells of the job and the node is left.
STEP_VARIABLES = re.compile(
    r"SLURM_(STEP_?.*|PROCID|LOCALID|NODEID|GTIDS|NTASKS.*|NPROCS|TASK_.*|TASKS_PER_NODE|SRUN_.*|LAUNCH_NODE_IPADDR|"
    r"CPU_BIND.*|MEM_BIND.*|DISTRIBUTION|OVERLAP|MPI_TYPE|PMI.*|UMASK|PRIO_PROCESS)|SLURM_CPUS_PER_TASK|PMI_.*|PMI2_.*|PMIX_.*"
)
FACT = re.compile(r"(?:^|\s)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)")


@dataclass(frozen=True)
class JobEnd:
    """What to do with the job: requeue it, or let it end. excluded: its new ExcNodeList, if that must change."""

    requeue: bool
    why: str
    excluded: str | None = None


def facts(line: str) -> dict[str, str]:
    """What `scontrol show job --oneliner` printed, by its names."""
    return {match[1]: match[2] for match in FACT.finditer(line.strip())}


def verdict(code: int, job: Mapping[str, str], gone: Sequence[str] = ()) -> JobEnd:
    """What becomes of a job whose supervisor ended with `code`.

    job: its facts. gone: hosts to leave out from now on, beside those that the job was told to leave out before.
    """
    if (state := job.get("JobState", "RUNNING")) != "RUNNING":
        return JobEnd(
            False, f"Slurm is ending this job already ({state}): it is cancelled, or requeued without us"
        )
    if code == STOPPED:
        return JobEnd(True, "stopped with a checkpoint")
    if code == HOST_GONE:
        before = job.get("ExcNodeList", UNSET)
        names = [*([] if before == UNSET else [before]), *gone]
        return JobEnd(True, "a host is gone", ",".join(names) if gone else None)
    return JobEnd(False, "the run is complete" if code == OK else "requeueing would change nothing")


def hours_left(environment: Mapping[str, str], job: Mapping[str, str], now: float) -> float | None:
    """How long a run may take, so that it saves before the job's time limit [hours]; None without a limit.

    now: unix time. The job's end is a variable of newer versions of Slurm, and a fact (local time) of all.
    """
    end = environment.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal():
        left = int(end) - now
    else:
        try:
            left = datetime.fromisoformat(job.get("EndTime", "")).timestamp() - now
        except ValueError:  # Unknown
            return None
    return max(0.0, left - min(MARGIN_SECONDS, left / 10)) / 3600


def agent_command(host: str, environment: Mapping[str, str]) -> list[str]:
    """The words before an agent's own that start it on `host`, in a step of its own. environment: of the batch script.

    So that agents start again one by one, and a lost node or a failed agent takes no other with it. The step shares all
    cores, GPUs and memory of the node with others of this job, such as an agent that has not ended yet.
    """
    # Without this, Slurm gives a task one core, and all ranks of the host would share it.
    cores = environment.get("SLURM_CPUS_ON_NODE", "1")
    return [
        "srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", f"--cpus-per-task={cores}",
        "--cpu-bind=none", "--mem=0", "--no-kill", "--kill-on-bad-exit=0", "--input=none",
    ]  # fmt: skip


def for_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which an agent starts the launcher: without the variables of its own step."""
    return {name: value for name, value in environment.items() if not STEP_VARIABLES.fullmatch(name)}
