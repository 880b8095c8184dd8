"""Run a function on every rank of a local process group, in real layouts: to count, to measure, to drill."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from megastable.base.errors import MegastableError

TIMEOUT = 240.0  # seconds
COLLECTIVE_TIMEOUT = 120.0  # seconds that a rank waits for others
HUNG, DIED, ABANDONED = "hung", "died", "waited for another rank"
GRACE = 10.0  # seconds after the first error of a rank; others may be in a collective that it never reaches
LOOPBACK = "127.0.0.1"
# A server imports it once, and the ranks are forked from that: torch and DeepSpeed, and the imports of DeepSpeed's
# first engine.
PRELOAD = [
    "torch", "torch._dynamo", "torch._inductor.compile_fx", "deepspeed.runtime.zero.muon.muon_optimizer",
    "megastable.engine.engine", "benchmarks.train_speed", "benchmarks.scaling",
]  # fmt: skip


class RankEnd(NamedTuple):
    """How the function ended on a rank. error: the name of what was raised, or what became of the process; empty if it
    is done. result: what it returned."""

    error: str = ""
    text: str = ""
    result: Any = None


class Place(NamedTuple):
    """Of a rank. port: of the store at which the ranks meet. log: for what it prints; None: where this process does."""

    rank: int
    world: int
    port: int
    collective_timeout: float
    log: Path | None


def launch_ranks(
    world: int, function: Callable[[Any], Any], argument: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """Run `function(argument)` on every rank of a process group of `world` local processes; results by rank.

    function: a module-level one. Raises MegastableError if a rank fails.
    """
    rank_ends = run_on_ranks(world, function, argument, timeout)
    failed_ranks = [(rank, rank_end) for rank, rank_end in enumerate(rank_ends) if rank_end.error]
    # What the others say of one that died, or never came, is no cause.
    causes = sorted(failed_ranks, key=lambda item: {DIED: 0, ABANDONED: 2}.get(item[1].error, 1))
    for rank, rank_end in causes[:1]:
        raise MegastableError(f"measuring on {world} ranks: rank {rank}: {rank_end.error}: {rank_end.text}")
    return [rank_end.result for rank_end in rank_ends]


def run_on_ranks(
    world: int,
    function: Callable[[Any], Any],
    argument: Any,
    limit: float,
    *,
    collective_timeout: float = COLLECTIVE_TIMEOUT,
    log: Path | None = None,
    preload: Sequence[str] = (),
) -> list[RankEnd]:
    """Run a function on every rank, and tell how it ended there. No process is left.

    Args:
        world: number of ranks.
        function: a module-level one, of `argument`; what it returns is the result, or a `RankEnd` itself.
        argument: the same on every rank.
        limit: seconds after which ranks count as hung.
        collective_timeout: seconds that a rank waits for others.
        log: a file for what ranks print.
        preload: what else the function imports; the first call of a process decides.
    """
    # Held here, not by rank 0: its port is nobody else's.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    process_context = multiprocessing.get_context("forkserver")
    process_context.set_forkserver_preload([*PRELOAD, *preload])
    meeting_store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    started_ranks = []
    try:
        for rank in range(world):
            own_pipe, rank_pipe = process_context.Pipe()
            rank_place = Place(rank, world, meeting_store.port, collective_timeout, log)
            process = process_context.Process(
                target=_run_on_rank, args=(rank_place, function, argument, rank_pipe), daemon=True
            )
            process.start()
            rank_pipe.close()  # so that the end of the process is the end of the pipe
            started_ranks.append((process, own_pipe))
        return _gather([pipe for _, pipe in started_ranks], limit)
    finally:
        for process, pipe in started_ranks:
            pipe.close()
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # should it not have made its group yet
            process.join()


def _gather(pipes: Sequence[Connection], limit: float) -> list[RankEnd]:
    end_time, late_error = time.monotonic() + limit, HUNG
    end_by_rank: dict[int, RankEnd] = {}
    rank_by_pipe: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while rank_by_pipe and (seconds_left := end_time - time.monotonic()) > 0:
        for pipe in wait(list(rank_by_pipe), seconds_left):
            assert isinstance(pipe, Connection)
            rank = rank_by_pipe.pop(pipe)
            try:
                end_by_rank[rank] = pipe.recv()
            except (EOFError, ConnectionResetError):
                end_by_rank[rank] = RankEnd(DIED)
            if end_by_rank[rank].error and late_error == HUNG:
                end_time, late_error = min(end_time, time.monotonic() + GRACE), ABANDONED
    return [end_by_rank.get(rank, RankEnd(late_error)) for rank in range(len(pipes))]


def _run_on_rank(place: Place, function: Callable[[Any], Any], argument: Any, pipe: Connection) -> None:
    import torch

    os.setpgid(0, 0)  # so that it ends with all that it started, and Ctrl-C is for the parent
    if place.log is not None:
        log_descriptor = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log_descriptor, 1)
        os.dup2(log_descriptor, 2)
    os.environ.update(
        RANK=str(place.rank), LOCAL_RANK=str(place.rank), WORLD_SIZE=str(place.world),
        LOCAL_WORLD_SIZE=str(place.world), MASTER_ADDR=LOOPBACK, MASTER_PORT=str(place.port), OMP_NUM_THREADS="1",
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store already exists
    )  # fmt: skip
    if place.world > torch.cuda.device_count():
        os.environ["DS_ACCELERATOR"] = "cpu"
    gc.freeze()  # imported modules, whose memory is shared with other ranks: no collection is to touch them
    torch.set_num_threads(1)
    try:
        from megastable.engine import distributed

        distributed.start_distributed(place.collective_timeout)
        result = function(argument)
        rank_end = result if isinstance(result, RankEnd) else RankEnd(result=result)
        if not rank_end.error:
            distributed.stop_distributed()
    except BaseException as error:
        rank_end = RankEnd(type(error).__name__, f"{error}\n{traceback.format_exc()}")
    pipe.send(rank_end)
    # Not by an exception: destructors of C++ libraries sometimes abort.
    os._exit(0)
