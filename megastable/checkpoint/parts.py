"""Write the files of a checkpoint: each rank's part, the shared files, the manifest, and the final rename."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megastable.base import durable
from megastable.checkpoint import store
from megastable.checkpoint.files import FileRecord, TensorFile, write_file
from megastable.checkpoint.pieces import (
    Pieces,
    PieceStatistics,
    ShardPiece,
    entry_name,
    kinds_of,
    part_name,
    statistics_of,
)
from megastable.checkpoint.store import SAVING, Contents, RunState
from megastable.config.model import ModelConfig
from megastable.parallel.fragments import Fragment

log = logging.getLogger(__name__)

Files = dict[str, FileRecord]


def write_part(
    folder: Path,
    place: tuple[int, int, int],
    held: Sequence[tuple[Fragment, tuple[str, ...]]],
    buffers: Mapping[str, Tensor],
    random: dict[str, Any],
    measure: Callable[[Tensor], PieceStatistics] | None = None,
    each: Callable[[], None] = lambda: None,
) -> tuple[Files, bool]:
    """Write one rank's files; returns whether all numbers are finite.

    place: (rank, stage, tensor rank); held: the fragments to write, each with its kinds of tensors, from
    buffers["GROUP/KIND"] (flat; stored as fp32, whatever their dtype is here); random: the rank's random states;
    measure: a piece, by default `statistics_of`; each: called before every block, may raise to break off.
    Raises OSError.
    """
    rank, stage, tensor_rank = place
    measure = measure or statistics_of
    name, pieces = part_name(rank), []
    entries = [(entry_name(kind, f.name), torch.float32, (f.numel,)) for f, kinds in held for kind in kinds]
    with TensorFile(folder / f"{name}.safetensors", entries, each=each) as file:
        for f, kinds in held:
            found: dict[str, PieceStatistics] = {}
            for kind in kinds:
                piece = buffers[f"{f.group}/{kind}"][f.offset : f.offset + f.numel].float()
                file.write(entry_name(kind, f.name), piece)
                found[kind] = measure(piece)
            pieces.append(
                ShardPiece(
                    name=f.name, dim=f.dim, sections=f.sections, shape=f.shape, start=f.start, numel=f.numel,
                    statistics=found,
                )
            )  # fmt: skip
    part = Pieces(
        rank=rank, stage=stage, tensor_rank=tensor_rank, kinds=kinds_of(pieces), pieces=tuple(pieces)
    )
    files = {file.path.name: file.record}
    for path, content in (
        (folder / f"{name}.json", part.model_dump_json().encode()),
        (folder / f"rng-{rank:05d}.pt", random),
    ):
        files[path.name] = write_file(path, content)
    return files, part.finite


def write_head(folder: Path, state: RunState, recipe: bytes) -> Files:
    """Write the shared files: the run state and its recipe. Raises OSError."""
    return {
        store.STATE: write_file(folder / store.STATE, state.model_dump_json(indent=1).encode()),
        store.RECIPE: write_file(folder / store.RECIPE, recipe),
    }


def write_manifest(folder: Path, state: RunState, model: ModelConfig, files: Files) -> Contents:
    """Write the last file, which makes the folder a checkpoint. Raises OSError."""
    contents = Contents(
        step=state.step,
        files=dict(sorted(files.items())),
        fingerprints={"model": store.model_fingerprint(model), "data": state.order_fingerprint},
        versions=state.versions,
    )
    write_file(folder / store.MANIFEST, contents.sealed())
    durable.sync_directory(folder)
    return contents


def put_in_place(temporary: Path, state: RunState, model: ModelConfig, files: Files) -> tuple[Path, int]:
    """Write the manifest to a folder that all ranks have filled, and rename it; returns its path and its bytes.

    Raises OSError; then the folder is removed, and an older checkpoint of that name is restored.
    """
    folder = temporary.parent
    target = folder / store.name_of(state.step)
    replaced = folder / f"{SAVING}replaced-{target.name}"
    try:
        for name, record in files.items():
            if not (temporary / name).exists() or (temporary / name).stat().st_size != record.size:
                raise OSError(
                    f"{temporary / name}: written by another rank, not seen here: the folder is not shared"
                )
        contents = write_manifest(temporary, state, model, files)
        if (target / store.PINNED).exists():  # a pin outlives the checkpoint
            durable.write_file(temporary / store.PINNED, (target / store.PINNED).read_bytes())
        if target.exists():  # the same step again, after a rewind to an older checkpoint
            os.replace(target, replaced)
        os.replace(temporary, target)
        durable.sync_directory(folder)
    except OSError:
        if replaced.exists() and not target.exists():
            os.replace(replaced, target)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    try:
        durable.write_file(folder / store.LATEST, target.name.encode())
    except OSError as error:
        log.warning("%s: %s; it still names an older checkpoint", folder / store.LATEST, error)
    shutil.rmtree(replaced, ignore_errors=True)
    return target, contents.size
