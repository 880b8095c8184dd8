"""Messages beside the products of the parallel layers: the bytes of the plain path, in this order and no other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megastable.base.products import linear, multiply_batch, multiply_parts, multiply_rows
from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS
from megastable.fp8 import emulated
from megastable.parallel import mappings, overlapped
from megastable.parallel.deferred_gradients import DeferredGradients
from megastable.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megastable.parallel.mappings import enter_tensor_region, leave_tensor_region
from megastable.parallel.topology import TensorParallel
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.parallel.test_layouts import batches
from tests.parallel.test_layouts import config as layout_config

STEPS = 10


@contextmanager
def plain_layers() -> Iterator[None]:
    """The reference: whole messages, each waited for before anything else is computed."""

    def enter(layer: ColumnParallelLinear, x: Tensor) -> Tensor:
        return linear(enter_tensor_region(x, layer.tp), layer.weight)

    def leave(layer: RowParallelLinear, x: Tensor) -> Tensor:
        return leave_tensor_region(linear(x, layer.weight), layer.tp)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ColumnParallelLinear, "forward", enter)
        patch.setattr(RowParallelLinear, "forward", leave)
        yield


SEQUENCE = {"tensor": 2, "sequence": True}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-fp32": (2, {"tensor": 2, "tied": True}),
    "tp2-bf16-full": (2, {"tensor": 2, "recompute": "full", "precision": "bf16"}),
    "sequence-tp2-bf16": (2, SEQUENCE | {"precision": "bf16"}),
    "sequence-tp2-fp32-chunks": (2, SEQUENCE | {"tensor_overlap": 2, "recompute": "selective"}),
    "sequence-tp2-bf16-tied-full-chunks": (
        2, SEQUENCE | {"tensor_overlap": 4, "recompute": "full", "precision": "bf16", "tied": True},
    ),
    "sequence-tp2-bf16-kept-zero3-chunks": (
        2, SEQUENCE | {"tensor_overlap": 2, "keep_gathered": True, "zero": 3, "precision": "bf16"},
    ),
    "sequence-tp2-dp2-bf16-chunks": (
        4, SEQUENCE | {"tensor_overlap": 2, "recompute": "selective", "precision": "bf16"},
    ),
    "sequence-tp4-fp32-chunks": (4, SEQUENCE | {"tensor": 4, "tensor_overlap": 2, "model": {"kv_heads": 4}}),
    "sequence-tp4-bf16-full": (
        4, SEQUENCE | {"tensor": 4, "recompute": "full", "precision": "bf16", "model": {"kv_heads": 4}},
    ),
    "sequence-pp2-tp2-bf16-tied-chunks": (
        4, SEQUENCE | {"pipeline": 2, "tensor_overlap": 4, "precision": "bf16", "tied": True},
    ),
    "sequence-pp2-tp2-fp32-full-chunks": (
        4, SEQUENCE | {"pipeline": 2, "tensor_overlap": 2, "recompute": "full"},
    ),
}  # fmt: skip


def train_steps(c: RunConfig) -> dict[str, Any]:
    engine = build_engine(c)
    numbers: list[float] = []
    for batch in (batches() * 3)[:STEPS]:
        measured, applied = engine.train_step(take_batch(engine, batch), 1e-3, lambda m: m.finite)
        assert applied
        numbers += [measured.loss, measured.grad_norm, *measured.losses.tolist()]
    flat = engine.flat_state()
    state = {f"{kind}/{n}": t.clone() for kind in KINDS for n, t in flat.gather_shards(kind).items()}
    return {"numbers": numbers, "state": state}


def train_both_ways(cases: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Of a rank, by case: the steps by the plain path and by the real one."""
    found = {}
    for name, options in cases.items():
        with plain_layers():
            found[name] = [train_steps(layout_config(**options | {"tensor_overlap": 1}))]
        found[name].append(train_steps(layout_config(**options)))
    return found


QUICK = ["tp2-fp32", "sequence-tp2-fp32-chunks"]
REST = [name for name in CASES if name not in QUICK]


@pytest.mark.quick("quick")
@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(2, QUICK, id="quick"),
        *(pytest.param(world, [n for n in REST if CASES[n][0] == world], id=str(world)) for world in (2, 4)),
    ],
)
def test_steps_with_messages_beside_the_products_are_the_same_bytes(world: int, names: list[str]) -> None:
    cases = {name: CASES[name][1] for name in names}
    for rank in run_ranks(world, train_both_ways, cases):
        for name in cases:
            plain, beside = rank[name]
            assert plain["numbers"] == beside["numbers"], name
            assert plain["state"].keys() == beside["state"].keys()
            assert all(plain["state"][key].equal(beside["state"][key]) for key in plain["state"]), name


# The order


class TracedWork:
    def __init__(self, work: Any, name: str, events: list[str]) -> None:
        self.work, self.name, self.events = work, name, events

    def wait(self) -> None:
        self.work.wait()
        self.events.append(f"{self.name} over")


def trace_passes(chunks: int, gathers_again: bool, sequence: bool) -> dict[str, list[str]]:
    """Of a rank: messages and products of both layers in the order in which they begin and end."""
    import torch.distributed as dist

    events: list[str] = []
    counts: dict[str, int] = {}

    def trace_message(name: str, send: Any) -> Any:
        def begin(*args: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            label = f"{name} {counts[name]}"
            events.append(label)
            work = send(*args, **options)
            return TracedWork(work, label, events) if options.get("async_op") else work

        return begin

    def trace_product(name: str, product: Any) -> Any:
        def multiply(*args: Any, **options: Any) -> Any:
            events.append(name)
            return product(*args, **options)

        return multiply

    tp = TensorParallel(dist.group.WORLD, dist.get_rank(), 2, sequence, gathers_again, chunks)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, send in (("gather", "_gather"), ("scatter", "_scatter")):
            patch.setattr(mappings, send, trace_message(name, getattr(mappings, send)))
        patch.setattr(dist, "all_reduce", trace_message("sum", dist.all_reduce))
        for name, of in (("y", "multiply_rows"), ("part", "multiply_parts"), ("dx", "differentiate_input"),
                         ("dw", "differentiate_weight")):  # fmt: skip
            patch.setattr(overlapped, of, trace_product(name, getattr(overlapped, of)))
        patch.setattr(emulated, "multiply_quantized", trace_product("product", emulated.multiply_quantized))
        quantize = emulated.Current(emulated.choose_formats(Fp8Config()))
        layers: dict[str, Any] = {
            "column": overlapped.enter_and_multiply, "row": overlapped.multiply_and_leave,
            "FP8": lambda x, w, tp: emulated.Product("", quantize, lambda: True, tp=tp)(x, w),
        }  # fmt: skip
        for layer in ("column", "row") if chunks > 1 else ("column", "FP8"):
            multiply = layers[layer]
            length = 8 // (2 if sequence and layer != "row" else 1)
            x = torch.randn(length, 1, 4, requires_grad=True)
            w = torch.randn(4, 4, requires_grad=True)
            for when in ("forward", "backward"):
                events.clear()
                counts.clear()
                if when == "forward":
                    y = multiply(x, w, tp)
                else:
                    y.backward(torch.ones_like(y))
                found[f"{layer} {when}"] = events.copy()
        if chunks > 1:
            found |= trace_deferred(layers, tp, events, counts)
    return found


def trace_deferred(
    layers: dict[str, Any], tp: TensorParallel, events: list[str], counts: dict[str, int]
) -> dict[str, list[str]]:
    """Of two column-parallel and two row-parallel layers whose weight gradients come later: their backward pass, and
    the weight gradients."""
    deferred_gradients, found = DeferredGradients(), {}
    x, *weights = [torch.randn(4, *size, requires_grad=True) for size in ((1, 4), *[(4,)] * 4)]
    y = x
    for layer, w in zip(("column", "row") * 2, weights, strict=True):
        y = layers[layer](y, w, tp)
    for when in ("B", "W"):
        events.clear()
        counts.clear()
        if when == "B":
            with deferred_gradients.collect():
                y.backward(torch.ones_like(y))
            assert x.grad is not None and all(w.grad is None for w in weights)
        else:
            deferred_gradients.compute_oldest()
            assert all(w.grad is not None for w in weights)
        found[when] = events.copy()
    return found


def trace_all() -> list[dict[str, list[str]]]:
    return [
        trace_passes(*way)
        for way in ((1, False, False), (1, False, True), (1, True, True), (4, True, True), (4, False, True))
    ]


IN_SLICES = [
    "gather 1", "gather 2", "gather 1 over", "part", "gather 3", "gather 2 over", "part", "gather 4", "gather 3 over",
    "part", "gather 4 over", "part",
]  # fmt: skip
OUT_IN_SLICES = [
    "part", "scatter 1", "part", "scatter 2", "scatter 1 over", "part", "scatter 3", "scatter 2 over", "part",
    "scatter 4", "scatter 3 over", "scatter 4 over",
]  # fmt: skip


def count_on(event: str, by: int) -> str:
    """A message's number, if it is one, raised."""
    return " ".join(str(int(word) + by) if word.isdigit() else word for word in event.split())


def test_every_message_is_under_way_while_something_is_multiplied() -> None:
    again = ["gather 1", "dx", "scatter 1", "gather 1 over", "dw", "scatter 1 over"]
    kept = ["dx", "scatter 1", "dw", "scatter 1 over"]
    row = {"row forward": OUT_IN_SLICES, "row backward": [*IN_SLICES, "dw"]}
    # Two layers of either kind, from the last one on; the sums and gathers of the second are numbers 5 to 8.
    later = {
        "B": [*IN_SLICES, *OUT_IN_SLICES, *(count_on(e, 4) for e in (*IN_SLICES, *OUT_IN_SLICES))],
        "W": ["dw", "gather 1 over", "gather 2", "dw", "dw", "gather 2 over", "dw"],
    }
    later_again = later | {"W": ["gather 1", *later["W"]]}
    later_kept = later | {"W": ["dw"] * 4}
    for plain, whole_kept, whole, sliced, sliced_kept in run_ranks(2, trace_all):
        in_fp8 = [
            {name: found.pop(f"FP8 {name}") for name in ("forward", "backward")}
            for found in (plain, whole_kept, whole)
        ]
        assert plain == {"column forward": ["y"], "column backward": ["dx", "sum 1", "dw", "sum 1 over"]}
        assert whole_kept == {"column forward": ["gather 1", "y"], "column backward": kept}
        assert whole == {"column forward": ["gather 1", "y"], "column backward": again}
        for of_fp8, of_column in zip(in_fp8, (plain, whole_kept, whole), strict=True):
            for name, events in of_fp8.items():
                same_events = [
                    "product" if e in ("y", "dx", "dw") else e for e in of_column[f"column {name}"]
                ]
                assert events == same_events
        assert sliced == {"column forward": IN_SLICES, "column backward": again} | row | later_again
        assert sliced_kept == {"column forward": IN_SLICES, "column backward": kept} | row | later_kept


def count_hooks() -> list[int]:
    """Of a rank: how often a gradient is added up in the weight of a layer of each kind, which is recomputed, with
    its gradient left for later."""
    import torch.distributed as dist

    tp, counts = TensorParallel(dist.group.WORLD, dist.get_rank(), 2, True, True, 2), []
    in_fp8 = emulated.Product("", emulated.Current(emulated.choose_formats(Fp8Config())), lambda: True, tp=tp)
    for multiply in (
        lambda x, w: overlapped.enter_and_multiply(x, w, tp),
        lambda x, w: overlapped.multiply_and_leave(x, w, tp),
        in_fp8,
    ):
        x = torch.randn(8, 1, 4, requires_grad=True)
        w = torch.nn.Parameter(torch.randn(4, 4))
        seen, deferred_gradients = list[Tensor](), DeferredGradients()
        with deferred_gradients.collect():
            # The graph, which is let go of here, must not be what knows the parameter.
            checkpoint(multiply, x, w, use_reentrant=False).sum().backward()
        w.register_post_accumulate_grad_hook(seen.append)
        deferred_gradients.compute_oldest()
        counts.append(len(seen))
    return counts


def test_recomputed_layers_give_gradients_that_come_later_to_the_parameter() -> None:
    assert run_ranks(2, count_hooks) == [[1, 1, 1]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_of_parts_has_the_rows_of_the_whole(dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(3)
    for parts, rows, inputs, outputs in ((2, 4, 32, 24), (4, 16, 64, 96), (8, 64, 256, 40)):
        x = torch.randn(parts, 3, rows, inputs, generator=drawn).to(dtype)
        w = torch.randn(outputs, inputs, generator=drawn).to(dtype)
        whole = multiply_rows(x.flatten(0, 2), w)
        for multiply in (multiply_parts, multiply_batch):  # the second is that of GPUs
            y = torch.zeros(parts, 3, rows, outputs, dtype=dtype)
            for number in range(3):
                assert multiply(x[:, number], w, out=y[:, number]).data_ptr() == y[:, number].data_ptr()
                assert multiply(x[:, number], w).equal(y[:, number])
            assert whole.equal(y.flatten(0, 2))
            assert multiply(x[:, 0], w.t().contiguous().t()).equal(y[:, 0])  # as for the gradient of an input
