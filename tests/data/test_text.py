"""Every kind of file gives its documents, and what is wrong with one is said with its place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable_tools.prepare import text_files as readers
from megastable_tools.prepare.text_files import TextFiles
from tests.data.archives import COMPRESS as compressions

TEXTS = ["one\r\ntwo\n", "  spaces\tand tabs ", "日本語 🤷 é", '"quoted" \\ {}', "x" * 70_000]
COMPRESS = {"": bytes, ".ZSTD": compressions[".zst"], **compressions}


def json_lines(texts: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, key: text}).encode() + b"\n" for text in texts)


def read(path: Path, **options: object) -> list[str]:
    return list(TextFiles([path], **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.v1.NDJSON"])
def test_json_lines(tmp_path: Path, name: str, compression: str) -> None:
    path = tmp_path / (name + compression)
    path.write_bytes(
        COMPRESS[compression](json_lines(TEXTS, "body") + b"\n  \n" + json_lines(["last"], "body")[:-1])
    )
    corpus = TextFiles([path], key="body")
    assert list(corpus) == [*TEXTS, "last"]
    assert corpus.read_bytes == corpus.total_bytes == path.stat().st_size


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("name", ["a.txt", "b.md", "c.py", "no_ending", "d.unknown"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str, compression: str) -> None:
    content = "\n".join(TEXTS)
    path = tmp_path / (name + compression)
    path.write_bytes(COMPRESS[compression](b"\xef\xbb\xbf" + content.encode()))
    assert read(path) == [content]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
def test_parquet(tmp_path: Path, kind: pa.DataType) -> None:
    texts = TEXTS * 500
    values = [text.encode() for text in texts] if kind == pa.binary() else texts
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"n": range(len(texts)), "body": pa.array(values, kind)}), path, row_group_size=700
    )
    corpus = TextFiles([path], key="body")
    assert list(corpus) == texts
    assert corpus.read_bytes == corpus.total_bytes


@pytest.mark.parametrize("compression", [".gz", ".zst", ".xz", ".bz2"])
def test_members_in_a_row_are_one_file(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(b"".join(COMPRESS[compression](json_lines([text])) for text in TEXTS))
    assert read(path) == TEXTS


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), max_size=8),
    chunk=st.integers(1, 40),
)
def test_chunks_do_not_matter(texts: list[str], chunk: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    for compression in ("", ".gz", ".zst"):
        path = tmp_path_factory.mktemp("text") / f"a.jsonl{compression}"
        path.write_bytes(COMPRESS[compression](json_lines(texts)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(readers, "CHUNK", chunk)
            assert read(path) == texts


def test_folders_are_read_in_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
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
    (b"[" * 100_000 + b"\n", "not one JSON object per line"),
    (b'{"content": "x", "id": 3}\n', r"no key 'text' \(its keys: 'content', 'id'\), name another with --key"),
    (b'{"text": null}\n', "'text' is NoneType, not text"),
    (b'{"text": ["a"]}\n', "'text' is list, not text"),
    (b'{"text": "caf\xe9"}\n', r"not UTF-8 \(byte 13 is 0xe9\)"),
    (b'{"text": "\\ud800"}\n', "'text' contains half of a surrogate pair"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_lines_are_refused_with_their_place_or_left_out(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b"\n" + line + GOOD)
    with pytest.raises(DataError, match=rf"a\.jsonl:3: {message}.*--skip-bad"):
        read(path)
    path.write_bytes(path.read_bytes() + 2 * line)
    corpus = TextFiles([path], skip_bad=True)
    assert list(corpus) == ["good", "good"]
    assert corpus.left_out.counts == {"bad documents": 3}
    assert corpus.left_out.files == {"bad documents": [f"{path}:3 and 2 more"]}


def test_text_that_is_not_utf8_is_refused_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.txt: not UTF-8 \(byte 3 is 0xe9\)"):
        read(path)
    corpus = TextFiles([path], skip_bad=True)
    assert list(corpus) == []
    assert corpus.left_out.files == {"bad documents": [str(path)]}


def test_bad_cells_are_refused_with_their_row_or_left_out(tmp_path: Path) -> None:
    for cells, message in (
        (pa.array(["a", "b", None]), "row 3: 'text' is null"),
        (pa.array([b"a", b"b", b"\xff"]), "row 3: not UTF-8"),
    ):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"text": cells}), path)
        with pytest.raises(DataError, match=rf"a\.parquet: {message}"):
            read(path)
        assert read(path, skip_bad=True) == ["a", "b"]


def test_foreign_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["a"], "n": [1]}), path)
    with pytest.raises(DataError, match=r"no column 'text' \(there is content, n\)"):
        read(path, skip_bad=True)
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet with text in 'n'"):
        read(path, key="n", skip_bad=True)


@pytest.mark.parametrize("compression", [".gz", ".zst", ".xz", ".bz2"])
def test_compressed_files_that_end_too_early_are_refused(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"a.jsonl{compression}"
    whole = COMPRESS[compression](json_lines([os.urandom(40).hex() for _ in range(5000)]))
    path.write_bytes(whole + whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"ends too early"):
        read(path, skip_bad=True)


@pytest.mark.parametrize(
    "name", ["a.jsonl.gz", "a.txt.zst", "a.parquet", "a.txt.xz", "a.csv.bz2", "a.arrow", "a.tar", "a.tgz"]
)
def test_files_that_are_not_what_they_seem_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(GOOD)
    with pytest.raises(DataError, match=f"{name} (is damaged|cannot be read as (Parquet|Arrow))"):
        read(tmp_path, skip_bad=True)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        TextFiles([tmp_path / "nowhere"])
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"link\.txt cannot be read: No such file"):
        read(tmp_path)
