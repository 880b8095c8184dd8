"""Tokenizers give texts back, agree with their libraries, and refuse what they cannot use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from megastable.base.errors import DataError
from megastable.data.tokenizer import LONG, OWN, Tokenizer, load_tokenizer
from tests.data.texts import EOD_NAME, hugging_face_file, sentencepiece_file, source_code

# Control characters and line ends included; half surrogate pairs are no text.
any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
spaced_text = st.text(st.sampled_from(" \t\n\r\u2581\u3000\u00a0ab(é日🤷"), max_size=40)

AWKWARD = [
    "",
    " ",
    "   leading and trailing   ",
    "a  b   c\t\td",
    "\n\n\tx = 1\r\n\n",
    "\u2581 is a character\u2581\u2581 too",
    "e\u0301 é ﬁ ½ Å İ",  # what normalisation would change
    "日本語 🤷🏽 \U0010ffff \ufeff \u2028",
    "nul \0 and </s> <s> <unk> <0x0A> <|endoftext|>",
    "long" * 3000 + " " * 5000 + "\n" * 5000,
]


@pytest.fixture(scope="module", params=["sentencepiece", "huggingface"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make = sentencepiece_file if request.param == "sentencepiece" else hugging_face_file
    return load_tokenizer(make(directory))


@pytest.fixture(scope="module")
def piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(sentencepiece_file(tmp_path_factory.mktemp("piece")))


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts_survive(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=any_text | spaced_text)
def test_all_texts_survive(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.decode(ids) == text


def test_a_batch_is_its_texts_one_by_one(tokenizer: Tokenizer) -> None:
    batch = tokenizer.encode_batch(AWKWARD)
    assert [ids.dtype for ids in batch] == [np.dtype(np.int32)] * len(AWKWARD)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text) for text in AWKWARD]
    assert tokenizer.encode_batch([]) == []


def test_no_text_contains_the_end_of_a_document(tokenizer: Tokenizer) -> None:
    for text in ("</s>", "<s>", EOD_NAME, f"a {EOD_NAME} b"):
        assert tokenizer.eod not in tokenizer.encode(text)
    assert tokenizer.decode([tokenizer.eod, *tokenizer.encode("a"), tokenizer.eod]) == "a"


def test_training_compresses(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(source_code())) < 0.6 * len(source_code())


def test_parts_have_the_ids_of_the_whole(piece: Tokenizer) -> None:
    whole = SentencePieceProcessor(model_file=str(piece.file))
    text = source_code()
    assert len(text) > 10 * LONG
    assert piece.encode(text) == whole.encode(text)


@given(
    words=st.lists(
        st.sampled_from([" ", "  ", "\n", "self", "'a", "x" * 50, "return  ", "日"]), max_size=400
    ),
    copies=st.integers(1, 40),
)
def test_parts_have_the_ids_of_the_whole_for_all_texts(
    piece: Tokenizer, words: list[str], copies: int
) -> None:
    whole = SentencePieceProcessor(model_file=str(piece.file))
    text = "".join(words) * copies
    assert piece.encode(text) == whole.encode(text)


@pytest.mark.quick("options0")
@pytest.mark.parametrize(
    "options",
    [{}, {"split_by_whitespace": False, "remove_extra_whitespaces": False, "add_dummy_prefix": False}],
)
def test_foreign_models_encode_as_their_library(tmp_path: Path, options: dict[str, bool]) -> None:
    SentencePieceTrainer.train(
        sentence_iterator=iter(source_code().split("\n\n")),
        model_prefix=str(tmp_path / "foreign"),
        vocab_size=600,
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    tokenizer = load_tokenizer(tmp_path)
    whole = SentencePieceProcessor(model_file=str(tokenizer.file))
    for text in (source_code(), "  a  b ", *AWKWARD):
        if "\u2581" not in text:
            assert tokenizer.encode(text) == whole.encode(text)
    if not options:
        assert tokenizer.encode("\u2581") == whole.encode("\u2581")


def test_the_file_is_described_and_copied(tokenizer: Tokenizer, tmp_path: Path) -> None:
    copy = load_tokenizer(tokenizer.copy_to(tmp_path), tokenizer.eod)
    assert copy.info == tokenizer.info
    assert copy.info.vocab_size == 600
    assert copy.file.read_bytes() == tokenizer.file.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [tokenizer.file.name]
    assert copy.xxh3 == xxhash.xxh3_128_hexdigest(tokenizer.file.read_bytes())


def test_a_directory_holds_one_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found neither"):
        load_tokenizer(tmp_path)
    model = sentencepiece_file(tmp_path)
    assert load_tokenizer(tmp_path).kind == "sentencepiece"
    (tmp_path / "other.model").write_bytes(model.read_bytes())
    with pytest.raises(DataError, match=r"other\.model, tokenizer\.model: name the file"):
        load_tokenizer(tmp_path)
    hugging_face_file(tmp_path)
    assert load_tokenizer(tmp_path).kind == "huggingface"


def test_the_end_of_document_is_found_or_named(tmp_path: Path) -> None:
    model, json = sentencepiece_file(tmp_path), hugging_face_file(tmp_path)
    assert load_tokenizer(model).eod == SentencePieceProcessor(model_file=str(model)).eos_id()
    assert load_tokenizer(json).eod == 0
    assert load_tokenizer(model, "<s>").eod == 1
    assert load_tokenizer(model, 7).eod == load_tokenizer(model, "7").eod == 7
    for file in (model, json):
        with pytest.raises(DataError, match="no token '<stop>'"):
            load_tokenizer(file, "<stop>")
        with pytest.raises(DataError, match=r"outside of 0\.\.599"):
            load_tokenizer(file, 600)
    json.write_text(json.read_text().replace(EOD_NAME, "<|mine|>"))
    with pytest.raises(DataError, match="none of the usual end-of-document tokens"):
        load_tokenizer(json)
    assert load_tokenizer(json, "<|mine|>").eod == 0


def test_the_tokens_of_deepseek_are_known(tmp_path: Path) -> None:
    bar, space = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
    special = [f"<{bar}{edge}{space}of{space}sentence{bar}>" for edge in ("begin", "end")]
    found = load_tokenizer(hugging_face_file(tmp_path, special=special), bos=OWN)
    assert (found.bos, found.eod) == (0, 1)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"version https://git-lfs.github.com/spec/v1\n", b"\xff\0" * 99]
)
def test_foreign_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        load_tokenizer(tmp_path / name)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.model cannot be read"):
        load_tokenizer(tmp_path / "nothing.model")


@pytest.mark.parametrize("token", [-1, 600])
def test_ids_outside_of_the_vocabulary_are_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(DataError, match=f"token id {token} is outside"):
        tokenizer.decode([1, token])
