"""Step records of a guarded run, in the columnar files that megastable's readers read: steps/*.parquet.

A file holds the steps in the order in which they were done. It is written anew with every flush, under a name that
says so, until it has `GROUP` steps: so there are few files, and whenever the process dies, no step is read twice. The
format is Parquet (parquet.apache.org, format/src/main/thrift/parquet.thrift), plain and not compressed: one row group,
one page a column. So the guard needs no library for it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable_guard.durable_files import write_file

GROUP = 10_000  # steps of a file
MAGIC = b"PAR1"
I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12  # types of Thrift's compact protocol


class GuardedStep(NamedTuple):
    """A step, as `StepRecord` of megastable has it. time: unix seconds; loss: nats per token; seconds: it took."""

    step: int
    time: float
    applied: bool
    finite: bool
    loss: float
    grad_norm: float
    lr: float
    seconds: float


# By column: numpy's type, and the physical type of Parquet.
COLUMNS = {
    "step": ("<i8", 2), "time": ("<f8", 5), "applied": ("?", 0), "finite": ("?", 0), "loss": ("<f4", 4),
    "grad_norm": ("<f4", 4), "lr": ("<f4", 4), "seconds": ("<f4", 4),
}  # fmt: skip


def name_file(low: int, high: int, *stamps: int) -> str:
    """The name of a file with the steps from `low` to `high`. stamps: one, or those of the first and the last flush."""
    return "-".join([f"{low:08d}", f"{high:08d}", *map(str, stamps)]) + ".parquet"


class StepFiles:
    """Writes the records of one process. folder: of the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[GuardedStep] = []  # of the present file
        self._written = 0  # of them, on disk
        self._begin, self._stamp = (
            0,
            self._find_stamp(),
        )  # milliseconds: of the file's first flush, and the last one
        self._name, self._process = "", os.getpid()

    def flush_rows(self) -> None:
        """Write what is new. Raises OSError; the rows stay pending then. Does nothing in a forked process."""
        if len(self.rows) == self._written or os.getpid() != self._process:
            return
        # A clock may be set back, or be another host's that was ahead.
        file_stamp = max(int(self.rows[-1].time * 1000), self._stamp + 1)
        first_stamp = self._begin or file_stamp
        step_numbers = [row.step for row in self.rows]
        stamps = (first_stamp,) if first_stamp == file_stamp else (first_stamp, file_stamp)
        file_name = name_file(min(step_numbers), max(step_numbers), *stamps)
        write_file(self.folder / file_name, encode_rows(self.rows))
        if self._name:  # all of it is in the new one
            (self.folder / self._name).unlink(missing_ok=True)
        self._begin, self._stamp, self._name, self._written = (
            first_stamp,
            file_stamp,
            file_name,
            len(self.rows),
        )
        if self._written >= GROUP:
            self._begin, self._name, self._written, self.rows = 0, "", 0, []

    def _find_stamp(self) -> int:
        """Of the newest file of an earlier process."""
        stems = [path.stem.rpartition("-")[2] for path in self.folder.glob("*.parquet")]
        return max((int(stem) for stem in stems if stem.isdecimal()), default=0)


def encode_rows(rows: Sequence[GuardedStep]) -> bytes:
    """The content of a file of records."""
    file_content, column_chunks = bytearray(MAGIC), list[bytes]()
    total_bytes = 0
    for index, (name, (value_type, physical_type)) in enumerate(COLUMNS.items()):
        with np.errstate(over="ignore"):  # a loss beyond fp32 is infinite
            values = np.array([row[index] for row in rows]).astype(value_type)
        data_page = _encode_page(values)
        chunk_offset = len(file_content)
        file_content += data_page
        total_bytes += len(data_page)
        chunk_meta = _pack_fields(
            (1, physical_type), (2, [0]), (3, [name.encode()]), (4, 0), (5, len(rows), I64), (6, len(data_page), I64),
            (7, len(data_page), I64), (9, chunk_offset, I64),
        )  # fmt: skip
        column_chunks.append(_pack_fields((2, chunk_offset, I64), (3, chunk_meta, STRUCT)))
    schema = [_pack_fields((4, b"schema"), (5, len(COLUMNS)))]
    schema += [_pack_fields((1, kind), (3, 0), (4, name.encode())) for name, (_, kind) in COLUMNS.items()]
    row_group = _pack_fields((1, column_chunks, STRUCT), (2, total_bytes, I64), (3, len(rows), I64))
    file_footer = _pack_fields((1, 1), (2, schema, STRUCT), (3, len(rows), I64), (4, [row_group], STRUCT))
    return bytes(file_content) + file_footer + struct.pack("<I", len(file_footer)) + MAGIC


def _encode_page(values: npt.NDArray[np.generic]) -> bytes:
    """A data page of required values, plain: bits are packed, the lowest first."""
    packed_bytes = np.packbits(values.astype(bool), bitorder="little") if values.dtype == bool else values
    page_data = packed_bytes.tobytes()
    page_header = _pack_fields((1, len(values)), (2, 0), (3, 3), (4, 3))
    return (
        _pack_fields((1, 0), (2, len(page_data)), (3, len(page_data)), (5, page_header, STRUCT)) + page_data
    )


def _pack_fields(
    *fields: tuple[int, int | bytes | list[int] | list[bytes]] | tuple[int, object, int],
) -> bytes:
    """A struct of Thrift's compact protocol. fields: number, value, and the type where the value does not tell: an
    integer is of 32 bits, bytes are a text, a list holds one of both."""
    packed_bytes, last_number = bytearray(), 0
    for number, value, *told_type in fields:
        kind = told_type[0] if told_type else I32 if isinstance(value, int) else BINARY
        packed_bytes.append((number - last_number) << 4 | (LIST if isinstance(value, list) else int(kind)))
        last_number = number
        if isinstance(value, list):
            kind = told_type[0] if told_type else I32 if isinstance(value[0], int) else BINARY
            packed_bytes += bytes([min(len(value), 15) << 4 | int(kind)])
            packed_bytes += _pack_number(len(value)) if len(value) >= 15 else b""
        for one_value in value if isinstance(value, list) else [value]:
            packed_bytes += _pack_value(one_value, int(kind))
    return bytes(packed_bytes) + b"\0"


def _pack_value(value: object, kind: int) -> bytes:
    if isinstance(value, int):
        return _pack_number(value << 1)  # zigzag: of numbers that are not negative
    assert isinstance(value, bytes)
    return value if kind == STRUCT else _pack_number(len(value)) + value


def _pack_number(value: int) -> bytes:
    packed_bytes = bytearray()
    while value > 0x7F:
        packed_bytes.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*packed_bytes, value])
