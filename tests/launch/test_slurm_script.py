"""What launch/slurm.sbatch does with a signal and an exit code: the script and its supervisor, with Slurm's answers
given as 22.05 prints them. On a real Slurm: test_slurm.py."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from megastable.base import errors
from megastable.base.errors import HOST_GONE
from megastable.cluster.slurm import (
    build_agent_command,
    hours_left,
    judge_job_end,
    list_blamed_hosts,
    parse_job_facts,
    strip_step_variables,
)
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.supervisor_events import Ended, SupervisorEvent
from megastable.run.events.training_events import Stopped
from megastable.run.log import RunLog
from megastable.run.membership import check_alone, find_membership, find_tasks, is_rank
from tests.conftest import tiny
from tests.launch.slurm_cluster import checkout
from tests.patience import PATIENCE

STEPS = 300
# Answers as Slurm 22.05 does, and writes down what it is asked to change.
SCONTROL = """#!/bin/sh
case "$1 $2" in
  "show hostnames") echo alone ;;
  "show job") echo "JobId=5 JobState=$(cat {folder}/state) EndTime=Unknown ExcNodeList=(null) NodeList=alone" ;;
  *) echo "$*" >> {folder}/asked ;;
esac
"""
SQUEUE = """#!/bin/sh
echo "$*" >> {folder}/squeue
cat {folder}/state
"""
SRUN = "#!/bin/sh\nexit 1\n"  # no step starts


class Slurm:
    """The script as a job on this host. state: of the job, as Slurm tells it."""

    def __init__(self, folder: Path, state: str = "RUNNING") -> None:
        self.folder = checkout(folder)
        for name, text in {"scontrol": SCONTROL, "squeue": SQUEUE, "srun": SRUN}.items():
            (folder / name).write_text(text.format(folder=folder))
            (folder / name).chmod(0o755)
        (folder / "state").write_text(f"{state}\n")

    def environment(self) -> dict[str, str]:
        job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "alone", "SLURM_GPUS_ON_NODE": "1"}
        return {**os.environ, **job, "PATH": f"{self.folder}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*map(str, words)], cwd=self.folder, env=self.environment(), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def heard(self) -> int:
        """How often the script has asked for the job's state, as it does at every signal."""
        file = self.folder / "squeue"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def asked(self) -> list[str]:
        """What Slurm was asked to change."""
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []


@pytest.mark.quick("0-*", "75-*")
@pytest.mark.parametrize(
    ("code", "asked"),
    [
        (errors.OK, []),
        (errors.STOPPED, ["requeue 5"]),
        (errors.HOST_GONE, ["requeue 5", "update JobId=5 ExcNodeList=alone"]),
    ],
)
def test_ended_makes_a_decision_of_an_exit_code_which_stays_the_jobs(
    tmp_path: Path, code: int, asked: list[str]
) -> None:
    slurm = Slurm(tmp_path)
    process = slurm.start(".venv/bin/python", "-m", "megastable.cluster.slurm", "ended", str(code))
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, said
    assert said.startswith(f"exit code {code}: ")
    assert slurm.asked() == asked


def test_blamed_is_the_host_that_a_run_has_ended_for_though_it_answers(tmp_path: Path) -> None:
    """Else the requeued job gets it again, and again ends for it, for as long as nobody looks."""
    run = RunDirectory(tmp_path)
    log = RunLog(run, print)

    def ended(reason: str, host: str, code: int = errors.HOST_GONE) -> list[str]:
        log.emit_event(Ended(attempt=3, what="SIGKILL", host=host))
        log.emit_event(SupervisorEvent(what="ended", pid=1, host="x", code=code, reason=reason))
        return list_blamed_hosts(run.root)

    assert ended("3 failures of alone within 1000 steps: that host is faulty", "alone") == ["alone"]
    assert ended("alone-2 did not come within 9 s", "alone") == []
    assert ended("other did not come within 9 s", "alone") == []
    assert ended("the last one was on alone", "alone", errors.UNSTABLE) == []
    assert ended("of alone", "alone") == ["alone"]
    log.emit_event(SupervisorEvent(what="started", pid=2, host="x"))  # a person mended it
    assert list_blamed_hosts(run.root) == [] == list_blamed_hosts(tmp_path / "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "signals", "code", "asked"),
    [("RUNNING", 1, errors.STOPPED, ["requeue 5"]), ("COMPLETING", 2, errors.OK, [])],
)
def test_sbatch_script_passes_a_signal_on_unless_slurm_has_sent_it_to_all(
    corpus: Path, tmp_path: Path, state: str, signals: int, code: int, asked: list[str]
) -> None:
    """A second signal would end the supervisor at once. The script waits for it, however many it gets itself."""
    recipe = tmp_path / "recipe.yaml"
    config = tiny(corpus, tmp_path / "run", train={"steps": STEPS}, schedule={"total_steps": STEPS})
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    slurm, run = Slurm(tmp_path / "job", state), RunDirectory(tmp_path / "run")
    process = slurm.start("bash", "launch/slurm.sbatch", recipe, f"run.dir={run.root}")
    try:
        end = time.monotonic() + PATIENCE
        while not read_object(run.progress).get("step"):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        for count in range(1, signals + 1):
            process.send_signal(signal.SIGTERM)
            while slurm.heard() < count:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.02)
            time.sleep(0.3)  # the script waits again
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, said
    assert f"exit code {code}: " in said
    assert slurm.asked() == asked
    assert len(list(run.iterate_events(Stopped))) == (code == errors.STOPPED)


LINE = (
    "JobId=5 JobName=my run UserId=root(0) Account=(null) JobState=RUNNING Reason=None Requeue=1 Restarts=0 "
    "ExitCode=0:0 EndTime=2026-11-24T20:46:44 AllocNode:Sid=controller:0 ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList=n[1-2] BatchHost=n1 NumNodes=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=2,node=2,billing=2 Power= \n"
)


def test_facts_of_a_job() -> None:
    job = parse_job_facts(LINE)
    assert (job["JobId"], job["JobName"], job["JobState"]) == ("5", "my run", "RUNNING")
    assert (job["TRES"], job["CPUs/Task"], job["ReqB:S:C:T"]) == ("cpu=2,node=2,billing=2", "1", "0:0:*:*")
    assert (job["AllocNode:Sid"], job["Power"]) == ("controller:0", "")


def test_verdict_requeues_for_two_exit_codes() -> None:
    found = {code: judge_job_end(code, parse_job_facts(LINE)) for code in range(256)}
    assert {code for code, one in found.items() if one.requeue} == {errors.STOPPED, HOST_GONE}
    assert [code for code, one in found.items() if "complete" in one.why] == [errors.OK]


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PREEMPTED", "PENDING"])
@pytest.mark.parametrize("code", [errors.OK, errors.STOPPED, HOST_GONE])
def test_verdict_leaves_to_slurm_a_job_that_it_ends(code: int, state: str) -> None:
    found = judge_job_end(code, parse_job_facts(LINE) | {"JobState": state}, ["n2"])
    assert (found.requeue, found.excluded) == (False, None)
    assert state in found.why


@pytest.mark.parametrize(
    ("before", "gone", "excluded"),
    [("(null)", [], None), ("(null)", ["n2"], "n2"), ("n[5-7]", ["n2", "n4"], "n[5-7],n2,n4")],
)
def test_verdict_leaves_out_hosts_beside_those_of_before(
    before: str, gone: list[str], excluded: str | None
) -> None:
    job = parse_job_facts(LINE) | {"ExcNodeList": before}
    assert judge_job_end(HOST_GONE, job, gone).excluded == excluded
    assert judge_job_end(errors.STOPPED, job, gone).excluded is None


@pytest.mark.parametrize(
    ("hours", "left"), [(24, 24 - 1 / 6), (2, 2 - 1 / 6), (1, 0.9), (0.1, 0.09), (0, 0), (-1, 0)]
)
def test_hours_left_end_a_run_before_its_job(hours: float, left: float) -> None:
    now = 1_795_461_801.0
    end = now + hours * 3600
    local = {"EndTime": datetime.fromtimestamp(end).isoformat()}  # as scontrol prints it
    for environment, job in (({}, local), ({"SLURM_JOB_END_TIME": str(int(end))}, {"EndTime": "Unknown"})):
        assert hours_left(environment, job, now) == pytest.approx(left)
    assert hours_left({}, {"EndTime": "Unknown"}, now) is None


# What an agent leaves to the launcher. Variables as `srun` of 22.05 sets them; PMI's as with --mpi=pmi2.
JOB = {
    "SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "8",
    "SLURM_GPUS_ON_NODE": "2", "SLURM_CONF": "/etc/slurm.conf", "SLURMD_NODENAME": "n2", "SLURM_CLUSTER_NAME": "one",
    "SLURM_RESTART_COUNT": "1", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_SOCKET_IFNAME": "ib0", "PATH": "/bin",
}  # fmt: skip
STEP = {
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "1", "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1", "SLURM_NPROCS": "2", "SLURM_TASK_PID": "27", "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_SRUN_COMM_HOST": "10.78.0.254", "SLURM_SRUN_COMM_PORT": "34407", "SLURM_LAUNCH_NODE_IPADDR": "10.78.0.254",
    "SLURM_CPU_BIND": "quiet", "SLURM_CPUS_PER_TASK": "8", "SLURM_MPI_TYPE": "pmi2", "SLURM_PMI2_STEP_NODES": "n[1-2]",
    "PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "11", "PMIX_RANK": "1", "PMI2_FD": "9",
}  # fmt: skip


def test_for_launcher_leaves_no_rank_that_looks_like_a_task_of_srun() -> None:
    """Though one srun may have started all agents."""
    assert find_tasks(JOB | STEP) is not None
    left = strip_step_variables(JOB | STEP)
    assert left == JOB
    assert find_tasks(left) is None
    assert not is_rank(left)
    check_alone(left)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
    assert find_membership(left | rank) == {}


def test_agent_command_gives_the_whole_node() -> None:
    words = build_agent_command("n2", {"SLURM_CPUS_ON_NODE": "64"})
    assert words[0] == "srun"
    assert {"--nodelist=n2", "--nodes=1", "--ntasks=1", "--cpus-per-task=64", "--overlap"} < set(words)
