"""Who joins which process group, from environments as Slurm, MPI and the launchers leave them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megastable import train
from megastable.base import errors
from megastable.base.errors import ConfigError
from megastable.run.membership import ALONE, VARIABLES, check_alone, find_membership, is_rank
from tests.distributed import CONTEXT
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
# As Slurm 23.11 sets them: in a batch script of 8 tasks, in the shell of salloc (a step of one task), in a task.
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
SHELL = BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "40001"}
TASK = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
TERMINAL = TASK | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_PTY_PORT": "40001"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_SIZE": "16", "PMI_RANK": "9", "MPI_LOCALRANKID": "1"}
MEETING = {"MASTER_ADDR": "node-01", "MASTER_PORT": "29500"}


def rank(number: int, world: int, **more: str) -> dict[str, str]:
    """What a launcher sets."""
    return {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", **MEETING, **more}


@pytest.mark.parametrize(
    "environment", [{}, BATCH, SHELL, MEETING, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}]
)
def test_membership_of_a_process_that_was_started_alone_is_a_world(environment: dict[str, str]) -> None:
    assert find_membership(environment) == ALONE
    check_alone(environment)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        (TASK, ("5", "8", "1")),
        (OPEN_MPI, ("9", "16", "1")),
        (MPICH, ("9", "16", "1")),
        # mpirun started a process on each of 2 hosts by srun, which started the ranks.
        (TASK | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | OPEN_MPI, ("9", "16", "1")),
        # srun --mpi=pmi2 says it twice.
        (TASK | {"PMI_SIZE": "8", "PMI_RANK": "5"}, ("5", "8", "1")),
    ],
)
def test_membership_joins_ranks_where_it_is_said_where_they_meet(
    environment: dict[str, str], wanted: tuple[str, ...]
) -> None:
    found = find_membership(environment | MEETING)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == wanted
    assert not found.keys() & MEETING.keys()


@pytest.mark.parametrize(
    ("environment", "missing", "says"),
    [
        (
            TASK,
            "MASTER_ADDR",
            ["srun started 8 processes", "sbatch launch/slurm.sbatch", "env -u SLURM_STEP_NUM_TASK"],
        ),
        (TERMINAL, "MASTER_PORT", ["srun started 8 processes"]),
        (
            OPEN_MPI,
            "MASTER_PORT",
            ["mpirun (Open MPI) started 16", "deepspeed --hostfile", "env -u OMPI_COMM_WORLD_S"],
        ),
        (MPICH, "MASTER_ADDR", ["mpirun (MPICH) started 16 processes"]),
    ],
)
def test_membership_refuses_ranks_that_cannot_meet(
    environment: dict[str, str], missing: str, says: list[str]
) -> None:
    there = {key: value for key, value in MEETING.items() if key != missing}
    with pytest.raises(ConfigError) as refused:
        find_membership(environment | there)
    for words in [*says, "would train a model of its own", "MASTER_ADDR"]:
        assert words in str(refused.value)
    # What it says in the end is what helps.
    variables = {names[0] for names in VARIABLES.values()}
    assert find_membership({k: v for k, v in environment.items() if k not in variables}) == ALONE


@pytest.mark.parametrize(
    "environment",
    [
        rank(3, 8),
        rank(5, 8, CROSS_SIZE="2") | TASK,  # launch/slurm.sbatch on two hosts, on one host
        rank(5, 8, CROSS_SIZE="1") | TASK,
        rank(3, 64, CROSS_SIZE="8") | TASK,  # deepspeed --no_ssh, or torchrun, once a host
        rank(3, 64, GROUP_WORLD_SIZE="8") | TASK,
        rank(3, 8, CROSS_SIZE="1") | TERMINAL,  # deepspeed --num_gpus 8 in srun --ntasks=8 --pty bash
        rank(3, 4, CROSS_SIZE="1") | BATCH,
        rank(3, 4, CROSS_SIZE="1") | SHELL,
    ],
)
def test_membership_leaves_ranks_of_a_launcher_as_they_are(environment: dict[str, str]) -> None:
    assert find_membership(environment) == {}


@pytest.mark.parametrize("environment", [
    # srun --ntasks=8 deepspeed --num_gpus 4: eight worlds of four.
    *(rank(3, world, **{hosts: "1"}) | TASK for world in (4, 8) for hosts in ("CROSS_SIZE", "GROUP_WORLD_SIZE")),
    # RANK=0 and WORLD_SIZE=1 of a container or a notebook, in every task: as many worlds of one.
    rank(0, 1) | TASK, rank(3, 4) | OPEN_MPI, {"RANK": "0"} | MPICH, {"RANK": "0", "WORLD_SIZE": "x"} | TASK,
])  # fmt: skip
def test_membership_refuses_ranks_that_would_train_apart(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="each of them would train apart") as refused:
        find_membership(environment)
    said = f"(RANK={environment['RANK']}, WORLD_SIZE={environment.get('WORLD_SIZE', '')})"
    assert said in str(refused.value) and "no launcher has set RANK and WORLD_SIZE, unset" in str(
        refused.value
    )


def test_check_alone_refuses_one_of_several_that_would_start_all() -> None:
    check_alone(TERMINAL)
    for environment in (TASK, OPEN_MPI, TASK | {"SLURM_PTY_PORT": "40001"}):
        with pytest.raises(ConfigError, match="each of them would start all ranks"):
            check_alone(environment)


@pytest.mark.parametrize("number", [0, 1])
def test_train_is_refused_once_for_all(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (*ALONE, *(name for names in VARIABLES.values() for name in names)):
        monkeypatch.delenv(name, raising=False)
    for name, value in (TASK | {"SLURM_PROCID": str(number)}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        train.main(["no-such-recipe.yaml"])
    said = capsys.readouterr().err
    assert ended.value.code == errors.BAD_INPUT and "RANK" not in os.environ
    assert ("srun started 8 processes" in said and said.count("error: ") == 1) if number == 0 else said == ""


def joined(number: int, port: int, results: Any) -> None:
    """A task of srun."""
    import torch.distributed as dist

    from megastable.engine import distributed

    for name in ALONE:
        os.environ.pop(name, None)
    os.environ |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store is there already
    os.environ |= find_membership(os.environ)
    distributed.start_distributed(60)
    results.put((dist.get_rank(), dist.get_world_size()))
    distributed.stop_distributed()


@pytest.mark.timeout(4 * PATIENCE + 60)
def test_membership_makes_tasks_of_srun_one_world() -> None:
    import torch.distributed as dist

    results: Any = CONTEXT.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tasks = [CONTEXT.Process(target=joined, args=(n, store.port, results), daemon=True) for n in range(2)]
    for task in tasks:
        task.start()
    assert {results.get(timeout=PATIENCE) for _ in tasks} == {(0, 2), (1, 2)}
    for task in tasks:
        task.join(timeout=PATIENCE)
        assert task.exitcode == 0


def test_is_rank_if_a_launcher_numbered_it_among_the_ranks() -> None:
    of_srun = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    assert is_rank(rank(1, 4)) and is_rank(of_srun)
    assert not is_rank({}) and not is_rank(of_srun | {"SLURM_PTY_PORT": "1"})  # a shell by srun --pty
    with pytest.raises(
        ConfigError, match=r"RANK=1 is set, and LOCAL_RANK not"
    ):  # of a host, by a launcher of pods
        is_rank({"RANK": "1", "WORLD_SIZE": "2"})
