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
from megastable.cluster.host_report import HostBurnIn
from megastable.commands.root import app
from tests.cluster.test_host_check import BARE, fake_driver, program
from tests.patience import until
from tests.tools.cli import call

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
    work.run(0.0, first)
    return HostBurnIn.model_validate(work.report).found


# The answers


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("round_", range(12))
def test_answers_are_exact_in_every_dtype_and_layout(
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
    assert (
        describe_difference(
            case.answers, KnownCase(kind, 7, round_).compute(a, b) if kind == "cpu" else right
        )
        == ""
    )
    others = KnownCase(kind, 8, round_), KnownCase(kind, 7, round_ + len(burn_in.DTYPES[kind]))
    assert not any(torch.equal(other.inputs[0], a) for other in others)


def test_the_largest_sides_leave_room_for_exact_sums() -> None:
    assert all(most // burn_in.SIDES["cuda"][1] >= 1 for most in ACCUMULATED.values())
    assert burn_in.SIDES["cuda"][1] * max(LARGEST.values()) <= 1 << 24  # sums of A's rows, in fp32


def test_a_difference_is_counted_and_placed() -> None:
    right = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    wrong = flipped(flipped(right, (1, 0), 31), (1, 1), 0)
    assert describe_difference([right, right], [right, wrong]) == (
        "2 of 4 elements wrong, first at [1, 0]: 0xc0400000 instead of 0x40400000"
    )
    assert describe_difference([torch.tensor(0.0)], [torch.tensor(-0.0)]) != ""
    assert "0x3f81 instead of 0x3f80" in describe_difference(
        [torch.ones(1, dtype=torch.bfloat16)], [flipped(torch.ones(1, dtype=torch.bfloat16), (0,), 0)]
    )


# Faults


@pytest.mark.parametrize("round_", range(4))
def test_nothing_is_found_where_nothing_is_wrong(round_: int) -> None:
    assert find([CPU], first=round_) == find(TWO, first=round_) == []


@pytest.mark.parametrize(("part", "index", "bit"), [(0, (2, 1), 0), (1, (3,), 30)])
@pytest.mark.parametrize(("calls", "again"), [((0,), 0), ((1,), 0), ((0, 2), 1), (range(99), 3)])
def test_a_bit_that_flips_once_or_always(
    part: int, index: tuple[int, ...], bit: int, calls: Any, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, made = KnownCase.compute, list[int]()

    def faulty(case: KnownCase, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, call = list(compute(case, a, b)), len(made)
        made.append(call)
        if call in calls:
            results[part] = flipped(results[part], index, bit)
        return tuple(results)

    monkeypatch.setattr(KnownCase, "compute", faulty)
    (text,) = find([CPU], seed=17, first=4)
    assert text.startswith("cpu: torch.float32 [") and "(seed 17, round 4): 1 of " in text
    assert f"first at {list(index)}: 0x" in text and f"; {again} of 3 runs at once" in text


def test_a_device_that_is_wrong_is_not_tried_again_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burn_in, "reduce_add", lambda parts, index: torch.stack(parts).sum(0) + (index == 1))
    work = BurnIn(list(TWO), 0.0, 1)
    work.run(0.5, 1)
    (text,) = work.report["found"]
    assert text.startswith("cpu:1: sum over 2 devices, ") and "3 of 3 runs" in text
    assert work.devices == [CPU] and work.report["runs"] > 6


def test_a_difference_that_only_the_device_sees_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda x, y: False)
    (text,) = find([CPU])
    assert "the CPU does not see the difference; 0 of 3 runs" in text


def test_a_device_that_fails_is_named_and_one_that_others_fill_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*given: Any) -> None:
        raise error

    monkeypatch.setattr(burn_in, "describe_difference", fails)
    error: RuntimeError = RuntimeError("CUDA error: an illegal access\nand more")
    (text,) = find([CPU])
    assert (
        text.startswith("cpu: torch.float32 [") and ": CUDA error: an illegal access: see the kernel" in text
    )
    error = torch.OutOfMemoryError("out of memory")
    work = BurnIn([CPU], 0.0, 1)
    work.run(0.0, 0)
    assert work.report["found"] == [] and work.report["in_use"].endswith("others took its memory meanwhile")


def test_a_step_that_hangs_is_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(burn_in, "HANG", 0.1)
    monkeypatch.setattr(os, "_exit", ended)
    work = BurnIn([CPU], 0.0, 1)
    work._begin(CPU, "a product")
    with pytest.raises(SystemExit):
        work.watch()
    assert "cpu: a product: no end within 0 s" in json.loads(capfd.readouterr().out)["found"][0]


def test_gpus_that_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "dmesg", "exit 1", monkeypatch)
    fake_driver(
        tmp_path, monkeypatch, BARE | {"nvmlDeviceGetMemoryInfo": {"total": 80 << 30, "used": 59 << 30}}
    )
    assert burn_in.describe_use() == "GPU 0: 60,416 MiB of its memory are in use by others"
    fake_driver(tmp_path, monkeypatch, BARE)
    assert burn_in.describe_use() == ""


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
        (diagnosis("DCGM Diagnostic", "Deployment", status="Fail", entity_id=3, warnings=[SEVERE]),
         ["GPU 3: dcgmi diag: memory: GPU 3 has a memory error"]),
        ("a line\n" + diagnosis("DCGM GPU Diagnostic", "Stress", status="FAIL", gpu_ids="0,1", warnings="too slow"),
         ["GPU 0,1: dcgmi diag: memory: too slow"]),
        (diagnosis("DCGM GPU Diagnostic", "Stress", status="Fail", gpu_id="0"),
         ["GPU 0: dcgmi diag: memory: no reason given"]),
        (diagnosis("DCGM GPU Diagnostic", "Deployment", status="Fail", gpu_ids="0", warnings=["Persistence"]), []),
    ],
)  # fmt: skip
def test_what_dcgm_finds_broken(
    output: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "dcgmi", f"cat <<'E'\n{output}\nE\nexit 226", monkeypatch)
    assert burn_in.diagnose(60.0) == (found, "")


@pytest.mark.parametrize(
    "said", ["Error: unable to connect to localhost", "{}", '{"DCGM Diagnostic": {"x": 1}}']
)
def test_a_diagnosis_that_cannot_be_made_is_told(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "dcgmi", f"echo '{said}'; exit 1", monkeypatch)
    assert burn_in.diagnose(60.0) == ([], f"exit code 1: {said}")


def test_dcgm_diagnoses_as_long_as_there_is_time_and_not_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "dcgmi", f'echo "$@" >> {tmp_path}/asked; exec sleep 0.3', monkeypatch)
    burn_in.diagnose(60.0), burn_in.diagnose(1800.0)
    assert (tmp_path / "asked").read_text() == "diag --run 2 --json\ndiag --run 3 --json\n"
    monkeypatch.setattr(burn_in, "DIAGNOSIS", 0.1)
    assert "timed out" in burn_in.diagnose(0.0)[1]
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert burn_in.diagnose(60.0) == ([], "")


# The command


def test_a_burn_in_ends_with_whoever_asked_for_it(tmp_path: Path) -> None:
    seed = str(2**40 + os.getpid())
    asked = [sys.executable, "-m", "megastable.cluster.host_check", "--folder", str(tmp_path)]
    asked += ["--burn-in", "3000", "--seed", seed]
    with (tmp_path / "log").open("w") as log:
        shell = subprocess.Popen(
            ["sh", "-c", '"$@" & echo $!; wait', "sh", *asked], stdout=subprocess.PIPE, stderr=log
        )

    def left() -> list[list[str]]:
        running = [
            process for process in psutil.process_iter(["cmdline", "status"]) if process.info["cmdline"]
        ]
        return [
            process.info["cmdline"] for process in running
            if seed in process.info["cmdline"] and process.info["status"] != psutil.STATUS_ZOMBIE
        ]  # fmt: skip

    until(lambda: any("megastable.cluster.burn_in" in words for words in left()))
    time.sleep(1.0)
    shell.kill()
    shell.wait()
    until(lambda: not left())


@pytest.mark.slow
def test_a_host_without_faults(tmp_path: Path) -> None:
    words = ["--quick", "--burn-in", "0.02", "--burn-in-seed", 7, "--output", "out.json"]
    done = call(app, "preflight", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "burn-in: seed 7" in done.stdout and "1 host checked: nothing found" in done.stdout
    assert done.stdout.split("\n")[1].split()[-1] == "burn-in"
    found = json.loads((tmp_path / "out.json").read_text())["hosts"]["localhost"]["burn_in"]
    assert found.pop("runs") >= 2
    assert found == {"seed": 7, "seconds": 1.2, "found": [], "in_use": "", "undiagnosed": ""}


@pytest.mark.slow
def test_a_faulty_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process of it multiplies wrong."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'megastable.cluster.burn_in' in sys.orig_argv:\n"
        "    import torch\n"
        "    right = torch.mm\n"
        "    def wrong(*a):\n"
        "        c = right(*a).clone()\n"
        "        c[2, 1] += 1024\n"
        "        return c\n"
        "    torch.mm = wrong\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    words = ["--quick", "--burn-in", "0.001", "--burn-in-seed", 7, "--output", tmp_path / "out.json"]
    done = call(app, "preflight", *words, cwd=tmp_path, columns=400)
    assert done.returncode == 2 and "1 host checked: 1 refused" in done.stdout, done
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REFUSED localhost: cpu: ")]
    for part in ("(seed 7, round 0): 1 of ", "first at [2, 1]: 0x", "3 of 3 runs at once"):
        assert part in line
    (finding,) = json.loads((tmp_path / "out.json").read_text())["findings"]
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
