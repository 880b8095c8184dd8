"""What of a GPU can be verified without one: bash launch/test.sh gpu-static.

Runs on the versions of a GPU host with device.c preloaded, in a process of its own: a GPU that is only half there is
nothing that other tests should see. The first line of a test's docstring is its row in the table at the end.
"""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
PRELOADED = "libfakegpu" in os.environ.get("LD_PRELOAD", "")
ELSEWHERE = "on the versions of a GPU host only: bash launch/test.sh gpu-static"
# What stays open until there is a GPU, and why.
LEFT_OUT = {
    "the numbers that kernels compute, their speed, and bits that repeat": "they must run: launch/bench_gpu.sh",
    "Transformer Engine's forward and backward, and blocks with its modules in them": "its kernels have no fake",
    "collectives over NCCL": "it wants devices",
    "the allocator's waste, the memory of the CUDA context and of cuBLAS": "they want a device",
}
_said: dict[str, list[tuple[str, str]]] = defaultdict(list)  # by row: outcomes and reasons


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            if not PRELOADED:
                item.add_marker(pytest.mark.skip(reason=ELSEWHERE))
            function = getattr(item, "function", None)
            item.user_properties.append(("row", (inspect.getdoc(function) or item.name).splitlines()[0]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    row = dict(report.user_properties).get("row")
    if row is None or (report.when != "call" and report.passed):
        return
    reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    _said[str(row)].append((report.outcome, reason.removeprefix("Skipped: ")))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not PRELOADED or not _said:
        return
    write = terminalreporter.write_line
    terminalreporter.section("verified without a GPU")
    for row, outcomes in _said.items():
        passed = sum(outcome == "passed" for outcome, _ in outcomes)
        reasons = sorted({reason for _, reason in outcomes if reason})
        result = f"{passed} of {len(outcomes)}" if len(outcomes) > 1 else outcomes[0][0]
        write(f"| {row} | {'; '.join([result, *reasons])} |")
    terminalreporter.section("not verified")
    for what, why in LEFT_OUT.items():
        write(f"| {what} | {why} |")


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> Iterator[None]:
    if not PRELOADED:
        yield
        return
    from tests.gpu_static import fake

    with pytest.MonkeyPatch.context() as patch:
        fake.install(patch)
        yield


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


@pytest.fixture
def codes() -> Iterator[list[str]]:
    """What inductor writes in this test."""
    from tests.gpu_static import fake

    fake.codes.clear()
    yield fake.codes
    fake.codes.clear()
