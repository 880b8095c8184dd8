"""What a file holds is told by its name or by its content, never guessed wrong in silence."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable_tools.prepare.file_formats import (
    PIECE,
    SNIFFED,
    decompress_chunks,
    format_of,
    holds_json_lines,
    open_content,
)
from megastable_tools.prepare.text_files import TextFiles
from tests.data.texts import COMPRESS as compressions
from tests.data.texts import special, tar_bytes

TEXTS = ["one", "two\nlines", "x" * 3 * SNIFFED, "日本語 \\ {}"]
COMPRESS = {"": bytes, **compressions}


def json_lines(texts: list[str], key: str = "text", before: object = None) -> bytes:
    records = [{key: text} if before is None else {"id": before, key: text} for text in texts]
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def read(path: Path, **options: object) -> list[str]:
    return list(TextFiles([path], **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["AA/wiki_00", "part-00000", "a.jl", "a.jsonl.bak"],
)
def test_open_content_knows_json_lines_under_any_name(tmp_path: Path, name: str) -> None:
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


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (json.dumps([{"text": "a"}, {"text": "b"}], indent=1).encode(), "JSON, not one object per line"),
        (json.dumps({"text": "a", "n": 1}, indent=1).encode(), "JSON, not one object per line"),
        (b"id,text\n1,a\n", "a table with the column 'text'"),
        (b'"text"\t"id"\r\n"a"\t1\r\n', "a table with the column 'text'"),
        (b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n", "a web archive"),
        (b"SQLite format 3\0", "an SQLite database"),
        (tar_bytes([("a.txt", b"a")]), r"a tar archive \(rename it to \.tar\)"),
        (gzip.compress(tar_bytes([("a.txt", b"a")])), "a tar archive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip writes the time into its content
)
def test_open_content_refuses_what_is_not_read(tmp_path: Path, content: bytes, what: str) -> None:
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


@pytest.mark.parametrize(
    "text",
    [
        "{curly} braces",
        "{\n    'name': 'Odoo',\n    'depends': ['base'],\n}\n",
        '{\n    "name": "Odoo",  # as Python\n}\n',
        '["a"](b) is a link',
        '{"a": 1} begins a sentence',
        "ORCHIDS, PAR1S, Obj",
        "{}",
        "{" * 100_000,
    ],
)
def test_open_content_takes_texts_that_begin_like_records(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes").write_text(text)
    corpus = TextFiles([tmp_path])
    assert list(corpus) == [text]
    assert corpus.read.counts == {"texts, one document each": 1}


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
def test_holds_json_lines_tells_all_of_them(records: list[dict[str, object]], cut: int) -> None:
    content = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    padded = json.dumps(records[0]).encode()[:-1] + b', "long": "' + b"x" * 2 * SNIFFED
    assert holds_json_lines(content[:SNIFFED])
    assert holds_json_lines(padded[:SNIFFED])
    for piece in (1, 7, max(1, cut)):
        chunks = [content[at : at + piece] for at in range(0, len(content), piece)]
        opened = open_content("a", format_of("a"), chunks)
        assert (opened.kind, b"".join(opened.chunks)) == ("json lines", content)


TAR_COMPRESS = {
    ".tar": bytes,
    ".tgz": gzip.compress,
    **{f".tar{end}": of for end, of in compressions.items()},
}


def line(text: str, key: str = "text") -> bytes:
    return json.dumps({"id": 1, key: text}).encode() + b"\n"


PLAIN: list[tuple[str | tarfile.TarInfo, bytes]] = [
    (special("./docs", tarfile.DIRTYPE), b""),
    ("./docs/z.txt", "first, as it stands first é".encode()),
    ("docs/a.jsonl", line("two") + line("three")),
    ("docs/b.jsonl.xz", lzma.compress(line("four"))),
    ("c.csv", b"id,text\n1,five\n"),
    ("empty.txt", b""),
    ("photo.png", b"\x89PNG\0"),
    ("no_ending", b"six"),
]
TAR_TEXTS = ["first, as it stands first é", "two", "three", "four", "five", "six"]


@pytest.mark.parametrize("ending", TAR_COMPRESS)
def test_members_come_in_their_order(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(TAR_COMPRESS[ending](tar_bytes(PLAIN)))
    corpus = TextFiles([tmp_path])
    for _ in range(2):
        assert list(corpus) == TAR_TEXTS
        assert corpus.read_bytes == corpus.total_bytes == path.stat().st_size
        assert corpus.left_out.files == {
            "empty files": [f"{path}!empty.txt"],
            "binary files": [f"{path}!photo.png"],
        }
    assert os.listdir(tmp_path) == [path.name]


def test_members_leave_out_links_and_devices(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("a secret")
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.tar"
    path.write_bytes(
        tar_bytes(
            [
                (special("link.txt", tarfile.SYMTYPE, "../secret.txt"), b""),
                (special("hard.txt", tarfile.LNKTYPE, "/etc/passwd"), b""),
                (special("null.txt", tarfile.CHRTYPE), b""),
                (special("pipe.txt", tarfile.FIFOTYPE), b""),
                ("../../out.txt", b"stays inside"),
                ("/etc/absolute.txt", b"so does this"),
                (".git/config", b"hidden"),
                (".git/HEAD", b"hidden"),
            ]
        )
    )
    corpus = TextFiles([tmp_path / "in"])
    assert list(corpus) == ["stays inside", "so does this"]
    assert corpus.left_out.files == {
        "links, devices and sparse files in archives": [
            f"{path}!{name}" for name in ("link.txt", "hard.txt", "null.txt", "pipe.txt")
        ],
        "hidden files and folders": [f"{path}!.git/config and 1 more"],
    }
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["a.tar", "in", "secret.txt"]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_members_refuse_an_archive_cut_off_anywhere(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / ("a.tar" if compress is bytes else "a.tar.gz")
    whole = compress(tar_bytes([("a.txt", b"one"), ("b.txt", b"two" * 300), ("c.txt", b"three")]))
    end = whole.index(b"three") + 512 if compress is bytes else len(whole)  # zeros behind it, from a block on
    for cut in range(0, end, 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=rf"{path.name} (is damaged|ends too early)"):
            list(TextFiles([path], skip_bad=True))


def webdataset(count: int) -> list[tuple[str | tarfile.TarInfo, bytes]]:
    members: list[tuple[str | tarfile.TarInfo, bytes]] = []
    for number in range(count):
        members += [
            (f"s/{number:03d}.jpg", b"\xff\xd8\0"),
            (f"s/{number:03d}.cls", b"7"),
            (f"s/{number:03d}.json", json.dumps({"caption": f"said {number}"}, indent=1).encode()),
            (f"s/{number:03d}.txt", f"text {number}".encode()),
        ]
    return members


def test_samples_of_a_webdataset_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(webdataset(50)))
    corpus = TextFiles([path])
    assert list(corpus) == [f"text {number}" for number in range(50)]
    assert corpus.left_out.counts == {"other parts of WebDataset samples": 150}
    assert corpus.left_out.files == {
        "other parts of WebDataset samples": [
            f"{path}!s/000.{ending} and 49 more" for ending in ("jpg", "cls", "json")
        ]
    }
    assert list(TextFiles([path], key="txt")) == [f"text {number}" for number in range(50)]
    assert list(TextFiles([path], key="caption")) == [f"said {number}" for number in range(50)]


TEXT = b"".join(b"line %d of a text\n" % number for number in range(20_000))


def chunked(data: bytes, size: int = 1000) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("ending", compressions)
def test_decompress_refuses_what_is_cut_off_or_changed(ending: str) -> None:
    one = compressions[ending](TEXT)
    for cut in (1, len(one) // 2, len(one) - 1):
        with pytest.raises(DataError, match=r"a\.txt (ends too early|is damaged)"):
            b"".join(decompress_chunks("a.txt", chunked(one + one[:cut]), ending))
    for whole in (one + b"another thing", b"another thing", one + one[:3] + b"\xff" + one[4:]):
        with pytest.raises(DataError, match=r"a\.txt (is damaged|ends too early)"):
            b"".join(decompress_chunks("a.txt", chunked(whole), ending))


@pytest.mark.quick(".gz")
@pytest.mark.parametrize("ending", compressions)
def test_decompress_gives_a_bomb_in_small_pieces(ending: str) -> None:
    size, most = (200 << 20, 65 << 20) if ending == ".zst" else (16 << 20, 3 * PIECE)
    bomb = compressions[ending](bytes(size))
    assert len(bomb) < size / 500
    lengths = [len(piece) for piece in decompress_chunks("a", [bomb], ending)]
    assert sum(lengths) == size
    assert max(lengths) <= most
