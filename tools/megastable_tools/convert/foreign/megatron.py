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

from megastable.base.errors import CheckpointError, DataError
from megastable.base.text import visible
from megastable.checkpoint.files import write_file
from megastable.checkpoint.new_run import refuse_existing, write_run
from megastable.checkpoint.plain import find_checkpoint
from megastable.checkpoint.store import read_state
from megastable.checkpoint.whole import Described, WholeState, parameters, run_of
from megastable.config import recipe
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.data.local_copy import staged_directory
from megastable.parallel.sharding import Placement, shard, unshard
from megastable_tools.convert.foreign import megatron_args, unpickle
from megastable_tools.convert.foreign.begin import state_of, with_vocabulary
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
    pipeline: its layout. Files are mapped. Raises CheckpointError for damaged, incomplete or unsupported content.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = _files(folder)
        self.tensor, self.pipeline = 1 + max(t for t, _ in paths), 1 + max(p for _, p in paths)
        self.args: dict[str, Any] = {}
        self.iteration: int | None = None
        self._held: dict[
            str, dict[int, list[Tensor]]
        ] = {}  # by our name and stage: of the tensor ranks, as theirs
        first = 0
        for stage in range(self.pipeline):
            ranks = [self._read(paths[t, stage]) for t in range(self.tensor)]
            for t, rank in enumerate(ranks):
                if odd := sorted(rank.keys() ^ ranks[0].keys()):
                    raise CheckpointError(
                        f"{paths[t, stage]}: not all tensor ranks hold {visible(odd[0], 200)}"
                    )
            for name in ranks[0]:
                by_stage = self._held.setdefault(name_ours(name, first, paths[0, stage]), {})
                by_stage[stage] = [rank[name] for rank in ranks]
            numbers = {n for name in ranks[0] if (n := number_of_layer(name)) is not None}
            if numbers != set(range(len(numbers))):
                raise CheckpointError(f"{paths[0, stage]}: some of its layers are missing")
            first += len(numbers)

    def _read(self, path: Path) -> dict[str, Tensor]:
        """The tensors of one file, by their names."""
        content = unpickle.fields(unpickle.load(path))
        if "model0" in content:
            raise CheckpointError(
                f"{path}: its pipeline stages are interleaved (virtual pipeline): save it again without virtual stages"
            )
        model = unpickle.fields(content.get("model"))
        if not model:
            raise CheckpointError(f"{path}: holds no model: it is not a checkpoint of Megatron")
        # Megatron also takes a missing one as 0.
        version = unpickle.number(content.get("checkpoint_version", 0))
        if version != VERSION:
            raise CheckpointError(
                f"{path}: checkpoint_version={version}: before 3.0 q, k and v are in another order; load and save it "
                "with a current Megatron"
            )
        iteration = int(unpickle.number(content.get("iteration")) or 0)
        if self.iteration is None:
            self.args, self.iteration = unpickle.fields(content.get("args")), iteration
        if iteration != self.iteration:
            raise CheckpointError(
                f"{path}: of iteration {iteration}, other files of {self.iteration}: files of two checkpoints are mixed"
            )
        found = {}
        for name, value in model.items():
            if name.endswith("_extra_state"):
                continue  # scales of FP8, which the next steps recompute
            dense = unpickle.dense(value)
            if dense is None or dense.dtype.itemsize < 2:
                raise CheckpointError(
                    f"{path}: {visible(name, 200)} is not a tensor of 16 or 32 bits: keep primary weights out of FP8"
                )
            found[name.removeprefix("module.")] = dense
        return found

    @property
    def names(self) -> list[str]:
        """The parameters, by our names."""
        return list(self._held)

    @property
    def rows(self) -> int:
        """Rows of the vocabulary, padding included."""
        if EMBEDDING not in self._held:
            raise CheckpointError(f"{self.folder}: {name_theirs(EMBEDDING, 0, 'local')} is missing")
        return sum(len(part) if part.dim() else 0 for part in self._shards(EMBEDDING))

    def whole(self, name: str, of: Described) -> Tensor:
        """One of their tensors, assembled from the tensor ranks, in their row order; a vocabulary tensor keeps their
        number of rows. of: the expected shape and placement."""
        shards, shape, dim = self._shards(name), list(of.shape), of.placement.dim
        if name in VOCABULARY:
            shape[0] = len(shards[0]) if shards[0].dim() else 0
        elif dim is not None:
            shape[dim] //= len(shards)
        for part in shards:
            if list(part.shape) != shape:
                raise CheckpointError(
                    f"{self.folder}: {name} is {tuple(part.shape)} on a tensor rank, by the recipe {tuple(shape)}: "
                    "correct the recipe's model section"
                )
        if dim is None:
            self._same(name, shards, shards[:1] * len(shards))
            return shards[0]
        return torch.cat(shards) if name in VOCABULARY else unshard(shards, place_theirs(name, of.placement))

    def tie(self) -> None:
        """With tied weights the last of several stages holds a copy: compare it and drop it."""
        for copies in self._held.pop("head.weight", {}).values():
            self._same(EMBEDDING, copies, self._shards(EMBEDDING))

    def _shards(self, name: str) -> list[Tensor]:
        held = self._held[name]
        return held[min(held)]

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
    source = find(folder)
    state = MegatronState(source)
    run = _recipe(state, run, say)
    held, config = parameters(run.model), run.model
    assert config.vocab_size is not None
    if config.tied:
        state.tie()
    _check(state, held)
    say(
        f"{source}: iteration {state.iteration}, tensor {state.tensor} x pipeline {state.pipeline}; weights only: "
        "Adam's moments are not imported, so warm up the learning rate again"
    )

    def whole(name: str, _: str) -> Tensor:
        found = state.whole(name, held[name]).float()
        if name in VOCABULARY:
            padding = torch.zeros(max(0, config.padded_vocab - len(found)), found.shape[1])
            found = torch.cat([found[: config.padded_vocab], padding])
        return to_our_rows(name, found, config)

    origin = {"source": str(source), "how": "imported from Megatron", "iteration": state.iteration}
    return write_run(out, run, state_of(run), whole, optimizer=None, origin=origin)


def export_megatron(
    checkpoint: Path, out: Path, tensor: int = 1, pipeline: int = 1, *, local: bool = False
) -> Path:
    """Write the fp32 weights of a checkpoint (as `find_checkpoint` takes it) into the new folder `out`, for that many
    tensor and pipeline ranks of Megatron. Returns its iter_*/.

    local: for --transformer-impl local instead of transformer_engine. Memory: the weights of one rank. Load it with
    --use-checkpoint-args --no-load-optim --no-load-rng. Raises CheckpointError, ConfigError; then nothing of `out` is
    left.
    """
    source = find_checkpoint(checkpoint)
    run = run_of(source)
    megatron_args.check_home(run, tensor, pipeline, local)
    refuse_existing(out)
    state, whole = read_state(source), WholeState(source)
    implementation = "local" if local else "transformer_engine"
    args = megatron_args.args_of(run, tensor, pipeline, implementation, state.step)
    name = f"iter_{state.step:07d}"
    try:
        with staged_directory(out) as folder:
            for stage in range(pipeline):
                for t in range(tensor):
                    place = folder / name / (f"mp_rank_{t:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
                    place.mkdir(parents=True)
                    model = _shards(run, whole, t, tensor, stage, pipeline, implementation)
                    write_file(
                        place / FILE,
                        {
                            "args": args,
                            "checkpoint_version": VERSION,
                            "iteration": state.step,
                            "model": model,
                        },
                    )
            write_file(folder / LATEST, str(state.step).encode())
    except OSError as error:
        raise CheckpointError(
            f"{out} could not be written: {error.strerror or error}. Nothing was left there"
        ) from None
    except DataError as error:
        raise CheckpointError(str(error)) from None
    return out / name


def options_to_load(checkpoint: Path, out: Path, local: bool) -> list[str]:
    """Megatron's options that load what was written from a checkpoint to `out`."""
    options = ["--load", str(out), "--use-checkpoint-args", "--no-load-optim", "--no-load-rng"]
    return options + megatron_args.flags_of(run_of(checkpoint).model, local)


def _shards(
    run: RunConfig, whole: WholeState, t: int, tensor: int, stage: int, pipeline: int, implementation: str
) -> OrderedDict[str, Tensor]:
    """The tensors of one Megatron rank, by its names."""
    c, found = run.model, OrderedDict[str, Tensor]()
    first, end = (c.layers * n // pipeline for n in (stage, stage + 1))
    for name, of in parameters(c).items():
        # Layer 0 is the embedding, block n is layer n + 1, final norm and head follow.
        if (stage > 0 and of.layer <= first) or (stage < pipeline - 1 and of.layer > end):
            continue
        theirs = to_their_rows(name, whole.tensor(name, "weight"), c)
        mine = shard(theirs, place_theirs(name, of.placement), t, tensor).clone()
        found[name_theirs(name, first, implementation)] = mine
    if c.tied and 0 < stage == pipeline - 1:
        cut = whole.placement(EMBEDDING)
        found[name_theirs("head.weight", 0, implementation)] = shard(
            whole.tensor(EMBEDDING, "weight"), cut, t, tensor
        ).clone()
    return found


def find(folder: Path) -> Path:
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
        raise CheckpointError(f"{tracker}: {visible(text, 50)!r} is not an iteration number")
    found = folder / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not found.is_dir():
        raise CheckpointError(f"{tracker} names iteration {visible(text, 50)}, but {found.name} is missing")
    return found


def _files(folder: Path) -> dict[tuple[int, int], Path]:
    """The file of every (tensor rank, stage); all must exist."""
    if (folder / "metadata.json").is_file() or any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"{folder}: in Megatron's torch_dist format: convert it there with --ckpt-convert-format torch "
            "--ckpt-convert-save FOLDER"
        )
    found = {}
    for path in sorted(folder.glob("mp_rank_*")):
        place = RANK.fullmatch(path.name)
        if place is None:
            raise CheckpointError(f"{path}: of a run with expert parallelism, which is not supported")
        found[int(place[1]), int(place[2] or 0)] = path / FILE
    if not found:
        raise CheckpointError(
            f"{folder}: holds no folders such as mp_rank_00: it is not a checkpoint of Megatron"
        )
    for t in range(1 + max(t for t, _ in found)):
        for p in range(1 + max(p for _, p in found)):
            if (t, p) not in found or not found[t, p].is_file():
                raise CheckpointError(f"{folder}: {FILE} of tensor rank {t}, stage {p} is missing")
    return found


def _recipe(state: MegatronState, run: RunConfig | None, say: Callable[[str], None]) -> RunConfig:
    """The recipe, checked against the checkpoint's arguments; or one made from those."""
    found = megatron_args.model_of(state.args, state.folder)
    if dropout := megatron_args.dropout_of(state.args):
        say(
            f"note: it was trained with {dropout}: model.dropout is Megatron's hidden_dropout; attention has none here"
        )
    if run is not None:
        run = with_vocabulary(run)
        if wrong := megatron_args.disagreements(found, run.model):
            raise CheckpointError(f"{state.folder}: {'; '.join(wrong)}: correct the recipe")
        if silent := megatron_args.missing(found):
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
        if (positions := found.get("max_positions", 0)) > run.model.sequence_length:
            model = run.model.model_copy(update={"max_positions": positions})
            run = run.model_copy(update={"model": model})
        return run
    if missing := megatron_args.missing(found):
        raise CheckpointError(
            f"{state.folder}: its arguments do not say {', '.join(missing)}: give a recipe with the model"
        )
    vocabulary = megatron_args.vocabulary_of(state.args, state.rows, state.tensor)
    return recipe.validate({"model": found | vocabulary}, f"{state.folder}: its arguments")


def _check(state: MegatronState, held: Mapping[str, Described]) -> None:
    """Check that exactly the model's parameters exist."""
    for name in held:
        if name not in state.names:
            raise CheckpointError(f"{state.folder}: {name} is missing: the recipe's model is another one")
    for name in state.names:
        if name not in held:
            raise CheckpointError(
                f"{state.folder}: {name} has no home in the recipe's model: it is of another one"
            )
    for key, size in (
        ("tensor_model_parallel_size", state.tensor),
        ("pipeline_model_parallel_size", state.pipeline),
    ):
        said = unpickle.number(state.args.get(key))
        if said is not None and said != size:
            raise CheckpointError(f"{state.folder}: {key}={said:g}, but there are files of {size}")


# Names and rows


def name_theirs(name: str, first: int, implementation: str) -> str:
    """Their name of one of our parameters, on a stage that starts with layer `first`."""
    block = _OURS.fullmatch(name)
    if block is None:
        return str(NAMES["tensors"][name])
    return f"decoder.layers.{int(block[1]) - first}.{(NAMES['layer'] | NAMES['norms'][implementation])[block[2]]}"


def name_ours(name: str, first: int, where: object) -> str:
    """The inverse of `name_theirs`, for either implementation. Raises CheckpointError for an unsupported name."""
    layer = _THEIRS.fullmatch(name)
    if layer is None and name in _TENSORS:
        return _TENSORS[name]
    if layer is not None and layer[2] in _LAYER:
        return f"blocks.{int(layer[1]) + first}.{_LAYER[layer[2]]}"
    before = name.startswith(("language_model.", "transformer."))
    raise CheckpointError(
        f"{where}: {visible(name, 200)} has no home in this model: "
        + (
            "it is of Megatron before its core"
            if before
            else "it has no biases but those of q, k and v, no experts and no learnt positions"
        )
    )


def number_of_layer(name: str) -> int | None:
    """The number of the layer in one of their names."""
    layer = _THEIRS.fullmatch(name)
    return int(layer[1]) if layer else None


def place_theirs(name: str, of: Placement) -> Placement:
    """The placement of one of their tensors, given ours in `of`: groups of q, k, v stay together."""
    return Placement(name, 0, (sum(of.sections),)) if name.endswith(_FUSED) else of


def to_their_rows(name: str, whole: Tensor, config: ModelConfig) -> Tensor:
    """One of our whole tensors, in their row order."""
    if not name.endswith(_FUSED):
        return whole
    k, d = config.key_value_heads, config.head_width
    parts = whole.split((config.heads * d, k * d, k * d))
    return torch.cat([part.view(k, -1, *whole.shape[1:]) for part in parts], 1).reshape(whole.shape)


def to_our_rows(name: str, whole: Tensor, config: ModelConfig) -> Tensor:
    """The inverse of `to_their_rows`."""
    if not name.endswith(_FUSED):
        return whole
    k, d = config.key_value_heads, config.head_width
    groups = whole.reshape(k, -1, *whole.shape[1:]).split((config.heads // k * d, d, d), 1)
    return torch.cat([part.reshape(-1, *whole.shape[1:]) for part in groups])
