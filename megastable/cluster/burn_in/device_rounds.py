"""The rounds of one device: fill its memory, compute what is known, compare the memory; again until the time is up.

    for state in rounds(device, seed, seconds): ...     # after each step

In a round the memory holds one pattern while the other tests run. Each round has other shapes, dtypes and values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from megastable.cluster.burn_in import exact_cases, repeat_cases
from megastable.cluster.burn_in.faults import BurnInFault, DeviceBurnIn, DeviceTest
from megastable.cluster.burn_in.memory_patterns import Memory, pattern_of, taken_by_others
from megastable.cluster.burn_in.trials import CaseTrial, repeated, tried

KEPT = 8  # faults of a device that are described: all of them are counted
SLICE = {"cuda": 4.0, "cpu": 0.05}  # seconds of a test in a round
CASE = {"cuda": 1.0, "cpu": 0.01}  # seconds of a case with the same inputs
Tried = Callable[[torch.device, int, int, int], CaseTrial]


def _matmul(device: torch.device, seed: int, round_: int, number: int) -> CaseTrial:
    return tried(exact_cases.matmul_case(device.type, seed, round_, number), device, CASE[device.type])


def _attention(device: torch.device, seed: int, round_: int, number: int) -> CaseTrial:
    return tried(exact_cases.attention_case(device.type, seed, round_, number), device, CASE[device.type])


def _elementwise(device: torch.device, seed: int, round_: int, number: int) -> CaseTrial:
    return repeated(
        repeat_cases.elementwise_case(device.type, seed, round_, number), device, CASE[device.type]
    )


def _repeat(device: torch.device, seed: int, round_: int, number: int) -> CaseTrial:
    return repeated(repeat_cases.repeat_case(device.type, seed, round_, number), device, CASE[device.type])


TESTS: dict[DeviceTest, Tried] = {
    "matmul": _matmul,
    "attention": _attention,
    "elementwise": _elementwise,
    "repeat": _repeat,
}


def rounds(device: torch.device, seed: int, seconds: float, first: int = 0) -> Iterator[DeviceBurnIn]:
    """The state before and after every test. At least one whole round; a test that has begun is finished. A device that
    others use is left alone. first: number of the first round. Raises RuntimeError if the device fails."""
    until, state, round_ = (
        time.monotonic() + seconds,
        DeviceBurnIn(device=str(device), name=_name(device)),
        first,
    )
    yield _doing(state, "memory", round_)
    if others := taken_by_others(device):
        yield state.model_copy(update={"in_use": f"{others >> 20:,} MiB of its memory are in use by others"})
        return
    memory = Memory.taken(device)
    state = state.model_copy(update={"memory": memory.size})
    while round_ == first or time.monotonic() < until:
        pattern = pattern_of(seed, round_)
        yield _doing(state, "memory", round_)
        memory.fill(pattern)
        for name, test in TESTS.items():
            end, number = time.monotonic() + SLICE[device.type], 0
            while number == 0 or time.monotonic() < end:
                yield _doing(state, name, round_)
                state = after(state, name, round_, number, test(device, seed, round_, number))
                number += 1
            if round_ > first and time.monotonic() > until:
                break
        yield _doing(state, "memory", round_)
        state = after(state, "memory", round_, 0, memory.trial(pattern))
        round_ += 1
        state = state.model_copy(update={"rounds": state.rounds + 1})
        yield state


def after(state: DeviceBurnIn, test: DeviceTest, round_: int, case: int, trial: CaseTrial) -> DeviceBurnIn:
    """The state with one more trial. Pure."""
    runs = state.runs | {test: state.runs.get(test, 0) + trial.runs}
    if trial.mismatch is None:
        return state.model_copy(update={"runs": runs})
    fault = BurnInFault(
        test=test, what=trial.what, round=round_, case=case, again=trial.again, **vars(trial.mismatch)
    )
    return state.model_copy(
        update={
            "runs": runs,
            "failed": state.failed | {test: state.failed.get(test, 0) + 1},
            "faults": [*state.faults, fault][:KEPT],
        }
    )


def _doing(state: DeviceBurnIn, test: DeviceTest, round_: int) -> DeviceBurnIn:
    return state.model_copy(update={"now": f"{test}, round {round_}"})


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
