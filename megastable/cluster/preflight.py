"""Compares the reports of all hosts, and names what would harm a run. Pure.

    findings = compare(reports, Wanted(slots={"node-01": (0, 1)}, token=token, offsets=offsets))

A host is compared with what most hosts have (of equally many, with the first one's). Thresholds are the constants
below.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from megastable.base.installation import install_command
from megastable.base.text import plural, size, visible
from megastable.cluster.host_report import GpuState, HostReport

Severity = Literal["refuse", "warn"]
Check = Literal[
    "reached",
    "code",
    "versions",
    "variables",
    "clock",
    "disk",
    "shm",
    "folder",
    "gpus",
    "matmul",
    "all_reduce",
    "burn_in",
]
Key = TypeVar("Key")
Told = Iterator[tuple[Check, Severity, str]]

CLOCK = 1.0  # seconds: log lines and times of several hosts are compared at about that resolution
SEVERAL = 3  # hosts from which a median is nobody's own value
COPIES = 2  # checkpoints: a new one is complete before an old one goes
LITTLE_DISK = 10e9  # bytes, where the size of a checkpoint is unknown: records, logs and reports of a run
# NCCL and torch's DataLoader exchange through /dev/shm; NVIDIA asks for --shm-size=1g, Docker's default is 64 MB.
LITTLE_SHM, NO_SHM = 1e9, 65e6  # bytes; below the latter ranks of one host fail
SLOW_WRITE = 1.0  # seconds for 4 KiB: every event of the journal waits for one such write
SLOWER = 0.10  # below the median: runs of one size differ by less, and every step waits for the slowest
HALF = 0.5  # below the median: no noise explains it
OUTLIER = 3.0  # robust standard deviations, where there are enough values (1.4826 x MAD; Hampel 1974)
ENOUGH = 5  # values for a MAD
BUSY = 0.10  # of a GPU's memory: somebody else's process
# They decide numbers or the protocol between ranks: a difference breaks the run or its reproducibility.
DECISIVE = ("torch", "deepspeed", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "transformer-engine", "triton")
# Xid errors of the hardware or the driver; the others are mostly the program's (docs.nvidia.com/deploy/xid-errors).
HARDWARE_XID = {
    48: "double-bit ECC error", 62: "microcontroller halted", 63: "memory rows remapped", 64: "row remapping failed",
    74: "NVLink error", 79: "fell off the bus", 92: "many single-bit ECC errors", 94: "contained memory error",
    95: "uncontained memory error", 119: "firmware does not answer", 120: "firmware error", 140: "ECC error",
}  # fmt: skip


@dataclass(frozen=True)
class HostFinding:
    """refuse: the run would fail or be wrong; warn: it would be slower, or may fail later. text: with the numbers and
    what to do, without the name of the host."""

    host: str
    check: Check
    severity: Severity
    text: str


@dataclass(frozen=True)
class Wanted:
    """What is asked of the hosts.

    slots: GPUs by local number, by host; none = any. token: the text of the run directory's .preflight, None = not
    written. offsets: of the hosts' clocks against this one's. [seconds] checkpoint: bytes of one, None = unknown.
    cpu: training is to run on CPUs.
    """

    slots: Mapping[str, Sequence[int]] = field(default_factory=dict)
    token: str | None = None
    offsets: Mapping[str, float] = field(default_factory=dict)
    checkpoint: float | None = None
    cpu: bool = False


def compare(reports: Mapping[str, HostReport | str], wanted: Wanted) -> list[HostFinding]:
    """What is wrong, in the order of the hosts. reports: by the host's name; a text says why there is none."""
    known = {host: report for host, report in reports.items() if isinstance(report, HostReport)}
    found: dict[str, list[tuple[Check, Severity, str]]] = {host: [] for host in reports}
    for host, report in reports.items():
        if isinstance(report, str):
            found[host].append(("reached", "refuse", _unreached(report)))
    for host, report in known.items():
        found[host] += [
            *_disks(report, wanted),
            *_folder(report, wanted),
            *_gpus(report, host, known, wanted),
        ]
        found[host] += [*_unmeasured(report), *_burn_in(report)]
    for several in (_twice, _code, _versions, _variables, _drivers, _products, _exchanges):
        for host, check, severity, text in several(known):
            found[host].append((check, severity, text))
    for host, text in _clocks({host: wanted.offsets[host] for host in known if host in wanted.offsets}):
        found[host].append(("clock", "warn", text))
    return [HostFinding(host, *one) for host, all_of in found.items() for one in all_of]


def _unreached(reason: str) -> str:
    told = visible(reason, 400)
    for sign, remedy in (
        ("timed out", "is it up, and its name and port right?"),
        ("No route", "is it up, and on this network?"),
        ("Could not resolve", "correct its name in the hostfile, or make it known here"),
        ("Permission denied", "let this user's key in (ssh-copy-id)"),
        (
            "Host key verification",
            "accept its key once (ssh HOST), or ssh-keyscan HOST >> ~/.ssh/known_hosts",
        ),
        ("Connection refused", "start sshd there, or give its port (--ssh_port)"),
        ("No such file", "this folder and its .venv must be at the same path on every host"),
        ("No module named", f"install the same packages there: {install_command()}"),
        ("no answer within", "it, or a file system that it needs, hangs"),
    ):
        if sign in told:
            return f"{told}: {remedy}"
    return told


# One host


def _disks(report: HostReport, wanted: Wanted) -> Told:
    free, one = report.disk_free, wanted.checkpoint
    if free is None:
        yield (
            "disk",
            "refuse",
            f"free space of the run directory's disk: {visible(report.disk_free_unknown, 200)}",
        )
    elif one is not None and free < one:
        yield "disk", "refuse", f"{size(free)} free, and a checkpoint takes about {size(one)}: make room"
    elif free < (COPIES * one if one is not None else LITTLE_DISK):
        need = (
            f"{COPIES} checkpoints take about {size(COPIES * one)}"
            if one is not None
            else "a run writes logs, too"
        )
        yield "disk", "warn", f"{size(free)} free, and {need}: make room"
    shm = report.shm_free
    if shm is None:
        yield "shm", "warn", f"/dev/shm: {visible(report.shm_free_unknown, 200)}"
    elif shm < LITTLE_SHM:
        severity: Severity = "refuse" if shm < NO_SHM and not wanted.cpu else "warn"
        told = (
            f"/dev/shm has {size(shm)} free, and ranks of one host exchange through it: delete leftovers, or give the "
            "container more (docker --shm-size=1g, or an emptyDir of medium Memory)"
        )
        yield "shm", severity, told


def _folder(report: HostReport, wanted: Wanted) -> Told:
    folder = report.folder
    if folder is None:
        yield (
            "folder",
            "refuse",
            f"run directory: {visible(report.folder_unknown, 200)}; its disk hangs or fails",
        )
    elif not folder.seen:
        yield "folder", "refuse", "the run directory is not there: mount the file system that all hosts share"
    elif wanted.token is not None and folder.token != wanted.token:
        told = "the run directory is another one than here: it must be on a file system that all hosts share"
        yield "folder", "refuse", told
    elif not folder.writable:
        yield (
            "folder",
            "refuse",
            f"the run directory cannot be written: {visible(folder.why, 200) or 'unknown why'}",
        )
    elif folder.seconds is not None and folder.seconds > SLOW_WRITE:
        told = (
            f"a durable write of 4 KiB into the run directory took {folder.seconds:.1f} s: the journal writes one per "
            "event, and checkpoints will be slow"
        )
        yield "folder", "warn", told


def _gpus(report: HostReport, host: str, known: Mapping[str, HostReport], wanted: Wanted) -> Told:
    if wanted.cpu:
        return
    gpus, slots = report.gpus, wanted.slots.get(host, ())
    if gpus is None:
        others = sum(1 for other in known.values() if other.gpus)
        if others:
            told = f"no GPU is seen ({visible(report.gpus_unknown, 200)})"
            yield "gpus", "refuse", f"{told}; {others} of {len(known)} hosts see theirs"
        elif slots:
            told = (
                f"no GPU is seen ({visible(report.gpus_unknown, 200)}): where there is none, training runs on the "
                "CPU; DS_ACCELERATOR=cpu says that it is meant"
            )
            yield "gpus", "warn", told
        return
    if missing := [slot for slot in slots if slot >= len(gpus)]:
        told = (
            f"has {plural(len(gpus), 'GPU')}, and slot {missing[0]} is asked for: correct slots= in the hostfile, "
            "or find the GPU that is gone (nvidia-smi)"
        )
        yield "gpus", "refuse", told
    for number, gpu in enumerate(gpus):
        if not slots or number in slots:
            for severity, text in _gpu(gpu):
                yield "gpus", severity, f"GPU {number}: {text}"


def _gpu(gpu: GpuState) -> Iterator[tuple[Severity, str]]:
    if gpu.ecc_uncorrected:
        told = (
            f"{plural(gpu.ecc_uncorrected, 'uncorrected ECC error')} since its driver started: reset it (nvidia-smi "
            "--gpu-reset) or replace it"
        )
        yield "refuse", told
    for code in gpu.xid or []:
        if code in HARDWARE_XID:
            told = f"Xid {code} ({HARDWARE_XID[code]}) within a day"
            yield "refuse", f"{told}: restart the host, and if it repeats, replace it"
        else:
            yield "warn", f"Xid {code} within a day, mostly an error of a program: see dmesg"
    if gpu.clocks_throttled:
        reasons = visible(", ".join(gpu.clocks_throttled), 200)
        yield "warn", f"its clocks are held back ({reasons}): look at cooling and power"
    if gpu.memory and gpu.memory_used and gpu.memory_used > BUSY * gpu.memory:
        told = f"{size(gpu.memory_used)} of {size(gpu.memory)} are in use: end what still runs there (see nvidia-smi)"
        yield "warn", told


def _unmeasured(report: HostReport) -> Told:
    if report.matmul is None and report.matmul_unknown:
        yield "matmul", "refuse", f"a matrix product failed: {visible(report.matmul_unknown)}"
    alone = (
        report.matmul is not None
        and not report.matmul.device.startswith("cpu")
        and len(report.matmul.each) == 1
    )
    if report.all_reduce is None and report.all_reduce_unknown and not alone:
        yield "all_reduce", "refuse", f"an all-reduce failed: {visible(report.all_reduce_unknown)}"


def _burn_in(report: HostReport) -> Told:
    if report.burn_in is None:
        if report.burn_in_unknown:
            yield "burn_in", "refuse", f"no burn-in: {visible(report.burn_in_unknown)}"
        return
    if report.burn_in.in_use:
        yield "burn_in", "refuse", f"no burn-in, {visible(report.burn_in.in_use, 400)}: end them first"
    if report.burn_in.undiagnosed:
        yield "burn_in", "warn", f"dcgmi diag told nothing: {visible(report.burn_in.undiagnosed, 400)}"
    for text in report.burn_in.found:
        yield "burn_in", "refuse", visible(text, 1000)


# Hosts among each other


Between = Iterator[tuple[str, Check, Severity, str]]


def _different(values: Mapping[str, str | None]) -> Iterator[tuple[str, str, str]]:
    """(host, its value, what others have) for hosts that differ from most; None: not there."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return
    most = counts.most_common(1)[0][0]  # of equally many the first
    for host, value in values.items():
        if value != most:
            mine, others = (visible(v, 100) if v is not None else "none" for v in (value, most))
            yield host, mine, f"{counts[most]} of {plural(len(values), 'host')} have {others}"


def _twice(known: Mapping[str, HostReport]) -> Between:
    first = dict[str, str]()
    for host, report in known.items():
        if report.machine and (other := first.setdefault(report.machine, host)) != host:
            text = f"is the same host as {visible(other)}: name it once, with all its GPUs in one line"
            yield host, "reached", "refuse", text


def _code(known: Mapping[str, HostReport]) -> Between:
    for host, report in known.items():
        if report.code is None:
            yield host, "code", "warn", f"the code could not be read: {visible(report.code_unknown, 200)}"
    readable = {host: report for host, report in known.items() if report.code is not None}
    for host, mine, others in _different({host: str(report.code)[:12] for host, report in readable.items()}):
        commit = readable[host].commit
        at = f" (commit {visible(commit[:12])})" if commit else ""
        yield (
            host,
            "code",
            "refuse",
            f"runs other code, {mine}{at}; {others}: update its copy of the repository",
        )


def _versions(known: Mapping[str, HostReport]) -> Between:
    for host, mine, others in _different({host: report.python for host, report in known.items()}):
        yield host, "versions", "warn", f"Python {mine}; {others}: install the same"
    installed = {host: report for host, report in known.items() if report.packages is not None}
    for host in known.keys() - installed.keys():
        why = visible(known[host].packages_unknown, 200)
        yield host, "versions", "warn", f"installed packages could not be read: {why}"
    for name in sorted({name for report in installed.values() for name in report.packages or {}}):
        severity: Severity = "refuse" if name in DECISIVE else "warn"
        values = {host: (report.packages or {}).get(name) for host, report in installed.items()}
        for host, mine, others in _different(values):
            yield host, "versions", severity, f"{visible(name, 60)} {mine}; {others}: install the same"


def _variables(known: Mapping[str, HostReport]) -> Between:
    for name in sorted({name for report in known.values() for name in report.variables}):
        for host, mine, others in _different({h: report.variables.get(name) for h, report in known.items()}):
            told = f"{visible(name, 60)}={mine}; {others}: set it alike (.deepspeed_env is for every host)"
            yield host, "variables", "warn", told


def _drivers(known: Mapping[str, HostReport]) -> Between:
    with_gpus = {host: report.gpus for host, report in known.items() if report.gpus}
    kinds: list[tuple[str, Callable[[GpuState], str]]] = [
        ("GPU", lambda gpu: gpu.name),
        ("GPU driver", lambda gpu: gpu.driver or "unknown"),
    ]
    for what, of in kinds:
        values: dict[str, str | None] = {
            h: ", ".join(sorted(set(map(of, gpus)))) for h, gpus in with_gpus.items()
        }
        for host, mine, others in _different(values):
            yield host, "gpus", "warn", f"{what} {mine}; {others}: the slowest sets the pace"


def _clocks(offsets: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Clocks off from the median; of fewer than three hosts, from this one's."""
    middle = statistics.median(offsets.values()) if len(offsets) >= SEVERAL else 0.0
    for host, offset in offsets.items():
        off = offset - middle
        if abs(off) > CLOCK:
            told = (
                f"its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}: start its time service (chronyc "
                "makestep, or timedatectl set-ntp true)"
            )
            yield host, told


def _products(known: Mapping[str, HostReport]) -> Between:
    """Devices are compared one by one: one slow GPU in a host of eight holds back all."""
    rates: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for host, report in known.items():
        if report.matmul is not None:
            measured = (report.matmul.device.partition(":")[0], report.matmul.dtype)
            each = report.matmul.each or {report.matmul.device: report.matmul.tflops}
            rates.setdefault(measured, {}).update({(host, device): rate for device, rate in each.items()})
    for (kind, _), of in rates.items():
        for (host, device), severity, told in _slow(of, "TFLOP/s", kind == "cpu"):
            yield host, "matmul", severity, f"matrix products on {visible(device, 20)}: {told}"


def _exchanges(known: Mapping[str, HostReport]) -> Between:
    rates: dict[tuple[str, int], dict[str, float]] = {}
    for host, report in known.items():
        if (one := report.all_reduce) is not None:
            rates.setdefault((one.device, one.ranks), {})[host] = one.gb_per_second
    for (device, ranks), of in rates.items():
        for host, severity, told in _slow(of, "GB/s", device == "cpu"):
            yield host, "all_reduce", severity, f"all-reduce of its {ranks} ranks: {told}"


def _slow(rates: Mapping[Key, float], unit: str, noisy: bool) -> Iterator[tuple[Key, Severity, str]]:
    """Rates over 10 % below the median, and with enough of them also outside of their usual scatter.

    noisy: on a CPU other processes take their share, so that it only warns.
    """
    if len(rates) < 2:
        return
    middle = statistics.median_high(rates.values())  # of two the faster
    limit = middle * (1 - SLOWER)
    if len(rates) >= ENOUGH:
        deviation = statistics.median(abs(rate - middle) for rate in rates.values())
        limit = min(limit, middle - OUTLIER * 1.4826 * deviation)
    for key, rate in rates.items():
        if rate < limit:
            severity: Severity = "refuse" if rate < HALF * middle and not noisy else "warn"
            told = (
                f"{rate:.3g} {unit}, {1 - rate / middle:.0%} below the median of {len(rates)} ({middle:.3g}): every "
                "step waits for it; see what else runs there, its cooling and its clocks, or leave it out"
            )
            yield key, severity, told
