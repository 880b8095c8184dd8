"""A tokenizer and documents of real text, the standard library, for the tests of the yardstick."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megastable.data.tokenizer import Tokenizer
from megastable_tools.forensics.oddness.features import Lexicon
from megastable_tools.forensics.oddness.yardstick import Yardstick, cut_documents, document_keys
from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece
from megastable_tools.prepare.stdlib import stdlib_files

Ids = npt.NDArray[np.int64]
VOCABULARY = 1500
LENGTH = 600  # tokens of a document, and sometimes half or a quarter of it


@cache
def texts() -> list[str]:
    return [path.read_text(errors="ignore")[:20_000] for path in stdlib_files()[::12]]


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return train_sentencepiece(
            texts(), Path(directory, "tokenizer.model"), VOCABULARY, sample_bytes=200_000
        )


@cache
def documents() -> tuple[Ids, ...]:
    """About 500 documents without their ends."""
    found: list[Ids] = []
    for text in texts():
        ids = np.array(tokenizer().encode(text), dtype=np.int64)
        step = LENGTH // (1, 2, 4)[len(found) % 3]
        found += [ids[at : at + step] for at in range(0, len(ids) - step, step)]
    return tuple(found)


def joined(some: list[Ids] | tuple[Ids, ...]) -> tuple[npt.NDArray[np.uint16], Ids]:
    """Documents with their ends, one after another, and their edges."""
    whole = [np.append(document, tokenizer().eod) for document in some]
    return np.concatenate(whole).astype(np.uint16), np.append(0, np.cumsum([len(one) for one in whole]))


def yardstick_of(some: list[Ids] | tuple[Ids, ...], lexicon: Lexicon | None = None) -> Yardstick:
    tokens, edges = joined(some)
    sample = tokens, edges, document_keys(tokens, edges)
    return Yardstick.learn_from([sample], lexicon or Lexicon.of_tokenizer(tokenizer(), VOCABULARY))


@cache
def yardstick() -> Yardstick:
    return yardstick_of(documents())


def scores(yardstick: Yardstick, some: list[Ids] | tuple[Ids, ...]) -> npt.NDArray[np.float32]:
    """The score of each document, that of its worst piece."""
    tokens, edges = joined(some)
    pieces, owner = cut_documents(edges)
    judged = yardstick.judge_features(
        yardstick.measure_features(tokens, pieces, document_keys(tokens, edges)[owner])
    )
    return np.maximum.reduceat(judged.score, np.flatnonzero(np.append(True, np.diff(owner) > 0)))
