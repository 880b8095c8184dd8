"""Bytes of elementwise kernels: as they stand in inductor's code, and as own kernels load and store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.elementwise import Traffic, count_module, count_own
from megastable.config.tree import RunConfig

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

MODULE = """
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''
@triton_heuristics.pointwise(triton_meta={'signature':
    {'in_ptr0': '*bf16', 'in_ptr1': '*fp32', 'out_ptr0': '*bf16', 'xnumel': 'i32'}})
@triton.jit
def triton_poi_fused_0(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 1000
    tmp0 = tl.load(in_ptr0 + (x0 + 20*x1), tmp6, eviction_policy='evict_last', other=0.0).to(tl.float32)
    tmp1 = tl.load(in_ptr0 + (10 + 20*x1 + ((-10) + x0)), xmask & tmp9, other=0.0).to(tl.float32)
    tmp2 = tl.load(in_ptr1 + (x0), None)
    tl.store(out_ptr0 + (x2), tmp3, None)
''', device_str='cuda')
triton_red_fused_1 = async_compile.triton('triton_red_fused_1', '''
@triton_heuristics.reduction(triton_meta={'signature':
    {'in_ptr0': '*bf16', 'in_ptr1': '*bf16', 'out_ptr0': '*fp32', 'xnumel': 'i32', 'r0_numel': 'i32'}})
@triton.jit
def triton_red_fused_1(in_ptr0, in_ptr1, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    xnumel = 10
    r0_numel = 64
    tmp0 = tl.load(in_ptr0 + (r0_1 + 64*x0), r0_mask & xmask, eviction_policy='evict_last')
    tmp4 = tl.load(in_ptr0 + (r0_1 + 64*x0), r0_mask & xmask, eviction_policy='evict_first')
    tmp5 = tl.load(in_ptr1 + (r0_1), r0_mask, eviction_policy='evict_last')
    tl.store(out_ptr0 + (x0), tmp7, xmask)
''', device_str='cuda')
        def call(args):
            triton_poi_fused_0.run(arg0_1, arg1_1, buf0, 1000, stream=raw_stream0)
            triton_red_fused_1.run(buf0, arg2_1, buf1, 10, 64, stream=raw_stream0)
            triton_red_fused_1.run(buf0, arg2_1, buf1, 10, 64, stream=raw_stream0)
"""


def test_loads_of_a_module_are_counted_where_they_stand() -> None:
    # Halves of a concatenation: 1,000 bytes each, of a buffer of 1,500; then fp32 in, bf16 out.
    of_halves = Traffic(1500 + 4000 + 2000, 2 * 1000 + 4000 + 2000, 1)
    # A row twice in two passes, its sum once; no weight.
    of_rows = Traffic(1280 + 40, 2 * 1280 + 40, 1)
    sizes = {"arg0_1": 1500, "arg1_1": 4000, "arg2_1": 128, "buf0": 2000, "buf1": 40}
    counted = count_module(MODULE, lambda name: sizes.get(name, 0))
    assert counted == of_halves + of_rows + of_rows


def small_run(**model: Any) -> RunConfig:
    shape = {"layers": 1, "hidden": 48, "heads": 4, "kv_heads": 2, "ffn": 80, "sequence_length": 40} | model
    return RunConfig.model_validate({"model": shape, "train": {"micro_batch": 2}})


def count_in_the_interpreter(config: RunConfig) -> int:
    """Bytes that the kernels of a block load and store, without weights of norms."""
    import triton.runtime.interpreter as interpreter

    from benchmarks import elementwise
    from megastable.model import triton_kernels

    real, total, weights = interpreter.InterpreterBuilder, [0], list[torch.Tensor]()

    def count(pointers: Any, mask: Any) -> None:
        addresses, size = pointers.data, pointers.get_element_ty().primitive_bitwidth // 8
        inside = addresses.flatten()[0]
        if not any(w.data_ptr() <= inside < w.data_ptr() + w.nbytes for w in weights):
            total[0] += int(mask.data.sum()) * size

    load, store = real.create_masked_load, real.create_masked_store
    real.create_masked_load = lambda self, p, mask, *rest: (count(p, mask), load(self, p, mask, *rest))[1]
    real.create_masked_store = lambda self, p, value, mask, *rest: (
        count(p, mask),
        store(self, p, value, mask, *rest),
    )[1]
    for launch in elementwise.record_launches(config):
        given = [
            torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, torch.Tensor) else one
            for one in launch.given
        ]
        names = launch.kernel.arg_names
        weights[:] = [
            one
            for name, one in zip(names, given, strict=False)
            if name.endswith("weight") and one is not None
        ]
        launch.kernel[launch.grid](*given, **launch.constants)
    read_parts = 4 * 2 * triton_kernels.NORM_PROGRAMS * config.model.hidden
    if config.model.qk_norm:
        groups = (config.model.heads + config.model.key_value_heads) // 2
        read_parts += 4 * triton_kernels.HEAD_PROGRAMS * groups * config.model.head_width
    return total[0] + read_parts


def compare() -> None:
    """In a process of the interpreter."""
    from megastable.model import triton_kernels

    triton_kernels.NORM_PROGRAMS = triton_kernels.HEAD_PROGRAMS = 2
    triton_kernels.TILE = 128
    for config in (small_run(), small_run(qk_norm=False), small_run(hidden=64)):
        found, counted = count_in_the_interpreter(config), count_own(config).loads
        assert found == counted, (found, counted)
    print("equal")


@needs_triton
@pytest.mark.slow
def test_own_kernels_load_and_store_what_is_counted() -> None:
    code = "from tests.benchmarks import test_elementwise as t; t.compare()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT,
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.stdout == "equal\n", done.stderr[-3000:]


@needs_triton
@pytest.mark.slow
def test_own_kernels_become_machine_code_without_spills(tmp_path: Path) -> None:
    """And move fewer bytes than torch.compile's; in a process of its own, which pretends to have a GPU."""
    told = tmp_path / "told.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.elementwise", "launch/recipes/350m.yaml", "--output", told],
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}, cwd=ROOT,
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    tree = json.loads(told.read_text(encoding="utf-8"))
    assert len(tree["compiled"]) == 6
    assert all(one["cubin"] > 1000 and one["spilled"] == 0 for one in tree["compiled"].values())
    compiled, own = tree["traffic"]["torch.compile"], tree["traffic"]["own kernels"]
    assert own["floor"] < 0.9 * compiled["floor"] and own["loads"] < 0.75 * compiled["loads"]
