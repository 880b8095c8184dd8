"""Find the input files of a corpus.

A file that only describes the data (README.md, LICENSE, dataset_infos.json) is left out if its folder, or one below,
holds data files, by their names or by what the first few others hold; where there are only texts it is a document. The
same goes for members of an archive.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NoReturn

from megastable.base.errors import DataError
from megastable_tools.prepare.file_formats import SNIFFED, format_of, open_content
from megastable_tools.prepare.token_files import LLM_C

DATA = {"json lines", "parquet", "arrow", "csv", "tsv", "tar"}
LOOKED_AT = 8  # files of a folder whose names do not tell what they hold: those of one program are alike

HIDDEN = "hidden files and folders"
LINKS = "links to folders"
SPECIAL = "pipes, sockets and devices"
UNMATCHED = "files that no --glob matches"
ABOUT = "files about the data"
CACHES = "caches of Hugging Face datasets"
TOKENS = "files of token ids, which megastable prepare manifest adopts"

_ABOUT = re.compile(
    r"(readme|licen[cs]e)([-_.][\w-]*)?(\.(md|txt|rst|html))?|"
    r"(copying|notice|citation|changelog|contributing|authors|code_of_conduct|data_?card)(\.(md|txt|rst|html|cff|bib))?|"
    r"dataset_infos?\.json|dataset_dict\.json|state\.json|croissant\.json|tokenizer(_config)?\.json|"
    r"special_tokens_map\.json|_success|(sha\d+|md5)sums?(\.txt)?|checksums?(\.txt)?|.*\.(sha\d+|md5|crc)",
    re.IGNORECASE,
)
_DATATROVE = re.compile(r".*\.ds(\.index|\.metadata|\.loss)?")


@dataclass
class Files:
    """Result of `find_files`: files to read in order, those named by the user, and the others by reason."""

    paths: list[Path] = field(default_factory=list)
    named: set[Path] = field(default_factory=set)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def leave_out(self, reason: str, path: Path | str) -> None:
        self.left_out.setdefault(reason, []).append(str(path))


def find_files(inputs: Sequence[Path], globs: Sequence[str] = (), as_text: bool = False) -> Files:
    """The files of `inputs` in their order; folders recursively, sorted by path.

    With `globs`, a folder contributes only matching files: `pathlib` patterns, for names in any folder below
    (`*.jsonl`) or, with a slash, relative to the folder (`train/**/*.parquet`). Links to folders are not followed.
    as_text: as for `TextFiles`.
    Raises DataError for a missing input, a named file of token ids, and globs that match nothing.
    """
    found, unmatched = Files(), set(globs)
    folders = [path for path in inputs if path.is_dir()]
    for path in inputs:
        if path.is_dir():
            unmatched -= _add_folder(found, path, globs, as_text)
        elif not path.exists():
            raise DataError(f"the input {path} does not exist")
        elif _is_tokens(path):
            raise DataError(
                f"{path} holds token ids, not text: adopt it with megastable prepare manifest {path.parent}"
            )
        else:
            found.paths.append(path)
            found.named.add(path)
    if globs and not folders:
        raise DataError("--glob chooses files of a folder, and no --input is one: leave it out")
    if unmatched:
        raise DataError(
            f"no file of {', '.join(map(str, folders[:3]))} matches --glob {sorted(unmatched)[0]!r}: correct it"
        )
    return found


def _add_folder(found: Files, folder: Path, globs: Sequence[str], as_text: bool) -> set[str]:
    """Returns the globs that match a file."""
    paths = sorted(_walk(folder, found), key=lambda file: file.relative_to(folder).parts)
    datasets = {path.parent for path in paths if path.name in ("state.json", "dataset_info.json")}
    matching = {pattern: set(_matches(folder, pattern)).intersection(paths) for pattern in globs}
    if globs:
        matched = set[Path]().union(*matching.values())
        for path in paths:
            if path not in matched:
                found.leave_out(UNMATCHED, path)
        paths = [path for path in paths if path in matched]
    with_data = {parent for path in paths if is_data(path.name) for parent in path.parents}
    about = {path.parent for path in paths if is_about_data(path.name)}
    if not as_text:
        with_data |= _find_unnamed_data(paths, about - with_data)
    for path in paths:
        if _is_tokens(path):
            found.leave_out(TOKENS, path)
        elif is_about_data(path.name) and path.parent in with_data:
            found.leave_out(ABOUT, path)
        elif path.match("cache-*.arrow") and path.parent in datasets:
            found.leave_out(CACHES, path)
        else:
            found.paths.append(path)
    return {pattern for pattern, files in matching.items() if files}


def is_data(name: str) -> bool:
    """Whether a file holds documents, by its name."""
    return format_of(name).kind in DATA and not is_about_data(name)


def _find_unnamed_data(paths: Sequence[Path], folders: set[Path]) -> set[Path]:
    """Those of `folders` that hold data under names that do not tell, in themselves or below."""
    looks, found = Counter[Path](), set[Path]()
    for path in paths if folders else ():
        wanting = [parent for parent in path.parents if parent in folders and looks[parent] < LOOKED_AT]
        if wanting and format_of(path.name).kind == "text" and not is_about_data(path.name):
            looks.update(wanting)
            if _file_holds_data(path):
                found.update(wanting)
    return found


def _file_holds_data(path: Path) -> bool:
    if not path.is_file():
        return False  # a pipe can be read once
    try:
        with path.open("rb") as file:
            return holds_data(str(path), iter(partial(file.read, SNIFFED), b""))
    except OSError:
        return False  # it is raised again on reading


def holds_data(name: str, chunks: Iterable[bytes]) -> bool:
    """Whether a file whose name does not tell holds records or a table, by its first bytes."""
    form = format_of(name)
    if form.kind != "text" or is_about_data(PurePosixPath(name).name):
        return False
    try:
        return open_content(name, form, chunks).recognised
    except DataError:
        return False  # as for OSError


def is_datatrove(name: str) -> bool:
    """Whether a file is part of a datatrove shard, by its name."""
    return _DATATROVE.fullmatch(name) is not None


def is_about_data(name: str) -> bool:
    """Whether a file describes data, by its name; a table such as licenses.csv or readme.parquet is data itself."""
    kind = format_of(name).kind
    return _ABOUT.fullmatch(name) is not None and (kind == "text" or name.lower().endswith(".json"))


def _matches(folder: Path, pattern: str) -> Iterator[Path]:
    try:
        yield from folder.glob(pattern) if "/" in pattern else folder.rglob(pattern)
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"--glob {pattern!r} is not a pattern for files of a folder: {error}") from error


def _walk(folder: Path, found: Files) -> Iterator[Path]:
    def refuse(error: OSError) -> NoReturn:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders.sort()  # left-out files are reported in this order
        for name in folders:
            if name.startswith("."):
                found.leave_out(HIDDEN, f"{Path(parent, name)}/")
            elif Path(parent, name).is_symlink():
                found.leave_out(LINKS, Path(parent, name))
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in sorted(names):
            path = Path(parent, name)
            if name.startswith("."):
                found.leave_out(HIDDEN, path)
            elif path.is_file() or not path.exists():  # a broken link is lost data and refused on reading
                yield path
            else:
                found.leave_out(SPECIAL, path)  # they would block


def _is_tokens(path: Path) -> bool:
    """Whether a file is part of a datatrove or Megatron shard, or one of llm.c's."""
    if is_datatrove(path.name):
        return True
    if path.suffix not in (".bin", ".idx"):
        return False
    if path.with_suffix(".idx").is_file() and path.with_suffix(".bin").is_file():
        return True
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError:
        return False  # the error is raised on reading
    return len(head) == 4 and struct.unpack("<i", head)[0] in LLM_C
