"""What a host says of itself: quick, complete, and in time where something hangs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from megastable.base.installation import package_folders
from megastable.cluster import gpu_health, host_check
from megastable.cluster.gpu_health import RECENT, read_gpus, recent_xids
from megastable.cluster.host_check import TOKEN, code_hash, look_at, variables
from megastable.cluster.host_report import HostReport, read_report
from megastable.cluster.timed_probe import TimedProbe
from tests.patience import PATIENCE

# NVML as a module that raises what begins with "!"; what is not told is not supported.
NVML = """
import json, pathlib, time, types
class NVMLError(Exception):
    pass
told = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
def __getattr__(name):
    def question(*arguments):
        answer = told.get(name, "!Not Supported")
        if isinstance(answer, str) and answer.startswith("!"):
            raise NVMLError(answer[1:])
        return types.SimpleNamespace(**answer) if isinstance(answer, dict) else answer
    if "hangs" in told:
        time.sleep(600)
    return question if name in told or name.startswith("nvmlDevice") else 0
"""
BARE = {
    "nvmlInit": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": 0, "nvmlDeviceGetName": "GeForce",
    "nvmlSystemGetDriverVersion": "550.54.15", "nvmlDeviceGetPciInfo": {"busId": "00000000:3B:00.0"},
}  # fmt: skip
H100 = BARE | {
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3", "nvmlDeviceGetMemoryInfo": {"total": 81559 << 20, "used": 1024 << 20},
    "nvmlDeviceGetTemperature": 41, "nvmlDeviceGetTotalEccErrors": 2, "nvmlDeviceGetUtilizationRates": {"gpu": 97},
    "nvmlDeviceGetPowerUsage": 671200, "nvmlDeviceGetClockInfo": 1755,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x48,
}  # fmt: skip
LOG = """\
[    3.100000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module
[  100.000000] NVRM: Xid (PCI:0000:3b:00): 48, pid=1, an old one
[90000.000000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.
[90001.000000] NVRM: Xid (PCI:0000:3b:00): 79, once more
[90002.000000] NVRM: Xid (PCI:0000:86:00.0): 13, Graphics Exception
"""


def check(folder: Path, *arguments: str, **environment: str) -> HostReport:
    words = [sys.executable, "-m", "megastable.cluster.host_check", "--folder", str(folder), *arguments]
    done = subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done
    found = read_report(done.stdout)
    assert isinstance(found, HostReport), found
    return found


def program(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of one that this machine may lack."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def fake_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, told: Mapping[str, object]) -> None:
    """In the place of NVML, for processes started from now on."""
    (folder / "pynvml.json").write_text(json.dumps(told))
    (folder / "pynvml.py").write_text(NVML)
    if str(folder) not in os.environ.get("PYTHONPATH", ""):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


# The report


def test_the_report_of_this_host(tmp_path: Path) -> None:
    (tmp_path / TOKEN).write_text("text")
    before = time.time()
    found = check(tmp_path, NCCL_DEBUG="INFO", DS_API_KEY="hush", UNRELATED="1")
    assert before <= found.time <= time.time()
    assert found.packages is not None and found.packages["torch"]
    assert found.code == code_hash(package_folders())
    assert found.variables["NCCL_DEBUG"] == "INFO" and "UNRELATED" not in found.variables
    assert "hush" not in str(found)
    disk = shutil.disk_usage(tmp_path).total
    assert found.disk_free is not None and 0 < found.disk_free < disk and found.shm_free is not None
    folder = found.folder
    assert folder is not None and (folder.seen, folder.token, folder.writable) == (True, "text", True)
    assert folder.seconds is not None and folder.seconds > 0
    assert (found.gpus is None) == bool(found.gpus_unknown)
    assert found.matmul is None and found.all_reduce is None
    assert os.listdir(tmp_path) == [TOKEN]


def test_it_imports_neither_torch_nor_any_other_package() -> None:
    code = "import sys, megastable.cluster.host_check; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tops = {name.partition(".")[0] for name in done.stdout.split()} - {"megastable"}
    assert not tops & {"torch", "pydantic", "yaml", "psutil", "numpy", "rich"}
    assert "megastable.run" not in done.stdout


@pytest.mark.slow
def test_in_full_it_measures(tmp_path: Path) -> None:
    found = check(tmp_path, "--full")
    assert found.matmul is not None and found.matmul.tflops > 0, found
    assert min(found.matmul.each.values()) == found.matmul.tflops and found.matmul.device in found.matmul.each
    if found.matmul.device == "cpu":
        assert (
            found.all_reduce is not None
            and found.all_reduce.gb_per_second > 0
            and found.all_reduce.ranks == 2
        )


def test_a_benchmark_that_fails_is_told(tmp_path: Path) -> None:
    """Where torch cannot be imported, all else is reported."""
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')\n"
    )
    path = os.pathsep.join([str(tmp_path), *(str(folder.parent) for folder in package_folders())])
    found = check(tmp_path, "--full", "--burn-in", "1", PYTHONPATH=path)
    assert found.matmul is None and "libcudart.so.12" in found.matmul_unknown + found.all_reduce_unknown
    assert found.burn_in is None and "libcudart.so.12" in found.burn_in_unknown
    assert found.code is not None


# Probes


def test_a_probe_answers_or_says_why() -> None:
    assert TimedProbe(lambda: {"a": [1, None]}, PATIENCE).result() == ({"a": [1, None]}, None)
    assert TimedProbe(lambda: "x" * 200_000, PATIENCE).result() == ("x" * 200_000, None)
    assert TimedProbe(lambda: Path("/none").read_text(), PATIENCE).result() == (
        None,
        "/none: No such file or directory",
    )
    assert (
        TimedProbe(lambda: 1 // 0, PATIENCE).result()[1]
        == "ZeroDivisionError: integer division or modulo by zero"
    )
    assert TimedProbe(lambda: os.abort(), PATIENCE).result() == (None, "the probe was killed")


def test_what_hangs_is_left_behind_and_holds_nothing_of_ours(tmp_path: Path) -> None:
    """As ssh does, the caller waits until nobody has the other end of the output."""
    os.mkfifo(tmp_path / "pipe")
    code = (
        "import os, sys\nfrom megastable.cluster.timed_probe import TimedProbe\n"
        "def stuck():\n"
        "    import signal\n"
        "    open(sys.argv[2], 'w').write(str(os.getpid()))\n"
        "    open(sys.argv[1])\n"  # nobody ever writes into it
        "one, two = TimedProbe(stuck, 0.5), TimedProbe(lambda: 'well', 60.0)\n"
        "print(one.result(), two.result())\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "pipe"), str(tmp_path / "pid")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert "no answer within" in done.stdout and "('well', None)" in done.stdout


def test_a_probe_holds_none_of_our_files() -> None:
    """One that waits for a dead disk cannot be killed, and what it held open would keep our callers waiting."""

    def held() -> list[str]:
        found = []
        for fd in range(256):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
        return found

    names, why = TimedProbe(held, PATIENCE).result()
    assert why is None and names[:3] == ["/dev/null"] * 3
    assert [name.partition(":")[0] for name in names[3:]] == ["pipe"]  # to us


def test_a_file_system_that_hangs_does_not_hang_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the token is a pipe that nobody writes into: whoever opens it waits for ever."""
    os.mkfifo(tmp_path / TOKEN)
    monkeypatch.setattr(host_check, "LOOK", 0.3)
    before = {process.pid for process in psutil.Process().children()}
    found = HostReport.model_validate(host_check.report(tmp_path))
    assert found.folder is None and "no answer" in found.folder_unknown
    assert found.disk_free is not None
    until = time.monotonic() + PATIENCE
    while {p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE} - before:
        assert time.monotonic() < until


# Parts


def test_the_code_is_known_by_names_and_contents(tmp_path: Path) -> None:
    def package(**files: str) -> str:
        shutil.rmtree(tmp_path / "p", ignore_errors=True)
        for name, text in files.items():
            path = tmp_path / "p" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(text)
        return code_hash([tmp_path / "p"])

    one = package(a="1", b="2")
    assert one == package(b="2", a="1")
    others = [package(a="1", b="3"), package(a="12", b=""), package(a="1", c="2"), package(a="1", x__b="2")]
    assert len({one, *others}) == 5
    package(a="1", b="2")
    (tmp_path / "p/notes.txt").write_text("x")
    assert code_hash([tmp_path / "p"]) == one


def test_variables_that_are_long_or_secret_are_only_compared() -> None:
    long, secret = "a" * 300, "s3cret"
    found = variables({"LD_LIBRARY_PATH": long, "NCCL_TOKEN": secret, "NCCL_DEBUG": "INFO", "HOME": "/"})
    assert found.keys() == {"LD_LIBRARY_PATH", "NCCL_TOKEN", "NCCL_DEBUG"} and found["NCCL_DEBUG"] == "INFO"
    assert long not in found.values() and secret not in found.values()
    assert found != variables({"LD_LIBRARY_PATH": long, "NCCL_TOKEN": "other", "NCCL_DEBUG": "INFO"})


def test_a_folder_that_is_missing_or_cannot_be_written(tmp_path: Path) -> None:
    assert look_at(tmp_path / "none") == {"seen": False, "token": None, "writable": False, "seconds": None}
    told = look_at(Path("/proc/self"))
    assert told["seen"] and not told["writable"] and told["why"]


# GPUs


def test_gpus_are_read_by_nvml_and_dmesg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = float(Path("/proc/uptime").read_text().split()[0])
    program(tmp_path, "dmesg", f"echo '[{seconds:.6f}] NVRM: Xid (PCI:0000:3b:00): 79, pid=1'", monkeypatch)
    fake_driver(tmp_path, monkeypatch, H100)
    gpus, why = read_gpus()
    assert why is None and gpus == [
        {
            "index": 0, "name": "NVIDIA H100 80GB HBM3", "driver": "550.54.15", "memory": 81559 << 20,
            "memory_used": 1024 << 20, "temperature": 41, "ecc_uncorrected": 2, "utilization": 97,
            "power": 671.2, "clock": 1755, "xid": [79],
            "clocks_throttled": ["hardware slowdown", "hardware thermal slowdown"],
        }
    ]  # fmt: skip
    program(
        tmp_path, "dmesg", "echo 'read kernel buffer failed: Operation not permitted'; exit 1", monkeypatch
    )
    fake_driver(tmp_path, monkeypatch, BARE)
    (poor,) = read_gpus()[0] or []
    assert {key for key, value in poor.items() if value is None} == poor.keys() - {"index", "name", "driver"}
    for harmless in (0x00, 0x05):  # idle, or a limit that was chosen
        fake_driver(tmp_path, monkeypatch, H100 | {"nvmlDeviceGetCurrentClocksThrottleReasons": harmless})
        assert (read_gpus()[0] or [])[0]["clocks_throttled"] == []


def test_xid_errors_of_the_last_day() -> None:
    assert recent_xids(LOG, 90_100.0) == {"0:3b:00": [79], "0:86:00": [13]}
    assert recent_xids(LOG, 200.0)["0:3b:00"] == [48, 79]
    assert recent_xids(LOG, 90_002.0 + RECENT + 1) == {}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"nvmlInit": "!Driver Not Loaded"}, "the GPUs' driver: Driver Not Loaded"),
        (BARE | {"nvmlDeviceGetHandleByIndex": "!GPU is lost"}, "the GPUs' driver: GPU is lost"),
        (BARE | {"hangs": 1}, "the GPUs' driver did not end within"),
        (BARE | {"nvmlDeviceGetCount": 0}, "lists no GPU"),
        (BARE | {"nvmlDeviceGetPciInfo": {}}, "ended with code 1"),
    ],
)
def test_gpus_that_cannot_be_read(
    told: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "dmesg", "true", monkeypatch)
    monkeypatch.setattr(gpu_health, "SECONDS", 0.5 if "hangs" in told else PATIENCE)
    fake_driver(tmp_path, monkeypatch, told)
    gpus, why = read_gpus()
    assert gpus is None and why is not None and said in why
