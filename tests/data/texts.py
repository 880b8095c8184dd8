"""Real text, and tokenizers trained on it, for the tests of the preparation of corpora."""

from __future__ import annotations

import argparse
import bz2
import gzip
import inspect
import io
import lzma
import tarfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece

EOD_NAME = "<|endoftext|>"


@cache
def source_code() -> str:
    """About 100 kB of text that every machine has: a module of the standard library."""
    return inspect.getsource(argparse)


def documents(count: int, length: int = 400) -> list[str]:
    """`count` different documents of about `length` characters."""
    code = source_code()
    return [
        f"# {number}\n" + code[(at := number * 37 % (len(code) - length)) : at + length]
        for number in range(count)
    ]


def sentencepiece_file(directory: Path, vocab_size: int = 600) -> Path:
    return train_sentencepiece([source_code()], directory / "tokenizer.model", vocab_size).file


def hugging_face_file(directory: Path, vocab_size: int = 600, special: Sequence[str] = (EOD_NAME,)) -> Path:
    """A byte-level BPE like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [source_code()],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def tar_bytes(members: Sequence[tuple[str | tarfile.TarInfo, bytes]]) -> bytes:
    """An archive of these members, each a name or a header of its own, with its content."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for named, content in members:
            info = tarfile.TarInfo(named) if isinstance(named, str) else named
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """A link, a device or a folder."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
