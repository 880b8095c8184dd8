"""What a file holds is told by its name or by its content, never guessed wrong in silence."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable_tools.prepare.file_formats import SNIFFED, format_of, holds_json_lines, open_content
from megastable_tools.prepare.text_files import TextFiles
from tests.data.archives import COMPRESS as compressions
from tests.data.archives import tar_bytes

TEXTS = ["one", "two\nlines", "x" * 3 * SNIFFED, "日本語 \\ {}"]
COMPRESS = {"": bytes, **compressions}


def json_lines(texts: list[str], key: str = "text", before: object = None) -> bytes:
    records = [{key: text} if before is None else {"id": before, key: text} for text in texts]
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def read(path: Path, **options: object) -> list[str]:
    return list(TextFiles([path], **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "AA/wiki_00",
        "part-00000",
        "a.jl",
        "a.jsonlines",
        "a.ldjson",
        "a.json5",
        "a.jsonl.bak",
        "a.jsonl.1",
        "a.txt",
    ],
)
def test_json_lines_under_any_name_are_their_texts(tmp_path: Path, name: str) -> None:
    # By the name's ending, and without it.
    for at, (ending, compress) in enumerate([*COMPRESS.items(), *(("", c) for c in COMPRESS.values())]):
        path = tmp_path / str(at) / (name + ending)
        path.parent.mkdir(parents=True, exist_ok=True)
        for content in (json_lines(TEXTS), b"\xef\xbb\xbf\n" + json_lines(TEXTS[::-1], before="x" * 9000)):
            path.write_bytes(compress(content))
            corpus = TextFiles([tmp_path / str(at)])
            assert sorted(corpus) == sorted(TEXTS)
            assert corpus.read.counts == {"files of JSON lines, told by their content": 1}
            assert corpus.read.files == {"files of JSON lines, told by their content": [str(path)]}


def test_broken_records_are_refused_wherever_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "part-00000"
    for at, line in ((1, b'{"text": "bro\n'), (2, b'{"content": "x"}\n'), (3, b"no JSON\n")):
        lines = json_lines(["a", "b", "c"]).splitlines(keepends=True)
        lines.insert(at - 1, line)
        path.write_bytes(b"".join(lines))
        with pytest.raises(DataError, match=rf"part-00000:{at}: .*--skip-bad, or .* with --as-text"):
            read(path)
        assert read(path, skip_bad=True) == ["a", "b", "c"]
        assert read(path, as_text=True) == [path.read_text()]
    path.write_bytes(json_lines(["a"], key="content"))
    with pytest.raises(DataError, match=r"part-00000:1: no key 'text' \(its keys: 'content'\)"):
        read(path)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (json.dumps([{"text": "a"}]).encode(), "JSON, not one object per line"),
        (json.dumps([{"text": "a"}, {"text": "b"}], indent=1).encode(), "JSON, not one object per line"),
        (json.dumps({"text": "a", "n": 1}, indent=1).encode(), "JSON, not one object per line"),
        (b"\n".join(json.dumps({"t": n}, indent=1).encode() for n in range(3)), "JSON, not one object"),
        (json.dumps(["a", "b"]).encode(), "JSON, not one object per line"),
        (b"id,text\n1,a\n", "a table with the column 'text'"),
        (b'"text"\t"id"\r\n"a"\t1\r\n', "a table with the column 'text'"),
        (b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n", "a web archive"),
        (b"Obj\x01\x04\x14avro.codec", "Avro"),
        (b"ORC\x08\0\x11", "ORC"),
        (b"SQLite format 3\0", "an SQLite database"),
        (tar_bytes([("a.txt", b"a")]), r"a tar archive \(rename it to \.tar\)"),
        (gzip.compress(tar_bytes([("a.txt", b"a")])), "a tar archive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip writes the time into its content
)
def test_records_and_archives_that_are_not_read_are_refused_and_named(
    tmp_path: Path, content: bytes, what: str
) -> None:
    (tmp_path / "a.txt").write_text("text")
    for name in ("part-0", "data.pq", "x.gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        with pytest.raises(
            DataError, match=f"{name} holds {what}.*, which its name does not tell.*--as-text"
        ):
            read(tmp_path)
        corpus = TextFiles([tmp_path], skip_bad=True)
        assert list(corpus) == ["text"]
        assert list(corpus.left_out.files.values()) == [[str(path)]]
        path.unlink()


def test_tables_under_other_names(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"]})
    pq.write_table(table, tmp_path / "part.snappy")
    with pytest.raises(DataError, match=r"part\.snappy holds Parquet \(rename it to \.parquet\)"):
        read(tmp_path)
    (tmp_path / "part.snappy").unlink()
    for new in (pa.ipc.new_file, pa.ipc.new_stream):
        with new(str(tmp_path / "table"), table.schema) as writer:
            writer.write_table(table)
        corpus = TextFiles([tmp_path])
        assert list(corpus) == ["a", "b"]
        assert corpus.read.counts == {"Arrow tables, told by their content": 1}


@pytest.mark.parametrize(
    "text",
    [
        "{curly} braces",
        "{\n    'name': 'Odoo',\n    'depends': ['base'],\n}\n",
        '{\n    "name": "Odoo",  # as Python\n}\n',
        '["a"](b) is a link',
        '{"a": 1} begins a sentence',
        "[1] Reference\n[2] Another",
        "{\\rm TeX}",
        "Hello, text and more\n",
        "ORCHIDS, PAR1S, Obj",
        "{}",
        '"quoted" speech',
        "{" * 100_000,
    ],
)
def test_texts_that_begin_like_records_are_texts(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes").write_text(text)
    corpus = TextFiles([tmp_path])
    assert list(corpus) == [text]
    assert corpus.read.counts == {"texts, one document each": 1}


def test_what_is_mixed_is_said_and_files_about_data_are_left_out(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b/part-00000", "b/part-00001"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(json_lines([name]))
    for name in ("b/README.md", "notes", "some/deep/README.md", "some/deep/notes"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = TextFiles([tmp_path])
    texts = ["notes", "some/deep/README.md", "some/deep/notes"]
    assert list(corpus) == ["a.jsonl", "b/part-00000", "b/part-00001", *texts]
    assert corpus.left_out.files == {"files about the data": [f"{tmp_path}/b/README.md"]}
    assert corpus.read.files == {
        "files of JSON lines": [f"{tmp_path}/a.jsonl"],
        "files of JSON lines, told by their content": [f"{tmp_path}/b/part-00000 and 1 more"],
        "texts, one document each": [f"{tmp_path}/notes and 2 more"],
    }
    assert len(read(tmp_path, as_text=True)) == 7


def test_members_of_archives_are_told_by_their_content(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    members = [
        ("README", b"about"),
        ("s/part-0", gzip.compress(json_lines(["a"]))),
        ("s/part-1", json_lines(["b"])),
    ]
    path.write_bytes(tar_bytes(members))
    corpus = TextFiles([path])
    assert list(corpus) == ["a", "b"]
    assert corpus.left_out.files == {"files about the data": [f"{path}!README"]}
    assert corpus.read.files["files of JSON lines, told by their content"] == [f"{path}!s/part-0 and 1 more"]
    path.write_bytes(tar_bytes([("table", b"PAR1\x15\0")]))
    with pytest.raises(DataError, match=r"a\.tar!table holds Parquet"):
        list(corpus)


def test_utf16_is_refused_not_taken_for_a_binary_file(tmp_path: Path) -> None:
    for encoding in ("utf-16", "utf-16-be"):
        bom = b"\xfe\xff" if encoding.endswith("be") else b""
        for name, text in (("a.txt", "a text é\n" * 900), ("a.jsonl", '{"text": "a"}\n')):
            (tmp_path / name).write_bytes(bom + text.encode(encoding))
            with pytest.raises(DataError, match="it is UTF-16, which iconv -f UTF-16 -t UTF-8 converts"):
                read(tmp_path)
            (tmp_path / name).unlink()
    (tmp_path / "a.dat").write_bytes(b"\xff\xfe" + bytes(3000))
    assert read(tmp_path) == []


def test_a_file_that_holds_itself_compressed_ends(tmp_path: Path) -> None:
    content = b"text"
    for _ in range(6):
        content = gzip.compress(content)
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match="compressed again and again"):
        read(tmp_path)


@given(
    records=st.lists(
        st.dictionaries(
            st.text(st.characters(exclude_categories=("Cs",))),
            st.none() | st.text() | st.integers(),
            min_size=1,
        ),
        min_size=1,
    ),
    cut=st.integers(0, SNIFFED),
)
@example(records=[{'"\\': "\n"}], cut=SNIFFED)
def test_whatever_json_lines_hold_is_told(records: list[dict[str, object]], cut: int) -> None:
    content = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    padded = json.dumps(records[0]).encode()[:-1] + b', "long": "' + b"x" * 2 * SNIFFED
    assert holds_json_lines(content[:SNIFFED])
    assert holds_json_lines(padded[:SNIFFED])
    for piece in (1, 7, max(1, cut)):
        chunks = [content[at : at + piece] for at in range(0, len(content), piece)]
        opened = open_content("a", format_of("a"), chunks)
        assert (opened.kind, b"".join(opened.chunks)) == ("json lines", content)
