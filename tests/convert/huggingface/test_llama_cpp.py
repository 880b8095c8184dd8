"""What llama.cpp is told of a tokenizer makes it give the ids of training; what it could not do is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HuggingFaceModel

from megastable.base.errors import CheckpointError
from megastable.data.tokenizer import SPACE, Tokenizer, load_tokenizer
from megastable_tools.convert.huggingface.llama_cpp import LLAMA3, QWEN2, Vocabulary, is_qwens, vocabulary
from megastable_tools.convert.huggingface.tokenizer_export import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    fast,
    real_text,
    texts,
)
from megastable_tools.prepare.train_tokenizer import train_sentencepiece


def content(tokenizer: Tokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(HuggingFaceModel.from_str(json.dumps(fast(tokenizer))).to_str())
    return found


def merged_by_scores(words: Vocabulary, text: str) -> list[int]:
    """llm_tokenizer_spm_session of llama.cpp's llama-vocab.cpp, slowly: the best neighbours first, from the left."""
    ids = {token: id for id, token in enumerate(words.tokens)}
    symbols = [*((" " if words.space else "") + text).replace(" ", SPACE)]
    while pairs := [
        (-words.scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids
    ]:
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    spelled = ([s] if s in ids else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols)
    return [ids[token] for tokens in spelled for token in tokens]


def test_scores_give_the_ids_of_training(tokenizer: Tokenizer) -> None:
    words = vocabulary(content(tokenizer), tokenizer.vocab_size + 3)
    assert (words.model, words.space, words.begin) == ("llama", False, "")
    for text in texts(tokenizer, seed=1):
        if SPACE not in text and len(text) < 2000 and "<" not in text:
            assert merged_by_scores(words, text) == tokenizer.encode(text)
    assert words.notes == ("a literal ▁ (U+2581) in a text becomes a space in llama.cpp",)
    assert words.types[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE] and words.tokens[3] == "<0x00>"
    assert words.types[-4:] == [NORMAL, UNUSED, UNUSED, UNUSED]
    assert not any(" " in token for token in words.tokens)


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def byte_level(
    folder: Path, before: Any = GPT2, normalizer: Any = None, processor: Any = None, **options: Any
) -> Tokenizer:
    model = HuggingFaceModel(models.BPE(**options))
    model.pre_tokenizer, model.decoder = GPT2, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        [real_text()],
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    model.pre_tokenizer = before  # some are slow in training
    if normalizer is not None:
        model.normalizer = normalizer
    if processor is not None:
        model.post_processor = processor
    model.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder / "tokenizer.json")


def cut(regex: str, behavior: str = "isolated") -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), behavior), BYTES])


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
# How a byte-level tokenizer cuts texts, and what llama.cpp calls it.
CUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt-2": (GPT2, {}),
    "starcoder": (DIGITS, {}),
    "llama-bpe": (cut(LLAMA3), {"ignore_merges": True}),
    "dbrx": (cut(LLAMA3), {}),
    "qwen2": (cut(QWEN2), {}),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_byte_level_tokenizer_cuts_texts_as_its_own_name_there_does(tmp_path: Path, name: str) -> None:
    before, options = CUTS[name]
    words = vocabulary(content(byte_level(tmp_path, before, **options)), 600)
    assert (words.model, words.pre, words.scores, words.notes) == ("gpt2", name, [], ())
    assert words.types == [CONTROL] + [NORMAL] * 599
    assert words.merges[0].count(" ") == 1 and len(words.merges) == 600 - 1 - 256


def test_what_llama_cpp_leaves_out_is_said(tmp_path: Path) -> None:
    words = vocabulary(content(byte_level(tmp_path, cut(QWEN2), normalizers.NFC())), 600)
    assert words.pre == "qwen2" and "NFC" in words.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "normalizer", "qwens"),
    [
        (cut(QWEN2), normalizers.NFC(), True),
        (cut(QWEN2), None, False),
        (GPT2, normalizers.NFC(), False),
    ],
)
def test_which_tokenizer_transformers_may_take_for_qwens(
    tmp_path: Path, before: Any, normalizer: Any, qwens: bool
) -> None:
    """Of a Qwen2 transformers 5 keep the merges alone."""
    given = byte_level(tmp_path, before, normalizer)
    assert is_qwens(content(given)) is qwens
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer, __version__

    if int(__version__.split(".")[0]) < 5:
        return
    theirs = Qwen2Tokenizer.from_pretrained(tmp_path)
    own = PreTrainedTokenizerFast(tokenizer_file=str(given.file))
    given_texts = [*texts(given), "e\u0301"]  # which has a form of its own
    assert all(theirs(text)["input_ids"] == own(text)["input_ids"] for text in given_texts) is qwens


def test_a_token_before_every_text_stays(tmp_path: Path) -> None:
    begin = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    made = byte_level(tmp_path, processor=begin)
    assert vocabulary(json.loads(made.content), 600).begin == "<|endoftext|>"
    assert vocabulary(content(made), 600).begin == ""  # which to-hf leaves out


@pytest.mark.slow
def test_what_llama_cpp_cannot_do_is_refused(tmp_path: Path) -> None:
    last = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    for options, why in (
        ({"before": cut(r"\w+")}, r"splits texts in a way .*\(Split, ByteLevel\)"),
        ({"before": cut(QWEN2, "removed")}, "splits texts"),
        ({"before": BYTES}, "splits texts"),
        ({"before": pre_tokenizers.ByteLevel(add_prefix_space=True)}, "puts a space before every text"),
        ({"normalizer": normalizers.Lowercase()}, r"\(Lowercase, ByteLevel\)"),
        ({"processor": last}, "more to a text than a token before it"),
    ):
        made = byte_level(tmp_path, **options)
        with pytest.raises(CheckpointError, match=why):
            vocabulary(json.loads(made.content), 600)
    whole = content(byte_level(tmp_path))
    whole["added_tokens"][0]["lstrip"] = True
    with pytest.raises(CheckpointError, match="takes spaces with it"):
        vocabulary(whole, 600)
    unigram = train_sentencepiece([real_text()], tmp_path / "unigram.model", 600, "unigram")
    with pytest.raises(CheckpointError, match="of type Unigram"):
        vocabulary(content(unigram), 600)
