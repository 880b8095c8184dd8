"""Uploads checkpoints that were staged on a local disk to the shared directory.

A local disk takes a rank's part in seconds where a shared directory needs minutes. Once all parts are on their hosts,
the checkpoint survives the processes: a run killed during the upload completes it when it restarts on the same hosts.
Until the upload is done, the checkpoint is lost with the disk of any host.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
import xxhash

from megastable.base.collectives import first, gathered
from megastable.base.errors import CheckpointError
from megastable.checkpoint import store
from megastable.checkpoint.files import FileRecord, hash_file
from megastable.checkpoint.held_points import HeldPart, PointKey, newest_complete
from megastable.checkpoint.memory_folder import PartFolder
from megastable.checkpoint.parts import put_in_place
from megastable.config.model import ModelConfig

log = logging.getLogger(__name__)

CHUNK = 1 << 22  # bytes


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


def recover(
    staging: PartFolder, folder: Path, model: ModelConfig, lineages: Collection[str]
) -> tuple[int, str] | None:
    """At the start of a run, collective: upload a checkpoint that is staged on the hosts' local disks and newer than
    those in `folder`. Returns its step, and the problem if that failed ("" otherwise); None if there is none.

    lineages: of the processes whose checkpoints count; others belong to an earlier run in this directory, or to what a
    person has rolled back. Useless parts are deleted.
    """
    everyone: list[list[HeldPart]] = gathered(staging.held())
    newest = first(lambda: max((store.step_of(path) for path in store.newest_first(folder)), default=-1))

    def refuse(key: PointKey) -> str:
        return "" if key.step > newest and key.lineage in lineages else "it does not count"

    save, _ = newest_complete(everyone, refuse)
    if save is None:
        staging.drop(lambda _: True)
        for left in staging.root.glob("*/sealed-*"):  # of a name that this version does not write
            log.warning("%s: a staged checkpoint of another version is left where it is", left.parent)
        with suppress(OSError):
            staging.root.rmdir()
        return None
    temporary = folder / f"{store.SAVING}{store.name_of(save.key.step)}"

    def bring() -> str:
        try:
            temporary.mkdir(exist_ok=True)
            for part in save.parts.values():
                if (
                    save.hosts[part.rank][0] == dist.get_rank()
                ):  # the first rank of this start whose host has it
                    upload(staging.point(save.key), part.files, temporary)
        except OSError as error:
            return str(error)
        return ""

    def accept() -> str:
        if not problem:
            try:
                put_in_place(temporary, store.read_state(temporary), model, save.files)
            except (OSError, CheckpointError) as error:
                return str(error)
        return problem

    problem = next((told for told in gathered(bring()) if told), "")
    problem = first(accept)
    if problem:  # keep the parts: the next start may find more space
        first(lambda: shutil.rmtree(temporary, ignore_errors=True))
    else:
        shutil.rmtree(staging.root, ignore_errors=True)
    return save.key.step, problem
