"""Reads the state of this host's GPUs: memory, load, power, clocks and why they are held back, ECC and Xid errors.

Source: `nvidia-smi --query-gpu` and the kernel's log (Xid: docs.nvidia.com/deploy/xid-errors). Standard library only.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SECONDS = 10.0  # allowed to nvidia-smi: a driver that works answers in 1 to 3, one that has lost a GPU never
# As --query-gpu names them. A driver before 535 knows the last one under its older name only.
FIELDS = (
    "index", "name", "pci.bus_id", "driver_version", "memory.total", "memory.used", "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total", "utilization.gpu", "power.draw", "clocks.sm",
)  # fmt: skip
CLOCKS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of the last field (nvml.h, nvmlClocksEventReasons) for trouble; idle and chosen limits are none.
REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
XID = re.compile(r"\[\s*(?P<seconds>\d+\.\d+)\].*NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)")
RECENT = 24 * 3600.0  # seconds: older Xid errors were seen to, or the GPU has worked since
MIB = 1 << 20


def read_gpus() -> tuple[list[dict[str, Any]] | None, str | None]:
    """(GPUs in nvidia-smi's order, None), or (None, why they are unknown)."""
    output, why = "", ""
    for clocks in CLOCKS:
        output, why = _run(
            ["nvidia-smi", f"--query-gpu={','.join((*FIELDS, clocks))}", "--format=csv,noheader,nounits"]
        )
        if not why or "not a valid field" not in why:
            break
    if why:
        return None, why
    log, unknown = _run(["dmesg"])
    errors = None if unknown else recent_xids(log, _uptime())
    try:
        gpus = [parse_gpu(line, errors) for line in output.splitlines() if line.strip()]
    except ValueError as error:
        return None, f"nvidia-smi: {error}"
    return (gpus, None) if gpus else (None, "nvidia-smi lists no GPU")


def parse_gpu(line: str, errors: dict[str, list[int]] | None) -> dict[str, Any]:
    """A line of nvidia-smi as a dict; None for what the GPU does not tell. errors: Xid by PCI address, None = unknown.

    Raises ValueError for a line that is not of such a table.
    """
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(FIELDS) + 1 or not cells[0].isdecimal():
        raise ValueError(f"unexpected output: {line[:200]}")
    index, name, bus, driver, total, used, temperature, ecc, busy, power, clock, clocks = cells
    memory, taken = _number(total), _number(used)
    return {
        "index": int(index),
        "name": name,
        "driver": driver,
        "memory": None if memory is None else memory * MIB,
        "memory_used": None if taken is None else taken * MIB,
        "temperature": _number(temperature),
        "ecc_uncorrected": _number(ecc),
        "xid": None if errors is None else errors.get(_place(bus), []),
        "utilization": _number(busy),
        "power": _real(power),
        "clock": _number(clock),
        "clocks_throttled": throttled(clocks),
    }


def throttled(mask: str) -> list[str] | None:
    """Reasons for which the clocks are held back, from a hexadecimal mask; None if there is no mask."""
    try:
        bits = int(mask, 16)
    except ValueError:
        return None
    return [reason for bit, reason in REASONS.items() if bits & bit]


def recent_xids(log: str, uptime: float) -> dict[str, list[int]]:
    """Xid errors of the last day by PCI address (bus:device, lower case), each code once, in order.

    log: of dmesg, with seconds since boot; uptime: of the host. [seconds]
    """
    found: dict[str, list[int]] = {}
    for match in XID.finditer(log):
        if uptime - float(match["seconds"]) <= RECENT:
            codes = found.setdefault(_place(match["bus"]), [])
            if int(match["code"]) not in codes:
                codes.append(int(match["code"]))
    return found


def _place(address: str) -> str:
    """domain:bus:device without the function; nvidia-smi writes eight digits of domain, the kernel four."""
    parts = address.lower().partition(".")[0].split(":")
    domain = parts[0].lstrip("0") if len(parts) == 3 else ""
    return ":".join([domain or "0", *parts[-2:]])


def _number(cell: str) -> int | None:
    """None for [N/A], [Not Supported] and the like."""
    return int(cell) if cell.isdecimal() else None


def _real(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _uptime() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def _run(words: Sequence[str]) -> tuple[str, str]:
    """(output, "") or ("", why there is none)."""
    try:
        # Not subprocess.run(timeout=): it waits for the killed process, and one stuck in the driver does not die.
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return "", f"{words[0]}: {error.strerror or error}"
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return "", f"{words[0]} did not answer within {SECONDS:.0f} s: its driver hangs"
    if process.returncode != 0:
        return "", f"{words[0]}: {output.strip()[-300:] or f'exit code {process.returncode}'}"
    return output, ""
