"""The predicted step: sums by hand, properties that any machine has, and runs that others have published."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.config.tree import RunConfig
from megastable.model.sizes import flops_per_token
from megastable.parallel.layout import Layout
from megastable_tools.plan import partition, published, volume
from megastable_tools.plan.cluster import ClusterConfig, load_cluster
from megastable_tools.plan.links import find_crossing
from megastable_tools.plan.time import BALLOT, KINDS, Others, StepTime, step_time

H100 = load_cluster("launch/clusters/h100.yaml")


def config(**parts: Any) -> RunConfig:
    model = {
        "layers": 16, "hidden": 1024, "heads": 16, "ffn": 2816, "sequence_length": 2048, "vocab_size": 32000,
    }  # fmt: skip
    tree = {
        "model": model | parts.pop("model", {}),
        "train": {"global_batch": 64, "micro_batch": 1} | parts.pop("train", {}),
        "precision": parts.pop("precision", {}), "parallel": parts,
    }  # fmt: skip
    return RunConfig.model_validate(tree)


def timed(c: RunConfig, data: int = 1, cluster: ClusterConfig = H100, **options: Any) -> StepTime:
    p = c.parallel
    return step_time(c, Layout(p.tensor, p.pipeline, data, p.context), cluster, **options)


def free(**changes: Any) -> ClusterConfig:
    """A machine on which only products and attention take time: at 1 PFLOP/s and half of it."""
    none = {"gb_per_second": 1e12, "latency_us": 0}
    efficiency = {
        "products": 1, "products_fp8": 1, "sustained": 1, "half_size": 0, "attention": 0.5, "half_head": 0, "memory": 1,
        "host": 1, "network": 1, "overlap": 1,
    }  # fmt: skip
    tree = H100.model_dump() | {
        "tflops": {"bf16": 1000, "fp8": 2000}, "memory_tb_per_second": 1e9, "host": none, "network": none,
        "efficiency": efficiency, "kernel_us": 0,
    }  # fmt: skip
    return ClusterConfig.model_validate(tree | changes)


# Sums by hand


def test_step_time_counts_the_models_flops() -> None:
    """6 FLOPs a weight and token at 1 PFLOP/s; attention: 7 products of s x s, of which half, at half of it."""
    c = config()
    found = timed(c, cluster=free())
    m, tokens = c.model, 64 * 2048
    products = flops_per_token(m, False) - 12 * m.layers * m.hidden * m.sequence_length
    assert found.parts["products"] == pytest.approx(tokens * products / 1e15)
    attention = 14 * m.layers * m.hidden * m.sequence_length / 2
    assert found.parts["attention"] == pytest.approx(tokens * attention / 0.5e15)
    assert found.seconds == pytest.approx(found.parts["products"] + found.parts["attention"], rel=1e-3)


@pytest.mark.parametrize(
    ("width", "published"),
    # Forward: cuDNN, causal, 2,048 tokens, H100: arXiv:2407.08608, figure 5. Backward: see `Efficiency`.
    [(64, (334, 334)), (128, (484, 365)), (256, None)],
)
def test_attention_of_narrow_heads_is_slower(width: int, published: tuple[float, float] | None) -> None:
    """By as much as was published; wider heads than 128 are no faster."""
    found = timed(config(model={"heads": 1024 // width}))
    rate = 64 * 2048 * 14 * 16 * 1024 * 2048 / 2 / found.parts["attention"] / 1e12
    forward, backward = published or (484, 365)
    assert rate == pytest.approx(3.5 / (1 / forward + 2.5 / backward), rel=0.02)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_weight_is_cast_once_a_step(zero: int) -> None:
    """Four micro-batches of one step, or one: under ZeRO 3 each of them casts it."""
    n = 16 * sum(sizes for sizes in (1024 * 3072, 1024 * 1024, 2 * 1024 * 2816, 1024 * 2816))
    one, four = (
        timed(
            config(zero=zero, precision={"fp8": "current"}, train={"global_batch": batch}),
            cluster=H100.model_copy(update={"kernel_us": 0.0}),
        ).parts["casts"]
        for batch in (1, 4)
    )
    assert 4 * one - four == pytest.approx(0 if zero == 3 else 3 * 6 * n / (3.35e12 * 0.85))


@pytest.mark.parametrize("batches", [64, 4, 2])
def test_zero_bubble_fills_it_with_weight_gradients(batches: int) -> None:
    """By ZB-H1 the other stages' weight gradients are computed while the pipe drains, and as many that are left from
    its start, when every stage but the first leaves some; two micro-batches leave one."""
    c = config(pipeline=4, model={"layers": 6, "vocab_size": 1000})
    c = c.model_copy(update={"train": c.train.model_copy(update={"global_batch": batches})})
    split = c.model_copy(update={"parallel": c.parallel.model_copy(update={"schedule": "zero_bubble"})})
    cluster = free()
    plain, filled = timed(c, cluster=cluster), timed(split, cluster=cluster)
    block_weights = 1024 * (2 * 1024 + 2 * 1024 + 3 * 2816)
    blocks = [partition.stage_of(c, partition.stage_bounds(c), stage).blocks for stage in range(4)]
    assert sorted(blocks) == [1, 1, 2, 2]  # a stage of two is the slowest
    weight_pass = 2 * 2048 * block_weights / 1e15 * (sum(blocks) - 2)
    left = 1 if batches >= 4 else 1 / 3
    assert plain.parts["bubble"] - filled.parts["bubble"] == pytest.approx(weight_pass * (1 + left))
    assert plain.parts["products"] == filled.parts["products"]


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("batches", [64, 4, 6])
def test_model_chunks_divide_the_bubble(batches: int, chunks: int) -> None:
    """But for micro-batches missing from the last round of the stages, each of which costs 1 - 1 / v of one."""
    shape = {"pipeline": 4, "model": {"layers": 32, "vocab_size": 1000}, "train": {"global_batch": batches}}
    plain, cut = (
        timed(config(**shape), cluster=free()),
        timed(config(**shape, model_chunks=chunks), cluster=free()),
    )
    slot = plain.parts["products"] / batches + plain.parts["attention"] / batches
    missing = 2 if batches == 6 else 0
    expected = plain.parts["bubble"] / chunks + missing * (1 - 1 / chunks) * slot
    assert cut.parts["bubble"] == pytest.approx(expected)
    assert plain.parts["products"] == pytest.approx(cut.parts["products"])


def test_a_round_of_model_chunks_waits_for_the_slowest() -> None:
    """Of 12 blocks on 4 stages of two chunks each round has a chunk of two, and every stage has three blocks in all."""
    shape = {"pipeline": 4, "model": {"layers": 12, "vocab_size": 1000}, "model_chunks": 2}
    c = config(**shape)
    cut = partition.stage_bounds(c)
    sizes = [list(map(len, partition.list_chunk_blocks(cut, stage, 2))) for stage in range(4)]
    slowest = sum(max(chunk_sizes) for chunk_sizes in zip(*sizes, strict=True))
    most = max(map(sum, sizes))
    assert (slowest, most) == (4, 3)
    found = timed(c, cluster=free())
    slot = (found.parts["products"] + found.parts["attention"]) / 64
    drained = sum(map(sum, sizes)) / most - 1
    waits = 64 * (slowest / most - 1)
    assert found.parts["bubble"] == pytest.approx(
        slot * (drained / 2 + waits), rel=0.1
    )  # the head has a price


def test_messages_of_model_chunks_are_hidden_but_for_the_ends() -> None:
    """A step waits for 2 (p v - 1) of them, however many micro-batches it has, and with segments or without."""
    one = 2048 * 1024 * 2 / 1000e9
    for batches, apart in ((64, False), (16, False), (64, True)):
        c = config(pipeline=4, model={"layers": 16}, train={"global_batch": batches}, model_chunks=2)
        c = c.model_copy(update={"data": c.data.model_copy(update={"keep_documents_apart": apart})})
        found = timed(c, cluster=free(host={"gb_per_second": 1000, "latency_us": 0}))
        assert found.parts["pipeline"] == pytest.approx(2 * (4 * 2 - 1) * one, rel=0.01)


# Communication


def test_a_ring_hides_its_messages_behind_the_products_of_all_rounds_but_the_last() -> None:
    ring = {"context": 4, "context_by": "ring"}
    free_seconds = timed(config(**ring), 4, cluster=free()).parts["attention"]

    def exposed(rate: float) -> tuple[float, float]:
        """Of a step with this link inside a host, in GB/s: seconds exposed, and of all messages."""
        link = free().host.model_copy(update={"gb_per_second": rate, "latency_us": 0})
        found = timed(config(**ring), 4, cluster=free().model_copy(update={"host": link}))
        return found.parts["context"], next(t.seconds for t in found.traffic if t.group == "context")

    slow, moving = exposed(0.1)
    assert moving > free_seconds and slow == pytest.approx(moving - free_seconds * 3 / 4)
    assert exposed(1e4)[0] == 0


def test_a_ring_between_hosts_has_one_card() -> None:
    link = find_crossing("context", Layout(tensor=1, data=16, context=16), H100)
    assert (link.hosts, link.together) == (2, 8)
    assert link.count_seconds("send", 1e9, 16) == 1e9 / link.own > link.count_seconds("all-gather", 1e9, 16)


LATE = {"pipeline": 2, "schedule": "zero_bubble"}


@pytest.mark.parametrize(
    ("given", "alone"),
    [
        # Gathers and scatters of a block with nothing beside them, forward and backward; an all-reduce is both.
        ({}, 4),
        ({"sequence": True}, 4 + 2),
        ({"sequence": True, "keep_gathered": True, "tensor_overlap": 4}, (4 + 2) / 4),
        ({"sequence": True, "tensor_overlap": 4}, (4 + 2) / 4),
        ({"sequence": True, "tensor_overlap": 4, "recompute": "full"}, (4 + 3 + 2) / 4),
        # Sums have no product of a weight beside them, and what is gathered again has one.
        (LATE, 4 + 4),
        (LATE | {"sequence": True}, 4 + 4),
        (LATE | {"sequence": True, "tensor_overlap": 4}, (4 + 4) / 4),
    ],
)
def test_tensor_parallelism_is_hidden_by_the_products_beside_it(given: dict[str, Any], alone: float) -> None:
    """With products that take longer than any message, and with products that take no time."""
    link = {"host": {"gb_per_second": 1, "latency_us": 0}}
    slow, fast = free(tflops={"bf16": 1e-3}, **link), free(tflops={"bf16": 1e9}, **link)
    c, half = config(tensor=2, model={"vocab_size": 1000}, **given), 2048 * 1024 * 2 / 2 / 1e9
    stages = c.parallel.pipeline
    all_of_block = 4 + 4 + 2 * c.parallel.gathers_again + 3 * (c.parallel.recompute == "full")
    for cluster, of_block in ((slow, alone), (fast, all_of_block)):
        seconds = 64 * half * (16 * of_block + 4) / stages  # embedding and head
        assert timed(c, cluster=cluster).parts["tensor"] == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    "given", [{"zero": 1}, {"zero": 2}, {"pipeline": 2}, {"pipeline": 2, "model_chunks": 2}]
)
def test_weights_are_hidden_by_the_first_forward_pass_but_for_the_first_buckets(
    given: dict[str, Any],
) -> None:
    """With products that take longer than any message, and with products that take no time."""
    link = {"host": {"gb_per_second": 1, "latency_us": 0}}
    slow, fast = free(tflops={"bf16": 1e-3}, **link), free(tflops={"bf16": 1e9}, **link)
    c, data, settings = config(**given), 8, {"reduce_bucket_size": 1 << 20}
    held = partition.stage_of(c, partition.stage_bounds(c), 0)
    groups = volume.cut_weights(c, data, held, settings)
    first, size = (sum(ends) for ends in zip(*((g[0].stop, g[-1].stop) for g in groups), strict=True))
    assert len(groups[0]) > 9
    # Gathered, and before that, of groups with several buckets, given away by all owners at once.
    exchanged = sum(g[-1].stop for g in groups if len(g) > 1)
    moving = 2 * (size + exchanged / data) * (data - 1) / data / 1e9
    for cluster, exposed in ((slow, first / size), (fast, 1)):
        lines = timed(c, data, cluster, zero=settings).lines
        seconds = sum(line.seconds for line in lines if line.what == "weights")
        assert seconds == pytest.approx(moving * exposed, rel=1e-3)


def test_others_gather_weights_without_an_exchange() -> None:
    """Their parts are even; ours come from the ranks that have updated a bucket: all of a rank's part once more."""
    c, settings = config(), {"reduce_bucket_size": 1 << 20}
    ours, theirs = (
        {traffic.group: traffic.bytes for traffic in timed(c, 8, zero=settings, others=others).traffic}[
            "data"
        ]
        for others in (Others(), Others(fused=True))
    )
    size = sum(sum(group.sizes) for group in partition.parameter_groups(c, partition.Stage(16, True, True)))
    assert ours - theirs == pytest.approx(2 * size * 7 / 8 / 8, rel=0.01)


LAYOUTS = [
    ({"tensor": 8, "sequence": True}, 4),
    ({"tensor": 2, "pipeline": 2, "recompute": "full"}, 4),
    ({"zero": 3}, 16),
    ({"zero": 2, "tensor": 4}, 2),
    ({"context": 4}, 8),
    ({"context": 4, "context_by": "ring"}, 8),
]


@pytest.mark.parametrize(("parallel", "data"), LAYOUTS)
def test_step_time_sends_the_bytes_of_the_formulas(parallel: dict[str, Any], data: int) -> None:
    c = config(**parallel)
    found = timed(c, data)
    members, cut = volume.count_members(c, data), partition.stage_bounds(c)
    sums = []
    for stage in range(c.parallel.pipeline):
        each = dict.fromkeys(members, 0.0)
        for term in volume.list_step_terms(c, data, stage, cut, "chunked", ballot=BALLOT):
            if members[term.group] > 1:
                each[term.group] += volume.count_sent_bytes(term, members[term.group])
        sums.append({group: sent for group, sent in each.items() if sent})
    assert {t.group: t.bytes for t in found.traffic if t.bytes} in sums


@pytest.mark.parametrize(
    ("layout", "group", "link", "cards"),
    [
        (Layout(tensor=8, data=4), "tensor", "host", 0),
        (Layout(tensor=16, data=4), "tensor", "network", 8),
        (Layout(tensor=3, data=8), "tensor", "network", 1),  # ranks 6, 7 and 8 are on two hosts
        (Layout(tensor=1, data=8), "data", "host", 0),
        (Layout(tensor=1, data=64), "data", "network", 8),
        (Layout(tensor=4, data=64), "data", "network", 2),
        (Layout(tensor=8, data=64), "data", "network", 1),
        (Layout(tensor=2, data=8, context=4), "context", "host", 0),
        (Layout(tensor=8, data=8, context=4), "context", "network", 1),
        (Layout(tensor=8, pipeline=4, data=2), "pipeline", "network", 1),
        (Layout(tensor=2, pipeline=4, data=1), "pipeline", "host", 0),
        (Layout(tensor=2, pipeline=8, data=1), "pipeline", "network", 1),  # stages 3 and 4
    ],
)
def test_crossing_follows_from_the_numbers_of_the_ranks(
    layout: Layout, group: str, link: str, cards: int
) -> None:
    found = find_crossing(group, layout, H100)
    assert found.name == link
    wanted = min(450 * 0.80, cards * 50 * 0.85) if cards else 450 * 0.80
    assert found.rate == pytest.approx(wanted * 1e9)


# Properties


@given(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "selective", "full"]), st.booleans(),
)  # fmt: skip
def test_step_time_adds_up(tensor: int, pipeline: int, data: int, recompute: str, fp8: bool) -> None:
    c = config(tensor=tensor, pipeline=pipeline, recompute=recompute, precision={"fp8": fp8})
    found = timed(c, data)
    assert math.fsum(line.seconds for line in found.lines) == pytest.approx(found.seconds)
    assert math.fsum(found.parts.values()) == pytest.approx(found.seconds)
    assert all(line.because and line.seconds > 0 and line.kind in KINDS for line in found.lines)
    assert (found.parts["bubble"] > 0) == (pipeline > 1)
    assert (found.parts["tensor"] > 0) == (tensor > 1)
    assert (found.parts["casts"] > 0) == fp8
    assert 0 < found.mfu_causal < found.mfu < (1 if not fp8 else 2)


# What cannot be predicted


@pytest.mark.parametrize(
    ("c", "layout", "cluster", "said"),
    [
        (config(tensor=2), Layout(1, 1, 8), "h100", "the layout"),
        (config(), Layout(data=48), "h100", "not a multiple of train.micro_batch=1 x 48"),
        (config(model={"vocab_size": None}), Layout(), "h100", "set model.vocab_size"),
        (config(precision={"fp8": True}), Layout(), "a100", "does not compute in it"),
        (config(precision={"fp8": {"backend": "emulated"}}), Layout(), "h100", "slower than no FP8"),
    ],
)
def test_step_time_refuses_what_cannot_be_predicted(
    c: RunConfig, layout: Layout, cluster: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        step_time(c, layout, load_cluster(f"launch/clusters/{cluster}.yaml"))


# Runs of others

# Of publications that say all that matters, and of the others; docs/planning.md has the table. The largest errors are
# those of MPT, trained in 2023 by older kernels than those that the efficiencies are of.
ERROR, OPEN_ERROR = 0.22, 0.20


@pytest.mark.parametrize("run", published.read_runs(), ids=lambda run: f"{run.name}-{run.gpus}")
def test_step_time_of_published_runs(run: published.Published) -> None:
    error = run.predict_step().seconds / run.measured - 1
    assert abs(error) < (ERROR if run.sure else OPEN_ERROR)


def test_published_runs_on_average() -> None:
    errors = sorted(abs(run.predict_step().seconds / run.measured - 1) for run in published.read_runs())
    assert errors[len(errors) // 2] < 0.10
    assert "median" in published.make_published_table(published.read_runs()[:2])


ALONG = sorted(Path("launch/clusters").glob("*.yaml"))


@pytest.mark.parametrize("path", ALONG, ids=lambda path: path.stem)
def test_those_that_come_along_are_plausible(path: Path) -> None:
    c = load_cluster(path)
    assert c.reserve_gib < c.memory_gib
    assert c.host.gb_per_second > c.network.gb_per_second
    assert c.host.latency_us < c.network.latency_us
    # Computing is what a GPU is for: it does more than 50 operations for each byte that it reads, or a CPU some.
    intensity = c.tflops.bf16 / c.memory_tb_per_second
    assert intensity > (50 if c.device == "gpu" else 1)
    assert c.tflops.fp8 is None or c.tflops.fp8 == pytest.approx(2 * c.tflops.bf16, rel=0.01)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("memory_gib", -1, "memory_gib=-1"),
        ("memory_gib", True, "memory_gib=true"),
        ("reserve_gib", 80, "reserve_gib=80 leaves nothing of memory_gib=79.1"),
        ("efficiency", {"products": 1.2}, "efficiency.products=1.2"),
        ("efficiency", {"products": 0.8}, "efficiency.sustained: missing"),
        ("host", {"gb_per_second": 450}, "host.latency_us: missing"),
        ("gpus", 8, "gpus: unknown key"),
        ("dollars_per_gpu_hour", "cheap", "dollars_per_gpu_hour='cheap'"),
    ],
)
def test_mistakes_are_told_with_file_and_key(tmp_path: Path, key: str, value: Any, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(H100.model_dump() | {key: value}))
    with pytest.raises(ConfigError) as told:
        load_cluster(path)
    assert said in str(told.value)
    assert "mine.yaml" in str(told.value)
