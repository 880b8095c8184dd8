"""Read whole tensors from a checkpoint of any layout, exactly, and any range of any shard of them.

Every rank's part says which elements of which parameter it holds. From those any weight or moment is assembled
without knowing how ZeRO, the pipeline or the tensor group partitioned it, and split again for another layout.
DeepSpeed's universal checkpoint needs a conversion on disk for that, and supports only its own layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megastable.base.errors import CheckpointError
from megastable.base.text import make_visible
from megastable.checkpoint import store
from megastable.checkpoint.files import Pieces, Reader, ShardPiece, TensorEntry, entry_name, read_pieces
from megastable.checkpoint.store import RunState
from megastable.config import recipe
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.engine.adjustments import SWIGLU_CLAMP
from megastable.engine.expert_routing import BIAS, PREFIX
from megastable.engine.flatstate import KINDS
from megastable.model.gpt import outline_model
from megastable.optim.build import is_interchangeable
from megastable.parallel.sharding import Fragment, Placement, cut_shard, join_shards, placement_of
from megastable.run.changes import changes_of, config_at
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMade
from megastable_guard.policy_state import PolicyState


@dataclass(frozen=True)
class Slice:
    """Elements [start, end) of a tensor in a file of a checkpoint."""

    file: str
    entry: str
    start: int
    end: int

    def check_entry(self, path: Path, held: TensorEntry | None) -> None:
        """Raises CheckpointError unless the file `path` has these elements. held: what its header says."""
        if held is None or held.kind != "F32" or len(held.shape) != 1 or held.shape[0] < self.end:
            raise CheckpointError(
                f"{path}: {make_visible(self.entry, 200)} is missing or of another shape: a part of another checkpoint"
            )


@dataclass(frozen=True)
class Described:
    """A parameter of a model. shape: of the whole tensor; layer: of `gpt.layers`."""

    shape: tuple[int, ...]
    placement: Placement
    layer: int


def describe_parameters(config: ModelConfig) -> dict[str, Described]:
    """Every parameter of a model by its name, in the model's order; no memory is taken. `vocab_size` must be known."""
    described_parameters = {}
    for module_name, parameter in outline_model(config).named_parameters():
        placement, layer = placement_of(parameter), int(module_name.partition(".")[0])
        described_parameters[placement.name] = Described(tuple(parameter.shape), placement, layer)
    return described_parameters


def run_of(checkpoint: Path) -> RunConfig:
    """The recipe of a checkpoint's run, with the model that a remedy has made of it. Raises CheckpointError,
    ConfigError."""
    path = checkpoint / store.RECIPE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, which describes the model: the checkpoint is incomplete")
    run = recipe.load_recipe(path)
    if run.model.vocab_size is None:
        raise CheckpointError(f"{path}: model.vocab_size is missing: it is not the recipe of a started run")
    adjusted = policy_of(store.read_state(checkpoint)).adjusted
    if "swiglu_clamp" in adjusted and run.model.swiglu_clamp is None:
        run = run.model_copy(update={"model": run.model.model_copy(update={"swiglu_clamp": SWIGLU_CLAMP})})
    return run


def next_run_of(checkpoint: Path) -> RunConfig:
    """As `run_of`, with what people have changed live and what holds at the step after the checkpoint, for good. Raises
    DataError, too."""
    return config_at(run_of(checkpoint), live_changes_of(checkpoint), store.read_state(checkpoint).step + 1)


def live_changes_of(checkpoint: Path) -> list[ChangeMade]:
    """What people have changed live that holds after the checkpoint, for some steps at least, as its run would go on:
    events for the journal of one that is made of it. Raises CheckpointError, DataError."""
    journal = RunDirectory(checkpoint.resolve().parent.parent).journal
    step = store.read_state(checkpoint).step
    return [change for change in changes_of(journal) if change.until is None or change.until > step]


def policy_of(state: store.RunState) -> PolicyState:
    """What the policy remembered at a checkpoint. Raises CheckpointError."""
    guard = state.stability.get("guard", {})
    try:
        return PolicyState.model_validate(guard.get("policy", {}) if isinstance(guard, dict) else guard)
    except ValidationError as error:
        raise store.refuse_stability("the checkpoint", error) from None


class WholeState:
    """Weights and moments of a checkpoint, by name and kind ("weight", "exp_avg", "exp_avg_sq"); fp32 on the CPU.

    Files are not read whole; memory is that of the requested tensor. They are not verified against the
    manifest here: `store.verify` does that. Raises CheckpointError for pieces that do not form whole tensors, and
    for unreadable files.
    """

    def __init__(
        self, checkpoint: Path, parts: Mapping[str, Pieces] | None = None, partly: bool = False
    ) -> None:
        """parts: the descriptions of its parts by name, if they are known. partly: of some of them, which need not form
        whole tensors."""
        self.checkpoint = checkpoint
        if parts is None:
            parts = {name: read_pieces(checkpoint / name) for name in store.read_contents(checkpoint).parts}
        if not partly and not any(part.pieces for part in parts.values()):
            raise CheckpointError(f"{checkpoint}: holds no weights")
        held_kinds = {kind for part in parts.values() for kind in part.kinds}
        if not partly and (not held_kinds <= set(KINDS) or KINDS[0] not in held_kinds):
            raise CheckpointError(
                f"{checkpoint}: its ranks hold {make_visible(sorted(held_kinds), 200)}: not parts of one checkpoint"
            )
        self.kinds = tuple(kind for kind in KINDS if kind in held_kinds)
        self._held: dict[str, dict[int, list[tuple[str, ShardPiece]]]] = {}
        for part_name, part in parts.items():
            tensor_file = part_name.removesuffix(".json") + ".safetensors"
            for piece in part.pieces:
                by_rank = self._held.setdefault(piece.name, {})
                by_rank.setdefault(part.tensor_rank, []).append((tensor_file, piece))
        for name, by_rank in self._held.items():
            for rank_pieces in by_rank.values():
                rank_pieces.sort(key=lambda item: item[1].start)
            if not partly:
                self._check(name)
        self._files: dict[str, Reader] = {}
        self._last: tuple[tuple[str, str, int, int], Tensor] | None = None

    @property
    def names(self) -> list[str]:
        return sorted(self._held)

    @property
    def adam_step(self) -> float:
        """The optimizer's count of updates; 0 without its state."""
        return store.read_state(self.checkpoint).adam_step

    @property
    def stateful(self) -> bool:
        """Whether there is optimizer state."""
        return self.adam_step > 0

    @property
    def shared(self) -> dict[str, Tensor]:
        """The optimizer's shared state by name, on the CPU; empty if there is none. Raises CheckpointError."""
        shared_path = self.checkpoint / store.SHARED
        if not shared_path.exists():
            return {}
        shared_reader = Reader(shared_path)
        return read_tensors(shared_reader)

    @property
    def expert_state(self) -> dict[str, Tensor]:
        """What of the shared state belongs to the model, whatever the optimizer: that of its routers, by name."""
        return {name: tensor for name, tensor in self.shared.items() if name.startswith(PREFIX)}

    @property
    def biases(self) -> Tensor | None:
        """The bias of the choice of experts, fp32 [layers, experts]; None if there is none."""
        return self.shared.get(BIAS)

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """The kinds of tensors held for a parameter, a subset of `kinds`."""
        return tuple(self._any(name).statistics)

    def placement_of(self, name: str) -> Placement:
        return self._any(name).placement

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        any_piece = self._any(name)
        whole_shape = list(any_piece.shape)
        if any_piece.dim is not None:
            whole_shape[any_piece.dim] *= len(self._of(name))
        return tuple(whole_shape)

    def check_fits(self, model: ModelConfig) -> None:
        """Raises CheckpointError unless this holds exactly the parameters of `model`."""
        wanted_parameters = describe_parameters(model)
        if unknown := sorted(set(self._held) - set(wanted_parameters)):
            raise CheckpointError(
                f"{self.checkpoint}: holds {make_visible(unknown[0], 200)!r}, which the recipe's model does not "
                "have: it belongs to another model"
            )
        for name, of in wanted_parameters.items():
            if (self.shape_of(name), self.placement_of(name)) != (of.shape, of.placement):
                raise CheckpointError(
                    f"{self.checkpoint}: {name} is {self.shape_of(name)}, in the recipe's model {of.shape}: it "
                    "belongs to another model"
                )

    def pieces_of(self, name: str) -> list[ShardPiece]:
        return [shard_piece for rank_pieces in self._of(name).values() for _, shard_piece in rank_pieces]

    def read_tensor(self, name: str, kind: str) -> Tensor:
        """The whole tensor `name`."""
        slices = self._plan_tensor(name, kind)
        return self._join_tensor(name, [self._read(tensor_slice) for tensor_slice in slices])

    def read_range(self, name: str, kind: str, rank: int, size: int, start: int, numel: int) -> Tensor:
        """`numel` elements from `start` of the flattened shard of `name` on tensor rank `rank` of `size`.

        If the checkpoint has as many tensor ranks, only those elements are read.
        """
        # A shard is often requested in consecutive ranges.
        shard_key = (name, kind, rank, size)
        if self._is_cut_alike(name, size) or self._last is None or self._last[0] != shard_key:
            slices = self.plan_range(name, kind, rank, size, start, numel)
            read_slices = [self._read(range_slice) for range_slice in slices]
            if self._is_cut_alike(name, size):
                return _join(read_slices)
            self._last = (shard_key, self._join_shard(name, rank, size, read_slices))
        return self._last[1][start : start + numel]

    def plan_range(self, name: str, kind: str, rank: int, size: int, start: int, numel: int) -> list[Slice]:
        """What `read_range` reads: those elements, or the whole tensor where its shards were cut otherwise."""
        if self._is_cut_alike(name, size):
            shard_rank = 0 if self._any(name).dim is None else rank
            return self._plan_shard(name, kind, shard_rank, start, numel)
        return self._plan_tensor(name, kind)

    def join_range(
        self, name: str, rank: int, size: int, start: int, numel: int, read_slices: Sequence[Tensor]
    ) -> Tensor:
        """What `read_range` returns, of what `plan_range` planned."""
        if self._is_cut_alike(name, size):
            return _join(read_slices)
        return self._join_shard(name, rank, size, read_slices)[start : start + numel]

    def holds(self, fragments: Sequence[Fragment], rank: int, size: int) -> bool:
        """Whether all elements of these fragments of tensor rank `rank` of `size` are there, in shards of that size."""
        for f in fragments:
            if f.name not in self._held or not self._is_cut_alike(f.name, size):
                return False
            if (self._any(f.name).placement, self._any(f.name).shape) != (f.placement, f.shape):
                return False
            shard_rank, end = 0 if f.dim is None else rank, f.start + f.numel
            inside = [
                (max(f.start, piece.start), min(end, piece.end))
                for _, piece in self._of(f.name).get(shard_rank, ())
                if piece.start < end and f.start < piece.end
            ]
            if [f.start, *(last for _, last in inside)] != [*(first for first, _ in inside), end]:
                return False
        return True

    def _is_cut_alike(self, name: str, size: int) -> bool:
        """Whether the shards of a parameter are those of `size` tensor ranks."""
        return self._any(name).dim is None or len(self._of(name)) == size

    def files_of_range(self, name: str, rank: int, size: int, start: int, numel: int) -> set[str]:
        """The files that `read_range` opens for these elements."""
        piece, by_rank = self._any(name), self._of(name)
        if piece.dim is not None and len(by_rank) != size:
            return {file for held in by_rank.values() for file, _ in held}
        held = by_rank[0 if piece.dim is None else rank]
        return {file for file, piece in held if max(start, piece.start) < min(start + numel, piece.end)}

    def _of(self, name: str) -> dict[int, list[tuple[str, ShardPiece]]]:
        pieces_by_rank = self._held.get(name)
        if pieces_by_rank is None:
            raise CheckpointError(
                f"{self.checkpoint}: holds no parameter {name!r}: it belongs to another model"
            )
        return pieces_by_rank

    def _any(self, name: str) -> ShardPiece:
        return next(iter(self._of(name).values()))[0][1]

    def _check(self, name: str) -> None:
        """Check that the pieces of a parameter form one tensor, each element once."""
        by_rank, any_piece = self._of(name), self._any(name)
        pieces_fit = set(by_rank) == set(range(1 if any_piece.dim is None else len(by_rank)))
        if any_piece.dim is not None:
            pieces_fit &= sum(any_piece.sections) == len(by_rank) * any_piece.shape[any_piece.dim]
            pieces_fit &= not any(section_size % len(by_rank) for section_size in any_piece.sections)
        for rank_pieces in by_rank.values():
            piece_starts = [piece.start for _, piece in rank_pieces]
            piece_ends = [piece.end for _, piece in rank_pieces]
            pieces_fit &= [*piece_starts, math.prod(any_piece.shape)] == [0, *piece_ends]
            pieces_fit &= all(_described(piece) == _described(any_piece) for _, piece in rank_pieces)
        if not pieces_fit:
            raise CheckpointError(
                f"{self.checkpoint}: the pieces of {make_visible(name, 200)!r} do not form one tensor: some are "
                "missing, duplicated or of another one"
            )

    def _plan_shard(self, name: str, kind: str, rank: int, start: int, numel: int) -> list[Slice]:
        """Elements of the flattened shard of one tensor rank of the checkpoint."""
        slices = []
        for tensor_file, piece in self._of(name)[rank]:
            first, end = max(start, piece.start) - piece.start, min(start + numel, piece.end) - piece.start
            if first < end:
                slices.append(Slice(tensor_file, entry_name(kind, name), first, end))
        return slices

    def _plan_tensor(self, name: str, kind: str) -> list[Slice]:
        """All elements of a parameter, shard by shard."""
        elements = math.prod(self._any(name).shape)
        return [s for rank in sorted(self._of(name)) for s in self._plan_shard(name, kind, rank, 0, elements)]

    def _join_tensor(self, name: str, read_slices: Sequence[Tensor]) -> Tensor:
        """The whole tensor, of what `_plan_tensor` planned."""
        shards = _join(read_slices).view(len(self._of(name)), *self._any(name).shape)
        return join_shards(list(shards), self.placement_of(name))

    def _join_shard(self, name: str, rank: int, size: int, read_slices: Sequence[Tensor]) -> Tensor:
        """The flattened shard of tensor rank `rank` of `size`, of the whole tensor's slices."""
        whole_tensor = self._join_tensor(name, read_slices)
        return cut_shard(whole_tensor, self.placement_of(name), rank, size).flatten()

    def _read(self, of: Slice) -> Tensor:
        if of.file not in self._files:
            self._files[of.file] = Reader(self.checkpoint / of.file)
        reader = self._files[of.file]
        of.check_entry(reader.path, reader.entries.get(of.entry))
        return reader.read_range(of.entry, of.start, of.end)


def _join(read_slices: Sequence[Tensor]) -> Tensor:
    return read_slices[0] if len(read_slices) == 1 else torch.cat(list(read_slices))


def read_tensors(reader: Reader) -> dict[str, Tensor]:
    """All tensors of a file, by name. Raises CheckpointError."""
    return {name: reader.read_tensor(name) for name in reader.entries}


def _described(piece: ShardPiece) -> tuple[object, ...]:
    """What all pieces of a tensor have in common."""
    return piece.placement, piece.shape, tuple(piece.statistics)


def load_into(engine: Any, checkpoint: Path, state: RunState) -> None:
    """Load `checkpoint`, whose state.json is `state`, into an engine of any layout: weights, moments and fp16's loss
    scale, bit for bit.

    Every rank reads the ranges that it holds, one tensor in memory at a time. Not collective: a single rank may fail
    with CheckpointError. Once all agree, `engine.refresh_weights()` updates the low-precision weights.
    """
    check_model(checkpoint, engine.config.model, store.read_contents(checkpoint))
    check_optimizer(checkpoint, state, engine.config.optimizer.name)
    whole_state, topology = WholeState(checkpoint), engine.topology
    whole_state.check_fits(engine.config.model)

    def read(fragment: Fragment, kind: str) -> Tensor:
        return whole_state.read_range(
            fragment.name, kind, topology.tensor_rank, topology.layout.tensor, fragment.start, fragment.numel
        )

    engine.flat_state().fill_from(read, state.adam_step)
    restore_rest(engine, state, whole_state.shared)


def restore_rest(engine: Any, state: RunState, shared: dict[str, Tensor]) -> None:
    """Give an engine what a checkpoint holds besides weights and moments. shared: the optimizer's shared state. Raises
    CheckpointError."""
    engine.restore_shared_state(shared)
    if state.layout.precision == engine.config.precision.kind:
        engine.restore_scaler(state.scaler)
    engine.restore_fp8_history(state.fp8)
    engine.updates = state.updates


def check_optimizer(checkpoint: Path, state: RunState, name: str) -> None:
    """Raises CheckpointError if the optimizer `name` cannot continue from the checkpoint's state."""
    if state.adam_step and not is_interchangeable(state.optimizer, name):
        raise CheckpointError(
            f"{checkpoint} holds the state of optimizer.name={state.optimizer}, which {name} cannot continue. "
            f"Set it back; or begin with the weights alone: `megastable checkpoint export {checkpoint} NEW_RUN`, then "
            f"start NEW_RUN with optimizer.name={name}, and a warm-up of its own: its moments are fresh"
        )


def check_model(checkpoint: Path, model: ModelConfig, contents: store.Contents) -> None:
    """Raises CheckpointError, with the differences, if the weights are of another model. contents: the manifest."""
    if contents.fingerprints.get("model") == store.model_fingerprint(model):
        return
    checkpoint_model = store.list_identity(recipe.load_recipe(checkpoint / store.RECIPE).model)
    differing_keys = [
        f"model.{key}: {checkpoint_model[key]} in the checkpoint, {value} in this run"
        for key, value in store.list_identity(model).items()
        if checkpoint_model.get(key) != value
    ]
    if differing_keys:
        raise CheckpointError(f"{checkpoint} is of another model: {'; '.join(differing_keys)}")
