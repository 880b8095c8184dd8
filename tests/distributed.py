"""Run a function on several ranks: real processes, gloo, the same calls as under the launcher.

The processes are forked from a server that has imported torch and DeepSpeed once: a test costs seconds, not
the start-up of every rank. The function must be importable, and its arguments and results picklable.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import pickle
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.patience import PATIENCE

CONTEXT = mp.get_context("forkserver")
# Beside torch and the package: what torch, DeepSpeed and numpy import only on the first engine and step, 1,500 modules
# a rank, and what the modules of the tests import.
CONTEXT.set_forkserver_preload(
    [
        "torch", "torch._dynamo", "torch._inductor.compile_fx", "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.comm.mori", "megastable.train",
        "numpy.ma", "rich._emoji_codes",
        "pytest", "hypothesis.strategies", "tests.conftest",
    ]
)  # fmt: skip


def _rank(
    rank: int, world: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1",
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is there already
    )  # fmt: skip
    # Rank 0 of DeepSpeed collects garbage six times for an engine. Without this it looks every time at the 430,000
    # objects of the server, and so copies the memory that it shares with it: longer than most tests train.
    gc.freeze()
    import torch

    from megastable.engine import distributed

    torch.set_num_threads(1)
    try:
        distributed.start_distributed(timeout=PATIENCE)
        # As bytes: a tensor sent through the queue itself would live in memory that ends with this process.
        results.put((rank, "ok", pickle.dumps(fn(*args))))
        distributed.stop_distributed()
    except BaseException as error:
        results.put((rank, "failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        results.close()
        results.join_thread()
        os._exit(1)


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = PATIENCE) -> list[Any]:
    """`fn(*args)` on `world` ranks of one process group; their results by rank. A failed rank fails the test."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    results = CONTEXT.Queue()
    # Held here, not by rank 0: its port is nobody else's, and no rank comes too early, to try again a second later.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        CONTEXT.Process(target=_rank, args=(r, world, store.port, fn, args, results)) for r in range(world)
    ]
    for process in processes:
        process.start()
    answers: dict[int, Any] = {}
    end = time.monotonic() + timeout
    try:
        while len(answers) < world:
            # Before the look at the queue: what an ended rank had to say is in there.
            ended = {
                r: p.exitcode for r, p in enumerate(processes) if r not in answers and p.exitcode is not None
            }
            try:
                rank, outcome, value = results.get(timeout=0.5)
            except queue.Empty:
                assert not ended, f"ended without an answer (rank: exit code): {ended}"
                assert time.monotonic() < end, f"{world - len(answers)} ranks still run after {timeout} s"
                continue
            if outcome == "failed":
                raise AssertionError(f"rank {rank} of {world}, ended already: {ended}: {value}")
            answers[rank] = pickle.loads(value)
        for process in processes:
            process.join(timeout=PATIENCE)
            assert process.exitcode == 0, f"a rank ended with {process.exitcode}"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            with contextlib.suppress(AssertionError):
                process.join(timeout=10)
    return [answers[r] for r in range(world)]
