"""The embedded corpus is made on any machine, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastable.base.errors import DataError
from megastable.data.manifest import Manifest, Stream
from megastable.data.statistics import token_counts, unigram_entropy
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.prepare.stdlib import prepare_stdlib, stdlib_files


@pytest.mark.slow
def test_modules_without_tests_and_packages() -> None:
    files = stdlib_files()
    names = {path.name for path in files}
    assert {"argparse.py", "decoder.py", "pathlib.py"} <= names
    assert not any({"test", "tests", "site-packages"} & set(path.parts[-3:-1]) for path in files)
    assert sum(path.stat().st_size for path in files) > 5_000_000
    assert files == sorted(files)


@pytest.mark.slow
def test_the_corpus_is_made_once_and_reused(tmp_path: Path) -> None:
    output = tmp_path / "stdlib"
    made = prepare_stdlib(output, vocab_size=1024)
    assert made.action == "prepared"
    assert made.tokens["train"] > 2_000_000
    assert 0.01 < made.tokens["validation"] / made.tokens["train"] < 0.1
    manifest = Manifest.load(output)
    tokenizer = load_tokenizer(output / manifest.tokenizer.file)
    stream = Stream(output, manifest, "validation")
    assert "def " in tokenizer.decode(stream.read(0, 5_000))
    assert 3 < unigram_entropy(token_counts(stream, tokenizer.vocab_size)) < 6.9  # below ln 1024

    times = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    reused = prepare_stdlib(output, vocab_size=1024)
    assert (reused.action, reused.tokens) == ("reused", made.tokens)
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == times

    with pytest.raises(DataError, match="a vocabulary of 1024, not 'stdlib' with 2048"):
        prepare_stdlib(output, vocab_size=2048)
    shard = output / f"{manifest.shards[0].name}.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match="restore it or prepare the corpus again"):
        prepare_stdlib(output, vocab_size=1024)
