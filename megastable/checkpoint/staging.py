"""Stage checkpoints on a local disk, then upload them to the shared directory.

A local disk takes a rank's part in seconds where a shared directory needs minutes. Once all parts are on their hosts,
the checkpoint survives the processes: a run killed during the upload completes it when it restarts on the same hosts.
Until the upload is done, the checkpoint is lost with the disk of any host.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import xxhash

from megastable.base import durable
from megastable.base.collectives import first, gathered
from megastable.base.errors import CheckpointError
from megastable.checkpoint import store
from megastable.checkpoint.files import FileRecord, hash_file
from megastable.checkpoint.parts import Files, Seal, folder_of_run, put_in_place, read_seals
from megastable.checkpoint.store import RECIPE, STATE
from megastable.config.model import ModelConfig

CHUNK = 1 << 22  # bytes


class Sealed(Seal):
    """Of a checkpoint. began: unix seconds when the processes that wrote it started training: only parts of the same
    processes belong together."""

    step: int
    began: float
    finite: bool


@dataclass(frozen=True)
class Staged:
    """A sealed part, and its folder."""

    folder: Path
    part: Sealed


class Staging:
    """This host's local disk, as used by one run. Ranks of a host share it."""

    def __init__(self, disk: Path, run: Path) -> None:
        """run: its directory, which distinguishes it from other runs. Nothing is created yet."""
        self.root = folder_of_run(disk, run)

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def seal(self, part: Sealed) -> None:
        """Seal a part whose files are all on disk."""
        durable.write_file(self.folder(part.step) / _seal(part.rank), part.model_dump_json().encode())

    def staged(self) -> list[Staged]:
        """The sealed parts on this host, by step and rank; parts with missing files are left out."""
        found = [
            Staged(path.parent, part) for path, part in read_seals(self.root, "step-*/sealed-*.json", Sealed)
        ]
        return sorted(found, key=lambda s: (s.part.step, s.part.rank))

    def drop(self, step: int, rank: int) -> None:
        """Remove a part: it was uploaded, or is no longer wanted."""
        folder = self.folder(step)
        (folder / _seal(rank)).unlink(missing_ok=True)
        own = [*folder.glob(f"*-{rank:05d}.*"), *((folder / STATE, folder / RECIPE) if rank == 0 else ())]
        for path in own:
            path.unlink(missing_ok=True)
        try:
            folder.rmdir()
        except OSError:
            return  # other ranks' parts remain

    def clear(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)


def upload(source: Path, files: dict[str, FileRecord], target: Path) -> None:
    """Copy files, and verify their hashes on the way. Raises OSError."""
    for name, record in files.items():
        digest, size = xxhash.xxh3_128(), 0
        with (source / name).open("rb") as come, (target / name).open("wb") as go:
            while block := come.read(CHUNK):
                digest.update(block)
                size += len(block)
                go.write(block)
            go.flush()
            os.fsync(go.fileno())
        if FileRecord(size=size, xxh3=digest.hexdigest()) != record:
            raise OSError(f"{source / name} has changed since it was written")
        if hash_file(target / name, from_disk=True) != record:
            raise OSError(f"{target / name} reads back differently from what was written")


def _seal(rank: int) -> str:
    return f"sealed-{rank:05d}.json"


def recover(staging: Staging, folder: Path, model: ModelConfig, since: float) -> tuple[int, str] | None:
    """At the start of a run, collective: upload a checkpoint that is staged on the hosts' local disks and newer than
    those in `folder`. Returns its step, and the problem if that failed ("" otherwise); None if there is none.

    since: when the run first started training, unix seconds. Anything older belongs to an earlier run in this
    directory. Useless parts are deleted.
    """
    rank, mine = dist.get_rank(), [s for s in staging.staged() if s.part.began >= since]
    everyone = gathered([(s.part.step, s.part.began, s.part.rank, s.part.world, s.part.finite) for s in mine])
    newest = first(lambda: max((store.step_of(path) for path in store.newest_first(folder)), default=-1))
    save = newest_complete(everyone, newest)
    if save is None:
        staging.clear()
        return None
    step = save[0]
    holders: dict[int, int] = {}  # by part: the first rank of this start whose host has it
    for holder, found in enumerate(everyone):
        for at, began, part, *_ in found:
            if (at, began) == save:
                holders.setdefault(part, holder)
    temporary = folder / f"{store.SAVING}{store.name_of(step)}"

    def bring() -> tuple[Files, str]:
        files: Files = {}
        try:
            temporary.mkdir(exist_ok=True)
            for s in mine:
                if (s.part.step, s.part.began) == save and holders[s.part.rank] == rank:
                    upload(s.folder, s.part.files, temporary)
                    files |= s.part.files
        except OSError as error:
            return {}, str(error)
        return files, ""

    def accept() -> str:
        problem = next((problem for _, problem in parts if problem), "")
        if not problem:
            try:
                files = {name: record for found, _ in parts for name, record in found.items()}
                put_in_place(temporary, store.read_state(temporary), model, files)
            except (OSError, CheckpointError) as error:
                problem = str(error)
        shutil.rmtree(temporary, ignore_errors=True)  # if it could not be used
        return problem

    parts: list[tuple[Files, str]] = gathered(bring())
    problem = first(accept)
    if not problem:  # else keep the parts: the next start may find more space
        staging.clear()
    return step, problem


def newest_complete(
    seen: Sequence[Sequence[tuple[int, float, int, int, bool]]], newer_than: int
) -> tuple[int, float] | None:
    """(step, began) of the newest save of which every part is on some host; None if there is none.

    seen: by rank, (step, began, part's rank, number of ranks, whether it is finite) of each part on its host.
    """
    parts = {part for found in seen for part in found if part[0] > newer_than}
    for save in sorted({part[:2] for part in parts}, reverse=True):
        held = [part[2:] for part in parts if part[:2] == save]
        worlds = {world for _, world, _ in held}
        complete = len(worlds) == 1 and {rank for rank, *_ in held} == set(range(*worlds))
        if complete and all(finite for *_, finite in held):
            return save
    return None
