"""Fingerprints on a GPU: the bits of the CPU's, in one launch for a tensor; and the watch that makes them beside the
forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megastable.base.fingerprint import ROW, compare_marks, fingerprint_tensors, marks_of

SIZES = (
    1,
    7,
    8,
    8 * ROW - 3,
    8 * ROW,
    8 * 40_000 * ROW + 13,
)  # bytes; the last one more than a round of all programs


def drawn(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_a_cpu_computes(size: int, gpu: torch.device) -> None:
    buffer = drawn(size)
    assert int(fingerprint_tensors([buffer.to(gpu)])) == int(fingerprint_tensors([buffer]))
    shifted = buffer.to(gpu)[3:]  # begins within a word
    assert int(fingerprint_tensors([shifted, shifted])) == int(fingerprint_tensors([buffer[3:], buffer[3:]]))


def test_marks_of_a_gpu_tell_a_changed_bit_in_a_copy_on_the_cpu(gpu: torch.device) -> None:
    state = {"a": torch.randn(100_003, device=gpu), "b": torch.ones(5, dtype=torch.bfloat16, device=gpu)}
    marks, copy = marks_of(state), {name: tensor.cpu() for name, tensor in state.items()}
    assert not compare_marks(marks, marks_of(copy, marks))
    copy["a"].view(torch.int32)[77] ^= 1
    assert compare_marks(marks, marks_of(copy, marks)) == ["a"]


def test_a_large_tensor_takes_one_kernel_and_no_wait(gpu: torch.device) -> None:
    tensor = torch.randn(1 << 26, device=gpu)
    fingerprint_tensors([tensor])  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            fingerprint_tensors([tensor])
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    names = [event.name for event in profile.events()]
    assert sum("add_words_kernel" in name for name in names) == 1
    # Its zero is the other.
    assert sum("kernel" in name.lower() or "memset" in name.lower() for name in names) <= 2


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("kind", ["bf16", "bf16-zero2", "fp32"])
def test_the_watch_over_memory_sees_a_bit_and_nothing_else(kind: str, tmp_path: Path) -> None:
    """What is read on a stream of its own is what the update left, also if the next one comes at once."""
    from megastable.engine.watch import Ballot
    from megastable.hardware.hardware_fault import FaultLog
    from megastable.hardware.state_watch import StateWatch
    from megastable.run.directory import RunDirectory
    from megastable.run.log import RunLog
    from tests.gpu.test_engine import KINDS, batches, config_of, engine_of

    engine = engine_of(config_of(**KINDS[kind]))
    log = RunLog(RunDirectory(tmp_path), lambda _: None)
    engine.train_step(batches(0), 1e-3, lambda m: m.finite)
    watch = StateWatch(True, engine, 1, FaultLog(log, engine.topology.hosts))

    def ballot() -> Ballot:
        return {watch.name: watch.ballot(0)}

    for step in range(2, 8):
        measured, applied = engine.train_step(batches(step), 1e-3, lambda m: m.finite, ballot)
        assert applied and measured.ballot == {"state": (0.0,)}
        watch.seal_state(step)
    for place, changed in enumerate((engine.optimizer_state()["0/exp_avg"], engine.zero.flat_weights[0]), 8):
        word = changed.view(-1)[5:6].view(torch.int32 if changed.element_size() == 4 else torch.int16)
        watch.current_marks()  # the seal is read before its state changes
        word.bitwise_xor_(1)
        measured, _ = engine.train_step(batches(place), 1e-3, lambda m: False, ballot)
        assert measured.ballot == {"state": (1.0,)}
        fault = watch.judge_memory(measured)
        assert fault is not None and fault.ranks == [0]
        word.bitwise_xor_(1)


def test_a_state_of_two_devices_is_compared_by_name(gpu: torch.device) -> None:
    """Most optimizers count their steps on the CPU, beside moments on the GPU."""
    state = {"a": torch.ones(5, device=gpu), "step": torch.tensor(3.0), "b": torch.zeros(7, device=gpu)}
    marks = marks_of(state)
    assert not compare_marks(marks, marks_of(state))
    for name in state:
        assert compare_marks(marks, marks_of({**state, name: state[name] + 1})) == [name]
