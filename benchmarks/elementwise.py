"""Count the bytes that the elementwise kernels of a block read and write, forward and backward, and compile own kernels
for an H100, both without a GPU.

    python -m benchmarks.elementwise launch/recipes/350m.yaml --output elementwise.json      (needs Triton)

A block is traced on fake tensors, and inductor schedules it and writes its kernels as for CUDA: once with PyTorch's
operations, once with own kernels (model/elementwise.py). Linear layers and attention are left out: both variants have
the same. Two numbers:

- floor: every buffer once per kernel that touches it, however often the kernel loads it. What memory must move.
- loads: every load and store as it stands in the kernels, from memory or from a cache.

Weights of norms, which stay in the caches, are left out; rows of cos and sin are loads, and no part of the floor.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import tempfile
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megastable.base import durable
from megastable.base.errors import ConfigError, user_errors
from megastable.config.recipe import load_recipe
from megastable.config.tree import RunConfig
from megastable.model import cores
from megastable.model.attention import Places
from megastable.model.elementwise import PARTS
from megastable.model.gpt import Block
from megastable.model.kernels import DTYPES, Kernels
from megastable.parallel.topology import TensorParallel

GPU = torch.device("cuda", 0)
# What inductor asks of a device: an H100's.
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448, shared_memory_per_block=49152, L2_cache_size=50 * 2**20, gcnArchName="",
    uuid="0", clock_rate=1_980_000,
)  # fmt: skip
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Traffic:
    """Bytes of one block and micro-batch."""

    floor: int
    loads: int
    kernels: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.floor + other.floor, self.loads + other.loads, self.kernels + other.kernels)


@dataclass(frozen=True)
class Compiled:
    """An own kernel for sm_90. registers, and bytes spilled to memory, of a thread; shared: bytes of a program."""

    kernel: str
    cubin: int
    registers: int
    spilled: int
    shared: int
    warps: int


@dataclass(frozen=True)
class Launch:
    """What an own kernel was started with."""

    kernel: Any
    grid: tuple[int, ...]
    given: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int


# Tracing


@torch.library.custom_op("benchmark::attend", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise NotImplementedError


@torch.library.custom_op("benchmark::attend_backward", mutates_args=())
def _attend_backward(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


def _empty_like_heads(x: Tensor) -> Tensor:
    """[b, heads, s, d] that lie sequence first, as they come and as cuDNN returns them."""
    return x.new_empty(x.permute(2, 0, 1, 3).shape).permute(1, 2, 0, 3)


_attend.register_fake(lambda q, k, v: _empty_like_heads(q))
_attend_backward.register_fake(lambda q, k, v, upstream: tuple(_empty_like_heads(x) for x in (q, k, v)))


def _save_heads(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


_attend.register_autograd(
    lambda ctx, upstream: _attend_backward(*ctx.saved_tensors, upstream), setup_context=_save_heads
)


def pretend_gpu() -> None:
    """For this process: torch's compilers see an H100. Nothing can be computed on it."""
    import torch._inductor.scheduler as scheduler
    import torch._subclasses.fake_tensor as fake_tensor
    import triton.runtime.driver as driver
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        launcher_cls = None

        def __init__(self) -> None:
            limits = {
                "max_shared_mem": 232448,
                "multiprocessor_count": 132,
                "warpSize": 32,
                "max_num_regs": 65536,
            }
            self.utils = types.SimpleNamespace(get_device_properties=lambda _: limits)

        is_active = classmethod(lambda cls: True)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_active_torch_device = staticmethod(lambda: GPU)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        get_device_interface = staticmethod(lambda: torch.cuda)
        get_benchmarker = staticmethod(lambda: None)
        map_python_to_cpp_type = staticmethod(lambda name: name)

    driver.set_active(Driver())
    answers: dict[str, Any] = {
        "_lazy_init": lambda: None, "is_initialized": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "set_device": lambda *_: None, "synchronize": lambda *_: None,
        "get_device_capability": lambda *_: (9, 0), "get_device_properties": lambda *_: PROPERTIES,
        "_get_device_properties": lambda *_: PROPERTIES, "get_device_name": lambda *_: PROPERTIES.name,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    getattr(torch._C, "_ensureCUDADeviceGuardSet")()  # noqa: B009
    setattr(fake_tensor, "init_gpu_context", lambda *_: None)  # noqa: B010
    setattr(scheduler, "has_triton", lambda *_: True)  # noqa: B010
    setattr(triton_helpers, "set_driver_to_gpu", lambda: None)  # noqa: B010


def count_block(config: RunConfig, parts: Sequence[str]) -> Traffic:
    """The elementwise kernels of one block, forward and backward, with own kernels for `parts`; without what own
    kernels themselves move."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    cores.CORES["sdpa"] = cores.Core(lambda q, k, v, *_: _attend(q, k, v))
    block = Block(config.model, TensorParallel(), 0, "none", Kernels("sdpa", elementwise=tuple(parts)))
    m, mode, found = config.model, FakeTensorMode(allow_non_fake_inputs=True), list[Traffic]()
    s, b = m.sequence_length, config.train.micro_batch
    names = [name for name, _ in block.named_parameters()]

    def compile_graph(graph: Any, given: Sequence[Any]) -> Any:
        found.append(_count_graph(*_move_to_gpu(graph, given, mode), mode))
        return graph.forward

    def run(x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> Tensor:
        setattr(block, "_places", lambda *_: Places(cos, sin))  # noqa: B010
        y: Tensor = torch.func.functional_call(block, dict(zip(names, weights, strict=True)), (x,))
        return y

    with mode:
        x = torch.empty(s, b, m.hidden, dtype=torch.bfloat16, requires_grad=True)
        tables = [torch.empty(s, 1, 1, m.head_width // 2) for _ in range(2)]
        weights = [torch.empty(p.shape, dtype=torch.bfloat16, requires_grad=True) for p in block.parameters()]
        compiled_block = aot_function(
            run, compile_graph, compile_graph, min_cut_rematerialization_partition, select_decomp_table()
        )
        y = compiled_block(x, *tables, *weights)
        if len(found) == 1:
            y.sum().backward()
    forward, backward = found
    return forward + backward


def _move_to_gpu(graph: Any, given: Sequence[Any], mode: Any) -> tuple[Any, list[Any]]:
    """A graph traced on CPU tensors, which autograd can do without a driver, as one of CUDA tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": GPU}
    graph.recompile()
    with mode, torch.no_grad():
        moved = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=GPU)
            if isinstance(t, Tensor)
            else t
            for t in given
        ]
        moved_graph = make_fx(graph)(*moved)
    moved_graph.graph.eliminate_dead_code()
    return moved_graph, moved


def _count_graph(graph: Any, given: Sequence[Any], mode: Any) -> Traffic:
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    lowering = GraphLowering(graph)
    with DebugContext(), V.set_fake_mode(mode), V.set_graph_handler(lowering):
        lowering.run(*given)
        code = lowering.codegen()[0].value

        def find_bytes(name: str) -> float:
            buffer = lowering.try_get_buffer(name)
            if buffer is None:
                return math.inf  # scratch
            return int(buffer.get_numel()) * buffer.get_dtype().itemsize

        return count_module(code, find_bytes)


def count_module(code: str, find_bytes: Callable[[str], float]) -> Traffic:
    """Of all calls of kernels in a module that inductor wrote. find_bytes: of a buffer by its name."""
    sources = dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S))
    total = Traffic(0, 0, 0)
    for kernel, operands in re.findall(r"^\s+(triton_\w+)\.run\((.*)\)$", code, re.M):
        total += _count_call(sources[kernel], [find_bytes(name) for name in operands.split(", ")])
    return total


def _count_call(source: str, sizes: Sequence[float]) -> Traffic:
    """Of one call. A load under a condition of its own is one of the two halves of a concatenation: what such loads
    read of a buffer is no more than all of it. sizes: of the operands, in bytes."""
    widths = dict(re.findall(r"'(\w*ptr\d*)': '\*(\w+)'", source))
    found = re.search(r"^def triton_\w+\((.*?)\):", source, re.M)
    assert found is not None
    size_by_pointer = dict(zip(found.group(1).split(", "), sizes, strict=False))
    counts = {
        name: int(number) for name, number in re.findall(r"^    (xnumel|r0_numel) = (\d+)$", source, re.M)
    }
    rows, columns = counts["xnumel"], counts.get("r0_numel", 1)
    floor, loads, halves, seen = 0, 0, defaultdict[str, int](int), set[tuple[str, str, str]]()
    for operation, pointer, place, mask in re.findall(
        r"tl\.(load|store)\((\w+) \+ (\(.*?\)), ([^,)]+)[,)]", source
    ):
        if "x" not in place:
            continue  # the same for all rows: a weight
        elements = rows * (columns if "r0_" in place else 1)
        moved = elements * BYTES[widths[pointer]]
        if operation == "load" and "tmp" in mask:
            halves[pointer] += moved // 2
            loads += moved // 2
        else:
            loads += moved
            # A kernel in two passes over a row loads the same places again.
            floor += 0 if (operation, pointer, place) in seen else moved
            seen.add((operation, pointer, place))
            size_by_pointer[pointer] = 0 if operation == "load" else size_by_pointer[pointer]
    floor += sum(int(min(size_by_pointer[pointer], moved)) for pointer, moved in halves.items())
    return Traffic(floor, loads, 1)


# Own kernels


def record_launches(config: RunConfig) -> list[Launch]:
    """The launches of all own kernels for one block and micro-batch, on tensors without storage."""
    from megastable.model import triton_kernels as own

    m, recorded = config.model, list[Launch]()
    s, b, d, q, k = m.sequence_length, config.train.micro_batch, m.head_width, m.heads, m.key_value_heads

    def record(kernel: Any, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
        recorded.append(Launch(kernel, grid, given, constants, own.choose_warps(**constants)))

    def empty(*shape: int, dtype: torch.dtype = DTYPES["bf16"]) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    launch, own.launch = own.launch, record
    try:
        x, row, qkv = empty(s, b, m.hidden), empty(m.hidden), empty(s, b, (q + 2 * k) * d)
        heads = empty(s, b, q, d), empty(s, b, k, d), empty(s, b, k, d)
        turns = [empty(s, 1, 1, d // 2, dtype=torch.float32) for _ in range(2)]
        weights = (empty(d), empty(d)) if m.qk_norm else (None, None)
        gate_up, half = empty(s, b, 2 * m.ffn_width), empty(s, b, m.ffn_width)
        own.norm(x, None, row, x, x, 1e-5, False)
        own.rotate(qkv, weights[0], weights[1], turns[0], turns[1], heads[0], heads[1], 1e-5, False)
        own.norm(x, x, row, x, x, 1e-5, False)
        own.swiglu(gate_up, half)
        own.unswiglu(half, gate_up, gate_up)
        own.unnorm(x, x, x, row, x, 1e-5, False)
        own.unrotate(heads, qkv, weights[0], weights[1], turns[0], turns[1], qkv, 1e-5, False)
        own.unnorm(x, x, x, row, x, 1e-5, False)
    finally:
        own.launch = launch
    return recorded


def count_own(config: RunConfig) -> Traffic:
    """What own kernels move: each operand once, as their code stands; cos and sin once for every group of heads; and
    the parts of weights' gradients, written and read."""
    from megastable.model import triton_kernels as own

    m = config.model
    tokens, d, q, k = m.sequence_length * config.train.micro_batch, m.head_width, m.heads, m.key_value_heads
    groups = (q + k) // own.choose_head_tile(d, q, k)["group"]
    stream, of_heads, ffn = (2 * tokens * width for width in (m.hidden, (q + k) * d, m.ffn_width))
    values = 2 * tokens * k * d
    norms = 2 * stream + 4 * stream + 2 * 4 * stream + 2 * 2 * 4 * own.NORM_PROGRAMS * m.hidden
    rotations = 2 * of_heads + (2 + bool(m.qk_norm)) * of_heads + 2 * values
    rotations += 2 * 4 * own.HEAD_PROGRAMS * groups * d * bool(m.qk_norm)
    turns = 2 * tokens * groups * 4 * d
    floor = norms + rotations + 3 * ffn + 5 * ffn
    return Traffic(floor, floor + turns, 8)


def compile_launch(launch: Launch, folder: Path) -> Compiled:
    """A kernel as its launch would compile it, by Triton and ptxas for sm_90."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, signature, attributes = launch.kernel.arg_names, dict[str, str](), dict[tuple[int], Any]()
    constants = dict(launch.constants)
    for index, name in enumerate(names):
        value = launch.given[index] if index < len(launch.given) else None
        if name in constants or value is None or (type(value) is int and value == 1):
            constants.setdefault(name, value)
            signature[name] = "constexpr"
        elif isinstance(value, Tensor):
            signature[name] = "*bf16" if value.dtype is torch.bfloat16 else "*fp32"
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    made = triton.compile(
        ASTSource(launch.kernel, signature, constants, attributes), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": launch.warps},
    )  # fmt: skip
    binary = folder / f"{launch.kernel.__name__}.cubin"
    binary.write_bytes(made.asm["cubin"])
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    told = subprocess.run(
        [reader, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    ).stdout

    def read(name: str) -> int:
        return max(int(number) for number in re.findall(rf"{name}:(\d+)", told))

    size, spilled = len(made.asm["cubin"]), max(read("STACK"), read("LOCAL"))
    return Compiled(launch.kernel.__name__, size, read("REG"), spilled, made.metadata.shared, launch.warps)


def find_compiled(config: RunConfig) -> list[Compiled]:
    with tempfile.TemporaryDirectory() as folder:
        return [compile_launch(launch, Path(folder)) for launch in record_launches(config)]


def count_variants(config: RunConfig) -> dict[str, Traffic]:
    """By whose kernels compute it."""
    pretend_gpu()
    left_to_torch = count_block(config, PARTS)
    return {"torch.compile": count_block(config, ()), "own kernels": left_to_torch + count_own(config)}


def traffic_table(by_variant: dict[str, Traffic]) -> Table:
    table = Table(title="elementwise bytes of a block and micro-batch, forward and backward")
    for name in ("", "kernels", "floor, MiB", "loads and stores, MiB"):
        table.add_column(name, justify="left" if not name else "right")
    for variant, traffic in by_variant.items():
        table.add_row(
            variant, str(traffic.kernels), f"{traffic.floor / 2**20:,.0f}", f"{traffic.loads / 2**20:,.0f}"
        )
    return table


def compiled_table(found: Sequence[Compiled]) -> Table:
    table = Table(title="own kernels for sm_90")
    for name in ("kernel", "cubin, bytes", "registers", "spilled, bytes", "shared memory, bytes", "warps"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for compiled in found:
        table.add_row(*map(str, asdict(compiled).values()))
    return table


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    recipe: Annotated[Path, typer.Argument(help="Recipe of the shapes.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="KEY=VALUE of the recipe.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the numbers there, as JSON.")] = None,
) -> None:
    """Count the bytes of a block's elementwise kernels, and compile own ones for an H100.

    Examples:

        python -m benchmarks.elementwise launch/recipes/350m.yaml

        python -m benchmarks.elementwise launch/recipes/1.3b.yaml train.micro_batch=8 --output elementwise.json
    """
    with user_errors():
        if find_spec("triton") is None:
            raise ConfigError("Triton is not installed: pip install --no-deps triton")
        if output is not None and not output.absolute().parent.is_dir():
            raise ConfigError(f"--output {output}: no such folder; create it, or name another one")
        config = load_recipe(recipe, ["model.vocab_size=32000", *(overrides or [])])
        counted = count_variants(config)
        compiled = find_compiled(config)
        Console().print(traffic_table(counted), compiled_table(compiled))
        if output is not None:
            tree = {"traffic": {name: asdict(traffic) for name, traffic in counted.items()}}
            tree |= {"compiled": {one.kernel: asdict(one) for one in compiled}}
            durable.write_output(output, json.dumps(tree, indent=1) + "\n")


if __name__ == "__main__":
    app()
