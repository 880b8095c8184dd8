"""Import a Hugging Face folder as a run: its weights become the fp32 masters of a new run directory.

Data, optimizer, schedule and layout come from a recipe; the model comes from the folder, overriding the recipe.
There is no optimizer state: Adam starts fresh, at step 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megastable.base.errors import CheckpointError, ConfigError, DataError
from megastable.checkpoint.new_run import refuse_existing, write_run
from megastable.checkpoint.whole import describe_parameters
from megastable.config import recipe
from megastable.config.model import ModelConfig
from megastable.config.recipe import find_recipe
from megastable.config.tree import RunConfig
from megastable.data.corpora import Corpora, open_corpora
from megastable.data.tokenizer import NO_EOD, Tokenizer, load_tokenizer
from megastable.engine.expert_routing import BIAS
from megastable.model.sizes import count_parameters as parameter_count
from megastable_tools.convert.derived_runs import state_of
from megastable_tools.convert.huggingface.architectures import (
    OWN,
    OWN_OF_EXPERTS,
    architecture_of,
)
from megastable_tools.convert.huggingface.folder import HuggingFaceFolder
from megastable_tools.convert.huggingface.tokenizer_export import CONFIG, FILE, find_tokenizer_difference

ANY_WAY = "if you know that it is the same, add --any-tokenizer"


@dataclass
class Import:
    """checkpoint: the new one; numel: parameters of the model, without padding; notes: for the user."""

    out: Path
    folder: Path
    checkpoint: Path
    run: RunConfig
    numel: int
    notes: list[str] = field(default_factory=list)


def from_hf(
    given: Path,
    out: Path,
    base: Path,
    overrides: Sequence[str] = (),
    *,
    accept: Collection[str] = (),
    any_tokenizer: bool = False,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Import:
    """Make the run directory `out`, which must not exist, from a folder and the recipe `base`.

    accept: keys of config.json that do not matter; any_tokenizer: skip the comparison of the corpora's tokenizer with
    the folder's. watch: bytes so far, and in all. Memory: one tensor in fp32.

    Raises CheckpointError, ConfigError, DataError; then nothing is left.
    """
    refuse_existing(out)
    folder = HuggingFaceFolder(given, accept)
    run, user_notes = run_from(folder, base, overrides)
    row_counts = {name: of.shape[0] for name, of in describe_parameters(run.model).items()}
    if strange_names := sorted(set(row_counts) ^ set(folder.parts)):
        raise CheckpointError(f"{given}: {strange_names[0]} has no name in both models")
    corpora = open_corpora(run.data.corpora, run.model.sequence_length, run.run.seed)
    if not any_tokenizer:
        check_tokenizer(folder, run, corpora, user_notes)
    start_state = state_of(run, corpora.order_fingerprint)
    total_bytes, done_bytes = 4 * parameter_count(run.model), 0

    def whole(name: str, kind: str) -> Tensor:
        assert kind == "weight"
        return folder.read_our_tensor(name, row_counts[name])

    def watched(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        watch(done_bytes, total_bytes)

    run_origin = {
        "source": str(folder.path), "what": folder.settings["architectures"][0], "fingerprint": folder.fingerprint,
        "recipe": str(base),
    }  # fmt: skip
    expert_state = {} if (biases := folder.biases) is None else {BIAS: biases}
    new_checkpoint = write_run(
        out, run, start_state, whole, optimizer=None, origin=run_origin, expert_state=expert_state, watch=watched
    )  # fmt: skip
    return Import(out, folder.path, new_checkpoint, run, folder.numel, user_notes)


def run_from(
    folder: HuggingFaceFolder, base: Path, overrides: Sequence[str] = ()
) -> tuple[RunConfig, list[str]]:
    """The recipe with the folder's model, and notes on the model settings that it replaces. Raises ConfigError."""
    wanted = recipe.load_recipe(base, overrides)
    longest, length = folder.sizes["sequence_length"], wanted.model.sequence_length
    if length > longest:
        raise ConfigError(
            f"model.sequence_length={length} in {base}: the model of {folder.path} supports up to {longest} "
            "(max_position_embeddings): set model.sequence_length to that or less"
        )
    folder_settings = {size_key: value for size_key, value in folder.sizes.items() if size_key not in OWN}
    recipe_tree = wanted.model_dump(mode="json")
    expert_notes = _join_experts(folder, wanted.model, folder_settings, base)
    notes = [
        f"model.{key}: {getattr(wanted.model, key)} in {base}, {setting_value} in {folder.path}: using the folder's"
        for key, setting_value in folder_settings.items()
        if key in wanted.model.model_fields_set and getattr(wanted.model, key) not in (setting_value, None)
        if key != "experts" or setting_value is None
    ] + expert_notes
    theirs, ours = folder.settings["architectures"][0], architecture_of(folder.config).name
    if theirs != ours:
        notes.append(
            f"this {theirs} computes the same as a {ours}: it is imported as one, and to-hf writes {ours}"
        )
    recipe_tree["model"] |= folder_settings | {"max_positions": longest if longest > length else None}
    return recipe.validate_tree(recipe_tree, f"{base}, with the model of {folder.path}"), notes


def _join_experts(
    folder: HuggingFaceFolder, wanted: ModelConfig, settings: dict[str, Any], base: Path
) -> list[str]:
    """Add what the recipe says about the training of experts to the folder's, in `settings`; and notes."""
    of_folder, of_recipe = settings["experts"], wanted.experts
    if of_folder is None:
        return []
    said_keys = set[str]() if of_recipe is None else of_recipe.model_fields_set
    user_notes = [
        f"model.experts.{key}: {getattr(of_recipe, key)} in {base}, {of_folder[key]} in {folder.path}: using the "
        "folder's"
        for key in sorted(said_keys & of_folder.keys())
        if getattr(of_recipe, key) not in (of_folder[key], None)
    ]
    own_settings = {} if of_recipe is None else of_recipe.model_dump(include=set(OWN_OF_EXPERTS))
    folder_kind = architecture_of(folder.config)
    assert folder_kind.experts is not None
    if not folder_kind.experts.bias and "bias_rate" not in said_keys:
        own_settings["bias_rate"] = 0.0
        user_notes.append(
            f"model.experts.bias_rate is 0: {folder_kind.name} has no bias of the choice of experts, and so it can "
            f"go out again as one; to train with one, set it in {base}"
        )
    settings["experts"] = of_folder | own_settings
    return user_notes


def check_tokenizer(folder: HuggingFaceFolder, run: RunConfig, corpora: Corpora, notes: list[str]) -> None:
    """Raises CheckpointError unless the corpora were made with the folder's tokenizer."""
    info = corpora.manifests[0].tokenizer
    assert run.model.vocab_size is not None
    corpus = find_recipe(run.data.corpora[0].path)
    if info.vocab_size > run.model.vocab_size:
        raise CheckpointError(
            f"{corpus}: a wrong tokenizer: it has {info.vocab_size} tokens, and {folder.path} a vocabulary of "
            f"{run.model.vocab_size}: prepare the corpus with the folder's tokenizer"
        )
    end_ids = folder.settings.get("eos_token_id")
    if end_ids is not None and info.eod not in (end_ids if isinstance(end_ids, list) else [end_ids]):
        notes.append(
            f"documents of {corpus} end with token {info.eod}, the model was made with eos_token_id={end_ids}"
        )
    # tokenizer.json first, as in transformers.
    tokenizer_files = [folder.path / FILE, *sorted(folder.path.glob("*.model"))]
    try:
        theirs = [load_tokenizer(file, NO_EOD) for file in tokenizer_files if file.is_file()]
    except DataError as error:
        raise CheckpointError(f"{error}; {ANY_WAY}") from None
    said = _put_before(folder, theirs[0]) if theirs else None
    if said is not None and said != (() if info.bos is None else (info.bos,)):
        begin = f"token {info.bos}" if info.bos is not None else "no token of their own"
        adds = f"{', '.join(map(str, said))} before every text" if said else "nothing before a text"
        notes.append(
            f"documents of {corpus} begin with {begin}, and the model's tokenizer puts {adds}: prepare the corpus "
            f"{'with' if said else 'without'} --bos, unless that is meant"
        )
    if any(tokenizer.xxh3 == info.xxh3 for tokenizer in theirs):
        return
    if not theirs:
        raise CheckpointError(
            f"{folder.path} has no tokenizer.json or SentencePiece model to compare that of {corpus} with; {ANY_WAY}"
        )
    try:
        ours = load_tokenizer(corpus / info.file, NO_EOD)
    except DataError as error:
        raise CheckpointError(
            f"the corpus's tokenizer cannot be compared with the folder's: {error}; {ANY_WAY}"
        ) from None
    if problem := find_tokenizer_difference(ours, theirs[0]):
        raise CheckpointError(
            f"{corpus}: a wrong tokenizer: {ours.file.name} there and {theirs[0].file} are not the same: {problem}; "
            "prepare the corpus with the folder's tokenizer"
        )


def _put_before(folder: HuggingFaceFolder, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The tokens that it puts before every text; None if unknown.

    tokenizer.json contains them. For a SentencePiece model transformers add the bos, unless configured otherwise.
    """
    if tokenizer.kind == "huggingface":
        return tokenizer.added
    try:
        settings = json.loads((folder.path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        settings = None
    adds_begin = settings.get("add_bos_token", True) if isinstance(settings, dict) else True
    return () if adds_begin is False else tokenizer.added or None
