"""Shared parts of the benchmarks: random data, a stopwatch, and a description of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megastable.data.manifest import TokenizerInfo, adopt
from megastable.data.shards import ShardWriter


def random_corpus(folder: Path, vocabulary: int, tokens: int) -> None:
    """A corpus of at least `tokens` random tokens, in documents of 500 on average."""
    folder.mkdir(parents=True)
    drawn = np.random.default_rng(0)
    with ShardWriter(folder / "part-0", vocabulary) as writer:
        while writer.tokens < tokens:
            writer.add_document(np.append(drawn.integers(1, vocabulary, drawn.geometric(1 / 500)), 0))
    info = TokenizerInfo(file="none", kind="sentencepiece", xxh3="0" * 32, vocab_size=vocabulary, eod=0)
    adopt(folder, info, validation=0.0).save(folder)


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and software of a measurement."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "kind": device.type,
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": importlib.metadata.version("deepspeed"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Stopwatch:
    """Seconds by name, added up. On a GPU it waits for `device` before and after."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        self.synchronise()
        begin = time.perf_counter()
        yield
        self.synchronise()
        self.seconds[name] += time.perf_counter() - begin

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, and its time is added to `name`."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.time(name):
                return call(*args, **kwargs)

        return wrapped
