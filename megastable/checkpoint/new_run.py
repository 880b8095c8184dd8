"""Create a run directory with a checkpoint outside of training, from given whole tensors.

Reshaping, averaging and every import use it. It writes tensor by tensor: memory for one tensor and the shard cut from
it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

import megastable
from megastable.base import durable
from megastable.base.durable import staged_directory
from megastable.base.errors import CheckpointError, ConfigError, DataError
from megastable.base.text import make_visible
from megastable.checkpoint import store
from megastable.checkpoint.files import (
    FileRecord,
    ShardPiece,
    TensorFile,
    entry_name,
    measure_piece,
    part_name,
    write_file,
)
from megastable.checkpoint.parts import describe_part, write_head, write_manifest, write_shared
from megastable.checkpoint.store import RunState
from megastable.checkpoint.whole import Described, describe_parameters
from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS
from megastable.model import gpt
from megastable.parallel.layout import Layout, cut_into_stages, list_chunks
from megastable.parallel.sharding import cut_shard
from megastable.parallel.topology import TensorParallel
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.training_events import Imported
from megastable.run.log import RunLog

Whole = Callable[[str, str], Tensor]


def refuse_existing(out: Path, what: str = "directory") -> None:
    """Check before any long work. Raises CheckpointError for a path that exists or lies among a run's checkpoints or in
    one of them, where an additional file would damage the checkpoint."""
    try:
        if out.exists() or out.is_symlink():
            raise CheckpointError(f"{out} exists already: name a new {what}")
    except OSError as error:  # such as a name that is too long
        raise CheckpointError(f"{out} cannot be made: {error.strerror}") from None
    for folder in out.absolute().parents:
        among = folder.name == "checkpoints" and (folder.parent / store.RECIPE).is_file()
        if among or all((folder / name).is_file() for name in (store.MANIFEST, store.STATE)):
            raise CheckpointError(
                f"{out} would lie in {folder}, which holds checkpoints: name a new {what} such as runs/new"
            )


@dataclass(frozen=True)
class OptimizerTensors:
    """Optimizer state to write. kinds: of a parameter's tensors, by its name, the weight among them; shared: what
    every rank holds alike."""

    kinds: Callable[[str], tuple[str, ...]]
    shared: Mapping[str, Tensor] = field(default_factory=dict)


ADAM = OptimizerTensors(lambda _: KINDS)
NONE: Mapping[str, Tensor] = {}


def write_run(
    out: Path,
    run: RunConfig,
    state: RunState,
    whole: Whole,
    *,
    optimizer: OptimizerTensors | None,
    origin: dict[str, Any],
    expert_state: Mapping[str, Tensor] = NONE,
    ledgers: Path | None = None,
    people: Sequence[Event] = (),
    watch: Callable[[int], None] = lambda _: None,
) -> Path:
    """Make the run directory `out` with one checkpoint, and return the checkpoint's folder.

    run: its recipe; tensor and pipeline size, ZeRO and precision are taken from it, the data-parallel size from
    state.layout. whole(name, kind): whole tensors, any float dtype, each requested once; optimizer: state to write,
    too. origin: fields of the journal's event `imported`. expert_state: of the routers, as `WholeState.expert_state`.
    ledgers: a run directory whose skips and blends are copied. people: further events, of what they have changed.
    watch: called with the bytes written since the last call.

    Raises CheckpointError if `out` exists, a tensor is missing, of another shape or not finite, or the disk is full;
    then nothing is left behind.
    """
    refuse_existing(out)
    p = run.parallel
    layout = Layout(p.tensor, p.pipeline, state.layout.data, p.context, p.replicas, p.expert)
    saved = store.LayoutState(**vars(layout), zero=p.zero, precision=run.precision.kind)
    state = state.model_copy(
        update={"layout": saved, "adam_step": state.adam_step if optimizer is not None else 0.0}
    )
    try:
        with staged_directory(out) as folder:
            made = RunDirectory(folder)
            for each in (made.steps, made.layers, made.checkpoints):
                each.mkdir()
            resolved = run.model_copy(update={"run": run.run.model_copy(update={"dir": out})})
            made.freeze_recipe(resolved, [], {})
            for name in ("skips.jsonl", "blends.jsonl") if ledgers is not None else ():
                with contextlib.suppress(FileNotFoundError):
                    write_file(folder / name, (ledgers / name).read_bytes())  # type: ignore[operator]
            checkpoint = made.checkpoints / store.name_of(state.step)
            checkpoint.mkdir()
            write_checkpoint(
                checkpoint, run, state, made.recipe.read_bytes(), whole, layout, optimizer, watch, expert_state
            )  # fmt: skip
            durable.write_file(made.checkpoints / store.LATEST, checkpoint.name.encode())
            log = RunLog(made)
            log.commit_event(Imported(step=state.step, **origin))
            for event in people:
                timeless_fields = {
                    field_key: value for field_key, value in event.fields.items() if field_key != "time"
                }
                log.commit_event(event.from_fields(timeless_fields))
    except OSError as error:
        reason = "the disk is full: make room" if error.errno == errno.ENOSPC else error.strerror or error
        raise CheckpointError(f"{out} could not be written: {reason}. Nothing was left there") from None
    except (DataError, ConfigError) as error:
        raise CheckpointError(str(error)) from None
    return out / "checkpoints" / store.name_of(state.step)


def write_checkpoint(
    folder: Path, run: RunConfig, state: RunState, recipe: bytes, whole: Whole, layout: Layout,
    optimizer: OptimizerTensors | None, watch: Callable[[int], None], expert_state: Mapping[str, Tensor] = NONE,
) -> None:  # fmt: skip
    """Fill the empty directory `folder`. Raises OSError, CheckpointError."""
    kinds_of = optimizer.kinds if optimizer is not None else lambda _: KINDS[:1]
    shared_state = {**expert_state, **(optimizer.shared if optimizer is not None else {})}
    file_records, all_finite = write_shared(folder, shared_state)
    for stage, parameters in enumerate(_stages(run, layout.pipeline)):
        stage_records, stage_finite = _write_stage(folder, parameters, stage, layout, kinds_of, whole, watch)
        file_records |= stage_records
        all_finite &= stage_finite
    if not all_finite:
        raise CheckpointError(
            f"{folder.name}: weights or moments are not finite: such a checkpoint is not written"
        )
    versions = {"megastable": megastable.__version__, "torch": torch.__version__}
    state = state.model_copy(update={"versions": versions})
    file_records |= write_head(folder, state, recipe)
    write_manifest(folder, state, run.model, file_records)


def _stages(run: RunConfig, count: int) -> list[dict[str, Described]]:
    """The parameters of every pipeline stage; a tied weight counts in its first stage."""
    layers = gpt.list_layers(run.model, TensorParallel(), "none")
    costs, is_block = [layer.cost for layer in layers], [layer.is_block for layer in layers]
    bounds = cut_into_stages(costs, count * run.parallel.model_chunks, is_block)
    stage_layers = [set(itertools.chain(*list_chunks(bounds, count, stage))) for stage in range(count)]
    held = describe_parameters(run.model)
    return [{name: d for name, d in held.items() if d.layer in own_layers} for own_layers in stage_layers]


def _write_stage(
    folder: Path, held: dict[str, Described], stage: int, layout: Layout,
    kinds: Callable[[str], tuple[str, ...]], whole: Whole, watch: Callable[[int], None],
) -> tuple[dict[str, FileRecord], bool]:  # fmt: skip
    """Write the files of the ranks of one stage in parallel; whether all numbers are finite."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4 * layout.data * layout.tensor:  # one file of each rank of the stage is open at a time
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ranks = {(d, t): layout.rank_at(stage, d, t) for d in range(layout.data) for t in range(layout.tensor)}
    wanted = {
        place: {name: cut for name, of in held.items() if (cut := _cut(of, layout, *place)) is not None}
        for place in ranks
    }
    pieces: dict[tuple[int, int], list[ShardPiece]] = {place: [] for place in ranks}
    records: dict[str, FileRecord] = {}
    with contextlib.ExitStack() as stack:
        files = dict[tuple[int, int], TensorFile]()
        for place, mine in wanted.items():
            entries = [
                (entry_name(k, name), torch.float32, (numel,))
                for name, (_, _, numel) in mine.items()
                for k in kinds(name)
            ]
            path = folder / f"{part_name(ranks[place])}.safetensors"
            files[place] = stack.enter_context(TensorFile(path, entries))
        for name, of in held.items():
            statistics: dict[tuple[int, int], dict[str, Any]] = {place: {} for place in ranks}
            for kind in kinds(name):
                tensor = _checked(whole(name, kind), name, of)
                for t in range(layout.tensor):
                    flat = None
                    for d in range(layout.data):
                        if name not in wanted[d, t]:
                            continue
                        if flat is None:
                            flat = cut_shard(tensor, of.placement, t, layout.tensor).flatten()
                        _, start, numel = wanted[d, t][name]
                        piece = flat[start : start + numel]
                        files[d, t].write_tensor(entry_name(kind, name), piece)
                        statistics[d, t][kind] = measure_piece(piece)
                        watch(4 * numel)
            for place in ranks:
                if name in wanted[place]:
                    shape, start, numel = wanted[place][name]
                    pieces[place].append(
                        ShardPiece(
                            name=name, dim=of.placement.dim, sections=of.placement.sections, shape=shape, start=start,
                            numel=numel, statistics=statistics[place],
                        )
                    )  # fmt: skip
        for place, rank in ranks.items():
            records[f"{part_name(rank)}.safetensors"] = files[place].close()
    finite = True
    for place, rank in ranks.items():
        described, fine = describe_part(folder, (rank, stage, place[1]), pieces[place])
        records, finite = records | described, finite and fine
    return records, finite


def _cut(of: Described, layout: Layout, data: int, tensor: int) -> tuple[tuple[int, ...], int, int] | None:
    """(shape of the shard, first element, count) of a parameter's part on a rank: an even share, as ZeRO 3 partitions.
    ZeRO 1 and 2 partition a whole flat buffer; a load takes any range from any file."""
    shard_shape, split_dim = list(of.shape), of.placement.dim
    if split_dim is None and tensor:
        return None  # a replica: written once
    if split_dim is not None:
        shard_shape[split_dim] //= layout.tensor
    shard_numel = torch.Size(shard_shape).numel()
    even_share = -(-shard_numel // layout.data)
    first_element = data * even_share
    piece_numel = min(even_share, shard_numel - first_element)
    return (tuple(shard_shape), first_element, piece_numel) if piece_numel > 0 else None


def _checked(tensor: Tensor, name: str, of: Described) -> Tensor:
    if tuple(tensor.shape) != of.shape:
        raise CheckpointError(
            f"{make_visible(name)} is {tuple(tensor.shape)}, in the recipe's model {of.shape}: it belongs to "
            "another model"
        )
    return tensor.float()


def origin_of(checkpoint: Path, **more: Any) -> dict[str, Any]:
    """A new run's journal entry on the checkpoint that it started from: its path, and the xxh3-128 of its manifest,
    which covers all of its files."""
    manifest = xxhash.xxh3_128_hexdigest((checkpoint / store.MANIFEST).read_bytes())
    return {"source": str(checkpoint), "manifest": manifest, "time": time.time(), **more}
