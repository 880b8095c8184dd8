"""Prefetching data loader: this data-parallel rank's part of the next global batch, read ahead in a thread.

A global batch is the next positions that are not skipped; how many, and into pieces of which length samples are cut,
depends on the position alone (config/warmups.py). Reshaped to [accumulation, data_size, micro_batch], rank r takes
[:, r]; so the order of the samples depends only on the cursor, the skips and the order, not on the number of ranks or
the micro-batch size. The ranks of a context-parallel group count as one here: they read the same samples, and each
takes its part of the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from megastable.base.errors import ConfigError
from megastable.config.tree import DataConfig
from megastable.config.warmups import Stages
from megastable.data.remote_corpus import ReadAhead
from megastable.data.samples import Source
from megastable.data.skips import Selection, Skips

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """b samples of s tokens for one forward pass; on the CPU.

    `tokens`, `labels`: int64 [b, s / context]. `positions`: int64 [b], absolute. `segments`: int32 [b, s], the ordinal
    of each token's segment within its sample: attention stays inside it, a document or a piece. None if samples are
    whole; the same in all micro-batches of a step.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Step:
    """A global batch: the cursor before (`first`) and after it (`next`), all its positions, int64 [global batch] in
    global order, and this rank's part of it. piece: length of the pieces that its last sample is cut into."""

    first: int
    next: int
    positions: Int64s
    micro_batches: list[MicroBatch]
    piece: int

    @property
    def skipped(self) -> list[int]:
        """The positions of [first, next) that were skipped: ranges [first, end), ascending."""
        position_edges = np.concatenate([[self.first - 1], self.positions, [self.next]])
        gap_indexes = np.flatnonzero(np.diff(position_edges) > 1)
        skipped_edges = np.column_stack([position_edges[gap_indexes] + 1, position_edges[gap_indexes + 1]])
        return skipped_edges.ravel().tolist()


@dataclass(frozen=True)
class RankPart:
    """What a rank reads of every global batch: of every `data_size` micro-batches of `micro_batch` samples that of
    `data_rank`, and of each sample the `tokens` at these places, ascending; None: all."""

    micro_batch: int
    data_rank: int = 0
    data_size: int = 1
    tokens: tuple[range, ...] | None = None

    @property
    def unit(self) -> int:
        """A global batch is a multiple of this many samples."""
        return self.micro_batch * self.data_size


class Loader:
    """An endless iterator of `Step`s from `cursor` on.

    `cursor` is always the one after the last step handed out: the state to save. A thread prefetches up to
    `config.prefetch` steps; it calls nothing collective, and an error in it is raised by the `next()` of the step that
    it belongs to. Call `close()`, or use it as a context manager. `global_batch`: of the step at a cursor, or of every
    step. `pin_memory` puts tokens, labels and segments into pinned memory. `pieces`: length of the pieces that the
    sample at a position is cut into; None: they are whole.
    """

    def __init__(
        self,
        source: Source,
        skips: Skips | Selection,
        cursor: int,
        global_batch: Stages | int,
        part: RankPart,
        config: DataConfig,
        pin_memory: bool = False,
        pieces: Stages | None = None,
    ) -> None:
        batch_stages = Stages.of_constant(global_batch) if isinstance(global_batch, int) else global_batch
        least = min(part.micro_batch, part.data_size)
        if wrong_sizes := [n for n in batch_stages.values if min(n, least) < 1 or n % part.unit]:
            raise ConfigError(
                f"a global batch of {wrong_sizes[0]} cannot be cut into micro-batches of {part.micro_batch} on "
                f"{part.data_size} data-parallel ranks: make it a multiple of their product"
            )
        if not 0 <= part.data_rank < part.data_size:
            raise ConfigError(f"data-parallel rank {part.data_rank} of {part.data_size}")
        sequence_length = source.order.sequence_length
        own_tokens = (range(sequence_length),) if part.tokens is None else part.tokens
        self._own_tokens = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in own_tokens])
        if not set(self._own_tokens) <= set(range(sequence_length)):
            raise ConfigError(f"tokens {own_tokens} of sequences of {sequence_length} tokens")
        self.source, self.skips, self.cursor = source, skips, cursor
        self.batches, self.pieces = batch_stages, pieces or Stages.of_constant(sequence_length)
        self.part, self.pin_memory = part, pin_memory
        self.keep_documents_apart, self._prefetch = config.keep_documents_apart, config.prefetch
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: deque[Future[Step]] = deque()
        is_remote = any(stream.remote is not None for stream in source.streams)
        self._read_ahead = ReadAhead(source.order, source.streams) if is_remote else None
        self._begin_ahead()

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        self._fill(self._prefetch + 1)
        next_step = self._ahead[0].result()
        self._ahead.popleft()
        self.cursor = next_step.next
        if self._read_ahead is not None:
            self._read_ahead.note_step()
        return next_step

    def wait_ready(self, seconds: float) -> bool:
        """Wait for the next step at most so long; whether `next` would not wait any more."""
        self._fill(self._prefetch + 1)
        return bool(wait([self._ahead[0]], seconds).done)

    def go_to(self, cursor: int, skips: Skips | Selection) -> None:
        """Continue at `cursor` with `skips`; prefetched steps are discarded."""
        self.cursor, self.skips = cursor, skips
        self._drop()
        self._begin_ahead()

    def read_micro_batches(self, positions: Int64s) -> list[MicroBatch]:
        """This rank's part of any positions, a multiple of micro_batch * data_size of them; the cursor does not
        move."""
        piece_lengths = lengths_at(self.pieces, positions)
        whole = bool((piece_lengths == self.source.order.sequence_length).all())
        own_indexes = np.arange(positions.size).reshape(-1, self.part.data_size, self.part.micro_batch)
        return [
            self._micro_batch(positions[indexes], None if whole else piece_lengths[indexes])
            for indexes in own_indexes[:, self.part.data_rank]
        ]

    @property
    def batch(self) -> int:
        """The global batch of the next step."""
        return self.batches.value_at(self.cursor)

    @property
    def unit(self) -> int:
        """`read_micro_batches` takes multiples of this many positions."""
        return self.part.unit

    def close(self) -> None:
        """End the thread, after the step that it is reading."""
        self._drop()
        if self._read_ahead is not None:
            self._read_ahead.close()
        self._thread.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_ahead(self) -> None:
        """Read steps, and fetch shards of later ones, from the cursor on."""
        if self._read_ahead is not None:
            self._read_ahead.follow_steps(self._own_positions(self.cursor, self.skips))
        self._fill(self._prefetch)

    def _own_positions(self, cursor: int, skips: Skips | Selection) -> Iterator[Int64s]:
        """This rank's positions of every step from a cursor on."""
        while True:
            positions, cursor = skips.next_kept(cursor, self.batches.value_at(cursor))
            yield positions.reshape(-1, self.part.data_size, self.part.micro_batch)[
                :, self.part.data_rank
            ].ravel()

    def _fill(self, steps: int) -> None:
        while len(self._ahead) < steps:
            previous_step = self._ahead[-1] if self._ahead else self.cursor
            self._ahead.append(self._thread.submit(self._step, previous_step, self.skips))

    def _drop(self) -> None:
        while self._ahead:
            self._ahead.pop().cancel()

    def _step(self, before: Future[Step] | int, skips: Skips | Selection) -> Step:
        """Read one step, in the thread: the step after `before` (done, or cancelled after this one), or at a cursor."""
        first_cursor = before if isinstance(before, int) else before.result().next
        positions, next_cursor = skips.next_kept(first_cursor, self.batches.value_at(first_cursor))
        piece = self.pieces.value_at(next_cursor - 1)
        return Step(first_cursor, next_cursor, positions, self.read_micro_batches(positions), piece)

    def _micro_batch(self, positions: Int64s, lengths: Int64s | None) -> MicroBatch:
        """lengths: of the pieces that the samples are cut into, int64 [b]; None: they are whole."""
        samples = self.source.read_samples(positions)
        tokens, labels = (
            np.ascontiguousarray(x[:, self._own_tokens]) for x in (samples[:, :-1], samples[:, 1:])
        )
        eod_token = self.source.eod if self.keep_documents_apart else None
        is_cut = eod_token is not None or lengths is not None
        segments = segments_of(samples[:, :-1], eod_token, lengths) if is_cut else None
        return MicroBatch(
            tokens=self._tensor(tokens),
            labels=self._tensor(labels),
            positions=torch.from_numpy(positions),
            segments=None if segments is None else self._tensor(segments),
        )

    def _tensor(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        """A tensor for the GPU, pinned: pinning takes time, which the thread has."""
        plain_tensor = torch.from_numpy(array)
        return plain_tensor.pin_memory() if self.pin_memory else plain_tensor


def lengths_at(pieces: Stages, positions: Int64s) -> Int64s:
    """Lengths of the pieces that the samples at n positions are cut into, int64 [n]."""
    return np.array(pieces.values)[np.searchsorted(pieces.firsts, positions, side="right") - 1]


def segments_of(tokens: Int64s, eod: int | None, lengths: Int64s | None = None) -> Int32s:
    """For tokens [b, s]: int32 [b, s], the ordinal of each token's segment within its sample.

    A segment begins at the first token, after every `eod`, and at every multiple of a sample's length of pieces
    (lengths: int64 [b]); None: not there.
    """
    segment_begins = np.zeros(tokens.shape, dtype=bool)
    if eod is not None:
        segment_begins[:, 1:] = tokens[:, :-1] == eod
    if lengths is not None:
        segment_begins[:, 1:] |= np.arange(1, tokens.shape[1]) % lengths[:, None] == 0
    return np.cumsum(segment_begins, axis=1, dtype=np.int32)
