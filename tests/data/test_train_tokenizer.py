"""Training is repeatable, bounded by its sample, and says why it cannot be done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable_tools.prepare.train_tokenizer import BLOCK, ModelType, sample_blocks, train_sentencepiece
from tests.data.texts import documents, source_code


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_same_text_gives_the_same_file(tmp_path: Path, model_type: ModelType) -> None:
    one, other = (
        train_sentencepiece(iter(documents(300)), tmp_path / name, 500, model_type)
        for name in ("a.model", "b.model")
    )
    assert one.vocab_size == 500
    assert one.file.read_bytes() == other.file.read_bytes()
    assert one.decode(one.encode(source_code())) == source_code()


def test_an_older_file_is_replaced_and_nothing_else_remains(tmp_path: Path) -> None:
    file = tmp_path / "new" / "t.model"
    sizes = [train_sentencepiece([source_code()], file, size).vocab_size for size in (400, 500)]
    assert sizes == [400, 500]
    assert [path.name for path in file.parent.iterdir()] == ["t.model"]


def test_too_little_text_says_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"too small for a vocabulary of 5000: .* at most") as refusal:
        train_sentencepiece(["hello world"], tmp_path / "t.model", 5000)
    limit = int(str(refusal.value).split()[-4])
    assert train_sentencepiece(["hello world"], tmp_path / "t.model", limit).vocab_size == limit


def test_too_small_a_vocabulary_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"do not fit into 100 tokens: ask for (\d+) or more"):
        train_sentencepiece([source_code()], tmp_path / "t.model", 100)
    assert not (tmp_path / "t.model").exists()


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_no_text_is_refused(tmp_path: Path, texts: list[str]) -> None:
    with pytest.raises(DataError, match="no text to train on"):
        train_sentencepiece(texts, tmp_path / "t.model", 500)


def test_training_writes_nothing_to_the_terminal(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.data.texts import sentencepiece_file; "
        "sentencepiece_file(Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


lines = st.lists(st.sampled_from(["", "a", "b" * 100, "c" * 3000, "dé" * 700]), max_size=60).map("\n".join)


@given(texts=st.lists(lines, max_size=8))
def test_blocks_are_the_text(texts: list[str]) -> None:
    blocks = sample_blocks(texts, 1 << 40, seed=0)
    assert "".join(blocks) == "".join(texts)
    assert all(0 < len(block) <= BLOCK for block in blocks)


@given(texts=st.lists(lines, max_size=8), budget=st.integers(0, 20_000), seed=st.integers(0, 9))
def test_a_sample_keeps_its_budget_and_its_order(texts: list[str], budget: int, seed: int) -> None:
    everything = sample_blocks(texts, 1 << 40, seed)
    sample = sample_blocks(texts, budget, seed)
    assert sum(len(block.encode()) for block in sample) <= budget
    rest = iter(everything)
    assert all(block in rest for block in sample)
    assert sample == sample_blocks(texts, budget, seed)


def test_a_sample_is_spread_evenly() -> None:
    texts = [f"{number:05d}" for number in range(20_000)]
    sample = [int(block) for block in sample_blocks(texts, 5 * 2_000, seed=1)]
    assert len(sample) == 2_000
    for quarter in range(4):
        assert 400 < sum(number // 5_000 == quarter for number in sample) < 600
    assert sample != [int(block) for block in sample_blocks(texts, 5 * 2_000, seed=2)]
