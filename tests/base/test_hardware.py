"""Peaks and memory: a table of names, and measurements that mean something."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megastable.base import hardware
from megastable.base.hardware import has_gpu, memory_gib, peak_tflops


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
def test_has_gpu_starts_no_cuda(
    built: bool, nvml: int, files: list[str], there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: nvml)
    assert has_gpu() == there


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_tflops_of_a_gpu() -> None:
    device = torch.device("cuda", 0)
    torch.empty(2**20, device=device)
    assert memory_gib(device) > 0
    peak, source = peak_tflops(device, torch.bfloat16)
    assert peak > 1 and torch.cuda.get_device_name(device) in source
    assert peak_tflops(device, torch.float32)[0] > 1
