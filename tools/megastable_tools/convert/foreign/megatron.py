"""Import and export Megatron-core's checkpoints in its "torch" format, without Megatron. Weights only.

    import_megatron(Path("megatron/checkpoints"), Path("runs/new"), None, print)
    export_megatron(Path("runs/old"), Path("megatron/checkpoints"), tensor=2, pipeline=2)

    FOLDER/latest_checkpointed_iteration.txt
    FOLDER/iter_0000100/mp_rank_00_000/model_optim_rng.pt    a file per tensor and pipeline rank; no _000 for one stage

Adam's moments are not converted: Megatron's distributed optimizer keeps them in buffers with a version-specific layout.

Megatron numbers layers within their pipeline stage. Under Transformer Engine the norms before attention and MLP belong
to the linear layers that follow them; in Megatron's local implementation they are separate modules. The rows
of the fused q, k and v are ordered by query group: all q heads of a group, its k head, its v head (ours: all q, all k,
all v; megatron/core/transformer/attention.py, SelfAttention.get_query_key_value_tensors).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megastable.base.durable import staged_directory
from megastable.base.errors import CheckpointError, ConfigError, DataError
from megastable.base.text import make_visible
from megastable.checkpoint.files import write_file
from megastable.checkpoint.new_run import refuse_existing, write_run
from megastable.checkpoint.plain import find_checkpoint
from megastable.checkpoint.store import read_state
from megastable.checkpoint.whole import Described, WholeState, describe_parameters, run_of
from megastable.config import recipe
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.parallel.sharding import Placement, cut_shard, join_shards
from megastable_tools.convert.derived_runs import state_of, with_vocabulary
from megastable_tools.convert.foreign import megatron_args, unpickle
from megastable_tools.convert.foreign.megatron_args import NAMES

LATEST = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
RANK = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?")
VERSION = 3.0  # of checkpoints: q, k and v by query group
EMBEDDING = "embedding.weight"
VOCABULARY = (EMBEDDING, "head.weight")  # padded to their multiple, not to ours
# Our names by theirs, of either implementation
_TENSORS = {other: mine for mine, other in NAMES["tensors"].items()}
_LAYER = {
    other: mine for table in (NAMES["layer"], *NAMES["norms"].values()) for mine, other in table.items()
}
_FUSED = ("attention.qkv.weight", "attention.qkv.bias")
_OURS = re.compile(r"blocks\.(\d+)\.(.+)")
_THEIRS = re.compile(r"decoder\.layers\.(\d{1,5})\.(.+)")


class MegatronState:
    """The weights in a folder such as iter_0000100/. args: Megatron's arguments; iteration: its count of steps; tensor,
    pipeline: its layout; held: the tensors. Files are mapped. Raises CheckpointError for damaged, incomplete or
    unsupported content.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rank_files = _files(folder)
        self.tensor, self.pipeline = 1 + max(t for t, _ in rank_files), 1 + max(p for _, p in rank_files)
        self.args: dict[str, Any] = {}
        self.iteration: int | None = None
        # By our name and stage: of the tensor ranks, as theirs.
        self.held: dict[str, dict[int, list[Tensor]]] = {}
        first_layer = 0
        for stage in range(self.pipeline):
            ranks = [self._read(rank_files[t, stage]) for t in range(self.tensor)]
            for t, rank_tensors in enumerate(ranks):
                if odd_names := sorted(rank_tensors.keys() ^ ranks[0].keys()):
                    raise CheckpointError(
                        f"{rank_files[t, stage]}: not all tensor ranks hold {make_visible(odd_names[0], 200)}"
                    )
            for name in ranks[0]:
                by_stage = self.held.setdefault(name_ours(name, first_layer, rank_files[0, stage]), {})
                by_stage[stage] = [rank_tensors[name] for rank_tensors in ranks]
            layer_matches = filter(None, map(_THEIRS.fullmatch, ranks[0]))
            layer_numbers = {int(layer_match[1]) for layer_match in layer_matches}
            if layer_numbers != set(range(len(layer_numbers))):
                raise CheckpointError(f"{rank_files[0, stage]}: some of its layers are missing")
            first_layer += len(layer_numbers)

    def _read(self, path: Path) -> dict[str, Tensor]:
        """The tensors of one file, by their names."""
        file_content = unpickle.read_fields(unpickle.load_pickle(path))
        if "model0" in file_content:
            raise CheckpointError(
                f"{path}: its pipeline stages are interleaved (virtual pipeline): save it again without virtual stages"
            )
        model_tensors = unpickle.read_fields(file_content.get("model"))
        if not model_tensors:
            raise CheckpointError(f"{path}: holds no model: it is not a checkpoint of Megatron")
        # Megatron also takes a missing one as 0.
        version = unpickle.parse_number(file_content.get("checkpoint_version", 0))
        if version != VERSION:
            raise CheckpointError(
                f"{path}: checkpoint_version={version}: before 3.0 q, k and v are in another order; load and save it "
                "with a current Megatron"
            )
        iteration = int(unpickle.parse_number(file_content.get("iteration")) or 0)
        if self.iteration is None:
            self.args, self.iteration = unpickle.read_fields(file_content.get("args")), iteration
        if iteration != self.iteration:
            raise CheckpointError(
                f"{path}: of iteration {iteration}, other files of {self.iteration}: files of two checkpoints are mixed"
            )
        found_tensors = {}
        for name, tensor_value in model_tensors.items():
            if name.endswith("_extra_state"):
                continue  # scales of FP8, which the next steps recompute
            dense_tensor = unpickle.read_dense_tensor(tensor_value)
            if dense_tensor is None or dense_tensor.dtype.itemsize < 2:
                raise CheckpointError(
                    f"{path}: {make_visible(name, 200)} is not a tensor of 16 or 32 bits: keep primary weights "
                    "out of FP8"
                )
            found_tensors[name.removeprefix("module.")] = dense_tensor
        return found_tensors

    @property
    def rows(self) -> int:
        """Rows of the vocabulary, padding included."""
        if EMBEDDING not in self.held:
            raise CheckpointError(f"{self.folder}: {name_theirs(EMBEDDING, 0, 'local')} is missing")
        return sum(len(rank_part) if rank_part.dim() else 0 for rank_part in self._shards(EMBEDDING))

    def assemble_tensor(self, name: str, of: Described) -> Tensor:
        """One of their tensors, assembled from the tensor ranks, in their row order; a vocabulary tensor keeps their
        number of rows. of: the expected shape and placement."""
        shards, shape, split_dim = self._shards(name), list(of.shape), of.placement.dim
        if name in VOCABULARY:
            shape[0] = len(shards[0]) if shards[0].dim() else 0
        elif split_dim is not None:
            shape[split_dim] //= len(shards)
        for part in shards:
            if list(part.shape) != shape:
                raise CheckpointError(
                    f"{self.folder}: {name} is {tuple(part.shape)} on a tensor rank, by the recipe {tuple(shape)}: "
                    "correct the recipe's model section"
                )
        if split_dim is None:
            self._same(name, shards, shards[:1] * len(shards))
            return shards[0]
        if name in VOCABULARY:
            return torch.cat(shards)
        return join_shards(shards, place_theirs(name, of.placement))

    def drop_tied_head(self) -> None:
        """With tied weights the last of several stages holds a copy: compare it and drop it."""
        for head_copies in self.held.pop("head.weight", {}).values():
            self._same(EMBEDDING, head_copies, self._shards(EMBEDDING))

    def _shards(self, name: str) -> list[Tensor]:
        stage_parts = self.held[name]
        return stage_parts[min(stage_parts)]

    def _same(self, name: str, one: list[Tensor], other: list[Tensor]) -> None:
        if not all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
            raise CheckpointError(
                f"{self.folder}: ranks hold different copies of {name}: files of two checkpoints are mixed"
            )


def import_megatron(folder: Path, out: Path, run: RunConfig | None, say: Callable[[str], None]) -> Path:
    """Make the run directory `out`, at step 0, from Megatron's weights: `folder` with its tracker file, or an iter_*/.
    Returns the checkpoint's folder.

    run: the new run's recipe, None: one made from Megatron's arguments. Raises CheckpointError, ConfigError, DataError;
    then nothing of `out` is left.
    """
    refuse_existing(out)
    if run is not None and run.model.experts is not None:
        raise ConfigError("model.experts: experts are not imported from Megatron's checkpoints: leave it out")
    source = find_iteration_folder(folder)
    state = MegatronState(source)
    run = _recipe(state, run, say)
    our_parameters, model_config = describe_parameters(run.model), run.model
    assert model_config.vocab_size is not None
    if model_config.tied:
        state.drop_tied_head()
    _check(state, our_parameters)
    say(
        f"{source}: iteration {state.iteration}, tensor {state.tensor} x pipeline {state.pipeline}; weights only: "
        "Adam's moments are not imported, so warm up the learning rate again"
    )

    def whole(name: str, _: str) -> Tensor:
        our_rows = state.assemble_tensor(name, our_parameters[name]).float()
        if name in VOCABULARY:
            padding_rows = torch.zeros(max(0, model_config.padded_vocab - len(our_rows)), our_rows.shape[1])
            our_rows = torch.cat([our_rows[: model_config.padded_vocab], padding_rows])
        return to_our_rows(name, our_rows, model_config)

    run_origin = {"source": str(source), "how": "imported from Megatron", "iteration": state.iteration}
    return write_run(out, run, state_of(run), whole, optimizer=None, origin=run_origin)


def export_megatron(
    checkpoint: Path, out: Path, tensor: int = 1, pipeline: int = 1, *, local: bool = False
) -> Path:
    """Write the fp32 weights of a checkpoint (as `find_checkpoint` takes it) into the new folder `out`, for that many
    tensor and pipeline ranks of Megatron. Returns its iter_*/.

    local: for --transformer-impl local instead of transformer_engine. Memory: the weights of one rank. Load it with
    --use-checkpoint-args --no-load-optim --no-load-rng. Raises CheckpointError, ConfigError; then nothing of `out` is
    left.
    """
    source_folder = find_checkpoint(checkpoint)
    run_config = run_of(source_folder)
    megatron_args.check_home(run_config, tensor, pipeline, local)
    refuse_existing(out)
    megatron_state, whole_state = read_state(source_folder), WholeState(source_folder)
    layer_implementation = "local" if local else "transformer_engine"
    args = megatron_args.args_of(run_config, tensor, pipeline, layer_implementation, megatron_state.step)
    name = f"iter_{megatron_state.step:07d}"
    try:
        with staged_directory(out) as folder:
            for stage in range(pipeline):
                for t in range(tensor):
                    place = folder / name / (f"mp_rank_{t:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
                    place.mkdir(parents=True)
                    model = _shards(run_config, whole_state, t, tensor, stage, pipeline, layer_implementation)
                    content = {
                        "args": args, "checkpoint_version": VERSION, "iteration": megatron_state.step, "model": model,
                    }  # fmt: skip
                    write_file(place / FILE, content)
            write_file(folder / LATEST, str(megatron_state.step).encode())
    except OSError as error:
        raise CheckpointError(
            f"{out} could not be written: {error.strerror or error}. Nothing was left there"
        ) from None
    except DataError as error:
        raise CheckpointError(str(error)) from None
    return out / name


def options_to_load(checkpoint: Path, out: Path, local: bool) -> list[str]:
    """Megatron's options that load what was written from a checkpoint to `out`."""
    load_options = ["--load", str(out), "--use-checkpoint-args", "--no-load-optim", "--no-load-rng"]
    return load_options + megatron_args.flags_of(run_of(checkpoint).model, local)


def _shards(
    run: RunConfig, whole: WholeState, t: int, tensor: int, stage: int, pipeline: int, implementation: str
) -> OrderedDict[str, Tensor]:
    """The tensors of one Megatron rank, by its names."""
    c, rank_tensors = run.model, OrderedDict[str, Tensor]()
    first_layer, last_layer = (c.layers * layer_number // pipeline for layer_number in (stage, stage + 1))
    for tensor_name, of in describe_parameters(c).items():
        # Layer 0 is the embedding, block n is layer n + 1, final norm and head follow.
        if (stage > 0 and of.layer <= first_layer) or (stage < pipeline - 1 and of.layer > last_layer):
            continue
        their_tensor = to_their_rows(tensor_name, whole.read_tensor(tensor_name, "weight"), c)
        own_part = cut_shard(their_tensor, place_theirs(tensor_name, of.placement), t, tensor).clone()
        rank_tensors[name_theirs(tensor_name, first_layer, implementation)] = own_part
    if c.tied and 0 < stage == pipeline - 1:
        embedding_cut = whole.placement_of(EMBEDDING)
        head_copy = cut_shard(whole.read_tensor(EMBEDDING, "weight"), embedding_cut, t, tensor).clone()
        rank_tensors[name_theirs("head.weight", 0, implementation)] = head_copy
    return rank_tensors


def find_iteration_folder(folder: Path) -> Path:
    """The folder with the ranks' folders: `folder` itself, or the one that its tracker file names."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    if any(folder.glob("mp_rank_*")) or (folder / "metadata.json").is_file():
        return folder
    tracker = folder / LATEST
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(
            f"{folder}: no checkpoint of Megatron: it has neither {LATEST} nor folders such as mp_rank_00"
        ) from None
    if text != "release" and not (text.isdecimal() and len(text) < 20):
        raise CheckpointError(f"{tracker}: {make_visible(text, 50)!r} is not an iteration number")
    found = folder / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise CheckpointError(
            f"{tracker} names iteration {make_visible(text, 50)}, but {found.name} is missing"
        )
    return found


def _files(folder: Path) -> dict[tuple[int, int], Path]:
    """The file of every (tensor rank, stage); all must exist."""
    if (folder / "metadata.json").is_file() or any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"{folder}: in Megatron's torch_dist format: convert it there with --ckpt-convert-format torch "
            "--ckpt-convert-save FOLDER"
        )
    rank_files = {}
    for rank_path in sorted(folder.glob("mp_rank_*")):
        name_match = RANK.fullmatch(rank_path.name)
        if name_match is None:
            raise CheckpointError(f"{rank_path}: of a run with expert parallelism, which is not supported")
        rank_files[int(name_match[1]), int(name_match[2] or 0)] = rank_path / FILE
    if not rank_files:
        raise CheckpointError(
            f"{folder}: holds no folders such as mp_rank_00: it is not a checkpoint of Megatron"
        )
    for tensor_rank in range(1 + max(tensor_rank for tensor_rank, _ in rank_files)):
        for p in range(1 + max(p for _, p in rank_files)):
            if (tensor_rank, p) not in rank_files or not rank_files[tensor_rank, p].is_file():
                raise CheckpointError(f"{folder}: {FILE} of tensor rank {tensor_rank}, stage {p} is missing")
    return rank_files


def _recipe(state: MegatronState, run: RunConfig | None, say: Callable[[str], None]) -> RunConfig:
    """The recipe, checked against the checkpoint's arguments; or one made from those."""
    model_settings = megatron_args.model_of(state.args, state.folder)
    if dropout := megatron_args.dropout_of(state.args):
        say(
            f"note: it was trained with {dropout}: model.dropout is Megatron's hidden_dropout; attention has none here"
        )
    if run is not None:
        run = with_vocabulary(run)
        if contradiction_texts := megatron_args.list_contradictions(model_settings, run.model):
            raise CheckpointError(f"{state.folder}: {'; '.join(contradiction_texts)}: correct the recipe")
        if silent := megatron_args.list_missing_arguments(model_settings):
            say(
                f"warning: {state.folder}: its arguments do not say {', '.join(silent)}: using the recipe's values, "
                "which may differ from those in training"
            )
        assert run.model.vocab_size is not None
        if run.model.vocab_size > state.rows:
            raise CheckpointError(
                f"{state.folder}: its vocabulary has {state.rows} rows, and model.vocab_size={run.model.vocab_size}: "
                "correct the recipe"
            )
        if (position_count := model_settings.get("max_positions", 0)) > run.model.sequence_length:
            model = run.model.model_copy(update={"max_positions": position_count})
            run = run.model_copy(update={"model": model})
        return run
    if missing := megatron_args.list_missing_arguments(model_settings):
        raise CheckpointError(
            f"{state.folder}: its arguments do not say {', '.join(missing)}: give a recipe with the model"
        )
    vocabulary = megatron_args.vocabulary_of(state.args, state.rows, state.tensor)
    return recipe.validate_tree({"model": model_settings | vocabulary}, f"{state.folder}: its arguments")


def _check(state: MegatronState, held: Mapping[str, Described]) -> None:
    """Check that exactly the model's parameters exist."""
    if missing := [name for name in held if name not in state.held]:
        raise CheckpointError(f"{state.folder}: {missing[0]} is missing: the recipe's model is another one")
    if left := [name for name in state.held if name not in held]:
        raise CheckpointError(
            f"{state.folder}: {left[0]} has no home in the recipe's model: it is of another one"
        )
    for axis, layout_size in (("tensor", state.tensor), ("pipeline", state.pipeline)):
        key = f"{axis}_model_parallel_size"
        said = unpickle.parse_number(state.args.get(key))
        if said is not None and said != layout_size:
            raise CheckpointError(f"{state.folder}: {key}={said:g}, but there are files of {layout_size}")


# Names and rows


def name_theirs(name: str, first: int, implementation: str) -> str:
    """Their name of one of our parameters, on a stage that starts with layer `first`."""
    block = _OURS.fullmatch(name)
    if block is None:
        return str(NAMES["tensors"][name])
    return f"decoder.layers.{int(block[1]) - first}.{(NAMES['layer'] | NAMES['norms'][implementation])[block[2]]}"


def name_ours(name: str, first: int, where: object) -> str:
    """The inverse of `name_theirs`, for either implementation. Raises CheckpointError for an unsupported name."""
    layer_match = _THEIRS.fullmatch(name)
    if layer_match is None and name in _TENSORS:
        return _TENSORS[name]
    if layer_match is not None and layer_match[2] in _LAYER:
        return f"blocks.{int(layer_match[1]) + first}.{_LAYER[layer_match[2]]}"
    why = "it has no biases but those of q, k and v, no experts and no learnt positions"
    if name.startswith(("language_model.", "transformer.")):
        why = "it is of Megatron before its core"
    raise CheckpointError(f"{where}: {make_visible(name, 200)} has no home in this model: {why}")


def place_theirs(name: str, of: Placement) -> Placement:
    """The placement of one of their tensors, given ours in `of`: groups of q, k, v stay together."""
    return Placement(name, 0, (sum(of.sections),)) if name.endswith(_FUSED) else of


def to_their_rows(name: str, whole: Tensor, config: ModelConfig) -> Tensor:
    """One of our whole tensors, in their row order."""
    if not name.endswith(_FUSED):
        return whole
    k, head_width = config.key_value_heads, config.head_width
    fused_parts = whole.split((config.heads * head_width, k * head_width, k * head_width))
    return torch.cat([fused_part.view(k, -1, *whole.shape[1:]) for fused_part in fused_parts], 1).reshape(
        whole.shape
    )


def to_our_rows(name: str, whole: Tensor, config: ModelConfig) -> Tensor:
    """The inverse of `to_their_rows`."""
    if not name.endswith(_FUSED):
        return whole
    k, d = config.key_value_heads, config.head_width
    query_groups = whole.reshape(k, -1, *whole.shape[1:]).split((config.heads // k * d, d, d), 1)
    return torch.cat([group_part.reshape(-1, *whole.shape[1:]) for group_part in query_groups])
