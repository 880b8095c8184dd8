"""Write the files of a checkpoint: each rank's part, the shared files, the manifest, and the final rename."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base import durable
from megastable.base.collectives import gather_objects, run_on_first
from megastable.base.errors import CheckpointError
from megastable.checkpoint import store
from megastable.checkpoint.files import (
    FileRecord,
    HashingFile,
    Pieces,
    PieceStatistics,
    ShardPiece,
    TensorFile,
    entry_name,
    hash_file,
    measure_piece,
    part_name,
    random_name,
    write_file,
)
from megastable.checkpoint.held_points import HeldPart, PartFolder, PointKey, newest_complete
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
    measure: Callable[[Tensor], PieceStatistics] = measure_piece,
    each: Callable[[], None] = lambda: None,
) -> tuple[Files, bool]:
    """Write the files of one rank: the pieces that it counts, its random states, on rank 0 the shared state.

    Args:
        folder: where to.
        topology: of the rank.
        flat: where its pieces lie.
        tensors: a copy of the engine's `optimizer_state`: "GROUP/KIND" is flat, and stored as fp32 whatever its dtype.
        random: the rank's random states.
        measure: of a piece.
        each: called before every block, may raise to break off.

    Returns:
        The files, and whether all numbers are finite.

    Raises:
        OSError: The disk refuses.
    """
    # A replica is written by the rank that counts it.
    has_moments = adam_step_of(tensors) > 0
    counted_fragments = [
        (f, flat.kinds_of_group(f.group) if has_moments else KINDS[:1]) for f in flat.fragments if f.counted
    ]
    base_name, shard_pieces = part_name(topology.rank), []
    tensor_entries = [
        (entry_name(kind, f.name), torch.float32, (f.numel,))
        for f, kinds in counted_fragments
        for kind in kinds
    ]
    with TensorFile(folder / f"{base_name}.safetensors", tensor_entries, each=each) as tensor_file:
        for f, fragment_kinds in counted_fragments:
            piece_statistics: dict[str, PieceStatistics] = {}
            for fragment_kind in fragment_kinds:
                piece = tensors[f"{f.group}/{fragment_kind}"][f.offset : f.offset + f.numel].float()
                tensor_file.write_tensor(entry_name(fragment_kind, f.name), piece)
                piece_statistics[fragment_kind] = measure(piece)
            shard_pieces.append(
                ShardPiece(
                    name=f.name, dim=f.dim, sections=f.sections, shape=f.shape, start=f.start, numel=f.numel,
                    statistics=piece_statistics,
                )
            )  # fmt: skip
    file_records = {tensor_file.path.name: tensor_file.record}
    place = topology.rank, topology.stage, topology.tensor_rank
    description_records, all_finite = describe_part(folder, place, shard_pieces)
    random_file = folder / random_name(topology.rank)
    file_records |= description_records | {random_file.name: write_file(random_file, random)}
    if topology.rank == 0:
        shared_tensors = {
            tensor_name.removeprefix(ALIKE): tensor
            for tensor_name, tensor in tensors.items()
            if tensor_name.startswith(ALIKE)
        }
        shared_records, shared_finite = write_shared(folder, shared_tensors)
        file_records, all_finite = file_records | shared_records, all_finite and shared_finite
    return file_records, all_finite


def adam_step_of(tensors: Mapping[str, Tensor]) -> float:
    """The optimizer's count of updates in the engine's `optimizer_state`; 0 without its state."""
    return next(
        (float(tensor) for tensor_name, tensor in tensors.items() if tensor_name.endswith("/step")), 0.0
    )


def describe_part(
    folder: Path, place: tuple[int, int, int], pieces: Sequence[ShardPiece]
) -> tuple[Files, bool]:
    """Write the description of a rank's pieces; place: (rank, stage, tensor rank). Returns whether all numbers are
    finite, too. Raises OSError."""
    rank, stage, tensor_rank = place
    kinds = tuple(dict.fromkeys(statistic_kind for piece in pieces for statistic_kind in piece.statistics))
    part = Pieces(rank=rank, stage=stage, tensor_rank=tensor_rank, kinds=kinds, pieces=tuple(pieces))
    name = f"{part_name(rank)}.json"
    return {name: write_file(folder / name, part.model_dump_json().encode())}, part.finite


def write_shared(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[Files, bool]:
    """Write the optimizer's shared state, if there is any; and whether all numbers are finite. It is indexed by whole
    parameters, so that it is the same in every layout. Raises OSError."""
    if not tensors:
        return {}, True
    entries = [
        (tensor_name, tensor.dtype, tuple(tensor.shape)) for tensor_name, tensor in sorted(tensors.items())
    ]
    with TensorFile(folder / store.SHARED, entries) as file:
        for tensor_name, tensor in sorted(tensors.items()):
            file.write_tensor(tensor_name, tensor)
    return {store.SHARED: file.record}, all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def write_head(folder: Path, state: RunState, recipe: bytes) -> Files:
    """Write the shared files: the run state and its recipe. Raises OSError."""
    return {
        store.STATE: write_file(folder / store.STATE, state.model_dump_json(indent=1).encode()),
        store.RECIPE: write_file(folder / store.RECIPE, recipe),
    }


def write_manifest(folder: Path, state: RunState, model: ModelConfig, files: Files) -> Contents:
    """Write the last file, which makes the folder a checkpoint. Raises OSError."""
    manifest_contents = Contents(
        step=state.step,
        files=dict(sorted(files.items())),
        fingerprints={"model": store.model_fingerprint(model), "data": state.order_fingerprint},
        versions=state.versions,
    )
    write_file(folder / store.MANIFEST, manifest_contents.to_sealed_bytes())
    durable.sync_directory(folder)
    return manifest_contents


def put_in_place(temporary: Path, state: RunState, model: ModelConfig, files: Files) -> tuple[Path, int]:
    """Write the manifest to a folder that all ranks have filled, and rename it; returns its path and its bytes.

    Raises OSError; then the folder is removed, and an older checkpoint of that name is restored.
    """
    checkpoints_folder = temporary.parent
    target_path = checkpoints_folder / store.name_of(state.step)
    replaced_path = checkpoints_folder / f"{SAVING}replaced-{target_path.name}"
    try:
        for file_name, file_record in files.items():
            path = temporary / file_name
            if not path.exists() or path.stat().st_size != file_record.size:
                raise OSError(f"{path}: written by another rank, not seen here: the folder is not shared")
        manifest_contents = write_manifest(temporary, state, model, files)
        if (target_path / store.PINNED).exists():  # a pin outlives the checkpoint
            durable.write_file(temporary / store.PINNED, (target_path / store.PINNED).read_bytes())
        if target_path.exists():  # the same step again, after a rewind to an older checkpoint
            os.replace(target_path, replaced_path)
        os.replace(temporary, target_path)
        durable.sync_directory(checkpoints_folder)
    except OSError:
        if replaced_path.exists() and not target_path.exists():
            os.replace(replaced_path, target_path)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    try:
        durable.write_file(checkpoints_folder / store.LATEST, target_path.name.encode())
    except OSError as error:
        log.warning("%s: %s; it still names an older checkpoint", checkpoints_folder / store.LATEST, error)
    shutil.rmtree(replaced_path, ignore_errors=True)
    return target_path, manifest_contents.size


# Uploads checkpoints that were staged on a local disk to the shared directory.
#
# A local disk takes a rank's part in seconds where a shared directory needs minutes. Once all parts are on their
# hosts, the checkpoint survives the processes: a run killed during the upload completes it when it restarts on the
# same hosts. Until the upload is done, the checkpoint is lost with the disk of any host.


CHUNK = 1 << 22  # bytes


def upload_files(source: Path, files: dict[str, FileRecord], target: Path) -> None:
    """Copy files, and verify their hashes on the way. Raises OSError."""
    for name, record in files.items():
        with (source / name).open("rb") as source_file, (target / name).open("wb") as target_file:
            hashing_file = HashingFile(target_file)
            while file_block := source_file.read(CHUNK):
                hashing_file.write(file_block)
            copied_record = hashing_file.make_record()
        if copied_record != record:
            raise OSError(f"{source / name} has changed since it was written")
        if hash_file(target / name, from_disk=True) != record:
            raise OSError(f"{target / name} reads back differently from what was written")


def recover_staged(
    staging: PartFolder, folder: Path, model: ModelConfig, lineages: Collection[str]
) -> tuple[int, str] | None:
    """At the start of a run, collective: upload a checkpoint that is staged on the hosts' local disks and newer than
    those in `folder`. Returns its step, and the problem if that failed ("" otherwise); None if there is none.

    lineages: of the processes whose checkpoints count; others belong to an earlier run in this directory, or to what a
    person has rolled back. Useless parts are deleted.
    """
    parts_by_rank: list[list[HeldPart]] = gather_objects(staging.list_parts())
    newest_steps = run_on_first(lambda: [store.step_of(path) for path in store.newest_first(folder)])
    newest = max(newest_steps, default=-1)

    def refuse(key: PointKey) -> str:
        return "" if key.step > newest and key.lineage in lineages else "it does not count"

    save, _ = newest_complete(parts_by_rank, refuse)
    if save is None:
        staging.drop_points(lambda _: True)
        for foreign_seal in staging.root.glob("*/sealed-*"):  # of a name that this version does not write
            log.warning("%s: a staged checkpoint of another version is left where it is", foreign_seal.parent)
        with suppress(OSError):
            staging.root.rmdir()
        return None
    temporary = folder / f"{store.SAVING}{store.name_of(save.key.step)}"

    def bring() -> str:
        try:
            temporary.mkdir(exist_ok=True)
            for staged_part in save.parts.values():
                # The first rank of this start whose host has it.
                if save.hosts[staged_part.rank][0] == dist.get_rank():
                    upload_files(staging.point_folder(save.key), staged_part.files, temporary)
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

    problem = next((told for told in gather_objects(bring()) if told), "")
    problem = run_on_first(accept)
    if problem:  # keep the parts: the next start may find more space
        run_on_first(lambda: shutil.rmtree(temporary, ignore_errors=True))
    else:
        shutil.rmtree(staging.root, ignore_errors=True)
    return save.key.step, problem
