"""Peaks and memory: a table of names, and measurements that mean something."""

from __future__ import annotations

import psutil
import pytest
import torch

from megastable.hardware import measured_tflops, memory_gib, nominal_tflops, peak_tflops

CPU = torch.device("cpu")


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
