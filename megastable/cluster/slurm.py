"""Slurm: what becomes of a job, how long it has, how agents are started in it; asked by launch/slurm.sbatch.

    python -m megastable.cluster.slurm limit
    python -m megastable.cluster.slurm ended CODE [run.dir=DIR] [HOST ...]

The first prints run.max_hours=H; nothing without a limit. The second requeues the job if CODE says so, and exits with
it. HOST: a host to leave out from now on, beside those on which no step starts, and the one that the run in DIR ended
for.

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

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from megastable.base.errors import (
    BAD_INPUT,
    HOST_GONE,
    OK,
    STOPPED,
    ConfigError,
    MegastableError,
    user_errors,
)
from megastable.run.directory import RunDirectory
from megastable.run.events.supervisor_events import Ended, SupervisorEvent

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


def parse_job_facts(line: str) -> dict[str, str]:
    """What `scontrol show job --oneliner` printed, by its names."""
    return {match[1]: match[2] for match in FACT.finditer(line.strip())}


def judge_job_end(code: int, job: Mapping[str, str], gone: Sequence[str] = ()) -> JobEnd:
    """What becomes of a job whose supervisor ended with `code`.

    job: its facts. gone: hosts to leave out from now on, beside those that the job was told to leave out before.
    """
    if (job_state := job.get("JobState", "RUNNING")) != "RUNNING":
        ending = f"Slurm is ending this job already ({job_state})"
        return JobEnd(False, f"{ending}: it is cancelled, or requeued without us")
    if code == STOPPED:
        return JobEnd(True, "stopped with a checkpoint")
    if code == HOST_GONE:
        excluded_before = job.get("ExcNodeList", UNSET)
        excluded_names = [*([] if excluded_before == UNSET else [excluded_before]), *gone]
        return JobEnd(True, "a host is gone", ",".join(excluded_names) if gone else None)
    return JobEnd(False, "the run is complete" if code == OK else "requeueing would change nothing")


def hours_left(environment: Mapping[str, str], job: Mapping[str, str], now: float) -> float | None:
    """How long a run may take, so that it saves before the job's time limit [hours]; None without a limit.

    now: unix time. The job's end is a variable of newer versions of Slurm, and a fact (local time) of all.
    """
    end_stamp = environment.get("SLURM_JOB_END_TIME", "")
    if end_stamp.isdecimal():
        seconds_left = int(end_stamp) - now
    else:
        try:
            seconds_left = datetime.fromisoformat(job.get("EndTime", "")).timestamp() - now
        except ValueError:  # Unknown
            return None
    return max(0.0, seconds_left - min(MARGIN_SECONDS, seconds_left / 10)) / 3600


def build_agent_command(host: str, environment: Mapping[str, str]) -> list[str]:
    """The words before an agent's own that start it on `host`, in a step of its own. environment: of the batch script.

    So that agents start again one by one, and a lost node or a failed agent takes no other with it. The step shares all
    cores, GPUs and memory of the node with others of this job, such as an agent that has not ended yet.
    """
    # Without this, Slurm gives a task one core, and all ranks of the host would share it.
    core_count = environment.get("SLURM_CPUS_ON_NODE", "1")
    return [
        "srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", f"--cpus-per-task={core_count}",
        "--cpu-bind=none", "--mem=0", "--no-kill", "--kill-on-bad-exit=0", "--input=none",
    ]  # fmt: skip


def strip_step_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which an agent starts the launcher: without the variables of its own step."""
    return {name: value for name, value in environment.items() if not STEP_VARIABLES.fullmatch(name)}


RUN = "run.dir="
STEP_SECONDS = 60.0  # after which a host on which no step has started counts as gone


def build_limit_override(environment: Mapping[str, str]) -> str:
    """An override that ends the run before the job's time limit; empty without one."""
    left_hours = hours_left(environment, _job(environment), time.time())
    return "" if left_hours is None else f"run.max_hours={left_hours:.4f}"


def end_job(code: int, gone: list[str], environment: Mapping[str, str], runs: Sequence[Path] = ()) -> None:
    """Requeues the job if its supervisor's exit code says so. runs: the run directory, if it is known."""
    # Slurm ends a job that it requeues, and us with it, KillWait (30 s by default) after SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job_number, job_facts = _number(environment), _job(environment)
    if code == HOST_GONE:
        blamed_hosts = [host for run_folder in runs for host in list_blamed_hosts(run_folder)]
        gone = _gone([*gone, *blamed_hosts], job_facts, environment)
    job_end = judge_job_end(code, job_facts, gone)
    print(f"exit code {code}: {job_end.why}", flush=True)
    if not job_end.requeue:
        return
    left_out = "" if job_end.excluded is None else f", without {job_end.excluded}"
    print(f"requeueing job {job_number}{left_out}", flush=True)
    try:
        _scontrol("requeue", job_number)
        if job_end.excluded is not None:
            _scontrol("update", f"JobId={job_number}", f"ExcNodeList={job_end.excluded}")
    except ConfigError as error:
        print(f"{error}. `sbatch` the same command again to go on", flush=True)


def list_blamed_hosts(run: Path) -> list[str]:
    """The host that failed again and again, for which a run's supervisor has ended. It answers as others do: only the
    journal knows it. None if that cannot be read."""
    failed_host, blamed_hosts = None, list[str]()
    try:
        for event in RunDirectory(run).iterate_events(Ended, SupervisorEvent):
            if isinstance(event, Ended):
                failed_host = event.get("host")
            else:
                ended_for_host = event.get("what") == "ended" and event.get("code") == HOST_GONE
                name_pattern = rf"(?<![\w.-]){re.escape(str(failed_host))}(?![\w-])"
                is_named = failed_host and re.search(name_pattern, str(event.get("reason")))
                blamed_hosts = [str(failed_host)] if ended_for_host and is_named else []
    except (OSError, MegastableError) as error:
        print(f"{run}: {error}. A host that failed too often is not left out", flush=True)
    return blamed_hosts


def _number(environment: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" not in environment:
        raise ConfigError("this is not a job of Slurm (SLURM_JOB_ID is not set): sbatch launch/sbatch")
    return environment["SLURM_JOB_ID"]


def _job(environment: Mapping[str, str]) -> dict[str, str]:
    return parse_job_facts(_scontrol("show", "job", "--oneliner", _number(environment)))


def _gone(named: list[str], job: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Hosts that Slurm takes for fine, and that were named, start no step, or do not see this directory."""

    def answers(host: str) -> bool:
        step_words = [*build_agent_command(host, environment), "test", "-d", str(Path.cwd())]
        try:
            return subprocess.run(step_words, capture_output=True, timeout=STEP_SECONDS).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    hosts = _scontrol("show", "hostnames", job["NodeList"]).split()
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return [host for host, fine in zip(hosts, pool.map(answers, hosts)) if host in named or not fine]


def _scontrol(*words: str) -> str:
    """What it printed. Raises ConfigError if it failed."""
    try:
        finished_process = subprocess.run(["scontrol", *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("scontrol is not installed here, or not in PATH: load Slurm's module") from None
    if finished_process.returncode:
        error_text = (finished_process.stderr or finished_process.stdout).strip()
        raise ConfigError(f"scontrol {' '.join(words)} failed: {error_text}")
    return finished_process.stdout


def main(arguments: list[str]) -> int:
    """The exit code."""
    match arguments:
        case ["limit"]:
            print(build_limit_override(os.environ))
            return 0
        case ["ended", code, *rest] if code.isdecimal():
            runs = [Path(word.removeprefix(RUN)) for word in rest if word.startswith(RUN)]
            end_job(int(code), [word for word in rest if not word.startswith(RUN)], os.environ, runs)
            return int(code)
    print(__doc__, file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    with user_errors():
        sys.exit(main(sys.argv[1:]))
