"""Records the machines of a run twice a minute: own work of every rank, and readings of hosts and GPUs.

A thread of the supervisor: neither training nor supervision waits for it. A disk that is full costs readings only.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from megastable.cluster.fleet import Fleet
from megastable.cluster.store import Heard
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.event import read_whole
from megastable.run.machine_state import LEVELS, MachineSample, MachineWriter
from megastable.run.rank_ipc import WorkBlock

SECONDS = LEVELS["30s"]
BLOCKS = 100  # of a rank between two samples: a file system that hangs must not fill the memory
GOODBYE = 5.0  # seconds for the last samples
STALE = 900.0  # seconds, after which the last word of a rank on its work no longer counts: ten steps may take long


class MachineRecorder:
    """Of one run. say: prints warnings; seconds: between two samples."""

    def __init__(
        self, run: RunDirectory, fleet: Fleet, say: Callable[[str], None], seconds: float = SECONDS
    ) -> None:
        self.run, self.fleet, self.say, self.seconds = run, fleet, say, seconds
        self._writer = MachineWriter(run.machines)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._told = False
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Another attempt begins: its ranks are others."""
        with self._lock:
            self._work = dict[int, deque[WorkBlock]]()  # by rank; the last one stays
            self._heard = dict[int, tuple[float, Heard]]()  # by rank: when it spoke of its work

    def add_work_reports(self, reports: Iterable[tuple[Heard, WorkBlock]]) -> None:
        """What ranks say of their work. Returns at once, and begins to record."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="machines", daemon=True)
            self._thread.start()
        with self._lock:
            for heard, work_block in reports:
                self._work.setdefault(heard.rank, deque(maxlen=BLOCKS)).append(work_block)
                self._heard[heard.rank] = (time.monotonic(), heard)

    def close(self) -> None:
        """Write what is left of coarser levels."""
        if self._thread is not None:
            self._over.set()
            self._thread.join(GOODBYE)

    def _follow(self) -> None:
        self.fleet.latest_readings()  # hosts begin to read
        while not self._over.wait(self.seconds):
            self._write(lambda: self._writer.add_sample(self.take_sample()))
        self._write(self._writer.close)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._told = False
        except OSError as error:
            if not self._told:
                self.say(f"WARNING: {self.run.machines}: readings of machines cannot be written: {error}")
            self._told = True

    def take_sample(self) -> MachineSample:
        now = time.monotonic()
        with self._lock:
            heard_by_rank = {n: (at, rank) for n, (at, rank) in self._heard.items() if rank.closed is None}
            fresh_blocks = {
                rank: list(blocks) for rank, blocks in self._work.items()
                if rank in heard_by_rank and now - heard_by_rank[rank][0] < STALE
            }  # fmt: skip
            for waiting_blocks in self._work.values():
                while len(waiting_blocks) > 1:
                    waiting_blocks.popleft()
        own_seconds: list[float | None] = [None] * (max(fresh_blocks, default=-1) + 1)
        for rank, blocks in fresh_blocks.items():
            # The last one was in the sample before, if there are newer ones.
            new_blocks = blocks[-max(1, len(blocks) - 1) :]
            own_seconds[rank] = float(f"{statistics.fmean(new_block.own for new_block in new_blocks):.4g}")
        step_seconds = [blocks[-1].step for blocks in fresh_blocks.values()]
        ranks_by_host = dict[str, list[int]]()
        for rank in sorted(heard_by_rank):
            host_name = self.fleet.name_of_host(heard_by_rank[rank][1].host)
            ranks_by_host.setdefault(host_name, []).append(rank)
        return MachineSample(
            time=round(time.time(), 1), seconds=self.seconds,
            step=read_whole(read_object(self.run.progress).get("step")),
            whole=float(f"{statistics.median(step_seconds):.4g}") if step_seconds else None, own=own_seconds,
            hosts={
                host_name: host_reading.model_copy(update={"ranks": ranks_by_host.get(host_name, [])})
                for host_name, host_reading in self.fleet.latest_readings().items()
            },
        )  # fmt: skip
