"""Compares the reports of all hosts, and names and shows what would harm a run. Pure.

    findings = compare_reports(reports, Wanted(slots={"node-01": (0, 1)}, token=token, offsets=offsets))

A host is compared with what most hosts have (of equally many, with the first one's). Thresholds are the constants
below.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megastable.base.process import install_command
from megastable.base.text import count_noun, make_visible, show_size
from megastable.cluster.host_survey import GpuState, HostReport

Severity = Literal["refuse", "warn"]
Check = Literal[
    "reached", "code", "versions", "variables", "clock", "disk", "shm", "folder", "gpus", "matmul", "all_reduce",
    "burn_in",
]  # fmt: skip
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


def compare_reports(reports: Mapping[str, HostReport | str], wanted: Wanted) -> list[HostFinding]:
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
    failure_text = make_visible(reason, 400)
    remedies = {
        "timed out": "is it up, and its name and port right?",
        "No route": "is it up, and on this network?",
        "Could not resolve": "correct its name in the hostfile, or make it known here",
        "Permission denied": "let this user's key in (ssh-copy-id)",
        "Host key verification": "accept its key once (ssh HOST), or ssh-keyscan HOST >> ~/.ssh/known_hosts",
        "Connection refused": "start sshd there, or give its port (--ssh_port)",
        "No such file": "this folder and its .venv must be at the same path on every host",
        "No module named": f"install the same packages there: {install_command()}",
        "no answer within": "it, or a file system that it needs, hangs",
    }
    remedy = next((remedy for failure_sign, remedy in remedies.items() if failure_sign in failure_text), "")
    return f"{failure_text}: {remedy}" if remedy else failure_text


# One host


def _disks(report: HostReport, wanted: Wanted) -> Told:
    free_bytes, checkpoint_bytes = report.disk_free, wanted.checkpoint
    free_text = f"{show_size(free_bytes)} free"
    if free_bytes is None:
        why = make_visible(report.disk_free_unknown, 200)
        yield "disk", "refuse", f"free space of the run directory's disk: {why}"
    elif checkpoint_bytes is None:
        if free_bytes < LITTLE_DISK:
            yield "disk", "warn", f"{free_text}, and a run writes logs, too: make room"
    elif free_bytes < checkpoint_bytes:
        size = show_size(checkpoint_bytes)
        yield "disk", "refuse", f"{free_text}, and a checkpoint takes about {size}: make room"
    elif free_bytes < COPIES * checkpoint_bytes:
        size = show_size(COPIES * checkpoint_bytes)
        yield "disk", "warn", f"{free_text}, and {COPIES} checkpoints take about {size}: make room"
    shm_bytes = report.shm_free
    if shm_bytes is None:
        yield "shm", "warn", f"/dev/shm: {make_visible(report.shm_free_unknown, 200)}"
    elif shm_bytes < LITTLE_SHM:
        severity: Severity = "refuse" if shm_bytes < NO_SHM and not wanted.cpu else "warn"
        finding_text = (
            f"/dev/shm has {show_size(shm_bytes)} free, and ranks of one host exchange through it: delete leftovers, "
            "or give the container more (docker --shm-size=1g, or an emptyDir of medium Memory)"
        )
        yield "shm", severity, finding_text


def _folder(report: HostReport, wanted: Wanted) -> Told:
    shared_folder = report.folder
    if shared_folder is None:
        why = make_visible(report.folder_unknown, 200)
        yield "folder", "refuse", f"run directory: {why}; its disk hangs or fails"
    elif not shared_folder.seen:
        yield "folder", "refuse", "the run directory is not there: mount the file system that all hosts share"
    elif wanted.token is not None and shared_folder.token != wanted.token:
        finding_text = "it must be on a file system that all hosts share"
        yield "folder", "refuse", f"the run directory is another one than here: {finding_text}"
    elif not shared_folder.writable:
        why = make_visible(shared_folder.why, 200) or "unknown why"
        yield "folder", "refuse", f"the run directory cannot be written: {why}"
    elif shared_folder.seconds is not None and shared_folder.seconds > SLOW_WRITE:
        finding_text = (
            f"a durable write of 4 KiB into the run directory took {shared_folder.seconds:.1f} s: the journal writes "
            "one per event, and checkpoints will be slow"
        )
        yield "folder", "warn", finding_text


def _gpus(report: HostReport, host: str, known: Mapping[str, HostReport], wanted: Wanted) -> Told:
    if wanted.cpu:
        return
    host_gpus, wanted_slots = report.gpus, wanted.slots.get(host, ())
    if host_gpus is None:
        others_with_gpus = sum(1 for other_report in known.values() if other_report.gpus)
        no_gpu = f"no GPU is seen ({make_visible(report.gpus_unknown, 200)})"
        if others_with_gpus:
            yield "gpus", "refuse", f"{no_gpu}; {others_with_gpus} of {len(known)} hosts see theirs"
        elif wanted_slots:
            on_cpu = "where there is none, training runs on the CPU; DS_ACCELERATOR=cpu says that it is meant"
            yield "gpus", "warn", f"{no_gpu}: {on_cpu}"
        return
    if missing_slots := [wanted_slot for wanted_slot in wanted_slots if wanted_slot >= len(host_gpus)]:
        finding_told = (
            f"has {count_noun(len(host_gpus), 'GPU')}, and slot {missing_slots[0]} is asked for: correct slots= in the "
            "hostfile, or find the GPU that is gone (nvidia-smi)"
        )
        yield "gpus", "refuse", finding_told
    for gpu_number, gpu_state in enumerate(host_gpus):
        if not wanted_slots or gpu_number in wanted_slots:
            for severity, finding_text in _gpu(gpu_state):
                yield "gpus", severity, f"GPU {gpu_number}: {finding_text}"


def _gpu(gpu: GpuState) -> Iterator[tuple[Severity, str]]:
    if gpu.ecc_uncorrected:
        errors = count_noun(gpu.ecc_uncorrected, "uncorrected ECC error")
        remedy = "reset it (nvidia-smi --gpu-reset) or replace it"
        yield "refuse", f"{errors} since its driver started: {remedy}"
    for xid_code in gpu.xid or []:
        if xid_code in HARDWARE_XID:
            what = f"Xid {xid_code} ({HARDWARE_XID[xid_code]}) within a day"
            yield "refuse", f"{what}: restart the host, and if it repeats, replace it"
        else:
            yield "warn", f"Xid {xid_code} within a day, mostly an error of a program: see dmesg"
    if gpu.clocks_throttled:
        throttle_reasons = make_visible(", ".join(gpu.clocks_throttled), 200)
        yield "warn", f"its clocks are held back ({throttle_reasons}): look at cooling and power"
    if gpu.memory and gpu.memory_used and gpu.memory_used > BUSY * gpu.memory:
        used = f"{show_size(gpu.memory_used)} of {show_size(gpu.memory)}"
        yield "warn", f"{used} are in use: end what still runs there (see nvidia-smi)"


def _unmeasured(report: HostReport) -> Told:
    if report.matmul is None and report.matmul_unknown:
        yield "matmul", "refuse", f"a matrix product failed: {make_visible(report.matmul_unknown)}"
    matmul = report.matmul
    is_alone = matmul is not None and not matmul.device.startswith("cpu") and len(matmul.each) == 1
    if report.all_reduce is None and report.all_reduce_unknown and not is_alone:
        yield "all_reduce", "refuse", f"an all-reduce failed: {make_visible(report.all_reduce_unknown)}"


def _burn_in(report: HostReport) -> Told:
    if report.burn_in is None:
        if report.burn_in_unknown:
            yield "burn_in", "refuse", f"no burn-in: {make_visible(report.burn_in_unknown)}"
        return
    if report.burn_in.in_use:
        yield "burn_in", "refuse", f"no burn-in, {make_visible(report.burn_in.in_use, 400)}: end them first"
    if report.burn_in.undiagnosed:
        yield "burn_in", "warn", f"dcgmi diag told nothing: {make_visible(report.burn_in.undiagnosed, 400)}"
    for found_text in report.burn_in.found:
        yield "burn_in", "refuse", make_visible(found_text, 1000)


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
            mine, others = (make_visible(v, 100) if v is not None else "none" for v in (value, most))
            yield host, mine, f"{counts[most]} of {count_noun(len(values), 'host')} have {others}"


def _twice(known: Mapping[str, HostReport]) -> Between:
    host_by_machine = dict[str, str]()
    for host, report in known.items():
        if report.machine and (first_host := host_by_machine.setdefault(report.machine, host)) != host:
            same = f"is the same host as {make_visible(first_host)}"
            yield host, "reached", "refuse", f"{same}: name it once, with all its GPUs in one line"


def _code(known: Mapping[str, HostReport]) -> Between:
    hashes: dict[str, str | None] = {}
    for host, report in known.items():
        if report.code is None:
            why = make_visible(report.code_unknown, 200)
            yield host, "code", "warn", f"the code could not be read: {why}"
        else:
            hashes[host] = report.code[:12]
    for host, own_hash, others in _different(hashes):
        commit = known[host].commit
        mine = f"{own_hash} (commit {make_visible(commit[:12])})" if commit else own_hash
        yield host, "code", "refuse", f"runs other code, {mine}; {others}: update its copy of the repository"


def _versions(known: Mapping[str, HostReport]) -> Between:
    for host, mine, others in _different({host: report.python for host, report in known.items()}):
        yield host, "versions", "warn", f"Python {mine}; {others}: install the same"
    installed = {host: report for host, report in known.items() if report.packages is not None}
    for host in known.keys() - installed.keys():
        why = make_visible(known[host].packages_unknown, 200)
        yield host, "versions", "warn", f"installed packages could not be read: {why}"
    for name in sorted({name for report in installed.values() for name in report.packages or {}}):
        severity: Severity = "refuse" if name in DECISIVE else "warn"
        values = {host: (report.packages or {}).get(name) for host, report in installed.items()}
        for host, mine, others in _different(values):
            yield host, "versions", severity, f"{make_visible(name, 60)} {mine}; {others}: install the same"


def _variables(known: Mapping[str, HostReport]) -> Between:
    for variable_name in sorted({name for report in known.values() for name in report.variables}):
        values = {host: report.variables.get(variable_name) for host, report in known.items()}
        for host, own_value, others_text in _different(values):
            difference = f"{make_visible(variable_name, 60)}={own_value}; {others_text}"
            yield host, "variables", "warn", f"{difference}: set it alike (.deepspeed_env is for every host)"


def _drivers(known: Mapping[str, HostReport]) -> Between:
    with_gpus = {host: report.gpus for host, report in known.items() if report.gpus}
    compared_fields: list[tuple[str, Callable[[GpuState], str]]] = [
        ("GPU", lambda gpu: gpu.name),
        ("GPU driver", lambda gpu: gpu.driver or "unknown"),
    ]
    for field_name, read_field in compared_fields:
        value_by_host: dict[str, str | None] = {
            host: ", ".join(sorted(set(map(read_field, gpus)))) for host, gpus in with_gpus.items()
        }
        for host, own_value, others_text in _different(value_by_host):
            yield host, "gpus", "warn", f"{field_name} {own_value}; {others_text}: the slowest sets the pace"


def _clocks(offsets: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Clocks off from the median; of fewer than three hosts, from this one's."""
    median_offset = statistics.median(offsets.values()) if len(offsets) >= SEVERAL else 0.0
    for host, offset in offsets.items():
        clock_error = offset - median_offset
        if abs(clock_error) > CLOCK:
            is_off = f"its clock is {abs(clock_error):.1f} s {'ahead' if clock_error > 0 else 'behind'}"
            yield host, f"{is_off}: start its time service (chronyc makestep, or timedatectl set-ntp true)"


def _products(known: Mapping[str, HostReport]) -> Between:
    """Devices are compared one by one: one slow GPU in a host of eight holds back all."""
    rates_by_kind: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for host, report in known.items():
        if report.matmul is not None:
            device_dtype = (report.matmul.device.partition(":")[0], report.matmul.dtype)
            kind_rates = rates_by_kind.setdefault(device_dtype, {})
            for device, rate in (report.matmul.each or {report.matmul.device: report.matmul.tflops}).items():
                kind_rates[host, device] = rate
    for (kind, _), kind_rates in rates_by_kind.items():
        for (host, device), severity, finding_text in _slow(kind_rates, "TFLOP/s", kind == "cpu"):
            yield host, "matmul", severity, f"matrix products on {make_visible(device, 20)}: {finding_text}"


def _exchanges(known: Mapping[str, HostReport]) -> Between:
    rates_by_kind: dict[tuple[str, int], dict[str, float]] = {}
    for host, report in known.items():
        if (measured := report.all_reduce) is not None:
            kind_rates = rates_by_kind.setdefault((measured.device, measured.ranks), {})
            kind_rates[host] = measured.gb_per_second
    for (device, ranks), kind_rates in rates_by_kind.items():
        for host, severity, finding_text in _slow(kind_rates, "GB/s", device == "cpu"):
            yield host, "all_reduce", severity, f"all-reduce of its {ranks} ranks: {finding_text}"


def _slow(rates: Mapping[Key, float], unit: str, noisy: bool) -> Iterator[tuple[Key, Severity, str]]:
    """Rates over 10 % below the median, and with enough of them also outside of their usual scatter.

    noisy: on a CPU other processes take their share, so that it only warns.
    """
    if len(rates) < 2:
        return
    median_rate = statistics.median_high(rates.values())  # of two the faster
    lowest_rate = median_rate * (1 - SLOWER)
    if len(rates) >= ENOUGH:
        median_deviation = statistics.median(abs(rate - median_rate) for rate in rates.values())
        lowest_rate = min(lowest_rate, median_rate - OUTLIER * 1.4826 * median_deviation)
    for rate_key, rate in rates.items():
        if rate < lowest_rate:
            severity: Severity = "refuse" if rate < HALF * median_rate and not noisy else "warn"
            finding_text = (
                f"{rate:.3g} {unit}, {1 - rate / median_rate:.0%} below the median of {len(rates)} "
                f"({median_rate:.3g}): every step waits for it; see what else runs there, its cooling and its "
                "clocks, or leave it out"
            )
            yield rate_key, severity, finding_text


HEADS: dict[Check, str] = {
    "code": "code", "versions": "pkgs", "variables": "env", "clock": "clock", "disk": "disk",
    "shm": "shm", "folder": "dir", "gpus": "GPUs", "matmul": "TFLOP/s", "all_reduce": "GB/s",
    "burn_in": "burn-in",
}  # fmt: skip
BENCHES: tuple[Check, ...] = ("matmul", "all_reduce")
COLOURS: dict[Severity, str] = {"refuse": "bold red", "warn": "yellow"}
MOST = 40  # hosts shown; of more only those with findings
NAMED = 6  # hosts named in a finding


def tabulate_reports(
    reports: Mapping[str, HostReport | str],
    findings: Sequence[HostFinding],
    full: bool,
    burn_in: bool = False,
) -> RenderableType:
    """A row per host, a column per check: its number, or ok, marked by what was found (! refused, ? warned).

    full, burn_in: whether hosts were measured, and burned in.
    """
    worst_severity: dict[tuple[str, Check], Severity] = {}
    for host_finding in findings:
        if worst_severity.get((host_finding.host, host_finding.check)) != "refuse":
            worst_severity[host_finding.host, host_finding.check] = host_finding.severity
    found_hosts = {host_finding.host for host_finding in findings}
    shown_hosts = [host for host in reports if len(reports) <= MOST or host in found_hosts]
    left_out = {*(() if full else BENCHES), *(() if burn_in else ("burn_in",))}
    checks = [check for check in HEADS if check not in left_out]
    host_table = Table("host", *(HEADS[check] for check in checks), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    host_table.columns[0].overflow = "fold"
    for host in shown_hosts[:MOST]:
        report, host_text = reports[host], Text(make_visible(host, 60))
        if isinstance(report, str):
            host_table.add_row(host_text, Text("!", style=COLOURS["refuse"]), *["-"] * (len(checks) - 1))
        else:
            row_cells = [_cell(_value(report, check), worst_severity.get((host, check))) for check in checks]
            host_table.add_row(host_text, *row_cells)
    if hidden_count := len(reports) - len(shown_hosts[:MOST]):
        return Group(host_table, Text(f"and {count_noun(hidden_count, 'more host')}"))
    return host_table


def describe_findings(findings: Sequence[HostFinding]) -> Iterator[Text]:
    """A line per finding, those that refuse first; the same one of several hosts once."""
    hosts_by_text: dict[tuple[Severity, str], list[str]] = {}
    for host_finding in findings:
        hosts_by_text.setdefault((host_finding.severity, host_finding.text), []).append(host_finding.host)
    for (severity, finding_text), hosts in sorted(hosts_by_text.items(), key=lambda item: item[0][0]):
        host_names = ", ".join(make_visible(host, 60) for host in hosts[:NAMED])
        more_text = f" and {count_noun(len(hosts) - NAMED, 'more host')}" if len(hosts) > NAMED else ""
        word = "REFUSED" if severity == "refuse" else "warning"
        yield Text.assemble((word, COLOURS[severity]), f" {host_names}{more_text}: {finding_text}")


def summarize_findings(hosts: int, findings: Sequence[HostFinding]) -> str:
    refused_hosts = {host_finding.host for host_finding in findings if host_finding.severity == "refuse"}
    warned_hosts = {host_finding.host for host_finding in findings} - refused_hosts
    summary_parts = [f"{len(refused_hosts):,} refused"] if refused_hosts else []
    summary_parts += [f"{len(warned_hosts):,} with warnings"] if warned_hosts else []
    return f"{count_noun(hosts, 'host')} checked: {', '.join(summary_parts) or 'nothing found'}"


def _cell(value: str, severity: Severity | None) -> Text:
    if severity is None:
        return Text(value)
    return Text(f"{value} {'!' if severity == 'refuse' else '?'}", style=COLOURS[severity])


def _value(report: HostReport, check: Check) -> str:
    if check == "disk":
        return show_size(report.disk_free)
    if check == "shm":
        return show_size(report.shm_free)
    if check == "folder":
        write_seconds = None if report.folder is None else report.folder.seconds
        return "-" if write_seconds is None else f"{write_seconds * 1000:.0f} ms"
    if check == "gpus":
        return "-" if report.gpus is None else str(len(report.gpus))
    if check == "matmul":
        return "-" if report.matmul is None else f"{report.matmul.tflops:.3g}"
    if check == "all_reduce":
        return "-" if report.all_reduce is None else f"{report.all_reduce.gb_per_second:.3g}"
    if check == "burn_in":
        return "-" if report.burn_in is None else count_noun(report.burn_in.runs, "run")
    return "ok"
