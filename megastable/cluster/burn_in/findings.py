"""Says what burn-ins found, host by host. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from megastable.base.text import plural, visible
from megastable.cluster.burn_in.faults import AGAIN, BurnInFault, DeviceBurnIn, DeviceTest, HostBurnIn

CALLED: dict[DeviceTest, str] = {
    "memory": "memory", "matmul": "matrix products", "attention": "attention", "elementwise": "elementwise functions",
    "repeat": "repeated computations", "all_reduce": "all-reduces",
}  # fmt: skip
ADVICE = "a sound device is never wrong: leave the host out and replace the device"
SHARED = (
    "all devices are wrong alike, so that it is rather a library or a driver than a device: install others"
)


def burned(reports: Mapping[str, HostBurnIn]) -> Iterator[tuple[str, str]]:
    """(host, what stands against it). reports: by the host's name."""
    alike = _alike(reports)
    for host, report in reports.items():
        for device in report.devices:
            if device.in_use:
                yield host, f"{visible(device.device, 20)}: no burn-in, {device.in_use}: end them first"
            if device.ended:
                told = f"{visible(device.device, 20)}: the burn-in ended in {visible(device.ended, 400)}"
                yield host, f"{told}: see the kernel's log, and replace the device if it repeats"
            for test, failed in device.failed.items():
                yield host, _told(report.seed, device, test, failed, alike)
        if report.all_reduce_unknown:
            yield host, f"no all-reduce in the burn-in: {visible(report.all_reduce_unknown, 400)}"


def _told(seed: int, device: DeviceBurnIn, test: DeviceTest, failed: int, alike: set[object]) -> str:
    name = f" ({visible(device.name, 60)})" if device.name else ""
    runs = device.runs.get(test, 0)
    head = f"{visible(device.device, 20)}{name}: {CALLED[test]} wrong in {failed:,} of {plural(runs, 'run')}"
    one = next((fault for fault in device.faults if fault.test == test), None)
    if one is None:
        return f"{head}; {ADVICE}"
    again = f"{one.again} of {AGAIN} runs at once with the same inputs were wrong, too ({one.kind})"
    place = f"seed {seed}, round {one.round}, case {one.case}"
    advice = SHARED if _signature(device, one) in alike else ADVICE
    return f"{head}; the first: {visible(one.what, 120)} ({place}): {evidence(one)}; {again}; {advice}"


def evidence(fault: BurnInFault) -> str:
    """Which elements and bits were wrong."""
    if not fault.wrong:
        return "the device saw a difference where the CPU sees none"
    if not fault.expected:
        return f"the device saw {plural(fault.wrong, 'wrong element')} where the CPU sees none"
    common = ""
    if fault.wrong > 1 and any(index is not None for index in fault.common):
        common = f" all at [{', '.join('*' if index is None else str(index) for index in fault.common)}],"
    return (
        f"{fault.wrong:,} of {plural(fault.of, 'element')} wrong,{common} first at "
        f"[{', '.join(map(str, fault.index))}]: {fault.got} instead of {fault.expected}, bits {fault.xor}"
    )


def _alike(reports: Mapping[str, HostBurnIn]) -> set[object]:
    """Persistent faults that every device of its kind has: their inputs are the same."""
    kinds = [_kind(device) for report in reports.values() for device in report.devices]
    faults = Counter(
        _signature(device, fault)
        for report in reports.values()
        for device in report.devices
        for fault in device.faults
        if fault.kind == "persistent"
    )
    of = Counter(kinds)
    return {signature for signature, count in faults.items() if count == of[signature[0]] > 1}


def _signature(device: DeviceBurnIn, fault: BurnInFault) -> tuple[tuple[str, str], object]:
    return _kind(device), fault.model_copy(update={"again": 0})


def _kind(device: DeviceBurnIn) -> tuple[str, str]:
    return device.device.partition(":")[0], device.name
