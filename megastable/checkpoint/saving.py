"""Asynchronous checkpoint saving: a step waits only for a copy in host memory, the rest runs in the background.

    saver.begin_save(state)                          # copies; a thread of this rank writes, hashes, fsyncs, reads back
    ... steps; in each: saver.collect_ballot() into its reduction, saver.hear_ballot(sums) after it
    outcome = saver.hear_ballot(...) or .finish_save()  # when the checkpoint is complete, or why it failed

Save completion piggybacks on the per-step all-reduce. When all ranks have written their parts, the ranks exchange their
records in that step, and a thread of rank 0 writes the manifest and renames the folder. The next save waits for this
one. Whatever happens in between, earlier checkpoints stay intact. DeepSpeed's own decoupled writer does not commit
under pipeline parallelism; this one does not depend on the layout.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base import durable, free_memory
from megastable.base.collectives import gather_objects, run_on_first
from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, store
from megastable.checkpoint.files import hash_file
from megastable.checkpoint.held_points import HeldPart, PartFolder, PointKey
from megastable.checkpoint.parts import (
    Files,
    adam_step_of,
    put_in_place,
    upload_files,
    write_head,
    write_rank,
)
from megastable.checkpoint.store import DELETING, SAVING, RunState, check_sizes, list_checkpoints, read_latest
from megastable.config.model import ModelConfig
from megastable.config.training import CheckpointConfig
from megastable.engine.flatstate import KINDS, FlatState
from megastable.engine.hostcopy import CopiedTensors, HostCopy
from megastable_guard.random_states import read_random_states

if TYPE_CHECKING:  # it would load DeepSpeed
    from megastable.engine.engine import Engine

# Retention of checkpoints: `choose_deleted` decides which to delete, `delete_old_checkpoints` deletes them.
#
# Kept are the newest ones, one at regular intervals for good, pinned ones, and the newest that proved healthy. Also
# the first one after that (or the first of all if none has proved healthy): if a slow drift affects the unproven
# ones, it is the likeliest to predate it. And if checkpoints are saved so often that the newest are replaced before
# they could prove healthy, it is the one that can.


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint, by its step."""

    step: int
    healthy: bool = False
    pinned: bool = False


def choose_deleted(checkpoints: Sequence[KeptCheckpoint], keep: int, keep_every: int = 0) -> list[int]:
    """Steps of the checkpoints to delete, ascending: all that are not vital, pinned or milestones.

    keep: this many newest stay, at least 1. keep_every: also, the first checkpoint at or after each multiple of this
    many steps stays for good (not for multiple 0); 0 = none.
    """
    stay = choose_vital(checkpoints, keep) | {c.step for c in checkpoints if c.pinned}
    first_by_multiple = dict[int, int]()
    for step in sorted(c.step for c in checkpoints) if keep_every else ():
        first_by_multiple.setdefault(step // keep_every, step)
    # Deleting checkpoints between milestones does not change them, as long as steps ascend.
    stay |= {step for multiple, step in first_by_multiple.items() if multiple}
    return sorted({c.step for c in checkpoints} - stay)


def choose_vital(checkpoints: Sequence[KeptCheckpoint], keep: int) -> set[int]:
    """Those that the run may have to continue from: the newest `keep`, the newest healthy one, the first one after
    it."""
    if keep < 1:
        raise ValueError(f"keep={keep}: at least 1, or nothing would be left")
    steps = sorted(c.step for c in checkpoints)
    healthy_steps = sorted(c.step for c in checkpoints if c.healthy)[-1:]
    unproven_steps = [step for step in steps if not healthy_steps or step > healthy_steps[0]]
    return {*steps[-keep:], *healthy_steps, *unproven_steps[:1]}


def list_kept(folder: Path) -> list[KeptCheckpoint]:
    """The checkpoints of a folder, ascending, without checking that they are complete. Links are left out: their
    targets are kept elsewhere. Raises CheckpointError for a folder that cannot be read."""
    return [
        KeptCheckpoint(step, markers.read_health(path) is not None, markers.read_pin(path) is not None)
        for step, kind, path in list_checkpoints(folder)
        if kind == "checkpoint" and not path.is_symlink()
    ]


def delete_old_checkpoints(folder: Path, keep: int, keep_every: int = 0) -> list[str]:
    """Delete what `choose_deleted` names in RUN/checkpoints; returns the names of the deleted checkpoints, ascending.

    A damaged checkpoint (by its sizes) does not count as kept, so it cannot displace a good one. Suspect and rejected
    checkpoints and links are neither counted nor deleted. A checkpoint is renamed before it is deleted, so that a crash
    leaves no partial one that looks complete. A disk error is logged, and the deletion retried the next time.
    """
    try:
        _clear(folder)
        deleted_steps = choose_deleted(_whole(folder, keep, keep_every), keep, keep_every)
    except (CheckpointError, OSError) as error:
        log.warning("no old checkpoint is deleted: %s", error)
        return []
    # The target of `latest` stays, even if that file could not be updated.
    names = [store.name_of(deleted_step) for deleted_step in deleted_steps]
    # Read each time: a person's roll-back may move it meanwhile.
    hidden = [name for name in names if name != read_latest(folder) and _hide(folder, name)]
    if not hidden:
        return []
    try:
        # Before any file is deleted: after a power cut the old names must not come back.
        durable.sync_directory(folder)
    except OSError as error:
        log.warning("%s: %s; old checkpoints are deleted later", folder, error)
        return hidden
    for name in hidden:
        _delete(folder / f"{DELETING}{name}")
    return hidden


def _whole(folder: Path, keep: int, keep_every: int) -> list[KeptCheckpoint]:
    """The checkpoints to decide about, without damaged ones.

    Examines only those whose presence lets others be deleted: a folder may hold thousands of files.
    """
    kept, seen = list_kept(folder), set[int]()
    while choose_deleted(kept, keep, keep_every) and (unseen := choose_vital(kept, keep) - seen):
        seen |= unseen
        for step in unseen:
            try:
                check_sizes(folder / store.name_of(step))
            except CheckpointError as error:
                log.warning("%s; it does not count as a checkpoint", error)
                kept = [c for c in kept if c.step != step]
    return kept


def _hide(folder: Path, name: str) -> bool:
    """Rename a checkpoint for deletion; whether that worked."""
    visible_path, hidden_path = folder / name, folder / f"{DELETING}{name}"
    try:
        os.replace(visible_path, hidden_path)
        if markers.read_pin(hidden_path) is None:
            return True
        os.replace(hidden_path, visible_path)  # pinned in the meantime
    except OSError as error:
        log.warning("%s: not deleted: %s", visible_path, error.strerror or error)
    return False


def _clear(folder: Path) -> None:
    """Delete what earlier calls left behind. A renamed checkpoint cannot be pinned: if it is, it is complete."""
    for step, kind, path in list_checkpoints(folder):
        if kind != "deleting":
            continue
        if markers.read_pin(path) is None:
            _delete(path)
            continue
        try:
            os.replace(path, folder / store.name_of(step))
        except OSError as error:
            log.warning("%s: pinned, and could not be renamed: %s", path, error.strerror or error)


def _delete(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        log.warning("%s: could not be deleted: %s", path, error)


SPARE = 1.5  # free host memory required, in multiples of the copy: snapshots may still take a quarter


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
    """The saves of one rank of a run. `begin_save`, `hear_ballot` and `finish_save` are called by all ranks at the
    same places."""

    def __init__(
        self, folder: Path, engine: Engine, config: CheckpointConfig, model: ModelConfig,
        recipe: Callable[[], bytes], lineage: str,
    ) -> None:  # fmt: skip
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
        pending_note, self._note = self._note, ""
        return pending_note

    def prepare_memory(self) -> None:
        """Before the first step: check for memory for a copy, and allocate it, so that the first save delays the steps
        no longer than later ones."""
        if self.asynchronous is None:
            self.asynchronous = self._has_room(self._engine.optimizer_state())
        if self.asynchronous and not self._spare:
            self._fetching = self._thread.submit(self._fetch, self._engine.flat_state().moments)

    def begin_save(self, state: RunState) -> None:
        """Copy the engine's state, and start writing it. No other save may be in progress."""
        assert self._job is None, "the save before is not finished"
        begin_time = time.perf_counter()
        optimizer_state = self._engine.optimizer_state()
        if self.asynchronous is None:
            self.asynchronous = self._has_room(optimizer_state)
        state = state.model_copy(deep=True)
        state.adam_step, state.scaler = adam_step_of(optimizer_state), self._engine.scaler
        state.optimizer = self._engine.config.optimizer.name
        state.fp8 = self._engine.fp8_history()
        if self._fetching is not None:
            self._spare, self._fetching = self._fetching.result(), None
        if self.asynchronous:
            copied_tensors = self._host.copy_tensors(optimizer_state, self._spare)
            self._spare = copied_tensors.tensors
        else:
            copied_tensors, self._spare = CopiedTensors(optimizer_state), {}
        temporary_path = self.folder / f"{SAVING}{store.name_of(state.step)}"
        new_save = self._job = _Save(state, temporary_path, copied_tensors, read_random_states(), begin_time)
        new_save.writing = self._thread.submit(self._write, new_save, self._engine.flat_state())
        new_save.blocked = time.perf_counter() - begin_time

    def collect_ballot(self) -> tuple[float, float]:
        """For the step's sum over the ranks: whether this rank's part is written; whether the checkpoint is
        complete."""
        job = self._job
        if job is None:
            return 0.0, 0.0
        written = job.stage == "writing" and job.writing is not None and job.writing.done()
        return float(written), float(job.committing is not None and job.committing.done())

    def hear_ballot(self, sums: Sequence[float]) -> SaveOutcome | None:
        """Call after every step with the sums of `collect_ballot`: returns the outcome, once there is one, on all ranks
        alike."""
        current_save, begin_time = self._job, time.perf_counter()
        if current_save is None:
            return None
        written_count, settled_count = sums
        save_outcome = None
        if current_save.stage == "writing" and written_count == self._world:
            save_outcome = self._all_written(current_save)
        elif current_save.stage == "committing" and settled_count:
            save_outcome = self._settled(current_save)
        current_save.blocked += time.perf_counter() - begin_time
        if save_outcome is None:
            return None
        return replace(save_outcome, blocked=current_save.blocked + current_save.copied.waited)

    def finish_save(self) -> SaveOutcome | None:
        """Wait for the save in progress; its outcome. None if there is none."""
        current_save, begin_time = self._job, time.perf_counter()
        if current_save is None:
            return None
        save_outcome = self._all_written(current_save) if current_save.stage == "writing" else None
        save_outcome = save_outcome or self._settled(current_save)
        blocked_seconds = current_save.blocked + current_save.copied.waited + time.perf_counter() - begin_time
        return replace(save_outcome, blocked=blocked_seconds)

    def close(self) -> None:
        """Call when no save is in progress and none will follow: wait for the thread's clean-up."""
        self._thread.shutdown()

    def remove_leftovers(self) -> None:
        """At the start of a run: remove leftovers of a process that died during a save. Raises OSError."""
        if self._rank == 0:
            store.bring_back(self.folder)
            for stale_folder in self.folder.glob(f"{SAVING}*"):
                shutil.rmtree(stale_folder)

    # Background work

    def _fetch(self, moments: torch.dtype) -> dict[str, Tensor]:
        """Allocate memory for a copy of masters and moments."""
        masters, flat_state = self._engine.masters, self._engine.flat_state()
        fetched_tensors: dict[str, Tensor] = {}
        for kind in KINDS:
            dtype = torch.float32 if kind == "weight" else moments
            shapes_by_name = {
                f"{group_index}/{kind}": group_masters.shape
                for group_index, group_masters in enumerate(masters)
                if kind in flat_state.kinds_of_group(group_index)
            }
            fetched_tensors |= self._host.allocate_touched(shapes_by_name, dtype)
        return fetched_tensors

    def _has_room(self, source: dict[str, Tensor]) -> bool:
        """Whether every rank has host memory for a copy of its state."""
        state_bytes = self._engine.flat_state().count_bytes()
        demands = gather_objects(free_memory.measure_demand(source.values(), state_bytes))
        for host in dict.fromkeys(demand.host for demand in demands):
            host_demands = [demand for demand in demands if demand.host == host]
            needed = sum(host_demand.snapshot for host_demand in host_demands)
            free_bytes = min(demand.free for demand in host_demands)
            if free_bytes < SPARE * needed:
                self._note = (
                    f"WARNING: training pauses for every checkpoint: copies take {needed / free_memory.GIB:.2f} GiB on "
                    f"{host}, and {free_bytes / free_memory.GIB:.2f} are free"
                )
                return False
        return True

    def _write(self, job: _Save, flat: FlatState) -> _RankPart:
        """Write this rank's files; in its thread."""
        try:
            if self._rank == 0:
                self._check_space()
            job.temporary.mkdir(exist_ok=True)
            target_folder = job.temporary
            if self._staging is not None:
                target_folder = self._stage(self._staging, self._key(job))
            job.copied.wait_until_complete()
            file_records, all_finite = write_rank(
                target_folder, self._engine.topology, flat, job.copied.tensors, job.random
            )
            for file_name, file_record in file_records.items():
                if hash_file(target_folder / file_name, from_disk=True) != file_record:
                    raise OSError(f"{target_folder / file_name} reads back differently from what was written")
            if self._staging is not None:
                if all_finite:
                    self._seal(self._staging, job, file_records)
                upload_files(target_folder, file_records, job.temporary)
            return _RankPart(file_records, all_finite)
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
        return staging.begin_point(key)

    def _seal(self, staging: PartFolder, job: _Save, files: Files) -> None:
        """Seal the part: from now on it survives its process."""
        point_key = self._key(job)
        if self._rank == 0:  # files that a commit also needs
            files = files | write_head(staging.point_folder(point_key), job.state, self.recipe())
        staging.seal_part(HeldPart(key=point_key, rank=self._rank, world=self._world, files=files))

    def _check_space(self) -> None:
        for newest_checkpoint in store.newest_first(self.folder)[:1]:
            needed = sum(file.stat().st_size for file in newest_checkpoint.iterdir())
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                raise OSError(
                    f"{self.folder}: {free / 1e9:.2f} GB free, the last checkpoint took {needed / 1e9:.2f} GB"
                )

    def _all_written(self, job: _Save) -> SaveOutcome | None:
        """Collective: exchange the records; rank 0 commits, or all ranks get the problem."""
        assert job.writing is not None
        parts: list[_RankPart] = gather_objects(job.writing.result())
        problems = [f"rank {rank}: {part.problem}" for rank, part in enumerate(parts) if part.problem]
        finite = all(part.finite for part in parts)
        if problems or not finite:
            self._close(job)
            run_on_first(lambda: shutil.rmtree(job.temporary, ignore_errors=True))
            return self._outcome(job, None, [*problems, "weights or moments are not finite"][0], finite)
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

        save_outcome = run_on_first(told)
        self._close(job)
        return save_outcome

    def _close(self, job: _Save) -> None:
        self._job = None
        if self._staging is not None:
            point_key = self._key(job)
            self._thread.submit(self._staging.drop_part, self._rank, lambda other: other != point_key)

    def _outcome(
        self, job: _Save, path: Path | None, problem: str = "", finite: bool = True, size: int = 0
    ) -> SaveOutcome:
        seconds = time.perf_counter() - job.begun
        return SaveOutcome(job.state.step, path, problem, finite, size, job.blocked, seconds)

    def _commit(self, job: _Save, files: Files) -> SaveOutcome:
        """Rank 0: write the remaining files and rename; in its thread."""
        try:
            files = files | write_head(job.temporary, job.state, self.recipe())
            final_path, total_bytes = put_in_place(job.temporary, job.state, self._model, files)
        except OSError as error:
            shutil.rmtree(job.temporary, ignore_errors=True)
            return self._outcome(job, None, str(error))
        except Exception as error:
            log.exception("a checkpoint could not be committed")
            return self._outcome(job, None, f"{type(error).__name__}: {error}".splitlines()[0])
        delete_old_checkpoints(self.folder, self.config.keep, self.config.keep_every)
        return self._outcome(job, final_path, size=total_bytes)
