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
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megastable.config.tree import RunConfig
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


def train(*configs: RunConfig) -> int:
    """One run after the other, in the same process; the exit code of the last one."""
    from megastable.train import train

    return [train(config, Path("recipe.yaml")) for config in configs][-1]


def _become(rank: int, world: int, port: int) -> None:
    """Make this process a rank, as far as the environment says."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1",
    )  # fmt: skip
    # Rank 0 of DeepSpeed collects garbage six times for an engine. Without this it looks every time at the 430,000
    # objects of the server, and so copies the memory that it shares with it: longer than most tests train.
    gc.freeze()
    import torch

    torch.set_num_threads(1)


def _rank(
    rank: int, world: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    _become(rank, world, port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there already

    from megastable.engine import distributed

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


class Ended(NamedTuple):
    """What came of ranks as a launcher sees them: the first exit code, and what all of them printed."""

    code: int | None
    stdout: str
    stderr: str


def _main(
    rank: int,
    world: int,
    port: int,
    arguments: tuple[str, ...],
    folder: Path,
    prepare: Callable[[], None] | None,
) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    _become(rank, world, port)
    from megastable import train

    if prepare is not None:
        prepare()
    train.main(arguments)


def run_main(
    world: int,
    folder: Path,
    *arguments: str,
    port: int = 0,
    prepare: Callable[[], None] | None = None,
    patience: float = PATIENCE,
) -> Ended:
    """`megastable.train ARGUMENTS` on `world` ranks without a launcher: when one fails, the others are ended at once.

    folder: for what they print. prepare: is called by every rank before. patience: how long to wait. [seconds]
    """
    folder.mkdir(exist_ok=True)
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    processes = [
        CONTEXT.Process(target=_main, args=(r, world, port, arguments, folder, prepare)) for r in range(world)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + patience
    try:
        while True:
            codes = [process.exitcode for process in processes]
            if None not in codes or any(codes):
                break
            assert time.monotonic() < end, f"{codes.count(None)} ranks still run after {patience} s"
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.join()
    first = next((code for code in codes if code), 0)
    return Ended(first, *((folder / name).read_text() for name in ("stdout", "stderr")))
