"""Reports the state of this host as one JSON object on stdout: code, versions, disks, the run directory, GPUs.

    python -m megastable.cluster.host_check [--full] --folder RUN_DIR

`preflight.py` compares the reports of all hosts. --full adds a matrix product on every device and an all-reduce over
them (host_bench.py). Imports the standard library only: it must be quick, and work where a package is broken. Every
look has a time limit of its own: what does not answer is null in the report, beside a reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megastable.cluster.gpu_health import read_gpus
from megastable.cluster.timed_probe import TimedProbe

PACKAGE = Path(__file__).absolute().parents[1]
TOKEN = ".preflight"  # in the run directory; its text shows that all hosts see the same one
SHM = "/dev/shm"
LOOK = 5.0  # seconds for a look at a file system: ten times what a busy shared one takes
BENCH = (
    90.0  # seconds for host_bench: torch's import from a cold shared file system, then some seconds of work
)
ALL = 60.0  # seconds for everything else together, at most
LONGEST = 80  # characters of a value that is shown itself
MOST = 1 << 16  # bytes of the token's file read
# What training computes with, and what moves its numbers.
PACKAGES = (
    "torch", "deepspeed", "numpy", "triton", "transformer-engine", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "safetensors", "pydantic",
)  # fmt: skip
PREFIXES = ("NCCL_", "TORCH", "PYTORCH_", "CUDA", "DS_", "GLOO_", "UCX_", "NVTE_", "MKL_")
NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONHASHSEED")
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")


def report(folder: Path, full: bool = False) -> dict[str, Any]:
    """The report; the keys are those of `preflight.HostReport`."""
    probes = {
        "code": TimedProbe(lambda: code_hash(PACKAGE), LOOK),
        "commit": TimedProbe(lambda: commit(PACKAGE.parent), LOOK),
        "packages": TimedProbe(packages, LOOK),
        "disk_free": TimedProbe(lambda: shutil.disk_usage(folder).free, LOOK),
        "shm_free": TimedProbe(lambda: shutil.disk_usage(SHM).free, LOOK),
        "folder": TimedProbe(lambda: look_at(folder), LOOK),
    }
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "variables": variables(os.environ),
    }
    for name, probe in probes.items():
        found[name], why = probe.result()
        if why is not None:
            found[f"{name}_unknown"] = why
    if full:
        found |= bench()
    found["gpus"], why = read_gpus()  # after the work: that is when a hot GPU lowers its clocks
    if why is not None:
        found["gpus_unknown"] = why
    found["time"] = time.time()  # last, so that it is hardly older than its arrival
    return found


def code_hash(package: Path) -> str:
    """sha256 of the names and contents of all .py files, as hexadecimal digits."""
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def commit(checkout: Path) -> str | None:
    """The commit checked out; None for what is no git checkout."""
    if not (checkout / ".git").exists():
        return None
    # A checkout that belongs to another user is readable, too.
    words = ["git", "-c", f"safe.directory={checkout}", "-C", str(checkout), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def packages() -> dict[str, str]:
    """Installed versions of `PACKAGES`, from their metadata: none is imported."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how training runs. Secret or long values as a hash: they are only compared."""
    return {
        name: _shown(name, value) for name, value in sorted(environment.items())
        if name in NAMES or name.startswith(PREFIXES)
    }  # fmt: skip


def _shown(name: str, value: str) -> str:
    if len(value) <= LONGEST and not any(word in name.upper() for word in SECRET):
        return value
    return "sha256:" + hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:16]


def look_at(folder: Path) -> dict[str, Any]:
    """Whether `folder` is there and can be written, the text of its token, and how long writing 4 KiB durably takes."""
    found: dict[str, Any] = {"seen": folder.is_dir(), "token": None, "writable": False, "seconds": None}
    if not found["seen"]:
        return found
    try:
        with (folder / TOKEN).open(errors="replace") as file:
            found["token"] = file.read(MOST)
    except OSError:
        pass
    start = time.monotonic()
    try:
        with tempfile.NamedTemporaryFile(prefix=f"{TOKEN}-", dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        found |= {"writable": True, "seconds": time.monotonic() - start}
    except OSError as error:
        found["why"] = error.strerror or str(error)
    return found


def bench() -> dict[str, Any]:
    """What host_bench measures, or why there is nothing."""
    words = [sys.executable, "-m", "megastable.cluster.host_bench"]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=BENCH)
        return dict(json.loads(output.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        why = f"the benchmark did not end within {BENCH:.0f} s"
    except (ValueError, IndexError, TypeError):
        why = f"the benchmark ended with code {process.returncode}: {errors.strip()[-300:]}"
    return {"matmul": None, "matmul_unknown": why, "all_reduce": None, "all_reduce_unknown": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="the run directory, or the one it will be in"
    )
    parser.add_argument("--full", action="store_true", help="measure a matrix product and an all-reduce, too")
    given = parser.parse_args()
    signal.alarm(int(ALL + BENCH if given.full else ALL))  # the last resort: whoever asked may be gone
    print(json.dumps(report(given.folder, given.full)), flush=True)


if __name__ == "__main__":
    main()
