"""Fills a device's memory with known words, and compares them later: bits that stick, flip or lie at a wrong address.

memory = Memory.taken(device)
memory.fill(pattern)
...                      # other tests run meanwhile
memory.trial(pattern)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megastable.base import free_memory
from megastable.base.splitmix import sequence
from megastable.cluster.burn_in import draws
from megastable.cluster.burn_in.bits import BitMismatch, as_hex, mismatch
from megastable.cluster.burn_in.faults import AGAIN
from megastable.cluster.burn_in.trials import UNSEEN, CaseTrial

SHARE = 0.9  # of a GPU's free memory
RESERVE = 8 << 30  # bytes of it for the other tests
OURS = (
    4 << 30
)  # bytes that this process, the driver and tools that watch may have: more is a program that computes
OF_CPU = 32 << 20  # bytes
CHUNK = {"cuda": 1 << 25, "cpu": 1 << 20}  # words: larger than a cache
AUDITED = 1 << 18  # words that the CPU compares itself, of one chunk each time
MOST = 1 << 20  # wrong words of a chunk whose bits are looked at
WORD = 8  # bytes
NAMES = ("zeros", "checkerboard", "walking ones", "addresses", "random")


@dataclass(frozen=True)
class Pattern:
    """A pure function from the address of a word to its 64 bits. inverted: all bits of it."""

    name: str
    inverted: bool
    key: int

    @property
    def what(self) -> str:
        return f"{self.name}{' inverted' if self.inverted else ''}"

    def words(self, start: int, count: int, device: torch.device) -> Tensor:
        """Of the addresses from `start` on: int64 [count]."""
        words = self._words(start, count, device)
        return words.bitwise_not_() if self.inverted else words

    def _words(self, start: int, count: int, device: torch.device) -> Tensor:
        if self.name == "random":
            return sequence(self.key, start, count, device)
        if self.name == "addresses":
            return torch.arange(start, start + count, dtype=torch.int64, device=device)
        if self.name == "walking ones":
            first = start + self.key % 64
            at = torch.arange(first, first + count, dtype=torch.int64, device=device)
            return torch.ones_like(at) << (at % 64)
        value = {"zeros": 0, "checkerboard": 0x5555555555555555}[self.name]
        return torch.full((count,), value, dtype=torch.int64, device=device)


def pattern_of(seed: int, round_: int) -> Pattern:
    """All patterns in turn, then the opposite bits: 0x00 and 0xFF, 0x55 and 0xAA."""
    turn, at = divmod(round_, len(NAMES))
    return Pattern(NAMES[at], turn % 2 == 1, draws.key("memory", seed, round_))


@dataclass(frozen=True)
class Memory:
    """chunks: int64 tensors of one device."""

    chunks: list[Tensor]

    @classmethod
    def taken(cls, device: torch.device, size: int | None = None) -> Memory:
        """size: in bytes, rounded up to a chunk; None: as much as the device can spare."""
        left, words = free_bytes(device) if size is None else size, CHUNK[device.type]
        chunks = list[Tensor]()
        while left > 0:
            try:
                chunks.append(torch.empty(words, dtype=torch.int64, device=device))
            except RuntimeError:  # somebody else was quicker
                if not chunks:
                    raise
                break
            left -= words * WORD
        return cls(chunks)

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(chunk.numel() for chunk in self.chunks) * WORD

    def fill(self, pattern: Pattern) -> None:
        for start, chunk in self._chunks():
            write(chunk, pattern, start)

    def trial(self, pattern: Pattern) -> CaseTrial:
        """Compare all words. Those of the first chunk that is wrong are written and read again at once."""
        found, again = None, 0
        for number, (start, chunk) in enumerate(self._chunks()):
            audit = number == pattern.key % len(self.chunks)
            one = wrong_words(chunk, pattern, start, audit)
            if one is not None and found is None:
                found = one
                for _ in range(AGAIN):
                    write(chunk, pattern, start)
                    again += wrong_words(chunk, pattern, start, audit) is not None
            elif one is not None and found is not None:
                found = together(found, one)
        if found is not None:
            found = replace(found, of=self.size // WORD)
        return CaseTrial(f"{pattern.what} in {self.size >> 20} MiB", 1, found, again)

    def _chunks(self) -> Iterator[tuple[int, Tensor]]:
        start = 0
        for chunk in self.chunks:
            yield start, chunk
            start += chunk.numel()


def write(chunk: Tensor, pattern: Pattern, start: int) -> None:
    """start: address of the chunk's first word."""
    chunk.copy_(pattern.words(start, chunk.numel(), chunk.device))


def wrong_words(chunk: Tensor, pattern: Pattern, start: int, audit: bool) -> BitMismatch | None:
    """What the device sees; where it sees a difference, the CPU looks. audit: the CPU looks at a part anyway."""
    where = (chunk != pattern.words(start, chunk.numel(), chunk.device)).nonzero().flatten()
    if len(where):
        first = where[:MOST]
        at, got = first.cpu(), chunk[first].cpu()
        # Words that are right for the CPU: it was the reading, or the comparison, that was wrong.
        return replace(_compared(at + start, got, pattern) or UNSEEN, wrong=len(where))
    if not audit:
        return None
    count = min(AUDITED, chunk.numel())
    offset = pattern.key % (chunk.numel() - count + 1)
    at = torch.arange(offset, offset + count)
    return _compared(at + start, chunk[offset : offset + count].cpu(), pattern)


def together(one: BitMismatch, other: BitMismatch) -> BitMismatch:
    """Of two parts of the memory: the first word of the first one."""
    xor = int(one.xor or "0", 16) | int(other.xor or "0", 16)
    return replace(one, wrong=one.wrong + other.wrong, xor=as_hex(xor, WORD))


def _compared(at: Tensor, got: Tensor, pattern: Pattern) -> BitMismatch | None:
    """at: the addresses of the words, ascending; got: what is there. Both on the CPU."""
    first = int(at[0])
    expected = pattern.words(first, int(at[-1]) - first + 1, torch.device("cpu"))[at - first]
    found = mismatch(expected, got)
    return None if found is None else replace(found, index=(int(at[found.index[0]]),), common=())


def free_bytes(device: torch.device) -> int:
    """What the test may take."""
    if device.type == "cpu":
        return min(OF_CPU, free_memory.free() // 8)
    free, _ = torch.cuda.mem_get_info(device)
    return max(CHUNK["cuda"] * WORD, min(int(SHARE * free), free - RESERVE))


def taken_by_others(device: torch.device) -> int:
    """Bytes of a GPU's memory that other programs use; 0 if that is no more than what is always there."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device)
    return taken if taken > OURS else 0
