"""Read a checkpoint folder of DeepSpeed's ZeRO 1, 2 or 3 as whole tensors: fp32 master weights and Adam's moments.

Every data-parallel rank saved flat buffers without names. `param_shapes` in the same files names the parameters of each
buffer in order: ZeRO 1 and 2 concatenate all parameters of an optimizer group, and split the whole evenly over the
ranks; ZeRO 3 splits every parameter evenly, and concatenates the parts (as in deepspeed/utils/zero_to_fp32.py).
DeepSpeed's other description, `param_slice_mappings`, is not used: it is wrong under `round_robin_gradients` (0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megastable.base.errors import CheckpointError
from megastable.base.text import visible
from megastable.engine.flatstate import KINDS
from megastable_tools.convert.foreign import unpickle

OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
LARGEST = 1 << 42  # elements of a parameter: more means a damaged file


@dataclass(frozen=True)
class Range:
    """Elements [start, start + numel) of the buffers of `rank`, concatenated from `group` on."""

    rank: int
    group: int
    start: int
    numel: int


@dataclass(frozen=True)
class _Saved:
    """One rank's flat buffer per group and kind; None if that kind is missing."""

    path: Path
    buffers: dict[str, list[Tensor] | None]
    step: float


class ZeroState:
    """The parameters in a folder such as global_step100/. Files are mapped; tensors are assembled on request.

    shapes: by name. kinds: a subset of `KINDS`. stage: of ZeRO. steps, skipped: global steps of the run, and those
    skipped by fp16. adam_step: the optimizer's own count. client: the run's own data (client_state).
    Raises CheckpointError for a folder that is damaged, incomplete, or of a run with tensor or pipeline parallelism.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ranks, models = _files(folder)
        content = _mapping(unpickle.load(models[0]), models[0])
        self.client, self._module = content, unpickle.fields(content.get("module"))
        _check_model(content, models[0])
        self.steps = _count(content.get("global_steps"))
        self.skipped = _count(content.get("skipped_steps"))
        groups = _shapes(content.get("param_shapes"), models[0])
        self.shapes = {name: shape for group in groups for name, shape in group.items()}
        if len(self.shapes) != sum(map(len, groups)):
            raise CheckpointError(f"{models[0]}: a parameter lies in two groups of the optimizer")
        held = [_optimizer(path) for path in ranks]
        first = held[0]
        self.stage = 3 if "fp32_flat_groups" in first else int(unpickle.number(first.get("zero_stage")) or 1)
        self.loss_scale = unpickle.number(unpickle.fields(first.get("loss_scaler")).get("cur_scale"))
        self._saved = [_read(path, of, self.stage) for path, of in zip(ranks, held, strict=True)]
        _check_ranks(first, self._saved)
        self.kinds = tuple(k for k in KINDS if all(s.buffers[k] is not None for s in self._saved))
        if self.kinds != KINDS:
            self.kinds = KINDS[:1]
        self.adam_step = self._saved[0].step if self.kinds == KINDS else 0.0
        self._sizes = [[len(b) for b in s.buffers[KINDS[0]] or []] for s in self._saved]
        try:
            if self.stage == 3:
                self._ranges = _zero3(self.shapes, self._sizes)
            else:
                paddings = first.get("param_alignment_paddings")
                self._ranges = _zero12(groups, self._sizes, paddings)
        except _Contradiction as error:
            raise CheckpointError(
                f"{folder}: {error}: files of two checkpoints are mixed, or the optimizer is not one that is known "
                "here; get the checkpoint again from where it was written"
            ) from None

    def tensor(self, name: str, kind: str) -> Tensor:
        """A whole tensor, fp32. A weight must match the model's file, where ZeRO 1 and 2 store it whole."""
        parts = [part.float() for r in self._ranges[name] for part in self._slices(r, kind)]
        found = torch.cat(parts).view(self.shapes[name]) if parts else torch.zeros(self.shapes[name])
        rounded = unpickle.dense(self._module.get(name)) if kind == KINDS[0] else None
        if rounded is not None and rounded.shape == found.shape and not _agree(found, rounded):
            raise CheckpointError(
                f"{self.folder}: {visible(name, 200)} in the optimizer's files is not the one in the model's: files of "
                "two checkpoints are mixed, or they are damaged; get the checkpoint again from where it was written"
            )
        return found

    def _slices(self, r: Range, kind: str) -> Iterator[Tensor]:
        """Slices of a range. Sub-groups of ZeRO 3 follow one another; a parameter may end in the next."""
        buffers = self._saved[r.rank].buffers[kind]
        assert buffers is not None
        start, left = r.start, r.numel
        for buffer, size in zip(buffers[r.group :], self._sizes[r.rank][r.group :], strict=True):
            if left and start < size:
                taken = min(left, size - start)
                yield buffer[start : start + taken]
                left, start = left - taken, start + taken
            start -= size


def _agree(master: Tensor, rounded: Tensor) -> bool:
    """Whether `rounded` is `master` in the model's precision, with any rounding."""
    limits = torch.finfo(rounded.dtype)
    return torch.allclose(
        master, rounded.float(), rtol=2 * limits.eps, atol=limits.smallest_normal, equal_nan=True
    )


class _Contradiction(Exception):
    """The buffers' descriptions in the files do not fit the buffers."""


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The optimizer's files by data-parallel rank, and the model's; all must exist."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}") from None
    optimizers = {(int(m[1]), int(m[2])): folder / m[0] for m in map(OPTIMIZER.fullmatch, names) if m}
    models = {(int(m[1] or 0), int(m[2])): folder / m[0] for m in map(MODEL.fullmatch, names) if m}
    if any("expert_" in name or name.startswith("expp_rank_") for name in names):
        raise CheckpointError(f"{folder}: it is of a mixture of experts, which this model is not")
    if (cut := 1 + max((mp for _, mp in [*optimizers, *models]), default=0)) > 1:
        raise CheckpointError(
            f"{folder}: written under tensor or pipeline parallelism ({cut} model-parallel ranks): only checkpoints "
            "of 1 can be read. With DeepSpeed, convert it by `python -m deepspeed.checkpoint.ds_to_universal`, load "
            "that with load_universal in one tensor and one pipeline rank, and save it again"
        )
    if not models:
        raise CheckpointError(
            f"{folder}: holds no *mp_rank_00_model_states.pt: it is not a checkpoint of DeepSpeed; give the folder "
            "that has global_step*/ and `latest` in it, or one such as global_step100"
        )
    if not optimizers:
        raise CheckpointError(
            f"{folder}: holds no *_optim_states.pt: the run was without ZeRO, or its optimizer was not saved; only "
            "ZeRO 1, 2 and 3 keep the fp32 weights that are read here"
        )
    missing = sorted({(rank, 0) for rank in range(max(optimizers)[0] + 1)} - set(optimizers))
    if missing:
        raise CheckpointError(
            f"{folder}: the file of data-parallel rank {missing[0][0]} (of {max(optimizers)[0] + 1}) is missing: get "
            "it from the host that wrote it"
        )
    return [optimizers[key] for key in sorted(optimizers)], [models[key] for key in sorted(models)]


def _mapping(content: Any, path: Path) -> dict[str, Any]:
    found = unpickle.fields(content)
    if not found:
        raise CheckpointError(f"{path}: not a file of DeepSpeed: it holds no names")
    return found


def _check_model(content: Mapping[str, Any], path: Path) -> None:
    if (size := _count(content.get("mp_world_size"))) > 1:
        raise CheckpointError(f"{path}: written under tensor parallelism of {size}: only 1 can be read")
    if frozen := content.get("frozen_param_shapes"):
        name = next(iter(unpickle.fields(frozen)), "?")
        raise CheckpointError(
            f"{path}: {visible(name, 200)} was frozen, and exists in 16 bits only: this model trains all of its "
            "weights"
        )


def _shapes(given: Any, path: Path) -> list[dict[str, tuple[int, ...]]]:
    groups = []
    for group in given if isinstance(given, list) else []:
        found = {}
        for name, shape in unpickle.fields(group).items():
            if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise CheckpointError(f"{path}: param_shapes: {visible(name, 200)} has no shape")
            if _numel(shape) > LARGEST:
                raise CheckpointError(f"{path}: param_shapes: {visible(name, 200)} is impossibly large")
            found[name] = tuple(shape)
        groups.append(found)
    if not any(groups):
        raise CheckpointError(
            f"{path}: holds no param_shapes, which are needed to find parameters: it was not written by ZeRO, or by a "
            "DeepSpeed before 0.4"
        )
    return groups


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _count(value: Any) -> int:
    found = unpickle.number(value)
    return int(found) if found is not None and found >= 0 else 0


def _optimizer(path: Path) -> dict[str, Any]:
    content = _mapping(unpickle.load(path), path)
    return _mapping(content.get("optimizer_state_dict"), path)


def _read(path: Path, held: Mapping[str, Any], stage: int) -> _Saved:
    weights = held.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    masters = [unpickle.dense(t) for t in weights] if isinstance(weights, list) else []
    if not masters or any(t is None or t.dim() != 1 for t in masters):
        raise CheckpointError(
            f"{path}: holds no flat fp32 weights: they were offloaded to a disk, or it is not of ZeRO 1, 2 or 3"
        )
    inner = held.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    tree = unpickle.fields(inner)
    # "Elastic" checkpoints hold a list: the state of every group.
    states = dict(enumerate(inner)) if isinstance(inner, list) else tree.get("state")
    settings = tree.get("param_groups")
    of = [unpickle.fields(states.get(i)) if isinstance(states, dict) else {} for i in range(len(masters))]
    buffers: dict[str, list[Tensor] | None] = {KINDS[0]: [t for t in masters if t is not None]}
    for kind in KINDS[1:]:
        found = [unpickle.dense(state.get(kind)) for state in of]
        fit = [
            m is not None and m.dim() == 1 and w is not None and len(m) >= len(w)
            for m, w in zip(found, masters, strict=True)
        ]
        buffers[kind] = [m for m in found if m is not None] if all(fit) else None
    steps = [state.get("step") for state in of]
    steps += [unpickle.fields(g).get("step") for g in settings] if isinstance(settings, list) else []
    steps.append(held.get("base_optimizer_state_step"))
    step = next((n for n in map(unpickle.number, steps) if n is not None), 0.0)
    return _Saved(path, buffers, step)


def _check_ranks(first: Mapping[str, Any], saved: Sequence[_Saved]) -> None:
    counts = first.get("partition_count")
    wanted = max(map(_count, counts), default=0) if isinstance(counts, list) else _count(counts)
    if wanted and wanted != len(saved):
        raise CheckpointError(
            f"{saved[0].path.parent}: written by {wanted} data-parallel ranks, but there are files of {len(saved)}: "
            "some are missing, or an older checkpoint is in the same folder"
        )
    if len({s.step for s in saved}) > 1:
        raise CheckpointError(
            f"{saved[0].path.parent}: the ranks' optimizers are at steps "
            f"{', '.join(sorted({f'{s.step:g}' for s in saved}))}: files of two checkpoints are mixed"
        )


def _zero12(
    groups: Sequence[Mapping[str, tuple[int, ...]]], sizes: Sequence[Sequence[int]], paddings: Any
) -> dict[str, list[Range]]:
    """Location of every parameter under ZeRO 1 and 2. sizes: by rank and group, without padding at the end."""
    found: dict[str, list[Range]] = {}
    if {len(s) for s in sizes} != {len(groups)}:
        raise _Contradiction(f"{len(groups)} groups of parameters are named, the files hold {len(sizes[0])}")
    for g, shapes in enumerate(groups):
        share = sizes[0][g]  # of every rank; the last ones may be shorter, without their padding
        given = paddings[g] if isinstance(paddings, list) and g < len(paddings) else []
        between = [_count(n) for n in given] if isinstance(given, list) else []
        offset = 0
        for i, (name, shape) in enumerate(shapes.items()):
            numel = _numel(shape)
            fits = offset + numel <= share * len(sizes)
            found[name] = list(_evenly(offset, numel, share, g)) if fits else []
            if not fits or any(r.start + r.numel > sizes[r.rank][g] for r in found[name]):
                raise _Contradiction(f"{visible(name, 200)} does not fit into the files")
            offset += numel + (between[i] if i < len(between) else 0)
        align = 2 * len(sizes)  # NCCL's alignment; there is no further padding
        held = sum(s[g] for s in sizes)
        if -(-offset // align) != -(-held // align):
            raise _Contradiction(f"group {g} holds {held} elements, its parameters are {offset}")
    return found


def _evenly(offset: int, numel: int, share: int, group: int) -> Iterator[Range]:
    end = offset + numel
    while offset < end:
        rank, start = divmod(offset, share)
        taken = min(end - offset, share - start)
        yield Range(rank, group, start, taken)
        offset += taken


def _zero3(shapes: Mapping[str, tuple[int, ...]], sizes: Sequence[Sequence[int]]) -> dict[str, list[Range]]:
    """Location of every parameter under ZeRO 3."""
    world, offset = len(sizes), 0
    found: dict[str, list[Range]] = {}
    for name, shape in shapes.items():
        numel = _numel(shape)
        share = -(-numel // world)
        shares = [(rank, min(share, numel - rank * share)) for rank in range(world)]
        found[name] = [Range(rank, 0, offset, n) for rank, n in shares if n > 0]
        offset += share
    for held in map(sum, sizes):
        if held != offset:
            raise _Contradiction(f"a rank holds {held} elements, its share of the parameters is {offset}")
    return found
