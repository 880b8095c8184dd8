"""What launch/slurm.sbatch asks about its job, and has done to it.

    python -m megastable.cluster.slurm_job limit
    python -m megastable.cluster.slurm_job ended CODE [run.dir=DIR] [HOST ...]

The first prints run.max_hours=H; nothing without a limit. The second requeues the job if CODE says so, and exits with
it. HOST: a host to leave out from now on, beside those on which no step starts, and the one that the run in DIR ended
for.
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
from pathlib import Path

from megastable.base.errors import BAD_INPUT, HOST_GONE, ConfigError, MegastableError, user_errors
from megastable.cluster import slurm
from megastable.run.directory import RunDirectory
from megastable.run.events.supervisor_events import Ended, SupervisorEvent

RUN = "run.dir="
STEP_SECONDS = 60.0  # after which a host on which no step has started counts as gone


def limit(environment: Mapping[str, str]) -> str:
    """An override that ends the run before the job's time limit; empty without one."""
    left = slurm.hours_left(environment, _job(environment), time.time())
    return "" if left is None else f"run.max_hours={left:.4f}"


def ended(code: int, gone: list[str], environment: Mapping[str, str], runs: Sequence[Path] = ()) -> None:
    """Requeues the job if its supervisor's exit code says so. runs: the run directory, if it is known."""
    # Slurm ends a job that it requeues, and us with it, KillWait (30 s by default) after SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    number, job = _number(environment), _job(environment)
    if code == HOST_GONE:
        gone = _gone([*gone, *(host for run in runs for host in blamed(run))], job, environment)
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


def blamed(run: Path) -> list[str]:
    """The host that failed again and again, for which a run's supervisor has ended. It answers as others do: only the
    journal knows it. None if that cannot be read."""
    host, found = None, list[str]()
    try:
        for event in RunDirectory(run).events(Ended, SupervisorEvent):
            if isinstance(event, Ended):
                host = event.get("host")
            else:
                over = event.get("what") == "ended" and event.get("code") == HOST_GONE
                named = rf"(?<![\w.-]){re.escape(str(host))}(?![\w-])"
                found = [str(host)] if over and host and re.search(named, str(event.get("reason"))) else []
    except (OSError, MegastableError) as error:
        print(f"{run}: {error}. A host that failed too often is not left out", flush=True)
    return found


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
        case ["ended", code, *rest] if code.isdecimal():
            runs = [Path(word.removeprefix(RUN)) for word in rest if word.startswith(RUN)]
            ended(int(code), [word for word in rest if not word.startswith(RUN)], os.environ, runs)
            return int(code)
    print(__doc__, file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    with user_errors():
        sys.exit(main(sys.argv[1:]))
