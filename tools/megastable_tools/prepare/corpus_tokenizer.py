"""Tokenizers of corpora: train a SentencePiece model that decodes every text unchanged, or load one that the user names
and compare its document tokens with the corpus's own.

In training nothing is normalised, no space is added or collapsed, and unknown characters are spelled in bytes:
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

from megastable.base.durable import write_data_file
from megastable.base.errors import DataError
from megastable.config.recipe import find_recipe
from megastable.config.tree import RunConfig
from megastable.data.manifest import Manifest, TokenizerInfo
from megastable.data.tokenizer import BEGIN_OF_DOCUMENT, END_OF_DOCUMENT, NO_EOD, Tokenizer, load_tokenizer

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
    sampled_blocks = sample_blocks(texts, sample_bytes, seed)
    model_bytes = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sampled_blocks),
            model_writer=model_bytes,
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
    write_data_file(output, model_bytes.getvalue())
    return load_tokenizer(output)


def sample_blocks(texts: Iterable[str], budget: int, seed: int) -> list[str]:
    """A uniform sample of blocks of `texts`, at most `budget` UTF-8 bytes, in their order.

    Keeps the blocks with the lowest hashes of (number, seed): one pass, memory for the sample only.
    """
    kept_blocks: list[tuple[int, int, str, int]] = []  # the block with the highest hash comes first
    total_bytes, rank_limit = 0, 1 << 64
    for block_number, block in enumerate(block for text in texts for block in _blocks(text)):
        block_rank = xxhash.xxh3_64_intdigest(block_number.to_bytes(8, "little"), seed)
        if block_rank >= rank_limit:
            continue
        block_bytes = len(block.encode())
        heappush(kept_blocks, (-block_rank, block_number, block, block_bytes))
        total_bytes += block_bytes
        while total_bytes > budget:
            highest_rank, _, _, bytes_gone = heappop(kept_blocks)
            total_bytes, rank_limit = total_bytes - bytes_gone, -highest_rank
    return [block for _, block in sorted((block_number, block) for _, block_number, block, _ in kept_blocks)]


def _blocks(text: str) -> Iterator[str]:
    """Cut a text after line ends into blocks of at most BLOCK characters; longer lines are cut inside."""
    block_start = 0
    while block_start < len(text):
        block_end = block_start + BLOCK
        if block_end < len(text):
            block_end = text.rfind("\n", block_start, block_end) + 1 or block_end
        yield text[block_start:block_end]
        block_start = block_end


def _explain(message: str, vocab_size: int) -> str:
    if most_match := re.search(r"Please set it to a value <= (\d+)", message):
        return (
            f"the text is too small for a vocabulary of {vocab_size}: give more text, or ask for "
            f"{most_match[1]} tokens at most"
        )
    if least_match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"the characters of this text do not fit into {vocab_size} tokens: ask for {least_match[1]} or more"
    if "sentences_.empty()" in message:
        return "there is no text to train on"
    return message


GUESSED = "what begins and ends a document is guessed from the tokenizer"


def corpus_of(run: RunConfig) -> tuple[Path, TokenizerInfo]:
    """The folder of a run's first corpus, and its tokenizer by the manifest. Raises DataError."""
    if not run.data.corpora:
        raise DataError("the recipe names no corpora")
    corpus_path = find_recipe(run.data.corpora[0].path)
    return corpus_path, Manifest.load_manifest(corpus_path).tokenizer


def named_tokenizer(path: Path, run: RunConfig) -> tuple[Tokenizer, str]:
    """The tokenizer in `path`, with the corpus's begin- and end-of-document tokens; and "", or why they are GUESSED.

    Raises DataError if there is none.
    """
    try:
        corpus, tokenizer_info = corpus_of(run)
    except DataError:
        return load_tokenizer(path), "the corpus is not there"
    if difference_text := _difference(
        load_tokenizer(path, NO_EOD), corpus / tokenizer_info.file, tokenizer_info
    ):
        return load_tokenizer(path), difference_text
    return load_tokenizer(path, tokenizer_info.eod, tokenizer_info.bos), ""


def _difference(tokenizer: Tokenizer, own: Path, info: TokenizerInfo) -> str:
    """The corpus's document tokens that differ in `tokenizer`; "" if none does. A token is matched by its usual name,
    or by its spelling in the corpus's own file."""
    if tokenizer.xxh3 == info.xxh3:
        return ""
    try:
        corpus_tokenizer: Tokenizer | None = load_tokenizer(own, NO_EOD)
    except DataError:
        corpus_tokenizer = None
    if corpus_tokenizer is not None and corpus_tokenizer.xxh3 != info.xxh3:
        corpus_tokenizer = None
    for does, id, usual in (("ends", info.eod, END_OF_DOCUMENT), ("begins", info.bos, BEGIN_OF_DOCUMENT)):
        if id is None:
            continue
        token = tokenizer.spell_token(id)
        if token not in usual and (corpus_tokenizer is None or corpus_tokenizer.spell_token(id) != token):
            return f"the corpus {does} documents with the token {id}, which is {token!r} there"
    return ""
