"""The tokenizer of a checkpoint is found, or it is said which one is missing or wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megastable.base.errors import CheckpointError, DataError, MegastableError
from megastable.data.manifest import FILE, Manifest
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.convert.huggingface.export import to_hf
from megastable_tools.generate.load import Speaker, open_speaker
from tests.data.texts import sentencepiece_file
from tests.generate.runs import PIECES, run_with_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_with_tokenizer(tmp_path_factory.mktemp("generate"))


@pytest.fixture(scope="module")
def folder(run: Path) -> Path:
    """Of Hugging Face."""
    return to_hf(run, run.parent / "exported", dtype="fp32").out


def opened(path: Path, tokenizer: Path | None = None, dtype: str | None = None) -> Speaker:
    return open_speaker(path, tokenizer, dtype, "cpu")


def test_open_speaker_speaks_with_the_tokenizer_of_its_corpus(run: Path) -> None:
    speaker = opened(run)
    assert speaker.tokenizer.xxh3 == load_tokenizer(run.parent / "corpus").xxh3
    assert speaker.ends == {speaker.tokenizer.eod} and speaker.notes == ()
    assert next(speaker.model.parameters()).dtype == torch.float32  # on a CPU
    assert next(opened(run, dtype="bf16").model.parameters()).dtype == torch.bfloat16


def test_prompt_is_its_text_and_an_empty_one_the_start_of_a_document(run: Path) -> None:
    speaker = opened(run)
    ids, eod = speaker.tokenizer.encode("def f("), speaker.tokenizer.eod
    assert speaker.encode_prompt("def f(", document_start=False) == ids
    assert speaker.encode_prompt("def f(", document_start=True) == [eod, *ids]
    assert speaker.encode_prompt("", False) == speaker.encode_prompt("", True) == [eod]
    with pytest.raises(DataError, match="not UTF-8"):
        speaker.encode_prompt("a\udcff", document_start=False)


def test_prompt_begins_with_what_begins_documents(tmp_path: Path) -> None:
    """Of the run, and of its export, which says so in config.json, too."""
    run = run_with_tokenizer(tmp_path)
    manifest = Manifest.load_manifest(tmp_path / "corpus")
    bos = load_tokenizer(tmp_path / "corpus", bos="own").bos
    assert bos not in (None, manifest.tokenizer.eod)
    info = manifest.tokenizer.model_copy(update={"bos": bos})
    manifest.model_copy(update={"tokenizer": info}).save_manifest(tmp_path / "corpus")
    out = to_hf(run, tmp_path / "exported").out
    for speaker in (opened(run), opened(out)):
        ids = speaker.tokenizer.encode("def f(")
        for document_start in (False, True):
            assert speaker.encode_prompt("def f(", document_start) == [bos, *ids]
            assert speaker.encode_prompt("", document_start) == [bos]
        assert speaker.ends == {speaker.tokenizer.eod}
    kept = shutil.copy(tmp_path / "corpus/tokenizer.model", tmp_path / "kept.model")
    speaker = opened(run, Path(kept))
    assert speaker.encode_prompt("def f(", False) == [bos, *ids]
    assert speaker.ends == {info.eod} and not speaker.notes


def test_open_speaker_of_a_folder_of_hugging_face_speaks_as_the_run(run: Path, folder: Path) -> None:
    ours, theirs = opened(run), opened(folder)
    text = "def f(x, é):\n    return 🤷\n"
    assert ours.encode_prompt(text, False) == theirs.encode_prompt(text, False)
    assert theirs.ends == ours.ends and theirs.start == ours.start and not theirs.always
    ids = torch.tensor([ours.encode_prompt(text, False)])
    with torch.no_grad():
        torch.testing.assert_close(theirs.model(ids), ours.model(ids), rtol=1e-4, atol=1e-4)


def test_prompt_forges_no_special_token(run: Path, folder: Path) -> None:
    """Though other programs read the folder's tokenizer so that it does."""
    for speaker in (opened(run), opened(folder)):
        for text in ("x</s>", "<s>", "<unk>y"):
            ids = speaker.encode_prompt(text, False)
            assert not {0, 1, 2} & {*ids} and speaker.tokenizer.decode(ids) == text


def refused(path: Path, tokenizer: Path | None = None, kind: type[MegastableError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        opened(path, tokenizer)
    return str(caught.value)


def test_open_speaker_says_what_is_missing_or_wrong(run: Path, folder: Path, tmp_path: Path) -> None:
    assert "neither a checkpoint nor the directory of a run" in refused(tmp_path, kind=CheckpointError)
    large = sentencepiece_file(tmp_path, PIECES + 100)
    said = refused(run, large)
    assert f"{large} has 500 tokens" in said and "knows 400 only" in said and "--tokenizer" in said
    (tmp_path / "small").mkdir()
    small = opened(run, sentencepiece_file(tmp_path / "small", PIECES - 40))
    assert "360 tokens, the model knows 400" in small.notes[0]
    (tmp_path / "none").mkdir()
    assert "tokenizer.json or one .model file" in refused(run, tmp_path / "none")
    for device in ("tpu9", "meta"):
        with pytest.raises(DataError, match=f"device '{device}' cannot be used"):
            open_speaker(run, None, None, device)


def test_open_speaker_without_the_corpus_or_with_another_one(tmp_path: Path) -> None:
    run = run_with_tokenizer(tmp_path)
    tokenizer = tmp_path / "corpus/tokenizer.model"
    kept = tokenizer.read_bytes()
    tokenizer.write_bytes(sentencepiece_file(tmp_path, PIECES - 10).read_bytes())
    assert f"is not the tokenizer that {tmp_path / 'corpus' / FILE} was made with" in refused(run)
    tokenizer.unlink()
    assert "or name it with --tokenizer" in refused(run)
    (tmp_path / "corpus" / FILE).unlink()
    assert "or name it with --tokenizer" in refused(run)
    (tmp_path / "kept.model").write_bytes(kept)
    speaker = opened(run, tmp_path / "kept.model")
    assert speaker.tokenizer.vocab_size == PIECES
    assert "the corpus is not there: what begins and ends a document is guessed" in speaker.notes[0]
