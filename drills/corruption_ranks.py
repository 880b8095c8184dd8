"""A rank of drills of corruption: a process that does one run after another, as it is told to by a pipe."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from drills.corruption_bits import Change
from drills.corruption_plan import Planned
from megastable.config.tree import RunConfig

LOOPBACK = "127.0.0.1"


class Job(NamedTuple):
    """A run. port: of the store at which its ranks meet, on this host. log: for what they print."""

    config: RunConfig
    fault: Planned | None
    port: int
    log: Path


class Ended(NamedTuple):
    """How it ended on a rank. error: the name of what was raised, or what became of the process; empty if it is done.
    changes: what the fault changed here; struck: when, in unix time."""

    error: str = ""
    text: str = ""
    changes: Sequence[Change] = ()
    struck: float | None = None


def serve(rank: int, world: int, pipe: Connection) -> None:
    """Do the runs that come by `pipe`, until it is closed. After an error the process is not to be used again."""
    os.setpgid(0, 0)  # so that it ends with all that it started, and Ctrl-C is for the drill
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR=LOOPBACK, TORCHELASTIC_USE_AGENT_STORE="True",  # the store is there already
    )  # fmt: skip
    gc.freeze()  # imported modules, whose memory is shared with other ranks: no collection is to touch them
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            pipe.send(_run(pipe.recv()))
        except (EOFError, ConnectionError):
            # The drill is over. Not by an exception: destructors of C++ libraries sometimes abort.
            os._exit(0)


def _run(job: Job) -> Ended:
    from deepspeed import comm
    from torch import distributed

    from drills.corruption_faults import planted
    from megastable import train
    from megastable.engine.distributed import start_distributed

    os.environ["MASTER_PORT"] = str(job.port)
    _write_to(job.log)
    error = text = ""
    changes: list[Change] = []
    times: list[float] = []

    def tell(change: Change) -> None:
        changes.append(change)
        times.append(time.time())

    try:
        start_distributed(job.config.run.timeout)
        with planted(job.fault, tell):
            train.train(job.config, Path("recipe.yaml"))
        distributed.barrier()
        # Not only torch's: DeepSpeed keeps groups of its own, which the next run would use.
        comm.destroy_process_group()
    except Exception as raised:
        error, text = type(raised).__name__, str(raised)
    gc.collect()
    return Ended(error, text, changes, times[0] if times else None)


def _write_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
