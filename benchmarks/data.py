"""Measure the cost of a scan: tokens per second of one core, and memory, for two sizes of a corpus.

    cost = scan_cost(Path("data/stdlib"))

The shards repeat the real documents of a corpus. Every measurement is a separate process with one thread:
the seconds are its CPU time, independent of other load, and its peak memory includes nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peak_memory import peak_mib
from megastable.base.errors import MegastableError
from megastable.base.installation import ROOT
from megastable.data.shards import ShardWriter
from megastable.forensics import document_map
from megastable.forensics.scanning.scan import scan_shards
from megastable.forensics.shard_set import Shelf, open_shelf

SIZES = (20_000_000, 80_000_000)  # tokens


@dataclass(frozen=True)
class Run:
    """One scan by one process. seconds: wall clock; cpu_seconds: CPU time; peak_mib: memory."""

    tokens: int
    documents: int
    seconds: float
    cpu_seconds: float
    peak_mib: float

    @property
    def tokens_per_second(self) -> float:
        """Of one core."""
        return self.tokens / self.cpu_seconds


@dataclass(frozen=True)
class ScanCost:
    """learning: first scans of each size, which learn the baseline; scanning: with a known baseline.

    growth, memory: time per token of the largest size over the smallest, and the same for memory (1: linear time,
    constant memory).
    """

    learning: list[Run]
    scanning: list[Run]

    @property
    def tokens_per_second(self) -> float:
        return self.scanning[-1].tokens_per_second

    @property
    def growth(self) -> float:
        return self.scanning[0].tokens_per_second / self.scanning[-1].tokens_per_second

    @property
    def memory(self) -> float:
        return self.scanning[-1].peak_mib / self.scanning[0].peak_mib

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratios = {"tokens_per_second": self.tokens_per_second, "growth": self.growth, "memory": self.memory}
        return ratios | {name: [asdict(run) for run in runs] for name, runs in vars(self).items()}


def scan_cost(
    corpus: Path,
    sizes: Sequence[int] = SIZES,
    near: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> ScanCost:
    """Scan shards of about `tokens` tokens each, made of the documents of `corpus`; needs 2 or 4 bytes of disk per
    token.

    Raises DataError for a corpus that cannot be read, MegastableError if a process fails.
    """
    shelf = open_shelf([corpus])
    learning, scanning = [], []
    with tempfile.TemporaryDirectory(prefix="megastable-bench-") as place:
        for size in sorted(sizes):
            folder = Path(place) / str(size)
            folder.mkdir()
            say(f"{size:,} tokens")
            _repeat(shelf, folder / "repeated", size)
            learning.append(_measured(folder, shelf, near))
            # The baseline stays, the rows go.
            (folder / "scan" / document_map.RESULT).unlink()
            for name in (document_map.PARTS, document_map.NEAR):
                shutil.rmtree(folder / "scan" / name)
                (folder / "scan" / name).mkdir()
            scanning.append(_measured(folder, shelf, near))
            shutil.rmtree(folder)
    return ScanCost(learning, scanning)


def _repeat(shelf: Shelf, prefix: Path, size: int) -> None:
    """A shard of at least `size` tokens: all documents of the shelf, repeated."""
    vocabulary = shelf.vocab_size or (1 << 16 if shelf.shards[0].dtype == "uint16" else 1 << 31)
    with ShardWriter(prefix, vocabulary) as writer:
        while writer.tokens < size:
            for shard in shelf.shards:
                for document in range(shard.documents):
                    first, end = shard.document_bounds(document)
                    if first < end and writer.tokens < size:
                        writer.add_document(shard.raw(first, end - first))


def _measured(folder: Path, shelf: Shelf, near: bool) -> Run:
    """A scan in a separate process."""
    tokenizer = str(shelf.tokenizer.file) if shelf.tokenizer else ""
    command = [sys.executable, "-m", "benchmarks.data", str(folder), tokenizer, str(int(near))]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | one_thread | {"PYTHONPATH": path}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    if found.returncode:
        raise MegastableError(
            f"a scan of {folder} ended with {found.returncode}: {found.stderr.strip()[-500:]}"
        )
    return Run(**json.loads(found.stdout))


def _child(folder: Path, tokenizer: str, near: bool) -> Run:
    shelf = open_shelf([folder / "repeated"], Path(tokenizer) if tokenizer else None)
    begin, cpu = time.perf_counter(), time.process_time()
    scan = scan_shards(shelf, folder / "scan", near=near, progress=False)
    return Run(
        scan.tokens, scan.documents, time.perf_counter() - begin, time.process_time() - cpu,
        peak_mib(),
    )  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(asdict(_child(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1"))))
