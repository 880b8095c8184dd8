"""Read a checkpoint by all ranks together, every byte of it once.

The files are shared out: in the layout that wrote them every rank reads its own part, else all ranks about equally many
bytes. A rank hashes what it reads, compares it with the manifest, and keeps it until it is loaded. What another rank
needs of it, it gets from there, over the network between the ranks and not from the file system that all of them share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base import free_memory
from megastable.base.collectives import find_least, gather_objects, run_on_all, run_on_first
from megastable.base.errors import CheckpointError
from megastable.base.hardware import ranks_of_host
from megastable.checkpoint import store
from megastable.checkpoint.files import (
    FileRecord,
    Pieces,
    Reader,
    TensorEntry,
    hash_file,
    part_name,
    random_name,
    read_file,
)
from megastable.checkpoint.store import Contents, RunState
from megastable.checkpoint.whole import (
    Slice,
    WholeState,
    check_model,
    check_optimizer,
    load_into,
    read_tensors,
    restore_rest,
)
from megastable.engine.flatstate import KINDS
from megastable.parallel.sharding import Fragment

PIECE = 1 << 26  # bytes of a message between two ranks
ROUND = 1 << 28  # bytes that a rank receives at once, and sends
SUFFIXES = (".json", ".safetensors")  # of a rank's part


class HeldFiles:
    """A verified checkpoint, of which this rank holds a part in memory.

    contents: its manifest; holders: the rank that has read each file; own: what this rank has read, by name, uint8;
    None where the ranks have no memory for it: then it is read again.
    """

    def __init__(
        self, folder: Path, contents: Contents, holders: dict[str, int], own: dict[str, Tensor] | None
    ):
        self.folder, self.contents, self.holders, self.own = folder, contents, holders, own

    def find_bytes(self, name: str) -> bytes | None:
        """A file that this rank holds, if it does."""
        return self.own[name].numpy().tobytes() if self.own and name in self.own else None

    def share_file(self, name: str) -> bytes:
        """A file, from the rank that holds it. Collective."""
        content = [self.find_bytes(name)]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(content, src=self.holders[name])
        assert content[0] is not None
        return content[0]

    def describe_parts(self, group: Any) -> tuple[dict[str, Pieces], dict[str, dict[str, TensorEntry]]]:
        """The parts that the ranks of a group hold: descriptions, and what the files of tensors hold, by name.
        Collective. Raises CheckpointError."""
        held_files = self.own or {}

        def describe() -> tuple[dict[str, bytes], dict[str, dict[str, TensorEntry]]]:
            parts, tensor_files = (
                self.contents.parts,
                {name.replace(*SUFFIXES) for name in self.contents.parts},
            )
            return (
                {name: held_files[name].numpy().tobytes() for name in held_files.keys() & set(parts)},
                {
                    name: Reader(self.folder / name, held_files[name]).entries
                    for name in held_files.keys() & tensor_files
                },
            )

        descriptions: dict[str, bytes] = {}
        entries: dict[str, dict[str, TensorEntry]] = {}
        for rank_descriptions, rank_entries in gather_objects(run_on_all(describe), group):
            descriptions |= rank_descriptions
            entries |= rank_entries
        return run_on_all(
            lambda: {n: Pieces.read(self.folder / n, descriptions[n]) for n in sorted(descriptions)}
        ), entries


def read_newest_good(
    folder: Path, quarantined: Mapping[str, str] | None = None
) -> tuple[HeldFiles | None, dict[str, str]]:
    """(the newest checkpoint that verifies, newer ones that do not, with the reason). Collective.

    quarantined: names that do not count, with the reason; the same on all ranks.
    """

    def list_names() -> list[str]:
        try:
            store.bring_back(folder)
        except OSError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        return [path.name for path in store.newest_first(folder)]

    rejected: dict[str, str] = {}
    for checkpoint_name in run_on_first(list_names):
        if quarantined and checkpoint_name in quarantined:
            rejected[checkpoint_name] = quarantined[checkpoint_name]
            continue
        try:
            return read_checkpoint(folder / checkpoint_name), rejected
        except CheckpointError as error:
            rejected[checkpoint_name] = str(error)
    return None, rejected


def read_checkpoint(folder: Path) -> HeldFiles:
    """Read and verify all files of a checkpoint. Collective. Raises CheckpointError on all ranks where one differs from
    the manifest or cannot be read."""
    contents = run_on_first(lambda: store.check_contents(folder))
    holders = assign_holders(contents, dist.get_world_size())
    own_names = [name for name, rank in holders.items() if rank == dist.get_rank()]
    own_bytes = sum(contents.files[name].size for name in own_names)
    has_room = own_bytes * ranks_of_host() <= free_memory.SHARE * free_memory.free_bytes()
    (all_have_room,) = find_least([has_room])
    own_files: dict[str, Tensor] = {}

    def read(path: Path) -> FileRecord:
        if not all_have_room:
            return hash_file(path)
        own_files[path.name], file_record = read_file(path)
        return file_record

    def verify() -> None:
        for name in own_names:
            if problem := store.explain_file(folder, contents, name, read):
                raise CheckpointError(problem)

    run_on_all(verify)
    return HeldFiles(folder, contents, holders, own_files if all_have_room else None)


def assign_holders(contents: Contents, world: int) -> dict[str, int]:
    """The rank of `world` that reads each file: its own random states, and its own part if as many ranks have written;
    all other files, the largest first, go around all ranks."""
    suffixes = SUFFIXES if len(contents.parts) == world else ()
    own_files = {f"{part_name(rank)}{suffix}": rank for rank in range(world) for suffix in suffixes}
    own_files |= {random_name(rank): rank for rank in range(world)}
    by_size = sorted(contents.files, key=lambda name: (-contents.files[name].size, name))
    others = [name for name in by_size if name not in own_files]
    around = {name: place % world for place, name in enumerate(others)}
    return {name: (own_files | around)[name] for name in by_size}


def load_shared(engine: Any, held: HeldFiles, state: RunState) -> None:
    """Load a checkpoint into an engine of any layout, as `load_into`, from what the ranks hold of it. Collective.
    Raises CheckpointError."""
    if held.own is None:
        run_on_all(lambda: load_into(engine, held.folder, state))
        return
    shared_file = held.share_file(store.SHARED) if store.SHARED in held.contents.files else b""

    def read_shared() -> dict[str, Tensor]:
        content = torch.frombuffer(bytearray(shared_file), dtype=torch.uint8) if shared_file else None
        return {} if content is None else read_tensors(Reader(held.folder / store.SHARED, content))

    def check() -> None:
        check_model(held.folder, engine.config.model, held.contents)
        check_optimizer(held.folder, state, engine.config.optimizer.name)

    run_on_all(check)
    topology, flat = engine.topology, engine.flat_state()
    # In the layout that wrote it a rank needs its own part, and of what is held alike what the first rank of its tensor
    # group has written, or another replica. Descriptions of all parts would be as many as there are ranks, on every
    # rank.
    group = topology.copies_group
    parts, entries = held.describe_parts(group)
    # In another layout a part's description and its tensors may be of two ranks, of which one is not in the group.
    known_parts = {name: part for name, part in parts.items() if name.replace(*SUFFIXES) in entries}
    whole_state = WholeState(held.folder, known_parts, partly=True)
    place = topology.tensor_rank, topology.layout.tensor
    if not find_least([whole_state.holds(flat.fragments, *place)])[0]:
        group = dist.group.WORLD
        parts, entries = held.describe_parts(group)
        whole_state = run_on_all(lambda: WholeState(held.folder, parts))
        run_on_all(lambda: whole_state.check_fits(engine.config.model))

    def plan() -> Iterator[list[Slice]]:
        for fragment in flat.fragments:
            for kind in flat.kinds_of_group(fragment.group) if state.adam_step else KINDS[:1]:
                yield whole_state.plan_range(fragment.name, kind, *place, fragment.start, fragment.numel)

    plans = run_on_all(lambda: [locate_slices(held.folder, entries, slices) for slices in plan()])
    supply = Supply(held, plans, group)

    def read(fragment: Fragment, kind: str) -> Tensor:
        read_slices = supply.take_slices()
        return whole_state.join_range(fragment.name, *place, fragment.start, fragment.numel, read_slices)

    flat.fill_from(read, state.adam_step)
    supply.finish()
    run_on_all(lambda: restore_rest(engine, state, read_shared()))


Located = tuple[str, int, int]  # a file, and bytes [begin, end) of it


def locate_slices(
    folder: Path, entries: Mapping[str, Mapping[str, TensorEntry]], slices: Sequence[Slice]
) -> list[Located]:
    """Where the elements lie. Raises CheckpointError for those that are not there."""
    located = []
    for piece in slices:
        entry = entries[piece.file].get(piece.entry)
        piece.check_entry(folder / piece.file, entry)
        assert entry is not None
        located.append((piece.file, entry.begin + 4 * piece.start, entry.begin + 4 * piece.end))
    return located


def count_bytes(piece: Located) -> int:
    return piece[2] - piece[1]


def count_answers(sizes: Sequence[Sequence[int]]) -> list[int]:
    """How many of the questions of each rank are answered in a round, from the first on, by at most `ROUND` bytes:
    everyone's first one, then everyone's second, and so on. sizes: of the answers, by rank."""
    answered_counts, room = [0] * len(sizes), ROUND
    for number in range(max(map(len, sizes))):
        for place in [place for place, rank_sizes in enumerate(sizes) if len(rank_sizes) > number]:
            room -= sizes[place][number]
            if room < 0:
                return answered_counts
            answered_counts[place] += 1
    return answered_counts


class Supply:
    """Hands out the elements that this rank fills its state with, in the order of `plans`. Those that another rank
    holds come in rounds, in which all ranks take part until nothing is missing anywhere. A rank holds at most `ROUND`
    bytes of what it has received, and sends as much in a round, however many ranks want the files that it holds."""

    def __init__(self, held: HeldFiles, plans: Sequence[Sequence[Located]], group: Any) -> None:
        self._own, self._names, self._group = held.own or {}, sorted(held.contents.files), group
        self._places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
        self._holders, self._plans = held.holders, deque(plans)
        self._missing = deque(piece for plan in plans for located in plan for piece in self._cut(*located))
        self._received: dict[Located, Tensor] = {}
        self._open = True

    def take_slices(self) -> list[Tensor]:
        """The elements of the next plan, fp32 [n] each."""
        return [self._take(*located) for located in self._plans.popleft()]

    def finish(self) -> None:
        """Take part in what the other ranks still exchange."""
        while self._open:
            self._exchange()

    def _take(self, name: str, begin: int, end: int) -> Tensor:
        taken = torch.empty(end - begin, dtype=torch.uint8)
        if name in self._own:
            taken.copy_(self._own[name][begin:end])
        for piece in self._cut(name, begin, end):
            while piece not in self._received:
                self._exchange()
            self._missing.popleft()
            taken[piece[1] - begin : piece[2] - begin] = self._received.pop(piece)
        return taken.view(torch.float32)

    def _cut(self, name: str, begin: int, end: int) -> Iterator[Located]:
        """The messages that bring these bytes, if another rank holds them."""
        for start in range(begin, end if name not in self._own else begin, PIECE):
            yield name, start, min(end, start + PIECE)

    def _choose_questions(self) -> list[list[Located]]:
        """By the place of the rank that holds it: what is missing of the next `ROUND` bytes, and not received yet."""
        asked_pieces, room = [list[Located]() for _ in self._places], ROUND
        for piece in self._missing:
            room -= count_bytes(piece)
            if room < 0:
                break
            if piece not in self._received:
                asked_pieces[self._places[self._holders[piece[0]]]].append(piece)
        return asked_pieces

    def _exchange(self) -> None:
        """One round: all ranks of the group ask each other for bytes, and get the first of them."""
        asked_pieces, one_each = self._choose_questions(), [1] * len(self._places)
        told_counts = self._swap_numbers(
            [[len(pieces), len(self._missing)] for pieces in asked_pieces], [2 for _ in one_each]
        )
        if not any(missing_count for _, missing_count in told_counts):
            self._open = False
            return
        asked_numbers = [
            [number for name, *ends in pieces for number in (self._names.index(name), *ends)]
            for pieces in asked_pieces
        ]
        questions = [
            [(self._names[name], begin, end) for name, begin, end in zip(*[iter(numbers)] * 3, strict=True)]
            for numbers in self._swap_numbers(asked_numbers, [3 * count for count, _ in told_counts])
        ]
        given_counts = count_answers([[count_bytes(piece) for piece in pieces] for pieces in questions])
        given_pieces = [pieces[:count] for pieces, count in zip(questions, given_counts, strict=True)]
        came_counts = self._swap_numbers([[count] for count in given_counts], one_each)
        came_pieces = [pieces[:count] for pieces, (count,) in zip(asked_pieces, came_counts, strict=True)]
        answers = [self._own[name][begin:end] for name, begin, end in chain(*given_pieces)]
        given_sizes, came_sizes = (
            [sum(map(count_bytes, pieces)) for pieces in by_rank] for by_rank in (given_pieces, came_pieces)
        )
        sent_bytes = torch.cat([torch.empty(0, dtype=torch.uint8), *answers])
        received_pieces = list(chain(*came_pieces))
        received_parts = self._all_to_all(sent_bytes, given_sizes, came_sizes).split(
            [count_bytes(piece) for piece in received_pieces]
        )
        self._received.update(zip(received_pieces, received_parts, strict=True))

    def _swap_numbers(self, sent: Sequence[Sequence[int]], received_sizes: Sequence[int]) -> list[list[int]]:
        """A list of numbers to each rank of the group, and one from each."""
        sent_numbers = torch.tensor(list(chain(*sent)), dtype=torch.int64)
        received_numbers = self._all_to_all(sent_numbers, [len(numbers) for numbers in sent], received_sizes)
        return [numbers.tolist() for numbers in received_numbers.split(list(received_sizes))]

    def _all_to_all(self, sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]) -> Tensor:
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        received = torch.empty(sum(received_sizes), dtype=sent.dtype, device=device)
        dist.all_to_all_single(
            received, sent.to(device), list(received_sizes), list(sent_sizes), group=self._group
        )
        return received.cpu()
