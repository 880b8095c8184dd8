"""Train a SentencePiece tokenizer that decodes every text unchanged.

Nothing is normalised, no space is added or collapsed, and unknown characters are spelled in bytes:
decode(encode(text)) == text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import Literal

import sentencepiece
import xxhash

from megastable.base.errors import DataError
from megastable.data.local_copy import write_file
from megastable.data.tokenizer import Tokenizer, load_tokenizer

ModelType = Literal["bpe", "unigram"]
BLOCK = 2048  # characters; SentencePiece trains on many short texts better than on a few long ones
SAMPLE = 32 << 20  # bytes of text; training takes about 20 times as much memory


def train_sentencepiece(
    texts: Iterable[str],
    output: Path,
    vocab_size: int,
    model_type: ModelType = "bpe",
    sample_bytes: int = SAMPLE,
    seed: int = 0,
) -> Tokenizer:
    """Train on a sample of `texts` (all of them up to `sample_bytes`) and write the model to `output`.

    The same texts in the same order give the same file. It appears complete or not at all and replaces an
    older one. Raises DataError if the texts are too few or `vocab_size` too small, with the limit.
    """
    sample = sample_blocks(texts, sample_bytes, seed)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,  # indentation
            byte_fallback=True,
            split_digits=True,
            max_sentence_length=4 * BLOCK,  # bytes; longer ones would be left out
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"no tokenizer could be trained: {_explain(str(error), vocab_size)}") from error
    write_file(output, model.getvalue())
    return load_tokenizer(output)


def sample_blocks(texts: Iterable[str], budget: int, seed: int) -> list[str]:
    """A uniform sample of blocks of `texts`, at most `budget` UTF-8 bytes, in their order.

    Keeps the blocks with the lowest hashes of (number, seed): one pass, memory for the sample only.
    """
    kept: list[tuple[int, int, str, int]] = []  # the block with the highest hash comes first
    total, limit = 0, 1 << 64
    for number, block in enumerate(block for text in texts for block in _blocks(text)):
        rank = xxhash.xxh3_64_intdigest(number.to_bytes(8, "little"), seed)
        if rank >= limit:
            continue
        size = len(block.encode())
        heappush(kept, (-rank, number, block, size))
        total += size
        while total > budget:
            highest, _, _, gone = heappop(kept)
            total, limit = total - gone, -highest
    return [block for _, block in sorted((number, block) for _, number, block, _ in kept)]


def _blocks(text: str) -> Iterator[str]:
    """Cut a text after line ends into blocks of at most BLOCK characters; longer lines are cut inside."""
    start = 0
    while start < len(text):
        end = start + BLOCK
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _explain(message: str, vocab_size: int) -> str:
    if most := re.search(r"Please set it to a value <= (\d+)", message):
        return (
            f"the text is too small for a vocabulary of {vocab_size}: give more text, or ask for "
            f"{most[1]} tokens at most"
        )
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"the characters of this text do not fit into {vocab_size} tokens: ask for {least[1]} or more"
    if "sentences_.empty()" in message:
        return "there is no text to train on"
    return message
