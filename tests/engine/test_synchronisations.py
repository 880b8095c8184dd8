"""How often a step makes the host wait for the whole device: on a GPU it queues no work meanwhile.

torch.cuda.set_sync_debug_mode, by which tests/gpu finds waits for a stream, is silent about cudaDeviceSynchronize.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.parallel.test_layouts import batches, config

ACCUMULATION = 4
# With overlap_comm DeepSpeed sends gradients beside the backward pass, and waits at its end before it drops them.
ZERO_2 = {"stage_1_and_2.py:independent_gradient_partition_epilogue": ACCUMULATION}
# world, recipe, the waits of a step that are DeepSpeed's and have to be
KINDS: dict[str, tuple[int, dict[str, Any], dict[str, int]]] = {
    "bf16 ZeRO 1": (1, {"precision": "bf16"}, {}),
    "bf16 ZeRO 2": (1, {"precision": "bf16", "zero": 2}, ZERO_2),
    "bf16 ZeRO 3": (1, {"precision": "bf16", "zero": 3}, {}),
    "fp32 ZeRO 1": (1, {"precision": "fp32"}, {}),
    "fp16 ZeRO 1": (1, {"precision": "fp16"}, {}),
    "bf16 pipeline": (2, {"precision": "bf16", "pipeline": 2}, {}),
}


def make_queued(*_: Any, **__: Any) -> Any:
    """A stream or an event of a device that works beside the host, where there is none."""
    return MagicMock(device=torch.device("cpu"))


def counted(names: list[str]) -> dict[str, tuple[dict[str, dict[str, int]], int]]:
    """By kind: what waits for the device in the later steps, in an evaluation and in a measurement, by who asks how
    often; and the clock readings that its timers keep."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    waits = Counter[str]()

    class Device(CPU_Accelerator):
        """As CUDA: what DeepSpeed does only where a device works beside the host is counted, too."""

        Stream = Event = staticmethod(make_queued)

        def is_synchronized_device(self) -> bool:
            return False

        def is_fp16_supported(self) -> bool:
            return True

        def current_stream(self, *_: Any) -> Any:
            return make_queued()

        default_stream = current_stream

        def stream(self, stream: Any) -> Any:
            return stream

        def synchronize(self, *_: Any) -> None:
            caller = traceback.extract_stack()[-2]
            waits[f"{Path(caller.filename).name}:{caller.name}"] += 1

    def waited(call: Any, *arguments: Any) -> dict[str, int]:
        waits.clear()
        call(*arguments)
        return dict(waits)

    set_accelerator(Device())
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    found = {}
    for name in names:
        _, parts, _ = KINDS[name]
        engine = build_engine(config(**parts))
        micro_batches = take_batch(engine, batches()[0])
        assert len(micro_batches) == ACCUMULATION
        step = engine.train_step, micro_batches, 1e-3
        # DeepSpeed's timer begins with the third.
        steps = [waited(*step, lambda m: m.finite) for _ in range(5)][3:]
        assert steps[0] == steps[1]
        seen = {
            "step": steps[0],
            "evaluate": waited(engine.evaluate_samples, micro_batches),
            "measure": waited(engine.measure_step, micro_batches),
            "discard": waited(*step, lambda _: False),
        }
        clocks = getattr(engine.ds.timers, "timers", {}).values()
        found[name] = seen, sum(len(clock.event_timers) for clock in clocks)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_step_waits_for_the_device_only_where_it_has_to(world: int) -> None:
    names = [name for name, kind in KINDS.items() if kind[0] == world]
    for rank in run_ranks(world, counted, names):
        for name, (seen, kept) in rank.items():
            wanted = KINDS[name][2]
            expected = {"step": wanted, "evaluate": {}, "measure": wanted, "discard": wanted}
            assert seen == expected, name
            assert kept == 0, f"{name}: {kept} readings of clocks that nobody asks for"
