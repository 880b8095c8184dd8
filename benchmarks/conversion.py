"""Measure conversion to and from Hugging Face: time relative to `cp` of the same bytes, and memory.

    python -m benchmarks.conversion /scratch/conversion --size 7b

writes a checkpoint of random weights (without optimizer state) to the new folder, converts it, copies the result
with cp and fsync, converts back, and removes all of it. Input is read from the disk, not from the file cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from benchmarks.common import machine, random_corpus
from megastable.base.errors import user_errors
from megastable.checkpoint import store
from megastable.checkpoint.new_run import write_run
from megastable.checkpoint.plain import find_checkpoint
from megastable.checkpoint.whole import parameters
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.convert.huggingface.export import Dtype, to_hf
from megastable.convert.huggingface.importing import from_hf
from megastable.convert.huggingface.parity import compare

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2},
    "1b": {"layers": 16, "hidden": 2048, "heads": 16, "kv_heads": 8, "ffn": 8192, "tied": True},
    "7b": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008},
}
VOCABULARY = 32_000


@dataclass
class Step:
    """bytes: written; rate: of them, MB/s; anonymous: peak memory without the file cache, in MB."""

    what: str
    seconds: float
    bytes: int
    rate: float
    anonymous: float


class Watch:
    """The peak of anonymous memory of this process (RssAnon of /proc/self/status), in bytes, sampled continuously."""

    def __init__(self) -> None:
        self.most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._end.wait(0.005):
            self.most = max(self.most, anonymous())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0


def measure(folder: Path, size: str, dtype: Dtype, check: bool, say: Callable[[str], None]) -> list[Step]:
    """All steps; `folder` is created, and removed at the end."""
    folder.mkdir(parents=True)
    try:
        return list(_steps(folder, size, dtype, check, say))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _steps(folder: Path, size: str, dtype: Dtype, check: bool, say: Callable[[str], None]) -> Iterator[Step]:
    random_corpus(folder / "corpus", VOCABULARY, 20_000)
    model = {**SIZES[size], "vocab_size": VOCABULARY, "sequence_length": 2048}
    tree = {"model": model, "data": {"corpora": [{"path": str(folder / "corpus")}]}}
    run = RunConfig.model_validate(tree)
    out, back, copy = folder / "out", folder / "back", folder / "copy"
    done: list[Step] = []

    @contextmanager
    def timed(what: str, made: Path) -> Iterator[None]:
        say(what)
        with Watch() as watch:
            begin = time.perf_counter()
            yield
            seconds = time.perf_counter() - begin
        total = bytes_of(made)
        done.append(Step(what, seconds, total, total / 1e6 / seconds, watch.most / 1e6))
        say(
            f"{what}: {seconds:.1f} s, {total / 1e9:.2f} GB, {done[-1].rate:.0f} MB/s, {watch.most / 1e6:.0f} MB"
        )

    with timed("write a checkpoint", folder / "run"):
        checkpoint = write_synthetic(folder / "run", run)
    forget(folder / "run")
    with timed("verify it", folder / "run"):
        find_checkpoint(checkpoint)
    forget(folder / "run")
    if shutil.disk_usage(folder).free > 1.05 * bytes_of(folder / "run"):
        with timed("cp and fsync of the checkpoint", copy):
            copy_synced(folder / "run", copy)
        shutil.rmtree(copy)
    forget(folder / "run")
    with timed(f"to-hf --dtype {dtype} (verify, read, round, write, fsync)", out):
        to_hf(checkpoint, out, dtype=dtype, without_tokenizer=True)
    if check:
        forget(folder)
        with timed("check", out):
            print(compare(checkpoint, out, say).verdict)
    shutil.rmtree(folder / "run")
    forget(out)
    with timed("cp and fsync of what to-hf wrote", copy):
        copy_synced(out, copy)
    shutil.rmtree(copy)
    (folder / "base.yaml").write_text(yaml.safe_dump({**tree, "model": {"sequence_length": 2048}}))
    forget(out)
    with timed("from-hf (read, widen, write, fsync)", back):
        from_hf(out, back, folder / "base.yaml", any_tokenizer=True)
    forget(back)
    shutil.rmtree(out)
    if shutil.disk_usage(folder).free > 1.2 * bytes_of(back):
        with timed("cp and fsync of what from-hf wrote", copy):
            copy_synced(back, copy)
    yield from done


def write_synthetic(out: Path, run: RunConfig) -> Path:
    """A run directory with a checkpoint of random weights, without optimizer state. Memory: one tensor."""
    drawn = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    shapes = {name: described.shape for name, described in parameters(run.model).items()}

    def whole(name: str, kind: str) -> Tensor:
        numel = torch.Size(shapes[name]).numel()
        flat = drawn.repeat(-(-numel // len(drawn)))[:numel]
        return (flat.abs() + 0.5 if len(shapes[name]) == 1 else flat).view(shapes[name])

    layout = store.LayoutState(tensor=1, pipeline=1, data=1, zero=1, precision="bf16")
    state = store.RunState(step=1, order_fingerprint="0" * 64, layout=layout)
    return write_run(out, run, state, whole, optimizer=None, origin={"what": "random weights"})


def copy_synced(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def forget(folder: Path) -> None:
    """Drop the content of a folder from the file cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="must not exist; on the disk to measure")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--check", action="store_true", help="compare logits, too")
    parser.add_argument("--output", type=Path, help="all numbers, and the machine")
    given = parser.parse_args(arguments)
    with user_errors():
        print(f"{ModelConfig(**SIZES[given.size])}\nbefore: {anonymous() / 1e6:.0f} MB of anonymous memory")
        steps = measure(
            given.folder, given.size, given.dtype, given.check, lambda text: print(text, flush=True)
        )
        if given.output is not None:
            told = {"steps": [asdict(step) for step in steps], "machine": machine(torch.device("cpu"))}
            given.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
