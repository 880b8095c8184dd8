"""Tell what a file holds: by its name, and where the name says nothing, by its first bytes; and decompress it.

Spark writes JSON lines as `part-00000`, WikiExtractor as `AA/wiki_00`, others as `.jl` or `.jsonl.0001`: read as text,
each would be one document of raw JSON.

Each compressed stream is read to its own end mark, so that damage and a missing end are errors, never a shorter text.
(The file objects of `lzma`, `bz2` and `zstandard`, and so fsspec's, silently end at a broken second stream or a
truncated file.)
"""

from __future__ import annotations

import bz2
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

import zstandard

from megastable.base.errors import DataError

INPUT = 2048  # bytes that a decoder gets at a time: a few may expand to 128 KiB (Zstandard)
PIECE = 1 << 20  # maximum bytes that bzip2 and xz give at a time: 46 bytes of bzip2 may hold 45 MB
_ZSTD_WINDOW = 1 << 31  # bytes of memory: as for `zstd --long=31`, which large text archives use

# Each makes the decoder of one stream: `decompress_chunks(bytes)`, `eof` once its end mark was read, `unused_data`
# after it.
DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
    ".zstd": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
    ".xz": lzma.LZMADecompressor,
    ".lzma": lzma.LZMADecompressor,
    ".bz2": bz2.BZ2Decompressor,
}


def decompress_chunks(where: str, chunks: Iterable[bytes], ending: str) -> Iterator[bytes]:
    """Decompress one or more consecutive streams, with zero bytes between or after them (padding of tapes and xz).

    Args:
        where: Names the file.
        chunks: Its content.
        ending: Of DECODERS.

    Raises:
        DataError: for damage, and for data that ends too early.
    """
    decoder: Any = None
    try:
        for chunk in chunks:
            for chunk_offset in range(0, len(chunk), INPUT):
                data_left = chunk[chunk_offset : chunk_offset + INPUT]
                while data_left := data_left if decoder else data_left.lstrip(b"\0"):
                    decoder = decoder or DECODERS[ending]()
                    yield from filter(None, _decompress_some(decoder, data_left))
                    data_left, decoder = (decoder.unused_data, None) if decoder.eof else (b"", decoder)
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError) as error:
        raise DataError(f"{where} is damaged: {error}; fetch it again") from error
    if decoder is not None:
        raise DataError(f"{where} ends too early, inside its compressed data: fetch it again")


def _decompress_some(decoder: Any, data: bytes) -> Iterator[bytes]:
    if not isinstance(decoder, bz2.BZ2Decompressor | lzma.LZMADecompressor):
        yield decoder.decompress(data)
        return
    yield decoder.decompress(data, PIECE)
    while not (decoder.eof or decoder.needs_input):
        yield decoder.decompress(b"", PIECE)


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
UNREAD = set(".zip .7z .rar .lz4 .lz .lzo .br .sz .z .orc .avro .xls .xlsx .ods".split())
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
    last_suffix = suffixes[-1] if suffixes else ""
    kind = "unread" if last_suffix in UNREAD else KINDS.get(last_suffix, "text")
    return FileFormat("unread" if kind == "parquet" and codec else kind, codec)


def open_content(where: str, form: FileFormat, chunks: Iterable[bytes], as_text: bool = False) -> Content:
    """Decompress a file's bytes, and look at them where its name says no more than text, unless `as_text`.

    Raises DataError while they are read, for damage.
    """
    if form.codec:
        chunks = decompress_chunks(where, chunks, form.codec)
    if form.kind != "text" or as_text:
        return Content(form.kind, chunks)
    for _ in range(LAYERS):
        first_bytes, chunks = _peek(chunks)
        if not (compressed_match := _COMPRESSED.match(first_bytes)):
            break
        chunks = decompress_chunks(where, chunks, f".{compressed_match.lastgroup}")
    if _COMPRESSED.match(first_bytes):
        return Content("unread", chunks, True, "compressed again and again")
    if _ARROW.match(first_bytes):
        return Content("arrow", chunks, True)
    if unread_kind := next((unread_name for magic, unread_name in _UNREAD if magic.match(first_bytes)), ""):
        return Content("unread", chunks, True, unread_kind)
    if holds_json_lines(first_bytes):
        return Content("json lines", chunks, True)
    return Content("text", chunks)


def holds_json_lines(head: bytes) -> bool:
    """Whether a file is JSON lines by its first bytes, in which some lines may be broken."""
    is_cut = len(head) >= SNIFFED
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip(_BLANK.encode())
    if not _OBJECT.match(head):
        return False
    *lines, last_line = head.split(b"\n")
    return any(map(_is_object, [*lines, last_line])) or (is_cut and _OBJECT.match(last_line) is not None)


def find_records(text: str, key: str) -> str:
    """What makes a whole text a file of records, as the end of "it holds ..."; "" for a text."""
    text_start = re.match(f"[{_BLANK}]*", text)
    assert text_start is not None  # nothing matches, too
    if text[text_start.end() : text_start.end() + 1] in ("{", "["):
        try:
            json_value, text_end = json.JSONDecoder().raw_decode(text, text_start.end())
        except (ValueError, RecursionError):
            json_value, text_end = None, 0
        first_value = json_value[0] if isinstance(json_value, list) and json_value else json_value
        is_alone = text[text_end : text_end + SNIFFED].lstrip(" \t\r")[:1] in ("", "\n", "{", "\x1e")
        if is_alone and first_value and isinstance(first_value, dict | str):
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
    chunks_left, chunks_seen, bytes_seen = iter(chunks), list[bytes](), 0
    while bytes_seen < SNIFFED and (chunk := next(chunks_left, None)) is not None:
        chunks_seen.append(chunk)
        bytes_seen += len(chunk)
    return b"".join(chunks_seen)[:SNIFFED], chain(chunks_seen, chunks_left)
