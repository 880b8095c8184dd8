"""Token ids of other programs become corpora with the same tokens, or are refused by name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megastable.base.errors import DataError
from megastable.config.tree import CorpusConfig
from megastable.data.corpora import open_corpora
from megastable.data.manifest import Manifest, Stream
from megastable.data.shards import Shard, ShardWriter
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.prepare import token_files
from megastable_tools.prepare.adopt import adopt_directory, verify_corpus
from megastable_tools.prepare.prepare import prepare_shards
from tests.data.texts import documents, sentencepiece_file

Documents = list[list[int]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_file(tmp_path_factory.mktemp("tokenizer"))


def encoded(tokenizer: Path, count: int, end: bool = True) -> Documents:
    model = load_tokenizer(tokenizer)
    return [model.encode(text) + [model.eod] * end for text in documents(count)]


def read_back(output: Path) -> Documents:
    manifest = Manifest.load_manifest(output)
    found = []
    for info in manifest.shards:
        shard = Shard(output / info.name, info)
        for document in range(shard.documents):
            first, end = shard.document_bounds(document)
            found.append(shard.read_tokens(first, end - first).tolist())
    return found


def shard_bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix in (".bin", ".idx")}


def write_datatrove(path: Path, found: Documents, letter: str = "H", metadata: bool = True) -> None:
    """As its TokenizedFile does."""
    tokens = [token for document in found for token in document]
    path.write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    ends = np.cumsum([len(document) for document in found]).tolist()
    path.with_name(path.name + ".index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if metadata:
        size = {"H": 2, "I": 4}[letter]
        path.with_name(path.name + ".metadata").write_text(f"some/tokenizer|{size}\n{len(tokens)}\n1.2 kT")


def write_llm_c(
    path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, letter: str = "H"
) -> None:
    """As its write_datafile does."""
    header = struct.pack("<256i", magic, version, len(tokens), *[0] * 253)
    path.write_bytes(header + struct.pack(f"<{len(tokens)}{letter}", *tokens))


@pytest.mark.parametrize(("letter", "metadata"), [("H", True), ("I", True), ("I", False), ("H", False)])
def test_adopt_takes_datatrove_shards(tmp_path: Path, tokenizer: Path, letter: str, metadata: bool) -> None:
    found = encoded(tokenizer, 60)
    (tmp_path / "in").mkdir()
    write_datatrove(tmp_path / "in" / "00001_shuffled.ds", found[40:], letter, metadata)
    write_datatrove(tmp_path / "in" / "00000_shuffled.ds", found[:40], letter, metadata)
    if metadata:
        write_datatrove(
            tmp_path / "in" / "00002_shuffled.ds", [], letter
        )  # of a process that got no documents
    made = adopt_directory(tmp_path / "in", tokenizer, validation=0.2, output=tmp_path / "out")
    assert read_back(tmp_path / "out") == found
    assert sum(made.documents.values()) == 60 and made.documents["validation"] > 5
    assert [made.name, made.shards, made.warnings] == ["out", 2 + metadata, []]
    assert verify_corpus(tmp_path / "out").fingerprint == made.fingerprint

    before = shard_bytes(tmp_path / "out")
    with pytest.raises(DataError, match="--overwrite"):
        adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "out")
    again = adopt_directory(
        tmp_path / "in", tokenizer, validation=0.2, output=tmp_path / "out", overwrite=True
    )
    assert again.fingerprint == made.fingerprint
    assert shard_bytes(tmp_path / "out") == before and len(before) == 2 * made.shards


def test_adopt_says_what_datatrove_files_lack(tmp_path: Path, tokenizer: Path) -> None:
    path = tmp_path / "in" / "a.ds"
    path.parent.mkdir()
    write_datatrove(path, [*encoded(tokenizer, 3, end=False), [], *encoded(tokenizer, 2)])
    (tmp_path / "in" / "a.ds.loss").write_bytes(b"\1")
    made = adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "out")
    assert made.left_out == {"empty documents": 1}
    assert [warning.split(":")[0] for warning in made.warnings] == [
        "the loss masks of a.ds.loss are not used",
        "3 of 5 documents do not end with the end-of-document token (2)",
    ]

    whole, index = path.read_bytes(), (tmp_path / "in" / "a.ds.index").read_bytes()
    for content, ends, message in (
        (whole[:-2], index, r"a\.ds has .* bytes, but a\.ds\.index tells of .*: one is truncated"),
        (whole, index[:-8], r"one is truncated or of another file"),
        (whole, struct.pack("<Q", 1 << 40) + index[8:], r"a\.ds\.index is not the index of"),
    ):
        path.write_bytes(content)
        (tmp_path / "in" / "a.ds.index").write_bytes(ends)
        with pytest.raises(DataError, match=message):
            adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_adopt_takes_llm_c_files(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(token_files, "CHUNK", chunk)
    eod = load_tokenizer(tokenizer).eod
    tokens = [token for document in encoded(tokenizer, 4, end=False) for token in (eod, *document)]
    (tmp_path / "in").mkdir()
    cut = len(tokens) // 2  # in the middle of a document, as llm.c cuts
    write_llm_c(tmp_path / "in" / "web_train_000001.bin", tokens[:cut])
    write_llm_c(tmp_path / "in" / "web_train_000002.bin", tokens[cut:], 20240801, 7, "I")
    made = adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "out")
    manifest = Manifest.load_manifest(tmp_path / "out")
    stream = Stream(tmp_path / "out", manifest, "train")
    assert stream.read_tokens(0, stream.tokens).tolist() == tokens
    found = read_back(tmp_path / "out")
    assert found[0][0] == found[0][-1] == eod  # the token before the first document stays with it
    assert len(found) == 5 and made.documents == {"train": 5}  # one is cut by the files
    assert made.warnings == []
    verify_corpus(tmp_path / "out")


def test_adopt_refuses_by_name(tmp_path: Path, tokenizer: Path) -> None:
    folder, output = tmp_path / "in", tmp_path / "out"
    folder.mkdir()

    def refused(message: str, output: Path | None = output) -> None:
        with pytest.raises(DataError, match=message):
            adopt_directory(folder, tokenizer, output=output)
        assert os.listdir(tmp_path) == ["in"]

    refused("in contains no .idx file", None)
    path = folder / "a.bin"
    write_llm_c(path, [1, 2, 3])
    refused(r"in holds a\.bin, which is no Megatron shard: .*--output", None)
    path.write_bytes(path.read_bytes()[:-2])
    refused(r"a\.bin has version 1 and 1028 bytes, .*asks for version 1 and 1030: it is truncated")
    write_llm_c(path, [1, 2, 3], version=2)
    refused(r"a\.bin has version 2")
    write_llm_c(path, [1, 2, 3], magic=20240522)
    refused(r"a\.bin holds llm.c's multiple-choice questions")
    write_llm_c(path, [1, 60_000])
    refused(r"a contains the token id 60000")
    path.unlink()
    path.symlink_to("gone")
    refused(r"a\.bin cannot be read: No such file")
    path.unlink()
    write_llm_c(path, [1, 2])
    write_datatrove(folder / "a.ds", [[1, 2]])
    refused("two files have one name but for the ending")
    with ShardWriter(folder / "b", 600) as writer:
        writer.add_document(np.array([1, 2]))
    refused(r"in holds Megatron shards and a\.bin, which has no \.idx")
    path.unlink()
    for name in ("a.ds", "a.ds.index", "a.ds.metadata"):
        (folder / name).unlink()
    refused("adopted in place: leave --output out")


def test_adopt_finds_the_token_that_begins_documents(tmp_path: Path, tokenizer: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(40)))
    prepare_shards([text], tmp_path / "made", tokenizer, bos=True, progress=False)
    (tmp_path / "in").mkdir()
    found = read_back(tmp_path / "made")
    write_datatrove(tmp_path / "in" / "a.ds", found)
    made = adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "out")
    assert made.bos is not None and made.bos.why == "as every document here" and made.warnings == []
    write_datatrove(tmp_path / "in" / "a.ds", [*found, encoded(tokenizer, 1)[0]])
    made = adopt_directory(tmp_path / "in", tokenizer, bos=True, output=tmp_path / "out", overwrite=True)
    assert len(made.warnings) == 1
    assert made.warnings[0].startswith("1 of 41 documents do not begin with token 1")
    both = [CorpusConfig(path=tmp_path / name) for name in ("made", "out")]
    assert len(open_corpora(both, 16, 0).manifests) == 2


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(30)))
    prepare_shards([lines], tmp_path / "out", sentencepiece_file(tmp_path), name="n", validation=0.2)
    return tmp_path / "out"


FILES = [
    "n-train-00000.bin",
    "n-train-00000.idx",
    "n-validation-00000.bin",
    "n-validation-00000.idx",
    "tokenizer.model",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_verify_corpus_finds_every_damage(corpus: Path, name: str, damage: str) -> None:
    path = corpus / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[-1 if name.endswith(".bin") else len(content) // 2] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-2])
    with pytest.raises(DataError, match=name.split(".")[0]):
        verify_corpus(corpus)
