"""Import a checkpoint written by DeepSpeed itself as a new run: weights, Adam's moments and step.

    import_deepspeed(Path("old/checkpoints"), Path("runs/new"), run, print)

The parameters may have the names of our layers ("1.attention.qkv.weight": older runs, and other code that trains our
model), or those of Hugging Face's architectures (architectures.py), after any common prefix.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megastable.base.errors import CheckpointError, ConfigError
from megastable.base.text import make_visible
from megastable.checkpoint.new_run import ADAM, refuse_existing, write_run
from megastable.checkpoint.whole import Described, describe_parameters
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS
from megastable.model.gpt import GPT
from megastable.optim.build import ADAMS
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import TensorParallel
from megastable_tools.convert.derived_runs import state_of, with_vocabulary
from megastable_tools.convert.foreign import unpickle
from megastable_tools.convert.huggingface.architectures import (
    EVERYWHERE,
    OWN,
    TensorRows,
    map_tensor_names,
    merge_tensors,
)

Parts = Mapping[str, tuple[TensorRows, ...]]  # the foreign tensors of each of our parameters


def import_deepspeed(folder: Path, out: Path, run: RunConfig, say: Callable[[str], None]) -> Path:
    """Make the run directory `out` from DeepSpeed's checkpoint: `folder` with `latest`, or one global_step*/. Returns
    the checkpoint's folder.

    run: the new run's recipe; its model must be the checkpoint's. Moments are imported if all weights have them and the
    recipe's optimizer continues from Adam's; the data starts at 0, unless client_state holds a "cursor". Raises
    CheckpointError, ConfigError, DataError; then nothing of `out` is left.
    """
    refuse_existing(out)
    if run.model.experts is not None:
        raise ConfigError(
            "model.experts: experts are not imported from DeepSpeed's checkpoints: leave it out"
        )
    source = find_deepspeed_folder(folder)
    state = ZeroState(source)
    say(
        f"warning: {source}: DeepSpeed writes no checksums and no list of files for a checkpoint: it can be checked "
        "for consistency, but not whether it is complete and unchanged"
    )
    run = with_vocabulary(run)
    held = describe_parameters(run.model)
    whose, named_parts, prefix = naming_of(run.model, held, state, source)
    optimizer = state.kinds == KINDS and run.optimizer.name in ADAMS
    why = f"{run.optimizer.name} cannot continue from them" if state.kinds == KINDS else "they start at zero"
    say(
        f"{source}: ZeRO {state.stage}, step {state.steps}, parameters named as {whose}, "
        + ("with Adam's moments" if optimizer else f"without Adam's moments: {why}")
    )
    say(
        f"note: {source}: it does not contain settings of the model: using the recipe's, "
        f"{describe_unseen_settings(run.model)}"
    )

    def whole(name: str, kind: str) -> Tensor:
        parts = {part.name: state.assemble_tensor(prefix + part.name, kind) for part in named_parts[name]}
        return merge_tensors(parts, named_parts[name], held[name].shape[0])

    cursor = unpickle.parse_number(state.client.get("cursor")) or 0
    updates = int(max(state.adam_step or state.steps - state.skipped, 0))
    trained_tokens = run.batches.reach_after(0, updates) * run.model.sequence_length  # as if by this recipe
    scaler = {"cur_scale": state.loss_scale} if run.precision.kind == "fp16" and state.loss_scale else {}
    at = state_of(
        run, step=state.steps, updates=updates, trained_tokens=trained_tokens, cursor=int(max(cursor, 0)),
        adam_step=state.adam_step, scaler=scaler,
    )  # fmt: skip
    origin = {"source": str(source), "how": "imported from DeepSpeed", "steps": state.steps}
    return write_run(out, run, at, whole, optimizer=ADAM if optimizer else None, origin=origin)


def describe_unseen_settings(config: ModelConfig) -> str:
    """The model keys that names and shapes do not show: the usual ones, and choices other than the defaults."""
    c, fields = config, ModelConfig.model_fields.items()
    seen = OWN | EVERYWHERE | {"qk_norm", "qkv_bias"}
    chosen = {
        key: getattr(c, key) for key, field in fields if key not in seen and getattr(c, key) != field.default
    }
    usual = {"heads": c.heads, "kv_heads": c.key_value_heads, "rope_theta": f"{c.rope_theta:g}",
             "norm_eps": f"{c.norm_eps:g}"}  # fmt: skip
    rope_text = {"rope_scaling": f"({c.rope_scaling})"} if c.rope_scaling else {}
    return " ".join(f"{key}={setting_value}" for key, setting_value in (usual | rope_text | chosen).items())


def find_deepspeed_folder(folder: Path) -> Path:
    """The folder with the files: `folder` itself, the one that its `latest` names, or the only global_step*/ in it."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    latest = folder / "latest"
    steps = sorted(path for path in folder.glob("global_step*") if path.is_dir())
    if any(folder.glob("*_model_states.pt")):
        return folder
    if latest.is_file():
        try:
            tag = latest.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{latest}: cannot be read: {error}") from None
        if not tag or "/" in tag or tag in (".", "..") or not (folder / tag).is_dir():
            there = (
                f"; there are {', '.join(make_visible(step_path.name) for step_path in steps)}"
                if steps
                else ""
            )
            raise CheckpointError(f"{latest} names {make_visible(tag, 100)!r}, which is not there{there}")
        return folder / tag
    if len(steps) == 1:
        return steps[0]
    if steps:
        raise CheckpointError(
            f"{folder}: holds several checkpoints and no `latest`: name one, such as {steps[-1]}"
        )
    return folder


def naming_of(
    config: ModelConfig, held: Mapping[str, Described], state: ZeroState, where: Path
) -> tuple[str, Parts, str]:
    """The naming scheme of the checkpoint's parameters: whose it is, for people; their tensors; the prefix of the
    names. All must belong to the model.

    Raises CheckpointError for the first parameter that is missing, left over or of another shape.
    """
    with torch.device("meta"):
        gpt = GPT(config, TensorParallel(), recompute="none", seed=0)
    # As DeepSpeed sees them: by the module names of `GPT`.
    own_names = {placement_of(parameter).name: key for key, parameter in gpt.named_parameters()}
    own_parts = {name: (TensorRows(own_names[name], 0, of.shape),) for name, of in held.items()}
    possible_namings: list[tuple[str, Parts]] = [("our layers", own_parts)]
    with contextlib.suppress(ConfigError):  # no Hugging Face architecture matches this model
        possible_namings.append(("Hugging Face's", map_tensor_names(config)))
    names = state.shapes
    for whose, named_parts in possible_namings:
        anchor = next(iter(named_parts.values()))[0].name
        # The shortest: "0.weight" is also the end of other names.
        for anchor_match in sorted((n for n in names if n == anchor or n.endswith(f".{anchor}")), key=len):
            prefix = anchor_match.removesuffix(anchor)
            if all(n.startswith(prefix) for n in names):
                _check(named_parts, state, prefix, where)
                return whose, named_parts, prefix
    some = ", ".join(make_visible(shown_name, 100) for shown_name in list(names)[:3])
    known = " or ".join(f"{next(iter(of.values()))[0].name!r} ({whose})" for whose, of in possible_namings)
    raise CheckpointError(
        f"{where}: its parameters are named {some}, ...: the supported models have names such as {known}"
    )


def _check(parts: Parts, state: ZeroState, prefix: str, where: Path) -> None:
    """Check that the checkpoint's parameters are those of `parts`, with their shapes."""
    wanted_parts = {prefix + part.name: part for of in parts.values() for part in of}
    for part_name, part in wanted_parts.items():
        shape, shown_name = state.shapes.get(part_name), make_visible(part_name, 200)
        if shape is None:
            raise CheckpointError(f"{where}: {shown_name} is missing: the recipe's model is another one")
        if shape != part.shape:
            raise CheckpointError(
                f"{where}: {shown_name} is {shape}, in the recipe's model {part.shape}: correct the recipe's "
                "model section"
            )
    if left := sorted(set(state.shapes) - set(wanted_parts)):
        raise CheckpointError(
            f"{where}: {make_visible(left[0], 200)} has no home in the recipe's model ({len(left)} such): it is of "
            "another model"
        )


# A folder of DeepSpeed's ZeRO 1, 2 or 3 as whole tensors: fp32 master weights and Adam's moments. Every data-parallel
# rank saved flat buffers without names. `param_shapes` in the same files names the parameters of each buffer in order:
# ZeRO 1 and 2 concatenate all parameters of an optimizer group, and split the whole evenly over the ranks; ZeRO 3
# splits every parameter evenly, and concatenates the parts (as in deepspeed/utils/zero_to_fp32.py). DeepSpeed's other
# description, `param_slice_mappings`, is not used: it is wrong under `round_robin_gradients` (0.19.8).


OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}  # DeepSpeed's names of them
LARGEST = 1 << 42  # elements of a parameter: more means a damaged file


@dataclass(frozen=True)
class Range:
    """Elements [start, start + numel) of the buffers of `rank`, concatenated from `group` on."""

    rank: int
    group: int
    start: int
    numel: int


Buffers = dict[str, list[Tensor] | None]  # one rank's, per kind and group; None if that kind is missing


class ZeroState:
    """The parameters in a folder such as global_step100/. Files are mapped; tensors are assembled on request.

    shapes: by name. kinds: a subset of `KINDS`. stage: of ZeRO. steps, skipped: global steps of the run, and those
    skipped by fp16. adam_step: the optimizer's own count. client: the run's own data (client_state).
    Raises CheckpointError for a folder that is damaged, incomplete, or of a run with tensor or pipeline parallelism.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rank_files, model_files = _files(folder)
        file_content = _mapping(unpickle.load_pickle(model_files[0]), model_files[0])
        self.client, self._module = file_content, unpickle.read_fields(file_content.get("module"))
        if (size := _count(file_content.get("mp_world_size"))) > 1:
            raise CheckpointError(
                f"{model_files[0]}: written under tensor parallelism of {size}: only 1 can be read"
            )
        if frozen := file_content.get("frozen_param_shapes"):
            name = next(iter(unpickle.read_fields(frozen)), "?")
            raise CheckpointError(
                f"{model_files[0]}: {make_visible(name, 200)} was frozen, and exists in 16 bits only: this model "
                "trains all of its weights"
            )
        self.steps = _count(file_content.get("global_steps"))
        self.skipped = _count(file_content.get("skipped_steps"))
        shape_groups = _shapes(file_content.get("param_shapes"), model_files[0])
        self.shapes = {name: shape for shape_group in shape_groups for name, shape in shape_group.items()}
        if len(self.shapes) != sum(map(len, shape_groups)):
            raise CheckpointError(f"{model_files[0]}: a parameter lies in two groups of the optimizer")
        held = [
            _mapping(
                _mapping(unpickle.load_pickle(rank_file), rank_file).get("optimizer_state_dict"), rank_file
            )
            for rank_file in rank_files
        ]
        first = held[0]
        written_stage = first.get("zero_stage")
        member_name = unpickle.read_member_name(written_stage)
        named_stage = int(unpickle.parse_number(written_stage) or STAGES.get(member_name or "", 1))
        self.stage = 3 if "fp32_flat_groups" in first else named_stage
        loss_scaler = unpickle.read_fields(first.get("loss_scaler"))
        self.loss_scale = unpickle.parse_number(loss_scaler.get("cur_scale"))
        rank_states = [_read(path, of, self.stage) for path, of in zip(rank_files, held, strict=True)]
        self._buffers, steps = [buffers for buffers, _ in rank_states], [step for _, step in rank_states]
        _check_ranks(folder, first, steps)
        has_moments = all(buffers[kind] is not None for buffers in self._buffers for kind in KINDS)
        self.kinds = KINDS if has_moments else KINDS[:1]
        self.adam_step = steps[0] if has_moments else 0.0
        self._sizes = [[len(flat_buffer) for flat_buffer in b[KINDS[0]] or []] for b in self._buffers]
        try:
            if self.stage == 3:
                self._ranges = _zero3(self.shapes, self._sizes)
            else:
                group_paddings = first.get("param_alignment_paddings")
                self._ranges = _zero12(shape_groups, self._sizes, group_paddings)
        except _Contradiction as error:
            raise CheckpointError(
                f"{folder}: {error}: files of two checkpoints are mixed, or the optimizer is not one that is known "
                "here; get the checkpoint again from where it was written"
            ) from None

    def assemble_tensor(self, name: str, kind: str) -> Tensor:
        """A whole tensor, fp32. A weight must match the model's file, where ZeRO 1 and 2 store it whole."""
        parts = [name_part.float() for r in self._ranges[name] for name_part in self._slices(r, kind)]
        found = torch.cat(parts).view(self.shapes[name]) if parts else torch.zeros(self.shapes[name])
        model_tensor = unpickle.read_dense_tensor(self._module.get(name)) if kind == KINDS[0] else None
        if model_tensor is not None and model_tensor.shape == found.shape:
            limits = torch.finfo(model_tensor.dtype)  # of any rounding to the model's precision
            rtol, atol = 2 * limits.eps, limits.smallest_normal
            if not torch.allclose(found, model_tensor.float(), rtol=rtol, atol=atol, equal_nan=True):
                raise CheckpointError(
                    f"{self.folder}: {make_visible(name, 200)} in the optimizer's files is not the one in the model's: "
                    "files of two checkpoints are mixed, or they are damaged; get the checkpoint again from where it "
                    "was written"
                )
        return found

    def _slices(self, r: Range, kind: str) -> Iterator[Tensor]:
        """Slices of a range. Sub-groups of ZeRO 3 follow one another; a parameter may end in the next."""
        rank_buffers = self._buffers[r.rank][kind]
        assert rank_buffers is not None
        range_start, left_elements = r.start, r.numel
        for flat_buffer, size in zip(rank_buffers[r.group :], self._sizes[r.rank][r.group :], strict=True):
            if left_elements and range_start < size:
                taken_elements = min(left_elements, size - range_start)
                yield flat_buffer[range_start : range_start + taken_elements]
                left_elements, range_start = left_elements - taken_elements, range_start + taken_elements
            range_start -= size


class _Contradiction(Exception):
    """The buffers' descriptions in the files do not fit the buffers."""


def _files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The optimizer's files by data-parallel rank, and the model's; all must exist."""
    try:
        file_names = sorted(file_path.name for file_path in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}") from None
    optimizers = {(int(m[1]), int(m[2])): folder / m[0] for m in map(OPTIMIZER.fullmatch, file_names) if m}
    model_files = {(int(m[1] or 0), int(m[2])): folder / m[0] for m in map(MODEL.fullmatch, file_names) if m}
    if any("expert_" in file_name or file_name.startswith("expp_rank_") for file_name in file_names):
        raise CheckpointError(f"{folder}: it is of a mixture of experts, which this model is not")
    if (cut := 1 + max((model_rank for _, model_rank in [*optimizers, *model_files]), default=0)) > 1:
        raise CheckpointError(
            f"{folder}: written under tensor or pipeline parallelism ({cut} model-parallel ranks): only checkpoints "
            "of 1 can be read. With DeepSpeed, convert it by `python -m deepspeed.checkpoint.ds_to_universal`, load "
            "that with load_universal in one tensor and one pipeline rank, and save it again"
        )
    if not model_files:
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
    return [optimizers[optimizer_key] for optimizer_key in sorted(optimizers)], [
        model_files[file_key] for file_key in sorted(model_files)
    ]


def _mapping(content: Any, path: Path) -> dict[str, Any]:
    content_fields = unpickle.read_fields(content)
    if not content_fields:
        raise CheckpointError(f"{path}: not a file of DeepSpeed: it holds no names")
    return content_fields


def _shapes(given: Any, path: Path) -> list[dict[str, tuple[int, ...]]]:
    shape_groups = []
    for shape_group in given if isinstance(given, list) else []:
        named_shapes = {}
        for name, shape in unpickle.read_fields(shape_group).items():
            if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
                raise CheckpointError(f"{path}: param_shapes: {make_visible(name, 200)} has no shape")
            if math.prod(shape) > LARGEST:
                raise CheckpointError(f"{path}: param_shapes: {make_visible(name, 200)} is impossibly large")
            named_shapes[name] = tuple(shape)
        shape_groups.append(named_shapes)
    if not any(shape_groups):
        raise CheckpointError(
            f"{path}: holds no param_shapes, which are needed to find parameters: it was not written by ZeRO, or by a "
            "DeepSpeed before 0.4"
        )
    return shape_groups


def _count(value: Any) -> int:
    read_number = unpickle.parse_number(value)
    return int(read_number) if read_number is not None and read_number >= 0 else 0


def _read(path: Path, held: Mapping[str, Any], stage: int) -> tuple[Buffers, float]:
    """The buffers of one rank's file, and the optimizer's own count of steps in it."""
    weights = held.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    masters = [unpickle.read_dense_tensor(t) for t in weights] if isinstance(weights, list) else []
    if not masters or any(t is None or t.dim() != 1 for t in masters):
        raise CheckpointError(
            f"{path}: holds no flat fp32 weights: they were offloaded to a disk, or it is not of ZeRO 1, 2 or 3"
        )
    inner = held.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    inner_fields = unpickle.read_fields(inner)
    # "Elastic" checkpoints hold a list: the state of every group.
    states = dict(enumerate(inner)) if isinstance(inner, list) else inner_fields.get("state")
    settings = inner_fields.get("param_groups")
    group_states = states if isinstance(states, dict) else {}
    of = [unpickle.read_fields(group_states.get(i)) for i in range(len(masters))]
    rank_buffers: Buffers = {KINDS[0]: [t for t in masters if t is not None]}
    for moment_kind in KINDS[1:]:
        moment_buffers = [unpickle.read_dense_tensor(zero_state.get(moment_kind)) for zero_state in of]
        moments_fit = [
            m is not None and m.dim() == 1 and master_weight is not None and len(m) >= len(master_weight)
            for m, master_weight in zip(moment_buffers, masters, strict=True)
        ]
        rank_buffers[moment_kind] = [m for m in moment_buffers if m is not None] if all(moments_fit) else None
    step_values = [zero_state.get("step") for zero_state in of]
    if isinstance(settings, list):
        step_values += [unpickle.read_fields(group_settings).get("step") for group_settings in settings]
    step_values.append(held.get("base_optimizer_state_step"))
    step = next((n for n in map(unpickle.parse_number, step_values) if n is not None), 0.0)
    return rank_buffers, step


def _check_ranks(folder: Path, first: Mapping[str, Any], steps: Sequence[float]) -> None:
    counts = first.get("partition_count")
    wanted = max(map(_count, counts), default=0) if isinstance(counts, list) else _count(counts)
    if wanted and wanted != len(steps):
        raise CheckpointError(
            f"{folder}: written by {wanted} data-parallel ranks, but there are files of {len(steps)}: some are "
            "missing, or an older checkpoint is in the same folder"
        )
    if len(set(steps)) > 1:
        steps_text = ", ".join(sorted({f"{step:g}" for step in steps}))
        raise CheckpointError(
            f"{folder}: the ranks' optimizers are at steps {steps_text}: files of two checkpoints are mixed"
        )


def _zero12(
    groups: Sequence[Mapping[str, tuple[int, ...]]], sizes: Sequence[Sequence[int]], paddings: Any
) -> dict[str, list[Range]]:
    """Location of every parameter under ZeRO 1 and 2. sizes: by rank and group, without padding at the end."""
    found: dict[str, list[Range]] = {}
    if {len(rank_state) for rank_state in sizes} != {len(groups)}:
        raise _Contradiction(f"{len(groups)} groups of parameters are named, the files hold {len(sizes[0])}")
    for g, group_shapes in enumerate(groups):
        rank_share = sizes[0][g]  # of every rank; the last ones may be shorter, without their padding
        given = paddings[g] if isinstance(paddings, list) and g < len(paddings) else []
        between = [_count(padding_size) for padding_size in given] if isinstance(given, list) else []
        offset = 0
        for parameter_index, (parameter_name, parameter_shape) in enumerate(group_shapes.items()):
            parameter_numel = math.prod(parameter_shape)
            does_fit = offset + parameter_numel <= rank_share * len(sizes)
            found[parameter_name] = list(_evenly(offset, parameter_numel, rank_share, g)) if does_fit else []
            if not does_fit or any(r.start + r.numel > sizes[r.rank][g] for r in found[parameter_name]):
                raise _Contradiction(f"{make_visible(parameter_name, 200)} does not fit into the files")
            offset += parameter_numel + (between[parameter_index] if parameter_index < len(between) else 0)
        padding_unit = 2 * len(sizes)  # NCCL's alignment; there is no further padding
        held_elements = sum(rank_state[g] for rank_state in sizes)
        if -(-offset // padding_unit) != -(-held_elements // padding_unit):
            raise _Contradiction(f"group {g} holds {held_elements} elements, its parameters are {offset}")
    return found


def _evenly(offset: int, numel: int, share: int, group: int) -> Iterator[Range]:
    range_end = offset + numel
    while offset < range_end:
        data_rank, range_start = divmod(offset, share)
        taken_elements = min(range_end - offset, share - range_start)
        yield Range(data_rank, group, range_start, taken_elements)
        offset += taken_elements


def _zero3(shapes: Mapping[str, tuple[int, ...]], sizes: Sequence[Sequence[int]]) -> dict[str, list[Range]]:
    """Location of every parameter under ZeRO 3."""
    rank_count, offset = len(sizes), 0
    parameter_ranges: dict[str, list[Range]] = {}
    for parameter_name, parameter_shape in shapes.items():
        parameter_numel = math.prod(parameter_shape)
        share = -(-parameter_numel // rank_count)
        rank_shares = [(rank, min(share, parameter_numel - rank * share)) for rank in range(rank_count)]
        parameter_ranges[parameter_name] = [Range(rank, 0, offset, n) for rank, n in rank_shares if n > 0]
        offset += share
    for held in map(sum, sizes):
        if held != offset:
            raise _Contradiction(f"a rank holds {held} elements, its share of the parameters is {offset}")
    return parameter_ranges
