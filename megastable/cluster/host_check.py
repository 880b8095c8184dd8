"""Reports the state of this host as one JSON object on stdout: code, versions, disks, the run directory, GPUs.

    python -m megastable.cluster.host_check [--full] [--burn-in SECONDS --seed N] --folder RUN_DIR

`preflight.py` compares the reports of all hosts. --full adds a matrix product on every device and an all-reduce over
them (host_bench.py), --burn-in computations with known answers (burn_in.py). Imports the standard library only: it must
be quick, and work where a package is broken. Every look has a time limit of its own: what does not answer is null in
the report, beside a reason.
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
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from megastable.base.process import package_folders
from megastable.cluster.child_process import TimedProbe, ask_module
from megastable.cluster.gpu_health import read_gpus

TOKEN = ".preflight"  # in the run directory; its text shows that all hosts see the same one
SHM = "/dev/shm"
LOOK = 5.0  # seconds for a look at a file system: ten times what a busy shared one takes
BENCH = (
    90.0  # seconds for host_bench: torch's import from a cold shared file system, then some seconds of work
)
# Seconds for a burn-in beside its work: starts of its processes, its last round, a device that hangs.
BURN_IN = 900.0
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


def report_host(
    folder: Path, full: bool = False, burn_in_seconds: float | None = None, seed: int = 0
) -> dict[str, Any]:
    """The report; the keys are those of `preflight.HostReport`."""
    probes = {
        "code": TimedProbe(lambda: hash_code(package_folders()), LOOK),
        "commit": TimedProbe(lambda: read_commit(package_folders()[0].parent), LOOK),
        "packages": TimedProbe(list_packages, LOOK),
        "disk_free": TimedProbe(lambda: shutil.disk_usage(folder).free, LOOK),
        "shm_free": TimedProbe(lambda: shutil.disk_usage(SHM).free, LOOK),
        "folder": TimedProbe(lambda: look_at_folder(folder), LOOK),
    }
    report_fields: dict[str, Any] = {
        "host": socket.gethostname(),
        "machine": identify_machine(),
        "python": platform.python_version(),
        "variables": collect_variables(os.environ),
    }
    for field_name, probe in probes.items():
        report_fields[field_name], unknown_reason = probe.read_answer()
        if unknown_reason is not None:
            report_fields[f"{field_name}_unknown"] = unknown_reason
    if full:
        report_fields |= run_host_bench()
    if burn_in_seconds is not None:
        report_fields |= run_burn_in(burn_in_seconds, seed)
    report_fields["gpus"], unknown_reason = (
        read_gpus()
    )  # after the work: that is when a hot GPU lowers its clocks
    if unknown_reason is not None:
        report_fields["gpus_unknown"] = unknown_reason
    report_fields["time"] = time.time()  # last, so that it is hardly older than its arrival
    return report_fields


def identify_machine() -> str:
    """What two names of one host have in common and two hosts, or containers, have not; "" if that is not known."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot_id} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""


def allowed_seconds(full: bool, burn_in_seconds: float | None) -> float:
    """Seconds after which a report is not waited for."""
    return ALL + (BENCH if full else 0.0) + (0.0 if burn_in_seconds is None else burn_in_seconds + BURN_IN)


def hash_code(packages: Sequence[Path]) -> str:
    """sha256 of the names and contents of all .py and .yaml files, as hexadecimal digits."""
    total = hashlib.sha256()
    for package in packages:
        for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".yaml")):
            content = path.read_bytes()
            total.update(f"{path.relative_to(package.parent).as_posix()}\0{len(content)}\0".encode())
            total.update(content)
    return total.hexdigest()


def read_commit(checkout: Path) -> str | None:
    """The commit checked out; None for what is no git checkout."""
    if not (checkout / ".git").exists():
        return None
    # A checkout that belongs to another user is readable, too.
    git_words = ["git", "-c", f"safe.directory={checkout}", "-C", str(checkout), "rev-parse", "HEAD"]
    try:
        finished_process = subprocess.run(git_words, capture_output=True, text=True)
    except OSError:
        return None
    return finished_process.stdout.strip() or None


def list_packages() -> dict[str, str]:
    """Installed versions of `PACKAGES`, from their metadata: none is imported."""
    version_by_package = {}
    for package_name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            version_by_package[package_name] = metadata.version(package_name)
    return version_by_package


def collect_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how training runs. Secret or long values as a hash: they are only compared."""
    shown = dict[str, str]()
    for name, value in sorted(environment.items()):
        if name in NAMES or name.startswith(PREFIXES):
            if len(value) > LONGEST or any(secret_word in name.upper() for secret_word in SECRET):
                value = "sha256:" + hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:16]
            shown[name] = value
    return shown


def look_at_folder(folder: Path) -> dict[str, Any]:
    """Whether `folder` is there and can be written, the text of its token, and how long writing 4 KiB durably takes."""
    found: dict[str, Any] = {"seen": folder.is_dir(), "token": None, "writable": False, "seconds": None}
    if not found["seen"]:
        return found
    with suppress(OSError), (folder / TOKEN).open(errors="replace") as file:
        found["token"] = file.read(MOST)
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


def run_host_bench() -> dict[str, Any]:
    """What host_bench measures, or why there is nothing."""
    found_module = ask_module("the benchmark", "megastable.cluster.host_bench", seconds=BENCH)
    if isinstance(found_module, str):
        return {
            "matmul": None,
            "matmul_unknown": found_module,
            "all_reduce": None,
            "all_reduce_unknown": found_module,
        }
    return found_module


def run_burn_in(seconds: float, seed: int) -> dict[str, Any]:
    """What the burn-in found, or why there is nothing."""
    words = ("--seconds", str(seconds), "--seed", str(seed))
    found_module = ask_module("the burn-in", "megastable.cluster.burn_in", *words, seconds=seconds + BURN_IN)
    return (
        {"burn_in": None, "burn_in_unknown": found_module}
        if isinstance(found_module, str)
        else {"burn_in": found_module}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="the run directory, or the one it will be in"
    )
    parser.add_argument("--full", action="store_true", help="measure a matrix product and an all-reduce, too")
    parser.add_argument("--burn-in", type=float, metavar="SECONDS", help="compute what is known, for so long")
    parser.add_argument("--seed", type=int, default=0, help="of the burn-in")
    given = parser.parse_args()
    # The last resort: whoever asked may be gone.
    signal.alarm(int(allowed_seconds(given.full, given.burn_in)))
    print(json.dumps(report_host(given.folder, given.full, given.burn_in, given.seed)), flush=True)


if __name__ == "__main__":
    main()
