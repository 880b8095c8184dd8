"""Finds the process group of this process, from the environment that its launcher set. Pure.

`deepspeed` and `torchrun` set RANK etc. `srun` and `mpirun` set their own variables, and no master address: a process
that read only RANK would train alone, beside others doing the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from megastable.base.errors import ConfigError

# Of the processes started together: size, rank, local rank.
VARIABLES = {
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpirun (MVAPICH)": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    # Not SLURM_NTASKS: batch scripts and the shell of salloc have it, too, and are one process.
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    "mpirun (MPICH)": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
}
ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


@dataclass(frozen=True)
class Tasks:
    """Processes that `launcher` started together: this is number `rank` of `size`. variable: that gives `size`."""

    launcher: str
    variable: str
    size: int
    rank: int
    local_rank: int | None

    def make_refusal(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(
            f"{self.launcher} started {self.size} processes, and each of them {what}. {remedy}. If there is only this "
            f"one after all: env -u {self.variable} COMMAND"
        )


def find_tasks(environment: Mapping[str, str]) -> Tasks | None:
    """The processes that this one was started with; None if started alone."""
    number = partial(_number, environment)
    launcher_tasks = [
        Tasks(launcher_name, names[0], number(names[0]) or 1, number(names[1]) or 0, number(names[2]))
        for launcher_name, names in VARIABLES.items()
    ]
    # mpirun under Slurm starts one process per host by srun, and these start the ranks.
    most = max(launcher_tasks, key=lambda one: one.size)
    return most if most.size > 1 else None


def find_membership(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK etc., as far as missing from `environment`, for a rank to join its process group.

    Raises ConfigError if several ranks would each train their own model.
    """
    together = find_tasks(environment)
    if "RANK" in environment:
        if together is not None and _apart(environment, together):
            raise together.make_refusal(
                f"would train apart from the others (RANK={environment['RANK']}, WORLD_SIZE="
                f"{environment.get('WORLD_SIZE', '')})",
                "Start one launcher that knows all hosts (docs/clusters.md); where no launcher has set RANK and "
                "WORLD_SIZE, unset them",
            )
        return {}
    if together is None:
        return dict(ALONE)
    if together.local_rank is None or not environment.keys() >= {"MASTER_ADDR", "MASTER_PORT"}:
        if together.launcher == "srun":
            remedy = (
                "In a checkout, use sbatch launch/slurm.sbatch RECIPE; or say where they meet: MASTER_PORT=29500 "
                'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) srun ...'
            )
        else:
            remedy = "Start them by deepspeed --hostfile HOSTFILE, or say where they meet: MASTER_ADDR and MASTER_PORT"
        raise together.make_refusal("would train a model of its own", remedy)
    numbers = {"RANK": together.rank, "WORLD_SIZE": together.size, "LOCAL_RANK": together.local_rank}
    return {variable: str(number) for variable, number in numbers.items()}


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one of the ranks.

    Raises ConfigError where RANK is that of a host, as launchers of pods set it: each host would train as one rank.
    """
    if "RANK" in environment:
        if missing := [name for name in ("WORLD_SIZE", "LOCAL_RANK") if name not in environment]:
            raise ConfigError(
                f"RANK={environment['RANK']} is set, and {' and '.join(missing)} not: it seems to number hosts, not "
                "ranks. Start the ranks of each host, as torchrun --nproc_per_node 8 --no-python megastable train, "
                "or unset RANK"
            )
        return True
    joint_tasks = find_tasks(environment)
    return joint_tasks is not None and not _in_terminal(environment, joint_tasks)


def check_alone(environment: Mapping[str, str]) -> None:
    """Raises ConfigError if this process, which starts the ranks of all hosts, is one of several."""
    joint_tasks = find_tasks(environment)
    if joint_tasks is not None and not _in_terminal(environment, joint_tasks):
        raise joint_tasks.make_refusal(
            "would start all ranks", "Start it once, on one host (srun --ntasks=1 ...)"
        )


def _apart(environment: Mapping[str, str], together: Tasks) -> bool:
    """Whether RANK and WORLD_SIZE leave out tasks: set for this host alone by a launcher in every task, or stale."""
    if _in_terminal(environment, together):
        return False
    world = _number(environment, "WORLD_SIZE") or 1
    hosts = environment.get("GROUP_WORLD_SIZE") or environment.get("CROSS_SIZE")  # of torchrun, of deepspeed
    is_itself = world == together.size and environment["RANK"] == str(together.rank)
    return world < together.size or (hosts == "1" and not is_itself)


def _number(environment: Mapping[str, str], variable: str) -> int | None:
    value = environment.get(variable, "")
    return int(value) if value.isdecimal() else None


def _in_terminal(environment: Mapping[str, str], together: Tasks) -> bool:
    """Whether this is `srun --pty`, where only the first task lives."""
    return "SLURM_PTY_PORT" in environment and together.rank == 0
