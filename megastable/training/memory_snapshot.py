"""Writes a snapshot of a GPU's memory when it runs out, for torch's viewer: https://pytorch.org/memory_viz."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


def snapshot_on_out_of_memory(folder: Path, rank: int, history: int) -> None:
    """From now on, the first allocation that fails in this process writes a snapshot to `folder`. history: allocations
    to keep with their stacks. Does nothing without a GPU; does not raise."""
    if not torch.cuda.is_available():
        return
    try:
        if history:
            torch.cuda.memory._record_memory_history(max_entries=history, stacks="python")
        writer = SnapshotWriter(folder, rank, torch.cuda.memory._snapshot)
        torch._C._cuda_attach_out_of_memory_observer(writer)  # type: ignore[attr-defined]
    except Exception as error:  # all of them are private to torch
        log.warning("no snapshot will be written when memory runs out: %s: %s", type(error).__name__, error)


class SnapshotWriter:
    """Called by torch's allocator before it raises. take: a snapshot."""

    def __init__(self, folder: Path, rank: int, take: Callable[[], Any]) -> None:
        self.path = folder / f"out-of-memory-rank-{rank}.pickle"
        self._take, self._done = take, False

    def __call__(self, *_: object) -> None:
        """Writes it, once; that of an earlier process is replaced. Does not raise."""
        if self._done:
            return
        self._done = True
        temporary = self.path.with_name(f".{self.path.name}")
        try:
            self.path.parent.mkdir(exist_ok=True)
            with temporary.open("wb") as file:
                pickle.dump(self._take(), file)
            os.replace(temporary, self.path)
            log.warning("out of memory: what was allocated is in %s", self.path)
        except Exception as error:
            log.warning("%s: no snapshot of the memory: %s: %s", self.path, type(error).__name__, error)
