"""Shows a preflight: hosts by checks, then the findings, alike ones of many hosts in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megastable.base.text import plural, size, visible
from megastable.cluster.host_report import HostReport
from megastable.cluster.preflight import Check, HostFinding, Severity

HEADS: dict[Check, str] = {
    "code": "code", "versions": "pkgs", "variables": "env", "clock": "clock", "disk": "disk",
    "shm": "shm", "folder": "dir", "gpus": "GPUs", "matmul": "TFLOP/s", "all_reduce": "GB/s",
    "burn_in": "burn-in",
}  # fmt: skip
BENCHES: tuple[Check, ...] = ("matmul", "all_reduce")
COLOURS: dict[Severity, str] = {"refuse": "bold red", "warn": "yellow"}
MOST = 40  # hosts shown; of more only those with findings
NAMED = 6  # hosts named in a finding


def table(
    reports: Mapping[str, HostReport | str],
    findings: Sequence[HostFinding],
    full: bool,
    burn_in: bool = False,
) -> RenderableType:
    """A row per host, a column per check: its number, or ok, marked by what was found (! refused, ? warned).

    full, burn_in: whether hosts were measured, and burned in.
    """
    worst: dict[tuple[str, Check], Severity] = {}
    for one in findings:
        if worst.get((one.host, one.check)) != "refuse":
            worst[one.host, one.check] = one.severity
    odd = {one.host for one in findings}
    shown = list(reports) if len(reports) <= MOST else [host for host in reports if host in odd]
    left_out = {*(() if full else BENCHES), *(() if burn_in else ("burn_in",))}
    checks = [check for check in HEADS if check not in left_out]
    grid = Table("host", *(HEADS[check] for check in checks), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    grid.columns[0].overflow = "fold"
    for host in shown[:MOST]:
        report, name = reports[host], Text(visible(host, 60))
        if isinstance(report, str):
            grid.add_row(name, Text("!", style=COLOURS["refuse"]), *["-"] * (len(checks) - 1))
        else:
            cells = [_cell(_value(report, check), worst.get((host, check))) for check in checks]
            grid.add_row(name, *cells)
    hidden = len(reports) - len(shown[:MOST])
    return Group(grid, Text(f"and {plural(hidden, 'more host')}")) if hidden else grid


def lines(findings: Sequence[HostFinding]) -> Iterator[Text]:
    """A line per finding, those that refuse first; the same one of several hosts once."""
    together: dict[tuple[Severity, str], list[str]] = {}
    for one in findings:
        together.setdefault((one.severity, one.text), []).append(one.host)
    for (severity, text), hosts in sorted(together.items(), key=lambda item: item[0][0]):
        named = ", ".join(visible(host, 60) for host in hosts[:NAMED])
        more = f" and {plural(len(hosts) - NAMED, 'more host')}" if len(hosts) > NAMED else ""
        yield Text.assemble(
            ("REFUSED" if severity == "refuse" else "warning", COLOURS[severity]), f" {named}{more}: {text}"
        )


def verdict(hosts: int, findings: Sequence[HostFinding]) -> str:
    refused = {one.host for one in findings if one.severity == "refuse"}
    warned = {one.host for one in findings} - refused
    told = [f"{len(refused):,} refused"] if refused else []
    told += [f"{len(warned):,} with warnings"] if warned else []
    return f"{plural(hosts, 'host')} checked: {', '.join(told) or 'nothing found'}"


def _cell(value: str, severity: Severity | None) -> Text:
    if severity is None:
        return Text(value)
    return Text(f"{value} {'!' if severity == 'refuse' else '?'}", style=COLOURS[severity])


def _value(report: HostReport, check: Check) -> str:
    if check == "disk":
        return size(report.disk_free)
    if check == "shm":
        return size(report.shm_free)
    if check == "folder":
        seconds = None if report.folder is None else report.folder.seconds
        return "-" if seconds is None else f"{seconds * 1000:.0f} ms"
    if check == "gpus":
        return "-" if report.gpus is None else str(len(report.gpus))
    if check == "matmul":
        return "-" if report.matmul is None else f"{report.matmul.tflops:.3g}"
    if check == "all_reduce":
        return "-" if report.all_reduce is None else f"{report.all_reduce.gb_per_second:.3g}"
    if check == "burn_in":
        return "-" if report.burn_in is None else plural(report.burn_in.runs, "run")
    return "ok"
