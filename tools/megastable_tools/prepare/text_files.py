"""Find the input files of a corpus, and read their documents: plain text, JSON lines, tables and archives, compressed
or not.

The file name's ending decides: `.jsonl`, `.ndjson` and `.json` hold one JSON object per line; `.parquet`, `.arrow`,
`.feather`, `.csv` and `.tsv` a table; `.tar` files of all these (except Parquet) or the samples of a WebDataset. `.gz`,
`.zst`, `.xz` and `.bz2` may follow each except Parquet. Any other name says nothing: the content decides whether the
file is JSON lines, Arrow or one document, and what is recognised but not read so is refused.

A file that only describes the data (README.md, LICENSE, dataset_infos.json) is left out if its folder, or one below,
holds data files, by their names or by what the first few others hold; where there are only texts it is a document. The
same goes for members of an archive.
"""

from __future__ import annotations

import json
import os
import re
import struct
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NoReturn

from megastable.base.errors import DataError
from megastable_tools.prepare.file_formats import (
    SNIFFED,
    FileFormat,
    Kind,
    decompress_chunks,
    find_records,
    format_of,
    open_content,
)
from megastable_tools.prepare.file_readers import (
    ArchiveSample,
    Cells,
    Flaw,
    Member,
    arrow_cells,
    csv_cells,
    group_samples,
    is_webdataset,
    parquet_cells,
    read_members,
    split_name,
    text_endings,
)
from megastable_tools.prepare.reporting import CountedFiles
from megastable_tools.prepare.token_files import LLM_C

CHUNK = 1 << 20  # bytes read at a time
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can contain half of a pair, which UTF-8 cannot
AS_TEXT = "read every file whose name does not tell its format as one text with --as-text"
UNREAD = (
    "is an archive or table of a kind that is not read here: unpack or convert it (to JSON lines or Parquet), choose "
    "other files with --glob, or leave it out with --skip-bad"
)
MISNAMED = (
    "holds {}, which its name does not tell: convert or rename it, choose other files with --glob, leave such files "
    f"out with --skip-bad, or {AS_TEXT}"
)
READ: dict[Kind, str] = {
    "text": "texts, one document each",
    "json lines": "files of JSON lines",
    "parquet": "Parquet tables",
    "arrow": "Arrow tables",
    "csv": "CSV tables",
    "tsv": "TSV tables",
    "tar": "tar archives",
}
BY_CONTENT = ", told by their content"

BINARY = "binary files"
EMPTY = "empty files"
BAD = "bad documents"
NOT_READ = "archives and tables of kinds that are not read"
NOT_PLAIN = "links, devices and sparse files in archives"
OTHER_PARTS = "other parts of WebDataset samples"


class TextFiles:
    """The documents of files and folders, in order, for any number of iterations; none is empty.

    inputs, globs: as for `find_files`. An unusable document (broken JSON, no text under `key`, not UTF-8)
    raises a DataError that names file and line; with `skip_bad` it is left out and counted. So is a binary file
    named in `inputs`, or a file with documents in an unsupported format. A file that is damaged or ends too early
    always raises.

    as_text: a file whose name does not tell its format is one document, also if its content does.

    `total_bytes` is the size of the files, `read_bytes` how much of it the current iteration has consumed,
    `left_out` lists what was left out, by reason; for bad documents the first of each file, and how many more.
    `read` lists how the others were read: the first of each folder that its content told, else of each kind.
    """

    def __init__(
        self,
        inputs: Sequence[Path],
        key: str = "text",
        skip_bad: bool = False,
        globs: Sequence[str] = (),
        as_text: bool = False,
    ) -> None:
        self._found = find_files(inputs, globs, as_text)
        self.files, self.key, self.skip_bad, self.as_text = self._found.paths, key, skip_bad, as_text
        self.total_bytes = sum(input_path.stat().st_size for input_path in self.files if input_path.exists())
        self.read_bytes = 0
        self._reading, self._recognised = "", False
        self.left_out, self.read = CountedFiles(self._found.left_out), CountedFiles()
        for input_path in self.files:  # fail before hours are spent on the others
            if format_of(input_path.name).kind == "unread":
                self._leave_unread(str(input_path), UNREAD)

    def __iter__(self) -> Iterator[str]:
        self.read_bytes = 0
        self.left_out, self.read = CountedFiles(self._found.left_out), CountedFiles()
        for file_path in self.files:
            self._reading, self._recognised = str(file_path), False
            try:
                for text in self._documents(file_path):
                    if text:
                        yield text
                    else:
                        self.left_out.count_document("empty documents")
            except OSError as error:
                raise DataError(f"{file_path} cannot be read: {error.strerror or error}") from error

    def _documents(self, path: Path) -> Iterator[str]:
        path_text, file_format = str(path), format_of(path.name)
        if file_format.kind == "parquet":
            self._count("parquet", path_text)
            yield from self._rows(path_text, self._parquet(path))
        elif file_format.kind == "tar":
            self._count("tar", path_text)
            yield from self._archive(path, file_format)
        else:
            yield from self._content(
                path_text, file_format, self._chunks(path, self._consumed), path in self._found.named
            )

    def _content(
        self,
        where: str,
        form: FileFormat,
        chunks: Iterable[bytes],
        named: bool = False,
        group: str | None = None,
    ) -> Iterator[str]:
        """The documents of a file or member. named: the user named it. group: as for `CountedFiles.count_file`."""
        if form.kind in ("unread", "parquet", "tar"):
            self._leave_unread(where, UNREAD, group)
            return
        kind, chunks, self._recognised, unread_kind = open_content(where, form, chunks, self.as_text)
        if kind == "text":
            yield from self._whole(where, chunks, named, group)
        elif kind == "unread":
            self._leave_unread(where, MISNAMED.format(unread_kind), group)
        else:
            self._count(kind, where)
            if kind == "json lines":
                for line_number, raw_line in enumerate(_lines(chunks), start=1):
                    line_place = f"{where}:{line_number}"
                    line = self._decode(line_place, raw_line)
                    if line is not None and line.strip():
                        yield from self._record(line_place, line)
            elif kind == "arrow":
                yield from self._rows(where, arrow_cells(where, chunks, self.key))
            else:
                yield from self._rows(
                    where, csv_cells(where, chunks, self.key, "," if kind == "csv" else "\t")
                )

    def _count(self, kind: Kind, where: str) -> None:
        if self._recognised:
            self.read.count_file(READ[kind] + BY_CONTENT, where, group=where.rpartition("/")[0])
        else:
            self.read.count_file(READ[kind], where, group=kind)

    def _consumed(self, count: int) -> None:
        self.read_bytes += count

    def _chunks(self, path: Path, consumed: Callable[[int], None]) -> Iterator[bytes]:
        # Unbuffered: a buffered read of a slow pipe waits for a whole chunk and ignores Ctrl-C.
        with path.open("rb", buffering=0) as input_file:
            while chunk := input_file.read(CHUNK):
                consumed(len(chunk))
                yield chunk

    def _archive(self, path: Path, form: FileFormat) -> Iterator[str]:
        where = str(path)

        def opened(consumed: Callable[[int], None], note: Callable[[str], None]) -> Iterator[Member]:
            chunks = self._chunks(path, consumed)
            return read_members(
                where, decompress_chunks(where, chunks, form.codec) if form.codec else chunks, note
            )

        # The archive is opened twice, to examine its first members. A pipe cannot be: there each member is a file.
        is_samples = path.is_file() and is_webdataset(opened(_ignore, _ignore), self.key)
        found_members = opened(
            self._consumed, lambda name: self.left_out.count_file(NOT_PLAIN, f"{where}!{name}")
        )
        if is_samples:
            for sample in group_samples(found_members):
                yield from self._sample(where, sample)
            return
        # In a pipe only the data read so far is known.
        data_folders = _DataFolders(opened(_ignore, _ignore) if path.is_file() else iter(()), self.as_text)
        for name, chunks in found_members:
            inside_path = PurePosixPath(name)
            name_group = f"{where}!{inside_path.suffix}"
            data_folders.add(inside_path)
            if _is_hidden(inside_path):
                self.left_out.count_file(HIDDEN, f"{where}!{name}", group=where)
            elif DATATROVE.fullmatch(inside_path.name):
                self.left_out.count_file(TOKENS, f"{where}!{name}", name_group)
            elif is_about_data(inside_path.name) and inside_path.parent in data_folders:
                self.left_out.count_file(ABOUT, f"{where}!{name}", name_group)
            else:
                yield from self._content(f"{where}!{name}", format_of(name), chunks, group=name_group)

    def _sample(self, where: str, sample: ArchiveSample) -> Iterator[str]:
        endings, part_by_ending = text_endings(self.key), dict[str, tuple[str, bytes]]()
        for name, chunks in sample.members:
            ending = split_name(name)[1]
            if ending not in endings:
                self.left_out.count_file(OTHER_PARTS, f"{where}!{name}", group=f"{where}!{ending}")
            elif ending in part_by_ending:
                self._bad(f"{where}!{name}", "there twice in one sample")
            else:
                part_by_ending[ending] = name, b"".join(chunks)
        for ending in endings:
            if ending in part_by_ending:
                name, content = part_by_ending.pop(ending)
                for other_ending, (unused_name, _) in part_by_ending.items():
                    self.left_out.count_file(
                        OTHER_PARTS, f"{where}!{unused_name}", group=f"{where}!{other_ending}"
                    )
                text = self._decode(f"{where}!{name}", content)
                if text is not None and (ending != "json" or self.key == "json"):
                    yield text
                elif text is not None:
                    yield from self._record(f"{where}!{name}", text)
                return
        self._bad(
            f"{where}!{sample.key}",
            f"a sample without {' or '.join('.' + ending for ending in endings)}, name another with --key",
        )

    def _whole(self, where: str, chunks: Iterable[bytes], named: bool, group: str | None) -> Iterator[str]:
        file_content = bytearray()
        for chunk in chunks:
            file_content += chunk
            if b"\0" in file_content[:SNIFFED] and not is_utf16(bytes(file_content[:SNIFFED])):
                if named and not self.skip_bad:
                    raise DataError(f"{where} is a binary file, not text: leave it out, or give its text")
                self.left_out.count_file(BINARY, where, group)
                return
        text = self._decode(where, bytes(file_content))
        if text == "":
            self.left_out.count_file(EMPTY, where, group)
        elif text is not None and not self.as_text and (record_kind := find_records(text, self.key)):
            self._leave_unread(where, MISNAMED.format(record_kind), group)
        elif text is not None:
            self._count("text", where)
            yield text

    def _record(self, where: str, line: str) -> Iterator[str]:
        """The text of one JSON object."""
        lines_hint = " (jq -c '.[]' makes lines of an array)" if line.lstrip().startswith("[") else ""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            self._bad(where, f"not one JSON object per line ({error}){lines_hint}")
            return
        if not isinstance(record, dict):
            self._bad(where, f"not one JSON object per line (a {type(record).__name__}){lines_hint}")
            return
        if self.key not in record:
            key_names = ", ".join(map(repr, list(record)[:8])) or "none"
            self._bad(where, f"no key {self.key!r} (its keys: {key_names}), name another with --key")
            return
        text = record[self.key]
        if not isinstance(text, str):
            self._bad(where, f"{self.key!r} is {type(text).__name__}, not text")
        elif not text.isascii() and SURROGATE.search(text):
            self._bad(where, f"{self.key!r} contains half of a surrogate pair")
        else:
            yield text

    def _parquet(self, path: Path) -> Cells:
        bytes_before, file_bytes = self.read_bytes, path.stat().st_size
        for cell, share_read in parquet_cells(path, self.key):
            self.read_bytes = bytes_before + int(file_bytes * share_read)
            yield cell

    def _rows(self, path: str, cells: Cells) -> Iterator[str]:
        for row_number, cell in enumerate(cells, start=1):
            row_place = f"{path}: row {row_number}"
            if isinstance(cell, Flaw):
                self._bad(row_place, cell.problem)
            elif (text := self._decode(row_place, cell)) is not None:
                yield text

    def _decode(self, where: str, raw: bytes) -> str | None:
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            utf16 = "; it is UTF-16, which iconv -f UTF-16 -t UTF-8 converts" if is_utf16(raw) else ""
            self._bad(where, f"not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x}){utf16}")
            return None

    def _bad(self, where: str, problem: str) -> None:
        if not self.skip_bad:
            as_text = f", or {AS_TEXT}" if self._recognised else ""
            raise DataError(
                f"{where}: {problem}; correct it, or leave such documents out with --skip-bad{as_text}"
            )
        self.left_out.count_file(BAD, where, group=self._reading)  # the first of each file, and how many more

    def _leave_unread(self, where: str, problem: str, group: str | None = None) -> None:
        if not self.skip_bad:
            raise DataError(f"{where} {problem}")
        self.left_out.count_file(NOT_READ, where, group)


class _DataFolders:
    """The folders of an archive with data files in or below them; reads only as many members as needed."""

    def __init__(self, members: Iterator[Member], as_text: bool) -> None:
        self._members, self._as_text, self._found = members, as_text, set[PurePosixPath]()

    def add(self, path: PurePosixPath) -> None:
        if is_data(path.name) and not _is_hidden(path):
            self._found.update(path.parents)

    def __contains__(self, folder: PurePosixPath) -> bool:
        while folder not in self._found and (member := next(self._members, None)) is not None:
            member_path = PurePosixPath(member.name)
            self.add(member_path)
            if not (self._as_text or _is_hidden(member_path)) and holds_data(member.name, member.chunks):
                self._found.update(member_path.parents)
        return folder in self._found


def _is_hidden(member: PurePosixPath) -> bool:
    return any(path_part.startswith(".") and path_part != ".." for path_part in member.parts)


def _ignore(what: object) -> None:
    pass


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    line_parts: list[bytes] = []
    for chunk in chunks:
        first_line, *other_lines = chunk.split(b"\n")
        line_parts.append(first_line)
        if other_lines:
            yield b"".join(line_parts)
            yield from other_lines[:-1]
            line_parts = [other_lines[-1]]
    yield b"".join(line_parts)


def is_utf16(head: bytes) -> bool:
    """Whether a file is UTF-16 text by its first bytes: a byte order mark, and characters."""
    if not head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return False
    decoded_text = head[: len(head) // 2 * 2].decode("utf-16", errors="ignore")
    return "\0" not in decoded_text and len(decoded_text) > len(head) // 4


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
DATATROVE = re.compile(r".*\.ds(\.index|\.metadata|\.loss)?")


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
    found_files, unmatched = Files(), set(globs)
    folders = [input_path for input_path in inputs if input_path.is_dir()]
    for input_path in inputs:
        if input_path.is_dir():
            unmatched -= _add_folder(found_files, input_path, globs, as_text)
        elif not input_path.exists():
            raise DataError(f"the input {input_path} does not exist")
        elif _is_tokens(input_path):
            raise DataError(
                f"{input_path} holds token ids, not text: adopt it with megastable prepare manifest {input_path.parent}"
            )
        else:
            found_files.paths.append(input_path)
            found_files.named.add(input_path)
    if globs and not folders:
        raise DataError("--glob chooses files of a folder, and no --input is one: leave it out")
    if unmatched:
        raise DataError(
            f"no file of {', '.join(map(str, folders[:3]))} matches --glob {sorted(unmatched)[0]!r}: correct it"
        )
    return found_files


def _add_folder(found: Files, folder: Path, globs: Sequence[str], as_text: bool) -> set[str]:
    """Returns the globs that match a file."""
    folder_paths = sorted(_walk(folder, found), key=lambda file: file.relative_to(folder).parts)
    dataset_folders = {
        folder_path.parent
        for folder_path in folder_paths
        if folder_path.name in ("state.json", "dataset_info.json")
    }
    paths_by_pattern = {
        pattern: set(_matches(folder, pattern)).intersection(folder_paths) for pattern in globs
    }
    if globs:
        matched_paths = set[Path]().union(*paths_by_pattern.values())
        for folder_path in folder_paths:
            if folder_path not in matched_paths:
                found.leave_out(UNMATCHED, folder_path)
        folder_paths = [folder_path for folder_path in folder_paths if folder_path in matched_paths]
    with_data = {
        parent for folder_path in folder_paths if is_data(folder_path.name) for parent in folder_path.parents
    }
    about_folders = {folder_path.parent for folder_path in folder_paths if is_about_data(folder_path.name)}
    if not as_text:
        with_data |= _find_unnamed_data(folder_paths, about_folders - with_data)
    for folder_path in folder_paths:
        if _is_tokens(folder_path):
            found.leave_out(TOKENS, folder_path)
        elif is_about_data(folder_path.name) and folder_path.parent in with_data:
            found.leave_out(ABOUT, folder_path)
        elif folder_path.match("cache-*.arrow") and folder_path.parent in dataset_folders:
            found.leave_out(CACHES, folder_path)
        else:
            found.paths.append(folder_path)
    return {pattern for pattern, files in paths_by_pattern.items() if files}


def is_data(name: str) -> bool:
    """Whether a file holds documents, by its name."""
    return format_of(name).kind in DATA and not is_about_data(name)


def _find_unnamed_data(paths: Sequence[Path], folders: set[Path]) -> set[Path]:
    """Those of `folders` that hold data under names that do not tell, in themselves or below."""
    looks, found_folders = Counter[Path](), set[Path]()
    for path in paths if folders else ():
        wanting = [parent for parent in path.parents if parent in folders and looks[parent] < LOOKED_AT]
        if wanting and format_of(path.name).kind == "text" and not is_about_data(path.name):
            looks.update(wanting)
            if not path.is_file():
                continue  # a pipe can be read once
            with suppress(OSError), path.open("rb") as unnamed_file:  # it is raised again on reading
                if holds_data(str(path), iter(partial(unnamed_file.read, SNIFFED), b"")):
                    found_folders.update(wanting)
    return found_folders


def holds_data(name: str, chunks: Iterable[bytes]) -> bool:
    """Whether a file whose name does not tell holds records or a table, by its first bytes."""
    file_format = format_of(name)
    if file_format.kind != "text" or is_about_data(PurePosixPath(name).name):
        return False
    try:
        return open_content(name, file_format, chunks).recognised
    except DataError:
        return False  # as for OSError


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

    for parent, folders, file_names in os.walk(folder, onerror=refuse):
        folders.sort()  # left-out files are reported in this order
        for entry_name in folders:
            if entry_name.startswith("."):
                found.leave_out(HIDDEN, f"{Path(parent, entry_name)}/")
            elif Path(parent, entry_name).is_symlink():
                found.leave_out(LINKS, Path(parent, entry_name))
        folders[:] = [entry_name for entry_name in folders if not entry_name.startswith(".")]
        for entry_name in sorted(file_names):
            path = Path(parent, entry_name)
            if entry_name.startswith("."):
                found.leave_out(HIDDEN, path)
            elif path.is_file() or not path.exists():  # a broken link is lost data and refused on reading
                yield path
            else:
                found.leave_out(SPECIAL, path)  # they would block


def _is_tokens(path: Path) -> bool:
    """Whether a file is part of a datatrove or Megatron shard, or one of llm.c's."""
    if DATATROVE.fullmatch(path.name):
        return True
    if path.suffix not in (".bin", ".idx"):
        return False
    if path.with_suffix(".idx").is_file() and path.with_suffix(".bin").is_file():
        return True
    try:
        with path.open("rb") as file:
            first_bytes = file.read(4)
    except OSError:
        return False  # the error is raised on reading
    return len(first_bytes) == 4 and struct.unpack("<i", first_bytes)[0] in LLM_C
