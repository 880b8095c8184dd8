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
from megastable.config.recipe import find
from megastable.config.tree import RunConfig
from megastable.data.manifest import FILE, Manifest
from megastable.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from megastable_tools.convert.huggingface.folder import is_folder, load_folder
from megastable_tools.prepare.named import GUESSED, named_tokenizer

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

    def prompt(self, text: str, document_start: bool) -> list[int]:
        """The ids of a prompt, at least one: an empty one is the start of a document.

        document_start: the text begins a document: what comes before one in training is put before it. Raises DataError
        for a text that is no Unicode, or of which the model does not know a token.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError("the prompt is not UTF-8: convert it first") from None
        ids = self.tokenizer.encode(text) if text else []
        # Where documents were kept apart, none saw the end of the one before it.
        behind = document_start and not self.model.run.data.keep_documents_apart
        if behind or self.always or not ids:
            ids = [*self.start, *ids]
        if max(ids) >= self.model.vocabulary:
            raise DataError(
                f"the prompt has the token {max(ids)}, and the model knows {self.model.vocabulary:,} only: "
                f"{self.tokenizer.file} is not its tokenizer, {ASK}"
            )
        return ids


def open_speaker(
    checkpoint: Path,
    tokenizer: Path | None,
    dtype: str | None,
    device: str | None,
    accept: Collection[str] = (),
) -> Speaker:
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
    model = load_plain(checkpoint, precision, on)
    if tokenizer:
        spoken, problem = named_tokenizer(find(tokenizer), model.run)
    else:
        spoken, problem = tokenizer_of(model.run, str(model.checkpoint)), ""
    begin = spoken.eod if spoken.bos is None else spoken.bos
    return Speaker(
        model,
        spoken,
        frozenset({spoken.eod}),
        (begin,),
        always=spoken.bos is not None,
        notes=_compared(model, spoken) + ((f"{problem}: {GUESSED}",) if problem else ()),
    )


def _of_folder(model: PlainModel, given: Path | None) -> Speaker:
    """What ends and begins a text is said in config.json, generation_config.json and by the tokenizer itself."""
    said: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        try:
            said |= json.loads((model.checkpoint / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, RecursionError):  # it need not be there
            continue
    ends, (start, *_) = _ids(said.get("eos_token_id")), [*_ids(said.get("bos_token_id")), None]
    known = [end for end in ends if end < model.vocabulary]
    try:
        spoken = load_tokenizer(find(given) if given else model.checkpoint, known[0] if known else None)
    except DataError as error:
        raise DataError(f"{error}; or {ASK}") from None
    added = spoken.added if isinstance(spoken, HuggingFaceTokenizer) else ()
    begin = added or ((spoken.eod if start is None else start),)
    return Speaker(
        model,
        spoken,
        frozenset({spoken.eod, *known}),
        begin,
        always=bool(added),
        notes=_compared(model, spoken),
    )


def _ids(value: Any) -> list[int]:
    given = value if isinstance(value, list) else [value]
    return [id for id in given if isinstance(id, int) and not isinstance(id, bool) and id >= 0]


def tokenizer_of(run: RunConfig, where: str) -> Tokenizer:
    """The tokenizer of a run's first corpus. where: the run, for messages. Raises DataError."""
    if not run.data.corpora:
        raise DataError(f"{where}: its recipe names no corpus, and so no tokenizer: {ASK}")
    folder = find(run.data.corpora[0].path)
    try:
        info = Manifest.load(folder).tokenizer
        tokenizer = load_tokenizer(folder / info.file, info.eod, info.bos)
    except DataError as error:
        raise DataError(f"{where}: its tokenizer is that of the corpus {folder}: {error}; or {ASK}") from None
    if tokenizer.xxh3 != info.xxh3:
        raise DataError(f"{tokenizer.file} is not the tokenizer that {folder / FILE} was made with: {ASK}")
    return tokenizer


def _compared(model: PlainModel, tokenizer: Tokenizer) -> tuple[str, ...]:
    ids, known = tokenizer.vocab_size, model.vocabulary
    if ids > known:
        raise DataError(
            f"{tokenizer.file} has {ids:,} tokens, and the model of {model.checkpoint} knows {known:,} only: it is not "
            f"its tokenizer, {ASK}"
        )
    if ids < known:
        text = (
            f"{tokenizer.file} has {ids:,} tokens, the model knows {known:,}: those beyond are never chosen"
        )
        return (f"{text}; is it the right tokenizer?",)
    return ()


def find_device(name: str | None) -> torch.device:
    """None: a GPU if there is one. Raises DataError for one that cannot be used."""
    try:
        on = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=on).cpu()  # "meta" gives nothing back
    except (RuntimeError, AssertionError) as error:
        raise DataError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return on
