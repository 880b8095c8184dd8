"""Measures this host's devices: a matrix product on each, and an all-reduce over all of them. Prints JSON.

    python -m megastable.cluster.host_bench

A process for each rank. On a CPU two ranks exchange over loopback (gloo).
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from megastable.base import hardware, products

LIMIT = 80  # seconds after which a process of this benchmark ends itself
CPU_RANKS = 2
SECONDS = 1.0  # of work per device and measurement: a GPU that gets hot lowers its clocks within it
SIZE = {"cuda": 8192, "cpu": 1024}  # of the square matrices: smaller ones measure kernel launches
BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}  # of an all-reduce: bandwidth, not latency
MOST = {"cuda": 200, "cpu": 20}  # all-reduces


def find_devices() -> list[torch.device]:
    """The GPUs, or the CPU where there are none, or none is meant."""
    gpus = hardware.has_gpu() and os.environ.get("DS_ACCELERATOR") != "cpu"
    gpu_count = torch.cuda.device_count() if gpus else 0
    return [torch.device("cuda", n) for n in range(gpu_count)] or [torch.device("cpu")]


def measure_matmul(device: torch.device, seconds: float = SECONDS) -> tuple[float, str]:
    """(TFLOP/s, dtype) of matrix products in the precision that trains there: the median, without a first one.

    A CPU without bf16 instructions computes bf16 products in fp32 (base/products.py).
    """
    dtype = torch.bfloat16 if device.type == "cuda" or products.NATIVE else torch.float32
    size = SIZE[device.type]
    a = torch.randn(size, size, device=device).to(dtype)
    run_seconds = list[float]()
    end_time = time.perf_counter() + seconds
    while len(run_seconds) < 3 or time.perf_counter() < end_time:
        start_time = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        run_seconds.append(time.perf_counter() - start_time)
    return 2 * size**3 / statistics.median(run_seconds[1:]) / 1e12, str(dtype).removeprefix("torch.")


def measure_all_matmuls(devices: list[torch.device]) -> dict[str, Any]:
    """The slowest device's rate; `each` has those of all."""
    rates, dtype = dict[str, float](), ""
    for device in devices:
        rates[str(device)], dtype = measure_matmul(device)
    slowest = min(rates, key=rates.__getitem__)
    return {"tflops": rates[slowest], "dtype": dtype, "device": slowest, "each": rates}


def measure_all_reduce(kind: str, ranks: int, seconds: float = 60.0) -> dict[str, Any]:
    """Bandwidth per rank as NCCL's tests count it ("bus bandwidth": 2 (n-1) / n x bytes / time), between `ranks`
    processes. Raises RuntimeError with what the first failed one said."""
    os.environ["NCCL_DEBUG"] = "WARN"
    end_time = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder_name:
        started_ranks = start_processes(time_all_reduces, (kind, ranks, Path(folder_name)), ranks, join=False)
        try:
            while not started_ranks.join(timeout=0.5, grace_period=1.0):
                if time.monotonic() > end_time:
                    raise RuntimeError(f"no all-reduce of {ranks} ranks within {seconds:.0f} s")
        except (ProcessExitedException, ProcessRaisedException) as error:
            raise RuntimeError(str(error).strip().splitlines()[-1][-300:]) from None
        finally:
            for process in started_ranks.processes:
                process.kill()
        slowest_seconds = float((Path(folder_name) / "slowest").read_text())
    bandwidth = 2 * (ranks - 1) / ranks * BYTES[kind] / slowest_seconds / 1e9
    return {"gb_per_second": bandwidth, "ranks": ranks, "device": kind}


def time_all_reduces(rank: int, kind: str, ranks: int, folder: Path) -> None:
    """A rank: writes the median seconds of an all-reduce, of the slowest rank, into the folder."""
    signal.alarm(LIMIT)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        # gloo would look up the host's name, which containers often lack.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    buffer = torch.zeros(BYTES[kind] // 4, device=kind)
    run_seconds = list[float]()
    for _ in range(MOST[kind]):
        start_time = time.perf_counter()
        dist.all_reduce(buffer)
        if kind == "cuda":
            torch.cuda.synchronize()
        run_seconds.append(time.perf_counter() - start_time)
    slowest_seconds = torch.tensor(statistics.median(run_seconds[1:]), device=kind)
    dist.all_reduce(slowest_seconds, op=dist.ReduceOp.MAX)
    if rank == 0:
        (folder / "slowest").write_text(str(slowest_seconds.item()))
    dist.destroy_process_group()


def measure_host() -> dict[str, Any]:
    """Both measurements; null with a reason for one that failed, or that has no second device."""
    devices = find_devices()
    kind = devices[0].type
    if kind == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # whatever OMP_NUM_THREADS says for one rank
    found: dict[str, Any] = {}
    try:
        found["matmul"] = measure_all_matmuls(devices)
    except RuntimeError as error:
        found |= {"matmul": None, "matmul_unknown": str(error)[:300]}
    if kind == "cuda" and len(devices) == 1:
        return found | {"all_reduce": None, "all_reduce_unknown": "one GPU alone exchanges with none"}
    try:
        found["all_reduce"] = measure_all_reduce(kind, CPU_RANKS if kind == "cpu" else len(devices))
    except (RuntimeError, OSError) as error:
        found |= {"all_reduce": None, "all_reduce_unknown": str(error)[:300]}
    return found


if __name__ == "__main__":
    signal.alarm(LIMIT)  # the last resort: whoever asked may be gone
    print(json.dumps(measure_host()), flush=True)
