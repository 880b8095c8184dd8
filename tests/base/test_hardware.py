"""Peaks and memory: a table of names, and measurements that mean something."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from megastable.base import hardware
from megastable.base.hardware import has_gpu, measured_tflops, memory_gib, nominal_tflops, peak_tflops

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("built", "nvml", "files", "there"),
    [
        (True, 2, [], True),
        (True, 0, ["nvidia0"], False),  # CUDA_VISIBLE_DEVICES is empty
        (True, -1, ["nvidia1", "nvidiactl"], True),  # no NVML in a container
        (True, -1, ["nvidiactl", "null"], False),
        (False, 2, ["nvidia0"], False),  # torch for CPUs on a host that has one
    ],
)
def test_a_gpu_is_found_without_starting_cuda(
    built: bool, nvml: int, files: list[str], there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: nvml)
    assert has_gpu() == there


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA H800", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_nominal_peaks_by_name(name: str, peak: float | None, dtype: torch.dtype) -> None:
    assert nominal_tflops(name, dtype) == peak


def test_fp32_has_no_nominal_peak() -> None:
    assert nominal_tflops("NVIDIA H200", torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_is_measured(dtype: torch.dtype) -> None:
    # From a toy to more than any machine of today has.
    assert 1e-6 < measured_tflops(CPU, dtype, 128, seconds=0.02) < 1e3
    peak, source = peak_tflops(CPU, dtype)
    assert 1e-6 < peak < 1e3 and source == "measured matrix product"


def test_a_measurement_is_made_even_without_time() -> None:
    assert measured_tflops(CPU, torch.float32, 64, seconds=0.0) > 0


def test_memory_of_this_process() -> None:
    assert 0.01 < memory_gib(CPU) < psutil.virtual_memory().total / 2**30


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_known_or_measured() -> None:
    device = torch.device("cuda", 0)
    torch.empty(2**20, device=device)
    assert memory_gib(device) > 0
    peak, source = peak_tflops(device, torch.bfloat16)
    assert peak > 1 and torch.cuda.get_device_name(device) in source
    assert peak_tflops(device, torch.float32)[0] > 1
