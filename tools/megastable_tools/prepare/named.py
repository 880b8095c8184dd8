"""Load a tokenizer that the user names, and compare its document tokens with the corpus's own."""

from __future__ import annotations

from pathlib import Path

from megastable.base.errors import DataError
from megastable.config.recipe import find
from megastable.config.tree import RunConfig
from megastable.data.manifest import Manifest, TokenizerInfo
from megastable.data.tokenizer import BEGIN_OF_DOCUMENT, END_OF_DOCUMENT, NO_EOD, Tokenizer, load_tokenizer

GUESSED = "what begins and ends a document is guessed from the tokenizer"


def corpus_of(run: RunConfig) -> tuple[Path, TokenizerInfo]:
    """The folder of a run's first corpus, and its tokenizer by the manifest. Raises DataError."""
    if not run.data.corpora:
        raise DataError("the recipe names no corpora")
    corpus = find(run.data.corpora[0].path)
    return corpus, Manifest.load(corpus).tokenizer


def named_tokenizer(path: Path, run: RunConfig) -> tuple[Tokenizer, str]:
    """The tokenizer in `path`, with the corpus's begin- and end-of-document tokens; and "", or why they are GUESSED.

    Raises DataError if there is none.
    """
    try:
        corpus, info = corpus_of(run)
    except DataError:
        return load_tokenizer(path), "the corpus is not there"
    if problem := _difference(load_tokenizer(path, NO_EOD), corpus / info.file, info):
        return load_tokenizer(path), problem
    return load_tokenizer(path, info.eod, info.bos), ""


def _difference(tokenizer: Tokenizer, own: Path, info: TokenizerInfo) -> str:
    """The corpus's document tokens that differ in `tokenizer`; "" if none does. A token is matched by its usual name,
    or by its spelling in the corpus's own file."""
    if tokenizer.xxh3 == info.xxh3:
        return ""
    try:
        corpus: Tokenizer | None = load_tokenizer(own, NO_EOD)
    except DataError:
        corpus = None
    if corpus is not None and corpus.xxh3 != info.xxh3:
        corpus = None
    for does, id, usual in (("ends", info.eod, END_OF_DOCUMENT), ("begins", info.bos, BEGIN_OF_DOCUMENT)):
        if id is None:
            continue
        token = tokenizer.spelled(id)
        if token not in usual and (corpus is None or corpus.spelled(id) != token):
            return f"the corpus {does} documents with the token {id}, which is {token!r} there"
    return ""
