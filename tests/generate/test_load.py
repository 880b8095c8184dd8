"""The tokenizer of a checkpoint is found, or it is said which one is missing or wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from megastable.base.errors import CheckpointError, DataError, MegastableError
from megastable.data.manifest import FILE, Manifest
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.convert.huggingface.export import to_hf
from megastable_tools.generate.load import Speaker, open_speaker
from tests.data.texts import hugging_face_file, sentencepiece_file
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


def test_a_run_speaks_with_the_tokenizer_of_its_corpus(run: Path) -> None:
    speaker = opened(run)
    assert speaker.tokenizer.xxh3 == load_tokenizer(run.parent / "corpus").xxh3
    assert speaker.ends == {speaker.tokenizer.eod} and speaker.notes == ()
    assert next(speaker.model.parameters()).dtype == torch.float32  # on a CPU
    assert next(opened(run, dtype="bf16").model.parameters()).dtype == torch.bfloat16


def test_a_prompt_is_its_text_and_an_empty_one_the_start_of_a_document(run: Path) -> None:
    speaker = opened(run)
    ids, eod = speaker.tokenizer.encode("def f("), speaker.tokenizer.eod
    assert speaker.prompt("def f(", document_start=False) == ids
    assert speaker.prompt("def f(", document_start=True) == [eod, *ids]
    assert speaker.prompt("", document_start=False) == speaker.prompt("", document_start=True) == [eod]
    with pytest.raises(DataError, match="not UTF-8"):
        speaker.prompt("a\udcff", document_start=False)


def test_documents_that_were_kept_apart_have_nothing_before_them(tmp_path: Path) -> None:
    speaker = opened(run_with_tokenizer(tmp_path, keep_documents_apart=True))
    assert speaker.prompt("def f(", document_start=True) == speaker.tokenizer.encode("def f(")


def test_a_token_that_begins_documents_begins_every_prompt(tmp_path: Path) -> None:
    """Of the run, and of its export, which says so in config.json, too."""
    run = run_with_tokenizer(tmp_path)
    manifest = Manifest.load(tmp_path / "corpus")
    bos = load_tokenizer(tmp_path / "corpus", bos="own").bos
    assert bos not in (None, manifest.tokenizer.eod)
    info = manifest.tokenizer.model_copy(update={"bos": bos})
    manifest.model_copy(update={"tokenizer": info}).save(tmp_path / "corpus")
    out = to_hf(run, tmp_path / "exported").out
    for speaker in (opened(run), opened(out)):
        ids = speaker.tokenizer.encode("def f(")
        for document_start in (False, True):
            assert speaker.prompt("def f(", document_start) == [bos, *ids]
            assert speaker.prompt("", document_start) == [bos]
        assert speaker.ends == {speaker.tokenizer.eod}
    # Also with a tokenizer that is named, while the corpus can say so.
    kept = shutil.copy(tmp_path / "corpus/tokenizer.model", tmp_path / "kept.model")
    speaker = opened(run, Path(kept))
    assert speaker.prompt("def f(", False) == [bos, *ids] and speaker.ends == {info.eod} and not speaker.notes
    for name in ("config.json", "generation_config.json"):
        told = json.loads((out / name).read_text())
        assert (told["bos_token_id"], told["eos_token_id"]) == (bos, info.eod)
    assert "began with `bos`: the tokenizer puts it before every text" in (out / "README.md").read_text()


def test_a_folder_of_hugging_face_speaks_as_the_run(run: Path, folder: Path) -> None:
    ours, theirs = opened(run), opened(folder)
    text = "def f(x, é):\n    return 🤷\n"
    assert ours.prompt(text, False) == theirs.prompt(text, False)
    assert theirs.ends == ours.ends and theirs.start == ours.start and not theirs.always
    ids = torch.tensor([ours.prompt(text, False)])
    with torch.no_grad():
        torch.testing.assert_close(theirs.model(ids), ours.model(ids), rtol=1e-4, atol=1e-4)


def test_no_prompt_forges_a_special_token(run: Path, folder: Path) -> None:
    """Though other programs read the folder's tokenizer so that it does."""
    for speaker in (opened(run), opened(folder)):
        for text in ("x</s>", "<s>", "<unk>y"):
            ids = speaker.prompt(text, False)
            assert not {0, 1, 2} & {*ids} and speaker.tokenizer.decode(ids) == text


def test_a_folder_says_what_ends_and_begins_its_texts(folder: Path, tmp_path: Path) -> None:
    """As Llama's does: several ends, and a tokenizer that puts a token before every text."""
    there = tmp_path / "llama"
    there.mkdir()
    for path in folder.iterdir():
        (there / path.name).write_bytes(path.read_bytes())
    settings = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps(settings | {"bos_token_id": 5, "eos_token_id": 7}))
    (there / "generation_config.json").write_text('{"eos_token_id": [9, 7, 100000, true]}')
    speaker = opened(there)
    assert speaker.ends == {9, 7} and speaker.tokenizer.eod == 9 and speaker.start == (5,)
    content = json.loads((there / "tokenizer.json").read_text())
    word = next(piece for piece, id in content["model"]["vocab"].items() if id == 300)
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": word, "type_id": 0}}, {"Sequence": {"id": "A",
        "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {word: {"id": word, "ids": [300], "tokens": [word]}},
    }  # fmt: skip
    (there / "tokenizer.json").write_text(json.dumps(content))
    speaker = opened(there)
    assert speaker.prompt("def", False) == [300, *speaker.tokenizer.encode("def")]
    assert speaker.prompt("", False) == [300]


def test_a_token_that_begins_texts_must_be_known(folder: Path, tmp_path: Path) -> None:
    there = shutil.copytree(folder, tmp_path / "there")
    (there / "generation_config.json").write_text('{"bos_token_id": 123456}')
    with pytest.raises(DataError, match="has the token 123456, and the model knows 400 only"):
        opened(there).prompt("", False)
    (there / "generation_config.json").write_text("[" * 100_000)  # nobody needs it
    assert opened(there).start == opened(folder).start


def test_a_key_that_is_not_known_can_be_accepted(folder: Path, tmp_path: Path) -> None:
    there = shutil.copytree(folder, tmp_path / "there")
    settings = json.loads((there / "config.json").read_text())
    (there / "config.json").write_text(json.dumps(settings | {"is_mine": True}))
    assert "--accept is_mine" in refused(there, kind=CheckpointError)
    open_speaker(there, None, None, "cpu", accept=["is_mine"])


def refused(path: Path, tokenizer: Path | None = None, kind: type[MegastableError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        opened(path, tokenizer)
    return str(caught.value)


def test_what_is_missing_or_wrong_is_said_with_what_to_do(run: Path, folder: Path, tmp_path: Path) -> None:
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


def test_a_corpus_that_is_gone_or_another_one(tmp_path: Path) -> None:
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


def test_a_hugging_face_tokenizer_can_be_named(run: Path, tmp_path: Path) -> None:
    speaker = opened(run, hugging_face_file(tmp_path, PIECES))
    assert speaker.tokenizer.kind == "huggingface" and speaker.prompt("x = 1", False)
    (note,) = speaker.notes
    assert (
        "ends documents with the token 2, which is" in note
        and "there: what begins and ends a document" in note
    )
    assert speaker.ends == {load_tokenizer(speaker.tokenizer.file).eod}
