"""Decisions about a job of Slurm, on its words as 22.05 prints them."""

from __future__ import annotations

import itertools
from datetime import datetime

import pytest

from megastable.base import errors
from megastable.base.errors import HOST_GONE
from megastable.cluster import slurm
from megastable.cluster.slurm import agent_command, facts, for_launcher, hours_left, verdict
from megastable.run.membership import check_alone, is_rank, membership, tasks

LINE = (
    "JobId=5 JobName=my run UserId=root(0) Account=(null) JobState=RUNNING Reason=None Requeue=1 Restarts=0 "
    "ExitCode=0:0 EndTime=2026-11-24T20:46:44 AllocNode:Sid=controller:0 ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList=n[1-2] BatchHost=n1 NumNodes=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=2,node=2,billing=2 Power= \n"
)


def test_facts() -> None:
    job = facts(LINE)
    assert (job["JobId"], job["JobName"], job["JobState"]) == ("5", "my run", "RUNNING")
    assert (job["TRES"], job["CPUs/Task"], job["ReqB:S:C:T"]) == ("cpu=2,node=2,billing=2", "1", "0:0:*:*")
    assert (job["AllocNode:Sid"], job["Power"]) == ("controller:0", "")


def test_two_exit_codes_requeue() -> None:
    found = {code: verdict(code, facts(LINE)) for code in range(256)}
    assert {code for code, one in found.items() if one.requeue} == {errors.STOPPED, HOST_GONE}
    assert [code for code, one in found.items() if "complete" in one.why] == [errors.OK]


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PREEMPTED", "PENDING"])
@pytest.mark.parametrize("code", [errors.OK, errors.STOPPED, HOST_GONE])
def test_a_job_that_slurm_ends_is_left_to_it(code: int, state: str) -> None:
    found = verdict(code, facts(LINE) | {"JobState": state}, ["n2"])
    assert (found.requeue, found.excluded) == (False, None)
    assert state in found.why


@pytest.mark.parametrize(
    ("before", "gone", "excluded"),
    [
        ("(null)", [], None),
        ("(null)", ["n2"], "n2"),
        ("n[5-7]", [], None),
        ("n[5-7]", ["n2", "n4"], "n[5-7],n2,n4"),
    ],
)
def test_hosts_that_are_gone_are_left_out_beside_those_of_before(
    before: str, gone: list[str], excluded: str | None
) -> None:
    job = facts(LINE) | {"ExcNodeList": before}
    assert verdict(HOST_GONE, job, gone).excluded == excluded
    assert verdict(errors.STOPPED, job, gone).excluded is None


@pytest.mark.parametrize(
    ("hours", "left"), [(24, 24 - 1 / 6), (2, 2 - 1 / 6), (1, 0.9), (0.1, 0.09), (0, 0), (-1, 0)]
)
def test_a_run_ends_before_its_job(hours: float, left: float) -> None:
    now = 1_795_461_801.0
    end = now + hours * 3600
    local = {"EndTime": datetime.fromtimestamp(end).isoformat()}  # as scontrol prints it
    for environment, job in (({}, local), ({"SLURM_JOB_END_TIME": str(int(end))}, {"EndTime": "Unknown"})):
        assert hours_left(environment, job, now) == pytest.approx(left)


def test_a_job_without_a_limit_sets_none() -> None:
    assert hours_left({}, {"EndTime": "Unknown"}, 0.0) is None
    assert hours_left({"SLURM_JOB_END_TIME": ""}, {}, 0.0) is None


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


def test_a_launcher_is_told_of_the_job_and_not_of_the_agents_step() -> None:
    assert for_launcher(JOB | STEP) == JOB


def test_ranks_below_an_agent_are_not_taken_for_tasks_of_srun() -> None:
    """Though one srun may have started all agents."""
    assert tasks(JOB | STEP) is not None
    left = for_launcher(JOB | STEP)
    assert tasks(left) is None
    assert not is_rank(left)
    check_alone(left)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
    assert membership(left | rank) == {}


def test_an_agent_gets_the_whole_node() -> None:
    words = agent_command("n2", {"SLURM_CPUS_ON_NODE": "64"})
    assert words[0] == "srun"
    assert {"--nodelist=n2", "--nodes=1", "--ntasks=1", "--cpus-per-task=64", "--overlap"} < set(words)


def test_the_margin_grows_with_the_job() -> None:
    left = [
        hours_left({}, {"EndTime": datetime.fromtimestamp(60.0 * m).isoformat()}, 0.0) for m in range(1, 300)
    ]
    margins = [m / 60 - hours for m, hours in enumerate(left, 1) if hours is not None]
    assert len(margins) == 299
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(margins))
    assert margins[-1] == pytest.approx(slurm.MARGIN_SECONDS / 3600)
