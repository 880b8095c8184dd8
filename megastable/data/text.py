"""Documents out of files: plain text, JSON lines and Parquet, compressed or not, one after another.

The ending of a name decides: `.jsonl`, `.ndjson` and `.json` hold one JSON object per line, `.parquet` a
table, any other file is one document. `.gz`, `.zst` and `.zstd` may follow each but Parquet.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import zstandard

from megastable.errors import DataError

CHUNK = 1 << 20  # bytes read at a time
SNIFFED = 8192  # a NUL byte among the first so many makes a file binary, as for git
JSON_LINES = {".jsonl", ".ndjson", ".json"}
ROWS = 1024  # of a Parquet file, at a time


class _Decoder(Protocol):
    """What zlib and zstandard have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


DECODERS: dict[str, Callable[[], _Decoder]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
    ".zstd": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """The files of `inputs` in their order; folders recursively, sorted, without hidden files and folders.

    Links to folders are not followed. Raises DataError for an input that is not there.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            files += sorted(_walk(path), key=lambda file: file.relative_to(path).parts)
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"the input {path} does not exist")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> NoReturn:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}")

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            # A broken link is lost data and refused on reading; sockets and pipes would block.
            if not name.startswith(".") and (path.is_file() or not path.exists()):
                yield path


class Corpus:
    """The documents of some files, in order, as often as one iterates; none is empty.

    A document that cannot be used (broken JSON, no text under `key`, not UTF-8) raises a DataError that names
    file and line; with `skip_bad` it is left out and counted. A file that ends too early always raises.

    `total_bytes` is the size of the files, `read_bytes` how much of it the current iteration has consumed,
    `left_out` counts what it left out, by reason.
    """

    def __init__(self, files: Sequence[Path], key: str = "text", skip_bad: bool = False) -> None:
        self.files, self.key, self.skip_bad = list(files), key, skip_bad
        self.total_bytes = sum(path.stat().st_size for path in self.files if path.exists())
        self.read_bytes = 0
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[str]:
        self.read_bytes = 0
        self.left_out.clear()
        for path in self.files:
            try:
                for text in self._documents(path):
                    if text:
                        yield text
                    else:
                        self.left_out["empty documents"] += 1
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror or error}") from error

    def _documents(self, path: Path) -> Iterator[str]:
        suffixes = [suffix.lower() for suffix in path.suffixes]
        new_decoder = DECODERS.get(suffixes[-1]) if suffixes else None
        if new_decoder:
            suffixes.pop()
        kind = suffixes[-1] if suffixes else ""
        if kind == ".parquet" and not new_decoder:
            yield from self._parquet(path)
            return
        chunks = self._chunks(path)
        if new_decoder:
            chunks = _decompress(path, chunks, new_decoder)
        yield from self._json_lines(path, chunks) if kind in JSON_LINES else self._whole(path, chunks)

    def _chunks(self, path: Path) -> Iterator[bytes]:
        # Unbuffered: a buffered read of a slow pipe waits for a whole chunk, deaf to Ctrl-C.
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK):
                self.read_bytes += len(chunk)
                yield chunk

    def _whole(self, path: Path, chunks: Iterable[bytes]) -> Iterator[str]:
        content = bytearray()
        for chunk in chunks:
            content += chunk
            if b"\0" in content[:SNIFFED]:
                self.left_out["binary files"] += 1
                return
        text = self._decode(str(path), bytes(content))
        if text is not None:
            yield text

    def _json_lines(self, path: Path, chunks: Iterable[bytes]) -> Iterator[str]:
        for number, raw in enumerate(_lines(chunks), start=1):
            where = f"{path}:{number}"
            line = self._decode(where, raw)
            if line is None or not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                self._bad(where, f"not one JSON object per line ({error})")
                continue
            if not isinstance(record, dict):
                self._bad(where, f"not one JSON object per line (a {type(record).__name__})")
                continue
            if self.key not in record:
                keys = ", ".join(map(repr, list(record)[:8])) or "none"
                self._bad(where, f"no key {self.key!r} (its keys: {keys}), name another with --key")
                continue
            text = record[self.key]
            if not isinstance(text, str):
                self._bad(where, f"{self.key!r} is {type(text).__name__}, not text")
            elif not _is_unicode(text):
                self._bad(where, f"{self.key!r} contains half of a surrogate pair")
            else:
                yield text

    def _parquet(self, path: Path) -> Iterator[str]:
        import pyarrow as pa  # a second or so, for whoever has Parquet files
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as table:
                if self.key not in table.schema_arrow.names:
                    names = ", ".join(table.schema_arrow.names)
                    raise DataError(f"{path}: no column {self.key!r} (there is {names}), name one with --key")
                row, rows, size = 0, max(1, table.metadata.num_rows), path.stat().st_size
                before = self.read_bytes
                for batch in table.iter_batches(batch_size=ROWS, columns=[self.key]):
                    # As bytes, so that a cell which is not UTF-8 is one bad row, not a broken file.
                    for raw in batch.column(0).cast(pa.large_binary()).to_pylist():
                        row += 1
                        where = f"{path}: row {row}"
                        if raw is None:
                            self._bad(where, f"{self.key!r} is null, not text")
                        elif (text := self._decode(where, raw)) is not None:
                            yield text
                    self.read_bytes = before + size * row // rows
        except pa.ArrowException as error:
            raise DataError(f"{path} cannot be read as Parquet with text in {self.key!r}: {error}") from error

    def _decode(self, where: str, raw: bytes) -> str | None:
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self._bad(where, f"not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x})")
            return None

    def _bad(self, where: str, problem: str) -> None:
        if not self.skip_bad:
            raise DataError(f"{where}: {problem}; correct it, or leave such documents out with --skip-bad")
        self.left_out["bad documents"] += 1


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


def _decompress(path: Path, chunks: Iterable[bytes], new: Callable[[], _Decoder]) -> Iterator[bytes]:
    """Decompress one or more members (frames) in a row, and notice when the last one is cut off."""
    decoder: _Decoder | None = None
    try:
        for chunk in chunks:
            while chunk:
                decoder = decoder or new()
                yield decoder.decompress(chunk)
                chunk = b""
                if decoder.eof:
                    chunk, decoder = decoder.unused_data, None
    except (zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if decoder is not None:
        raise DataError(f"{path} ends too early, in the middle of its compressed data: fetch it again")


def _is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8; JSON can spell half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
