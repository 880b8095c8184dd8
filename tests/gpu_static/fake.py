"""A GPU that is not there: torch sees an H200 (device.c), tensors have no storage, compilers run to the end.

    model = fake.on_gpu(GPT(...))
    with fake.mode:                                # everything made here is a FakeTensor
        model(tokens, labels).backward()           # torch.compile by inductor, its kernels in fake.codes
    sizes = fake.cubins(fake.codes[0])             # compiled by Triton and ptxas for sm_90

What is replaced is what would run on the device: loading kernels, launching them, and the warm-up of inductor's pattern
matcher. Dynamo, AOTAutograd, inductor's scheduling and code generation, Triton and ptxas are the real ones.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

GPU = torch.device("cuda", 0)
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=141 * 2**30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448, shared_memory_per_block=49152, L2_cache_size=60 * 2**20, gcnArchName="",
    uuid="0", clock_rate=1_980_000,
)  # fmt: skip

mode = FakeTensorMode(allow_non_fake_inputs=True)
codes: list[str] = []  # what inductor wrote since it was cleared, a module of Python each
inside: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # around what runs in their place


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace what asks the driver for more than device.c knows."""
    import torch._functorch.config as autograd
    import torch._inductor.config as inductor
    import torch._subclasses.fake_tensor as fake_tensor
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_helpers

    device: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "_get_device_properties": lambda _: PROPERTIES,
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_, **__: None,
        "default_generators": (torch.Generator(GPU),),
    }
    for name, answer in device.items():
        patch.setattr(torch.cuda, name, answer, raising=False)
    for name in ("get_rng_state", "set_rng_state"):
        patch.setattr(torch.cuda.random, name, device[name])
    patch.setattr(fake_tensor, "init_gpu_context", lambda *_: None)  # it would allocate a byte
    patch.setattr(inductor, "joint_graph_constant_folding", False)  # ... on the device
    patch.setattr(inductor, "compile_threads", 1)
    patch.setattr(inductor, "fx_graph_cache", False)
    patch.setattr(autograd, "enable_autograd_cache", False)
    # Both trace patterns with tensors on the device, for rewrites that our models do not need.
    patch.setattr(fuse_attention, "_sfdp_init", lambda *_: None)
    patch.setattr(pad_mm, "_pad_mm_init", lambda *_: None)
    patch.setattr(GraphLowering, "_compile_to_module_lines", _kept)
    patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    _install_triton()


def _kept(graph: Any, wrapper: Any) -> Any:
    """In place of loading what inductor wrote: keep it, and run the graph that it was written for."""
    codes.append(wrapper.value)
    fx = graph.orig_gm

    def call(given: list[Any]) -> Any:
        arguments = list(given)
        given.clear()
        with mode, inside:
            return fx(*arguments)

    return types.SimpleNamespace(__file__="kept.py", call=call)


def _install_triton() -> None:
    import triton.runtime.driver as driver
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        launcher_cls = None

        def __init__(self) -> None:
            limits = {
                "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
                "multiprocessor_count": PROPERTIES.multi_processor_count,
                "warpSize": PROPERTIES.warp_size,
                "max_num_regs": PROPERTIES.regs_per_multiprocessor,
            }
            self.utils = types.SimpleNamespace(get_device_properties=lambda _: limits)

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return GPU

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: Any) -> int:
            return 0

        def get_device_interface(self) -> Any:
            return torch.cuda

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("there is nothing to measure on")

        def map_python_to_cpp_type(self, name: str) -> str:
            return name

    driver.set_active(Driver())


def on_gpu(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The module, its parameters replaced by fake ones on the GPU, in their order and with their marks."""
    for part in module.modules():
        for name, own in part._parameters.items():
            if own is not None:
                with mode:
                    new: Any = nn.Parameter(torch.empty(own.shape, device=GPU, dtype=dtype))
                ours: Any = own
                new.placement, new.tensor_model_parallel = ours.placement, ours.tensor_model_parallel
                part._parameters[name] = new
    return module


def cubins(code: str, folder: Path) -> dict[str, int]:
    """Every Triton kernel of a module that inductor wrote, compiled for sm_90: bytes of machine code by name.

    folder: for the kernels' sources, which Triton reads from files.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = {}
    for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S):
        file = folder / f"{name}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        config = kernel.configs[0]
        constants = {**kernel.triton_meta.get("constants", {}), **config.kwargs}
        signature = {**kernel.triton_meta["signature"], **dict.fromkeys(config.kwargs, "constexpr")}
        made = triton.compile(
            ASTSource(fn=kernel.fn, signature=signature, constexprs=constants),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        )
        found[name] = len(made.asm["cubin"])
    return found
