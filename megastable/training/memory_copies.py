"""Keeps the newest snapshot in the memories of two hosts: writes and sends it in the background of the steps.

    copies.begin(state, records)           # right after the ring took a calm point, if all ranks are idle
    ... steps; in each: copies.ballot() into its reduction, copies.heard(sums) after it

A thread of every rank writes its part, in the format of checkpoints, to its host's memory, then sends these files to
its partner. That all ranks are done is heard in the sum that every step makes anyway; only then the point before is
removed. No step waits for any of it, and no failure of it ends the training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megastable.base.collectives import gathered
from megastable.checkpoint.files import write_file
from megastable.checkpoint.held_points import RECORDS, HeldPart, PointKey
from megastable.checkpoint.memory_hosts import MemoryHosts
from megastable.checkpoint.memory_wire import MemoryClient, Pace
from megastable.checkpoint.parts import adam_step_of, write_head, write_rank
from megastable.checkpoint.pieces import unmeasured
from megastable.checkpoint.snapshot import Loan, Ring
from megastable.checkpoint.store import RunState
from megastable.engine.engine import Engine
from megastable.engine.flatstate import FlatState
from megastable.run.events.training_events import MemoryDropped, MemoryOff
from megastable.run.log import RunLog
from megastable.run.records import LayerRecord, StepRecord, encode_records

log = logging.getLogger(__name__)


class Recalled(OSError):
    """The point is not wanted any more."""


@dataclass
class _PointCopy:
    """A copy in progress. state, records: on rank 0 only, the latter of steps that are on no disk yet; problem: why it
    failed."""

    key: PointKey
    loan: Loan
    state: RunState | None
    records: Sequence[StepRecord | LayerRecord]
    flat: FlatState
    fp8: dict[str, list[list[float]]]
    scaler: dict[str, Any]
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: bool = False
    finished: bool = False
    problem: str = ""


def part_size(flat: FlatState) -> int:
    """Bytes of this rank's part of a point, after the first update."""
    return sum(f.numel * 4 * len(flat.kinds(f.group)) for f in flat.fragments if f.counted)


class MemoryCopies:
    """Of one rank. hosts: None without copies; lineage: of this process's points; restored: the point that the run was
    resumed from, kept until there is a newer one; recipe: the frozen one. sent, written: bytes so far, of files.

    `begin`, `heard`, `rewound` and `close` are called by all ranks at the same places; the others by its thread.
    """

    def __init__(
        self,
        hosts: MemoryHosts | None,
        engine: Engine,
        ring: Ring,
        log: RunLog,
        recipe: Callable[[], bytes],
        lineage: str,
        restored: PointKey | None = None,
        step: int = 0,
    ) -> None:
        self.hosts, self._engine, self._ring, self.log, self._recipe = hosts, engine, ring, log, recipe
        self.lineage, self._epoch, self._floor = lineage, 0, 0
        self.complete, self._world = restored, dist.get_world_size()
        self._job: _PointCopy | None = None
        self._counted = self._told = False
        self._idle = True  # all ranks, as heard in the last step
        self._client: MemoryClient | None = None
        self.sent = self.written = 0
        if hosts is not None:
            hosts.folder.drop(lambda key: key != restored)
            hosts.server.refuse, hosts.server.kept = self._refuse, lambda key: key == self.complete
            self.active = hosts.copying and self._has_room(hosts, step)
        else:
            self.active = False

    def _has_room(self, hosts: MemoryHosts, step: int) -> bool:
        if not self._ring.capacity:
            return False  # that there are no points was said
        why = hosts.room(part_size(self._engine.flat_state()))
        if why:
            self.log.emit(
                MemoryOff(step=step, reason=why), say=f"WARNING: no copies in the hosts' memory: {why}"
            )
        return not why

    # By the loop

    def wanted(self, step: int) -> bool:
        """Whether to call `begin`: the ring has just taken a point, and no rank is busy."""
        return self.active and self._idle and bool(self._ring.steps) and self._ring.steps[-1] == step

    def begin(self, state: RunState, records: Sequence[StepRecord | LayerRecord]) -> None:
        """Copy the ring's newest point, of `state`. records: pending ones, which die with the process of rank 0."""
        loan = self._ring.lend(state.step)
        if loan is None:
            return
        engine = self._engine
        key = PointKey(step=state.step, epoch=self._epoch, lineage=self.lineage)
        self._job = _PointCopy(
            key, loan, state.model_copy() if dist.get_rank() == 0 else None, tuple(records), engine.flat_state(),
            engine.fp8_history(), engine.scaler,
        )  # fmt: skip
        self._counted, self._idle = False, False
        threading.Thread(target=self._copy, args=(self._job,), name="memory-copy", daemon=True).start()

    def ballot(self) -> tuple[float, ...]:
        """For the step's sum over the ranks: this one is idle; its copy is complete; has failed."""
        job = self._job
        if job is None:
            return 1.0, 0.0, 0.0
        return (
            float(job.finished),
            float(job.finished and job.done),
            float(bool(job.finished and job.problem)),
        )

    def heard(self, sums: Sequence[float], step: int) -> None:
        """After every step, with the sums of `ballot`."""
        idle, done, failed = sums
        self._idle = idle == self._world
        job = self._job
        if job is None or self._counted or self.hosts is None:
            return
        if done == self._world:
            self._counted, self.complete, newest = True, job.key, job.key
            self.hosts.folder.drop(
                lambda key: key != newest and (key.lineage != self.lineage or key.step < newest.step)
            )
            self.hosts.folder.touch()
        elif failed and self._idle:
            self._counted = True
            if not self._told:  # once: the next points are tried all the same
                self._told = True
                problem = next(p for p in gathered(job.problem) if p)
                text = f"step {job.key.step}: {problem}"
                self.log.emit(
                    MemoryOff(step=step, reason=text), say=f"WARNING: no copy in the hosts' memory of {text}"
                )

    def rewound(self, step: int) -> None:
        """The run was rewound to `step`: before it goes on, later points are invalidated."""
        if self.hosts is None or not self.active:
            return
        if self._job is not None and self._job.key.step > step:
            self._cancel()
            self._counted = True
        with self.hosts.server.lock:
            self._epoch, self._floor = self._epoch + 1, step
            epoch = self._epoch
            self.hosts.folder.drop(lambda key: key.step > step and key.epoch < epoch)
        if self.complete is not None and self.complete.step > step:
            self.complete = None
        self.log.emit(MemoryDropped(step=step, epoch=epoch))

    def close(self, remove: bool) -> None:
        """remove: the run needs no copies any more."""
        self._cancel()
        if self._client is not None:
            self._client.close()
        if self.hosts is not None:
            self.hosts.close(remove)

    def _cancel(self) -> None:
        if self._job is not None:
            self._job.cancelled.set()
        self._ring.recall()

    def _refuse(self, key: PointKey) -> str:
        """Why a copy of another rank is not to be kept. It may have heard of a rewind before or after this rank."""
        if key.lineage != self.lineage:
            return "of other processes"
        if key.epoch < self._epoch and key.step > self._floor:
            return f"the run was rewound to step {self._floor}"
        return ""

    # By the thread

    def _copy(self, job: _PointCopy) -> None:
        try:
            part = self._write(job)
            job.loan.returned.set()
            self._send(job, part)
            job.done = True
        except Recalled:
            self._hang_up()
        except OSError as error:
            job.problem = str(error) or type(error).__name__
            self._hang_up()
        except Exception as error:  # the others must learn of any error
            log.exception("a snapshot could not be copied")
            job.problem = f"{type(error).__name__}: {error}".splitlines()[0]
            self._hang_up()
        finally:
            job.loan.returned.set()
            job.finished = True

    def _write(self, job: _PointCopy) -> HeldPart:
        """Write this rank's part to its host's memory, and seal it."""
        assert self.hosts is not None
        loan, hosts, rank = job.loan, self.hosts, dist.get_rank()

        def wanted() -> None:
            if loan.recalled.is_set() or job.cancelled.is_set():
                raise Recalled("the memory of the snapshot was needed, or the run was rewound")

        folder = hosts.folder
        # The folder of this point may be another rank's already, and still empty.
        folder.drop_part(rank, lambda key: key in (self.complete, job.key))
        into = folder.begin(job.key)
        loan.copied.wait()
        tensors, topology = loan.snapshot.tensors, self._engine.topology
        files, _ = write_rank(
            into, topology, job.flat, tensors, loan.snapshot.extra.random, unmeasured, wanted
        )
        if job.state is not None:
            state = job.state.model_copy(update={
                "adam_step": adam_step_of(tensors), "scaler": job.scaler, "fp8": job.fp8,
                "optimizer": self._engine.config.optimizer.name,
            })  # fmt: skip
            files |= write_head(into, state, self._recipe())
            if job.records:
                files[RECORDS] = write_file(into / RECORDS, encode_records(job.records))
        part = HeldPart(key=job.key, rank=rank, world=self._world, files=files)
        with hosts.server.lock:
            if job.cancelled.is_set():
                folder.drop_part(rank, lambda key: key != job.key)
                wanted()
            folder.seal(part)
        self.written += sum(record.size for record in files.values())
        return part

    def _send(self, job: _PointCopy, part: HeldPart) -> None:
        assert self.hosts is not None
        if self.hosts.partner is None:
            return

        def wanted() -> None:
            if job.cancelled.is_set():
                raise Recalled("the run was rewound")

        self._client = self._client or self.hosts.connect(self.hosts.partner)
        pace = Pace(self.hosts.config.bandwidth * 1e9)
        self.sent += self._client.put(self.hosts.folder.point(part.key), part, pace, wanted)

    def _hang_up(self) -> None:
        """What a connection has broken off in is unknown to its other end."""
        if self._client is not None:
            with suppress(OSError):
                self._client.close()
            self._client = None
