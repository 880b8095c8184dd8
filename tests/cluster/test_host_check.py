"""What a host says of itself: quick, complete, and in time where something hangs; asked once, or again and again."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from megastable.base.process import package_folders
from megastable.cluster import gpu_health, host_check
from megastable.cluster.agent import Agent
from megastable.cluster.gpu_health import read_gpus
from megastable.cluster.host_check import TOKEN, collect_variables, hash_code
from megastable.cluster.host_survey import HostReport, find_existing_folder, read_report, survey_hosts
from megastable.cluster.hosts import Hosts
from megastable.cluster.launcher import HostSlots, TrainingCommand
from megastable.cluster.preflight import Wanted, compare_reports
from megastable.cluster.reach import Local
from megastable.cluster.store import Store
from megastable.cluster.this_host import HostWatch
from megastable.run.directory import RunDirectory
from tests.patience import PATIENCE, until

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


def test_host_check_reports_this_host(tmp_path: Path) -> None:
    (tmp_path / TOKEN).write_text("text")
    before = time.time()
    found = check(tmp_path, NCCL_DEBUG="INFO", DS_API_KEY="hush", UNRELATED="1")
    assert before <= found.time <= time.time()
    assert found.packages is not None and found.packages["torch"]
    assert found.code == hash_code(package_folders())
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


def test_host_check_imports_neither_torch_nor_any_other_package() -> None:
    code = "import sys, megastable.cluster.host_check; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tops = {name.partition(".")[0] for name in done.stdout.split()} - {"megastable"}
    assert not tops & {"torch", "pydantic", "yaml", "psutil", "numpy", "rich"}
    assert "megastable.run" not in done.stdout


@pytest.mark.slow
def test_host_check_measures_in_full(tmp_path: Path) -> None:
    found = check(tmp_path, "--full", DS_ACCELERATOR="cpu")
    assert (
        found.matmul is not None
        and found.matmul.each == {"cpu": found.matmul.tflops}
        and found.matmul.tflops > 0
    )
    assert found.all_reduce is not None and found.all_reduce.gb_per_second > 0 and found.all_reduce.ranks == 2


# Probes


def test_report_is_not_hung_by_a_file_system_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the token is a pipe that nobody writes into: whoever opens it waits for ever."""
    os.mkfifo(tmp_path / TOKEN)
    monkeypatch.setattr(host_check, "LOOK", 0.3)
    before = {process.pid for process in psutil.Process().children()}
    found = HostReport.model_validate(host_check.report_host(tmp_path))
    assert found.folder is None and "no answer" in found.folder_unknown
    assert found.disk_free is not None
    until = time.monotonic() + PATIENCE
    while {p.pid for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE} - before:
        assert time.monotonic() < until


# Parts


def test_variables_that_are_long_or_secret_are_hashed() -> None:
    long, secret = "a" * 300, "s3cret"
    found = collect_variables(
        {"LD_LIBRARY_PATH": long, "NCCL_TOKEN": secret, "NCCL_DEBUG": "INFO", "HOME": "/"}
    )
    assert found.keys() == {"LD_LIBRARY_PATH", "NCCL_TOKEN", "NCCL_DEBUG"} and found["NCCL_DEBUG"] == "INFO"
    assert long not in found.values() and secret not in found.values()
    assert found != collect_variables({"LD_LIBRARY_PATH": long, "NCCL_TOKEN": "other", "NCCL_DEBUG": "INFO"})


# GPUs


def test_read_gpus_by_nvml_and_dmesg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_read_gpus_says_why_they_cannot_be_read(
    told: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "dmesg", "true", monkeypatch)
    monkeypatch.setattr(gpu_health, "SECONDS", 0.5 if "hangs" in told else PATIENCE)
    fake_driver(tmp_path, monkeypatch, told)
    gpus, why = read_gpus()
    assert gpus is None and why is not None and said in why


class Shifted:
    """Hosts whose name is the error of their clock, in seconds; one does not answer."""

    def build_command(self, host: str, command: Sequence[str]) -> list[str]:
        if host == "dead":
            return ["sh", "-c", "echo ssh: connect to host dead port 22: No route to host; exit 255"]
        shift = f"import json, sys; r = json.load(sys.stdin); r['time'] += {host}; print(json.dumps(r))"
        return [
            "sh",
            "-c",
            '"$@" | "$0" -c "$SHIFT"'.replace("$SHIFT", shift),
            command[0],
            *Local().build_command("", command),
        ]


def test_survey_gets_reports_tokens_and_clocks(tmp_path: Path) -> None:
    told: list[str] = []
    found = survey_hosts(["0", "10000", "dead", "-10000"], Shifted(), tmp_path, full=False, told=told.append)
    assert found.reports["dead"] == "ssh: connect to host dead port 22: No route to host"
    reports = [found.reports[host] for host in ("0", "10000", "-10000")]
    for report in reports:
        assert isinstance(report, HostReport) and report.folder is not None, report
        assert report.folder.token == found.token
    assert sorted(told) == sorted(found.reports) and found.offsets.keys() == {"0", "10000", "-10000"}
    for host, offset in found.offsets.items():
        assert abs(offset - float(host)) < PATIENCE
    assert not (tmp_path / TOKEN).exists()


def test_existing_is_the_folder_above_what_is_not_made_yet(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert (
        find_existing_folder(tmp_path)
        == find_existing_folder(tmp_path / "a/b")
        == find_existing_folder(tmp_path / "file/b")
        == tmp_path
    )


def test_survey_asks_the_hosts_also_where_the_folder_cannot_be_written() -> None:
    """Between two attempts the disk may be full: the supervisor waits for room, and must not end for it."""
    found = survey_hosts(["x"], Local(), Path("/proc/self"), full=False)
    assert found.unwritten.startswith("/proc/self/.preflight could not be written: ")
    told = [
        one.text
        for one in compare_reports(found.reports, Wanted(token=found.token, cpu=True))
        if one.check == "folder"
    ]
    assert len(told) == 1 and told[0].startswith("the run directory cannot be written: ")


def test_host_watch_reads_gpus_as_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "dmesg", "exit 1", monkeypatch)
    fake_driver(tmp_path, monkeypatch, H100)
    watch = HostWatch(0.05)
    reading = until(watch.latest_reading)
    assert reading.gauges == {
        "utilization": [0.97], "memory_used": [1.0], "memory": [79.65], "temperature": [41.0], "power": [671.2],
        "clock": [1755.0], "ecc_uncorrected": [2.0],
    }  # fmt: skip
    assert (
        reading.throttled == {0: ["hardware slowdown", "hardware thermal slowdown"]} and not reading.unknown
    )
    assert 0 < reading.memory_free < reading.memory
    fake_driver(tmp_path, monkeypatch, H100 | {"nvmlDeviceGetTemperature": 88})
    until(lambda: watch.latest_reading().gauges["temperature"] == [88.0])


def test_agent_sends_its_readings_to_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_driver(tmp_path, monkeypatch, H100)
    run = RunDirectory(tmp_path)
    with Store(run) as store:
        training = TrainingCommand("recipe")
        fleet = Hosts(run, store, [HostSlots("first", (0,))], Local("elsewhere"), 60.0, False, training)
        agent = Agent(run, "first")
        link = agent._connect()
        reading = until(agent.watch.latest_reading)
        monkeypatch.setattr(link, "receive_messages", Mock(side_effect=OSError))  # after one turn
        with pytest.raises(OSError):
            agent._serve(link)
        assert until(fleet.latest_readings) == {"first": reading} and reading.gauges["temperature"] == [41.0]
        link.send_message({"machine": {"memory": "of another version"}})
        until(lambda: store.agents["first"].machine.get("memory") == "of another version")
        assert fleet.latest_readings() == {}
        link.close()
