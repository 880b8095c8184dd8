"""Tokenizers give texts back, agree with their libraries, and refuse what they cannot use."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer as HuggingFaceModel
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from megastable.base.errors import DataError
from megastable.data.tokenizer import (
    NO_EOD,
    HuggingFaceTokenizer,
    LossCounter,
    SentencePieceTokenizer,
    Tokenizer,
    check_text,
    load_tokenizer,
)
from megastable_tools.convert.huggingface.tokenizer_export import write_tokenizer
from megastable_tools.prepare.corpus_tokenizer import ModelType, sample_blocks, train_sentencepiece
from megastable_tools.prepare.prepare import prepare_shards
from tests.data.test_prepare import texts_of, write_lines
from tests.data.texts import EOD_NAME, documents, hugging_face_file, sentencepiece_file, source_code
from tests.tiers import examples

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


@given(text=any_text | spaced_text)
def test_tokenizer_gives_all_texts_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.quick("options0")
@pytest.mark.parametrize(
    "options",
    [{}, {"split_by_whitespace": False, "remove_extra_whitespaces": False, "add_dummy_prefix": False}],
)
def test_tokenizer_encodes_as_its_library(tmp_path: Path, options: dict[str, bool]) -> None:
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


def test_tokenizer_finds_the_end_of_documents(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"version https://git-lfs.github.com/spec/v1\n", b"\xff\0" * 99]
)
def test_load_tokenizer_refuses_foreign_files(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        load_tokenizer(tmp_path / name)


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
def test_tokenizer_lets_no_text_end_a_document(tmp_path: Path, make: Make) -> None:
    file = make(tmp_path)
    end = load_tokenizer(file).spell_token(load_tokenizer(file).eod)
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
def test_tokenizer_gives_other_texts_the_ids_of_the_file(
    pair: tuple[Tokenizer, Tokenizer], text: str
) -> None:
    used, given_as = pair
    if used.spell_token(used.eod) not in text:
        assert used.encode(text) == given_as.encode(text)


def test_prepare_shards_refuses_an_end_that_texts_need(tmp_path: Path) -> None:
    file, text = hugging_face_file(tmp_path), write_lines(tmp_path / "a.jsonl", ["x\ny", "z"])
    line_end = load_tokenizer(file).encode("\n")[0]
    with pytest.raises(DataError, match=rf"token {line_end} \('Ċ'\), which ends documents .* Name another"):
        prepare_shards([text], tmp_path / "out", file, eod=line_end)
    assert not (tmp_path / "out").exists()


CHINESE = "漢字" * 150
EOD = "<|endoftext|>"
SPECIAL = [EOD, "[UNK]"]


def saved(model: HuggingFaceModel, trainer: object, folder: Path) -> Path:
    model.train_from_iterator([source_code()], trainer)
    model.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def bpe(folder: Path, **options: object) -> Path:
    """A BPE of characters: without an unknown token it leaves out what it lacks."""
    model = HuggingFaceModel(models.BPE(**options))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    return saved(
        model, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False), folder
    )


def word_pieces(folder: Path) -> Path:
    """As BERT's: no blanks, no case, no accents, and a word with an unknown character is unknown."""
    model = HuggingFaceModel(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return saved(
        model, trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False), folder
    )


def piece_without_bytes(folder: Path) -> Path:
    """As SentencePiece makes it by default: NFKC, blanks merged, no byte fallback."""
    SentencePieceTrainer.train(
        sentence_iterator=iter(source_code().splitlines()),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=500,
        character_coverage=1.0,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def byte_level(folder: Path) -> Path:
    return hugging_face_file(folder, 400)


LOSSLESS = [byte_level, sentencepiece_file]
LOSSY = [bpe, word_pieces, piece_without_bytes]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Make], Tokenizer]:
    @cache
    def make(kind: Make) -> Tokenizer:
        path = kind(tmp_path_factory.mktemp("tokenizer"))
        new = HuggingFaceTokenizer if path.suffix == ".json" else SentencePieceTokenizer
        return new(path, path.read_bytes(), NO_EOD, None)

    return make


def shares(tokenizer: Tokenizer, texts: list[str]) -> list[float]:
    lost = LossCounter(tokenizer).count_lost(
        texts, [t.encode() for t in texts], tokenizer.encode_batch(texts)
    )
    plain = [len(text.encode().translate(None, b" \t\n\r\v\f")) for text in texts]
    return [gone / max(1, of) for of, gone in zip(plain, lost, strict=True)]


@pytest.mark.quick("sentencepiece_file")
@pytest.mark.parametrize("kind", [*LOSSLESS, *LOSSY])
def test_loss_counter_loses_no_known_text(load: Callable[[Make], Tokenizer], kind: Make) -> None:
    tokenizer = load(kind)
    known = ["", " ", "    def  f( self ):\n", source_code()]
    assert shares(tokenizer, known) == [0.0] * 4
    changed = ["ｄｅｆ ﬁnd\u00a0a\u3000½"] if kind is piece_without_bytes else []
    changed += ["DÉF e\u0301"] if kind is word_pieces else []
    for text in changed if kind in LOSSY else ["e\u0301 漢字 🤷 \u2581\u2581", CHINESE]:
        # "½" becomes 1⁄2 with a slash that the text lacks; everything else is known.
        assert shares(tokenizer, [text.replace("½", "")]) == [0.0]


@pytest.mark.quick("piece_without_bytes")
@pytest.mark.parametrize("kind", LOSSY)
def test_loss_counter_counts_what_a_tokenizer_lacks(load: Callable[[Make], Tokenizer], kind: Make) -> None:
    tokenizer = load(kind)
    assert len(tokenizer.encode(CHINESE)) <= 2 or kind is word_pieces
    half = "return " * 50 + "漢" * 100
    whole, part, mixed = shares(tokenizer, [CHINESE, half, "漢"])
    assert (whole, part, mixed) == (1.0, 0.5, 1.0)
    with pytest.raises(
        DataError, match=r"46.2 % of the text is lost or unknown in .*begins with 'return return"
    ):
        check_text(half, tokenizer)
    check_text(source_code() + "漢", tokenizer)


@settings(max_examples=examples(60), deadline=None)  # the first example trains the tokenizers
@given(text=st.text(st.sampled_from(" \n\taSelf(é漢🤷\u2581\u00a0½ﬁ"), max_size=60))
def test_loss_counter_counts_a_share(load: Callable[[Make], Tokenizer], text: str) -> None:
    for kind in (*LOSSLESS, *LOSSY):
        (share,) = shares(load(kind), [text])
        assert 0 <= share <= (0 if kind in LOSSLESS else 1)
        if kind is bpe:
            assert (share > 0) == any(character in "é漢🤷½ﬁ" for character in text)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_prepare_shards_refuses_to_lose_too_much(
    tmp_path: Path, load: Callable[[Make], Tokenizer], workers: int
) -> None:
    path = tmp_path / "a.jsonl"
    texts = [*documents(40), "漢字" * 10]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = load(bpe)
    plain = "".join("".join(texts).split())
    lacking = "".join(character for character in plain if character not in source_code())
    share = len(lacking.encode()) / len("".join(texts).encode())
    made = prepare_shards([path], tmp_path / "out", tokenizer.file, eod=EOD, workers=workers, progress=False)
    assert made.lost_share == pytest.approx(share)
    assert f"{100 * share:.3g} % of it lost or unknown" in str(made)
    (tmp_path / "b.txt").write_text(CHINESE)
    for inputs in ([tmp_path / "b.txt"], [path, tmp_path / "b.txt"]):
        with pytest.raises(
            DataError, match=r"of the text is lost or unknown.*'漢字漢字.*allow the loss with --max-lost"
        ):
            prepare_shards(inputs, tmp_path / "no", tokenizer.file, eod=EOD, workers=workers, progress=False)
        assert not (tmp_path / "no").exists()
    made = prepare_shards(
        inputs, tmp_path / "yes", tokenizer.file, eod=EOD, workers=workers, progress=False, max_lost=0.2
    )
    assert made.lost_share is not None
    assert 0.01 < made.lost_share < 0.2


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_train_sentencepiece_is_repeatable(tmp_path: Path, model_type: ModelType) -> None:
    one, other = (
        train_sentencepiece(iter(documents(300)), tmp_path / name, 500, model_type)
        for name in ("a.model", "b.model")
    )
    assert one.vocab_size == 500
    assert one.file.read_bytes() == other.file.read_bytes()
    assert one.decode(one.encode(source_code())) == source_code()


lines = st.lists(st.sampled_from(["", "a", "b" * 100, "c" * 3000, "dé" * 700]), max_size=60).map("\n".join)


@given(texts=st.lists(lines, max_size=8), budget=st.integers(0, 20_000), seed=st.integers(0, 9))
def test_sample_blocks_keeps_its_budget_and_order(texts: list[str], budget: int, seed: int) -> None:
    everything = sample_blocks(texts, 1 << 40, seed)
    sample = sample_blocks(texts, budget, seed)
    assert sum(len(block.encode()) for block in sample) <= budget
    rest = iter(everything)
    assert all(block in rest for block in sample)
    assert sample == sample_blocks(texts, budget, seed)
