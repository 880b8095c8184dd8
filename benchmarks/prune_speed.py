"""Measure pruning of a corpus relative to a plain copy of its files on the same disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import xxhash

from megastable.base.durable import sync_directory
from megastable.data.local_copy import write_file
from megastable.data.manifest import Manifest, TokenizerInfo, adopt
from megastable.data.shard_writer import ShardWriter
from megastable.forensics.pruning.proof import verify
from megastable.forensics.pruning.prune import apply
from megastable.forensics.pruning.prune_plan import Removal, text_of

VOCABULARY = 50_000
DOCUMENT = 800  # tokens, on average
SHARDS = 2


def prune_cost(
    folder: Path, tokens: int = 500_000_000, share: float = 0.01, rounds: int = 5
) -> dict[str, Any]:
    """Seconds of `cp` and of `apply` on a corpus of `tokens` uint16 tokens below `folder`, which must exist.

    share: of the documents to prune. Copies wait for the disk, as `apply` does. The rounds alternate: after
    one uncounted round of each, `rounds` of each, in the page cache if it is large enough. ratio: speed of `apply`
    over that of `cp` by round, both in bytes of the original.
    """
    with TemporaryDirectory(dir=folder, prefix="prune-cost-") as place:
        corpus, plan = Path(place, "corpus"), Path(place, "plan.txt")
        manifest = _corpus(corpus, tokens)
        removed = _choose(manifest, share)
        write_file(plan, text_of(removed, corpus, manifest).encode())
        copies, prunes = list[float](), list[float]()
        for _ in range(rounds + 1):
            copies.append(_seconds(lambda: _copy(corpus, Path(place, "copy"))))
            shutil.rmtree(Path(place, "copy"))
            prunes.append(_seconds(lambda: apply(plan, Path(place, "pruned"))))
            proof = _seconds(lambda: verify(Path(place, "pruned")))
            shutil.rmtree(Path(place, "pruned"))
        size = sum(info.bin_bytes + info.idx_bytes for info in manifest.shards)
        ratios = [a / b for a, b in zip(copies[1:], prunes[1:], strict=True)]
        return {
            "bytes": size, "tokens": tokens, "documents": sum(i.documents for i in manifest.shards),
            "removed": len(removed), "cp_seconds": copies[1:], "apply_seconds": prunes[1:],
            "verify_seconds": proof, "cp_gb_per_s": size / float(np.median(copies[1:])) / 1e9,
            "apply_gb_per_s": size / float(np.median(prunes[1:])) / 1e9, "ratio": float(np.median(ratios)),
            "ratio_low": min(ratios), "ratio_high": max(ratios),
        }  # fmt: skip


def _corpus(directory: Path, tokens: int) -> Manifest:
    directory.mkdir()
    random = np.random.default_rng(0)
    for number in range(SHARDS):
        with ShardWriter(directory / f"part-{number}", VOCABULARY) as writer:
            while writer.tokens < tokens // SHARDS:
                document = random.integers(1, VOCABULARY, random.integers(1, 2 * DOCUMENT), dtype=np.uint16)
                writer.add_document(document)
    tokenizer = b"no tokenizer: the tokens are random"
    write_file(directory / "tokenizer.model", tokenizer)
    info = TokenizerInfo(
        file="tokenizer.model", kind="sentencepiece", xxh3=_xxh3(tokenizer), vocab_size=VOCABULARY, eod=0
    )
    manifest = adopt(directory, info, validation=0.01)
    manifest.save(directory)
    return manifest


def _xxh3(content: bytes) -> str:

    return xxhash.xxh3_128_hexdigest(content)


def _choose(manifest: Manifest, share: float) -> list[Removal]:
    random = np.random.default_rng(1)
    return [
        Removal(info.name, document)
        for info in manifest.shards
        for document in np.flatnonzero(random.random(info.documents) < share).tolist()
    ]


def _copy(corpus: Path, to: Path) -> None:
    """Copy with `cp`, durably."""
    subprocess.run(["cp", "-r", str(corpus), str(to)], check=True)
    for path in to.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_directory(to)


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
