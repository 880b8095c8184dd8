"""Keeps the newest snapshot in the memories of two hosts: writes and sends it in the background of the steps.

    copies.begin_copy(state, records)           # right after the ring took a good point, if all ranks are idle
    ... steps; in each: copies.collect_ballot() into its reduction, copies.hear_ballot(sums) after it

A thread of every rank writes its part, in the format of checkpoints, to its host's memory, then sends these files to
its partner. That all ranks are done is heard in the sum that every step makes anyway; only then the point before is
removed. No step waits for any of it, and no failure of it ends the training.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megastable.base.collectives import gather_objects, run_on_all, run_on_first
from megastable.base.errors import CheckpointError, MegastableError
from megastable.checkpoint import store
from megastable.checkpoint.files import skip_statistics, write_file
from megastable.checkpoint.held_points import (
    HISTORY,
    RECORDS,
    Complete,
    HeldPart,
    PointKey,
    explain_bad_ancestor,
    explain_outdated,
    newest_complete,
)
from megastable.checkpoint.memory_hosts import MemoryClient, MemoryHosts, Pace
from megastable.checkpoint.parts import adam_step_of, write_head, write_manifest, write_rank
from megastable.checkpoint.snapshot import Loan, Ring
from megastable.checkpoint.store import RunState
from megastable.checkpoint.whole import WholeState, check_model, check_optimizer
from megastable.engine.engine import Engine
from megastable.engine.flatstate import FlatState
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import MemoryDropped, MemoryOff, MemoryRefused, MemoryResume
from megastable.run.log import RunLog
from megastable.run.records import LayerRecord, StepRecord, encode_records
from megastable.training.checkpoints import Checkpoints
from megastable.training.data_order import DataOrder

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
    return sum(f.numel * 4 * len(flat.kinds_of_group(f.group)) for f in flat.fragments if f.counted)


class MemoryCopies:
    """Of one rank. hosts: None without copies; lineage: of this process's points; restored: the point that the run was
    resumed from, kept until there is a newer one; recipe: the frozen one. sent, written: bytes so far, of files.

    `begin_copy`, `hear_ballot`, `drop_after` and `close` are called by all ranks at the same places; the others by
    its thread.
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
        self.active = False
        if hosts is not None:
            hosts.folder.drop_points(lambda key: key != restored)
            hosts.server.refuse, hosts.server.kept = self._refuse, lambda key: key == self.complete
            # That there are no points where the ring has no room was said.
            self.active = hosts.copying and bool(ring.capacity)
        if hosts is not None and self.active:
            why = hosts.explain_no_room(part_size(engine.flat_state()))
            self.active = not why
            if why:
                text = f"WARNING: no copies in the hosts' memory: {why}"
                log.emit_event(MemoryOff(step=step, reason=why), say=text)

    # By the loop

    def is_wanted(self, step: int) -> bool:
        """Whether to call `begin_copy`: the ring has just taken a point, and no rank is busy."""
        return self.active and self._idle and bool(self._ring.steps) and self._ring.steps[-1] == step

    def begin_copy(self, state: RunState, records: Sequence[StepRecord | LayerRecord]) -> None:
        """Copy the ring's newest point, of `state`. records: pending ones, which die with the process of rank 0."""
        loan = self._ring.lend_newest(state.step)
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

    def collect_ballot(self) -> tuple[float, ...]:
        """For the step's sum over the ranks: this one is idle; its copy is complete; has failed."""
        job = self._job
        if job is None:
            return 1.0, 0.0, 0.0
        is_over = job.finished
        return float(is_over), float(is_over and job.done), float(is_over and bool(job.problem))

    def hear_ballot(self, sums: Sequence[float], step: int) -> None:
        """After every step, with the sums of `collect_ballot`."""
        idle_count, done_count, failed_count = sums
        self._idle = idle_count == self._world
        current_copy = self._job
        if current_copy is None or self._counted or self.hosts is None:
            return
        if done_count == self._world:
            self._counted, self.complete, newest_key = True, current_copy.key, current_copy.key
            self.hosts.folder.drop_points(
                lambda key: key != newest_key and (key.lineage != self.lineage or key.step < newest_key.step)
            )
            self.hosts.folder.mark_alive()
        elif failed_count and self._idle:
            self._counted = True
            if not self._told:  # once: the next points are tried all the same
                self._told = True
                text = f"step {current_copy.key.step}: {_first(current_copy.problem)}"
                say = f"WARNING: no copy in the hosts' memory of {text}"
                self.log.emit_event(MemoryOff(step=step, reason=text), say=say)

    def drop_after(self, step: int) -> None:
        """The run was rewound to `step`: before it goes on, later points are invalidated."""
        if self.hosts is None or not self.active:
            return
        if self._job is not None and self._job.key.step > step:
            self._cancel()
            self._counted = True
        with self.hosts.server.lock:
            self._epoch, self._floor = self._epoch + 1, step
            new_epoch = self._epoch
            self.hosts.folder.drop_points(lambda key: key.step > step and key.epoch < new_epoch)
        if self.complete is not None and self.complete.step > step:
            self.complete = None
        self.log.emit_event(MemoryDropped(step=step, epoch=new_epoch))

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
        self._ring.recall_loan()

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
            written_part = self._write(job)
            job.loan.returned.set()
            self._send(job, written_part)
            job.done = True
        except Recalled:
            pass
        except OSError as error:
            job.problem = str(error) or type(error).__name__
        except Exception as error:  # the others must learn of any error
            log.exception("a snapshot could not be copied")
            job.problem = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            job.loan.returned.set()
            if not job.done and self._client is not None:
                # What a connection has broken off in is unknown to its other end.
                with suppress(Exception):
                    self._client.close()
                self._client = None
            job.finished = True

    def _write(self, job: _PointCopy) -> HeldPart:
        """Write this rank's part to its host's memory, and seal it."""
        assert self.hosts is not None
        snapshot_loan, memory_hosts, rank = job.loan, self.hosts, dist.get_rank()

        def wanted() -> None:
            if snapshot_loan.recalled.is_set() or job.cancelled.is_set():
                raise Recalled("the memory of the snapshot was needed, or the run was rewound")

        memory_folder = memory_hosts.folder
        # The folder of this point may be another rank's already, and still empty.
        memory_folder.drop_part(rank, lambda key: key in (self.complete, job.key))
        point_folder = memory_folder.begin_point(job.key)
        snapshot = snapshot_loan.snapshot
        file_records, _ = write_rank(
            point_folder, self._engine.topology, job.flat, snapshot.tensors, snapshot.extra.random, skip_statistics,
            wanted,
        )  # fmt: skip
        if job.state is not None:
            run_state = job.state.model_copy(update={
                "adam_step": adam_step_of(snapshot.tensors), "scaler": job.scaler, "fp8": job.fp8,
                "optimizer": self._engine.config.optimizer.name,
            })  # fmt: skip
            file_records |= write_head(point_folder, run_state, self._recipe())
            if job.records:
                file_records[RECORDS] = write_file(point_folder / RECORDS, encode_records(job.records))
        held_part = HeldPart(key=job.key, rank=rank, world=self._world, files=file_records)
        with memory_hosts.server.lock:
            if job.cancelled.is_set():
                memory_folder.drop_part(rank, lambda key: key != job.key)
                wanted()
            memory_folder.seal_part(held_part)
        self.written += sum(file_record.size for file_record in file_records.values())
        return held_part

    def _send(self, job: _PointCopy, part: HeldPart) -> None:
        assert self.hosts is not None
        if self.hosts.partner is None:
            return

        def wanted() -> None:
            if job.cancelled.is_set():
                raise Recalled("the run was rewound")

        self._client = self._client or self.hosts.connect_to(self.hosts.partner)
        send_pace = Pace(self.hosts.config.bandwidth * 1e9)
        self.sent += self._client.put_part(self.hosts.folder.point_folder(part.key), part, send_pace, wanted)


# Restores the newest snapshot from the memories of the hosts, if it is newer than every checkpoint. Collective.
#
# Weights and moments are not read from the shared file system then. Whatever is missing, torn, outdated or wrong is
# said, and the run resumes from a checkpoint as without it.


AS_NEW = "a checkpoint is as new"


class Restoring:
    """restored: the point that the engine holds; spoilt: whether the engine holds parts of a point that failed."""

    def __init__(
        self, hosts: MemoryHosts, engine: Engine, run: RunDirectory, log: RunLog, checkpoints: Checkpoints,
        order: DataOrder,
    ) -> None:  # fmt: skip
        self.hosts, self.engine, self.run, self.log = hosts, engine, run, log
        self.checkpoints, self.order = checkpoints, order
        self.restored: PointKey | None = None
        self.spoilt = False
        self._failed: dict[PointKey, str] = {}
        self._told = set[PointKey]()

    def restore_newest(
        self, newer_than: int, quarantined: Collection[int], layout: store.LayoutState
    ) -> tuple[Path, RunState] | None:
        """Load the newest usable point of a step after `newer_than`; its folder and state. quarantined: the steps of
        checkpoints whose content was. None if there is none."""
        held_parts = self.hosts.gather_parts()
        if not any(held_parts):
            return None
        while True:
            newest_point, passed_over = run_on_first(
                lambda: self._choose(held_parts, newer_than, quarantined)
            )
            for key, reason in passed_over.items():
                if reason != AS_NEW and key not in self._told:
                    self._told.add(key)
                    self.log.emit_event(
                        MemoryRefused(step=key.step, lineage=key.lineage, reason=reason),
                        say=f"the copy of step {key.step} in the hosts' memory is not used: {reason}",
                    )
            if newest_point is None:
                return None
            load_problem, saved_state = self._load(newest_point, layout)
            if saved_state is not None:
                self.restored = newest_point.key
                return self.hosts.folder.point_folder(newest_point.key), saved_state
            self._failed[newest_point.key] = load_problem

    def _choose(
        self, held: list[list[HeldPart]], newer_than: int, quarantined: Collection[int]
    ) -> tuple[Complete | None, dict[PointKey, str]]:
        events = list(self.run.iterate_events(*HISTORY))

        def refuse(key: PointKey) -> str:
            if key.step <= newer_than:
                return AS_NEW
            return (
                self._failed.get(key)
                or explain_outdated(events, key)
                or explain_bad_ancestor(key, newer_than, quarantined)
            )

        return newest_complete(held, refuse)

    def _load(self, found: Complete, layout: store.LayoutState) -> tuple[str, RunState | None]:
        """The problem, or the state, which the engine holds then."""
        folder, key = self.hosts.folder.point_folder(found.key), found.key
        self.log.emit_event(MemoryResume(step=key.step, lineage=key.lineage, epoch=key.epoch))
        small_files = sorted(file_name for file_name in found.files if not file_name.endswith(".safetensors"))
        local_position, local_count = self.hosts.local.index(self.hosts.rank), len(self.hosts.local)
        if problem := _first(self.hosts.bring_files(found, small_files[local_position::local_count])):
            return problem, None
        try:
            saved = run_on_all(lambda: store.read_state(folder))
            run_on_all(lambda: self._describe(found, saved))
            run_on_all(lambda: self._check(folder, saved))
            needed = run_on_all(lambda: self._needed(folder))
        except MegastableError as error:
            return str(error), None
        everyone = gather_objects(needed)
        own_names = [
            name for name in sorted(needed)
            if next(rank for rank in self.hosts.local if name in everyone[rank]) == self.hosts.rank
        ]  # fmt: skip
        if problem := _first(self.hosts.bring_files(found, own_names)):
            return problem, None
        self.spoilt = True
        try:
            self.checkpoints.load_into_engine(folder, saved, layout)
        except MegastableError as error:
            return str(error), None
        state_norms = self.engine.flat_state().sum_norms()
        if not math.isfinite(state_norms.parameters + state_norms.second_moment):
            return "weights or moments are not finite", None
        self.spoilt = False
        self._seal(found)
        return "", saved

    def _describe(self, found: Complete, saved: RunState) -> None:
        """Write the manifest, without which the files are no checkpoint."""
        if self.hosts.leads:
            point_folder = self.hosts.folder.point_folder(found.key)
            try:
                write_manifest(point_folder, saved, self.engine.config.model, found.files)
            except OSError as error:
                raise CheckpointError(f"{point_folder}: {error}") from None

    def _check(self, folder: Path, saved: RunState) -> None:
        """What may be refused while the engine is still untouched. Raises CheckpointError."""
        if self.order.exchanged_since(saved) != []:
            raise CheckpointError("the order of the data has changed since")
        check_model(folder, self.engine.config.model, store.read_contents(folder))
        check_optimizer(folder, saved, self.engine.config.optimizer.name)

    def _needed(self, folder: Path) -> set[str]:
        """The large files that this rank reads."""
        whole, topology = WholeState(folder), self.engine.topology
        whole.check_fits(self.engine.config.model)
        names = {store.SHARED} & store.read_contents(folder).files.keys()
        rank, ranks = topology.tensor_rank, topology.layout.tensor
        for f in self.engine.flat_state().fragments:
            names |= whole.files_of_range(f.name, rank, ranks, f.start, f.numel)
        return names

    def _seal(self, found: Complete) -> None:
        """Parts that this host has fetched as a whole are copies from now on, too."""
        point_folder = self.hosts.folder.point_folder(found.key)
        for rank, held_part in found.parts.items() if self.hosts.leads else ():
            is_whole = all((point_folder / file_name).exists() for file_name in held_part.files)
            if is_whole and self.hosts.host not in found.hosts[rank]:
                try:
                    self.hosts.folder.seal_part(held_part)
                except OSError:
                    return  # it is only one copy fewer


def _first(problem: str) -> str:
    """The first rank's problem. Collective."""
    return next((rank_problem for rank_problem in gather_objects(problem) if rank_problem), "")
