"""Device facts: GPU present, peak TFLOP/s for MFU, memory in use, versions; and the number of ranks on this host."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path

import psutil
import torch
import xxhash

from megastable import __version__
from megastable.base import products

DEVICES = Path("/dev")
# Dense bf16 and fp16 peaks from NVIDIA's data sheets, in TFLOP/s; the more specific name comes first.
NOMINAL = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "B200": 2250.0,
}


def has_gpu() -> bool:
    """Whether torch would find a GPU, without starting CUDA as torch.cuda.is_available() does: a process forked after
    that cannot use a GPU (benchmarks/ranks.py)."""
    if not torch.backends.cuda.is_built():
        return False
    if torch.version.hip is not None:
        return torch.cuda.device_count() > 0
    device_count = torch.cuda._device_count_nvml()
    # Containers may lack NVML, and it does not count MIG slices of a GPU: then a device file is enough.
    return device_count > 0 or (device_count < 0 and any(DEVICES.glob("nvidia[0-9]*")))


def kind_of(device: torch.device) -> int:
    """32 bits of what decides how results are rounded: a GPU's name, or a CPU's with its instructions and threads; and
    the versions of what computes."""
    return xxhash.xxh32_intdigest(_description(device).encode())


def _description(device: torch.device) -> str:
    if device.type == "cuda":
        versions = torch.__version__, torch.version.cuda, torch.backends.cudnn.version()
        return f"{torch.cuda.get_device_name(device)} {versions}"
    computing = f"{torch.__version__} {torch.get_num_threads()} {torch.backends.cpu.get_cpu_capability()}"
    try:
        cpu_lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.processor()} {computing}"
    # "Features" on Arm
    wanted_fields = ("model name", "flags", "Features", "CPU part")
    wanted_lines = dict.fromkeys(cpu_line for cpu_line in cpu_lines if cpu_line.startswith(wanted_fields))
    return "\n".join([computing, *wanted_lines])


def nominal_tflops(name: str, dtype: torch.dtype) -> float | None:
    """The data sheet's figure for a GPU by its name; None if it is unknown or `dtype` does not have 16 bits."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None  # fp32 products run as fp32 or TF32, by torch's settings: measure instead
    return next((peak for key, peak in NOMINAL.items() if key in name), None)


def peak_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(TFLOP/s, source): the data sheet's figure for a known GPU, else a measured matrix product."""
    if device.type != "cuda":
        return measured_tflops(device, dtype, 1024), "measured matrix product"
    device_name = torch.cuda.get_device_name(device)
    if nominal_peak := nominal_tflops(device_name, dtype):
        return nominal_peak, f"nominal, {device_name}"
    # A smaller product would measure kernel launches.
    return measured_tflops(device, dtype, 8192), f"measured matrix product, {device_name}"


def measured_tflops(device: torch.device, dtype: torch.dtype, size: int, seconds: float = 0.3) -> float:
    """TFLOP/s of a square matrix product of `size`: the best of as many as fit into `seconds`."""
    square_matrix = torch.randn(size, size, device=device).to(dtype)
    best_tflops, end_time = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end_time or best_tflops == 0.0:
        start_time = time.perf_counter()
        products.mm(square_matrix, square_matrix)  # the model's own product
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_tflops = max(best_tflops, 2 * size**3 / (time.perf_counter() - start_time) / 1e12)
    return best_tflops


def memory_gib(device: torch.device) -> float:
    """GiB in use: the peak on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return psutil.Process().memory_info().rss / 2**30


def ranks_of_host() -> int:
    """Number of ranks on this host by the launcher's environment; 1 without a launcher."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)


def leads_host() -> bool:
    """Whether this is the first rank of its host, by the launcher's environment: it reads for the others what all hosts
    must see alike."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


PACKAGES = ("torch", "deepspeed", "transformer-engine", "flash-attn", "liger-kernel", "triton", "numpy")


def describe_software(device: torch.device) -> dict[str, str]:
    """Versions by name, as far as installed, and the device."""
    package_versions = {"megastable": __version__, "python": platform.python_version()}
    for package_name in PACKAGES:
        try:
            package_versions[package_name] = metadata.version(package_name)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        package_versions["cuda"] = str(torch.version.cuda or torch.version.hip)
        package_versions["device"] = torch.cuda.get_device_name(device)
        if torch.version.cuda and isinstance(nccl_version := torch.cuda.nccl.version(), tuple):
            package_versions["nccl"] = ".".join(map(str, nccl_version))
    else:
        package_versions["device"] = device.type
    return package_versions | {"system": f"{platform.system()} {platform.machine()}"}
