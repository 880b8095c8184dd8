"""Columns of Arrow and CSV files, and what is wrong with them."""

from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable_tools.prepare import table_files
from megastable_tools.prepare.text_files import TextFiles
from tests.tiers import examples

TEXTS = ["one\r\ntwo\n", "  spaces\tand tabs ", "日本語 🤷 é", '"quoted", \\ {}', "x" * 70_000]


def arrow_bytes(table: pa.Table, stream: bool, rows: int = 700, **options: object) -> bytes:
    sink = io.BytesIO()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return sink.getvalue()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_arrow(tmp_path: Path, kind: pa.DataType, stream: bool) -> None:
    texts = TEXTS * 500
    table = pa.table({"n": range(len(texts)), "body": pa.array(texts, kind)})
    path = tmp_path / "a.arrow"
    path.write_bytes(arrow_bytes(table, stream, compression="zstd"))
    corpus = TextFiles([path], key="body")
    assert list(corpus) == texts
    assert corpus.read_bytes == corpus.total_bytes
    (tmp_path / "b.arrow.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert list(TextFiles([tmp_path / "b.arrow.gz"], key="body")) == texts


def test_feather(tmp_path: Path) -> None:
    pyarrow.feather.write_feather(pa.table({"text": TEXTS}), str(tmp_path / "a.feather"))
    assert list(TextFiles([tmp_path])) == TEXTS


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_that_is_cut_off_anywhere_is_refused(tmp_path: Path, stream: bool) -> None:
    whole = arrow_bytes(pa.table({"text": ["a text"] * 30}), stream, rows=10)
    end = (
        len(whole) if stream else whole.rindex(b"\xff\xff\xff\xff\0\0\0\0") + 8
    )  # behind it, an index of what came
    path = tmp_path / "a.arrow"
    for cut in range(0, end, 4):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.arrow (cannot be read as Arrow|ends too early)"):
            list(TextFiles([path], skip_bad=True))


def test_arrow_with_bad_cells_and_foreign_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    for cells, message in (
        (pa.array(["a", "b", None]), "row 3: 'text' is null"),
        (pa.array([b"a", b"b", b"\xff"]), "row 3: not UTF-8"),
    ):
        path.write_bytes(arrow_bytes(pa.table({"text": cells}), True))
        with pytest.raises(DataError, match=rf"a\.arrow: {message}"):
            list(TextFiles([path]))
        assert list(TextFiles([path], skip_bad=True)) == ["a", "b"]
    path.write_bytes(arrow_bytes(pa.table({"content": ["a"], "n": [1]}), True))
    with pytest.raises(DataError, match=r"no column 'text' \(there is content, n\)"):
        list(TextFiles([path], skip_bad=True))
    with pytest.raises(DataError, match=r"a\.arrow cannot be read as Arrow with text in 'n'"):
        list(TextFiles([path], key="n"))


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
def test_csv_gives_every_text_back(
    tmp_path_factory: pytest.TempPathFactory, ending: str, delimiter: str, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("csv") / f"a.{ending}"
    content = csv_bytes([["id", "body"], *([str(n), text] for n, text in enumerate(texts))], delimiter)
    for bom in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(bom + content)
        assert list(TextFiles([path], key="body")) == texts
    assert list(TextFiles([path], key="id")) == [str(n) for n in range(len(texts))]


BAD_ROWS = [
    (b"1,a,b\n", "line 4: 3 fields, the header has 2"),
    (b"1\n", "line 4: 1 fields, the header has 2"),
    (b'1,"a"b\n', "line 4: ',' expected after '\"'"),
    (b"1,caf\xe9\n", r"not UTF-8 \(byte 3 is 0xe9\)"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_bad_rows_are_refused_with_their_place_or_left_out(tmp_path: Path, row: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n1,"go\nod"\n' + row + b"\n2,good\n")
    with pytest.raises(DataError, match=rf"a\.csv: row 2: {message}.*--skip-bad"):
        list(TextFiles([path]))
    corpus = TextFiles([path], skip_bad=True)
    assert list(corpus) == ["go\nod", "good"]
    assert corpus.left_out.counts == {"bad documents": 1}


def test_csv_that_ends_inside_quotes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n1,good\n2,"never\nclosed\n')
    with pytest.raises(DataError, match=r"a\.csv ends too early, inside quotes that open in line 3"):
        list(TextFiles([path], skip_bad=True))


def test_a_quote_that_is_never_closed_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_files, "LONGEST_FIELD", 1000)
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\n1,"' + b"x" * 5000 + b"\n2,good\n")
    with pytest.raises(DataError, match=r"line 2: field larger than field limit \(1000\)"):
        list(TextFiles([path]))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"id;text\n1;a\n", r"no column 'text' \(there is id;text\), name one with --key"),
        (b"text,text\na,b\n", "more than one column 'text'"),
        (b"", "no column 'text'"),
        ("text\na\n".encode("utf-16"), "no column 'text'"),
    ],
)
def test_headers_without_the_column_are_refused(tmp_path: Path, header: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(header)
    with pytest.raises(DataError, match=rf"a\.csv: {message}"):
        list(TextFiles([tmp_path], skip_bad=True))
