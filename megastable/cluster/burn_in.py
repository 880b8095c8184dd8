"""Computes what is known bit for bit on every device of this host, and prints what was wrong as one JSON object.

    python -m megastable.cluster.burn_in --seconds 600 --seed 1
    python -m megastable.cluster.burn_in --seconds 1 --seed 1 --first-round 17    # repeats that round

Where DCGM is installed, its own diagnosis comes first: memory, PCIe, NVLink, power. Then every device multiplies and
sums integers, and all of them sum theirs. Sums of integers are exact in any order, so that kernels may split and tile
as they like. A device that was wrong once is not tried again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.cuda.comm import reduce_add

from megastable.cluster.gpu_health import NO_PACKAGE, read_gpus
from megastable.cluster.host_bench import find_devices
from megastable.cluster.host_check import BURN_IN

AGAIN = 3  # times that a wrong result is computed again at once
ROWS = 32  # different rows of A and columns of B: their products are a small table, computed by int64
# What a CPU adds 16 bits in is its own choice.
DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32,)}
# Sums of absolute values up to these are exact in an fp32 accumulator, and are rounded once, to the dtype. Two bits are
# left: tensor cores align the terms of a sum before they add them. fp16 ends at 65,504.
ACCUMULATED = {torch.bfloat16: 1 << 22, torch.float16: 1 << 15, torch.float32: 1 << 22}
LARGEST = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 11}  # fp32: exact as TF32, too
SIDES = {"cuda": (1024, 8192, 64), "cpu": (32, 160, 1)}  # smallest, largest, step: of n, k and m
SLICE = {"cuda": 4.0, "cpu": 0.05}  # seconds of a round
IN_USE = (
    4 << 30
)  # bytes of a GPU that the driver and tools that watch may have: more is a program that computes
HANG = 240.0  # seconds in which every step ends
LONG = 1800.0  # seconds from which DCGM's long diagnosis fits, of about 15 minutes; the medium one takes 2
DIAGNOSIS = 600.0  # seconds that DCGM may take beside those asked for
MINOR = (0, 1, 5)  # DCGM's error severities NONE, MONITOR and CONFIG, such as for a missing persistence mode


class KnownCase:
    """A [n, k] x B [k, m] and the sums of A's rows, all of integers. inputs: A and B; answers: bit for bit."""

    def __init__(self, kind: str, seed: int, round_: int) -> None:
        dice = random.Random(f"{seed} {round_}")
        generator = torch.Generator().manual_seed(dice.getrandbits(63))
        dtype = DTYPES[kind][round_ % len(DTYPES[kind])]
        low, high, step = SIDES[kind]
        n, k, m = (dice.randrange(low, high + 1, step) for _ in "nkm")
        most = ACCUMULATED[dtype] // k
        a_most = min(1 << dice.randrange(most.bit_length()), LARGEST[dtype])
        # A's rows are drawn from a few different ones, and B's columns: so the product, from the table of theirs.
        rows = draw_integers(generator, (ROWS, k), a_most)
        columns = draw_integers(generator, (ROWS, k), min(most // a_most, LARGEST[dtype]))
        of_row, of_column = (torch.randint(ROWS, (count,), generator=generator) for count in (n, m))
        a_turned, b_turned, self.tf32 = (dice.random() < 0.5 for _ in range(3))
        a, b = rows.to(dtype)[of_row], columns.to(dtype)[of_column].t()
        # In memory either may lie transposed, as in the products of a backward pass.
        self.inputs = (a.t().contiguous().t() if a_turned else a), (b if b_turned else b.contiguous())
        # By way of fp32, which holds every sum: so the dtype rounds once, as a kernel does.
        table = (rows @ columns.t()).float().to(dtype)
        self.answers = table[of_row][:, of_column], rows.sum(1).float()[of_row]
        as_tf32 = " as TF32" if self.tf32 and dtype == torch.float32 else ""
        layout = f"{'NT'[a_turned]}{'NT'[b_turned]}{as_tf32}"
        self.what = f"{dtype} [{n}, {k}] x [{k}, {m}] {layout} (seed {seed}, round {round_})"

    def compute_results(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        return torch.mm(a, b), a.sum(1, dtype=torch.float32)


def draw_integers(generator: torch.Generator, shape: tuple[int, ...], most: int) -> Tensor:
    """From -most to most without 0: int64. Without zeros no sum is -0."""
    drawn = torch.randint(-most, most, shape, generator=generator)
    return drawn + (drawn >= 0)


def as_bits(x: Tensor) -> Tensor:
    """The bits of each element as an integer, same shape."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def describe_difference(answers: Sequence[Tensor], results: Sequence[Tensor]) -> str:
    """How the results differ from the answers, for the CPU; "" if they do not."""
    for answer, result in zip(answers, results):
        answer_bits, result_bits = as_bits(answer.cpu()), as_bits(result.cpu())
        wrong_positions = (answer_bits != result_bits).nonzero()
        if len(wrong_positions):
            index, values = tuple(wrong_positions[0].tolist()), 1 << 8 * answer.element_size()
            wrong = f"{len(wrong_positions):,} of {answer_bits.numel():,} elements wrong"
            got, expected = int(result_bits[index]) % values, int(answer_bits[index]) % values
            return f"{wrong}, first at {list(index)}: {got:#x} instead of {expected:#x}"
    return ""


class BurnIn:
    """Of some devices. report: the fields of `host_survey.HostBurnIn`."""

    def __init__(self, devices: list[torch.device], seconds: float, seed: int) -> None:
        self.devices, self._step, self._since = devices, "its start", math.inf
        self.report: dict[str, Any] = {"seed": seed, "seconds": seconds, "runs": 0, "found": []}

    def report_hangs(self) -> None:
        """Report a step that hangs; end without a report if whoever asked is gone. For a thread of its own."""
        parent_pid = os.getppid()
        while os.getppid() == parent_pid:
            time.sleep(1.0)
            if time.monotonic() - self._since > HANG:
                self.report["found"].append(f"{self._step}: no end within {HANG:.0f} s: see the kernel's log")
                self.print_and_exit()
        os._exit(1)

    def print_and_exit(self) -> None:
        print(json.dumps(self.report), flush=True)
        os._exit(0)  # what waits for a dead device is not waited for

    def run_rounds(self, seconds: float, round_: int) -> None:
        """At least one round, from `round_` on."""
        self._since, has_begun = time.monotonic(), False
        end_time = self._since + seconds
        try:
            while self.devices and (not has_begun or time.monotonic() < end_time):
                known_case = KnownCase(self.devices[0].type, self.report["seed"], round_)
                self._multiply(known_case)
                self._sum(known_case, round_)
                round_, has_begun = round_ + 1, True
        except torch.OutOfMemoryError:
            self.report["in_use"] = f"{self._step}: others took its memory meanwhile"
        except RuntimeError as error:
            error_line = str(error).strip().partition("\n")[0][:300]
            advice_text = "see the kernel's log, and replace the device if it repeats"
            self.report["found"].append(f"{self._step}: {error_line}: {advice_text}")

    def _multiply(self, case: KnownCase) -> None:
        """For a while, at least twice. The CPU compares the first result, and those that the device finds different:
        so that the device has more to do than copies."""
        end_time, run_count = time.monotonic() + SLICE[self.devices[0].type], 0
        tensors_by_device = {d: [x.to(d) for x in (*case.inputs, *case.answers)] for d in self.devices}
        while run_count < 2 or time.monotonic() < end_time:
            # All devices compute at the same time; then one after the other is looked at.
            results_by_device = {d: case.compute_results(*tensors_by_device[d][:2]) for d in self.devices}
            run_count += 1
            for device, results in results_by_device.items():
                self._begin(device, case.what)
                answers = tensors_by_device[device][2:]
                if run_count > 1 and all(map(torch.equal, map(as_bits, answers), map(as_bits, results))):
                    continue
                difference_text = describe_difference(case.answers, results)
                if difference_text or run_count > 1:
                    difference_text = difference_text or "the CPU does not see the difference"
                    compute = partial(case.compute_results, *tensors_by_device[device][:2])
                    self._refuse(device, difference_text, case.answers, compute)

    def _sum(self, case: KnownCase, round_: int) -> None:
        """A, times the number of each device, over all devices: on one of them, in turn."""
        if len(self.devices) > 1:
            device, a = self.devices[round_ % len(self.devices)], case.inputs[0].float().contiguous()
            self._begin(device, f"sum over {len(self.devices)} devices, {case.what}")
            answers = [a * (len(self.devices) * (len(self.devices) + 1) // 2)]
            parts = [a.to(one) * number for number, one in enumerate(self.devices, start=1)]
            if found := describe_difference(answers, [reduce_add(parts, device.index)]):
                self._refuse(device, found, answers, lambda: [reduce_add(parts, device.index)])

    def _begin(self, device: torch.device, what: str) -> None:
        self._step, self._since = f"{device}: {what}", time.monotonic()
        self.report["runs"] += 1

    def _refuse(
        self,
        device: torch.device,
        found: str,
        answers: Sequence[Tensor],
        compute: Callable[[], Sequence[Tensor]],
    ) -> None:
        wrong_again = sum(describe_difference(answers, compute()) != "" for _ in range(AGAIN))
        self.devices = [other_device for other_device in self.devices if other_device != device]
        device_name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
        self.report["found"].append(
            f"{self._step}{device_name}: {found}; {wrong_again} of {AGAIN} runs at once with the same inputs were "
            "wrong, too: a healthy device is never wrong: leave the host out and replace the device, or, if all "
            "devices of its kind are wrong alike, a library or a driver"
        )


def describe_use() -> str:
    """The GPUs whose memory others use, or why that is unknown; "" if nobody does, or there are none."""
    gpus, unread_reason = read_gpus()
    if gpus is None and unread_reason is not None and unread_reason.startswith(NO_PACKAGE):
        return unread_reason
    bytes_by_gpu = {gpu["index"]: gpu["memory_used"] or 0 for gpu in gpus or []}
    return "; ".join(
        f"GPU {index}: {used_bytes >> 20:,} MiB of its memory are in use by others"
        for index, used_bytes in bytes_by_gpu.items() if used_bytes > IN_USE
    )  # fmt: skip


def diagnose(seconds: float) -> tuple[list[str], str]:
    """(what DCGM finds broken, why it finds nothing out): both empty where it is not installed."""
    dcgm_words = ["dcgmi", "diag", "--run", "3" if seconds >= LONG else "2", "--json"]
    try:
        finished_process = subprocess.run(
            dcgm_words, capture_output=True, text=True, errors="replace", timeout=seconds + DIAGNOSIS
        )
    except FileNotFoundError:
        return [], ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    try:
        return read_diagnosis(finished_process.stdout), ""
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
        output_lines = (finished_process.stdout + finished_process.stderr).strip().splitlines() or ["nothing"]
        return [], f"exit code {finished_process.returncode}: {output_lines[-1][-300:]}"


def read_diagnosis(output: str) -> list[str]:
    """Failed tests in what `dcgmi diag --json` printed, but for those of the configuration. Raises what else it meets.

    The format has no published schema. DCGM 3 has warnings as texts, and `gpu_id` or `gpu_ids`; DCGM 4 has warnings
    with severities, and `entity_id`.
    """
    json_tree, failed_tests = json.loads(output[output.index("{") :]), list[str]()
    dcgm_part = next(part for name, part in json_tree.items() if name.startswith("DCGM"))
    for test_category in dcgm_part["test_categories"]:
        # Software without a severity; where it is hardware after all, DCGM 4 says so.
        default_severity = 0 if test_category["category"] == "Deployment" else None
        for test in test_category["tests"]:
            for test_result in test["results"]:
                warnings = test_result.get("warnings") or "no reason given"
                serious_texts = list[str]()
                for warning in warnings if isinstance(warnings, list) else [warnings]:
                    told = warning if isinstance(warning, dict) else {"warning": warning}
                    if told.get("error_severity", default_severity) not in MINOR:
                        serious_texts.append(told["warning"])
                if test_result["status"].lower() == "fail" and serious_texts:
                    gpu_keys = ("entity_id", "gpu_id", "gpu_ids")
                    gpu = next((test_result[gpu_key] for gpu_key in gpu_keys if gpu_key in test_result), "?")
                    failed_tests.append(f"GPU {gpu}: dcgmi diag: {test['name']}: {'; '.join(serious_texts)}")
    return failed_tests


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, required=True, help="of work; at least one round")
    parser.add_argument("--seed", type=int, default=0, help="of all inputs")
    parser.add_argument("--first-round", type=int, default=0)
    parsed_options = parser.parse_args()
    signal.alarm(int(parsed_options.seconds + BURN_IN))  # the last resort: whoever asked may be gone
    # Products must give the same bits every time, and NCCL is to say what fails.
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_DEBUG": "WARN"}
    burn_in = BurnIn(find_devices(), parsed_options.seconds, parsed_options.seed)
    start_time = time.monotonic()
    threading.Thread(target=burn_in.report_hangs, daemon=True).start()
    if burn_in.devices[0].type == "cuda":
        if in_use := describe_use():
            burn_in.report["in_use"] = in_use
            burn_in.print_and_exit()
        burn_in.report["found"], burn_in.report["undiagnosed"] = diagnose(parsed_options.seconds)
        # Sums are exact in fp32, and rounded once.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    burn_in.run_rounds(parsed_options.seconds - (time.monotonic() - start_time), parsed_options.first_round)
    burn_in.print_and_exit()


if __name__ == "__main__":
    main()
