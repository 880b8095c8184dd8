"""Every kind of file gives its documents, and what is wrong with one is said with its place."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable_tools.prepare import text_files as readers
from megastable_tools.prepare.text_files import (
    ABOUT,
    TOKENS,
    UNMATCHED,
    TextFiles,
    find_files,
    is_data,
)
from tests.data.texts import COMPRESS as compressions
from tests.tiers import examples

COMPRESS = {"": bytes, ".ZSTD": compressions[".zst"], **compressions}


def json_lines(texts: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, key: text}).encode() + b"\n" for text in texts)


def read(path: Path, **options: object) -> list[str]:
    return list(TextFiles([path], **options))  # type: ignore[arg-type]


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), max_size=8),
    chunk=st.integers(1, 40),
)
def test_text_files_read_any_chunks(
    texts: list[str], chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for compression in ("", ".gz", ".zst"):
        path = tmp_path_factory.mktemp("text") / f"a.jsonl{compression}"
        path.write_bytes(COMPRESS[compression](json_lines(texts)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(readers, "CHUNK", chunk)
            assert read(path) == texts


def test_text_files_leave_out_hidden_and_binary_files(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "b.txt", "a/x/y.txt", ".git/config", "a/.hidden.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\0\0\0")
    (tmp_path / "late.bin").write_bytes(b"a" * 5000 + b"\0")
    (tmp_path / "empty.txt").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.txt")
    corpus = TextFiles([tmp_path / "b.txt", tmp_path])
    for _ in range(2):
        assert list(corpus) == ["b.txt", "a/x/y.txt", "b/1.txt", "b/2.txt", "b.txt"]
        assert corpus.left_out.files == {
            "empty files": [f"{tmp_path}/empty.txt"],
            "hidden files and folders": [f"{tmp_path}/.git/", f"{tmp_path}/a/.hidden.txt"],
            "pipes, sockets and devices": [f"{tmp_path}/pipe.txt"],
            "binary files": [f"{tmp_path}/late.bin", f"{tmp_path}/picture.png"],
        }


GOOD = b'{"text": "good"}\n'
BAD_LINES = [
    (b'{"text": "bro\n', "not one JSON object per line"),
    (b'["text"]\n', r"not one JSON object per line \(a list\) \(jq -c '\.\[\]' makes lines of an array\)"),
    (b'{"content": "x", "id": 3}\n', r"no key 'text' \(its keys: 'content', 'id'\), name another with --key"),
    (b'{"text": null}\n', "'text' is NoneType, not text"),
    (b'{"text": "caf\xe9"}\n', r"not UTF-8 \(byte 13 is 0xe9\)"),
    (b'{"text": "\\ud800"}\n', "'text' contains half of a surrogate pair"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_text_files_refuse_bad_lines_or_leave_them_out(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"\n" + line + GOOD)
    with pytest.raises(DataError, match=rf"a\.jsonl:3: {message}.*--skip-bad"):
        read(path)
    path.write_bytes(path.read_bytes() + 2 * line)
    corpus = TextFiles([path], skip_bad=True)
    assert list(corpus) == ["good", "good"]
    assert corpus.left_out.counts == {"bad documents": 3}
    assert corpus.left_out.files == {"bad documents": [f"{path}:3 and 2 more"]}


TABLE_TEXTS = ["one\r\ntwo\n", "  spaces\tand tabs ", "日本語 🤷 é", '"quoted", \\ {}', "x" * 70_000]


def arrow_bytes(table: pa.Table, stream: bool, rows: int = 700, **options: object) -> bytes:
    sink = io.BytesIO()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_text_files_read_arrow(tmp_path: Path, kind: pa.DataType, stream: bool) -> None:
    texts = TABLE_TEXTS * 500
    table = pa.table({"n": range(len(texts)), "body": pa.array(texts, kind)})
    path = tmp_path / "a.arrow"
    path.write_bytes(arrow_bytes(table, stream, compression="zstd"))
    corpus = TextFiles([path], key="body")
    assert list(corpus) == texts
    assert corpus.read_bytes == corpus.total_bytes
    (tmp_path / "b.arrow.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert list(TextFiles([tmp_path / "b.arrow.gz"], key="body")) == texts


@pytest.mark.parametrize("stream", [True, False])
def test_text_files_refuse_arrow_cut_off_anywhere(tmp_path: Path, stream: bool) -> None:
    whole = arrow_bytes(pa.table({"text": ["a text"] * 30}), stream, rows=10)
    end = (
        len(whole) if stream else whole.rindex(b"\xff\xff\xff\xff\0\0\0\0") + 8
    )  # behind it, an index of what came
    path = tmp_path / "a.arrow"
    for cut in range(0, end, 4):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.arrow (cannot be read as Arrow|ends too early)"):
            list(TextFiles([path], skip_bad=True))


def csv_bytes(rows: list[list[str]], delimiter: str = ",") -> bytes:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    return file.getvalue().encode()


@pytest.mark.parametrize(("ending", "delimiter"), [("csv", ","), ("tsv", "\t"), ("CSV", ",")])
@settings(max_examples=examples(40))
@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufeff"), min_size=1)
    )
)
def test_text_files_give_every_text_of_a_csv_back(
    tmp_path_factory: pytest.TempPathFactory, ending: str, delimiter: str, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("csv") / f"a.{ending}"
    content = csv_bytes([["id", "body"], *([str(n), text] for n, text in enumerate(texts))], delimiter)
    for bom in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(bom + content)
        assert list(TextFiles([path], key="body")) == texts
    assert list(TextFiles([path], key="id")) == [str(n) for n in range(len(texts))]


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"text": "{name}"}}' if is_data(path.name) else name)


def found(folder: Path, *globs: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in find_files([folder], globs).paths]


def left_out(folder: Path, *globs: str) -> dict[str, list[str]]:
    files = find_files([folder], globs).left_out
    return {reason: [name.removeprefix(f"{folder}/") for name in names] for reason, names in files.items()}


def test_find_files_leaves_out_files_about_the_data(tmp_path: Path) -> None:
    data = [
        "README.md",
        "LICENSE",
        "dataset_infos.json",
        "tokenizer.json",
        "data/train.parquet",
        "data/README",
    ]
    make(tmp_path, *data, "data/SHA256SUMS", "data/_SUCCESS")
    texts = ["texts/README.md", "texts/a.txt", "texts/readme_first.txt"]
    make(tmp_path, *texts)
    assert found(tmp_path) == ["data/train.parquet", *texts]
    about = ["LICENSE", "README.md", "data/README", "data/SHA256SUMS", "data/_SUCCESS", "dataset_infos.json"]
    assert left_out(tmp_path) == {ABOUT: [*about, "tokenizer.json"]}
    assert find_files([tmp_path / "README.md"]).paths == [tmp_path / "README.md"]


def test_find_files_chooses_by_globs(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.csv", "train/c.csv", "train/deep/d.csv", "test/e.csv", "README.md")
    assert found(tmp_path, "*.csv") == ["b.csv", "test/e.csv", "train/c.csv", "train/deep/d.csv"]
    assert found(tmp_path, "train/*") == ["train/c.csv"]
    assert found(tmp_path, "train/**/*.csv", "*.jsonl") == ["a.jsonl", "train/c.csv", "train/deep/d.csv"]
    assert found(tmp_path, "README.md") == ["README.md"]
    assert left_out(tmp_path, "train/*", "*.jsonl") == {
        UNMATCHED: ["README.md", "b.csv", "test/e.csv", "train/deep/d.csv"]
    }
    # A file that is named is read, whatever the globs.
    assert find_files([tmp_path / "b.csv", tmp_path / "train"], ["c*"]).paths == [
        tmp_path / "b.csv",
        tmp_path / "train/c.csv",
    ]


def test_find_files_refuses_token_ids(tmp_path: Path) -> None:
    trove = ["00000_shuffled.ds", "00000_shuffled.ds.index", "00000_shuffled.ds.metadata"]
    make(tmp_path, "a.txt", "megatron.bin", "megatron.idx", *trove)
    (tmp_path / "fineweb_train_000001.bin").write_bytes(struct.pack("<256i", 20240520, 1, 0, *[0] * 253))
    assert found(tmp_path) == ["a.txt"]
    assert left_out(tmp_path) == {
        TOKENS: [*trove, "fineweb_train_000001.bin", "megatron.bin", "megatron.idx"]
    }
    for name in trove:
        with pytest.raises(DataError, match=r"holds token ids, not text: adopt it with .* manifest"):
            find_files([tmp_path / name])
