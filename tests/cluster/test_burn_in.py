"""Burn-ins: answers that are exact, faults that are planted and found, nothing else found, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megastable.cluster import burn_in
from megastable.cluster.burn_in import ACCUMULATED, LARGEST, BurnIn, KnownCase, as_bits, describe_difference
from megastable.cluster.host_survey import HostBurnIn
from tests.cluster.test_host_check import program
from tests.patience import until

CPU = torch.device("cpu")
TWO = [CPU, torch.device("cpu", 1)]  # to torch the same device


@pytest.fixture(autouse=True)
def _on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setitem(burn_in.SLICE, "cpu", 0.0)
    monkeypatch.setattr(burn_in, "reduce_add", lambda parts, index: torch.stack(parts).sum(0))


def flipped(x: torch.Tensor, index: tuple[int, ...], bit: int) -> torch.Tensor:
    bits = as_bits(x).clone()
    bits[index] ^= 1 << bit
    return bits.view(x.dtype).view(x.shape)


def find(devices: list[torch.device], seed: int = 1, first: int = 0) -> list[str]:
    work = BurnIn(devices, 0.0, seed)
    work.run_rounds(0.0, first)
    return HostBurnIn.model_validate(work.report).found


# The answers


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("round_", range(6))
def test_known_case_is_exact_in_every_dtype_and_layout(
    kind: str, round_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(burn_in.SIDES, "cuda", (64, 256, 64))
    case = KnownCase(kind, 7, round_)
    a, b = case.inputs
    most = LARGEST[a.dtype]
    assert min(a.abs().min(), b.abs().min()) > 0 and max(a.abs().max(), b.abs().max()) <= most
    assert (a.double().abs() @ b.double().abs()).max() <= ACCUMULATED[a.dtype]
    right = (a.double() @ b.double()).float().to(a.dtype), a.double().sum(1).float()
    assert describe_difference(case.answers, right) == ""
    assert kind == "cuda" or describe_difference(case.answers, case.compute_results(a, b)) == ""
    others = KnownCase(kind, 8, round_), KnownCase(kind, 7, round_ + len(burn_in.DTYPES[kind]))
    assert not any(torch.equal(other.inputs[0], a) for other in others)


# Faults


def test_burn_in_finds_nothing_where_nothing_is_wrong() -> None:
    assert find([CPU]) == find(TWO, first=1) == []


@pytest.mark.parametrize(("part", "index", "bit"), [(0, (2, 1), 0), (1, (3,), 30)])
@pytest.mark.parametrize(("calls", "again"), [((0,), 0), ((1,), 0), ((0, 2), 1), (range(99), 3)])
def test_burn_in_finds_a_bit_that_flips_once_or_always(
    part: int, index: tuple[int, ...], bit: int, calls: Any, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, made = KnownCase.compute_results, list[int]()

    def faulty(case: KnownCase, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, call = list(compute(case, a, b)), len(made)
        made.append(call)
        if call in calls:
            results[part] = flipped(results[part], index, bit)
        return tuple(results)

    monkeypatch.setattr(KnownCase, "compute_results", faulty)
    (text,) = find([CPU], seed=17, first=4)
    assert text.startswith("cpu: torch.float32 [") and "(seed 17, round 4): 1 of " in text
    assert f"first at {list(index)}: 0x" in text and f"; {again} of 3 runs at once" in text


def test_burn_in_tries_a_wrong_device_no_more_and_others_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burn_in, "reduce_add", lambda parts, index: torch.stack(parts).sum(0) + (index == 1))
    work = BurnIn(list(TWO), 0.0, 1)
    work.run_rounds(0.5, 1)
    (text,) = work.report["found"]
    assert text.startswith("cpu:1: sum over 2 devices, ") and "3 of 3 runs" in text
    assert work.devices == [CPU] and work.report["runs"] > 6


# DCGM

SEVERE = {"warning": "GPU 3 has a memory error", "error_severity": 2, "error_id": 1}
CONFIGURATION = {"warning": "Persistence Mode: disabled", "error_severity": 5, "error_id": 29}


def diagnosis(name: str, category: str, **result: object) -> str:
    passed = {"category": "Hardware", "tests": [{"name": "pcie", "results": [{"status": "Pass"}]}]}
    tests = [{"name": "memory", "results": [{"status": "Skip"}, result], "test_summary": {"status": "Fail"}}]
    return json.dumps(
        {"metadata": {}, name: {"test_categories": [passed, {"category": category, "tests": tests}]}}
    )


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (diagnosis("DCGM Diagnostic", "Hardware", status="Pass", entity_id=3), []),
        (diagnosis("DCGM Diagnostic", "Hardware", status="Fail", entity_id=3, warnings=[SEVERE, CONFIGURATION]),
         ["GPU 3: dcgmi diag: memory: GPU 3 has a memory error"]),
        (diagnosis("DCGM Diagnostic", "Deployment", status="Fail", entity_id=3, warnings=[CONFIGURATION]), []),
        ("a line\n" + diagnosis("DCGM GPU Diagnostic", "Stress", status="FAIL", gpu_ids="0,1", warnings="too slow"),
         ["GPU 0,1: dcgmi diag: memory: too slow"]),
        (diagnosis("DCGM GPU Diagnostic", "Deployment", status="Fail", gpu_ids="0", warnings=["Persistence"]), []),
    ],
)  # fmt: skip
def test_diagnose_tells_what_dcgm_finds_broken(
    output: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "dcgmi", f"cat <<'E'\n{output}\nE\nexit 226", monkeypatch)
    assert burn_in.diagnose(60.0) == (found, "")
    program(tmp_path, "dcgmi", "echo '{}'; exit 1", monkeypatch)
    assert burn_in.diagnose(60.0) == ([], "exit code 1: {}")


# The command


def test_burn_in_ends_with_whoever_asked_for_it(tmp_path: Path) -> None:
    seed = str(2**40 + os.getpid())
    asked = [sys.executable, "-m", "megastable.cluster.host_check", "--folder", str(tmp_path)]
    asked += ["--burn-in", "3000", "--seed", seed]
    with (tmp_path / "log").open("w") as log:
        words = ["sh", "-c", '"$@" & echo $!; wait', "sh", *asked]
        shell = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log)

    def left() -> list[list[str]]:
        running = [p.info for p in psutil.process_iter(["cmdline", "status"]) if p.info["cmdline"]]
        return [p["cmdline"] for p in running if seed in p["cmdline"] and p["status"] != psutil.STATUS_ZOMBIE]

    until(lambda: any("megastable.cluster.burn_in" in words for words in left()))
    time.sleep(1.0)
    shell.kill()
    shell.wait()
    until(lambda: not left())
