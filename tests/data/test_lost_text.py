"""Text that a tokenizer has no tokens for is counted, and too much of it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceModel

from megastable.base.errors import DataError
from megastable.data.lost_text import LossCounter, check_text
from megastable.data.tokenizer import NO_EOD, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from megastable_tools.prepare import prepare
from megastable_tools.prepare.prepare import prepare_shards
from tests.data.texts import documents, hugging_face_file, sentencepiece_file, source_code
from tests.tiers import examples

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


def bpe_with_unknown(folder: Path) -> Path:
    return bpe(folder, unk_token="[UNK]", fuse_unk=True)


def word_pieces(folder: Path) -> Path:
    """As BERT's: no blanks, no case, no accents, and a word with an unknown character is unknown."""
    model = HuggingFaceModel(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return saved(
        model, trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False), folder
    )


def unigram(folder: Path) -> Path:
    model = HuggingFaceModel(models.Unigram())
    model.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False
    )
    return saved(model, trainer, folder)


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


def byte_level_nfc(folder: Path) -> Path:
    path = hugging_face_file(folder, 400)
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "NFC"}
    content["added_tokens"].append(
        content["added_tokens"][0] | {"id": 400, "content": "def ", "special": False}
    )
    path.write_text(json.dumps(content))
    return path


LOSSLESS = [byte_level, byte_level_nfc, sentencepiece_file]
LOSSY = [bpe, bpe_with_unknown, word_pieces, unigram, piece_without_bytes]
Make = Callable[[Path], Path]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Make], Tokenizer]:
    @cache
    def make(kind: Make) -> Tokenizer:
        path = kind(tmp_path_factory.mktemp("tokenizer"))
        new = HuggingFaceTokenizer if path.suffix == ".json" else SentencePieceTokenizer
        return new(path, path.read_bytes(), NO_EOD, None)

    return make


def shares(tokenizer: Tokenizer, texts: list[str]) -> list[float]:
    lost = LossCounter(tokenizer).count(texts, [t.encode() for t in texts], tokenizer.encode_batch(texts))
    plain = [len(text.encode().translate(None, b" \t\n\r\v\f")) for text in texts]
    return [gone / max(1, of) for of, gone in zip(plain, lost, strict=True)]


@pytest.mark.quick("sentencepiece_file")
@pytest.mark.parametrize("kind", [*LOSSLESS, *LOSSY])
def test_known_text_loses_nothing_however_it_is_normalised(
    load: Callable[[Make], Tokenizer], kind: Make
) -> None:
    tokenizer = load(kind)
    known = ["", " ", "    def  f( self ):\n", source_code()]
    assert shares(tokenizer, known) == [0.0] * 4
    changed = ["ｄｅｆ ﬁnd\u00a0a\u3000½"] if kind in (unigram, piece_without_bytes) else []
    changed += ["DÉF e\u0301"] if kind is word_pieces else []
    for text in changed if kind in LOSSY else ["e\u0301 漢字 🤷 \u2581\u2581", CHINESE]:
        # "½" becomes 1⁄2 with a slash that the text lacks; everything else is known.
        assert shares(tokenizer, [text.replace("½", "")]) == [0.0]


@pytest.mark.quick("piece_without_bytes")
@pytest.mark.parametrize("kind", LOSSY)
def test_what_a_tokenizer_lacks_is_lost(load: Callable[[Make], Tokenizer], kind: Make) -> None:
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


def test_unknown_line_ends_are_lost_text(tmp_path: Path) -> None:
    SentencePieceTrainer.train(
        sentence_iterator=iter(source_code().splitlines()),
        model_prefix=str(tmp_path / "identity"),
        vocab_size=400,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    path = tmp_path / "identity.model"
    tokenizer = SentencePieceTokenizer(path, path.read_bytes(), NO_EOD, None)
    assert shares(tokenizer, ["self\nself\n", "self self"]) == [0.25, 0.0]


@settings(max_examples=examples(60), deadline=None)  # the first example trains the tokenizers
@given(text=st.text(st.sampled_from(" \n\taSelf(é漢🤷\u2581\u00a0½ﬁ"), max_size=60))
def test_a_share_is_a_share(load: Callable[[Make], Tokenizer], text: str) -> None:
    for kind in (*LOSSLESS, *LOSSY):
        (share,) = shares(load(kind), [text])
        assert 0 <= share <= (0 if kind in LOSSLESS else 1)
        if kind is bpe:
            assert (share > 0) == any(character in "é漢🤷½ﬁ" for character in text)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_corpus_that_loses_too_much_is_refused(
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


def test_lost_text_ends_the_pass_early(
    tmp_path: Path, load: Callable[[Make], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "JUDGED_FROM", 20_000)
    monkeypatch.setattr(prepare, "BATCH", 1_000)
    tokenizer = load(bpe)
    lines = [json.dumps({"text": f"{text} {CHINESE[:8]}"}) for text in documents(200)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*lines, "what is read only by a pass that goes on"]))
    for held_back in ([], [path]):
        with pytest.raises(
            DataError, match=r"of the first 2\d.\d kB of text is lost .* with --max-lost 0\.0"
        ):
            prepare_shards(
                [path],
                tmp_path / "no",
                tokenizer.file,
                validation_inputs=held_back,
                eod=EOD,
                progress=False,
            )
        assert not (tmp_path / "no").exists()
    with pytest.raises(DataError, match="not one JSON object per line"):
        prepare_shards([path], tmp_path / "no", tokenizer.file, eod=EOD, progress=False, max_lost=0.1)
    # A few odd documents at the beginning do not count for more.
    path.write_text("\n".join(lines[:3] + [json.dumps({"text": text}) for text in documents(300)[100:]]))
    made = prepare_shards([path], tmp_path / "yes", tokenizer.file, eod=EOD, progress=False)
    assert made.lost_share is not None
    assert 0 < made.lost_share < 0.01
