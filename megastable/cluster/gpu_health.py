"""Reads the state of this host's GPUs: memory, load, power, clocks and why they are held back, ECC and Xid errors.

    python -m megastable.cluster.gpu_health     # prints it as one JSON object

By NVML (the package nvidia-ml-py) and the kernel's log (Xid: docs.nvidia.com/deploy/xid-errors). In a process of its
own, because a driver that has lost a GPU may never answer.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megastable.base.process import install_command
from megastable.cluster.child_process import ask_module

SECONDS = 10.0  # allowed to the process: a driver that works answers in 1 to 3
XID = re.compile(r"\[\s*(?P<seconds>\d+\.\d+)\].*NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
RECENT = 24 * 3600.0  # seconds: older Xid errors were seen to, or the GPU has worked since
# Bits of NVML's clocks event reasons that are trouble; idle and chosen limits are none.
REASONS = {
    0x08: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}  # fmt: skip
NO_PACKAGE = "nvidia-ml-py is missing"
NO_DRIVER = "NVML Shared Library Not Found"  # of NVML: a host without GPUs


def read_gpus() -> tuple[list[dict[str, Any]] | None, str | None]:
    """(GPUs in the driver's order, None), or (None, why they are unknown)."""
    found_module = ask_module("the GPUs' driver", "megastable.cluster.gpu_health", seconds=SECONDS)
    return (
        (None, found_module) if isinstance(found_module, str) else (found_module["gpus"], found_module["why"])
    )


def ask_driver() -> dict[str, Any]:
    """gpus: as `read_gpu`, of each; why: there are none, or they cannot be read."""
    try:
        import pynvml
    except ImportError:
        return {"gpus": None, "why": f"{NO_PACKAGE}: {install_command()}"}

    try:
        pynvml.nvmlInit()
        xids_by_place, gpu_count = read_xids(), pynvml.nvmlDeviceGetCount()
        gpus = [read_gpu(index, xids_by_place) for index in range(gpu_count)]
    except pynvml.NVMLError as error:
        return {"gpus": None, "why": f"the GPUs' driver: {error}"}
    return {"gpus": gpus, "why": None} if gpus else {"gpus": None, "why": "the driver lists no GPU"}


def read_gpu(index: int, errors: dict[str, list[int]] | None) -> dict[str, Any]:
    """The fields of `host_survey.GpuState`. errors: Xid by PCI address, None = unknown."""
    import pynvml

    def ask(question: Callable[..., Any], *arguments: int) -> Any:
        """None: this GPU, or this driver, does not know."""
        try:
            return question(handle, *arguments)
        except pynvml.NVMLError:
            return None

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
    usage = ask(pynvml.nvmlDeviceGetUtilizationRates)
    milliwatts = ask(pynvml.nvmlDeviceGetPowerUsage)
    # Its newer name is unknown to drivers before 535.
    throttle_bits = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    throttled = [reason_text for bit, reason_text in REASONS.items() if (throttle_bits or 0) & bit]
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return {
        "index": index, "name": pynvml.nvmlDeviceGetName(handle), "driver": pynvml.nvmlSystemGetDriverVersion(),
        "memory": memory and memory.total, "memory_used": memory and memory.used,
        "temperature": ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        "ecc_uncorrected": ask(pynvml.nvmlDeviceGetTotalEccErrors, *uncorrected),
        "xid": None if errors is None else errors.get(_place(pynvml.nvmlDeviceGetPciInfo(handle).busId), []),
        "utilization": usage and usage.gpu, "power": None if milliwatts is None else milliwatts / 1000,
        "clock": ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        "clocks_throttled": None if throttle_bits is None else throttled,
    }  # fmt: skip


def read_xids() -> dict[str, list[int]] | None:
    """As `recent_xids`, of this host; None where the kernel's log is not for this user."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", check=True).stdout
        return recent_xids(log, float(Path("/proc/uptime").read_text().split()[0]))
    except (OSError, subprocess.CalledProcessError):
        return None


def recent_xids(log: str, uptime: float) -> dict[str, list[int]]:
    """Xid errors of the last day by PCI address (bus:device, lower case), each code once, in order.

    log: of dmesg, with seconds since boot; uptime: of the host. [seconds]
    """
    xids_by_place: dict[str, list[int]] = {}
    for log_match in XID.finditer(log):
        if uptime - float(log_match["seconds"]) <= RECENT:
            known_codes = xids_by_place.setdefault(_place(log_match["bus"]), [])
            if int(log_match["code"]) not in known_codes:
                known_codes.append(int(log_match["code"]))
    return xids_by_place


def _place(address: str) -> str:
    """domain:bus:device without the function; NVML writes eight digits of domain, the kernel four."""
    address_parts = address.lower().partition(".")[0].split(":")
    pci_domain = address_parts[0].lstrip("0") if len(address_parts) == 3 else ""
    return ":".join([pci_domain or "0", *address_parts[-2:]])


if __name__ == "__main__":
    print(json.dumps(ask_driver()))
