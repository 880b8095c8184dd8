"""Measure the memory of a training step on every rank of real engines, and compare it with plan/memory.py.

    python -m benchmarks.footprint --layout "TP2" --layout "PP2" --output footprint.json

Every layout trains a small model on processes of this machine (gloo). Measured are the memory held between two steps,
by kind; the peak that a step allocates on top (`train_speed.py`: torch.profiler on a CPU, without scratch space of
oneDNN), also for a watched step and for a NaN location (engine/locators.py); and the peak while the engine is built. On
a GPU (one process) all are those of torch's allocator.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.layouts import PP2, SP2, TP2, LayoutCase, run_layouts
from megastable.base import durable
from megastable.base.errors import ConfigError, user_errors
from megastable_tools.plan import memory
from megastable_tools.plan.partition import stage_bounds

WARM = 2  # steps before the measured one: moments, tables and scratch exist, ZeRO 3 knows its order
MIB = 2**20
PROFILED = 2

MODEL = dict(
    layers=4, hidden=256, heads=8, kv_heads=4, ffn=640, sequence_length=256, vocab_size=2000, vocab_multiple=128,
)  # fmt: skip
# DeepSpeed allocates a whole bucket: the default size would hide everything else in a small model.
SMALL_BUCKETS = {
    "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 1_000_000,
}  # fmt: skip


ZERO_BUBBLE = {"schedule": "zero_bubble"}
CHUNKS2 = {"model_chunks": 2}
Case = partial(
    LayoutCase, zero=SMALL_BUCKETS,
    base={"model": MODEL, "kernels": {"attention": "sdpa", "loss": "chunked", "compile": False}},
)  # fmt: skip
GEMMA2 = {
    "norms": "both", "zero_centered_norms": True, "attention_softcap": 50.0, "logit_softcap": 30.0, "window": 64,
    "full_attention_every": 2, "activation": "gelu", "qk_norm": False,
}  # fmt: skip
EXPERTS = {"experts": {"count": 8, "top_k": 2, "ffn": 192}}
SHARED_EXPERTS = {"experts": EXPERTS["experts"] | {"shared": 1, "first_dense": 1, "gate": "sigmoid"}}
LAYOUTS = {
    "one": Case(),
    "one, blocked attention": Case(kernels={"attention": "blocked"}),
    "one, reference attention": Case(kernels={"attention": "reference"}),
    "one, reference loss": Case(kernels={"loss": "reference"}),
    "one, micro-batch 4": Case(micro_batch=4),
    "one, fp32": Case(precision={"kind": "fp32"}),
    "one, fp16": Case(precision={"kind": "fp16"}),
    "one, bf16 moments": Case(optimizer={"moments": "bf16"}),
    "one, Muon": Case(optimizer={"name": "muon"}),
    "DP2 ZeRO 1 Muon": Case(2, optimizer={"name": "muon"}),
    "DP2 ZeRO 2 fp32 Muon": Case(2, {"zero": 2}, precision={"kind": "fp32"}, optimizer={"name": "muon"}),
    "one, tied": Case(model={"tied": True}),
    "one, all heads": Case(model={"kv_heads": None}),
    "one, no QK-norm": Case(model={"qk_norm": False}),
    "one, OLMo 2": Case(model={"qk_norm": "full", "norms": "after"}),
    "one, Gemma 2": Case(model=GEMMA2, kernels={"attention": "blocked"}),
    "one, Gemma 2, reference": Case(model=GEMMA2, kernels={"attention": "reference", "loss": "reference"}),
    "one, Gemma 2, selective": Case(1, {"recompute": "selective"}, GEMMA2, kernels={"attention": "blocked"}),
    "one, Gemma 2, compiled": Case(model=GEMMA2, kernels={"attention": "blocked", "compile": True}),
    "one, window": Case(model={"window": 64}),
    "one, DeepNorm": Case(model={"norms": "deep"}),
    "one, clamped SwiGLU, fp32": Case(model={"swiglu_clamp": 7.0}, precision={"kind": "fp32"}),
    "TP2+SP Gemma 2 full": Case(2, SP2 | {"recompute": "full"}, GEMMA2, kernels={"attention": "reference"}),
    "one, documents apart": Case(apart=True),
    "one, selective": Case(parallel={"recompute": "selective"}),
    "one, full": Case(parallel={"recompute": "full"}),
    "one, compiled": Case(kernels={"compile": True}),
    "one, FP8 current": Case(precision={"fp8": "current"}),
    "one, FP8 blocks": Case(precision={"fp8": "block"}),
    "TP2": Case(2, TP2),
    "TP2 OLMo 2": Case(2, TP2, {"qk_norm": "full", "norms": "after"}),
    "TP2+SP": Case(2, SP2),
    "TP2+SP full": Case(2, SP2 | {"recompute": "full"}),
    "TP2+SP keeps what it gathered": Case(2, SP2 | {"keep_gathered": True}),
    "TP2+SP in chunks": Case(2, SP2 | {"tensor_overlap": 4}),
    "TP2+SP keeps what it gathered, in chunks": Case(2, SP2 | {"keep_gathered": True, "tensor_overlap": 4}),
    "TP2+SP FP8 current": Case(2, SP2, precision={"fp8": "current"}),
    "PP2": Case(2, PP2),
    "PP2 accumulation 4": Case(2, PP2, accumulation=4),
    "PP2 tied": Case(2, PP2, {"tied": True}),
    "PP2 zero-bubble": Case(2, PP2 | ZERO_BUBBLE, accumulation=4),
    "PP2 full zero-bubble": Case(2, PP2 | ZERO_BUBBLE | {"recompute": "full"}, accumulation=4),
    "TP2+SPxPP2 selective zero-bubble": Case(
        4, SP2 | PP2 | ZERO_BUBBLE | {"recompute": "selective"}, accumulation=4
    ),
    "TP2+SPxPP2 zero-bubble in chunks": Case(
        4, SP2 | PP2 | ZERO_BUBBLE | {"tensor_overlap": 4}, accumulation=4
    ),
    "PP2 zero-bubble, compiled": Case(2, PP2 | ZERO_BUBBLE, accumulation=4, kernels={"compile": True}),
    "PP2 in two model chunks": Case(2, PP2 | CHUNKS2, accumulation=4),
    "PP2 full in two model chunks": Case(2, PP2 | CHUNKS2 | {"recompute": "full"}, accumulation=4),
    "TP2+SPxPP2 selective in two model chunks": Case(
        4, SP2 | PP2 | CHUNKS2 | {"recompute": "selective"}, accumulation=4
    ),
    "PP4 in two model chunks": Case(4, {"pipeline": 4} | CHUNKS2, {"layers": 8}, accumulation=8),
    "PP2 full": Case(2, PP2 | {"recompute": "full"}, accumulation=4),
    "DP2 ZeRO 1": Case(2),
    "DP4 in 2 replicas": Case(4, {"replicas": 2}),
    "DP2 ZeRO 1 fp32": Case(2, precision={"kind": "fp32"}),
    "DP2 ZeRO 2": Case(2, {"zero": 2}),
    "DP2 ZeRO 2 fp32": Case(2, {"zero": 2}, precision={"kind": "fp32"}),
    "DP2 ZeRO 3": Case(2, {"zero": 3}),
    "DP2 ZeRO 3 full": Case(2, {"zero": 3, "recompute": "full"}),
    "context 2": Case(2, {"context": 2}),
    "context 2, a ring": Case(2, {"context": 2, "context_by": "ring"}),
    "TP2xPP2": Case(4, TP2 | PP2),
    "TP2+SPxPP2 selective": Case(4, SP2 | PP2 | {"recompute": "selective"}, accumulation=4),
    "TP2xDP2 ZeRO 2": Case(4, TP2 | {"zero": 2}),
    "one, experts": Case(model=EXPERTS),
    "one, experts grouped": Case(model=EXPERTS, kernels={"experts": "grouped"}),
    "one, experts shared, first dense": Case(model=SHARED_EXPERTS),
    "one, experts fp32": Case(model=EXPERTS, precision={"kind": "fp32"}),
    "one, experts selective": Case(parallel={"recompute": "selective"}, model=EXPERTS),
    "one, experts full": Case(parallel={"recompute": "full"}, model=EXPERTS),
    "one, experts compiled": Case(model=EXPERTS, kernels={"compile": True}),
    "TP2+SP experts": Case(2, SP2, EXPERTS),
    "PP2 experts": Case(2, PP2, EXPERTS, accumulation=4),
    "PP2 experts zero-bubble": Case(2, PP2 | ZERO_BUBBLE, EXPERTS, accumulation=4),
    "DP2 ZeRO 1 experts": Case(2, model=EXPERTS),
    "DP2 ZeRO 2 experts": Case(2, {"zero": 2}, EXPERTS),
    "DP2 ZeRO 3 experts": Case(2, {"zero": 3}, EXPERTS),
    "DP2 experts on 2": Case(2, {"expert": 2}, EXPERTS),
    "DP2 ZeRO 2 experts on 2": Case(2, {"zero": 2, "expert": 2}, EXPERTS),
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One rank's bytes. held: between two steps, by kind ("other" is the rest); step: the peak on top; watched,
    located: the same for a step that `probe.watch` examines, and for `locators.locate`; building: the peak before
    the first step, device and host together if they are the same."""

    stage: int
    held: dict[str, int]
    step: int
    watched: int
    located: int
    building: int
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def total(self) -> int:
        return sum(self.held.values()) + self.step


@dataclass(frozen=True)
class Row:
    """A rank, measured and by the formulas, in bytes. held: weights, gradients, master weights and moments. total,
    watched, located: the peak of a step, of a watched one, of a NaN location."""

    layout: str
    stage: int
    rank: int
    held: int
    held_expected: int
    total: int
    total_expected: int
    watched: int
    located: int
    peak: str
    kinds: dict[str, int]
    building: int
    building_expected: int

    @property
    def difference(self) -> float:
        """Relative difference of the formula from the measurement."""
        return self.total_expected / self.total - 1


def measure_layouts(names: Sequence[str] = (), say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Measure the layouts of these names (of `LAYOUTS`; none: all) in separate processes; a row for every rank.

    Raises ConfigError for an unknown name, MegastableError if a rank fails.
    """
    measured_layouts = run_layouts(LAYOUTS, names, measure_joined, say)
    return [row for name, case, ranks in measured_layouts for row in compare_ranks(name, case, ranks)]


STATE = ("weights", "gradients", "master", "moments")


def compare_ranks(name: str, case: LayoutCase, ranks: Sequence[Measured]) -> list[Row]:
    """Every rank's measurement beside the formulas."""
    bounds = stage_bounds(case.config)
    rank_rows = []
    for rank, measured in enumerate(ranks):
        [expected] = memory.list_footprints(
            case.config,
            case.layout,
            stages=[measured.stage],
            cut=bounds,
            device=measured.device,
            zero=case.deepspeed["zero_optimization"],
            elements=case.elements,
        )
        bytes_held = sum(measured.held[kind] for kind in STATE)
        state = sum(kind_bytes for kind, kind_bytes in expected.bytes_at("between").items() if kind in STATE)
        rank_rows.append(
            Row(
                name,
                measured.stage,
                rank,
                bytes_held,
                state,
                measured.total,
                expected.total,
                measured.total - measured.step + measured.watched,
                measured.total - measured.step + measured.located,
                expected.peak,
                {str(kind): kind_bytes for kind, kind_bytes in expected.kinds.items()},
                measured.building,
                # The optional host copies are made on the device if there is space.
                max(expected.host.building, expected.building),
            )
        )
    return rank_rows


def footprint_table(rows: Iterable[Row]) -> Table:
    """One row for every rank that differs from its neighbours of the same stage, otherwise one per stage."""
    made_table = Table("layout", "stage", title="Memory of one rank in a training step, MiB")
    column_names = "building formulas state formulas peak formulas difference watched diagnosed".split()
    for column_name in (*column_names, "most of it"):
        made_table.add_column(column_name, justify="right")
    rows_seen = set()
    for row in rows:
        row_key = row.layout, row.stage, row.held, row.total
        if row_key in rows_seen:
            continue
        rows_seen.add(row_key)
        made_table.add_row(
            row.layout, str(row.stage), f"{row.building / MIB:.2f}", f"{row.building_expected / MIB:.2f}",
            f"{row.held / MIB:.2f}", f"{row.held_expected / MIB:.2f}",
            f"{row.total / MIB:.1f}", f"{row.total_expected / MIB:.1f}", f"{row.difference:+.1%}",
            f"{row.watched / MIB:.1f}", f"{row.located / MIB:.1f}", max(row.kinds, key=lambda kind: row.kinds[kind]),
        )  # fmt: skip
    return made_table


# On a rank


def measure_joined(case: LayoutCase) -> Measured:
    """Measure on a rank of a process group."""
    import torch

    from benchmarks.train_speed import living_bytes, peak_of
    from megastable.engine import locators
    from megastable.engine.distributed import choose_device
    from megastable.engine.engine import Engine

    config, settings, topology = case.config, case.deepspeed, case.join_group()
    on_gpu = choose_device().type == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else living_bytes()
    made: list[Engine] = []

    def build() -> None:
        made.append(Engine(config, settings, topology))

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        build()
        building = torch.cuda.max_memory_allocated() - before
    else:
        building = peak_of(build)
    engine = made[0]
    batches = case.draw_batches(topology.sample_rank)

    def step() -> None:
        engine.train_step(batches, 1e-4, lambda measured: measured.finite)

    def watched() -> None:
        engine.probe.watch_step()
        step()
        engine.collect_statistics()

    def located() -> None:
        locators.locate_first_nonfinite(engine, batches)

    for _ in range(WARM):
        step()
    gc.collect()
    gc.disable()
    all_held = torch.cuda.memory_allocated() if on_gpu else living_bytes()
    peak = _peak_on_gpu if on_gpu else partial(peak_of, again=PROFILED)
    most = peak(step), peak(watched), peak(located)
    held = _kinds(engine)
    held["other"] = all_held - before - sum(held.values())
    return Measured(topology.stage, held, *most, building, "cuda" if on_gpu else "cpu")


def _peak_on_gpu(step: Callable[[], None]) -> int:
    import torch

    torch.cuda.synchronize()
    bytes_before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - bytes_before


def _kinds(engine: Any) -> dict[str, int]:
    """Bytes that an engine holds between two steps, by kind; every storage once."""
    from megastable.engine.zero import Bf16, Zero3

    o = engine.optimizer
    stage3 = isinstance(engine.zero, Zero3)
    parameters = list(engine.ds.module.parameters())
    weights = [one_parameter.ds_tensor for one_parameter in parameters] if stage3 else parameters
    gradients = [one_parameter.grad for one_parameter in parameters if one_parameter.grad is not None]
    if isinstance(engine.zero, Bf16):
        gradients += o.fp32_groups_gradients_flat
    elif stage3:
        gradients.append(o.grad_partitions_flat_buffer)
    moments = [t for master in engine.masters for t in o.optimizer.state[master].values() if t.dim()]
    found = {"weights": weights, "gradients": gradients, "master": engine.masters, "moments": moments}
    storages_seen: set[int] = set()
    bytes_by_kind = {}
    for kind, tensors in found.items():
        bytes_by_kind[kind] = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages_seen:
                storages_seen.add(storage.data_ptr())
                bytes_by_kind[kind] += storage.nbytes()
    return bytes_by_kind


# Starting ranks


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    layout: Annotated[list[str] | None, typer.Option(help="One of the layouts; all when left out.")] = None,
    output: Annotated[Path | None, typer.Option(help="Also write the rows there, as JSON.")] = None,
) -> None:
    """Measure the memory of training steps and compare it with the planner's formulas.

    Examples:

        python -m benchmarks.footprint

        python -m benchmarks.footprint --layout TP2 --layout "DP2 ZeRO 3" --output footprint.json
    """
    with user_errors():
        console = Console()
        if output is not None and not output.absolute().parent.is_dir():
            raise ConfigError(f"--output {output}: no such folder; create it, or name another one")
        rows = measure_layouts(layout or (), lambda name: Console(stderr=True).print(name, style="dim"))
        console.print(footprint_table(rows))
        if output is not None:
            durable.write_output(output, json.dumps([asdict(one_row) for one_row in rows], indent=1) + "\n")


if __name__ == "__main__":
    app()
