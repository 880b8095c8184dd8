"""Run a function on every rank of a local process group, to count or measure in real layouts."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

from megastable.base.errors import MegastableError

TIMEOUT = 240.0  # seconds


def launch(world: int, function: Callable[[Any], Any], argument: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Run `function(argument)` on every rank of a process group of `world` local processes; results by rank.

    function: a module-level one. Raises MegastableError if a rank fails.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    context = multiprocessing.get_context("forkserver")
    # Import once instead of on every rank: torch and DeepSpeed, and the imports of DeepSpeed's first engine.
    context.set_forkserver_preload(
        [
            "torch", "torch._dynamo", "torch._inductor.compile_fx", "deepspeed.runtime.zero.muon.muon_optimizer",
            "megastable.engine.engine", "benchmarks.train_speed", "benchmarks.counting",
        ]
    )  # fmt: skip
    results = context.Queue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=_rank, args=(r, world, store.port, function, argument, results), daemon=True)
        for r in range(world)
    ]
    for process in ranks:
        process.start()
    done: dict[int, Any] = {}
    end = time.monotonic() + timeout
    try:
        while len(done) < world:
            ended = [r for r, p in enumerate(ranks) if r not in done and p.exitcode is not None]
            try:
                rank, failed, found = results.get(timeout=0.5)
            except queue.Empty:
                if ended or time.monotonic() > end:
                    what = f"rank {ended[0]} ended" if ended else f"not done after {timeout:.0f} s"
                    raise MegastableError(f"measuring on {world} ranks: {what}") from None
                continue
            if failed:
                raise MegastableError(f"measuring on {world} ranks: rank {rank}: {found}")
            done[rank] = found
        for process in ranks:
            process.join(timeout=30)
    finally:
        for process in ranks:
            with contextlib.suppress(ValueError):
                process.kill()
    return [done[r] for r in range(world)]


def _rank(
    rank: int, world: int, port: int, function: Callable[[Any], Any], argument: Any, results: Any
) -> None:
    import torch

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store already exists
    )  # fmt: skip
    if world > torch.cuda.device_count():
        os.environ["DS_ACCELERATOR"] = "cpu"
    gc.freeze()
    torch.set_num_threads(1)
    try:
        from megastable.engine import distributed

        distributed.start_distributed(timeout=120)
        found = function(argument)
        distributed.stop_distributed()
        results.put((rank, False, found))
    except BaseException as error:
        results.put((rank, True, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        results.close()
        results.join_thread()
        os._exit(1)
