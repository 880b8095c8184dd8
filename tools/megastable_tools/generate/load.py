"""Loads a checkpoint for generation: its model, and the tokenizer that it was trained with."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megastable.base.errors import DataError
from megastable.checkpoint.plain import PlainModel, load_plain
from megastable.config.recipe import find_recipe
from megastable.config.tree import RunConfig
from megastable.data.manifest import FILE, Manifest
from megastable.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from megastable_tools.convert.huggingface.folder import is_folder, load_folder
from megastable_tools.prepare.corpus_tokenizer import GUESSED, named_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ASK = "name it with --tokenizer"


@dataclass(frozen=True)
class Speaker:
    """ends: the tokens that end a text; start: those that begin one, put before every prompt if `always`. notes: what
    its user should know."""

    model: PlainModel
    tokenizer: Tokenizer
    ends: frozenset[int]
    start: tuple[int, ...]
    always: bool = False
    notes: tuple[str, ...] = ()

    def encode_prompt(self, text: str, document_start: bool) -> list[int]:
        """The ids of a prompt, at least one: an empty one is the start of a document.

        document_start: the text begins a document: what comes before one in training is put before it. Raises DataError
        for a text that is no Unicode, or of which the model does not know a token.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError("the prompt is not UTF-8: convert it first") from None
        prompt_ids = self.tokenizer.encode(text) if text else []
        # Where documents were kept apart, none saw the end of the one before it.
        behind_start = document_start and not self.model.run.data.keep_documents_apart
        if behind_start or self.always or not prompt_ids:
            prompt_ids = [*self.start, *prompt_ids]
        if max(prompt_ids) >= self.model.vocabulary:
            raise DataError(
                f"the prompt has the token {max(prompt_ids)}, and the model knows {self.model.vocabulary:,} only: "
                f"{self.tokenizer.file} is not its tokenizer, {ASK}"
            )
        return prompt_ids


def open_speaker(
    checkpoint: Path, tokenizer: Path | None, dtype: str | None, device: str | None, accept: Collection[str] = ()
) -> Speaker:  # fmt: skip
    """checkpoint: as `load_plain` takes it, or a folder of Hugging Face. tokenizer: a file, or a folder with one; None:
    that of the run's corpus, or of the folder. dtype: of DTYPES; None: fp32 on a CPU, else as `load_plain` chooses.
    accept: as for `Folder`.

    Raises CheckpointError, and DataError for a tokenizer or device that there is not.
    """
    on = find_device(device)
    precision = DTYPES[dtype] if dtype else torch.float32 if on.type == "cpu" else None
    if is_folder(checkpoint):
        return _of_folder(load_folder(checkpoint, precision, on, accept), tokenizer)
    # The tokenizer after the model: for a wrong path it is said what it should be.
    plain_model = load_plain(checkpoint, precision, on)
    if tokenizer:
        spoken_tokenizer, tokenizer_problem = named_tokenizer(find_recipe(tokenizer), plain_model.run)
    else:
        spoken_tokenizer, tokenizer_problem = tokenizer_of(plain_model.run, str(plain_model.checkpoint)), ""
    end, begin = spoken_tokenizer.eod, spoken_tokenizer.bos
    notes = _compared(plain_model, spoken_tokenizer)
    if tokenizer_problem:
        notes = (*notes, f"{tokenizer_problem}: {GUESSED}")
    start, always = (end if begin is None else begin,), begin is not None
    return Speaker(plain_model, spoken_tokenizer, frozenset({end}), start, always, notes)


def _of_folder(model: PlainModel, given: Path | None) -> Speaker:
    """What ends and begins a text is said in config.json, generation_config.json and by the tokenizer itself."""
    said: dict[str, Any] = {}
    for file_name in ("config.json", "generation_config.json"):
        try:
            said |= json.loads((model.checkpoint / file_name).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, RecursionError):  # it need not be there
            continue
    known = [end_token for end_token in _ids(said.get("eos_token_id")) if end_token < model.vocabulary]
    tokenizer_path = find_recipe(given) if given else model.checkpoint
    try:
        spoken = load_tokenizer(tokenizer_path, known[0] if known else None)
    except DataError as error:
        raise DataError(f"{error}; or {ASK}") from None
    added_ids = spoken.added if isinstance(spoken, HuggingFaceTokenizer) else ()
    start_token = [*_ids(said.get("bos_token_id")), spoken.eod][0]
    ends, notes = frozenset({spoken.eod, *known}), _compared(model, spoken)
    return Speaker(model, spoken, ends, added_ids or (start_token,), bool(added_ids), notes)


def _ids(value: Any) -> list[int]:
    given_values = value if isinstance(value, list) else [value]
    return [id for id in given_values if isinstance(id, int) and not isinstance(id, bool) and id >= 0]


def tokenizer_of(run: RunConfig, where: str) -> Tokenizer:
    """The tokenizer of a run's first corpus. where: the run, for messages. Raises DataError."""
    if not run.data.corpora:
        raise DataError(f"{where}: its recipe names no corpus, and so no tokenizer: {ASK}")
    folder = find_recipe(run.data.corpora[0].path)
    try:
        tokenizer_info = Manifest.load_manifest(folder).tokenizer
        tokenizer = load_tokenizer(folder / tokenizer_info.file, tokenizer_info.eod, tokenizer_info.bos)
    except DataError as error:
        raise DataError(f"{where}: its tokenizer is that of the corpus {folder}: {error}; or {ASK}") from None
    if tokenizer.xxh3 != tokenizer_info.xxh3:
        raise DataError(f"{tokenizer.file} is not the tokenizer that {folder / FILE} was made with: {ASK}")
    return tokenizer


def _compared(model: PlainModel, tokenizer: Tokenizer) -> tuple[str, ...]:
    ids, model_ids = tokenizer.vocab_size, model.vocabulary
    if ids > model_ids:
        raise DataError(
            f"{tokenizer.file} has {ids:,} tokens, and the model of {model.checkpoint} knows {model_ids:,} only: "
            f"it is not its tokenizer, {ASK}"
        )
    if ids < model_ids:
        note_text = f"{tokenizer.file} has {ids:,} tokens, the model knows {model_ids:,}: those beyond are never chosen"
        return (f"{note_text}; is it the right tokenizer?",)
    return ()


def find_device(name: str | None) -> torch.device:
    """None: a GPU if there is one. Raises DataError for one that cannot be used."""
    try:
        torch_device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=torch_device).cpu()  # "meta" gives nothing back
    except (RuntimeError, AssertionError) as error:
        raise DataError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return torch_device
