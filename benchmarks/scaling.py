"""Count the collectives of real training steps, and compare them with the formulas.

This needs no cluster: the number of messages and their bytes do not depend on the link. Every layout trains a tiny
model on processes of this machine (gloo); the formulas are in `plan/volume.py`, the counting is below.

    measure(["TP2", "PP4"]) -> Found, table(found)           `megastable bench scaling --layout TP2 --layout PP4`
    predict(config, world) -> Forecast, forecast_table(...)  `megastable bench scaling --recipe PATH --ranks N`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.distributed.distributed_c10d import _world
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import describe_machine
from benchmarks.layouts import PP2, SP2, TP2, LayoutCase, run_layouts
from megastable.base.errors import ConfigError
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable_tools.plan import partition, volume
from megastable_tools.plan.time import BALLOT

# Kind of group, collective, bytes that a rank gives to one call (for a receive: gets).
Message = tuple[str, str, int]

# All sizes differ, so that no two kinds of messages look alike.
MODEL = dict(
    layers=4, hidden=40, heads=8, kv_heads=4, head_dim=6, ffn=56, sequence_length=32, vocab_size=250, vocab_multiple=64,
)  # fmt: skip
KEEP_NOTHING = {
    "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
}  # fmt: skip

SMALL_BUCKETS = {"reduce_bucket_size": 12000}  # elements: a third of a stage's; its norms fit into one


Case = partial(
    LayoutCase, global_batch=8, elements=3000,
    base={"model": MODEL, "kernels": {"attention": "reference", "loss": "chunked", "compile": False}},
)  # fmt: skip
FP32, FP16 = {"kind": "fp32"}, {"kind": "fp16"}
GEMMA2 = {"norms": "both", "attention_softcap": 50.0, "logit_softcap": 30.0, "window": 8}
MIXED = {"norms": "mixed", "mixed_share": 0.25}  # the first of four blocks
MUON: dict[str, Any] = {"name": "muon"}
CLIP: dict[str, Any] = {"clip": 1e6}  # no worker is above it
EXPERTS: dict[str, Any] = {"experts": {"count": 6, "top_k": 2, "ffn": 24, "first_dense": 1}}
# Every token goes to all experts, so that ranks send each other the same.
ALL_EXPERTS: dict[str, Any] = {"experts": {"count": 4, "top_k": 4, "ffn": 24, "first_dense": 1}}
SHARED: dict[str, Any] = {"experts": EXPERTS["experts"] | {"shared": 1, "balance_over": "step"}}
LAYOUTS = {
    "TP2": Case(2, TP2),
    "TP2 reference loss": Case(2, TP2, kernels={"loss": "reference"}),
    "TP2 full": Case(2, TP2 | {"recompute": "full"}),
    "TP2+SP": Case(2, SP2),
    "TP2+SP selective": Case(2, SP2 | {"recompute": "selective"}),
    "TP2+SP full": Case(2, SP2 | {"recompute": "full"}),
    "TP2+SP keeps what it gathered": Case(2, SP2 | {"keep_gathered": True}),
    "TP2+SP in chunks": Case(2, SP2 | {"tensor_overlap": 4}),
    "TP2+SP tied full in chunks": Case(
        2, SP2 | {"recompute": "full", "tensor_overlap": 2}, {"tied": True} | MIXED
    ),
    "TP2+SP FP8 but for a block and a layer, in chunks": Case(
        2,
        SP2 | {"tensor_overlap": 2},
        precision={"fp8": {"recipe": "current", "keep_first": 1, "keep": ["blocks.2.mlp.down"]}},
    ),
    "TP2+SP Gemma 2 full": Case(2, SP2 | {"recompute": "full"}, GEMMA2),
    "TP4": Case(4, {"tensor": 4}),
    "PP2": Case(2, PP2),
    "PP2 tied": Case(2, PP2, {"tied": True}),
    "PP4": Case(4, {"pipeline": 4}),
    "PP4 in two model chunks": Case(4, {"pipeline": 4, "model_chunks": 2}, {"layers": 8}),
    "TP2+SPxPP2 tied in two model chunks": Case(
        4, SP2 | PP2 | {"model_chunks": 2}, {"layers": 5, "tied": True}, apart=True
    ),
    "TP2+SPxPP2 zero-bubble": Case(4, SP2 | PP2 | {"schedule": "zero_bubble"}),
    "TP2+SPxPP2 zero-bubble in chunks": Case(
        4, SP2 | PP2 | {"schedule": "zero_bubble", "tensor_overlap": 2, "recompute": "full"}, MIXED
    ),
    "DP2 ZeRO 1": Case(2),
    "DP4 ZeRO 1 in buckets": Case(4, zero=SMALL_BUCKETS),
    "PP2xDP2 ZeRO 1 tied, in buckets": Case(4, PP2, {"tied": True}, zero=SMALL_BUCKETS),
    "DP4 in 2 replicas, in buckets": Case(4, {"replicas": 2}, zero=SMALL_BUCKETS),
    "DP6 in 2 replicas": Case(6, {"replicas": 2}, global_batch=6, micro_batch=1),
    "PP2xDP4 in 2 replicas, tied, in buckets": Case(
        8, PP2 | {"replicas": 2}, {"tied": True}, zero=SMALL_BUCKETS
    ),
    "TP2xDP2, all of it on both": Case(4, {"tensor": 2, "replicas": 2}),
    "DP2 ZeRO 2": Case(2, {"zero": 2}),
    "DP2 ZeRO 3": Case(2, {"zero": 3}),
    "DP2 ZeRO 3 full": Case(2, {"zero": 3, "recompute": "full"}),
    "DP2 ZeRO 3 full keeps nothing": Case(2, {"zero": 3, "recompute": "full"}, zero=KEEP_NOTHING),
    "DP2 ZeRO 3 Gemma 2 full keeps nothing": Case(
        2, {"zero": 3, "recompute": "full"}, GEMMA2, zero=KEEP_NOTHING
    ),
    "DP2 ZeRO 3 Mix-LN full keeps nothing": Case(
        2, {"zero": 3, "recompute": "full"}, MIXED, zero=KEEP_NOTHING
    ),
    "DP4 ZeRO 1 fp32": Case(4, precision=FP32),
    "DP4 ZeRO 2": Case(4, {"zero": 2}, micro_batch=1),
    "DP4 ZeRO 3 tied": Case(4, {"zero": 3}, {"tied": True}),
    "CP2": Case(2, {"context": 2}),
    "CP2 full": Case(2, {"context": 2, "recompute": "full"}),
    "CP2 ring": Case(2, {"context": 2, "context_by": "ring"}),
    "CP4 ring fp32 full": Case(4, {"context": 4, "context_by": "ring", "recompute": "full"}, precision=FP32),
    "CP2xTP2+SP selective": Case(4, SP2 | {"context": 2, "recompute": "selective"}),
    "TP2xDP2 ZeRO 2": Case(4, TP2 | {"zero": 2}),
    "TP2xPP2": Case(4, TP2 | PP2),
    "PP2xDP3 tied": Case(6, PP2, {"tied": True, "layers": 5}, global_batch=6, micro_batch=1),
    "TP2+SPxPP2 Mix-LN full": Case(4, SP2 | PP2 | {"recompute": "full"}, MIXED),
    "TP2+SPxPP2 tied full": Case(4, SP2 | PP2 | {"recompute": "full"}, {"tied": True}, apart=True),
    "TP2xPP2xDP2": Case(8, TP2 | PP2),
    "DP2 clipped by value": Case(2, optimizer=CLIP | {"clipping": {"kind": "value", "threshold": 1.0}}),
    "DP2 ZeRO 3 AdaGC": Case(2, {"zero": 3}, optimizer=CLIP | {"clipping": {"kind": "adagc"}}),
    "TP2xPP2 AGC": Case(4, TP2 | PP2, optimizer=CLIP | {"clipping": {"kind": "agc"}}),
    "DP4xCP2 by worker": Case(4, {"context": 2}, optimizer=CLIP | {"clipping": {"kind": "worker"}}),
    "StableAdamW DP2 ZeRO 2": Case(2, {"zero": 2}, optimizer={"name": "stable_adamw"}),
    "LAMB PP2xDP2 tied": Case(4, PP2, {"tied": True}, optimizer={"name": "lamb"}),
    "Stable-SPAM DP2 fp16": Case(2, precision=FP16, optimizer={"name": "stable_spam"}),
    "Adafactor TP2xDP2 ZeRO 3": Case(4, TP2 | {"zero": 3}, optimizer={"name": "adafactor"}),
    "Adafactor DP2 ZeRO 3 sub-groups": Case(
        2, {"zero": 3}, zero={"sub_group_size": 4000}, optimizer={"name": "adafactor"}
    ),
    "Muon DP3 ZeRO 3 fp32": Case(
        3, {"zero": 3}, precision=FP32, global_batch=6, micro_batch=1, optimizer=MUON
    ),
    "Muon TP2xPP2xDP2 QK-clip": Case(8, TP2 | PP2, {"qk_norm": False}, optimizer=MUON | {"qk_clip": 100.0}),
    "TP2 experts": Case(2, TP2, EXPERTS),
    "TP2 experts full": Case(2, TP2 | {"recompute": "full"}, EXPERTS),
    "TP2+SP experts": Case(2, SP2, EXPERTS),
    "TP2+SP experts full in chunks": Case(2, SP2 | {"recompute": "full", "tensor_overlap": 2}, SHARED),
    "TP2+SPxPP2 experts": Case(4, SP2 | PP2, EXPERTS),
    "DP4 ZeRO 1 experts, in buckets": Case(4, model=EXPERTS, zero=SMALL_BUCKETS),
    "DP2 ZeRO 2 experts": Case(2, {"zero": 2}, SHARED),
    "DP2 ZeRO 3 experts full keeps nothing": Case(
        2, {"zero": 3, "recompute": "full"}, EXPERTS, zero=KEEP_NOTHING
    ),
    "DP2 ZeRO 3 experts shared full keeps nothing": Case(
        2, {"zero": 3, "recompute": "full"}, SHARED, zero=KEEP_NOTHING
    ),
    "CP2 experts full": Case(2, {"context": 2, "recompute": "full"}, EXPERTS),
    "PP2xDP2 experts tied": Case(4, PP2, EXPERTS | {"tied": True}),
    "DP2 experts on 2": Case(2, {"expert": 2}, ALL_EXPERTS),
    "DP4 experts on 2, in buckets": Case(4, {"expert": 2}, ALL_EXPERTS, zero=SMALL_BUCKETS),
    "DP4 ZeRO 2 experts on 2 full": Case(
        4, {"zero": 2, "expert": 2, "recompute": "full"}, ALL_EXPERTS, micro_batch=1
    ),
    "TP2+SPxDP2 experts on 2": Case(4, SP2 | {"expert": 2}, ALL_EXPERTS),
    "PP2xDP4 experts on 4, tied": Case(8, PP2 | {"expert": 4}, ALL_EXPERTS | {"tied": True}),
    "Muon TP2xDP2 experts": Case(4, TP2, EXPERTS, optimizer=MUON),
    "Adafactor DP2 experts AGC": Case(
        2, model=SHARED, optimizer=CLIP | {"name": "adafactor", "clipping": {"kind": "agc"}}
    ),
}


@dataclass(frozen=True)
class Counted:
    """One step on one rank. missed: calls that the groups counted, but `Count` did not."""

    stage: int
    messages: dict[Message, int]
    missed: int


@dataclass(frozen=True)
class Row:
    """One collective of one group by a rank of some stages in a step; counted, and by the formulas."""

    stages: str
    group: str
    collective: str
    calls: int
    bytes: int
    expected_calls: int
    expected_bytes: int


@dataclass(frozen=True)
class Held:
    """A layout, counted and compared with the formulas. differences: in words, of single messages."""

    name: str
    world: int
    rows: list[Row]
    differences: list[str]
    missed: int


@dataclass(frozen=True)
class Found:
    layouts: list[Held]
    machine: dict[str, Any]

    @property
    def differs(self) -> bool:
        return any(held_layout.differences or held_layout.missed for held_layout in self.layouts)


def count_layouts(names: Sequence[str] = (), say: Callable[[str], None] = lambda _: None) -> Found:
    """Count the layouts of these names (of `LAYOUTS`; none: all) in separate processes.

    Raises ConfigError for an unknown name, MegastableError if a rank fails.
    """
    counted_layouts = run_layouts(LAYOUTS, names, count_joined, say)
    held_layouts = [compare_ranks(name, case, ranks) for name, case, ranks in counted_layouts]
    return Found(held_layouts, describe_machine(torch.device("cpu")))


def expected_messages(
    case: LayoutCase, stage: int, data_rank: int = 0, tensor_rank: int = 0
) -> dict[Message, int]:
    """The messages of a rank of `stage` by the formulas."""
    config = case.config
    volume_terms = volume.list_step_terms(
        config, case.layout.data, stage, partition.stage_bounds(config), config.kernels.loss, elements=case.elements,
        zero=case.deepspeed["zero_optimization"], data_rank=data_rank, tensor_rank=tensor_rank,
    )  # fmt: skip
    message_counts: Counter[Message] = Counter()
    for term in volume_terms:
        message_counts[term.group, term.collective, term.bytes] += term.calls
    return dict(message_counts)


def compare_ranks(name: str, case: LayoutCase, ranks: Sequence[Counted]) -> Held:
    """Every rank's count beside the formulas."""
    differences, by_stage = [], {}
    for rank, counted in enumerate(ranks):
        wanted_messages = expected_messages(case, *case.layout.coordinates_of(rank))
        for message in sorted(counted.messages.keys() | wanted_messages.keys()):
            counted_calls, wanted_calls = counted.messages.get(message, 0), wanted_messages.get(message, 0)
            if counted_calls != wanted_calls:
                group, collective, size = message
                differences.append(
                    f"{name}: rank {rank} (stage {counted.stage}): {collective} of {size:,} bytes over the {group} "
                    f"group: {counted_calls} counted, {wanted_calls} by the formulas"
                )
        both_sums = _summed(counted.messages), _summed(wanted_messages)
        if counted.stage not in by_stage or counted.messages != wanted_messages:
            by_stage[counted.stage] = both_sums  # a rank that differs is the one to show
    rows = []
    for stages, (counted_sums, wanted_sums) in _alike(by_stage).items():
        for group, collective in sorted(counted_sums.keys() | wanted_sums.keys()):
            key = group, collective
            rows.append(Row(stages, *key, *counted_sums.get(key, (0, 0)), *wanted_sums.get(key, (0, 0))))
    return Held(name, case.world, rows, differences, sum(counted.missed for counted in ranks))


Sums = dict[tuple[str, str], tuple[int, int]]  # (calls, bytes) by (group, collective)


def _summed(messages: dict[Message, int]) -> Sums:
    sums: Sums = {}
    for (group, collective, size), calls in messages.items():
        calls_before, bytes_before = sums.get((group, collective), (0, 0))
        sums[group, collective] = (calls_before + calls, bytes_before + calls * size)
    return sums


def _alike(by_stage: dict[int, tuple[Sums, Sums]]) -> dict[str, tuple[Sums, Sums]]:
    """Group stages with equal counts under one name: "0", "1-2", "3"; "all"."""
    stage_runs: list[list[int]] = []
    for stage in sorted(by_stage):
        if stage_runs and by_stage[stage_runs[-1][-1]] == by_stage[stage]:
            stage_runs[-1].append(stage)
        else:
            stage_runs.append([stage])
    if len(stage_runs) == 1:
        return {"all": by_stage[0]}
    return {(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0])): by_stage[r[0]] for r in stage_runs}


def scaling_table(found: Found) -> Table:
    """One row for every layout, stage, group and collective; both numbers where counted and expected differ."""
    made = Table("layout", "stages", "group", "collective", title="What one rank gives in a training step")
    made.add_column("calls", justify="right")
    made.add_column("bytes", justify="right")
    for held_layout in found.layouts:
        for row_index, row in enumerate(held_layout.rows):
            made.add_row(
                "" if row_index else held_layout.name,
                row.stages, row.group, row.collective,
                _both(row.calls, row.expected_calls), _both(row.bytes, row.expected_bytes),
                end_section=row_index == len(held_layout.rows) - 1,
            )  # fmt: skip
    wrong = sum(bool(held_layout.differences) for held_layout in found.layouts)
    missed_count = sum(held_layout.missed for held_layout in found.layouts)
    made.caption = (
        f"{len(found.layouts)} layouts, every rank and message: "
        + (f"{wrong} differ from the formulas (counted / formula)" if wrong else "as the formulas say")
        + (f"; {missed_count} calls were not seen" if missed_count else "")
    )
    return made


def _both(counted: int, wanted: int) -> str:
    return f"{counted:,}" if counted == wanted else f"[red]{counted:,} / {wanted:,}[/red]"


# By the formulas alone


@dataclass(frozen=True)
class Line:
    """One collective in a step, for the stage that gives most; sent: bytes that leave the rank in a ring."""

    what: str
    group: str
    collective: str
    ranks: int
    calls: int
    bytes: int
    sent: float
    stage: int

    def plus(self, other: Line) -> Line:
        return replace(
            self, calls=self.calls + other.calls, bytes=self.bytes + other.bytes, sent=self.sent + other.sent
        )


@dataclass(frozen=True)
class Forecast:
    """busiest: bytes sent over groups of a kind by the rank that sends most."""

    world: int
    layout: dict[str, int]
    accumulation: int
    lines: list[Line]
    busiest: dict[str, float]


def predict_step(config: RunConfig, world: int) -> Forecast:
    """A step of `config` on `world` ranks, by the formulas. model.vocab_size must be given.

    Raises ConfigError if the ranks cannot be laid out, or the vocabulary is unknown.
    """
    if config.model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size comes from a corpus, and none is opened here: set model.vocab_size=..."
        )
    parallel_config, data = config.parallel, deepspeed_json.size_of_data_parallel(config, world)
    zero_settings = deepspeed_json.build_deepspeed_json(config, world)["zero_optimization"]
    loss = "chunked" if config.kernels.loss == "auto" else config.kernels.loss
    group_sizes, stage_bounds = volume.count_members(config, data), partition.stage_bounds(config)
    most: dict[Key, Line] = {}
    busiest_bytes: dict[str, float] = {}
    for stage in range(parallel_config.pipeline):
        lines: dict[Key, Line] = {}
        for t in volume.list_step_terms(
            config, data, stage, stage_bounds, loss, ballot=BALLOT, zero=zero_settings
        ):
            if t.collective != "receive":  # the other end's send
                line_key, group_size = (t.what, t.group, t.collective), group_sizes[t.group]
                new_line = Line(
                    *line_key, group_size, t.calls, t.total, volume.count_sent_bytes(t, group_size), stage
                )
                lines[line_key] = new_line if line_key not in lines else lines[line_key].plus(new_line)
        for line_key, new_line in lines.items():
            if line_key not in most or new_line.bytes > most[line_key].bytes:
                most[line_key] = new_line
        for group in group_sizes:
            bytes_sent = sum(new_line.sent for new_line in lines.values() if new_line.group == group)
            busiest_bytes[group] = max(bytes_sent, busiest_bytes.get(group, 0.0))
    layout = {"tensor": parallel_config.tensor, "pipeline": parallel_config.pipeline, "data": data}
    busiest_bytes = {group: bytes_sent for group, bytes_sent in busiest_bytes.items() if bytes_sent}
    return Forecast(
        world, layout, partition.count_micro_batches(config, data), list(most.values()), busiest_bytes
    )


Key = tuple[str, str, str]


def forecast_table(forecast: Forecast) -> Table:
    """One row for every collective of a step, for the stage that gives most."""
    layout_text = " x ".join(f"{column_name} {size}" for column_name, size in forecast.layout.items())
    made = Table(
        "what", "group", "collective",
        title=f"{forecast.world} ranks ({layout_text}), {forecast.accumulation} micro-batches a step, for one rank",
    )  # fmt: skip
    for column_name in ("ranks", "calls", "given", "sent in a ring", "stage"):
        made.add_column(column_name, justify="right")
    for x in sorted(forecast.lines, key=lambda line: -line.sent):
        made.add_row(
            x.what, x.group, x.collective, str(x.ranks), f"{x.calls:,}", size_in_words(x.bytes),
            size_in_words(x.sent), str(x.stage),
        )  # fmt: skip
    busiest = sorted(forecast.busiest.items(), key=lambda item: -item[1])
    made.caption = "sent in all: " + ", ".join(f"{group} {size_in_words(sent)}" for group, sent in busiest)
    return made


def size_in_words(size: float) -> str:
    """Bytes in decimal units, three digits: "28.1 GB"."""
    unit_names = ["B", "kB", "MB", "GB", "TB", "PB"]
    power = 0
    while size >= 999.5 and power < len(unit_names) - 1:
        size, power = size / 1000, power + 1
    return f"{size:.3g} {unit_names[power]}"


# Counting on a rank. torch passes communication between ranks to its process groups by operators of its own
# (`c10d::...`), for any caller: `Count` intercepts them. The groups' sequence numbers verify that it misses none.

NAMES = {
    "allreduce_": "all-reduce", "_allgather_base_": "all-gather", "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_": "reduce-scatter", "broadcast_": "broadcast",
    "send": "send", "recv_": "receive", "reduce_": "reduce", "alltoall_base_": "all-to-all",
}  # fmt: skip
# For these operators the tensor is the first argument; for all others it is the second.
IN_PLACE = "allreduce_ allreduce_coalesced_ broadcast_ reduce_ send recv_ recv_any_source_".split()


class Count(TorchDispatchMode):
    """Counts communication while entered, by (name of the group, operation, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self.sequence = 0  # by how much all groups' numbers grow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.partition("::")[2]
            boxed_group = next(a for a in args if isinstance(a, torch.ScriptObject))
            given_tensors = args[0] if name in IN_PLACE else args[1]
            unboxed_group = dist.ProcessGroup.unbox(boxed_group)
            group = unboxed_group.group_name
            # Gloo makes a reduction for every rank of a reduce-scatter into pieces of any sizes.
            self.sequence += unboxed_group.size() if name == "reduce_scatter_" else 1
            self.calls[group, NAMES.get(name, name), 0 if name == "barrier" else _bytes(given_tensors)] += 1
        return func(*args, **(kwargs or {}))


def _bytes(given: Any) -> int:
    if isinstance(given, Tensor):
        return given.numel() * given.element_size()
    return sum(map(_bytes, given)) if isinstance(given, list | tuple) else 0


def sequence_numbers() -> dict[str, int]:
    """Number of collectives that every group of this rank has seen."""
    return {
        group.group_name: group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        for group in _world.pg_map
    }


def count_joined(case: LayoutCase, warm: int = 2) -> Counted:
    """Train `warm` steps on random tokens, and count the next one. On a rank of a process group."""
    from megastable.engine.engine import Engine

    topology = case.join_group()
    engine = Engine(case.config, case.deepspeed, topology)
    drawn_batches = case.draw_batches(topology.sample_rank)
    for step in range(warm + 1):
        numbers_before, counter = sequence_numbers(), Count()
        with counter:
            _, applied = engine.train_step(drawn_batches, 1e-4, lambda measured: measured.finite)
        assert applied, f"step {step} was not finite"
    numbers_after = sequence_numbers()
    missed = sum(numbers_after[name] - numbers_before[name] for name in numbers_after) - counter.sequence
    kind_by_group = _kinds(engine)
    messages: Counter[Message] = Counter()
    for (group, collective, size), calls in counter.calls.items():
        # DeepSpeed's stages communicate through the world's group.
        kind = kind_by_group.get(group, f"group {group}")
        kind = "pipeline" if collective in ("send", "receive") and kind != "context" else kind
        messages[kind, collective, size] += calls
    return Counted(topology.stage, dict(messages), missed)


def _kinds(engine: Any) -> dict[str, str]:
    """The purpose of each group of this rank, by name."""
    from megastable.optim.pieces import PieceOptimizer

    t = engine.topology
    groups_by_kind = {"tensor": [t.tensor_group], "data": [t.data_group], "context": [t.context_group]}
    if t.layout.replicas > 1:
        groups_by_kind |= {"shard": [t.shard_group, t.owner_group], "replica": [t.replica_group]}
    if t.layout.expert > 1:
        groups_by_kind |= {"expert": [t.experts.group], "expert data": [t.find_sharing(True).group]}
    inner = engine.optimizer.optimizer
    groups_by_kind["stage"] = [inner.at.stage_group] if isinstance(inner, PieceOptimizer) else []
    if t.layout.pipeline > 1:
        pipeline_grid = engine.ds.grid
        groups_by_kind["tensor"].append(pipeline_grid.get_slice_parallel_group())
        groups_by_kind["data"].append(pipeline_grid.get_data_parallel_group())
        groups_by_kind["pipeline"] = [pipeline_grid.get_pipe_parallel_group()]
        groups_by_kind["model"] = [pipeline_grid.get_model_parallel_group()]
        groups_by_kind["tied"] = [engine.tied.group] if engine.tied is not None else []
    world_group = dist.group.WORLD
    assert world_group is not None
    kind_by_name = {world_group.group_name: "world"}
    return kind_by_name | {
        group.group_name: kind for kind, held in groups_by_kind.items() for group in held if group is not None
    }
