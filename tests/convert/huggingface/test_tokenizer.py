"""AutoTokenizer gives the ids that the corpus was made with, whatever the text."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceModel
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from megastable.base.errors import CheckpointError
from megastable.data.tokenizer import Tokenizer, load_tokenizer
from megastable_tools.convert.huggingface.tokenizer_export import (
    make_sample_texts,
    real_text,
    write_tokenizer,
)
from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece
from tests.data.test_prepare import with_bos
from tests.data.texts import hugging_face_file


def loaded(folder: Path, settings: dict[str, Any] | None = None) -> Any:
    from transformers import AutoTokenizer

    # Beside a config.json, as it is in an export: some versions choose by it.
    (folder / "config.json").write_text(json.dumps(settings or {"model_type": "qwen3"}))
    return AutoTokenizer.from_pretrained(folder)


def plain(auto: Any, text: str) -> list[int]:
    """The ids of a text that is data: what spells out a special token in it is characters."""
    return list(auto(text, split_special_tokens=True)["input_ids"])


@pytest.fixture(scope="module")
def auto(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("auto")
    assert write_tokenizer(tokenizer, folder, 48).problem == ""
    return loaded(folder)


@given(st.text())
def test_write_tokenizer_gives_any_text_the_same_ids(tokenizer: Tokenizer, auto: Any, text: str) -> None:
    assert plain(auto, text) == tokenizer.encode(text)


def test_write_tokenizer_of_a_model_that_puts_a_space_before_texts(tmp_path: Path) -> None:
    model, lines = io.BytesIO(), [line for line in real_text().splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=600, minloglevel=2, byte_fallback=True,
        model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    (tmp_path / "llama.model").write_bytes(model.getvalue())
    other = load_tokenizer(tmp_path / "llama.model")
    (tmp_path / "out").mkdir()
    write_tokenizer(other, tmp_path / "out", 48)
    auto = loaded(tmp_path / "out", {"model_type": "llama"})
    for text in make_sample_texts(other, seed=1):
        assert plain(auto, text) == other.encode(text)
    assert auto.decode(other.encode("def f(x):")) == "def f(x):"


@pytest.mark.slow
def test_write_tokenizer_refuses_other_ids_unless_asked(tmp_path: Path) -> None:
    # Of equally likely cuts SentencePiece and tokenizers do not choose the same one.
    other = train_sentencepiece([real_text()], tmp_path / "unigram.model", 600, "unigram")
    with pytest.raises(CheckpointError, match=r"ids: of the text .* --inexact-tokenizer; .*--no-tokenizer"):
        write_tokenizer(other, tmp_path, 48)
    assert [path.name for path in tmp_path.iterdir()] == ["unigram.model"]
    assert "texts differ" in write_tokenizer(other, tmp_path, 48, exact=False).problem
    assert loaded(tmp_path)("import argparse")["input_ids"] == other.encode("import argparse")


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer.json that puts a beginning before every text, as Llama 3's does."""
    model = HuggingFaceModel(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        [real_text()], trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    )
    begin = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    model.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    model.enable_truncation(7)
    file = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    model.save(str(file))
    return load_tokenizer(file)


def test_write_tokenizer_adds_and_cuts_nothing(byte_level: Tokenizer, tmp_path: Path) -> None:
    write_tokenizer(byte_level, tmp_path, 48)
    auto = loaded(tmp_path, {"model_type": "llama"})
    for text in make_sample_texts(byte_level, seed=1):
        assert plain(auto, text) == byte_level.encode(text)
    assert auto.eos_token == "<|endoftext|>"
    assert auto("a<|endoftext|>")["input_ids"] == [*byte_level.encode("a"), byte_level.eod]
    assert plain(auto, "a<|endoftext|>") == byte_level.encode("a<|endoftext|>")
    assert byte_level.eod not in byte_level.encode("a<|endoftext|>")


@pytest.mark.parametrize("kind", ["qwen3", "llama", "olmo2"])
def test_write_tokenizer_keeps_special_tokens_of_fine_tuning(
    tokenizer: Tokenizer, tmp_path: Path, kind: str
) -> None:
    write_tokenizer(tokenizer, tmp_path, 48)
    auto = loaded(tmp_path, {"model_type": kind})
    assert (auto.eos_token, auto.eos_token_id) == ("</s>", tokenizer.eod)
    for text in ("x = 1", " x", "", "\n\n", "é 🤷  ▁"):
        ids = tokenizer.encode(text)
        assert auto(text + auto.eos_token)["input_ids"] == [*ids, tokenizer.eod]
        assert auto(text)["input_ids"] == ids  # and nothing else is added
    # A chat template's tokens; what it adds itself has an id of its own.
    auto.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    chat = auto.apply_chat_template([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    ids = chat if isinstance(chat, list) else chat["input_ids"]
    assert ids == [*tokenizer.encode("a"), tokenizer.eod, *tokenizer.encode("b"), tokenizer.eod]
    # Data cannot forge it where training and generation encode.
    assert tokenizer.eod not in tokenizer.encode("x</s>") == plain(auto, "x</s>")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "llama", "olmo2"])
@pytest.mark.parametrize("form", ["sentencepiece", "huggingface"])
def test_write_tokenizer_puts_the_begin_token_before_every_text(
    tokenizer: Tokenizer, tmp_path: Path, kind: str, form: str
) -> None:
    if form == "huggingface":
        begun = load_tokenizer(with_bos(hugging_face_file(tmp_path)), bos="own")
        assert begun.bos == 600
    else:
        begun = load_tokenizer(tokenizer.file, bos="own")
    assert begun.bos not in (None, begun.eod)
    folder = tmp_path / "out"
    folder.mkdir()
    write_tokenizer(begun, folder, 48)
    auto = loaded(folder, {"model_type": kind})
    for text in ("", "a", *make_sample_texts(begun, seed=2)[:40]):
        for begin in (True, False):
            ids = auto(text, add_special_tokens=begin, split_special_tokens=True)["input_ids"]
            assert ids == [begun.bos] * begin + begun.encode(text)
    one, other = begun.encode("a b"), begun.encode("c")
    assert auto("a b", "c")["input_ids"] == [begun.bos, *one, begun.bos, *other]
    assert (auto.bos_token_id, auto.eos_token_id) == (begun.bos, begun.eod)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["add_bos_token"] is True
