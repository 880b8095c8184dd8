"""The order of a map-style dataset that can go back, leave samples out and read them later. Needs torch.

    sampler = SkippableSampler(len(dataset), batch=64, seed=1)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)  # 4 micro-batches to an update
    ...
    sampler.seek(guard.rewind(), trained=verdict.step, defer=guard.deferred)
    batches = iter(loader)  # one that goes on would yield what it had fetched: as many updates as `seek` returns

Where the guard names the bad samples (`Guard.use_replay`), they alone are left out, of a refused update as well:

    if not verdict.apply:
        step = guard.rewind() if verdict.rewind else verdict.step
        sampler.seek(step, trained=verdict.step, skip=guard.skipped, defer=guard.deferred)

The order is one stream through all epochs: a permutation of the dataset for each, drawn from seed and epoch. Its length
is that of the run, so that a run that goes back does not end early.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

REMEMBERED = 4096  # steps whose beginnings are kept
SHOWN = 20  # indices in a warning


class Place(NamedTuple):
    """Where the stream stands. position: in the order of all epochs; late: how many of the deferred samples were read
    since; read: samples so far."""

    position: int = 0
    late: int = 0
    read: int = 0


class SkippableSampler(Sampler[int]):
    """Yields indices of a dataset.

    Args:
        size: of the dataset.
        batch: samples that this sampler yields for an update: of all micro-batches, and of all ranks if each of them
            iterates over all (as Accelerate does), else of one rank.
        seed: of the permutations.
        shuffle: False reads the dataset in its order.
        updates: length of the stream, in updates; None: one epoch.
        rank, ranks: of the data-parallel ranks, if each has a sampler for its own part.
        after: deferred samples are read again this many samples later.
    """

    def __init__(
        self, size: int, batch: int, *, seed: int = 0, shuffle: bool = True, updates: int | None = None,
        rank: int = 0, ranks: int = 1, after: int = 10_000,
    ) -> None:  # fmt: skip
        self.size, self.batch, self.seed, self.shuffle, self.after = size, batch * ranks, seed, shuffle, after
        self.rank, self.ranks = rank, ranks
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks} ranks")
        self.length = size if updates is None else updates * self.batch
        self._place, self._starts = Place(), {0: Place()}
        self._skipped: set[int] = set()  # indices
        # Of the skipped ones, those that came with trouble twice, and are not named.
        self._dropped: set[int] = set()
        self._left_out: set[int] = set()  # positions of deferred samples
        # Index, after how many samples it is read, and its position.
        self._deferred: list[tuple[int, int, int]] = []
        # By refused update: indices that are skipped, and positions that are left out, for its sake alone; and numbers
        # and entries of deferred samples that it read.
        self._returned: dict[int, tuple[set[int], set[int], dict[int, tuple[int, int, int]]]] = {}
        self._filler = 0  # samples that fill up a batch of stale ones, or that nobody reads
        self._passed = 0  # of the next iterator, which nobody reads
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return self.length // self.ranks

    def __iter__(self) -> Iterator[int]:
        """From where the stream stands. Samples that an earlier iterator has fetched are not yielded again."""
        if self._place.read + self.ranks > self.length:
            raise RuntimeError(f"all {self.length:,} samples are read: give the length of the run (updates=)")
        self._filler, self._passed = self._passed, 0
        while self._place.read + self.ranks <= self.length:
            while self._filler:
                self._filler -= 1
                yield self._index_at(self._place.position)
            indices = [self._take() for _ in range(self.ranks)]
            step, rest = divmod(self._place.read, self.batch)
            if rest == 0:
                self._starts[step] = self._place
                self._starts.pop(step - REMEMBERED, None)
            yield indices[self.rank]

    def seek(self, step: int, trained: int, *, skip: Sequence[int] = (), defer: Sequence[int] = ()) -> int:
        """Go on behind `step` updates, in another order.

        Args:
            step: updates that stay done; `trained` itself where a refused update gives back what of its samples is not
                bad. Whoever goes back to before that later takes this back, too.
            trained: updates whose samples the loop has taken from the loader so far.
            skip: indices of bad samples, which are never read again.
            defer: steps whose samples, but those of `skip`, are read later instead. Those that were deferred before
                came with trouble twice: without a `skip` that says which are bad, they are skipped, with a warning.

        Returns:
            Updates that the present iterator of a loader still yields before those of the new order, as it had fetched
            them; the last one is filled up. A new iterator yields none of them.
        """
        fetched = self._place.read - trained * self.batch
        self._take_back(step)
        bad_indices, positions, late = {int(index) for index in skip} - self._skipped, set[int](), set[int]()
        for deferred_step in defer:
            positions_read, late_read = self._read_by(deferred_step - 1)
            positions |= positions_read
            late |= late_read
        start = self._start_of(step)
        late_entries = {number: self._deferred[number] for number in sorted(late)}
        dropped = set[int]()
        if not skip:
            dropped = {index for index, _, _ in late_entries.values()} - self._skipped
            bad_indices |= dropped
        if len(self._skipped | bad_indices) >= self.size:
            raise ValueError(
                f"all {self.size:,} samples of the dataset are skipped: nothing is left to train on"
            )
        self._skipped |= bad_indices
        self._dropped |= dropped
        if dropped and self.rank == 0:
            first_text = f"{sorted(dropped)[:SHOWN]}{' and more' if len(dropped) > SHOWN else ''}"
            warnings.warn(
                f"megastable guard: {len(dropped)} deferred samples came with trouble once more, and which of them are "
                f"bad is not known: they are skipped: {first_text}; Guard.report(sampler) has all of them",
                stacklevel=2,
            )
        self._starts = {begun: place for begun, place in self._starts.items() if begun <= step}
        # Of a refused update that stays where it is, the late ones are counted as read.
        self._place = start._replace(late=start.late - sum(number < start.late for number in late))
        self._starts[step] = self._place
        due = start.read + self.after
        self._deferred = [entry for number, entry in enumerate(self._deferred) if number not in late]
        self._deferred += [
            (index, due, position)
            for index, _, position in late_entries.values()
            if index not in self._skipped
        ]
        for position in sorted(positions):
            if (index := self._index_at(position)) not in self._skipped:
                self._deferred.append((index, due, position))
        self._left_out |= positions
        if step == trained:
            self._returned[step] = bad_indices, positions, late_entries
            self._returned.pop(min(self._returned) if len(self._returned) > REMEMBERED else -1, None)
        self._filler = -fetched % self.batch // self.ranks
        return -(-fetched // self.batch)

    def look_ahead(self, count: int, step: int | None = None) -> list[int]:
        """The next `count` samples of this rank: behind update `step`, or that nobody has fetched yet; less at the end
        of the stream."""
        return self._read_from(self._place if step is None else self._start_of(step), count * self.ranks)

    def read_indices(self, step: int) -> list[int]:
        """The samples of this rank in an update, from 1, as the order stands: no matter what a loader's workers have
        fetched meanwhile. Raises LookupError if that is unknown: of older updates, or of those after it."""
        return self._read_from(self._start_of(step - 1), self.batch)

    def _read_from(self, start: Place, count: int) -> list[int]:
        """This rank's part of `count` samples of all ranks; the stream stays where it is."""
        before, self._place = self._place, start
        try:
            indices = [self._take() for _ in range(min(count, self.length - start.read))]
        finally:
            self._place = before
        return indices[self.rank :: self.ranks]

    def _take_back(self, step: int) -> None:
        """What was done about updates behind `step`, which are read again."""
        for returned_step in sorted((kept for kept in self._returned if kept > step), reverse=True):
            bad_indices, positions, late_entries = self._returned.pop(returned_step)
            self._skipped -= bad_indices
            self._dropped -= bad_indices
            self._left_out -= positions
            taken_back = positions | {position for _, _, position in late_entries.values()}
            self._deferred = [entry for entry in self._deferred if entry[2] not in taken_back]
            for number, late_entry in late_entries.items():  # where they were: those before are read already
                self._deferred.insert(number, late_entry)

    def list_left_out(self) -> dict[str, list[int]]:
        """Indices of samples that are deferred and not read again yet; that are skipped for good; and of these, that
        are dropped: they were deferred, came with trouble once more, and nobody knows which of them are bad."""
        pending = sorted(index for index, _, _ in self._deferred[self._place.late :])
        return {"deferred": pending, "skipped": sorted(self._skipped), "dropped": sorted(self._dropped)}

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """For a checkpoint after `step` updates; None: after all that were yielded."""
        place = self._place if step is None else self._start_of(step)
        order = [self.size, self.seed, self.shuffle, self.batch]
        return {
            "place": list(place), "skipped": sorted(self._skipped), "left_out": sorted(self._left_out),
            "dropped": sorted(self._dropped),
            "deferred": [list(entry) for entry in self._deferred], "order": order,
            "returned": [
                [step, sorted(bad), sorted(left), [[number, *entry] for number, entry in late.items()]]
                for step, (bad, left, late) in self._returned.items()
            ],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any], passed: int = 0) -> None:
        """passed: updates for which the next iterator yields samples that nobody reads, as a trainer that is resumed
        passes over those it knows to be done. Raises ValueError if the state is of another dataset or seed."""
        if list(state["order"]) != (order := [self.size, self.seed, self.shuffle, self.batch]):
            raise ValueError(
                f"the checkpoint's sampler has [size, seed, shuffle, batch] {state['order']}, this one {order}"
            )
        self._place = Place(*state["place"])
        self._starts = {self._place.read // self.batch: self._place}
        self._skipped, self._left_out = set(state["skipped"]), set(state["left_out"])
        self._dropped = set(state.get("dropped", ()))
        self._deferred = [(index, due, position) for index, due, position in state["deferred"]]
        self._returned = {
            step: (set(bad), set(left), {number: (index, due, place) for number, index, due, place in late})
            for step, bad, left, late in state["returned"]
        }
        self._passed = passed * self.batch // self.ranks

    def _take(self) -> int:
        """The next sample."""
        position, late, read = self._place
        pending = len(self._deferred) - late
        if pending > 0 and (self._deferred[late][1] <= read or read + pending >= self.length):
            index = self._deferred[late][0]
            self._place = Place(position, late + 1, read + 1)
            return index
        while position in self._left_out or self._index_at(position) in self._skipped:
            position += 1
        self._place = Place(position + 1, late, read + 1)
        return self._index_at(position)

    def _read_by(self, step: int) -> tuple[set[int], set[int]]:
        """What the update after `step` others reads: positions of the order, and numbers of deferred samples."""
        before, self._place = self._place, self._start_of(step)
        positions, late = set[int](), set[int]()
        for _ in range(self.batch):
            place = self._place
            self._take()
            if self._place.late > place.late:
                late.add(place.late)
            else:
                positions.add(self._place.position - 1)
        self._place = before
        return positions, late

    def _start_of(self, step: int) -> Place:
        if step not in self._starts:
            raise LookupError(
                f"the beginning of step {step} is not remembered: {min(self._starts)} is the oldest"
            )
        return self._starts[step]

    def _index_at(self, position: int) -> int:
        epoch, offset = divmod(position, self.size)
        if not self.shuffle:
            return offset
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        return int(self._permutation[offset])
