"""Token ids of other programs become corpora with the same tokens, or are refused by name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from megastable.base.errors import DataError
from megastable.config.tree import CorpusConfig
from megastable.data.corpora import open_corpora
from megastable.data.manifest import Manifest, Stream
from megastable.data.shards import Shard, ShardWriter
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.prepare import token_files
from megastable_tools.prepare.adopt import adopt_directory
from megastable_tools.prepare.command_summary import EdgeToken, Summary
from megastable_tools.prepare.prepare import prepare_shards
from megastable_tools.prepare.verify import verify_corpus
from tests.data.texts import documents, sentencepiece_file

Documents = list[list[int]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_file(tmp_path_factory.mktemp("tokenizer"))


def encoded(tokenizer: Path, count: int, end: bool = True) -> Documents:
    model = load_tokenizer(tokenizer)
    return [model.encode(text) + [model.eod] * end for text in documents(count)]


def read_back(output: Path) -> Documents:
    manifest = Manifest.load(output)
    found = []
    for info in manifest.shards:
        shard = Shard(output / info.name, info)
        for document in range(shard.documents):
            first, end = shard.document_bounds(document)
            found.append(shard.read(first, end - first).tolist())
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
def test_datatrove(tmp_path: Path, tokenizer: Path, letter: str, metadata: bool) -> None:
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


def test_what_datatrove_files_lack_is_said(tmp_path: Path, tokenizer: Path) -> None:
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
        (whole, index[:-1], r"one is truncated or of another file"),
        (whole, b"", r"one is truncated or of another file"),
        (whole, struct.pack("<Q", 1 << 40) + index[8:], r"a\.ds\.index is not the index of"),
        (whole, index[8:16] + index[:8] + index[16:], r"a\.ds\.index is not the index of"),
    ):
        path.write_bytes(content)
        (tmp_path / "in" / "a.ds.index").write_bytes(ends)
        with pytest.raises(DataError, match=message):
            adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "new")
    # Half of the tokens would be all of them if ids had twice the bytes.
    write_datatrove(path, [[1, 2], [3, 4]])
    (tmp_path / "in" / "a.ds.index").write_bytes(struct.pack("<Q", 2))
    with pytest.raises(DataError, match=r"a\.ds has 8 bytes, but a\.ds\.index tells of 2 tokens of 2 bytes"):
        adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "new")
    (tmp_path / "in" / "a.ds.index").unlink()
    with pytest.raises(DataError, match=r"a\.ds has no a\.ds\.index beside it"):
        adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_llm_c(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(token_files, "CHUNK", chunk)
    eod = load_tokenizer(tokenizer).eod
    tokens = [token for document in encoded(tokenizer, 4, end=False) for token in (eod, *document)]
    (tmp_path / "in").mkdir()
    cut = len(tokens) // 2  # in the middle of a document, as llm.c cuts
    write_llm_c(tmp_path / "in" / "web_train_000001.bin", tokens[:cut])
    write_llm_c(tmp_path / "in" / "web_train_000002.bin", tokens[cut:], 20240801, 7, "I")
    made = adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "out")
    manifest = Manifest.load(tmp_path / "out")
    stream = Stream(tmp_path / "out", manifest, "train")
    assert stream.read(0, stream.tokens).tolist() == tokens
    found = read_back(tmp_path / "out")
    assert found[0][0] == found[0][-1] == eod  # the token before the first document stays with it
    assert len(found) == 5 and made.documents == {"train": 5}  # one is cut by the files
    assert made.warnings == []
    verify_corpus(tmp_path / "out")


def test_llm_c_without_end_of_document(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in").mkdir()
    write_llm_c(tmp_path / "in" / "a.bin", [5, 6, 7])
    made = adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "out")
    assert made.documents == {"train": 1}
    assert ["1 of 1 documents do not end" in warning for warning in made.warnings] == [True]


def test_files_of_another_end_of_document_token_are_refused(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llm.c's of Llama 3: begin of text before each document, and nothing behind it."""
    monkeypatch.setattr(token_files, "CHUNK", 8)
    monkeypatch.setattr(token_files, "LONGEST_WITHOUT_END", 64)
    begin = 1
    found = [[begin, *document] for document in encoded(tokenizer, 8, end=False)]
    tokens = [token for document in found for token in document]
    assert len(tokens) > 64
    (tmp_path / "in").mkdir()
    write_llm_c(tmp_path / "in" / "a.bin", tokens, 20240801, 7, "I")
    with pytest.raises(
        DataError,
        match=r"a\.bin has no end-of-document token \(2\) among its first 72: .*--eod .*begins with token 1;",
    ):
        adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]
    made = adopt_directory(tmp_path / "in", tokenizer, eod=str(begin), output=tmp_path / "out")
    assert made.documents == {"train": 8} and made.warnings == []
    assert [token for document in read_back(tmp_path / "out") for token in document] == tokens


def test_ids_without_a_header_are_refused_unless_their_type_is_said(tmp_path: Path, tokenizer: Path) -> None:
    found = encoded(tokenizer, 10)
    tokens = [token for document in found for token in document]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "train.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    with pytest.raises(DataError, match=r"train\.bin is of an unknown format.*nanoGPT.*--raw uint16"):
        adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "out")
    made = adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "out", raw="uint16")
    assert read_back(tmp_path / "out") == found
    assert made.warnings == []
    (tmp_path / "in" / "train.bin").write_bytes(b"\1\0\1")
    with pytest.raises(DataError, match=r"train\.bin has 3 bytes, not a multiple of 2"):
        adopt_directory(tmp_path / "in", tokenizer, output=tmp_path / "new", raw="uint16")


def test_what_cannot_be_adopted_is_refused_by_name(tmp_path: Path, tokenizer: Path) -> None:
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


def test_megatron_shards_are_read_once(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ShardWriter(tmp_path / "a", 600) as writer:
        for document in encoded(tokenizer, 30):
            writer.add_document(np.array(document))
    read = []
    raw = Shard.raw

    def counted(shard: Shard, first: int, count: int) -> npt.NDArray[np.integer]:
        read.append(count)
        return raw(shard, first, count)

    monkeypatch.setattr(Shard, "raw", counted)
    made = adopt_directory(tmp_path, tokenizer)
    assert sum(read) == sum(made.tokens.values()) > 1000


@pytest.mark.parametrize("chunk", [3, 1 << 20])
def test_megatron_shards_without_end_of_document_are_adopted_with_a_warning(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    from megastable.data import shard_format

    monkeypatch.setattr(shard_format, "CHUNK", chunk)
    eod = load_tokenizer(tokenizer).eod
    with ShardWriter(tmp_path / "a", 600) as writer:
        for number in range(20):
            # Nor does one count that is somewhere in the document, or at its beginning.
            writer.add_document(np.array([eod, 7, eod, 8, *([eod] if number % 4 else [])]))
    with ShardWriter(tmp_path / "b", 600) as writer:
        writer.add_document(np.array([5, eod]))
    made = adopt_directory(tmp_path, tokenizer)
    assert made.documents == {"train": 21}
    assert len(made.warnings) == 1
    assert made.warnings[0].startswith("5 of 21 documents do not end with the end-of-document token (2)")
    assert "warning: 5 of 21 documents" in str(made)


def test_empty_documents_of_megatron_shards_do_not_count(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.bin").write_bytes(struct.pack("<3H", 5, 2, 7))
    arrays = (
        struct.pack("<5i", 0, 2, 0, 1, 0) + struct.pack("<5q", 0, 0, 4, 4, 6) + struct.pack("<6q", *range(6))
    )
    (tmp_path / "a.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 5, 6) + arrays)
    made = adopt_directory(tmp_path, tokenizer)
    assert [warning.split(" do not")[0] for warning in made.warnings] == ["1 of 5 documents"]


@pytest.mark.parametrize("copied", [False, True])
def test_documents_that_begin_with_a_token_of_their_own(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    from megastable.data import shard_format

    monkeypatch.setattr(
        shard_format, "CHUNK", 5
    )  # tokens read at a time: some parts end where a document does
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(40)))
    prepare_shards([text], tmp_path / "made", tokenizer, bos=True, progress=False)
    (tmp_path / "in").mkdir()
    found = [*read_back(tmp_path / "made"), encoded(tokenizer, 1)[0]]
    if copied:
        write_datatrove(tmp_path / "in" / "a.ds", found)
    else:
        with ShardWriter(tmp_path / "in" / "a", 600) as writer:
            for document in found:
                writer.add_document(np.array(document))
    output = tmp_path / "out" if copied else None
    made = adopt_directory(tmp_path / "in", tokenizer, bos=True, output=output)
    assert len(made.warnings) == 1
    assert made.warnings[0].startswith("1 of 41 documents do not begin with token 1")
    own = CorpusConfig(path=tmp_path / "made")
    both = [own, CorpusConfig(path=output or tmp_path / "in")]
    assert len(open_corpora(both, 16, 0).manifests) == 2


def test_the_first_document_of_a_file_that_was_cut_need_not_begin_with_its_token(
    tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "in").mkdir()
    write_llm_c(tmp_path / "in" / "a.bin", [5, 6, 2, 1, 7, 2, 8, 2])
    made = adopt_directory(tmp_path / "in", tokenizer, bos=True, output=tmp_path / "out")
    assert [warning.split(":")[0] for warning in made.warnings] == [
        "1 of 3 documents do not begin with token 1, contrary to --bos"
    ]


@pytest.mark.parametrize("copied", [False, True])
def test_that_all_documents_begin_with_a_token_is_seen_without_being_told(
    tmp_path: Path, tokenizer: Path, copied: bool
) -> None:
    found = [[1, *document] for document in encoded(tokenizer, 9)]
    (tmp_path / "in").mkdir()
    output = tmp_path / "out" if copied else None

    def adopted(found: Documents) -> Summary:
        if copied:
            write_datatrove(tmp_path / "in" / "a.ds", found)
        else:
            with ShardWriter(tmp_path / "in" / "a", 600) as writer:
                for document in found:
                    writer.add_document(np.array(document))
        return adopt_directory(tmp_path / "in", tokenizer, output=output, overwrite=True)

    made = adopted(found)
    assert made.bos == EdgeToken(1, "<s>", "as every document here") and made.warnings == []
    assert "documents begin with token 1 (<s>), as every document here" in str(made)
    corpus = output or tmp_path / "in"
    assert Manifest.load(corpus).tokenizer.bos == 1
    assert verify_corpus(corpus).warnings == []
    # Most is not all: that is for a person to decide.
    made = adopted([*found, encoded(tokenizer, 1)[0]])
    assert made.bos is None and len(made.warnings) == 1
    assert made.warnings[0].startswith(
        "9 of 10 documents begin with token 1 (<s>), and the manifest names none"
    )
    assert verify_corpus(corpus).warnings == made.warnings
