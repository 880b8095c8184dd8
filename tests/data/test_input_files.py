"""Of a folder as people have them, the data is read, and every file that is not is named with the reason."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from megastable.base.errors import DataError
from megastable_tools.prepare.file_formats import format_of
from megastable_tools.prepare.input_files import (
    ABOUT,
    CACHES,
    HIDDEN,
    LINKS,
    TOKENS,
    UNMATCHED,
    find_files,
    is_data,
)
from megastable_tools.prepare.text_files import TextFiles


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


@pytest.mark.parametrize(
    ("name", "kind", "codec"),
    [
        ("a", "text", ""),
        ("a.md.xz", "text", ".xz"),
        ("a.v1.JSONL.Bz2", "json lines", ".bz2"),
        ("a.snappy.parquet", "parquet", ""),
        ("a.parquet.gz", "unread", ".gz"),
        ("data-00000-of-00002.arrow", "arrow", ""),
        ("a.csv.gz", "csv", ".gz"),
        ("a.tsv", "tsv", ""),
        ("a.tar", "tar", ""),
        ("a.tar.zst", "tar", ".zst"),
        ("a.TGZ", "tar", ".gz"),
        ("a.zip", "unread", ""),
        (".gz", "text", ""),
        ("a.gz", "text", ".gz"),
    ],
)
def test_names_say_how_files_are_read(name: str, kind: str, codec: str) -> None:
    assert format_of(name) == (kind, codec)


def test_files_about_the_data_are_left_out_where_data_lies(tmp_path: Path) -> None:
    make(
        tmp_path,
        "README.md",
        "LICENSE",
        "dataset_infos.json",
        "data/train.parquet",
        "data/README",
        "data/SHA256SUMS",
    )
    make(
        tmp_path,
        "texts/README.md",
        "texts/readme_first.txt",
        "texts/a.txt",
        "tokenizer.json",
        "data/_SUCCESS",
    )
    assert found(tmp_path) == [
        "data/train.parquet",
        "texts/README.md",
        "texts/a.txt",
        "texts/readme_first.txt",
    ]
    about = ["LICENSE", "README.md", "data/README", "data/SHA256SUMS", "data/_SUCCESS", "dataset_infos.json"]
    assert left_out(tmp_path) == {ABOUT: [*about, "tokenizer.json"]}
    assert find_files([tmp_path / "README.md"]).paths == [tmp_path / "README.md"]


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.jsonl.zst", "a.json", "a.arrow", "a.csv.xz", "a.tsv", "a.tgz"]
)
def test_every_kind_of_data_counts(tmp_path: Path, name: str) -> None:
    make(tmp_path, "README.md", name)
    assert found(tmp_path) == [name]


def test_data_is_data_whatever_it_is_about(tmp_path: Path) -> None:
    names = ["authors.csv", "licenses.jsonl", "readme.parquet", "readmes.md", "state.json.gz"]
    make(tmp_path, "a.jsonl", *names)
    assert found(tmp_path) == ["a.jsonl", *names]


def test_a_folder_of_texts_is_read_whole(tmp_path: Path) -> None:
    make(tmp_path, "README.md", "LICENSE", "a.py")
    assert found(tmp_path) == ["LICENSE", "README.md", "a.py"]


def test_saved_datasets_of_hugging_face(tmp_path: Path) -> None:
    make(tmp_path, "dataset_dict.json")
    for split in ("test", "train"):
        make(
            tmp_path,
            *(f"{split}/{name}" for name in ("data-00000-of-00001.arrow", "dataset_info.json", "state.json")),
        )
    make(tmp_path, "train/cache-0123456789abcdef.arrow")
    assert found(tmp_path) == ["test/data-00000-of-00001.arrow", "train/data-00000-of-00001.arrow"]
    assert left_out(tmp_path)[CACHES] == ["train/cache-0123456789abcdef.arrow"]
    assert len(left_out(tmp_path)[ABOUT]) == 5
    assert found(tmp_path, "train/*.arrow") == ["train/data-00000-of-00001.arrow"]


def test_globs_choose_and_the_rest_is_named(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.parquet", r"no file of .* matches --glob '\*\.parquet'"),
        ("/etc/*", "is not a pattern"),
        ("../*", "no file of"),
        ("", "no file of"),
    ],
)
def test_globs_that_choose_nothing_are_refused(tmp_path: Path, pattern: str, message: str) -> None:
    make(tmp_path, "in/a.jsonl", "beside.txt")
    with pytest.raises(DataError, match=message):
        find_files([tmp_path / "in"], ["*.jsonl", pattern])
    with pytest.raises(DataError, match="no --input is one"):
        find_files([tmp_path / "beside.txt"], ["*.txt"])


def test_hidden_files_and_links_to_folders_are_named(tmp_path: Path) -> None:
    hidden = [f".cache{number}/" for number in (3, 1, 4, 0, 2)]
    make(tmp_path, "in/a.txt", *(f"in/{name}x" for name in hidden), "in/.DS_Store", "elsewhere/b.txt")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "c.txt").symlink_to(tmp_path / "elsewhere" / "b.txt")
    assert found(tmp_path / "in") == ["a.txt", "c.txt"]
    assert left_out(tmp_path / "in") == {HIDDEN: [*sorted(hidden), ".DS_Store"], LINKS: ["link"]}


def test_token_ids_are_no_text(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["a.zip", "b.7z", "c.jsonl.lz4", "d.parquet.gz", "e.xlsx"])
def test_archives_that_are_not_read_are_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "0.jsonl").write_text("broken")
    make(tmp_path, name)
    with pytest.raises(
        DataError, match=f"{name} is an archive or table of a kind that is not read here.*--glob"
    ):
        TextFiles([tmp_path])
    corpus = TextFiles([tmp_path], skip_bad=True)
    assert list(corpus) == []
    assert [str(tmp_path / name)] in corpus.left_out.files.values()


def test_a_binary_file_that_a_person_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_bytes(b"a\0")
    with pytest.raises(DataError, match=r"a\.dat is a binary file, not text"):
        list(TextFiles([tmp_path / "a.dat"]))
    assert list(TextFiles([tmp_path])) == []


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    for name in (b"\xff.txt", b"new\nline.txt", b"\xfe.png"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"\0" if name.endswith(b"png") else b"text")
    corpus = TextFiles([tmp_path])
    assert list(corpus) == ["text", "text"]
    assert corpus.left_out.files == {"binary files": [f"{tmp_path}/\udcfe.png"]}
