"""Corpora contain exactly the input, are the same bytes for any number of workers, and never half made."""

from __future__ import annotations

import bz2
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceModel
from tokenizers import processors

from megastable.base.errors import DataError
from megastable.data.manifest import Manifest, Stream
from megastable.data.shards import Shard, ShardWriter
from megastable.data.tokenizer import OWN, load_tokenizer
from megastable_tools.prepare import prepare
from megastable_tools.prepare.adopt import adopt_directory
from megastable_tools.prepare.command_summary import EdgeToken
from megastable_tools.prepare.prepare import prepare_shards, settle_threshold
from megastable_tools.prepare.verify import verify_corpus
from tests.data.archives import tar_bytes
from tests.data.texts import documents, hugging_face_file, sentencepiece_file


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_file(tmp_path_factory.mktemp("tokenizer"))


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(directory: Path, split: str) -> list[str]:
    """The documents of a split, read back from the shards alone."""
    manifest = Manifest.load(directory)
    tokenizer = load_tokenizer(directory / manifest.tokenizer.file, manifest.tokenizer.eod)
    texts = []
    for segment in manifest.splits.get(split, []):
        shard = Shard(directory / segment.shard)
        for document in range(shard.documents):
            first, end = shard.document_bounds(document)
            ids = shard.read(first, end - first)
            assert (ids == tokenizer.eod).nonzero()[0].tolist() == [len(ids) - 1]
            texts.append(tokenizer.decode(ids[:-1]))
    return texts


def with_bos(path: Path, name: str = "<|begin|>") -> Path:
    """A tokenizer.json whose own rules put a token before every text, as Llama 3's do."""
    content = json.loads(path.read_text())
    content["added_tokens"].append(
        {"id": 600, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
    )  # fmt: skip
    tokenizer = HuggingFaceModel.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, 600)]
    )
    tokenizer.save(str(path))
    return path


@pytest.mark.slow
def test_documents_begin_with_the_tokenizers_own_token(tmp_path: Path) -> None:
    texts = ["one", "two words", "<|begin|> is text"] * 5
    lines = write_lines(tmp_path / "a.jsonl", texts)
    (tmp_path / "tokenizer").mkdir()
    json_file = with_bos(hugging_face_file(tmp_path / "tokenizer"))
    for file, token in ((json_file, 600), (sentencepiece_file(tmp_path), None)):
        for workers in (1, 2):
            out = tmp_path / f"{file.name}-{workers}"
            prepare_shards([lines], out, file, bos=True, validation=0, workers=workers, name="mine")
            info = Manifest.load(out).tokenizer
            assert info.bos == (token if token is not None else load_tokenizer(file, bos=OWN).bos)
            shard = Shard(out / "mine-train-00000")
            tokenizer = load_tokenizer(file)
            for document, text in enumerate(texts):
                first, end = shard.document_bounds(document)
                ids = shard.read(first, end - first).tolist()
                assert ids == [info.bos, *tokenizer.encode(text), info.eod]
            verify_corpus(out)
    assert shard_bytes(tmp_path / "tokenizer.json-1") == shard_bytes(tmp_path / "tokenizer.json-2")


def test_the_tokens_that_end_and_begin_documents_are_told_and_why(tmp_path: Path, tokenizer: Path) -> None:
    text = write_lines(tmp_path / "a.jsonl", documents(9))

    def edges(**options: Any) -> tuple[EdgeToken, EdgeToken | None, list[str]]:
        made = prepare_shards(
            [text], tmp_path / "out", overwrite=True, validation=0.0, progress=False, **options
        )
        return made.eod, made.bos, made.warnings

    own, named = "the tokenizer's own end of a sentence", "named by --eod"
    assert edges(tokenizer_path=tokenizer) == (EdgeToken(2, "</s>", own), None, [])
    assert edges(tokenizer_path=tokenizer, eod="7")[0].why == named
    assert verify_corpus(tmp_path / "out").eod == EdgeToken(7, "<0x04>")
    file = with_bos(hugging_face_file(tmp_path, special=["</s>", "<|endoftext|>"]))
    eod, bos, (hint,) = edges(tokenizer_path=file)
    assert (eod, bos) == (EdgeToken(1, "<|endoftext|>", "by its usual name, before </s>"), None)
    assert (
        hint.startswith("other programs put <|begin|> before every text with this tokenizer")
        and "--bos" in hint
    )
    _, bos, warnings = edges(tokenizer_path=file, bos=True)
    assert bos is not None and bos.spelled == "<|begin|>" and "in other programs" in bos.why and not warnings


def test_without_such_a_token_it_is_said_and_manifests_are_as_before(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ["one", "two"])
    file = hugging_face_file(tmp_path)
    with pytest.raises(DataError, match=r"has no token to begin documents with.*leave --bos out"):
        prepare_shards([lines], tmp_path / "out", file, bos=True)
    content = json.loads(file.read_text())
    model = HuggingFaceModel.from_str(json.dumps(content))
    model.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    model.save(str(tmp_path / "same.json"))
    with pytest.raises(DataError, match=r"begins and ends documents with one token, 0.*leave --bos out"):
        prepare_shards([lines], tmp_path / "out", tmp_path / "same.json", bos=True)
    assert not (tmp_path / "out").exists()
    prepare_shards([lines], tmp_path / "out", file)
    assert "bos" not in json.loads((tmp_path / "out" / "manifest.json").read_text())["tokenizer"]
    manifest = Manifest.load(tmp_path / "out")
    told = manifest.model_dump(mode="json", exclude={"text_bytes", "source", "created"})
    assert set(told["tokenizer"]) == {"file", "kind", "xxh3", "vocab_size", "eod"}  # the same fingerprint


def shard_bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".bin", ".idx")}


def test_every_document_is_in_one_split_in_its_order(tmp_path: Path, tokenizer: Path) -> None:
    texts = documents(400)
    lines = write_lines(tmp_path / "a.jsonl", texts)
    made = prepare_shards([lines], tmp_path / "out", tokenizer, name="mine", validation=0.1)
    train, validation = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "validation")
    assert 15 < len(validation) < 80
    held_back = set(validation)
    assert train == [text for text in texts if text not in held_back]
    assert validation == [text for text in texts if text in held_back]
    assert made.documents == {"train": len(train), "validation": len(validation)}
    assert made.text_bytes == sum(len(text.encode()) for text in texts)
    manifest = Manifest.load(tmp_path / "out")
    assert made.tokens == {
        split: Stream(tmp_path / "out", manifest, split).tokens for split in manifest.splits
    }
    assert made.fingerprint == manifest.fingerprint()
    assert manifest.name == "mine"
    assert manifest.tokenizer == load_tokenizer(tokenizer).info
    assert {shard.name for shard in manifest.shards} == {"mine-train-00000", "mine-validation-00000"}
    verify_corpus(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("make", [sentencepiece_file, hugging_face_file])
def test_workers_do_not_change_a_byte(
    tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "BATCH", 5_000)  # some 30 batches
    lines = write_lines(tmp_path / "a.jsonl", [*documents(300), "x" * 20_000])
    made = [
        prepare_shards(
            [lines],
            tmp_path / f"out{workers}",
            make(tmp_path),
            name="n",
            workers=workers,
            shard_tokens=10_000,
        )
        for workers in (1, 2, 3)
    ]
    one, two, three = (shard_bytes(tmp_path / f"out{workers}") for workers in (1, 2, 3))
    assert len(one) == 2 * made[0].shards > 6
    assert one == two == three
    assert len({summary.fingerprint for summary in made}) == 1


def test_batches_do_not_change_a_byte(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", documents(50))
    for batch in (1, 3_000, 1 << 20):
        monkeypatch.setattr(prepare, "BATCH", batch)
        prepare_shards([lines], tmp_path / f"out{batch}", tokenizer, name="n")
    assert (
        shard_bytes(tmp_path / "out1")
        == shard_bytes(tmp_path / "out3000")
        == shard_bytes(tmp_path / "out1048576")
    )


def test_a_shard_ends_after_the_document_that_fills_it(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", documents(100))
    made = prepare_shards([lines], tmp_path / "out", tokenizer, validation=0, shard_tokens=3_000)
    manifest = Manifest.load(tmp_path / "out")
    assert made.documents == {"train": 100}
    assert [shard.name for shard in manifest.shards] == [f"out-train-{n:05d}" for n in range(made.shards)]
    assert made.shards > 4
    for info in manifest.shards[:-1]:
        last, end = Shard(tmp_path / "out" / info.name).document_bounds(info.documents - 1)
        assert last < 3_000 <= end == info.tokens
    assert texts_of(tmp_path / "out", "train") == documents(100)


def test_duplicates_never_straddle_the_split(tmp_path: Path, tokenizer: Path) -> None:
    texts = documents(100)
    lines = write_lines(tmp_path / "a.jsonl", texts * 3)
    prepare_shards([lines], tmp_path / "out", tokenizer, validation=0.2)
    train, validation = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "validation")
    assert len(validation) >= 3
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(texts * 3)


@pytest.mark.slow
def test_a_validation_set_of_ones_own(tmp_path: Path, tokenizer: Path) -> None:
    texts = documents(12)
    (tmp_path / "held").mkdir()
    write_lines(tmp_path / "held" / "b.jsonl", texts[:3])
    train = write_lines(tmp_path / "a.jsonl", [texts[1], *texts[3:], texts[2]])
    given = {"validation_inputs": [tmp_path / "held"], "progress": False, "overwrite": True}
    for workers in (1, 2):
        made = prepare_shards([train], tmp_path / "out", tokenizer, workers=workers, **given)
        assert texts_of(tmp_path / "out", "validation") == texts[:3]
        assert texts_of(tmp_path / "out", "train") == texts[3:]
        # What is in both would make the validation loss too low.
        assert made.left_out == {"training documents with the text of a validation document": 2}
        assert made.text_bytes == sum(len(text.encode()) for text in texts)
        assert made.warnings == []
    with pytest.raises(DataError, match="one of --validation and --validation-input"):
        prepare_shards([train], tmp_path / "out", tokenizer, validation=0.1, **given)
    with pytest.raises(DataError, match="nothing is left for the train split"):
        prepare_shards([tmp_path / "held" / "b.jsonl"], tmp_path / "out", tokenizer, **given)
    assert texts_of(tmp_path / "out", "train") == texts[3:]


def test_how_the_files_of_both_inputs_were_read_is_told(tmp_path: Path, tokenizer: Path) -> None:
    texts = documents(8)
    for name in ("train", "held"):
        (tmp_path / name).mkdir()
    for number in range(2):
        write_lines(tmp_path / "train" / f"{number}.jsonl", texts[number : number + 1])
    held = [write_lines(tmp_path / "held" / "part-00000", texts[2:4])]
    held += [
        write_lines(tmp_path / "held" / f"{number}.jsonl", texts[number : number + 1]) for number in (4, 5)
    ]
    made = prepare_shards(
        [tmp_path / "train"], tmp_path / "out", tokenizer, validation_inputs=held, progress=False
    )
    assert made.read == {"files of JSON lines": 4, "files of JSON lines, told by their content": 1}
    assert made.read_files == {
        # The rest of a kind is a count, which is that of both inputs.
        "files of JSON lines": [f"{tmp_path}/train/0.jsonl and 3 more"],
        "files of JSON lines, told by their content": [f"{tmp_path}/held/part-00000"],
    }


def test_the_split_depends_on_text_and_seed_alone(tmp_path: Path, tokenizer: Path) -> None:
    texts = documents(200)
    held_back = {}
    for name, part, seed in (
        ("all", texts, 0),
        ("reversed", texts[::-1], 0),
        ("half", texts[:100], 0),
        ("other", texts, 1),
    ):
        lines = write_lines(tmp_path / f"{name}.jsonl", part)
        prepare_shards([lines], tmp_path / name, tokenizer, validation=0.2, seed=seed)
        held_back[name] = set(texts_of(tmp_path / name, "validation"))
    assert held_back["all"] == held_back["reversed"]
    assert held_back["half"] == held_back["all"] & set(texts[:100])
    assert held_back["all"] != held_back["other"]


@pytest.mark.parametrize("validation", [1e-12, 0.01, 0.999999999999])
@pytest.mark.parametrize("count", [2, 3])
def test_tiny_corpora_have_both_splits(
    tmp_path: Path, tokenizer: Path, validation: float, count: int
) -> None:
    texts = documents(count)
    lines = write_lines(tmp_path / "a.jsonl", texts)
    made = prepare_shards([lines], tmp_path / "out", tokenizer, validation=validation)
    train, held_back = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "validation")
    assert sorted(train + held_back) == sorted(texts)
    assert min(len(train), len(held_back)) == 1
    assert not any("no validation split" in warning for warning in made.warnings)
    assert len(shard_bytes(tmp_path / "out")) == 4
    verify_corpus(tmp_path / "out")


def test_a_validation_split_much_larger_than_asked_is_said(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ["one text " * 50, "another text " * 50])
    made = prepare_shards([lines], tmp_path / "out", tokenizer, validation=0.01)
    assert any("of the tokens, 1% of the documents were asked for" in warning for warning in made.warnings)


@pytest.mark.parametrize("validation", [1e-12, 0.999999999999])
def test_one_text_is_for_training_and_that_is_said(
    tmp_path: Path, tokenizer: Path, validation: float
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ["the same"] * 3)
    made = prepare_shards([lines], tmp_path / "out", tokenizer, validation=validation)
    assert made.documents == {"train": 3}
    assert ["no validation split" in warning for warning in made.warnings] == [True]
    assert "warning: no validation split" in str(made)


hashes = st.integers(0, 2**64 - 1)


@given(wanted=st.integers(1, 2**64), ends=st.tuples(hashes, hashes))
def test_a_settled_threshold_leaves_both_splits_a_document(wanted: int, ends: tuple[int, int]) -> None:
    lowest, highest = sorted(ends)
    settled = settle_threshold(wanted, lowest, highest)
    assert settled <= highest  # there is something to train on
    assert lowest < settled or lowest == highest
    assert settle_threshold(settled, lowest, highest) == settled
    if lowest < wanted <= highest:
        assert settled == wanted
    assert settle_threshold(0, lowest, highest) == 0


@pytest.mark.parametrize("make", [sentencepiece_file, hugging_face_file])
def test_no_text_forges_the_end_of_a_document(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    texts = [f"a{name}b{name}" for name in ("</s>", "<s>", "<unk>", "<|endoftext|>")]
    prepare_shards(
        [write_lines(tmp_path / "a.jsonl", texts)], tmp_path / "out", make(tmp_path), validation=0.0
    )
    assert texts_of(tmp_path / "out", "train") == texts  # which looks for ends inside, too


@pytest.mark.slow
def test_a_large_vocabulary_takes_four_bytes(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A tokenizer.json whose only use of its vocabulary is the last word: 70,000 words.
    words = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    added = [
        {"id": 70_000, "content": "</s>", "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ]
    file = tmp_path / "tokenizer.json"
    file.write_text(
        json.dumps(
            {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "Whitespace"}, "model": model}
            | dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
        )
    )
    (tmp_path / "a.txt").write_text("w69999 w1")
    prepare_shards([tmp_path / "a.txt"], tmp_path / "out", file, name="n")
    assert Manifest.load(tmp_path / "out").dtype == "int32"
    raw = (tmp_path / "out" / "n-train-00000.bin").read_bytes()
    assert np.frombuffer(raw, "<i4").tolist() == [69_999, 1, 70_000]
    verify_corpus(tmp_path / "out")


def test_left_out_documents_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", ["one", "", "two"])
    (folder / "b.jsonl").write_text("{\n")
    (folder / "c.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"b\.jsonl:1"):
        prepare_shards([folder], tmp_path / "out", tokenizer)
    assert sorted(os.listdir(tmp_path)) == ["in"]
    made = prepare_shards([folder], tmp_path / "out", tokenizer, skip_bad=True)
    assert sum(made.documents.values()) == 2
    assert made.left_out == {"empty documents": 1, "bad documents": 1, "binary files": 1}


def test_a_folder_of_every_kind_in_its_order_again_and_after_a_damaged_file(
    tmp_path: Path, tokenizer: Path
) -> None:
    folder, texts = tmp_path / "in", documents(12)
    folder.mkdir()
    members = [("z.txt", texts[2].encode()), ("a.jsonl", json.dumps({"text": texts[3]}).encode())]
    table = pa.table({"text": texts[8:10]})
    (folder / "a.csv").write_text(
        "".join(f'"{text}"\n' for text in ("text", *(t.replace('"', '""') for t in texts[:2])))
    )
    (folder / "b.tar.bz2").write_bytes(bz2.compress(tar_bytes(members)))
    write_lines(folder / "c.jsonl", texts[4:6])
    (folder / "d").mkdir()
    pq.write_table(pa.table({"text": texts[6:8]}), folder / "d" / "1.parquet")
    with pa.ipc.new_file(str(folder / "d" / "2.arrow"), table.schema) as writer:
        writer.write_table(table)
    (folder / "e.txt.xz").write_bytes(whole := lzma.compress(texts[10].encode()))
    (folder / "f").write_text(texts[11])
    (folder / "README.md").write_text("about it")
    made = [
        prepare_shards([folder], tmp_path / name, tokenizer, name="n", validation=0)
        for name in ("one", "two")
    ]
    assert texts_of(tmp_path / "one", "train") == texts
    assert made[0].left_out_files == {"files about the data": [str(folder / "README.md")]}
    assert shard_bytes(tmp_path / "one") == shard_bytes(tmp_path / "two")

    (folder / "e.txt.xz").write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"e\.txt\.xz ends too early"):
        prepare_shards([folder], tmp_path / "one", tokenizer, name="n", validation=0, overwrite=True)
    assert shard_bytes(tmp_path / "one") == shard_bytes(tmp_path / "two")
    assert sorted(os.listdir(tmp_path)) == ["in", "one", "two"]
    (folder / "e.txt.xz").write_bytes(whole)
    prepare_shards([folder], tmp_path / "one", tokenizer, name="n", validation=0, overwrite=True)
    assert shard_bytes(tmp_path / "one") == shard_bytes(tmp_path / "two")


def test_an_input_that_can_be_read_once_is_refused_where_it_is_needed_twice(
    tmp_path: Path, tokenizer: Path
) -> None:
    read, write = os.pipe()
    os.write(write, b"one document")
    os.close(write)
    (tmp_path / "a.txt").write_text("another")
    inputs = [tmp_path / "a.txt", Path(f"/dev/fd/{read}")]
    with pytest.raises(DataError, match="or is a pipe"):
        prepare_shards(inputs, tmp_path / "out", tokenizer, validation=1e-12)
    os.close(read)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_empty_corpus_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    with pytest.raises(DataError, match=r"corpus is empty: no text in 0 files"):
        prepare_shards([folder], tmp_path / "out", tokenizer)
    (folder / "a.bin").write_bytes(b"\0")
    (folder / "a.txt").write_bytes(b"")
    with pytest.raises(
        DataError,
        match=r"in 2 files .*; left out: 1 binary file \(.*a\.bin\); 1 empty file \(.*a\.txt\)",
    ):
        prepare_shards([folder], tmp_path / "out", tokenizer)
    for number in range(2, 10):
        (folder / f"{number}.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"9 binary files \(.*2\.bin, .*4\.bin, and 6 more\); 1 empty file"):
        prepare_shards([folder], tmp_path / "out", tokenizer)
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_what_exists_is_replaced_only_if_told_and_only_if_it_is_a_corpus(
    tmp_path: Path, tokenizer: Path
) -> None:
    output, lines = tmp_path / "out", write_lines(tmp_path / "a.jsonl", documents(5))

    def make(file: Path = tokenizer, overwrite: bool = False) -> dict[str, bytes]:
        prepare_shards([lines], output, file, overwrite=overwrite)
        verify_corpus(output)
        return shard_bytes(output)

    first = make()
    with pytest.raises(DataError, match="--overwrite"):
        make()
    write_lines(lines, documents(9))
    second = make(overwrite=True)
    assert first.keys() == second.keys()
    assert first != second
    # Another tokenizer, under the same name and with the same output: nothing of the old one is reused.
    third = make(sentencepiece_file(tmp_path, 500), overwrite=True)
    assert third != second
    assert texts_of(output, "train") + texts_of(output, "validation") != []
    (output / "precious.txt").write_text("")
    with pytest.raises(DataError, match=r"will not be replaced: precious\.txt"):
        make(overwrite=True)
    (output / "precious.txt").unlink()
    (output / "manifest.json").unlink()
    with pytest.raises(DataError, match="is not a prepared corpus"):
        make(overwrite=True)
    assert shard_bytes(output) == third


def test_a_failure_leaves_the_old_corpus_and_nothing_else(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", documents(5))
    prepare_shards([lines], tmp_path / "out", tokenizer)
    before = shard_bytes(tmp_path / "out")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        prepare_shards([lines], tmp_path / "out", tokenizer, overwrite=True)
    assert shard_bytes(tmp_path / "out") == before
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "out"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": 1.0}, "at least 0, below 1"),
        ({"validation": -0.1}, "at least 0, below 1"),
        ({"validation": float("nan")}, "at least 0, below 1"),
        ({"workers": 0}, "1 at least"),
        ({"shard_tokens": 0}, "1 at least"),
        ({"name": "a/b"}, "leave out the /"),
        ({"eod": "<stop>"}, "no token '<stop>'"),
    ],
)
def test_bad_options_are_refused(
    tmp_path: Path, tokenizer: Path, options: dict[str, object], message: str
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ["text"])
    with pytest.raises(DataError, match=message):
        prepare_shards([lines], tmp_path / "out", tokenizer, **options)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_an_output_inside_of_the_input_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="inside of the input"):
        prepare_shards([tmp_path], tmp_path / "deep" / "out", tokenizer)


def test_shards_of_another_program_are_adopted(tmp_path: Path, tokenizer: Path) -> None:
    model = load_tokenizer(tokenizer)
    texts = documents(40)
    for number, part in enumerate((texts[:30], texts[30:])):
        with ShardWriter(tmp_path / f"foreign_{number}", model.vocab_size) as writer:
            for text in part:
                writer.add_document(np.array([*model.encode(text), model.eod]))
    made = adopt_directory(tmp_path, tokenizer, validation=0.2)
    assert made.documents["train"] + made.documents["validation"] == 40
    assert verify_corpus(tmp_path).fingerprint == made.fingerprint
    with pytest.raises(DataError, match="--overwrite"):
        adopt_directory(tmp_path, tokenizer)
    assert adopt_directory(tmp_path, tokenizer, overwrite=True).documents == {"train": 40}


def test_shards_beyond_the_vocabulary_are_not_adopted(tmp_path: Path, tokenizer: Path) -> None:
    with ShardWriter(tmp_path / "foreign", 5_000) as writer:
        writer.add_document(np.array([1, 4_999]))
    with pytest.raises(DataError, match="4999"):
        adopt_directory(tmp_path, tokenizer)
    assert sorted(os.listdir(tmp_path)) == ["foreign.bin", "foreign.idx"]
