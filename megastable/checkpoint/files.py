"""Write and read the files of a checkpoint: hashed during the write, and on disk when a call returns."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Final, Literal, Self, cast

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError, model_validator
from torch import Tensor

from megastable.base.errors import CheckpointError
from megastable.base.text import make_visible
from megastable.parallel.sharding import Placement

BLOCK = 1 << 24  # bytes written and hashed at a time
NAMES = {  # dtype names of safetensors (its README, "Format")
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


class FileRecord(BaseModel):
    """A file of a checkpoint: its size in bytes and its xxh3-128."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    xxh3: str


class HashingFile:
    """A file object for torch.save that counts and hashes the bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash, self.size = file, xxhash.xxh3_128(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error  # torch's zip writer turns it into a RuntimeError without the reason
            raise
        self.hash.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()

    def make_record(self) -> FileRecord:
        self.file.flush()
        os.fsync(self.file.fileno())
        return FileRecord(size=self.size, xxh3=self.hash.hexdigest())


def write_file(path: Path, content: Any) -> FileRecord:
    """torch.save `content`, or write bytes; on disk when this returns. Raises OSError, RuntimeError."""
    with path.open("wb") as file:
        hashing_file = HashingFile(file)
        if isinstance(content, bytes):
            hashing_file.write(content)
        else:
            try:
                torch.save(content, cast(IO[bytes], hashing_file))  # it only writes and flushes
            except RuntimeError:
                if hashing_file.error is None:
                    raise
                raise hashing_file.error from None
        return hashing_file.make_record()


class TensorFile:
    """One .safetensors file, written as a stream: names, dtypes and shapes are known first, tensors come one by one.

        with TensorFile(path, [("weight", torch.float32, (2, 3))]) as file:
            file.write_tensor("weight", tensor)
        file.record  # its size and hash

    The library's own writer needs all tensors of a file in memory at once. Memory here: one block. Raises OSError.
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        metadata: dict[str, str] | None = None,
        each: Callable[[], None] = lambda: None,
    ) -> None:
        """each: called before every block; may raise to break off."""
        self.path, self._left, self._each = path, list(reversed(entries)), each
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        offset = 0
        for name, dtype, shape in entries:
            end = offset + dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        assert len(header) == len(entries) + bool(metadata), "a name occurs twice"
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligns the tensors
        self._file = path.open("wb")
        try:
            self._hashing = HashingFile(self._file)
            self._hashing.write(len(text).to_bytes(8, "little") + text)
        except BaseException:
            self._file.close()
            raise
        self._record: FileRecord | None = None

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, of its declared dtype and shape, on any device."""
        next_entry = self._left.pop()
        assert (name, tensor.dtype, tuple(tensor.shape)) == next_entry, f"{name}: expected {next_entry}"
        flat_bytes = tensor.detach().contiguous().flatten().view(torch.uint8)
        for block in flat_bytes.split(BLOCK):
            self._each()
            self._hashing.write(block.cpu().numpy().data)

    def close(self) -> FileRecord:
        """Finish the file; on disk when this returns."""
        if self._record is None:
            assert not self._left, f"{self._left[-1][0]} was not written"
            self._record = self._hashing.make_record()
            self._file.close()
        return self._record

    @property
    def record(self) -> FileRecord:
        return self.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()


def read_file(path: Path) -> tuple[Tensor, FileRecord]:
    """The bytes of a file, uint8 [size], with its size and hash. Raises OSError."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        content = torch.empty(os.fstat(file.fileno()).st_size, dtype=torch.uint8)
        unread_bytes = memoryview(content.numpy().data)
        while byte_count := file.readinto(unread_bytes[:BLOCK]):
            digest.update(unread_bytes[:byte_count])
            unread_bytes = unread_bytes[byte_count:]
    return content, FileRecord(size=len(content) - len(unread_bytes), xxh3=digest.hexdigest())


def hash_file(path: Path, from_disk: bool = False) -> FileRecord:
    """Size and hash of a file. from_disk: bypass the file cache."""
    digest, file_size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        if from_disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_buffer = memoryview(bytearray(BLOCK))
        while byte_count := file.readinto(read_buffer):
            digest.update(read_buffer[:byte_count])
            file_size += byte_count
    return FileRecord(size=file_size, xxh3=digest.hexdigest())


# Read .safetensors files piece by piece, without mapping them.
#
# The library maps a file as if it were to be written to. Linux refuses that for a file larger than the machine's
# memory, and a failing disk under a mapping ends the process with a signal. Here only the requested bytes are read,
# and a failure is an error. The format: github.com/huggingface/safetensors, "Format".


LONGEST = 100_000_000  # bytes of a header, as in the library
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """kind: the dtype as the file names it; begin, end: in bytes of the file."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Reader:
    """One file. entries: by name, in the header's order. content: its bytes, uint8 [size], if they are in memory.
    Raises CheckpointError if it is damaged or truncated."""

    def __init__(self, path: Path, content: Tensor | None = None) -> None:
        self.path, self._content = path, content
        if content is None:
            try:
                self._file = path.open("rb", buffering=0)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        self.entries = self._header()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    def dtype_of(self, name: str) -> torch.dtype:
        """Raises CheckpointError for a dtype that is not supported."""
        dtype_name = self.entries[name].kind
        if dtype_name not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {make_visible(name, 200)} is {make_visible(dtype_name, 20)}, which is not read here"
            )
        return DTYPES[dtype_name]

    def read_tensor(self, name: str) -> Tensor:
        """The whole tensor."""
        tensor_entry = self.entries[name]
        return self.read_range(name, 0, math.prod(tensor_entry.shape)).view(tensor_entry.shape)

    def read_range(self, name: str, start: int, end: int) -> Tensor:
        """Elements [start, end) of the flattened tensor. Raises CheckpointError."""
        tensor_entry, dtype = self.entries[name], self.dtype_of(name)
        assert 0 <= start <= end <= math.prod(tensor_entry.shape)
        tensor = torch.empty(end - start, dtype=dtype)
        self._read(tensor_entry.begin + start * dtype.itemsize, tensor.view(torch.uint8).numpy().data)
        return tensor

    def _read(self, at: int, into: memoryview) -> None:
        if self._content is not None:
            into[:] = memoryview(self._content.numpy().data)[at : at + len(into)]
            return
        bytes_read = 0
        while bytes_read < len(into):  # Linux reads no more than 2 GiB at once
            try:
                read_count = os.preadv(self._file.fileno(), [into[bytes_read:]], at + bytes_read)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
            if not read_count:
                raise self._damaged(f"it ends at byte {at + bytes_read:,}")
            bytes_read += read_count

    def _header(self) -> dict[str, TensorEntry]:
        file_size = os.fstat(self._file.fileno()).st_size if self._content is None else len(self._content)
        if file_size < 8:
            raise self._damaged("it is too short")
        length_bytes = bytearray(8)
        self._read(0, memoryview(length_bytes))
        header_length = int.from_bytes(length_bytes, "little")
        if header_length > min(LONGEST, file_size - 8):
            raise self._damaged(f"its header would be {header_length:,} bytes long")
        header_bytes = bytearray(header_length)
        self._read(8, memoryview(header_bytes))
        try:
            header_tree: Any = json.loads(header_bytes.decode())
            header_tree.pop("__metadata__", None)
            tensor_entries = {name: _entry(told, 8 + header_length) for name, told in header_tree.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(f"its header is invalid ({type(error).__name__})") from None
        next_byte = 8 + header_length
        for name, entry in sorted(tensor_entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != next_byte:
                raise self._damaged(f"{make_visible(name, 200)} does not begin where the one before it ends")
            next_byte = entry.end
            if entry.kind in DTYPES:
                wanted_bytes = DTYPES[entry.kind].itemsize * math.prod(entry.shape)
                if entry.end - entry.begin != wanted_bytes:
                    raise self._damaged(
                        f"{make_visible(name, 200)} has {entry.end - entry.begin} bytes, not {wanted_bytes}"
                    )
        if next_byte != file_size:
            raise self._damaged(f"it has {file_size:,} bytes, its header says {next_byte:,}")
        return tensor_entries

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: damaged or incomplete: {why}")


def _entry(told: Any, offset: int) -> TensorEntry:
    begin_byte, end_byte = told["data_offsets"]
    dtype_name, shape = told["dtype"], told["shape"]
    all_numbers = [begin_byte, end_byte, *shape]
    if (
        not isinstance(dtype_name, str)
        or any(type(all_number) is not int or not 0 <= all_number < 2**62 for all_number in all_numbers)
        or end_byte < begin_byte
    ):
        raise ValueError
    return TensorEntry(dtype_name, tuple(shape), offset + begin_byte, offset + end_byte)


# Description of one rank's part of a checkpoint: rank-00000.json beside rank-00000.safetensors.
#
# A piece is a range of one parameter's flattened tensor-parallel shard. Replicas are written once, by the rank that
# counts them, and padding is not written: the same weights under two layouts are the same bytes in other files.


FORMAT: Final = 2  # of checkpoints
CHUNK = 1 << 22  # elements examined at a time


def part_name(rank: int) -> str:
    """Name of a rank's files, without suffix."""
    return f"rank-{rank:05d}"


def random_name(rank: int) -> str:
    """Name of the file with a rank's random states."""
    return f"rng-{rank:05d}.pt"


def entry_name(kind: str, name: str) -> str:
    """Name of a piece's tensor in the .safetensors file."""
    return f"{kind}/{name}"


class PieceStatistics(BaseModel):
    """Statistics of a piece. nonfinite: number of non-finite elements; norm: L2; the others cover all elements, NaN and
    infinities included."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    nonfinite: int
    norm: float
    absmax: float
    mean: float


class ShardPiece(BaseModel):
    """`numel` elements of a parameter, from `start` of its flattened shard on. name, dim, sections: its `Placement`;
    shape: of the shard. statistics: by kind ("weight", "exp_avg", "exp_avg_sq")."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dim: NonNegativeInt | None
    sections: tuple[PositiveInt, ...]
    shape: tuple[PositiveInt, ...]
    start: NonNegativeInt
    numel: PositiveInt
    statistics: dict[str, PieceStatistics]

    @model_validator(mode="after")
    def _lies_in_its_shard(self) -> Self:
        if self.end > math.prod(self.shape) or (self.dim is not None and self.dim >= len(self.shape)):
            raise ValueError(f"a piece up to element {self.end} of {self.shape}, split along {self.dim}")
        return self

    @property
    def end(self) -> int:
        return self.start + self.numel

    @property
    def placement(self) -> Placement:
        return Placement(self.name, self.dim, self.sections)


class Pieces(BaseModel):
    """All pieces of a rank; kinds: of their tensors, not every piece has all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = FORMAT
    rank: NonNegativeInt
    stage: NonNegativeInt
    tensor_rank: NonNegativeInt
    kinds: tuple[str, ...]
    pieces: tuple[ShardPiece, ...]

    @classmethod
    def read(cls, path: Path, content: bytes) -> Self:
        """Of the file `path`, which has these bytes. Raises CheckpointError."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise CheckpointError(f"{path}: damaged ({str(error).splitlines()[0]})") from None

    @property
    def finite(self) -> bool:
        return not any(s.nonfinite for piece in self.pieces for s in piece.statistics.values())


def measure_piece(flat: Tensor) -> PieceStatistics:
    """flat: fp32 [n]. Chunks are summed in fp32, which is twenty times faster on a CPU, and added up in fp64."""
    square_sum = value_sum = largest_absolute = 0.0
    for chunk in flat.split(CHUNK) if flat.numel() else ():
        lowest_value, highest_value = map(float, torch.aminmax(chunk))  # nan if there is one
        chunk_norm = float(torch.linalg.vector_norm(chunk))
        if math.isinf(chunk_norm):  # squares may overflow fp32 even if no number does
            chunk_norm = float(torch.linalg.vector_norm(chunk, dtype=torch.float64))
        square_sum += chunk_norm * chunk_norm
        value_sum += float(chunk.sum())
        chunk_absmax = max(-lowest_value, highest_value)
        if chunk_absmax > largest_absolute or math.isnan(chunk_absmax):
            largest_absolute = chunk_absmax
    nonfinite_count = 0 if math.isfinite(square_sum) else flat.numel() - int(flat.isfinite().sum())
    norm, mean = math.sqrt(square_sum), value_sum / max(1, flat.numel())
    return PieceStatistics(nonfinite=nonfinite_count, norm=norm, absmax=largest_absolute, mean=mean)


def skip_statistics(flat: Tensor) -> PieceStatistics:
    """Instead of `measure_piece`, where these would cost too much: nan."""
    return PieceStatistics(nonfinite=0, norm=math.nan, absmax=math.nan, mean=math.nan)


def read_pieces(path: Path) -> Pieces:
    """Read a rank's description. Raises CheckpointError."""
    try:
        return Pieces.read(path, path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None
