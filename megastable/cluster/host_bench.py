"""Measures this host's devices: a matrix product on each, and an all-reduce over all of them. Prints JSON.

    python -m megastable.cluster.host_bench

A process of its own for each rank, started by this one. On a CPU two ranks exchange over loopback (gloo).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megastable.base import hardware, products

LIMIT = 80  # seconds after which a process of this benchmark ends itself
CPU_RANKS = 2
SECONDS = 1.0  # of work per device and measurement: a GPU that gets hot lowers its clocks within it
SIZE = {"cuda": 8192, "cpu": 1024}  # of the square matrices: smaller ones measure kernel launches
BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}  # of an all-reduce: bandwidth, not latency
MOST = {"cuda": 200, "cpu": 20}  # all-reduces


def measured_matmul(device: torch.device, seconds: float = SECONDS) -> tuple[float, str]:
    """(TFLOP/s, dtype) of matrix products in the precision that trains there: the median, without a first one.

    A CPU without bf16 instructions computes bf16 products in fp32 (base/products.py).
    """
    dtype = torch.bfloat16 if device.type == "cuda" or products.NATIVE else torch.float32
    size = SIZE[device.type]
    a = torch.randn(size, size, device=device).to(dtype)
    times = list[float]()
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times[1:]) / 1e12, str(dtype).removeprefix("torch.")


def matmul(devices: list[torch.device]) -> dict[str, Any]:
    """The slowest device's rate; `each` has those of all."""
    rates, dtype = dict[str, float](), ""
    for device in devices:
        rates[str(device)], dtype = measured_matmul(device)
    slowest = min(rates, key=rates.__getitem__)
    return {"tflops": rates[slowest], "dtype": dtype, "device": slowest, "each": rates}


def all_reduce(kind: str, ranks: int, seconds: float = 60.0) -> dict[str, Any]:
    """Bandwidth per rank as NCCL's tests count it ("bus bandwidth": 2 (n-1) / n x bytes / time), between `ranks`
    processes. Raises RuntimeError with what the first failed one said."""
    with tempfile.TemporaryDirectory() as name:
        folder, started = Path(name), list[subprocess.Popen[bytes]]()
        words = [sys.executable, "-m", "megastable.cluster.host_bench", "--kind", kind, "--of", str(ranks)]
        try:
            for rank in range(ranks):
                # Files, because a full pipe of a rank that nobody reads yet would stop all of them.
                with (folder / f"out{rank}").open("wb") as out, (folder / f"err{rank}").open("wb") as err:
                    started.append(
                        subprocess.Popen(
                            [*words, "--rank", str(rank), "--meet", f"{folder}/meet"], stdin=subprocess.DEVNULL,
                            stdout=out, stderr=err, env=os.environ | {"NCCL_DEBUG": "WARN"},
                        )
                    )  # fmt: skip
            failed = _first_failure(started, seconds)
        finally:
            for process in started:
                process.kill()
                process.wait()
        if failed is not None:
            lines = (folder / f"err{failed}").read_text(errors="replace").strip().splitlines()
            raise RuntimeError((lines or [f"exit code {started[failed].returncode}"])[-1][-300:])
        slowest = max(float((folder / f"out{rank}").read_text().splitlines()[-1]) for rank in range(ranks))
    return {
        "gb_per_second": 2 * (ranks - 1) / ranks * BYTES[kind] / slowest / 1e9,
        "ranks": ranks,
        "device": kind,
    }


def _first_failure(ranks: list[subprocess.Popen[bytes]], seconds: float) -> int | None:
    """The rank that failed first: the others would wait for it. None if all ended well. Raises RuntimeError."""
    until = time.monotonic() + seconds
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        if time.monotonic() > until:
            raise RuntimeError(f"no all-reduce of {len(ranks)} ranks within {seconds:.0f} s")
        time.sleep(0.02)
    return next((rank for rank, code in enumerate(codes) if code), None)


def be_a_rank(kind: str, rank: int, of: int, meet: Path) -> float:
    """Median seconds of an all-reduce."""
    if kind == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = (
            "lo"  # gloo would look up the host's name, which containers often lack
        )
        device = torch.device("cpu")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // of))
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=of)
    buffer = torch.zeros(BYTES[kind] // 4, device=device)
    times = list[float]()
    for _ in range(MOST[kind]):
        start = time.perf_counter()
        dist.all_reduce(buffer)
        if kind == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    dist.barrier()
    dist.destroy_process_group()
    return statistics.median(times[1:])


def measure() -> dict[str, Any]:
    """Both measurements; null with a reason for one that failed, or that has no second device."""
    gpus = hardware.has_gpu() and os.environ.get("DS_ACCELERATOR") != "cpu"
    count = torch.cuda.device_count() if gpus else 0
    devices = [torch.device("cuda", n) for n in range(count)] or [torch.device("cpu")]
    if not count:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # whatever OMP_NUM_THREADS says for one rank
    found: dict[str, Any] = {}
    try:
        found["matmul"] = matmul(devices)
    except RuntimeError as error:
        found |= {"matmul": None, "matmul_unknown": str(error)[:300]}
    if count == 1:
        return found | {"all_reduce": None, "all_reduce_unknown": "one GPU alone exchanges with none"}
    try:
        found["all_reduce"] = all_reduce("cuda", count) if count else all_reduce("cpu", CPU_RANKS)
    except (RuntimeError, OSError) as error:
        found |= {"all_reduce": None, "all_reduce_unknown": str(error)[:300]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kind", choices=sorted(SIZE))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--of", type=int)
    parser.add_argument("--meet", type=Path)
    given = parser.parse_args()
    signal.alarm(LIMIT)  # the last resort: whoever asked may be gone
    if given.rank is None:
        print(json.dumps(measure()), flush=True)
    else:
        print(be_a_rank(given.kind, given.rank, given.of, given.meet), flush=True)


if __name__ == "__main__":
    main()
