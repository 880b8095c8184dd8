"""Asynchronous checkpoint saving: a step waits only for a copy in host memory, the rest runs in the background.

    saver.begin(state)                          # copies; a thread of this rank writes, hashes, fsyncs, reads back
    ... steps; in each: saver.ballot() into its reduction, saver.heard(sums) after it
    outcome = saver.heard(...) or .finish()     # when the checkpoint is complete, or why it failed

Save completion piggybacks on the per-step all-reduce. When all ranks have written their parts, the ranks exchange their
records in that step, and a thread of rank 0 writes the manifest and renames the folder. The next save waits for this
one. Whatever happens in between, earlier checkpoints stay intact. DeepSpeed's own decoupled writer does not commit
under pipeline parallelism; this one does not depend on the layout.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base import free_memory
from megastable.base.collectives import first, gathered
from megastable.base.rng import rng_state
from megastable.checkpoint import retention, store
from megastable.checkpoint.files import hash_file
from megastable.checkpoint.held_points import HeldPart, PointKey
from megastable.checkpoint.memory_folder import PartFolder
from megastable.checkpoint.parts import Files, adam_step_of, put_in_place, write_head, write_rank
from megastable.checkpoint.staging import upload
from megastable.checkpoint.store import SAVING, RunState
from megastable.config.checkpoint import CheckpointConfig
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS, FlatState
from megastable.engine.hostcopy import CopiedTensors, HostCopy
from megastable.parallel.topology import Topology

log = logging.getLogger(__name__)

SPARE = 1.5  # free host memory required, in multiples of the copy: snapshots may still take a quarter


class Savable(Protocol):
    """The engine's interface for a save."""

    topology: Topology
    config: RunConfig

    @property
    def masters(self) -> list[Tensor]: ...
    @property
    def scaler(self) -> dict[str, Any]: ...
    def fp8_history(self) -> dict[str, list[list[float]]]: ...
    def optimizer_state(self) -> dict[str, Tensor]: ...
    def flat_state(self) -> FlatState: ...
    def hold_updates(self, until: Any) -> None: ...


@dataclass(frozen=True)
class SaveOutcome:
    """Result of a save. path: of the checkpoint, None if it failed, with the problem; finite: False if a weight or
    moment is not finite. blocked: seconds that this rank's steps waited; seconds: until it was complete."""

    step: int
    path: Path | None
    problem: str = ""
    finite: bool = True
    size: int = 0
    blocked: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class _RankPart:
    """A rank's written files, or its problem."""

    files: Files = field(default_factory=dict)
    finite: bool = True
    problem: str = ""


@dataclass
class _Save:
    """A save in progress. stage: "writing" until all ranks have written, then "committing"."""

    state: RunState
    temporary: Path
    copied: CopiedTensors
    random: dict[str, Any]
    begun: float
    blocked: float = 0.0
    stage: str = "writing"
    writing: Future[_RankPart] | None = None
    committing: Future[SaveOutcome] | None = None


class Saver:
    """The saves of one rank of a run. `begin`, `heard` and `finish` are called by all ranks at the same places."""

    def __init__(
        self,
        folder: Path,
        engine: Savable,
        config: CheckpointConfig,
        model: ModelConfig,
        recipe: Callable[[], bytes],
        lineage: str,
    ) -> None:
        """folder: of the checkpoints; recipe: the run's frozen one, copied into every checkpoint; rank 0 calls
        it in its thread. lineage: of these processes."""
        self.folder, self.config, self.recipe = folder, config, recipe
        self._engine, self._model = engine, model
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._lineage = lineage
        self._staging = PartFolder(config.staging, folder.parent) if config.staging is not None else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._host = HostCopy(engine.hold_updates, self._thread)
        self._job: _Save | None = None
        self._spare: dict[str, Tensor] = {}
        self._fetching: Future[dict[str, Tensor]] | None = None
        self.asynchronous: bool | None = None if config.asynchronous else False
        self._note = ""

    # Public interface

    @property
    def pending(self) -> int | None:
        """The step whose checkpoint is being saved."""
        return self._job.state.step if self._job is not None else None

    def take_note(self) -> str:
        """A note for the console, returned once: the first save finds too little memory."""
        note, self._note = self._note, ""
        return note

    def prepare(self) -> None:
        """Before the first step: check for memory for a copy, and allocate it, so that the first save delays the steps
        no longer than later ones."""
        if self.asynchronous is None:
            self.asynchronous = self._has_room(self._engine.optimizer_state())
        if self.asynchronous and not self._spare:
            self._fetching = self._thread.submit(self._fetch, self._engine.flat_state().moments)

    def begin(self, state: RunState) -> None:
        """Copy the engine's state, and start writing it. No other save may be in progress."""
        assert self._job is None, "the save before is not finished"
        begun = time.perf_counter()
        source = self._engine.optimizer_state()
        if self.asynchronous is None:
            self.asynchronous = self._has_room(source)
        state = state.model_copy(deep=True)
        state.adam_step, state.scaler = adam_step_of(source), self._engine.scaler
        state.optimizer = self._engine.config.optimizer.name
        state.fp8 = self._engine.fp8_history()
        if self._fetching is not None:
            self._spare, self._fetching = self._fetching.result(), None
        copied = self._host.copy(source, self._spare) if self.asynchronous else CopiedTensors(source)
        self._spare = copied.tensors if self.asynchronous else {}
        temporary = self.folder / f"{SAVING}{store.name_of(state.step)}"
        job = self._job = _Save(state, temporary, copied, rng_state(), begun)
        job.writing = self._thread.submit(self._write, job, self._engine.flat_state())
        job.blocked = time.perf_counter() - begun

    def ballot(self) -> tuple[float, float]:
        """For the step's sum over the ranks: whether this rank's part is written; whether the checkpoint is
        complete."""
        job = self._job
        written = (
            job is not None and job.stage == "writing" and job.writing is not None and job.writing.done()
        )
        settled = job is not None and job.committing is not None and job.committing.done()
        return float(written), float(settled)

    def heard(self, sums: Sequence[float]) -> SaveOutcome | None:
        """Call after every step with the sums of `ballot`: returns the outcome, once there is one, on all ranks
        alike."""
        job, begun = self._job, time.perf_counter()
        if job is None:
            return None
        written, settled = sums
        outcome = None
        if job.stage == "writing" and written == self._world:
            outcome = self._all_written(job)
        elif job.stage == "committing" and settled:
            outcome = self._settled(job)
        job.blocked += time.perf_counter() - begun
        return replace(outcome, blocked=job.blocked + job.copied.waited) if outcome is not None else None

    def finish(self) -> SaveOutcome | None:
        """Wait for the save in progress; its outcome. None if there is none."""
        job, begun = self._job, time.perf_counter()
        if job is None:
            return None
        outcome = self._all_written(job) if job.stage == "writing" else None
        outcome = outcome or self._settled(job)
        blocked = job.blocked + job.copied.waited + time.perf_counter() - begun
        return replace(outcome, blocked=blocked)

    def close(self) -> None:
        """Call when no save is in progress and none will follow: wait for the thread's clean-up."""
        self._thread.shutdown()

    def clean(self) -> None:
        """At the start of a run: remove leftovers of a process that died during a save. Raises OSError."""
        if self._rank == 0:
            store.bring_back(self.folder)
            for stale in self.folder.glob(f"{SAVING}*"):
                shutil.rmtree(stale)

    # Background work

    def _fetch(self, moments: torch.dtype) -> dict[str, Tensor]:
        """Allocate memory for a copy of masters and moments."""
        masters, flat = self._engine.masters, self._engine.flat_state()
        fetched: dict[str, Tensor] = {}
        for kind in KINDS:
            dtype = torch.float32 if kind == "weight" else moments
            shapes = {f"{i}/{kind}": m.shape for i, m in enumerate(masters) if kind in flat.kinds(i)}
            fetched |= self._host.fetch(shapes, dtype)
        return fetched

    def _has_room(self, source: dict[str, Tensor]) -> bool:
        """Whether every rank has host memory for a copy of its state."""
        pinned = torch.cuda.is_initialized()
        demand = free_memory.demand(source.values(), self._engine.flat_state().bytes(), pinned)
        everyone = gathered(demand)
        for mine in everyone:
            together = [other for other in everyone if other.host == mine.host]
            needed, free = sum(d.snapshot for d in together), min(d.free for d in together)
            if free < SPARE * needed:
                self._note = (
                    f"WARNING: training pauses for every checkpoint: copies take {needed / free_memory.GIB:.2f} GiB on "
                    f"{mine.host}, and {free / free_memory.GIB:.2f} are free"
                )
                return False
        return True

    def _write(self, job: _Save, flat: FlatState) -> _RankPart:
        """Write this rank's files; in its thread."""
        try:
            if self._rank == 0:
                self._check_space()
            job.temporary.mkdir(exist_ok=True)
            where = job.temporary if self._staging is None else self._stage(self._staging, self._key(job))
            job.copied.wait()
            files, finite = write_rank(where, self._engine.topology, flat, job.copied.tensors, job.random)
            for name, record in files.items():
                if hash_file(where / name, from_disk=True) != record:
                    raise OSError(f"{where / name} reads back differently from what was written")
            if self._staging is not None:
                if finite:
                    self._seal(self._staging, job, files)
                upload(where, files, job.temporary)
            return _RankPart(files, finite)
        except OSError as error:
            return _RankPart(problem=str(error))
        except Exception as error:  # the other ranks must learn of any error
            log.exception("a checkpoint could not be written")
            return _RankPart(problem=f"{type(error).__name__}: {error}".splitlines()[0])

    def _key(self, job: _Save) -> PointKey:
        return PointKey(step=job.state.step, epoch=0, lineage=self._lineage)

    def _stage(self, staging: PartFolder, key: PointKey) -> Path:
        """The folder on the local disk, without this rank's earlier leftovers there."""
        staging.drop_part(self._rank, lambda other: other == key)
        staging.clear_part(self._rank, key)
        staging.root.mkdir(parents=True, exist_ok=True)
        return staging.begin(key)

    def _seal(self, staging: PartFolder, job: _Save, files: Files) -> None:
        """Seal the part: from now on it survives its process."""
        key = self._key(job)
        if self._rank == 0:  # files that a commit also needs
            files = files | write_head(staging.point(key), job.state, self.recipe())
        staging.seal(HeldPart(key=key, rank=self._rank, world=self._world, files=files))

    def _check_space(self) -> None:
        newest = store.newest_first(self.folder)
        if newest:
            needed = sum(file.stat().st_size for file in newest[0].iterdir())
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                raise OSError(
                    f"{self.folder}: {free / 1e9:.2f} GB free, the last checkpoint took {needed / 1e9:.2f} GB"
                )

    def _all_written(self, job: _Save) -> SaveOutcome | None:
        """Collective: exchange the records; rank 0 commits, or all ranks get the problem."""
        assert job.writing is not None
        parts: list[_RankPart] = gathered(job.writing.result())
        problem = next(
            (f"rank {rank}: {part.problem}" for rank, part in enumerate(parts) if part.problem), ""
        )
        finite = all(part.finite for part in parts)
        if problem or not finite:
            self._close(job)
            first(lambda: shutil.rmtree(job.temporary, ignore_errors=True))
            return self._outcome(job, None, problem or "weights or moments are not finite", finite)
        job.stage = "committing"
        if self._rank == 0:
            files = {name: record for part in parts for name, record in part.files.items()}
            job.committing = self._thread.submit(self._commit, job, files)
        return None

    def _settled(self, job: _Save) -> SaveOutcome:
        """Collective: share rank 0's outcome."""

        def told() -> SaveOutcome:
            assert job.committing is not None
            return job.committing.result()

        outcome = first(told)
        self._close(job)
        return outcome

    def _close(self, job: _Save) -> None:
        self._job = None
        if self._staging is not None:
            key = self._key(job)
            self._thread.submit(self._staging.drop_part, self._rank, lambda other: other != key)

    def _outcome(
        self, job: _Save, path: Path | None, problem: str = "", finite: bool = True, size: int = 0
    ) -> SaveOutcome:
        seconds = time.perf_counter() - job.begun
        return SaveOutcome(job.state.step, path, problem, finite, size, job.blocked, seconds)

    def _commit(self, job: _Save, files: Files) -> SaveOutcome:
        """Rank 0: write the remaining files and rename; in its thread."""
        try:
            files = files | write_head(job.temporary, job.state, self.recipe())
            target, size = put_in_place(job.temporary, job.state, self._model, files)
        except OSError as error:
            shutil.rmtree(job.temporary, ignore_errors=True)
            return self._outcome(job, None, str(error))
        except Exception as error:
            log.exception("a checkpoint could not be committed")
            return self._outcome(job, None, f"{type(error).__name__}: {error}".splitlines()[0])
        retention.apply(self.folder, self.config.keep, self.config.keep_every)
        return self._outcome(job, target, size=size)
