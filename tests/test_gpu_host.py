"""What a host with a GPU sees of us before the first kernel: a torch that claims to have one, in processes of its own.

Importing megastable starts no CUDA: a process forked from one that has started it cannot use a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
# A host with a GPU, as far as an import can tell. Each of the two calls starts CUDA; NVML, which counts, does not.
GPU_HOST = """
import os, sys, traceback
for name in ("DS_ACCELERATOR", "PYTORCH_NVML_BASED_CUDA_CHECK"):  # the second one DeepSpeed sets: too late for us
    os.environ.pop(name, None)
import torch
started = []
def note(name, answer):
    def called(*_, **__):
        ours = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack()[:-1] if "importlib" not in f.filename]
        started.append(f"{name} from {' <- '.join(ours[:-4:-1])}")
        return answer
    return called
torch._C._cuda_getDeviceCount = note("getDeviceCount", 1)
torch._C._cuda_init = note("init", None)
torch.cuda._device_count_nvml = lambda: 1
torch.backends.cuda.is_built = lambda: True
# torch's own import asks for these where the two above are there
torch._C._cuda_getCurrentRawStream = torch._C._cuda_getCurrentStream = None
"""
EVERYTHING = """
import importlib, importlib.util, itertools, pkgutil, benchmarks, drills, megastable
packages = (megastable, benchmarks, drills)
for found in itertools.chain(*(pkgutil.walk_packages(p.__path__, f"{p.__name__}.") for p in packages)):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # an extra that is not installed
            assert error.name and not error.name.startswith("megastable"), error
assert "megastable.engine.engine" in sys.modules and "benchmarks.scaling" in sys.modules
print(started or "none")
"""
RANK = """
from megastable.engine import distributed
from deepspeed.accelerator import get_accelerator
before = get_accelerator().device_name()
os.environ.update(
    DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
)
distributed.start_distributed(60)
import deepspeed.runtime.zero.muon.muon_optimizer
assert "torch._inductor.compile_fx" not in sys.modules
print(before, distributed.choose_device(), torch.distributed.get_backend())
distributed.stop_distributed()
"""
UNUSABLE = """
from megastable.engine import distributed
from megastable.base.errors import MegastableError
def old(_):
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\\nPlease update")
torch._C._cuda_setDevice = old
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "3"
try:
    distributed.start_distributed(60)
except MegastableError as error:
    print(type(error).__name__, error.code, error)
"""


def on_a_gpu_host(script: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", GPU_HOST + script], cwd=ROOT, env=environment, timeout=PATIENCE, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_no_import_starts_cuda_or_says_anything() -> None:
    assert on_a_gpu_host(EVERYTHING) == "none"


@pytest.mark.slow
def test_a_rank_forked_after_the_import_may_still_be_put_on_the_cpu() -> None:
    """As bench/ranks.py does with more ranks than GPUs: DeepSpeed has chosen the GPU at the import in their parent.

    With what every engine imports it loads no compiler, which would take longer than all else at the start of a rank.
    """
    assert on_a_gpu_host(RANK) == "cuda cpu gloo"


@pytest.mark.slow
def test_a_gpu_that_cannot_be_used_is_told_and_never_replaced_by_the_cpu() -> None:
    told = on_a_gpu_host(UNUSABLE)
    assert told.startswith("MegastableError 1 rank 3 on ") and "\n" not in told
    assert (
        "cannot use cuda:3 of 1: The NVIDIA driver on your system is too old (found version 12040). (" in told
    )
    assert "DS_ACCELERATOR=cpu" in told


def test_what_starts_cuda_is_seen() -> None:
    # A torch built for CUDA has queued questions about the devices for its init.
    alone = "torch.cuda._cudart = torch\ntorch.cuda._queued_calls.clear()\n"
    seen = on_a_gpu_host(f"{alone}torch.cuda.is_available()\ntorch.cuda.init()\nprint(started)")
    assert seen.count("getDeviceCount from") == 1 and seen.count("init from") == 1
