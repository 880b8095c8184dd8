"""What launch/slurm.sbatch asks about its job, and has done to it.

    python -m megastable.cluster.slurm_job limit                   # prints run.max_hours=H; nothing without a limit
    python -m megastable.cluster.slurm_job ended CODE [HOST ...]   # requeues the job if CODE says so; exits with it

HOST: a host to leave out from now on, beside those on which no step starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megastable.base.errors import BAD_INPUT, HOST_GONE, ConfigError, user_errors
from megastable.cluster import slurm

STEP_SECONDS = 60.0  # after which a host on which no step has started counts as gone


def limit(environment: Mapping[str, str]) -> str:
    """An override that ends the run before the job's time limit; empty without one."""
    left = slurm.hours_left(environment, _job(environment), time.time())
    return "" if left is None else f"run.max_hours={left:.4f}"


def ended(code: int, gone: list[str], environment: Mapping[str, str]) -> None:
    """Requeues the job if its supervisor's exit code says so."""
    # Slurm ends a job that it requeues, and us with it, KillWait (30 s by default) after SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    number, job = _number(environment), _job(environment)
    if code == HOST_GONE:
        gone = _gone(gone, job, environment)
    verdict = slurm.verdict(code, job, gone)
    print(f"exit code {code}: {verdict.why}", flush=True)
    if not verdict.requeue:
        return
    left_out = "" if verdict.excluded is None else f", without {verdict.excluded}"
    print(f"requeueing job {number}{left_out}", flush=True)
    try:
        _scontrol("requeue", number)
        if verdict.excluded is not None:
            _scontrol("update", f"JobId={number}", f"ExcNodeList={verdict.excluded}")
    except ConfigError as error:
        print(f"{error}. `sbatch` the same command again to go on", flush=True)


def _number(environment: Mapping[str, str]) -> str:
    try:
        return environment["SLURM_JOB_ID"]
    except KeyError:
        raise ConfigError(
            "this is not a job of Slurm (SLURM_JOB_ID is not set): sbatch launch/slurm.sbatch"
        ) from None


def _job(environment: Mapping[str, str]) -> dict[str, str]:
    return slurm.facts(_scontrol("show", "job", "--oneliner", _number(environment)))


def _gone(named: list[str], job: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Hosts that Slurm takes for fine, and that were named, start no step, or do not see this directory."""

    def answers(host: str) -> bool:
        words = [*slurm.agent_command(host, environment), "test", "-d", str(Path.cwd())]
        try:
            return subprocess.run(words, capture_output=True, timeout=STEP_SECONDS).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    hosts = _scontrol("show", "hostnames", job["NodeList"]).split()
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return [host for host, fine in zip(hosts, pool.map(answers, hosts)) if host in named or not fine]


def _scontrol(*words: str) -> str:
    """What it printed. Raises ConfigError if it failed."""
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("scontrol is not installed here, or not in PATH: load Slurm's module") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ConfigError(f"scontrol {' '.join(words)} failed: {said}")
    return done.stdout


def main(arguments: list[str]) -> int:
    """The exit code."""
    match arguments:
        case ["limit"]:
            print(limit(os.environ))
            return 0
        case ["ended", code, *gone] if code.isdecimal():
            ended(int(code), gone, os.environ)
            return int(code)
    print(__doc__, file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    with user_errors():
        sys.exit(main(sys.argv[1:]))
