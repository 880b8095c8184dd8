"""What a run reads of its corpora is told: epochs, rounded shares, validation splits without a sample."""

from __future__ import annotations

from pathlib import Path

from megastable.config.tree import CorpusConfig
from megastable.data.corpora import Corpora, open_corpora
from megastable.data.coverage import describe_epochs, find_warnings
from megastable_tools.prepare.prepare import prepare_shards
from tests.data.test_prepare import write_lines
from tests.data.texts import documents, sentencepiece_file

LENGTH = 64


def opened(folder: Path, weights: dict[str, float], length: int = LENGTH) -> Corpora:
    given = [CorpusConfig(path=folder / name, weight=weight) for name, weight in weights.items()]
    return open_corpora(given, length, 0)


def test_epochs_shares_and_missing_validation(tmp_path: Path) -> None:
    tokenizer = sentencepiece_file(tmp_path)
    for number, name in enumerate("abcd"):
        text = write_lines(tmp_path / f"{name}.jsonl", [f"{name} {text}" for text in documents(20 + number)])
        held = 0.0 if name == "d" else 0.2
        prepare_shards([text], tmp_path / name, tokenizer, validation=held, progress=False)
    one = opened(tmp_path, {"a": 1})
    (size,) = one.train.order.sequences
    assert describe_epochs(one.train, 39_000 * size) == "epochs of this run: a 39,000"
    assert describe_epochs(one.train, size // 2).startswith("epochs of this run: a 0.")
    (tmp_path / "a").rename(tmp_path / "a-pruned")
    moved = opened(tmp_path, {"a-pruned": 1})
    assert describe_epochs(moved.train, size) == f"epochs of this run: a ({tmp_path}/a-pruned) 1"
    (tmp_path / "a-pruned").rename(tmp_path / "a")
    assert find_warnings(one, size, True) == []
    (often,) = find_warnings(one, 39_000 * size, True)
    assert often.startswith("the run reads the corpus a 39,000 times")

    # 1 and 3 x 0.00037: shares are rounded to whole slots of a block.
    small = opened(tmp_path, {"a": 1, "b": 0.00037, "c": 0.00037})
    rounded = find_warnings(small, 10, False)
    assert [text.split(" of the blend")[0] for text in rounded] == [
        "the corpus b gets 2 of 4096 samples",
        "the corpus c gets 1 of 4096 samples",
    ]
    assert "(+32 %)" in rounded[0] and "(-34 %)" in rounded[1]
    assert find_warnings(opened(tmp_path, {"a": 3, "b": 1}), 10, False) == []

    (missing,) = find_warnings(opened(tmp_path, {"a": 1, "d": 1}), 10, True)
    assert missing.startswith("corpora without a validation loss: the validation split of d has none")
    assert find_warnings(opened(tmp_path, {"a": 1, "d": 1}), 10, False) == []
    # Shorter than a sample is as none.
    long = one.manifests[0].tokens("validation")
    (missing,) = find_warnings(opened(tmp_path, {"a": 1}, long), 1, True)
    assert missing.startswith(f"no validation loss at all: the validation split of a has {long:,} tokens")
    assert f"a sample needs {long + 1:,}" in missing
