"""Describe this machine as a cluster of one CPU, by measurement, and compare measured steps with the prediction.

    OMP_NUM_THREADS=1 python -m benchmarks.local_plan            # a table in Markdown
    cluster = measured_cpu(config)                               # for `time.step_time`

It measures the parts of a step at the model's sizes: matrix products forward and backward, the core of
attention, memory traffic (SwiGLU for blocks, long sums for the update), and the minimum time of an operation.
Seconds are CPU time of this process (`time.process_time`), as wall time on a shared machine includes others' work.
With one thread on an idle machine both are the same.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megastable.base.errors import user_errors
from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.engine.kernel_choice import choose
from megastable.model.attention_scores import AttentionScores
from megastable.model.cores import CORES
from megastable.model.kernels import DTYPES
from megastable.model.mlp import activation_of
from megastable.parallel.layout import Layout
from megastable.plan import work
from megastable.plan.cluster import ClusterConfig, Efficiency, Link, Peak
from megastable.plan.time import StepTime, step_time

CPU = torch.device("cpu")
LEAST = 0.05  # seconds of one measurement
RUNS = 5  # the median counts


def seconds_of(run: Callable[[], Any]) -> float:
    """CPU seconds per call: the median of several measurements, after a warm-up."""
    run()
    begun = time.process_time()
    run()
    times = max(1, round(LEAST / max(time.process_time() - begun, 1e-7)))
    found = []
    for _ in range(RUNS):
        begun = time.process_time()
        for _ in range(times):
            run()
        found.append((time.process_time() - begun) / times)
    return statistics.median(found)


def measured_cpu(config: RunConfig) -> ClusterConfig:
    """This machine's speed at the sizes of `config`, whose model.vocab_size must be known: as peaks with an efficiency
    of 1."""
    z, dtype = work.sizes(config), DTYPES[config.precision.kind]
    tflops, rates = _products(z, dtype), (_memory(config, z, dtype), _stream())
    share = min(1.0, _attention(config, z, dtype) / tflops)
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    least = torch.ones(8, dtype=dtype)
    return ClusterConfig(
        name="this machine's CPU",
        device="cpu",
        gpus_per_host=1,
        memory_gib=size,
        reserve_gib=0,
        tflops=Peak(bf16=tflops, fp32=tflops),
        memory_tb_per_second=max(rates),
        host=Link(gb_per_second=1, latency_us=50),
        network=Link(gb_per_second=0.1, latency_us=200),
        host_memory_gib=size,
        dollars_per_gpu_hour=0,
        efficiency=Efficiency(
            products=1, products_fp8=1, sustained=1, half_size=0, attention=share,
            memory=rates[0] / max(rates), streams=rates[1] / max(rates), host=1, network=1, overlap=1,
        ),
        kernel_us=seconds_of(lambda: least + least) * 1e6,
    )  # fmt: skip


def _products(z: work.WorkSizes, dtype: torch.dtype) -> float:
    """TFLOP/s of a block's linear layers and the head, forward and backward together."""
    flops = seconds = 0.0
    for k, n in [*work.linears(z).values(), (z.hidden, z.vocabulary)]:
        x, w, g = (torch.randn(int(a), int(b)).to(dtype) for a, b in ((z.tokens, k), (n, k), (z.tokens, n)))
        seconds += sum(seconds_of(partial(torch.matmul, *pair)) for pair in ((x, w.t()), (g, w), (g.t(), x)))
        flops += 3 * 2 * z.tokens * k * n
    return flops / seconds / 1e12


def _attention(config: RunConfig, z: work.WorkSizes, dtype: torch.dtype) -> float:
    """TFLOP/s of causal attention, forward and backward, counted as in `work.block`."""
    m, b = config.model, config.train.micro_batch
    core = CORES[choose(config, CPU).attention]
    scores = AttentionScores.of(m, 0)._replace(window=None)  # `work.attended` knows the windows

    def drawn(heads: int) -> Tensor:
        return (
            torch.randn(m.sequence_length, b, heads, m.head_width)
            .to(dtype)
            .permute(1, 2, 0, 3)
            .requires_grad_()
        )

    q, k, v = drawn(m.heads), drawn(m.key_value_heads), drawn(m.key_value_heads)
    g = drawn(m.heads).detach()
    documents = core.prepare(None, scores, m.sequence_length, CPU)
    seconds = seconds_of(lambda: core.run(q, k, v, documents, scores).backward(g))
    return 4 * 3.5 * z.attended / seconds / 1e12


def _memory(config: RunConfig, z: work.WorkSizes, dtype: torch.dtype) -> float:
    """TB/s of reads and writes: SwiGLU with its gradient, as in a block."""
    both = torch.randn(int(z.tokens), int(2 * z.ffn)).to(dtype).requires_grad_()
    g = torch.randn(int(z.tokens), int(z.ffn)).to(dtype)
    run = activation_of(config.model)
    run = torch.compile(run) if choose(config, CPU).compile else run
    passes = 8 if choose(config, CPU).compile else 15
    return passes * z.tokens * z.ffn * z.e / seconds_of(lambda: run(both).backward(g)) / 1e12


def _stream() -> float:
    """TB/s of fp32 vectors that exceed every cache."""
    x, y = torch.zeros(2**24), torch.ones(2**24)
    return 12 * x.numel() / seconds_of(lambda: x.add_(y)) / 1e12


def measured_step(config: RunConfig, rounds: int) -> list[float]:
    """CPU seconds of `rounds` steps by the engine, after three warm-up steps, on random tokens. The config is complete,
    and the process group, of one rank, already exists."""
    from benchmarks.peers import OURS, PEERS, Task
    from benchmarks.train_speed import random_batches

    contestant = PEERS[OURS].build(Task(config, CPU, random_batches(config, CPU)))
    found = []
    try:
        for number in range(3 + rounds):
            begun = time.process_time()
            contestant.step()
            if number >= 3:
                found.append(time.process_time() - begun)
    finally:
        contestant.close()
        del contestant
        torch._dynamo.reset()
        gc.collect()
    return found


CASES: Sequence[tuple[str, list[str]]] = (
    ("quickstart", []),
    ("quickstart", ["train.micro_batch=1", "train.global_batch=4"]),
    ("quickstart", ["train.micro_batch=8", "train.global_batch=16"]),
    ("quickstart", ["parallel.recompute=full"]),
    ("quickstart", ["precision.kind=fp32"]),
    ("quickstart", ["model.hidden=512", "model.heads=8", "model.kv_heads=4", "model.ffn=1536"]),
    (
        "quickstart",
        ["model.layers=8", "model.sequence_length=1024", "train.micro_batch=1", "train.global_batch=4"],
    ),
    ("125m", ["train.micro_batch=1", "train.global_batch=1", "model.sequence_length=512"]),
)


def compared(cases: Sequence[tuple[str, list[str]]], rounds: int) -> str:
    """Markdown table: predicted beside measured. cases: a recipe, and overrides."""
    from benchmarks.train_speed import resolve

    rows = [
        "| recipe | measured, s (quartiles) | predicted, s | error | predicted parts |",
        "|---|---|---|---|---|",
    ]
    errors = []
    for name, overrides in cases:
        config, _ = resolve(recipe.load(f"launch/recipes/{name}.yaml", overrides))
        # Before and after, as other load on the machine may change.
        before = step_time(config, Layout(), measured_cpu(config))
        found = measured_step(config, rounds)
        after = step_time(config, Layout(), measured_cpu(config))
        predicted, measured = (before.seconds + after.seconds) / 2, statistics.median(found)
        low, _, high = statistics.quantiles(found, n=4)
        errors.append(predicted / measured - 1)
        rows.append(
            f"| {' '.join([name, *overrides])} | {measured:.3f} ({low:.3f}-{high:.3f}) | {predicted:.3f} | "
            f"{errors[-1]:+.0%} | {_parts(after)} |"
        )
    sizes = [abs(e) for e in errors]
    return (
        "\n".join(rows)
        + f"\n\nError: {statistics.median(sizes):.0%} in the median, at most {max(sizes):.0%}."
    )


def _parts(found: StepTime) -> str:
    parts = sorted(found.parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {seconds / found.seconds:.0%}" for kind, seconds in parts if seconds > 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.local_plan", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="steps that are measured of each case")
    parser.add_argument(
        "--only", type=int, nargs="*", help=f"of the cases 0 to {len(CASES) - 1}; default: all"
    )
    args = parser.parse_args()
    cases = [CASES[i] for i in args.only or range(len(CASES)) if i < len(CASES)]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from megastable.engine import distributed

    with user_errors():
        distributed.start_distributed(1800)
        try:
            print(compared(cases, args.rounds))
        finally:
            distributed.stop_distributed()


if __name__ == "__main__":
    main()
