"""What a device can do: its peak for MFU, and the memory in use."""

from __future__ import annotations

import time

import psutil
import torch

# Dense bf16 peaks by NVIDIA's data sheets, in TFLOP/s.
NOMINAL = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "A100": 312.0, "B200": 2250.0}


def peak_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(TFLOP/s, where it comes from): a data sheet's figure for a known GPU, else a matrix product, measured."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, value in NOMINAL.items():
            if key in name:
                return value, f"nominal, {name}"
    return measured_tflops(device, dtype), "measured matrix product"


def measured_tflops(
    device: torch.device, dtype: torch.dtype, size: int = 1024, seconds: float = 0.3
) -> float:
    """TFLOP/s of a square matrix product of `size`: the best of as many as fit into `seconds`."""
    a = torch.randn(size, size, device=device).to(dtype)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end or best == 0.0:
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start) / 1e12)
    return best


def memory_gib(device: torch.device) -> float:
    """GiB in use at the peak (GPU), or resident now (CPU)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30
