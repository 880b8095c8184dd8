"""A run with a real tokenizer, made without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megastable.checkpoint.new_run import write_run
from megastable.config.tree import RunConfig
from megastable.data.manifest import Manifest
from megastable.data.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoint.states import numbers, recipe_of, state_of
from tests.conftest import write_corpus
from tests.data.texts import sentencepiece_file

PIECES = 400


def corpus_with_tokenizer(folder: Path) -> Tokenizer:
    write_corpus(folder, tokens=2_000)
    tokenizer = load_tokenizer(sentencepiece_file(folder, PIECES))
    Manifest.load_manifest(folder).model_copy(update={"tokenizer": tokenizer.info}).save_manifest(folder)
    return tokenizer


def run_with_tokenizer(folder: Path, **data: Any) -> Path:
    """FOLDER/run, trained on FOLDER/corpus."""
    corpus_with_tokenizer(folder / "corpus")
    tree = recipe_of(vocab_size=PIECES, sequence_length=64).model_dump(mode="json")
    tree["data"] |= {"corpora": [{"path": str(folder / "corpus")}], **data}
    run = RunConfig.model_validate(tree)
    held, origin = numbers(run), {"how": "test"}
    write_run(folder / "run", run, state_of(), lambda *of: held[of], optimizer=None, origin=origin)
    return folder / "run"
