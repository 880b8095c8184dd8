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
    part_name,
    statistics_of,
)
from megastable.checkpoint.store import SAVING, Contents, RunState
from megastable.config.model import ModelConfig
from megastable.engine.flatstate import KINDS, FlatState
from megastable.engine.flatstate import SHARED as ALIKE
from megastable.parallel.topology import Topology

log = logging.getLogger(__name__)

Files = dict[str, FileRecord]


def write_rank(
    folder: Path,
    topology: Topology,
    flat: FlatState,
    tensors: Mapping[str, Tensor],
    random: dict[str, Any],
    measure: Callable[[Tensor], PieceStatistics] | None = None,
    each: Callable[[], None] = lambda: None,
) -> tuple[Files, bool]:
    """Write the files of one rank: the pieces that it counts, its random states, on rank 0 the shared state.

    Args:
        folder: where to.
        topology: of the rank.
        flat: where its pieces lie.
        tensors: a copy of the engine's `optimizer_state`: "GROUP/KIND" is flat, and stored as fp32 whatever its dtype.
        random: the rank's random states.
        measure: of a piece, by default `statistics_of`.
        each: called before every block, may raise to break off.

    Returns:
        The files, and whether all numbers are finite.

    Raises:
        OSError: The disk refuses.
    """
    measure = measure or statistics_of
    # A replica is written by the rank that counts it.
    updated = adam_step_of(tensors) > 0
    held = [(f, flat.kinds(f.group) if updated else KINDS[:1]) for f in flat.fragments if f.counted]
    name, pieces = part_name(topology.rank), []
    entries = [(entry_name(kind, f.name), torch.float32, (f.numel,)) for f, kinds in held for kind in kinds]
    with TensorFile(folder / f"{name}.safetensors", entries, each=each) as file:
        for f, kinds in held:
            found: dict[str, PieceStatistics] = {}
            for kind in kinds:
                piece = tensors[f"{f.group}/{kind}"][f.offset : f.offset + f.numel].float()
                file.write(entry_name(kind, f.name), piece)
                found[kind] = measure(piece)
            pieces.append(
                ShardPiece(
                    name=f.name, dim=f.dim, sections=f.sections, shape=f.shape, start=f.start, numel=f.numel,
                    statistics=found,
                )
            )  # fmt: skip
    files = {file.path.name: file.record}
    described, finite = describe_part(folder, (topology.rank, topology.stage, topology.tensor_rank), pieces)
    random_file = folder / f"rng-{topology.rank:05d}.pt"
    files |= described | {random_file.name: write_file(random_file, random)}
    if topology.rank == 0:
        shared = {n.removeprefix(ALIKE): t for n, t in tensors.items() if n.startswith(ALIKE)}
        more, fine = write_shared(folder, shared)
        files, finite = files | more, finite and fine
    return files, finite


def adam_step_of(tensors: Mapping[str, Tensor]) -> float:
    """The optimizer's count of updates in the engine's `optimizer_state`; 0 without its state."""
    return next((float(tensor) for name, tensor in tensors.items() if name.endswith("/step")), 0.0)


def describe_part(
    folder: Path, place: tuple[int, int, int], pieces: Sequence[ShardPiece]
) -> tuple[Files, bool]:
    """Write the description of a rank's pieces; place: (rank, stage, tensor rank). Returns whether all numbers are
    finite, too. Raises OSError."""
    rank, stage, tensor_rank = place
    kinds = tuple(dict.fromkeys(kind for piece in pieces for kind in piece.statistics))
    part = Pieces(rank=rank, stage=stage, tensor_rank=tensor_rank, kinds=kinds, pieces=tuple(pieces))
    name = f"{part_name(rank)}.json"
    return {name: write_file(folder / name, part.model_dump_json().encode())}, part.finite


def write_shared(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[Files, bool]:
    """Write the optimizer's shared state, if there is any; and whether all numbers are finite. It is indexed by whole
    parameters, so that it is the same in every layout. Raises OSError."""
    if not tensors:
        return {}, True
    entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sorted(tensors.items())]
    with TensorFile(folder / store.SHARED, entries) as file:
        for name, tensor in sorted(tensors.items()):
            file.write(name, tensor)
    return {store.SHARED: file.record}, all(bool(tensor.isfinite().all()) for tensor in tensors.values())


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
