"""What is found when hosts are compared: everything planted, nothing else; and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megastable.cluster.host_survey import HostReport, read_report
from megastable.cluster.preflight import (
    HostFinding,
    Wanted,
    compare_reports,
    tabulate_reports,
)

GPU = {
    "index": 0, "name": "H100", "driver": "550.1", "memory": 80 << 30, "memory_used": 1 << 30, "temperature": 40,
    "ecc_uncorrected": 0, "xid": [], "clocks_throttled": [],
}  # fmt: skip
BURNED = {"seed": 1, "seconds": 60.0, "found": ["cuda:1: \x1b 3 of 5 wrong"]}
IN_USE = {"seed": 1, "seconds": 60.0, "in_use": "GPU 1: 5 GB"}
UNDIAGNOSED = {"seed": 1, "seconds": 60.0, "undiagnosed": "no hostengine"}
TOKEN = "abc"


def report(**parts: Any) -> HostReport:
    """A host where all is well; parts are merged into it."""
    tree: dict[str, Any] = {
        "host": "n", "time": 1e9, "python": "3.11.7", "packages": {"torch": "2.9.0", "numpy": "2.0.0"},
        "code": "1" * 64, "commit": "c" * 40, "variables": {"NCCL_SOCKET_IFNAME": "ib0"},
        "disk_free": 10**12, "shm_free": 10**11,
        "folder": {"seen": True, "token": TOKEN, "writable": True, "seconds": 0.01},
        "gpus": [GPU] * 2,
        "matmul": {"dtype": "bfloat16", "device": "cuda:0"} | rates(600.0, 600.0),
        "all_reduce": {"gb_per_second": 300.0, "ranks": 2, "device": "cuda"},
    }  # fmt: skip
    for key, value in parts.items():
        tree[key] = (
            {**tree[key], **value} if isinstance(value, dict) and isinstance(tree.get(key), dict) else value
        )
    return HostReport.model_validate(tree)


def rates(*of: float) -> dict[str, Any]:
    return {"tflops": min(of), "each": {f"cuda:{n}": rate for n, rate in enumerate(of)}}


def hosts(count: int, **odd: Any) -> dict[str, HostReport | str]:
    """n1 to n`count`; the last one has `odd`."""
    return {f"n{n}": report(**odd if n == count else {}) for n in range(1, count + 1)}


def wanted(count: int, **more: Any) -> Wanted:
    return Wanted(**{"slots": {f"n{n}": (0, 1) for n in range(1, count + 1)}, "token": TOKEN} | more)


def brief(found: Sequence[HostFinding]) -> list[tuple[str, str, str]]:
    return [(one.host, one.check, one.severity) for one in found]


def test_compare_reports_refuses_two_names_of_one_host() -> None:
    """A report that does not tell, as an older version's, is nobody's."""
    same, other = report(machine="a boot net"), report(machine="b boot net")
    found = compare_reports({"localhost": same, "n2": other, "127.0.0.1": same}, Wanted(token=TOKEN))
    assert brief(found) == [("127.0.0.1", "reached", "refuse")]
    assert "is the same host as localhost" in found[0].text
    assert compare_reports({"n1": report(), "n2": report()}, Wanted(token=TOKEN)) == []


def broken(**parts: Any) -> dict[str, Any]:
    return {"gpus": [GPU, {**GPU, **parts}]}


# What is wrong with the last host, and what is to be said of it.
WRONG: list[tuple[dict[str, Any], list[tuple[str, str]], list[str]]] = [
    ({"code": "2" * 64, "commit": "d" * 40}, [("code", "refuse")], ["2" * 12, "dddddddddddd", "have 111111111111"]),
    ({"code": None, "code_unknown": "no answer"}, [("code", "warn")], ["no answer"]),
    ({"packages": {"torch": "2.8.0"}}, [("versions", "refuse")], ["torch 2.8.0", "have 2.9.0"]),
    ({"packages": {"numpy": "1.9.0"}}, [("versions", "warn")], ["numpy 1.9.0", "have 2.0.0"]),
    ({"packages": {"triton": "3"}}, [("versions", "refuse")], ["triton 3", "have none"]),
    ({"python": "3.12.0"}, [("versions", "warn")], ["Python 3.12.0", "have 3.11.7"]),
    ({"variables": {"NCCL_SOCKET_IFNAME": "eth0"}}, [("variables", "warn")], ["NCCL_SOCKET_IFNAME=eth0", "ib0"]),
    ({"variables": {"DS_X": "1"}}, [("variables", "warn")], ["DS_X=1", "have none"]),
    ({"disk_free": 10**9}, [("disk", "warn")], ["1 GB free"]),
    ({"disk_free": None, "disk_free_unknown": "no answer within 5 s"}, [("disk", "refuse")], ["no answer within 5 s"]),
    ({"shm_free": 64 << 20}, [("shm", "warn")], ["67.1 MB"]),
    ({"shm_free": 1 << 20}, [("shm", "refuse")], ["1.05 MB", "--shm-size"]),
    ({"folder": None, "folder_unknown": "no answer within 5 s"}, [("folder", "refuse")], ["no answer within 5 s"]),
    ({"folder": {"seen": False}}, [("folder", "refuse")], ["not there"]),
    ({"folder": {"token": "x"}}, [("folder", "refuse")], ["another one than here"]),
    ({"folder": {"token": None}}, [("folder", "refuse")], ["another one than here"]),
    ({"folder": {"writable": False, "why": "Read-only file system"}}, [("folder", "refuse")], ["Read-only"]),
    ({"folder": {"seconds": 2.5}}, [("folder", "warn")], ["2.5 s"]),
    ({"gpus": None, "gpus_unknown": "no driver"}, [("gpus", "refuse")], ["no driver"]),
    ({"gpus": [GPU]}, [("gpus", "refuse")], ["1 GPU,", "slot 1"]),
    (broken(ecc_uncorrected=3), [("gpus", "refuse")], ["GPU 1: 3 uncorrected ECC errors"]),
    (broken(xid=[79]), [("gpus", "refuse")], ["GPU 1: Xid 79 (fell off the bus)"]),
    (broken(xid=[13]), [("gpus", "warn")], ["Xid 13"]),
    (broken(clocks_throttled=["hardware slowdown"]), [("gpus", "warn")], ["hardware slowdown"]),
    (broken(memory_used=70 << 30), [("gpus", "warn")], ["75.2 GB of 85.9 GB"]),
    ({"gpus": [{**GPU, "name": "A100"}] * 2}, [("gpus", "warn")], ["GPU A100", "have H100"]),
    ({"gpus": [{**GPU, "driver": "535"}] * 2}, [("gpus", "warn")], ["GPU driver 535", "have 550.1"]),
    ({"matmul": rates(600, 500)}, [("matmul", "warn")], ["cuda:1", "500 TFLOP/s", "17% below", "(600)"]),
    ({"matmul": rates(200, 600)}, [("matmul", "refuse")], ["cuda:0", "200 TFLOP/s"]),
    ({"matmul": None, "matmul_unknown": "out of memory"}, [("matmul", "refuse")], ["out of memory"]),
    ({"all_reduce": {"gb_per_second": 200.0}}, [("all_reduce", "warn")], ["200 GB/s", "33% below"]),
    ({"all_reduce": None, "all_reduce_unknown": "NCCL error"}, [("all_reduce", "refuse")], ["NCCL error"]),
    ({"burn_in_unknown": "did not end"}, [("burn_in", "refuse")], ["no burn-in: did not end"]),
    ({"burn_in": BURNED}, [("burn_in", "refuse")], [r"cuda:1: \x1b 3 of 5 wrong"]),
    ({"burn_in": IN_USE}, [("burn_in", "refuse")], ["no burn-in, GPU 1: 5 GB: end them first"]),
    ({"burn_in": UNDIAGNOSED}, [("burn_in", "warn")], ["dcgmi diag told nothing: no hostengine"]),
]  # fmt: skip


@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize(("odd", "checks", "words"), WRONG, ids=[str(odd)[:60] for odd, *_ in WRONG])
def test_compare_reports_finds_what_is_planted(
    odd: dict[str, Any], checks: list[tuple[str, str]], words: list[str], count: int
) -> None:
    found = compare_reports(hosts(count, **odd), wanted(count))
    assert brief(found) == [(f"n{count}", *check) for check in checks]
    assert all(word in found[0].text for word in words), found[0].text


@given(
    st.lists(st.floats(100, 1000), min_size=2, max_size=12),
    st.floats(1e-3, 1e3),
)
def test_compare_reports_names_hosts_far_below_the_median_whatever_the_unit(
    speeds: list[float], unit: float
) -> None:
    def named(of: list[float]) -> set[str]:
        reports: dict[str, HostReport | str] = {
            f"n{n}": report(matmul={"tflops": speed, "device": "cpu", "each": {}})
            for n, speed in enumerate(of)
        }
        return {one.host for one in compare_reports(reports, Wanted(token=TOKEN)) if one.check == "matmul"}

    found, middle = named(speeds), sorted(speeds)[len(speeds) // 2]
    assert all(speeds[int(host[1:])] < 0.9 * middle for host in found)
    assert len(found) <= len(speeds) // 2
    if len(speeds) < 5:
        assert len(found) == sum(speed < 0.9 * middle for speed in speeds)
    near = [speed for speed in speeds if abs(speed / (0.9 * middle) - 1) < 1e-9]
    assert near or named([speed * unit for speed in speeds]) == found


@given(st.lists(st.floats(-0.45, 0.45), min_size=3, max_size=9), st.floats(-1e6, 1e6), st.floats(2.0, 1e6))
def test_compare_reports_compares_a_clock_with_the_others(
    near: list[float], shift: float, off: float
) -> None:
    """shift: of this host's own clock, or its lateness."""
    offsets = {f"n{n}": shift + one for n, one in enumerate(near)}
    known: dict[str, HostReport | str] = {host: report() for host in offsets}
    assert compare_reports(known, Wanted(token=TOKEN, offsets=offsets)) == []
    found = compare_reports(known, Wanted(token=TOKEN, offsets=offsets | {"n1": shift - off}))
    assert brief(found) == [("n1", "clock", "warn")] and "behind" in found[0].text


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("ssh: connect to host second port 22: Connection timed out", "is it up"),
        ("root@b: Permission denied (publickey).", "ssh-copy-id"),
        ("exit code 1: sh: 1: cd: can't cd to /work: No such file or directory", "same path"),
        ("something else\x1b[0m", r"something else\x1b[0m"),
    ],
)
def test_compare_reports_refuses_an_unreachable_host_with_the_reason(reason: str, remedy: str) -> None:
    found = compare_reports({"n1": report(), "n2": reason}, wanted(2))
    assert brief(found) == [("n2", "reached", "refuse")] and remedy in found[0].text
    assert found[0].text.isprintable()


@pytest.mark.parametrize(("free", "severity"), [(0.9e12, "refuse"), (1.5e12, "warn"), (2.1e12, None)])
def test_compare_reports_wants_room_for_two_checkpoints(free: float, severity: str | None) -> None:
    found = compare_reports({"n1": report(disk_free=int(free))}, wanted(1, checkpoint=1e12))
    assert brief(found) == ([] if severity is None else [("n1", "disk", severity)])


def test_compare_reports_of_a_laptop_without_gpus() -> None:
    laptop = report(
        gpus=None, gpus_unknown="NVML Shared Library Not Found",
        matmul={"tflops": 0.1, "dtype": "float32", "device": "cpu", "each": {"cpu": 0.1}},
    )  # fmt: skip
    assert compare_reports({"n1": laptop}, Wanted(token=TOKEN)) == []
    assert compare_reports({"n1": laptop}, wanted(1, cpu=True)) == []
    assert brief(compare_reports({"n1": laptop}, wanted(1))) == [("n1", "gpus", "warn")]


def test_compare_reports_of_one_gpu_alone() -> None:
    alone = report(
        gpus=[GPU], all_reduce=None, all_reduce_unknown="one GPU alone",
        matmul={"tflops": 600.0, "each": None} | rates(600.0),
    )  # fmt: skip
    assert compare_reports({"n1": alone}, Wanted(token=TOKEN)) == []


@given(st.text(max_size=60))
def test_compare_reports_makes_texts_safe_to_print(text: str) -> None:
    odd = report(
        packages={"torch": text}, variables={"NCCL_" + text: text}, commit=text, code="3" * 64, gpus=None,
        gpus_unknown=text, folder={"writable": False, "why": text}, disk_free=None, disk_free_unknown=text,
    )  # fmt: skip
    found = compare_reports({"n1": report(), "n2": odd, "n3": text}, wanted(3))
    assert len(found) >= 6 and all(one.text.isprintable() for one in found)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("", "nothing"), ("bash: x\x1b: not found", r"bash: x\x1b: not found"), ('{"host": "n"', "JSON"),
        ('{"host": "n"}', "time"), (report().model_dump_json().replace("1000000000.0", "NaN"), "time"),
    ],
)  # fmt: skip
def test_read_report_tells_what_is_no_report(output: str, said: str) -> None:
    found = read_report(output)
    assert isinstance(found, str) and said in found


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
        console.print(tabulate_reports(hosts, findings, full, burn_in))
    return [" ".join(line.split()) for line in capture.get().splitlines() if line.strip()]


def test_tabulate_reports_marks_where_something_was_found() -> None:
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
