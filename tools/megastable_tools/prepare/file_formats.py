"""Tell what a file holds: by its name, and where the name says nothing, by its first bytes.

Spark writes JSON lines as `part-00000`, WikiExtractor as `AA/wiki_00`, others as `.jl` or `.jsonl.0001`: read as text,
each would be one document of raw JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

from megastable_tools.prepare.decompress import DECODERS, decompress

Kind = Literal["text", "json lines", "parquet", "arrow", "csv", "tsv", "tar", "unread"]
KINDS: dict[str, Kind] = {
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".json": "json lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tar": "tar",
}
SHORT = {".tgz": ".gz", ".tbz": ".bz2", ".tbz2": ".bz2", ".txz": ".xz", ".tzst": ".zst"}  # of .tar.gz, ...
# They hold documents, which would be lost silently.
UNREAD = {
    ".zip",
    ".7z",
    ".rar",
    ".lz4",
    ".lz",
    ".lzo",
    ".br",
    ".sz",
    ".z",
    ".orc",
    ".avro",
    ".xls",
    ".xlsx",
    ".ods",
}
SNIFFED = 8192  # bytes looked at
LAYERS = 3  # of compression that no name tells of: a file can hold itself, compressed

_COMPRESSED = re.compile(
    rb"(?P<gz>\x1f\x8b\x08)|(?P<zst>\x28\xb5\x2f\xfd)|(?P<xz>\xfd7zXZ\0)|(?P<bz2>BZh[1-9]1AY&SY)"
)
# An Arrow file, or a stream: a mark, the length of the schema (below 16 MiB), and where its table begins.
_ARROW = re.compile(rb"ARROW1\0\0|\xff{4}.{3}\0\x10\0\0\0", re.DOTALL)
_UNREAD: list[tuple[re.Pattern[bytes], str]] = [
    (re.compile(rb"PAR1\x15"), "Parquet (rename it to .parquet)"),
    (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive (rename it to .tar)"),
    (re.compile(rb"Obj\x01"), "Avro"),
    (re.compile(rb"ORC.*\0", re.DOTALL), "ORC"),
    (re.compile(rb"SEQ[\x04-\x06]"), "a SequenceFile of Hadoop"),
    (re.compile(rb"SQLite format 3\0"), "an SQLite database"),
    (re.compile(rb"\x89HDF\r\n\x1a\n"), "HDF5"),
    (re.compile(rb"WARC/\d"), "a web archive (WARC)"),
    (re.compile(rb"\x04\x22\x4d\x18|\xff\x06\0\0sNaPpY|7z\xbc\xaf\x27\x1c|Rar!\x1a\x07"), "an archive"),
]
# An object, as a line of JSON begins; {"key": ... with nothing but spaces inside.
_OBJECT = re.compile(rb'[ \t]*\{[ \t]*"(?:[^"\\\n]|\\.)*"[ \t]*:')

_BLANK = "\x1e \t\r\n"  # before a JSON text; the first one in text sequences (RFC 7464)


class FileFormat(NamedTuple):
    """How to read a file's bytes: `codec` is an ending of DECODERS, or "" for plain bytes."""

    kind: Kind
    codec: str


class Content(NamedTuple):
    """A file's content: its kind, the decompressed bytes, whether they, not the name, told the kind, and for the kind
    "unread" what it is."""

    kind: Kind
    chunks: Iterable[bytes]
    recognised: bool = False
    unread: str = ""


def format_of(name: str) -> FileFormat:
    """The format by a file's name; an unknown ending is text."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes] or [""]
    if suffixes[-1] in SHORT:
        return FileFormat("tar", SHORT[suffixes[-1]])
    codec = suffixes.pop() if suffixes[-1] in DECODERS else ""
    last = suffixes[-1] if suffixes else ""
    kind = "unread" if last in UNREAD else KINDS.get(last, "text")
    return FileFormat("unread" if kind == "parquet" and codec else kind, codec)


def open_content(where: str, form: FileFormat, chunks: Iterable[bytes], as_text: bool = False) -> Content:
    """Decompress a file's bytes, and look at them where its name says no more than text, unless `as_text`.

    Raises DataError while they are read, for damage.
    """
    if form.codec:
        chunks = decompress(where, chunks, form.codec)
    if form.kind != "text" or as_text:
        return Content(form.kind, chunks)
    for _ in range(LAYERS):
        head, chunks = _peek(chunks)
        if not (found := _COMPRESSED.match(head)):
            break
        chunks = decompress(where, chunks, f".{found.lastgroup}")
    if _COMPRESSED.match(head):
        return Content("unread", chunks, True, "compressed again and again")
    if _ARROW.match(head):
        return Content("arrow", chunks, True)
    if unread := next((what for magic, what in _UNREAD if magic.match(head)), ""):
        return Content("unread", chunks, True, unread)
    if holds_json_lines(head):
        return Content("json lines", chunks, True)
    return Content("text", chunks)


def holds_json_lines(head: bytes) -> bool:
    """Whether a file is JSON lines by its first bytes, in which some lines may be broken."""
    cut = len(head) >= SNIFFED
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip(_BLANK.encode())
    if not _OBJECT.match(head):
        return False
    *lines, last = head.split(b"\n")
    return any(map(_is_object, [*lines, last])) or (cut and _OBJECT.match(last) is not None)


def find_records(text: str, key: str) -> str:
    """What makes a whole text a file of records, as the end of "it holds ..."; "" for a text."""
    start = re.match(f"[{_BLANK}]*", text)
    assert start is not None  # nothing matches, too
    if text[start.end() : start.end() + 1] in ("{", "["):
        try:
            value, end = json.JSONDecoder().raw_decode(text, start.end())
        except (ValueError, RecursionError):
            value, end = None, 0
        first = value[0] if isinstance(value, list) and value else value
        alone = text[end : end + SNIFFED].lstrip(" \t\r")[:1] in ("", "\n", "{", "\x1e")
        if alone and first and isinstance(first, dict | str):
            return "JSON, not one object per line (jq -c . makes lines of it, jq -c '.[]' of an array)"
    header = text[:SNIFFED].partition("\n")[0].rstrip("\r")
    for delimiter in ",\t;|":
        fields = [field.strip('"') for field in header.split(delimiter)]
        if len(fields) > 1 and key in fields:
            return f"a table with the column {key!r} (rename it to .csv or .tsv)"
    return ""


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _peek(chunks: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first SNIFFED bytes or a few more, and all bytes."""
    rest, seen, size = iter(chunks), list[bytes](), 0
    while size < SNIFFED and (chunk := next(rest, None)) is not None:
        seen.append(chunk)
        size += len(chunk)
    return b"".join(seen)[:SNIFFED], chain(seen, rest)
