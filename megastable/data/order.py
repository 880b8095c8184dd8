"""Data order: maps positions to samples and back, as a pure function with O(1) memory for any number of tokens.

A **position** is the absolute number of a sample of the run. Corpus c is one stream of tokens, divided into
n = (tokens - 1) // L sequences of L + 1 tokens that share one token with the next: sequence i covers the
tokens [i * L, i * L + L + 1).

1. Positions are grouped into blocks. Every block gives each corpus the same number of slots, its quota: the
   largest-remainder rounding of weight * block. The slots are shuffled with the key (seed, block).
2. The slots of a corpus, in the order of positions, hold its samples 0, 1, 2, ..., except those exchanged with later
   ones (`Exchange`). Sample k belongs to epoch k // n and has the number k % n in it.
3. A bijection keyed by (seed, corpus name, epoch) turns that number into a sequence.

So a corpus reads all its sequences once before any repeats. Nothing here depends on the length of the run, batch
sizes or ranks, and the order inside a corpus (3) does not depend on the other corpora or the weights: where the blend
changes (at the beginning of a block, a **phase**), every corpus continues with its next sample. The inverse, from a
sequence to all its positions, is equally cheap.

The bijection is a balanced Feistel network (Luby and Rackoff 1988) over pairs of numbers below ceil(sqrt(n))
with modular addition and cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002, sections 3 and 4); its round function is the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA
2014).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base.errors import ConfigError, DataError

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

VERSION = 1  # part of every fingerprint: changing the arithmetic below changes the data order
BLOCK = 4096
ROUNDS = 8
LAST_POSITION = 2**62


@dataclass(frozen=True)
class OrderedCorpus:
    """A corpus in the order: its name, its number of tokens, its share of the blend (any scale).

    fingerprint: of its manifest, the key of the skip ledger; it has no influence on the order.
    """

    name: str
    tokens: int
    weight: float
    fingerprint: str = ""


@dataclass(frozen=True)
class Phase:
    """From `block` on, corpora are blended by `weights`; a corpus that is not named gives nothing."""

    block: int
    weights: Mapping[str, float]


class Location(NamedTuple):
    """The sample at a position: index of its corpus, epoch of that corpus, sequence, first token of it."""

    corpus: int
    epoch: int
    sequence: int
    first_token: int


class Locations(NamedTuple):
    """The samples at n positions, each field int64 [n]; see `Location`."""

    corpus: Int64s
    epoch: Int64s
    sequence: Int64s
    first_token: Int64s


class Order:
    """The order of the samples of a run over `corpora`, in sequences of `sequence_length` tokens.

    `quotas` (of the last phase) and `sequences` hold a number per corpus, in the order of `corpora` (which has no
    influence on the samples; names have). phases: ascending, the first from block 0; without any, the corpora's own
    weights hold throughout. exchanges: of samples of these corpora, oldest first. Raises ConfigError for invalid
    weights, DataError for a corpus shorter than one sequence.
    """

    def __init__(
        self,
        corpora: Sequence[OrderedCorpus],
        sequence_length: int,
        seed: int,
        block: int = BLOCK,
        phases: Sequence[Phase] = (),
        exchanges: Sequence[Exchange] = (),
    ) -> None:
        if sequence_length < 1 or not 1 <= block <= 2**16:
            raise ConfigError(
                f"sequence length {sequence_length}, block {block}: at least 1, at most 2^16 a block"
            )
        self.corpora = tuple(corpora)
        self.sequence_length = sequence_length
        self.seed = seed
        self.block = block
        self.phases = tuple(phases) or (Phase(0, {c.name: c.weight for c in self.corpora}),)
        starts = [phase.block for phase in self.phases]
        if starts[0] != 0 or starts != sorted(set(starts)):
            raise ConfigError(f"the blend's phases begin at the blocks {starts}: 0 first, then ascending")
        # All quotas by phase and corpus, and the number of samples of each corpus before a phase.
        self._quotas = np.array([self._blend(phase.weights) for phase in self.phases], dtype=np.int64)
        self._starts = np.array(starts, dtype=np.int64)
        phase_lengths = np.diff(self._starts)[:, None]
        self._before = np.vstack([0 * self._quotas[:1], np.cumsum(self._quotas[:-1] * phase_lengths, axis=0)])
        self.quotas = tuple(self._quotas[-1].tolist())
        self.sequences = tuple((corpus.tokens - 1) // sequence_length for corpus in self.corpora)
        for corpus, sequences in zip(self.corpora, self.sequences, strict=True):
            if sequences < 1:
                raise DataError(
                    f"corpus {corpus.name!r} has {corpus.tokens} tokens, a sequence needs "
                    f"{sequence_length + 1}: lower model.sequence_length or add text"
                )
        # Sorted by name, so that the order of `corpora` has no influence on the shuffle of a block.
        by_name = sorted(range(len(self.corpora)), key=lambda index: self.corpora[index].name)
        self._slots = [np.repeat(by_name, quotas[by_name]).astype(np.uint16) for quotas in self._quotas]
        self._turns = [np.concatenate([np.arange(quota) for quota in quotas]) for quotas in self._quotas]
        self._sequences = np.array(self.sequences, dtype=np.int64)
        self._shuffled = lru_cache(maxsize=16)(self._shuffle)
        self.exchanges = tuple(exchanges)
        self._exchanged = {
            index: Exchanged([swap for e in self.exchanges if e.corpus == corpus.name for swap in e.swaps])
            for index, corpus in enumerate(self.corpora)
            if any(e.corpus == corpus.name for e in self.exchanges)
        }

    def with_exchanges(self, more: Sequence[Exchange], known: int | None = None) -> Order:
        """This order with more exchanges applied; known: keep only this many of its own."""
        all_exchanges = [*self.exchanges[:known], *more]
        return Order(self.corpora, self.sequence_length, self.seed, self.block, self.phases, all_exchanges)

    def locate_samples(self, positions: npt.ArrayLike) -> Locations:
        """The samples at `positions`, n integers. Raises DataError outside of [0, 2^62)."""
        where = np.asarray(positions)
        if where.size == 0:
            where = where.astype(np.int64)
        if where.ndim != 1 or not np.issubdtype(where.dtype, np.integer):
            raise TypeError(f"positions are a 1-D array of integers, not {where.dtype} {where.shape}")
        if where.size and not 0 <= int(where.min()) <= int(where.max()) < LAST_POSITION:
            raise DataError(f"positions {where.min()} to {where.max()}: a position is between 0 and 2^62")
        corpus_indexes, sample_numbers = self.samples_at(where.astype(np.int64))
        epoch, number_in_epoch = np.divmod(sample_numbers, self._sequences[corpus_indexes])
        keys = np.empty((ROUNDS, corpus_indexes.size), dtype=np.uint64)
        for corpus_index, member_indexes in _groups(corpus_indexes):
            keys[:, member_indexes] = self._keys(self.corpora[corpus_index].name, epoch[member_indexes])
        sequence = permute_values(number_in_epoch, self._sequences[corpus_indexes], keys)
        return Locations(corpus_indexes, epoch, sequence, sequence * self.sequence_length)

    def locate_sample(self, position: int) -> Location:
        """The sample at one position."""
        return Location(*(int(location_field[0]) for location_field in self.locate_samples([position])))

    def positions_of(self, corpus: int, sequences: npt.ArrayLike, first: int, end: int) -> Int64s:
        """All positions in [first, end) that hold any of n `sequences` of a corpus: int64, ascending.

        O(n) for each epoch of the corpus that [first, end) touches.
        """
        wanted, size = np.asarray(sequences, dtype=np.int64), int(self._sequences[corpus])
        first_slot, last_slot = self.samples_before(first)[corpus], self.samples_before(end)[corpus]
        samples_by_epoch = [np.empty(0, np.int64)]
        epoch_numbers = set(range(first_slot // size, -(-last_slot // size)))
        if corpus in self._exchanged:  # with samples of other epochs
            slots, moved_samples = self.moved_slots(corpus).T
            is_within = (first_slot <= slots) & (slots < last_slot)
            epoch_numbers |= set((moved_samples[is_within] // size).tolist())
        for epoch_number in sorted(epoch_numbers):
            epoch_keys = self._keys(self.corpora[corpus].name, np.full(wanted.size, epoch_number))
            numbers_in_epoch = unpermute_values(wanted, np.full(wanted.size, size), epoch_keys)
            samples_by_epoch.append(epoch_number * size + numbers_in_epoch)
        slots = self._slots_of(corpus, np.concatenate(samples_by_epoch))
        return np.sort(self.positions_at(corpus, slots[(first_slot <= slots) & (slots < last_slot)]))

    def samples_before(self, position: int) -> list[int]:
        """Number of samples that each corpus gives to the positions [0, position)."""
        block, slot = divmod(position, self.block)
        phase = self._phase(block)
        block_counts = np.bincount(self._shuffled(block)[0][:slot], minlength=len(self.corpora))
        whole_blocks = self._before[phase] + (block - self._starts[phase]) * self._quotas[phase]
        return (whole_blocks + block_counts).tolist()

    def moved_to(self, other: Order, positions: npt.ArrayLike) -> Int64s:
        """The positions in `other`, which has all of these corpora, of the samples at n `positions`: int64, ascending.
        Samples that `other` never gives are left out."""
        corpus_indexes, samples = self.samples_at(np.asarray(positions, dtype=np.int64))
        corpus_names = [corpus.name for corpus in other.corpora]
        found_positions = [np.empty(0, np.int64)]
        for corpus_index, member_indexes in _groups(corpus_indexes):
            other_index = corpus_names.index(self.corpora[corpus_index].name)
            own_slots = other._slots_of(other_index, samples[member_indexes])
            if not other.quotas[other_index]:
                own_slots = own_slots[own_slots < other._before[-1, other_index]]
            found_positions.append(other.positions_at(other_index, own_slots))
        return np.sort(np.concatenate(found_positions))

    def quotas_at(self, position: int) -> list[int]:
        """Number of slots per block of each corpus at `position`."""
        return self._quotas[self._phase(position // self.block)].tolist()

    def absent_ranges(self, corpus: int) -> list[tuple[int, int]]:
        """The ranges of positions [first, end) of the phases without samples of a corpus."""
        edges = [*(self._starts * self.block).tolist(), LAST_POSITION]
        return [
            edge for quotas, edge in zip(self._quotas, pairwise(edges), strict=True) if not quotas[corpus]
        ]

    def moved_slots(self, corpus: int) -> Int64s:
        """The slots of a corpus that hold other samples than their own, ascending, and these samples: int64 [n, 2]."""
        return self._exchanged[corpus].moved if corpus in self._exchanged else np.empty((0, 2), np.int64)

    def deferred_positions(self, first: int, end: int) -> Int64s:
        """The positions in [first, end) whose samples were deferred to there: int64, ascending."""
        low, last_slots, found = self.samples_before(first), self.samples_before(end), [np.empty(0, np.int64)]
        for index, exchanged in self._exchanged.items():
            slots = exchanged.deferred
            found.append(self.positions_at(index, slots[(low[index] <= slots) & (slots < last_slots[index])]))
        return np.sort(np.concatenate(found))

    def fingerprint(
        self, manifest_fingerprints: Sequence[str], phases: int | None = None, before: int | None = None
    ) -> str:
        """SHA-256 (hex) of everything that decides which tokens are at which position.

        `manifest_fingerprints`: one per corpus, in the order of `corpora`. phases: only the first so many count, and
        only the corpora that they name: the value before later phases were added. before: exchanges count only if they
        concern earlier positions.
        """
        phase_count = len(self.phases) if phases is None else phases
        used = self._quotas[:phase_count].sum(axis=0) > 0
        described = zip(self.corpora, self._quotas[0].tolist(), manifest_fingerprints, used, strict=True)
        corpora = sorted(
            [c.name, c.tokens, quota, given] for c, quota, given, is_used in described if is_used
        )
        hashed_content: list[Any] = [VERSION, self.seed, self.sequence_length, self.block, corpora]
        for phase_number in range(1, phase_count):
            quotas = zip(self.corpora, self._quotas[phase_number].tolist(), strict=True)
            hashed_content.append(
                [int(self._starts[phase_number]), sorted([c.name, quota] for c, quota in quotas if quota)]
            )
        slot_ends = self.samples_before(before) if before is not None else [LAST_POSITION] * len(self.corpora)
        exchanged_slots = list[list[Any]]()
        for corpus_index, (corpus, slot_end) in enumerate(zip(self.corpora, slot_ends, strict=True)):
            slots = self.moved_slots(corpus_index)
            if (slots[:, 0] < slot_end).any():
                exchanged_slots.append([corpus.name, slots[slots[:, 0] < slot_end].tolist()])
        if exchanged_slots:
            hashed_content.append({"exchanged": sorted(exchanged_slots)})
        return hashlib.sha256(json.dumps(hashed_content).encode()).hexdigest()

    def _blend(self, weights: Mapping[str, float]) -> list[int]:
        chosen_corpora = [
            replace(corpus, weight=weights[corpus.name]) for corpus in self.corpora if corpus.name in weights
        ]
        if unknown_names := sorted(set(weights) - {corpus.name for corpus in self.corpora}):
            raise ConfigError(f"the blend names the corpus {unknown_names[0]!r}, which is not there")
        quota_by_name = dict(
            zip((c.name for c in chosen_corpora), blend_quotas(chosen_corpora, self.block), strict=True)
        )
        return [quota_by_name.get(corpus.name, 0) for corpus in self.corpora]

    def _phase(self, block: int) -> int:
        return int(np.searchsorted(self._starts, block, side="right")) - 1

    def samples_at(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The corpus of each of n positions, and the number of its sample there."""
        corpus_indexes, slots = self.slots_at(positions)
        samples = slots.copy() if self._exchanged else slots
        for corpus_index, exchanged in self._exchanged.items():
            is_own = corpus_indexes == corpus_index
            samples[is_own] = _looked_up(slots[is_own], *exchanged.samples_by_slot)
        return corpus_indexes, samples

    def slots_at(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The corpus of each of n positions, and its slot: the number of its samples before that position."""
        if len(self.corpora) == 1:
            return np.zeros_like(positions), positions
        blocks, slots = np.divmod(positions, self.block)
        corpus_indexes, turn_numbers = np.empty_like(positions), np.empty_like(positions)
        for block_number, members in _groups(blocks):
            slot_corpora, block_turns = self._shuffled(block_number)
            corpus_indexes[members] = slot_corpora[slots[members]]
            turn_numbers[members] = block_turns[slots[members]]
        phase = np.searchsorted(self._starts, blocks, side="right") - 1
        whole_blocks = (blocks - self._starts[phase]) * self._quotas[phase, corpus_indexes]
        return corpus_indexes, self._before[phase, corpus_indexes] + whole_blocks + turn_numbers

    def _slots_of(self, corpus: int, samples: Int64s) -> Int64s:
        """The slots of a corpus that hold n of its samples."""
        if corpus not in self._exchanged:
            return samples
        return _looked_up(samples, *self._exchanged[corpus].slots_by_sample)

    def positions_at(self, corpus: int, slots: Int64s) -> Int64s:
        """The positions of n slots of a corpus: the inverse of `slots_at`."""
        if len(self.corpora) == 1:
            return slots
        # A phase without the corpus starts at the same sample number as the next one, and holds none.
        phase_numbers = np.searchsorted(self._before[:, corpus], slots, side="right") - 1
        quota = self._quotas[phase_numbers, corpus]
        blocks, turn_numbers = np.divmod(slots - self._before[phase_numbers, corpus], quota)
        blocks += self._starts[phase_numbers]
        positions = np.empty_like(slots)
        for block_number, members in _groups(blocks):
            corpus_places = np.flatnonzero(
                self._shuffled(block_number)[0] == corpus
            )  # ascending, like its ranks
            positions[members] = block_number * self.block + corpus_places[turn_numbers[members]]
        return positions

    def _shuffle(self, block: int) -> tuple[npt.NDArray[np.uint16], Int64s]:
        """The corpus of each slot of a block, and the slot's rank among that corpus's slots."""
        first_key, second_key, *_ = round_keys(self.seed, "", block)
        numbers, number_bits = np.arange(self.block, dtype=np.uint64), np.uint64(self.block.bit_length())
        mixed_numbers = _mix(_mix(numbers ^ np.uint64(first_key)) ^ np.uint64(second_key))
        # Sorting hashes that carry their number in the low bits is several times faster than argsort.
        low_bits = (np.uint64(1) << number_bits) - np.uint64(1)
        shuffle = np.sort(mixed_numbers << number_bits | numbers) & low_bits
        phase = self._phase(block)
        slot_corpora, turn_numbers = self._slots[phase][shuffle], np.empty(self.block, dtype=np.int64)
        turn_numbers[np.argsort(slot_corpora, kind="stable")] = self._turns[phase]
        return slot_corpora, turn_numbers

    def _keys(self, name: str, epochs: Int64s) -> UInt64s:
        """Round keys [rounds, n] for n epochs of a corpus."""
        unique_epochs, epoch_indexes = np.unique(epochs, return_inverse=True)
        epoch_keys = [round_keys(self.seed, name, int(unique_epoch)) for unique_epoch in unique_epochs]
        return np.array(epoch_keys, dtype=np.uint64).reshape(-1, ROUNDS)[epoch_indexes].T


def blend_quotas(corpora: Sequence[OrderedCorpus], block: int) -> tuple[int, ...]:
    """Slots of `block` for each corpus: its exact share, by largest remainder, ties by name.

    Raises ConfigError for no corpora, equal or empty names, weights that are not positive and finite, and a
    weight too small for one slot.
    """
    corpus_names = [corpus.name for corpus in corpora]
    if not corpus_names or not all(corpus_names) or len(set(corpus_names)) != len(corpus_names):
        raise ConfigError(f"a blend needs corpora with different, non-empty names, not {corpus_names}")
    for corpus in corpora:
        if not (math.isfinite(corpus.weight) and corpus.weight > 0):
            raise ConfigError(
                f"corpus {corpus.name!r} has the weight {corpus.weight}: give a positive number"
            )
    total_weight = sum(Fraction(corpus.weight) for corpus in corpora)
    shares = [Fraction(corpus.weight) / total_weight * block for corpus in corpora]
    quotas = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(corpus_names)), key=lambda i: (quotas[i] - shares[i], corpus_names[i]))
    for corpus_index in by_remainder[: block - sum(quotas)]:
        quotas[corpus_index] += 1
    for corpus, share, quota in zip(corpora, shares, quotas, strict=True):
        if quota == 0:
            raise ConfigError(
                f"corpus {corpus.name!r} has {float(share):.3g} of {block} slots of the blend, which "
                f"rounds to none: give it at least 1/{block} of all weights, or leave it out"
            )
    return tuple(quotas)


@lru_cache(maxsize=4096)
def round_keys(seed: int, name: str, number: int) -> tuple[int, ...]:
    """`ROUNDS` independent 64-bit keys for (seed, name, number)."""
    material = json.dumps([VERSION, seed, name, number]).encode()
    return tuple(np.frombuffer(hashlib.blake2b(material, digest_size=8 * ROUNDS).digest(), "<u8").tolist())


def permute_values(values: Int64s, sizes: Int64s, keys: UInt64s) -> Int64s:
    """For each i, a bijection of [0, sizes[i]), chosen by keys[:, i] (uint64 [rounds, n]), at values[i].

    Pairs of numbers below `side` number at most 2 * sqrt(size) + 1 more than needed; a value that lands in the excess
    is mapped again (cycle walking), which keeps the map a bijection.
    """

    def forward(left: UInt64s, right: UInt64s, side: UInt64s, keys: UInt64s) -> tuple[UInt64s, UInt64s]:
        for round_key in keys:
            left, right = right, (left + _mix(right ^ round_key) % side) % side
        return left, right

    return _walk(forward, values, sizes, keys)


def unpermute_values(values: Int64s, sizes: Int64s, keys: UInt64s) -> Int64s:
    """The inverse of `permute_values`."""

    def backward(left: UInt64s, right: UInt64s, side: UInt64s, keys: UInt64s) -> tuple[UInt64s, UInt64s]:
        for round_key in keys[::-1]:
            left, right = (right + side - _mix(left ^ round_key) % side) % side, left
        return left, right

    return _walk(backward, values, sizes, keys)


def _walk(
    rounds: Callable[..., tuple[UInt64s, UInt64s]], values: Int64s, sizes: Int64s, keys: UInt64s
) -> Int64s:
    """Reduce a bijection of pairs of numbers below ceil(sqrt(size)) to one of [0, size) by cycle walking."""
    size, walked_values = sizes.astype(np.uint64), values.astype(np.uint64)
    unique_sizes, size_indexes = np.unique(size, return_inverse=True)
    square_roots = [
        math.isqrt(int(unique_size) - 1) + 1 for unique_size in unique_sizes
    ]  # exact, unlike a float's root
    side = np.array(square_roots, dtype=np.uint64)[size_indexes]
    walking_indexes = np.arange(walked_values.size)
    while walking_indexes.size:
        modulus = side[walking_indexes]
        halves = np.divmod(walked_values[walking_indexes], modulus)
        left_half, right_half = rounds(*halves, modulus, keys[:, walking_indexes])
        walked_values[walking_indexes] = left_half * modulus + right_half
        walking_indexes = walking_indexes[walked_values[walking_indexes] >= size[walking_indexes]]
    return walked_values.astype(np.int64)


def _groups(values: Int64s) -> Iterator[tuple[int, Int64s]]:
    """Each distinct value, with its indices."""
    sorted_indexes = np.argsort(values, kind="stable")
    for member_indexes in np.split(sorted_indexes, np.flatnonzero(np.diff(values[sorted_indexes])) + 1):
        if member_indexes.size:
            yield int(values[member_indexes[0]]), member_indexes


def _mix(x: UInt64s) -> UInt64s:
    """SplitMix64's finalizer: every bit of the result depends on every bit of `x`."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


Swap = tuple[int, int, int]  # first slot of one range, of the other, and their length


@dataclass(frozen=True)
class Exchange:
    """Swaps [first, second, count] of samples within `corpus`, applied in order: one is read later, in return for a
    later one.

    A swap exchanges two ranges of the samples that a corpus gives to the run, one for one: the slots first + i and
    second + i hold each other's samples. Exchanges compose, so the order stays a permutation: nothing is lost, nothing
    is read twice. Slots are counted within the corpus, so a change of the blend's weights does not affect an exchange.
    """

    corpus: str
    swaps: tuple[Swap, ...]


class Exchanged:
    """The slots of one corpus that hold other samples than their own: two sorted tables, a lookup takes O(log n).

    `moved`: these slots, ascending, and their samples, int64 [n, 2]. `samples_by_slot`, `slots_by_sample`: keys,
    ascending, and values. `deferred`: slots whose sample comes from an earlier slot, ascending, int64 [n].
    """

    def __init__(self, swaps: Sequence[Swap]) -> None:
        held, deferred_slots = dict[int, int](), set[int]()  # held: the number of the sample, by its slot
        for first, second, count in swaps:
            for first_slot, b in zip(range(first, first + count), range(second, second + count), strict=True):
                held[first_slot], held[b] = held.get(b, b), held.get(first_slot, first_slot)
                deferred_slots.discard(first_slot)
                deferred_slots.add(b)
        moved_slots = sorted((slot, sample) for slot, sample in held.items() if slot != sample)
        self.moved = np.array(moved_slots, dtype=np.int64).reshape(-1, 2)
        self.deferred = np.array([slot for slot, _ in moved_slots if slot in deferred_slots], dtype=np.int64)
        self.samples_by_slot = np.ascontiguousarray(self.moved.T)
        slots, samples = self.samples_by_slot
        by_sample = np.argsort(samples)
        self.slots_by_sample = samples[by_sample], slots[by_sample]


def swaps_of(firsts: Int64s, seconds: Int64s) -> tuple[Swap, ...]:
    """The exchange of the slots firsts[i] and seconds[i], all different, in as few ranges as possible."""
    if not firsts.size:
        return ()
    break_indexes = np.flatnonzero((np.diff(firsts) != 1) | (np.diff(seconds) != 1)) + 1
    range_edges = [0, *break_indexes.tolist(), firsts.size]
    return tuple((int(firsts[a]), int(seconds[a]), b - a) for a, b in pairwise(range_edges))


def _looked_up(numbers: Int64s, keys: Int64s, values: Int64s) -> Int64s:
    """values[i] for each of `numbers` that equals keys[i] (ascending), the number itself otherwise."""
    if not keys.size:
        return numbers
    key_indexes = np.minimum(np.searchsorted(keys, numbers), keys.size - 1)
    return np.where(keys[key_indexes] == numbers, values[key_indexes], numbers)
