"""No text gets the token that ends documents, however a file declares it, and other texts keep their ids."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as HuggingFaceModel

from megastable.base.errors import DataError
from megastable.data.tokenizer import NO_EOD, Tokenizer, load_tokenizer
from megastable_tools.convert.huggingface.tokenizer_export import write_tokenizer
from tests.data.test_prepare import prepare_shards, texts_of, write_lines
from tests.data.texts import EOD_NAME, hugging_face_file, sentencepiece_file, source_code

Make = Callable[[Path], Path]


def trained(path: Path, **options: Any) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(source_code().split("\n\n")), model_writer=model, vocab_size=600, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False, minloglevel=2,
        **options,
    )  # fmt: skip
    (path / "tokenizer.model").write_bytes(model.getvalue())
    return path / "tokenizer.model"


def end_of_sentence_as_symbol(path: Path) -> Path:
    return trained(path, model_type="bpe", user_defined_symbols=["</s>"])


def no_end_of_sentence(path: Path) -> Path:
    return trained(path, model_type="bpe", eos_id=-1, user_defined_symbols=[EOD_NAME])


def edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    file = hugging_face_file(path)
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))
    return file


def not_special(path: Path) -> Path:
    return edited(path, lambda content: content["added_tokens"][0].update(special=False))


def only_in_the_model(path: Path) -> Path:
    def edit(content: dict[str, Any]) -> None:
        content["added_tokens"] = []
        content["model"]["ignore_merges"] = True
        content["pre_tokenizer"]["use_regex"] = False  # which would cut the token

    return edited(path, edit)


def among_unigram_pieces(path: Path) -> Path:
    """As T5's tokenizer.json: special, and a piece of the model at once."""
    letters = sorted(set("abc </s>|endoftx"))

    def edit(content: dict[str, Any]) -> None:
        vocab = [[EOD_NAME, 0.0], ["<unk>", 0.0], *([letter, -3.0] for letter in letters)]
        content["model"] = {"type": "Unigram", "unk_id": 1, "vocab": vocab, "byte_fallback": False}
        content["pre_tokenizer"], content["decoder"] = None, {"type": "Fuse"}

    return edited(path, edit)


ALL = [end_of_sentence_as_symbol, no_end_of_sentence, not_special, only_in_the_model, among_unigram_pieces]


@pytest.mark.quick("end_of_sentence_as_symbol", "among_unigram_pieces")
@pytest.mark.parametrize("make", ALL)
def test_a_text_that_spells_the_end_of_a_document_does_not_end_it(tmp_path: Path, make: Make) -> None:
    file = make(tmp_path)
    end = load_tokenizer(file).spelled(load_tokenizer(file).eod)
    with_end = [end, f"a {end} b{end}{end}", f"c{end[0]}{end}"]
    assert load_tokenizer(file).eod in load_tokenizer(file, NO_EOD).encode(end)  # as the file has it
    prepare_shards([write_lines(tmp_path / "a.jsonl", with_end)], tmp_path / "out", file, validation=0.0)
    assert texts_of(tmp_path / "out", "train") == with_end  # which looks for ends inside, too
    # An exported tokenizer gives the same ids.
    write_tokenizer(load_tokenizer(file), tmp_path, 48)
    export = HuggingFaceModel.from_file(str(tmp_path / "tokenizer.json"))
    export.encode_special_tokens = True
    assert [export.encode(text).ids for text in with_end] == [
        load_tokenizer(file).encode(t) for t in with_end
    ]


@pytest.fixture(scope="module", params=ALL)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = request.param(tmp_path_factory.mktemp("tokenizer"))
    return found


@pytest.fixture(scope="module")
def pair(file: Path) -> tuple[Tokenizer, Tokenizer]:
    """As it is used, and as the file has it."""
    return load_tokenizer(file), load_tokenizer(file, NO_EOD)


@given(text=st.text(st.sampled_from("abc </s>|endoftx"), max_size=40))
def test_all_other_texts_have_the_ids_of_the_file(pair: tuple[Tokenizer, Tokenizer], text: str) -> None:
    used, given_as = pair
    if used.spelled(used.eod) not in text:
        assert used.encode(text) == given_as.encode(text)


def test_real_text_has_the_ids_of_the_library(file: Path) -> None:
    text, ids = source_code(), load_tokenizer(file).encode(source_code())
    if file.suffix == ".model":
        assert ids == SentencePieceProcessor(model_file=str(file)).encode(text)
    else:
        assert ids == HuggingFaceModel.from_file(str(file)).encode(text).ids


def test_an_ordinary_piece_that_ends_documents_is_not_for_texts(tmp_path: Path) -> None:
    for make in (sentencepiece_file, hugging_face_file):
        usual = load_tokenizer(make(tmp_path))
        (piece,) = (id for id in range(usual.vocab_size) if usual.spelled(id) == "parser")
        ending = load_tokenizer(usual.file, piece)
        assert piece in usual.encode("parser:")
        assert piece not in ending.encode("parser:")
        assert ending.decode(ending.encode("parser:")) == "parser:"


def test_an_end_that_texts_cannot_do_without_is_refused(tmp_path: Path) -> None:
    file, text = hugging_face_file(tmp_path), write_lines(tmp_path / "a.jsonl", ["x\ny", "z"])
    line_end = load_tokenizer(file).encode("\n")[0]
    with pytest.raises(DataError, match=rf"token {line_end} \('Ċ'\), which ends documents .* Name another"):
        prepare_shards([text], tmp_path / "out", file, eod=line_end)
    assert not (tmp_path / "out").exists()
