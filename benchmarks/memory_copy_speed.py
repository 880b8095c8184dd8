"""Measure what copies of snapshots in the memories of two hosts cost, in pairs within one run.

    python -m benchmarks.memory_copy_speed --minutes 4

Two ranks train in this machine's memory, each with a folder of its own for a host, and send their points to each other
over the loopback. Every other point is copied: the steps after it are compared with those after the point before and
the one behind. Beside that: the processor time of the copying threads, and the bytes, against the formula.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.costs import estimate
from benchmarks.ranks import launch
from megastable.config.tree import RunConfig
from megastable.data.manifest import TokenizerInfo, adopt
from megastable.data.shards import ShardWriter

INTERVAL = 10  # steps between two points
VOCABULARY = 8000


@dataclass
class Measured:
    """Of a rank. blocks: seconds of the steps after each point; copied: whether that was; cpu: seconds of the threads,
    took: from begin to end, for each copy; size: bytes of its weights and moments by the formula; sent: bytes of each
    copy."""

    blocks: list[float] = field(default_factory=list)
    copied: list[bool] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    size: int = 0


def write_corpus(folder: Path) -> None:
    random = np.random.default_rng(0)
    with ShardWriter(folder / "part-0", VOCABULARY) as writer:
        while writer.tokens < 4_000_000:
            writer.add_document(np.append(random.integers(1, 400, 500), 0))
    tokenizer = TokenizerInfo(
        file="tokenizer.model", kind="sentencepiece", xxh3="0" * 32, vocab_size=VOCABULARY, eod=0
    )
    adopt(folder, tokenizer, 0.05).save(folder)


def recipe(folder: Path, steps: int, samples: int, bandwidth: float) -> RunConfig:
    copies = {"mode": "always", "folder": "$MEMORY", "bandwidth": bandwidth}
    return RunConfig.model_validate({
        "run": {"dir": folder / "run"}, "data": {"corpora": [{"path": folder / "corpus"}]},
        "model": {"layers": 6, "hidden": 384, "heads": 6, "kv_heads": 6, "ffn": 1024, "sequence_length": 256},
        "train": {"steps": steps, "global_batch": samples, "micro_batch": samples // 2, "eval_interval": 0,
                  "eval_samples": samples},
        "checkpoint": {"interval": 0, "at_end": False},
        "stability": {"snapshots": {"interval": INTERVAL, "copies": copies}, "signs": {"enabled": False},
                      "trends": {"enabled": False}},
        "logging": {"trackers": [], "peak_tflops": 1.0, "interval": 1000},
    })  # fmt: skip


def measure(given: tuple[RunConfig, str]) -> Measured:
    """Train on this rank, with a stopwatch in the loop's calls of the copies."""
    import torch.distributed as dist

    from megastable.train import train
    from megastable.training.memory_copies import MemoryCopies, part_size

    config, folder = given
    found, rank = Measured(), dist.get_rank()
    os.environ["MEMORY"] = f"{folder}/host-{rank}"
    os.makedirs(os.environ["MEMORY"], exist_ok=True)
    wanted, copy, heard = MemoryCopies.wanted, MemoryCopies._copy, MemoryCopies.heard
    times: list[float] = []

    def every_other(self: Any, step: int) -> bool:
        ready = wanted(self, step)
        if self._ring.steps[-1] != step or step < 2 * INTERVAL:
            return False
        if len(times) == INTERVAL:
            found.blocks.append(sum(times))
            found.copied.append(bool(step // INTERVAL % 2))
        times.clear()
        found.size = part_size(self._engine.flat_state())
        return ready and step // INTERVAL % 2 == 0

    def timed(self: Any, job: Any) -> None:
        before, cpu, begun = self.sent, time.thread_time(), time.perf_counter()
        copy(self, job)
        found.cpu.append(time.thread_time() - cpu)
        found.took.append(time.perf_counter() - begun)
        found.sent.append(self.sent - before)

    last = [time.perf_counter()]

    def stepped(self: Any, sums: Any, step: int) -> None:
        now = time.perf_counter()
        times.append(now - last[0])
        last[0] = now
        heard(self, sums, step)

    MemoryCopies.wanted, MemoryCopies._copy, MemoryCopies.heard = every_other, timed, stepped  # type: ignore[method-assign]
    train(config, Path("recipe.yaml"))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--samples", type=int, default=8, help="of a step, of 256 tokens")
    parser.add_argument("--bandwidth", type=float, default=0.25, help="GB/s of a rank")
    parser.add_argument("--minutes", type=float, default=10.0, help="at most")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        (Path(folder) / "corpus").mkdir()
        write_corpus(Path(folder) / "corpus")
        config = recipe(Path(folder), args.steps, args.samples, args.bandwidth)
        ranks: list[Measured] = launch(2, measure, (config, folder), 60 * args.minutes)
    tell(ranks)


def tell(ranks: list[Measured]) -> None:
    one = ranks[0]
    # A copied block between two that are not: what drifts slowly cancels.
    rows = [
        (one.blocks[i], (one.blocks[i - 1] + one.blocks[i + 1]) / 2)
        for i in range(1, len(one.blocks) - 1) if one.copied[i]
    ]  # fmt: skip
    on, off = (np.array(column) for column in zip(*rows, strict=True))
    cost = estimate([(on / off - 1, 1.0)], 100)
    step = 1000 * float(np.median(off)) / INTERVAL
    print(f"step {step:.0f} ms; with a copy every {INTERVAL} steps {cost.median:+.2f} % "
          f"(95%: {cost.low:+.2f} to {cost.high:+.2f}; {len(rows)} pairs)")  # fmt: skip
    for rank, of in enumerate(ranks):
        took, cpu, sent = statistics.median(of.took), statistics.median(of.cpu), statistics.median(of.sent)
        more = 100 * (sent / of.size - 1)
        print(
            f"rank {rank}: {of.size:,} bytes by the formula, {sent:,.0f} sent, {more:+.2f} %; in {took:.2f} s"
        )
        print(f"        {cpu:.3f} s of processor in the copying thread, {1e9 * cpu / sent:.2f} s a GB")


if __name__ == "__main__":
    main(sys.argv[1:])
