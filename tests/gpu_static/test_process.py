"""Processes of a GPU host: what must not have touched CUDA, and that tests/gpu can be collected there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megastable.model.cores import sdpa_attention
from tests.gpu_static import fake

ROOT = Path(__file__).parents[2]
ASKED = """
from benchmarks.ranks import launch_ranks
from tests.gpu_static.test_process import poisoned
if __name__ == "__main__":
    print(launch_ranks(2, poisoned, None))
"""


def poisoned(_: None) -> bool:
    """On a rank: whether CUDA was looked at before the fork, after which it cannot be used any more."""
    return bool(torch.cuda._is_in_bad_fork())


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Without the fake GPU: the processes are real, and find no driver."""
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]  # where packages may lie
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_ranks_of_a_measurement_can_use_cuda(tmp_path: Path) -> None:
    """the ranks that bench/ranks.py starts can begin to use CUDA: nothing asked the driver before the fork"""
    script = tmp_path / "asked.py"
    script.write_text(ASKED)
    done = python(str(script))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[False, False]"


def test_the_tests_of_a_gpu_host_are_collected_there() -> None:
    """tests/gpu is imported and collected on these versions"""
    done = python("-m", "pytest", "tests/gpu", "--collect-only", "-q", "-n0", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-2000:]
    assert int(done.stdout.split(" tests collected")[0].split()[-1]) > 100


@pytest.mark.parametrize(
    "file",
    [
        "tests/parallel/test_mappings.py", "tests/parallel/test_compiled.py", "tests/base/test_fingerprint_kernel.py",
        "tests/test_gpu_host.py", "tests/engine/test_synchronisations.py", "tests/model/test_elementwise.py",
    ],
)  # fmt: skip
def test_what_the_cpu_suite_asks_of_gpu_hosts(file: str) -> None:
    """files of the CPU suite pass: compiled collectives, own kernels, imports without CUDA, no waits"""
    done = python("-m", "pytest", file, "-q", "-n0", "-p", "no:cacheprovider")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-2000:]


# Which kernel torch takes for attention


def grad_fn(dtype: torch.dtype, groups: int) -> str:
    def heads(number: int) -> Tensor:
        return torch.empty(2, number, 512, 64, device=fake.GPU, dtype=dtype, requires_grad=True)

    with fake.mode:
        y = sdpa_attention(heads(8), heads(8 // groups), heads(8 // groups), None)
    return type(y.grad_fn).__name__


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
def test_attention_is_fused(dtype: torch.dtype, groups: int) -> None:
    """torch takes a fused kernel for attention: cuDNN's for bf16 and fp16, the memory-efficient one for fp32"""
    wanted = "Efficient" if dtype == torch.float32 else "Cudnn"
    assert grad_fn(dtype, groups) == f"ScaledDotProduct{wanted}AttentionBackward0"
