"""Read documents from files: plain text, JSON lines, tables and archives, compressed or not.

The file name's ending decides: `.jsonl`, `.ndjson` and `.json` hold one JSON object per line; `.parquet`, `.arrow`,
`.feather`, `.csv` and `.tsv` a table; `.tar` files of all these (except Parquet) or the samples of a WebDataset. `.gz`,
`.zst`, `.xz` and `.bz2` may follow each except Parquet. Any other name says nothing: the content decides whether the
file is JSON lines, Arrow or one document, and what is recognised but not read so is refused.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from megastable.base.errors import DataError
from megastable_tools.prepare.archive import (
    ArchiveSample,
    Member,
    is_webdataset,
    members,
    samples,
    split_name,
    text_endings,
)
from megastable_tools.prepare.decompress import decompress
from megastable_tools.prepare.file_formats import (
    SNIFFED,
    FileFormat,
    Kind,
    find_records,
    format_of,
    open_content,
)
from megastable_tools.prepare.input_files import (
    ABOUT,
    HIDDEN,
    TOKENS,
    find_files,
    holds_data,
    is_about_data,
    is_data,
    is_datatrove,
)
from megastable_tools.prepare.left_out import CountedFiles
from megastable_tools.prepare.table_files import Cells, Flaw, arrow_cells, csv_cells, parquet_cells

CHUNK = 1 << 20  # bytes read at a time
AS_TEXT = "read every file whose name does not tell its format as one text with --as-text"
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
        self.total_bytes = sum(path.stat().st_size for path in self.files if path.exists())
        self.read_bytes = 0
        self._reading, self._recognised = "", False
        self.left_out, self.read = CountedFiles(self._found.left_out), CountedFiles()
        for path in self.files:  # fail before hours are spent on the others
            if format_of(path.name).kind == "unread":
                self._unread(str(path))

    def __iter__(self) -> Iterator[str]:
        self.read_bytes = 0
        self.left_out, self.read = CountedFiles(self._found.left_out), CountedFiles()
        for path in self.files:
            self._reading, self._recognised = str(path), False
            try:
                for text in self._documents(path):
                    if text:
                        yield text
                    else:
                        self.left_out.document("empty documents")
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror or error}") from error

    def _documents(self, path: Path) -> Iterator[str]:
        where, form = str(path), format_of(path.name)
        if form.kind == "parquet":
            self._count("parquet", where)
            yield from self._rows(where, self._parquet(path))
        elif form.kind == "tar":
            self._count("tar", where)
            yield from self._archive(path, form)
        else:
            yield from self._content(
                where, form, self._chunks(path, self._consumed), path in self._found.named
            )

    def _content(
        self,
        where: str,
        form: FileFormat,
        chunks: Iterable[bytes],
        named: bool = False,
        group: str | None = None,
    ) -> Iterator[str]:
        """The documents of a file or member. named: the user named it. group: as for `CountedFiles.file`."""
        if form.kind in ("unread", "parquet", "tar"):
            self._unread(where, group)
            return
        kind, chunks, self._recognised, unread = open_content(where, form, chunks, self.as_text)
        if kind == "text":
            yield from self._whole(where, chunks, named, group)
        elif kind == "unread":
            self._misnamed(where, unread, group)
        else:
            self._count(kind, where)
            if kind == "json lines":
                yield from self._json_lines(where, chunks)
            elif kind == "arrow":
                yield from self._rows(where, arrow_cells(where, chunks, self.key))
            else:
                yield from self._rows(
                    where, csv_cells(where, chunks, self.key, "," if kind == "csv" else "\t")
                )

    def _count(self, kind: Kind, where: str) -> None:
        if self._recognised:
            self.read.file(READ[kind] + BY_CONTENT, where, group=where.rpartition("/")[0])
        else:
            self.read.file(READ[kind], where, group=kind)

    def _consumed(self, count: int) -> None:
        self.read_bytes += count

    def _chunks(self, path: Path, consumed: Callable[[int], None]) -> Iterator[bytes]:
        # Unbuffered: a buffered read of a slow pipe waits for a whole chunk and ignores Ctrl-C.
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK):
                consumed(len(chunk))
                yield chunk

    def _archive(self, path: Path, form: FileFormat) -> Iterator[str]:
        where = str(path)

        def opened(consumed: Callable[[int], None], note: Callable[[str], None]) -> Iterator[Member]:
            chunks = self._chunks(path, consumed)
            return members(where, decompress(where, chunks, form.codec) if form.codec else chunks, note)

        # The archive is opened twice, to examine its first members. A pipe cannot be: there each member is a file.
        webdataset = path.is_file() and is_webdataset(opened(_ignore, _ignore), self.key)
        found = opened(self._consumed, lambda name: self.left_out.file(NOT_PLAIN, f"{where}!{name}"))
        if webdataset:
            for sample in samples(found):
                yield from self._sample(where, sample)
            return
        # In a pipe only the data read so far is known.
        folders = _DataFolders(opened(_ignore, _ignore) if path.is_file() else iter(()), self.as_text)
        for name, chunks in found:
            inside = PurePosixPath(name)
            group = f"{where}!{inside.suffix}"
            folders.add(inside)
            if _is_hidden(inside):
                self.left_out.file(HIDDEN, f"{where}!{name}", group=where)
            elif is_datatrove(inside.name):
                self.left_out.file(TOKENS, f"{where}!{name}", group)
            elif is_about_data(inside.name) and inside.parent in folders:
                self.left_out.file(ABOUT, f"{where}!{name}", group)
            else:
                yield from self._content(f"{where}!{name}", format_of(name), chunks, group=group)

    def _sample(self, where: str, sample: ArchiveSample) -> Iterator[str]:
        endings, parts = text_endings(self.key), dict[str, tuple[str, bytes]]()
        for name, chunks in sample.members:
            ending = split_name(name)[1]
            if ending not in endings:
                self.left_out.file(OTHER_PARTS, f"{where}!{name}", group=f"{where}!{ending}")
            elif ending in parts:
                self._bad(f"{where}!{name}", "there twice in one sample")
            else:
                parts[ending] = name, b"".join(chunks)
        for ending in endings:
            if ending in parts:
                name, content = parts.pop(ending)
                for other, (unused, _) in parts.items():
                    self.left_out.file(OTHER_PARTS, f"{where}!{unused}", group=f"{where}!{other}")
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
        content = bytearray()
        for chunk in chunks:
            content += chunk
            if b"\0" in content[:SNIFFED] and not is_utf16(bytes(content[:SNIFFED])):
                if named and not self.skip_bad:
                    raise DataError(f"{where} is a binary file, not text: leave it out, or give its text")
                self.left_out.file(BINARY, where, group)
                return
        text = self._decode(where, bytes(content))
        if text == "":
            self.left_out.file(EMPTY, where, group)
        elif text is not None and not self.as_text and (records := find_records(text, self.key)):
            self._misnamed(where, records, group)
        elif text is not None:
            self._count("text", where)
            yield text

    def _json_lines(self, path: str, chunks: Iterable[bytes]) -> Iterator[str]:
        for number, raw in enumerate(_lines(chunks), start=1):
            where = f"{path}:{number}"
            line = self._decode(where, raw)
            if line is not None and line.strip():
                yield from self._record(where, line)

    def _record(self, where: str, line: str) -> Iterator[str]:
        """The text of one JSON object."""
        lines = " (jq -c '.[]' makes lines of an array)" if line.lstrip().startswith("[") else ""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            self._bad(where, f"not one JSON object per line ({error}){lines}")
            return
        if not isinstance(record, dict):
            self._bad(where, f"not one JSON object per line (a {type(record).__name__}){lines}")
            return
        if self.key not in record:
            keys = ", ".join(map(repr, list(record)[:8])) or "none"
            self._bad(where, f"no key {self.key!r} (its keys: {keys}), name another with --key")
            return
        text = record[self.key]
        if not isinstance(text, str):
            self._bad(where, f"{self.key!r} is {type(text).__name__}, not text")
        elif not _is_unicode(text):
            self._bad(where, f"{self.key!r} contains half of a surrogate pair")
        else:
            yield text

    def _parquet(self, path: Path) -> Cells:
        before, size = self.read_bytes, path.stat().st_size
        for cell, share in parquet_cells(path, self.key):
            self.read_bytes = before + int(size * share)
            yield cell

    def _rows(self, path: str, cells: Cells) -> Iterator[str]:
        for row, cell in enumerate(cells, start=1):
            where = f"{path}: row {row}"
            if isinstance(cell, Flaw):
                self._bad(where, cell.problem)
            elif (text := self._decode(where, cell)) is not None:
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
        self.left_out.file(BAD, where, group=self._reading)  # the first of each file, and how many more

    def _unread(self, where: str, group: str | None = None) -> None:
        if not self.skip_bad:
            raise DataError(
                f"{where} is an archive or table of a kind that is not read here: unpack or convert it (to JSON lines "
                "or Parquet), choose other files with --glob, or leave it out with --skip-bad"
            )
        self.left_out.file(NOT_READ, where, group)

    def _misnamed(self, where: str, holds: str, group: str | None) -> None:
        """A file whose name does not tell what it holds, which is not a text."""
        if not self.skip_bad:
            raise DataError(
                f"{where} holds {holds}, which its name does not tell: convert or rename it, choose other files with "
                f"--glob, leave such files out with --skip-bad, or {AS_TEXT}"
            )
        self.left_out.file(NOT_READ, where, group)


class _DataFolders:
    """The folders of an archive with data files in or below them; reads only as many members as needed."""

    def __init__(self, members: Iterator[Member], as_text: bool) -> None:
        self._members, self._as_text, self._found = members, as_text, set[PurePosixPath]()

    def add(self, path: PurePosixPath) -> None:
        if is_data(path.name) and not _is_hidden(path):
            self._found.update(path.parents)

    def __contains__(self, folder: PurePosixPath) -> bool:
        while folder not in self._found and (member := next(self._members, None)) is not None:
            path = PurePosixPath(member.name)
            self.add(path)
            if not (self._as_text or _is_hidden(path)) and holds_data(member.name, member.chunks):
                self._found.update(path.parents)
        return folder in self._found


def _is_hidden(member: PurePosixPath) -> bool:
    return any(part.startswith(".") and part != ".." for part in member.parts)


def _ignore(what: object) -> None:
    pass


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest.append(first)
        if others:
            yield b"".join(rest)
            yield from others[:-1]
            rest = [others[-1]]
    yield b"".join(rest)


def is_utf16(head: bytes) -> bool:
    """Whether a file is UTF-16 text by its first bytes: a byte order mark, and characters."""
    if not head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return False
    text = head[: len(head) // 2 * 2].decode("utf-16", errors="ignore")
    return "\0" not in text and len(text) > len(head) // 4


def _is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8; JSON can contain half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
