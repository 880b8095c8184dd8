"""Hosts and findings as people see them: also of a thousand hosts, and of hosts with odd names."""

from __future__ import annotations

from rich.console import Console

from megastable.cluster.host_report import HostReport
from megastable.cluster.preflight import HostFinding
from megastable.cluster.preflight_table import MOST, lines, table, verdict

GOOD = HostReport.model_validate(
    {"host": "n", "time": 1e9, "python": "3.11", "packages": {}, "code": "1", "variables": {}, "disk_free": 5 * 10**11}
    | {"shm_free": 10**9, "folder": {"seen": True, "seconds": 0.012}, "gpus": [], "gpus_unknown": ""}
    | {"matmul": {"tflops": 612.3, "dtype": "bf16", "device": "cuda:0"}}
    | {"all_reduce": {"gb_per_second": 301.0, "ranks": 8}}
    | {"burn_in": {"seed": 1, "seconds": 60, "runs": 1004}}
)  # fmt: skip


def shown(
    hosts: dict[str, HostReport | str], findings: list[HostFinding], full: bool = True, burn_in: bool = False
) -> list[str]:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(table(hosts, findings, full, burn_in))
    return [" ".join(line.split()) for line in capture.get().splitlines() if line.strip()]


def test_a_row_per_host_marked_where_something_was_found() -> None:
    findings = [
        HostFinding("b", "disk", "refuse", "x"), HostFinding("b", "disk", "warn", "y"),
        HostFinding("b", "matmul", "warn", "z"), HostFinding("[red]c", "reached", "refuse", "gone"),
    ]  # fmt: skip
    rows = shown({"a": GOOD, "b": GOOD, "[red]c": "gone"}, findings)
    assert rows[0] == "host code pkgs env clock disk shm dir GPUs TFLOP/s GB/s"
    assert rows[2:] == [
        "a ok ok ok ok 500 GB 1 GB 12 ms 0 612 301",
        "b ok ok ok ok 500 GB ! 1 GB 12 ms 0 612 ? 301",
        "[red]c ! - - - - - - - - -",
    ]
    assert shown({"a": GOOD}, [], full=False)[2] == "a ok ok ok ok 500 GB 1 GB 12 ms 0"


def test_a_burn_in_has_a_column() -> None:
    findings = [HostFinding("b", "burn_in", "refuse", "x")]
    rows = shown({"a": GOOD, "b": GOOD}, findings, full=False, burn_in=True)
    assert rows[0] == "host code pkgs env clock disk shm dir GPUs burn-in"
    assert rows[2:] == [
        "a ok ok ok ok 500 GB 1 GB 12 ms 0 1,004 runs",
        "b ok ok ok ok 500 GB 1 GB 12 ms 0 1,004 runs !",
    ]


def test_of_many_hosts_those_with_findings_are_shown() -> None:
    hosts: dict[str, HostReport | str] = {f"n{n}": GOOD for n in range(1000)}
    findings = [HostFinding("n7", "clock", "warn", "late"), HostFinding("n700", "clock", "warn", "late")]
    rows = shown(hosts, findings)
    assert [row.split()[0] for row in rows[2:-1]] == ["n7", "n700"] and rows[-1] == "and 998 more hosts"
    all_of = [HostFinding(host, "clock", "warn", "late") for host in hosts]
    assert len(shown(hosts, all_of)) == MOST + 3


def test_findings_that_are_alike_are_one_line_and_the_worst_come_first() -> None:
    findings = [HostFinding(f"n{n}", "shm", "warn", "little") for n in range(9)]
    findings.append(HostFinding("n1", "gpus", "refuse", "broken"))
    assert [line.plain for line in lines(findings)] == [
        "REFUSED n1: broken",
        "warning n0, n1, n2, n3, n4, n5 and 3 more hosts: little",
    ]
    assert verdict(1000, findings) == "1,000 hosts checked: 1 refused, 8 with warnings"
    assert verdict(1, []) == "1 host checked: nothing found"
