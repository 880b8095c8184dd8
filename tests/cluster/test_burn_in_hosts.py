"""Burn-ins of a host and of several: processes, what is said of faults, and the command."""

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

from megastable.cluster.burn_in import device_rounds, memory_patterns, rank_processes
from megastable.cluster.burn_in.faults import BurnInFault, DeviceBurnIn, HostBurnIn
from megastable.cluster.burn_in.findings import burned
from megastable.commands.root import app
from tests.patience import PATIENCE
from tests.tools.cli import call


@pytest.fixture(autouse=True)
def _on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


# Processes


def test_states_of_one_device_are_merged() -> None:
    fault = BurnInFault(test="matmul", what="x", round=0, case=0, wrong=1, of=2)
    one = DeviceBurnIn(
        device="cpu", rounds=3, memory=5, runs={"matmul": 2}, failed={"matmul": 1}, faults=[fault]
    )
    two = DeviceBurnIn(device="cpu", runs={"all_reduce": 4, "matmul": 1}, now="x")
    (found,) = rank_processes.merged([one, two])
    assert found == one.model_copy(update={"runs": {"matmul": 3, "all_reduce": 4}})
    assert len(rank_processes.merged([one, DeviceBurnIn(device="cuda:1")])) == 2


def test_a_rank_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "HANG", 0.1)
    (found,) = rank_processes.phase("rounds", "cpu", 1, 600.0, 1)
    assert found.device == "cpu" and found.ended.startswith("its start: no news for 0 s")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_fails_says_why() -> None:
    (found,) = rank_processes.phase("rounds", "cuda", 1, 0.0, 1)
    assert found.device == "cuda:0" and found.ended.startswith("its start: ")
    assert "cuda" in found.ended.lower() or "nvidia" in found.ended.lower()


def test_a_burn_in_ends_with_whoever_asked_for_it(tmp_path: Path) -> None:
    seed = str(2**40 + os.getpid())
    asked = [sys.executable, "-m", "megastable.cluster.host_check", "--folder", str(tmp_path)]
    asked += ["--burn-in", "3000", "--seed", seed]
    with (tmp_path / "log").open("w") as log:
        shell = subprocess.Popen(
            ["sh", "-c", '"$@" & echo $!; wait', "sh", *asked], stdout=subprocess.PIPE, stderr=log
        )

    def left() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if seed in (process.info["cmdline"] or []) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    until = time.monotonic() + PATIENCE
    while not any("--phase" in process.info["cmdline"] for process in left()):
        assert time.monotonic() < until
        time.sleep(0.2)
    shell.kill()
    shell.wait()
    while left():
        assert time.monotonic() < until
        time.sleep(0.2)


# What is said


def report(*devices: DeviceBurnIn, why: str = "") -> HostBurnIn:
    return HostBurnIn(seed=17, seconds=60.0, devices=list(devices), all_reduce_unknown=why)


def bad(device: str, **other: Any) -> DeviceBurnIn:
    found: dict[str, Any] = {
        "test": "matmul", "what": "bfloat16 [2, 3] x [3, 4] NN", "round": 4, "case": 1, "wrong": 1, "of": 8,
        "index": (1, 2), "expected": "0x4120", "got": "0x4130", "xor": "0x0010", "common": (1, 2), "again": 3,
    }  # fmt: skip
    fault = BurnInFault(**found | other)
    return DeviceBurnIn(
        device=device, name="H100", runs={fault.test: 40}, failed={fault.test: 2}, faults=[fault]
    )


def good(device: str) -> DeviceBurnIn:
    return DeviceBurnIn(device=device, name="H100", runs={"matmul": 40})


def test_a_fault_is_told_with_its_evidence() -> None:
    ((host, told),) = burned({"a": report(good("cuda:0"), bad("cuda:1")), "b": report(good("cuda:0"))})
    assert host == "a" and told == (
        "cuda:1 (H100): matrix products wrong in 2 of 40 runs; the first: bfloat16 [2, 3] x [3, 4] NN (seed 17, "
        "round 4, case 1): 1 of 8 elements wrong, first at [1, 2]: 0x4130 instead of 0x4120, bits 0x0010; 3 of 3 runs "
        "at once with the same inputs were wrong, too (persistent); a sound device is never wrong: leave the host out "
        "and replace the device"
    )
    ((_, column),) = burned({"a": report(bad("cuda:1", wrong=2, common=(None, 2), again=0))})
    assert "2 of 8 elements wrong, all at [*, 2], first at [1, 2]" in column and "(transient)" in column


def test_what_all_devices_have_is_no_fault_of_a_device() -> None:
    everywhere = burned({"a": report(bad("cuda:0"), bad("cuda:1")), "b": report(bad("cuda:0"))})
    assert all("a library or a driver" in told for _, told in everywhere)
    for reports in (
        {"a": report(bad("cuda:0"), bad("cuda:1")), "b": report(good("cuda:0"))},
        {"a": report(bad("cuda:0"), bad("cuda:1", xor="0x0001"))},
        {"a": report(bad("cuda:0", again=0), bad("cuda:1", again=0))},
        {"a": report(bad("cuda:0"))},
    ):
        assert all("replace the device" in told for _, told in burned(reports))


def test_devices_that_die_and_all_reduces_that_fail_are_told() -> None:
    dead = DeviceBurnIn(device="cuda:3", ended="attention, round 2: CUDA error: an illegal \x1b access")
    found = dict.fromkeys(told for _, told in burned({"a": report(dead, why="not tried")}))
    assert [told.partition(": see")[0] for told in found] == [
        r"cuda:3: the burn-in ended in attention, round 2: CUDA error: an illegal \x1b access",
        "no all-reduce in the burn-in: not tried",
    ]


def test_a_device_that_others_use_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not called broken, and nothing of its memory is taken."""
    gpu, gib = torch.device("cuda", 0), 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: gib)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    *_, state = device_rounds.rounds(gpu, 0, 1.0)
    assert state.in_use == "60,416 MiB of its memory are in use by others" and not state.runs
    (told,) = [told for _, told in burned({"a": report(state)})]
    assert told == f"cuda:0: no burn-in, {state.in_use}: end them first"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (78 * gib, 80 * gib))
    assert not memory_patterns.taken_by_others(gpu)


# The command


@pytest.mark.slow
def test_a_sound_host(tmp_path: Path) -> None:
    words = ["--quick", "--burn-in", "0.02", "--burn-in-seed", 7, "--output", "out.json"]
    done = call(app, "preflight", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "burn-in: seed 7" in done.stdout and "1 host checked: nothing found" in done.stdout
    assert done.stdout.split("\n")[1].split()[-1] == "burn-in"
    facts = json.loads((tmp_path / "out.json").read_text())
    found = facts["hosts"]["localhost"]["burn_in"]
    assert (found["seed"], found["seconds"], found["all_reduce_unknown"]) == (7, 1.2, "")
    (device,) = found["devices"]
    assert device["device"] == "cpu" and device["rounds"] >= 1 and device["faults"] == []
    assert device["runs"].keys() == {"memory", "all_reduce", *device_rounds.TESTS}
    assert device["runs"]["all_reduce"] >= 8  # of two ranks, each dtype


@pytest.mark.slow
def test_a_faulty_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process of it multiplies wrong."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if '--phase' in sys.orig_argv:\n"
        "    from megastable.cluster.burn_in import exact_cases\n"
        "    right = exact_cases.product\n"
        "    def wrong(*a, **b):\n"
        "        c = right(*a, **b).clone()\n"
        "        c[2, 1] += 1024\n"
        "        return c\n"
        "    exact_cases.product = wrong\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    words = ["--quick", "--burn-in", "0.001", "--burn-in-seed", 7, "--output", tmp_path / "out.json"]
    done = call(app, "preflight", *words, cwd=tmp_path, columns=400)
    assert done.returncode == 2 and "1 host checked: 1 refused" in done.stdout, done
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REFUSED localhost: cpu: ")]
    for part in ("matrix products wrong in ", "(seed 7, round 0, case 0)", "first at [2, 1]", "(persistent)"):
        assert part in line
    facts = json.loads((tmp_path / "out.json").read_text())
    (finding,) = facts["findings"]
    assert (finding["host"], finding["check"], finding["severity"]) == ("localhost", "burn_in", "refuse")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--burn-in 0", "minutes above 0"), ("--burn-in nan", "minutes above 0"), ("--burn-in inf", "minutes above 0"),
        ("--burn-in-seed 3", "without --burn-in"), ("--burn-in x", "valid number"),
    ],
)  # fmt: skip
def test_bad_input(words: str, said: str, tmp_path: Path) -> None:
    done = call(app, "preflight", *words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr


def test_help_has_an_example(tmp_path: Path) -> None:
    done = call(app, "preflight", "--help", cwd=tmp_path)
    assert "megastable preflight --burn-in 30 -- --hostfile hostfile" in done.stdout
