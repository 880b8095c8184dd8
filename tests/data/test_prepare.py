"""Corpora contain exactly the input, are the same bytes for any number of workers, and never half made."""

from __future__ import annotations

import bz2
import json
import lzma
import operator
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceModel
from tokenizers import processors

from megastable.base.errors import DataError, MegastableError
from megastable.data.manifest import Manifest, Stream
from megastable.data.samples import token_counts, unigram_entropy
from megastable.data.shards import Shard
from megastable.data.tokenizer import OWN, load_tokenizer
from megastable_tools.prepare import prepare
from megastable_tools.prepare.adopt import verify_corpus
from megastable_tools.prepare.prepare import ordered_map, prepare_shards, settle_threshold
from megastable_tools.prepare.stdlib import prepare_stdlib
from tests.data.texts import documents, hugging_face_file, sentencepiece_file, tar_bytes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_file(tmp_path_factory.mktemp("tokenizer"))


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(directory: Path, split: str) -> list[str]:
    """The documents of a split, read back from the shards alone."""
    manifest = Manifest.load_manifest(directory)
    tokenizer = load_tokenizer(directory / manifest.tokenizer.file, manifest.tokenizer.eod)
    texts = []
    for segment in manifest.splits.get(split, []):
        shard = Shard(directory / segment.shard)
        for document in range(shard.documents):
            first, end = shard.document_bounds(document)
            ids = shard.read_tokens(first, end - first)
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
def test_prepare_shards_begins_documents_with_the_own_token(tmp_path: Path) -> None:
    texts = ["one", "two words", "<|begin|> is text"] * 5
    lines = write_lines(tmp_path / "a.jsonl", texts)
    (tmp_path / "tokenizer").mkdir()
    json_file = with_bos(hugging_face_file(tmp_path / "tokenizer"))
    for file, token in ((json_file, 600), (sentencepiece_file(tmp_path), None)):
        for workers in (1, 2):
            out = tmp_path / f"{file.name}-{workers}"
            prepare_shards([lines], out, file, bos=True, validation=0, workers=workers, name="mine")
            info = Manifest.load_manifest(out).tokenizer
            assert info.bos == (token if token is not None else load_tokenizer(file, bos=OWN).bos)
            shard = Shard(out / "mine-train-00000")
            tokenizer = load_tokenizer(file)
            for document, text in enumerate(texts):
                first, end = shard.document_bounds(document)
                ids = shard.read_tokens(first, end - first).tolist()
                assert ids == [info.bos, *tokenizer.encode(text), info.eod]
            verify_corpus(out)
    assert shard_bytes(tmp_path / "tokenizer.json-1") == shard_bytes(tmp_path / "tokenizer.json-2")


def shard_bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".bin", ".idx")}


def test_prepare_shards_puts_every_document_in_one_split(tmp_path: Path, tokenizer: Path) -> None:
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
    manifest = Manifest.load_manifest(tmp_path / "out")
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
def test_prepare_shards_with_any_workers_gives_the_same_bytes(
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


def test_prepare_shards_ends_a_shard_after_a_document(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", documents(100))
    made = prepare_shards([lines], tmp_path / "out", tokenizer, validation=0, shard_tokens=3_000)
    manifest = Manifest.load_manifest(tmp_path / "out")
    assert made.documents == {"train": 100}
    assert [shard.name for shard in manifest.shards] == [f"out-train-{n:05d}" for n in range(made.shards)]
    assert made.shards > 4
    for info in manifest.shards[:-1]:
        last, end = Shard(tmp_path / "out" / info.name).document_bounds(info.documents - 1)
        assert last < 3_000 <= end == info.tokens
    assert texts_of(tmp_path / "out", "train") == documents(100)


@pytest.mark.slow
def test_prepare_shards_takes_a_validation_set(tmp_path: Path, tokenizer: Path) -> None:
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


def test_prepare_shards_splits_by_text_and_seed_alone(tmp_path: Path, tokenizer: Path) -> None:
    texts, held_back = documents(200), {}
    for name, part, seed in (
        ("all", texts, 0),
        ("half", [*texts[:100][::-1], texts[0]], 0),
        ("other", texts, 1),
    ):
        lines = write_lines(tmp_path / f"{name}.jsonl", part)
        prepare_shards([lines], tmp_path / name, tokenizer, validation=0.2, seed=seed)
        held_back[name] = set(texts_of(tmp_path / name, "validation"))
        assert not held_back[name] & set(texts_of(tmp_path / name, "train"))
    assert held_back["half"] == held_back["all"] & set(texts[:100])
    assert held_back["all"] != held_back["other"]


hashes = st.integers(0, 2**64 - 1)


@given(wanted=st.integers(1, 2**64), ends=st.tuples(hashes, hashes))
def test_settle_threshold_leaves_both_splits_a_document(wanted: int, ends: tuple[int, int]) -> None:
    lowest, highest = sorted(ends)
    settled = settle_threshold(wanted, lowest, highest)
    assert settled <= highest  # there is something to train on
    assert lowest < settled or lowest == highest
    assert settle_threshold(settled, lowest, highest) == settled
    if lowest < wanted <= highest:
        assert settled == wanted
    assert settle_threshold(0, lowest, highest) == 0


def test_prepare_shards_reads_every_kind_or_refuses_damage(tmp_path: Path, tokenizer: Path) -> None:
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


def test_prepare_shards_replaces_only_a_corpus_and_if_told(tmp_path: Path, tokenizer: Path) -> None:
    output, lines = tmp_path / "out", write_lines(tmp_path / "a.jsonl", documents(5))

    def make(overwrite: bool = False) -> dict[str, bytes]:
        prepare_shards([lines], output, tokenizer, overwrite=overwrite)
        verify_corpus(output)
        return shard_bytes(output)

    first = make()
    with pytest.raises(DataError, match="--overwrite"):
        make()
    write_lines(lines, documents(9))
    second = make(overwrite=True)
    assert first.keys() == second.keys()
    assert first != second
    (output / "precious.txt").write_text("")
    with pytest.raises(DataError, match=r"will not be replaced: precious\.txt"):
        make(overwrite=True)
    assert shard_bytes(output) == second


def test_prepare_shards_leaves_the_old_corpus_after_a_failure(
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
def test_prepare_shards_refuses_bad_options(
    tmp_path: Path, tokenizer: Path, options: dict[str, object], message: str
) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ["text"])
    with pytest.raises(DataError, match=message):
        prepare_shards([lines], tmp_path / "out", tokenizer, **options)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_ordered_map_waits_for_its_consumer() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1, 1001):
            taken.append(number)
            yield number

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with closing(ordered_map(operator.neg, items(), 2)) as results:
        assert [next(results), next(results)] == [-1, -2]
        assert len(taken) <= 2 + 3 * 2
        workers = [child for child in psutil.Process().children() if child.pid not in before]
        assert len([child for child in workers if "spawn_main" in " ".join(child.cmdline())]) == 2
    assert not [child for child in workers if "spawn_main" in _command(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def test_ordered_map_tells_of_a_killed_worker() -> None:
    with pytest.raises(MegastableError, match="fewer --workers"):
        list(ordered_map(os._exit, [9, 9], 2))


@pytest.mark.slow
def test_prepare_stdlib_makes_a_corpus_once(tmp_path: Path) -> None:
    output = tmp_path / "stdlib"
    made = prepare_stdlib(output, vocab_size=1024)
    assert made.action == "prepared"
    assert made.tokens["train"] > 2_000_000
    assert 0.01 < made.tokens["validation"] / made.tokens["train"] < 0.1
    manifest = Manifest.load_manifest(output)
    tokenizer = load_tokenizer(output / manifest.tokenizer.file)
    stream = Stream(output, manifest, "validation")
    assert "def " in tokenizer.decode(stream.read_tokens(0, 5_000))
    assert 3 < unigram_entropy(token_counts(stream, tokenizer.vocab_size)) < 6.9  # below ln 1024

    times = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    reused = prepare_stdlib(output, vocab_size=1024)
    assert (reused.action, reused.tokens) == ("reused", made.tokens)
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == times

    with pytest.raises(DataError, match="a vocabulary of 1024, not 'stdlib' with 2048"):
        prepare_stdlib(output, vocab_size=2048)
    shard = output / f"{manifest.shards[0].name}.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match="restore it or prepare the corpus again"):
        prepare_stdlib(output, vocab_size=1024)
