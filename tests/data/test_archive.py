"""Archives are read as they come by: every text of them, nothing outside of them, and damage is an error."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megastable.base.errors import DataError
from megastable_tools.prepare.text_files import TextFiles
from tests.data.archives import COMPRESS as compressions
from tests.data.archives import special, tar_bytes

COMPRESS = {".tar": bytes, ".tgz": gzip.compress, **{f".tar{end}": of for end, of in compressions.items()}}


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
TEXTS = ["first, as it stands first é", "two", "three", "four", "five", "six"]


@pytest.mark.parametrize("ending", COMPRESS)
def test_members_are_read_in_their_order(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(COMPRESS[ending](tar_bytes(PLAIN)))
    corpus = TextFiles([tmp_path])
    for _ in range(2):
        assert list(corpus) == TEXTS
        assert corpus.read_bytes == corpus.total_bytes == path.stat().st_size
        assert corpus.left_out.files == {
            "empty files": [f"{path}!empty.txt"],
            "binary files": [f"{path}!photo.png"],
        }
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_files_about_the_data_are_left_out_where_data_lies(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / ("a.tar" if compress is bytes else "a.tar.gz")
    content = [
        ("./README.md", b"about the data"),
        ("LICENSE", b"may be copied"),
        ("texts/README.md", b"a text among texts"),
        ("texts/.git/a.jsonl", b"hidden"),
        ("texts/one.txt", b"one"),
        ("data/train/0.jsonl", b'{"text": "two"}\n'),
        ("data/dataset_infos.json", b"{}"),
        ("tokens/0.ds.metadata", b"some/tokenizer|2\n5\n"),
    ]
    path.write_bytes(compress(tar_bytes(content)))
    corpus = TextFiles([path])
    for _ in range(2):
        assert list(corpus) == ["a text among texts", "one", "two"]
        assert corpus.read_bytes == corpus.total_bytes == path.stat().st_size
        assert corpus.left_out.files == {
            "files about the data": [
                f"{path}!{name}" for name in ("./README.md", "LICENSE", "data/dataset_infos.json")
            ],
            "hidden files and folders": [f"{path}!texts/.git/a.jsonl"],
            "files of token ids, which megastable prepare manifest adopts": [f"{path}!tokens/0.ds.metadata"],
        }
    path.write_bytes(compress(tar_bytes([*content[:2], content[4]])))
    assert list(TextFiles([path])) == ["about the data", "may be copied", "one"]


def test_links_and_devices_are_named_and_lead_nowhere(tmp_path: Path) -> None:
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
def test_an_archive_that_is_cut_off_anywhere_is_refused(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / ("a.tar" if compress is bytes else "a.tar.gz")
    whole = compress(tar_bytes([("a.txt", b"one"), ("b.txt", b"two" * 300), ("c.txt", b"three")]))
    end = whole.index(b"three") + 512 if compress is bytes else len(whole)  # zeros behind it, from a block on
    for cut in range(0, end, 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=rf"{path.name} (is damaged|ends too early)"):
            list(TextFiles([path], skip_bad=True))


def test_damaged_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    good = tar_bytes([(f"{number}.txt", b"text") for number in range(4)])
    chance = random.Random(0)
    for member in range(4):
        for _ in range(20):
            damaged = bytearray(good)
            damaged[1024 * member + chance.randrange(500)] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=r"a\.tar is damaged: .*fetch it again"):
                list(TextFiles([path]))


def test_archives_in_a_row_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes([("a.txt", b"one")]) + tar_bytes([("b.txt", b"two")]))
    with pytest.raises(DataError, match=r"a\.tar goes on after the end mark"):
        list(TextFiles([path]))


def test_what_cannot_be_read_inside_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    parquet = (tmp_path / "a.parquet").read_bytes()
    path = tmp_path / "a.tar"
    for name, content in (("a.parquet", parquet), ("b.tar", tar_bytes([])), ("c.zip", b"PK")):
        path.write_bytes(tar_bytes([("1.txt", b"one"), (name, content)]))
        with pytest.raises(
            DataError, match=rf"a\.tar!{name} is an archive or table of a kind that is not read"
        ):
            list(TextFiles([path]))
        corpus = TextFiles([path], skip_bad=True)
        assert list(corpus) == ["one"]
        assert list(corpus.left_out.files.values()) == [[f"{path}!{name}"]]
    path.write_bytes(tar_bytes([("d.jsonl.gz", gzip.compress(line("x"))[:-3])]))
    with pytest.raises(DataError, match=r"a\.tar!d\.jsonl\.gz ends too early"):
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


def test_webdatasets_have_a_document_per_sample(tmp_path: Path) -> None:
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


def test_samples_without_a_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes([*webdataset(2), ("s/002.jpg", b"\0"), *webdataset(1)]))
    with pytest.raises(DataError, match=r"a\.tar!s/002: a sample without \.text or \.txt or \.json"):
        list(TextFiles([path]))
    assert list(TextFiles([path], skip_bad=True)) == ["text 0", "text 1", "text 0"]
    path.write_bytes(tar_bytes([*webdataset(3), ("s/002.txt", b"another")]))
    with pytest.raises(DataError, match=r"a\.tar!s/002\.txt: there twice in one sample"):
        list(TextFiles([path]))
    assert list(TextFiles([path], skip_bad=True)) == ["text 0", "text 1", "text 2"]
    with pytest.raises(DataError, match=r"a\.tar!s/000\.json: no key 'story' \(its keys: 'caption'\)"):
        list(TextFiles([path], key="story"))


def test_files_that_share_a_name_are_no_webdataset(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes([("a.txt", b"1"), ("a.md", b"2"), ("b.py", b"3"), ("shard.0.txt", b"4")]))
    assert list(TextFiles([path])) == ["1", "2", "3", "4"]
