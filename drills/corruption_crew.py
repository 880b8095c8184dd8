"""The processes of a layout's ranks: they do its runs one after another; after an error, a hang, or many runs new ones
do."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from drills.corruption_plan import Planned
from drills.corruption_ranks import LOOPBACK, Ended, Job, serve
from megastable.config.tree import RunConfig

HUNG, DIED, ABANDONED = "hung", "died", "waited for another rank"
GRACE = 10.0  # seconds after the first error of a rank; others may be in a collective that it never reaches
# Every run leaves a few of gloo's threads behind, which wake a hundred times a second.
RUNS = 16
# What ranks import, beside torch and the package only on the first engine and step, 1,500 modules. A server imports it
# once, and is forked.
PRELOAD = [
    "torch", "torch._dynamo", "torch._inductor.compile_fx", "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.comm.mori", "megastable.train",
    "numpy.ma", "rich._emoji_codes", "drills.corruption_faults",
]  # fmt: skip


class Crew:
    """Of `ranks` processes. A context manager: it leaves no process behind."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._runs = 0  # of these members
        self._members: list[tuple[ForkServerProcess, Connection]] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def run(self, config: RunConfig, fault: Planned | None, log: Path, limit: float) -> list[Ended]:
        """One run, and how it ended on every rank; after `limit` seconds it counts as hung."""
        # Held here, not by rank 0: its port is nobody else's, and a new one knows nothing of runs before.
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        if self._runs >= RUNS:
            self._end()
        if not self._members:
            self._members, self._runs = list(_started(self.ranks)), 0
        self._runs += 1
        for _, pipe in self._members:
            pipe.send(Job(config, fault, store.port, log))
        try:
            ended = self._gather(limit)
        except BaseException:
            self._end()
            raise
        if any(rank.error for rank in ended):
            self._end()
        return ended

    def _gather(self, limit: float) -> list[Ended]:
        end, late = time.monotonic() + limit, HUNG
        answers: dict[int, Ended] = {}
        left = {pipe: rank for rank, (_, pipe) in enumerate(self._members)}
        while left and (seconds := end - time.monotonic()) > 0:
            for pipe in wait(list(left), seconds):
                assert isinstance(pipe, Connection)
                rank = left.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = Ended(DIED)
                if answers[rank].error and late == HUNG:
                    end, late = min(end, time.monotonic() + GRACE), ABANDONED
        return [answers.get(rank, Ended(late)) for rank in range(self.ranks)]

    def _end(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # should it not have made its group yet
            process.join()
        self._members = []


def _started(ranks: int) -> Iterator[tuple[ForkServerProcess, Connection]]:
    # For the server, which imports torch, and through it for the ranks.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with _environment(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"):
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, ranks, theirs), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process, or of this one, is the end of the pipe
            yield process, ours


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
