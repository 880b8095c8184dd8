"""Summaries of traces: intervals, nested operations, a GPU's kernels, and files that are no traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.report.trace_summary import BusyTime, read_trace, sum_busy

SOME = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda p: BusyTime(p[0], p[0] + p[1])), max_size=8
)


@given(SOME, SOME)
def test_sum_busy_counts_every_moment_once(a: list[BusyTime], b: list[BusyTime]) -> None:
    talking, computing = ({n for one in some for n in range(int(one.begin), int(one.end))} for some in (a, b))
    found = sum_busy([*((one, True) for one in a), *((one, False) for one in b)])
    assert found == (len(talking), len(computing), len(talking & computing))


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def write(path: Path, *events: dict[str, Any], **more: Any) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"ph": "M", "name": "process_name"}, *events], **more}, file)
    return path


def test_read_trace_of_a_cpu_gives_operations_their_own_time(tmp_path: Path) -> None:
    found = read_trace(write(
        tmp_path / "step-00000007-rank-2.json.gz",
        event("megastable: step 7", 100, 100, "user_annotation"),
        event("megastable: forward", 100, 40, "user_annotation"),
        event("aten::linear", 110, 30), event("aten::addmm", 115, 20), event("aten::copy_", 120, 5),
        event("aten::before", 50, 20),
        event("c10d::allreduce_", 150, 20), event("aten::wait", 155, 10),
        event("gloo:all_reduce", 160, 20, "user_annotation", tid=2),
        event("aten::mm", 165, 25, tid=3),
    ))  # fmt: skip
    own = {one.name: round(one.seconds * 1e6) for one in found.operators}
    assert own == {
        "aten::mm": 25, "gloo:all_reduce": 20, "aten::addmm": 15, "aten::linear": 10, "c10d::allreduce_": 10,
        "aten::wait": 10, "aten::copy_": 5,
    }  # fmt: skip
    assert (found.rank, found.steps, found.device) == (2, [7], "cpu")
    assert found.seconds == pytest.approx(1e-4) and found.phases == {"forward": pytest.approx(4e-5)}
    assert found.communication == pytest.approx(3e-5)  # 150 to 180, whatever is called within
    assert found.overlapped == pytest.approx(15 / 30)
    assert found.idle == pytest.approx(1 - (30 + 40) / 100)


def test_read_trace_of_a_gpu_counts_kernels(tmp_path: Path) -> None:
    found = read_trace(write(
        tmp_path / "step-00000001-rank-0.json.gz",
        event("megastable: step 1", 0, 50, "user_annotation"),
        event("megastable: step 2", 50, 50, "user_annotation"),
        event("aten::mm", 0, 90), event("ncclAllReduce", 0, 90),
        event("gemm", 20, 40, "kernel", tid=7), event("gemm", 70, 40, "kernel", tid=7),
        event("ncclDevKernel_AllReduce_Sum", 50, 20, "kernel", tid=9),
        event("Memcpy HtoD", 110, 10, "gpu_memcpy", tid=7),
        megastable={"rank": 0, "steps": [1, 2], "device": "cuda"},
    ))  # fmt: skip
    assert (found.operators[0].name, found.operators[0].count) == ("gemm", 2)
    assert found.device == "cuda" and found.seconds == pytest.approx(120e-6)  # until the last kernel
    assert found.communication == pytest.approx(20e-6) and found.overlapped == pytest.approx(0.5)
    assert found.idle == pytest.approx(20 / 120)


# Without a time: the processes that test side by side must name the tests alike.
PACKED = [gzip.compress(text, mtime=0) for text in (b"[]", b"{}", b'{"traceEvents": []}', b"{" * 5)]


@pytest.mark.parametrize("content", [b"", b"no gzip", *PACKED])
def test_read_trace_refuses_what_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step-00000001-rank-0.json.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a trace of"):
        read_trace(path)
    with pytest.raises(DataError, match="No such file"):
        read_trace(tmp_path / "none.json.gz")
