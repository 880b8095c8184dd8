"""Verifies what ranks hold: that masters, moments and weights of a rank are what its last update left, as nothing may
change them between two updates; that copies of tensors are equal, at an interval; and that all ranks received the same
sum. The last two are compared in the sum that every step makes anyway. Collective.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megastable.base.collectives import gather_objects
from megastable.base.fingerprint import Marks, compare_marks, mark_of, marks_of
from megastable.config.stability import HardwareConfig
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.rank_checks import (
    COPIES,
    EXPERTS,
    SHARDS,
    WEIGHTS,
    Replicas,
    are_equal,
    split_fingerprint,
)
from megastable.engine.watch import Watch
from megastable.hardware.hardware_fault import FaultLog, HardwareFault
from megastable.run.events.stability_events import ReplicasDiffer, StateChanged, WrongCopy

KINDS = {"weight": "fp32 masters", "exp_avg": "first moments", "exp_avg_sq": "second moments"}
NAMED = 3  # ranks, or tensors, named in a sentence


class StateWatch(Watch):
    """Of this rank. A GPU reads what an update left beside the next forward pass, on a stream of its own, and once more
    behind the backward pass. on: whether it looks from the next `seal_state` on."""

    name = "state"

    def __init__(self, on: bool, engine: Engine, step: int, faults: FaultLog) -> None:
        self.engine, self.on, self._faults = engine, on, faults
        self._beside = torch.cuda.Stream() if on and engine.device.type == "cuda" else None
        self.seal_state(step)

    def seal_state(self, step: int) -> None:
        """The state after `step` steps is as it should be."""
        self._step = step
        self._marks: Marks | None = None
        self._weights: Marks = {}
        self.weights: Marks | None = None  # as they are before an update, None if they are not looked at
        if not self.on:
            return
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self._marks, self._weights = marks_of(self.engine.optimizer_state()), self._mark_weights()
        if self._beside is not None:
            self.engine.hold_updates(self._beside.record_event())

    def _mark_weights(self) -> Marks:
        return {f"weights/{i}": mark_of(flat) for i, flat in enumerate(self.engine.zero.flat_weights)}

    def current_marks(self) -> Marks | None:
        """Of masters and moments, as the last update left them, by the names of optimizer_state()."""
        if self._beside is not None:  # what the GPU does next on its usual stream comes after the seal
            torch.cuda.current_stream().wait_stream(self._beside)
        return self._marks

    def ballot(self, step: int) -> Sequence[float]:
        """Whether the state is not what was sealed."""
        return (float(bool(self._find_changed())),) if self.on else ()

    def judge_memory(self, measured: Measured) -> HardwareFault | None:
        """Collective if anything changed."""
        return self._name_changed() if any(measured.ballot.get(self.name, ())) else None

    def check_memory(self) -> HardwareFault | None:
        """Compare now. Collective."""
        return self._name_changed() if self.on and any(gather_objects(bool(self._find_changed()))) else None

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        self.seal_state(step)

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:  # else the state is what the last update left
            self.seal_state(step)

    def _find_changed(self) -> list[str]:
        """What is not as it was, by names of optimizer_state(), or "weights/..."."""
        sealed_marks = self.current_marks()
        assert sealed_marks is not None
        self.weights = self._mark_weights()
        marks_now = {**marks_of(self.engine.optimizer_state()), **self.weights}
        return compare_marks({**sealed_marks, **self._weights}, marks_now)

    def _name_changed(self) -> HardwareFault | None:
        every_change = gather_objects(self._find_changed())
        ranks = [rank for rank, changed in enumerate(every_change) if changed]
        if not ranks:
            return None  # the fingerprint was wrong, not the memory
        texts = [f"{_describe(every_change[r])} of {self._faults.name_ranks([r])}" for r in ranks[:NAMED]]
        more_text = f" and of {len(ranks) - NAMED} more ranks" if len(ranks) > NAMED else ""
        reason = (
            f"after step {self._step}, between two updates, memory changed: {'; '.join(texts)}{more_text}"
        )
        memory_fault = self._faults.make_fault(self._step, ranks, reason)
        return self._faults.report_fault(StateChanged, self._step, memory_fault)


def _describe(changed: Sequence[str]) -> str:
    named = ("weights in compute precision" if name.startswith("weights/") else name for name in changed)
    return ", ".join(dict.fromkeys(KINDS.get(name.split("/")[-1], name) for name in named))


class Minority(NamedTuple):
    """Ranks whose copy differs from that of more than half of the group; proven: there is such a majority. Else all
    ranks of the group, in the order of their numbers."""

    ranks: tuple[int, ...]
    proven: bool


def find_minority(held: Mapping[int, int]) -> Minority:
    """held: by rank, its fingerprint of the same thing; not all are equal."""
    common_mark, common_count = Counter(held.values()).most_common(1)[0]
    if 2 * common_count <= len(held):
        return Minority(tuple(sorted(held)), False)
    return Minority(tuple(sorted(rank for rank, value in held.items() if value != common_mark)), True)


class SumWatch(Watch):
    """Of one process. A rank that clips by another norm than the others is seen nowhere else: what it updates is
    gathered by all."""

    name = "sums"

    def __init__(self, on: bool, faults: FaultLog) -> None:
        self._world = dist.get_world_size()
        self._on, self._faults = on and self._world > 1, faults
        self._step = self._mark = 0

    def ballot(self, step: int) -> Sequence[float]:
        return split_fingerprint(self._mark) if self._on else ()

    def judge_sums(self, measured: Measured, step: int) -> HardwareFault | None:
        """What the ballot of `step` shows of the step that was judged before. Collective if that differs."""
        if not self._on:
            return None
        mark, before, self._mark, self._step = self._mark, self._step, _mark_sums(measured), step
        are_same = are_equal(measured.ballot.get(self.name, ()), self._world)
        return None if are_same else self._name_receivers(mark, before)

    def _name_receivers(self, mark: int, step: int) -> HardwareFault:
        ranks, is_proven = find_minority(dict(enumerate(gather_objects(mark))))
        who_differs = "whose is wrong is not known"
        if is_proven:
            who_differs = f"{self._faults.name_ranks(ranks)} received something else than most"
        fault_reason = f"the sum of step {step} over all ranks was not the same on all of them: {who_differs}"
        sum_fault = self._faults.make_fault(step - 1, ranks if is_proven else (), fault_reason, link=True)
        return self._faults.report_fault(ReplicasDiffer, step, sum_fault, proven=step - 1)


def _mark_sums(measured: Measured) -> int:
    ballot_numbers = chain.from_iterable(measured.ballot.values())
    numbers = torch.tensor((measured.grad_norm, *ballot_numbers, *measured.gradients), dtype=torch.float64)
    return int(mark_of(torch.cat((measured.losses, measured.squares, numbers))).value)


class TensorCopies(NamedTuple):
    """Of a tensor. held: by rank of a group, its fingerprint."""

    kind: str
    name: str
    held: dict[int, int]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


class ReplicaWatch(Watch):
    """Of one process, which resumes after `step` steps. A checkpoint of copies that differ is never committed, so all
    is equal then. state: knows the fingerprints of the weights, where it has looked at them before."""

    name = "replicas"

    def __init__(
        self, config: HardwareConfig, engine: Engine, step: int, faults: FaultLog, state: StateWatch
    ) -> None:
        self.every, self.replicas, self._faults = config.fingerprint_interval, Replicas(engine), faults
        self._state = state
        self._equal = dict.fromkeys(self.replicas.kinds, step)  # after which step they were, by kind
        self._differing = 0, list[TensorCopies]()  # after which step, and which

    def ballot(self, step: int) -> Sequence[float]:
        return self.replicas.make_columns(self._due(step), self._list_known())

    def _list_known(self) -> dict[str, Marks]:
        """What the watch over the state has read, by kind."""
        sealed_marks = self._state.current_marks()
        if sealed_marks is None or self._state.weights is None:
            return {}
        shard_marks = {name: mark for name, mark in sealed_marks.items() if name.split("/")[-1] in KINDS}
        flat_marks = list(self._state.weights.items())
        known: dict[str, Marks] = {SHARDS: shard_marks}
        for kind in WEIGHTS:
            known[kind] = dict(self.replicas.choose_flat(kind, flat_marks))
        return known

    def _due(self, step: int) -> list[str]:
        """The kinds that are compared after `step`, before the next update: those that are read anyway always."""
        known_kinds = [*WEIGHTS, SHARDS] if self._state.on else [*WEIGHTS]
        compared_kinds = self.replicas.kinds if self.every else ()
        return [
            copy_kind for copy_kind in compared_kinds if copy_kind in known_kinds or step % self.every == 0
        ]

    def check_copies(self, step: int) -> HardwareFault | None:
        """Compare all now, after `step` steps. Collective."""
        copy_kinds, device = list(self.replicas.kinds), self.replicas.engine.device
        if not self.every or not copy_kinds:
            return None
        sum_columns = torch.tensor(self.replicas.make_columns(copy_kinds), dtype=torch.float64, device=device)
        dist.all_reduce(sum_columns)
        return self._judge(copy_kinds, sum_columns.tolist(), step)

    def judge_copies(self, measured: Measured, step: int) -> HardwareFault | None:
        """Before the update of `step`. Collective if anything differs."""
        ballot_sums = measured.ballot.get(self.name, ())
        return self._judge(self._due(step - 1), ballot_sums, step - 1) if ballot_sums else None

    def _judge(self, kinds: Sequence[str], sums: Sequence[float], step: int) -> HardwareFault | None:
        if unequal_kinds := self.replicas.find_unequal(kinds, sums):
            return self._name_differing(unequal_kinds, step)
        self._equal |= dict.fromkeys(kinds, step)
        return None

    def _name_differing(self, unequal: Sequence[tuple[str, list[int]]], step: int) -> HardwareFault:
        kinds = {kind for kind, _ in unequal}
        if COPIES in kinds and SHARDS in self.replicas.kinds:
            # A replica gathers what one of its ranks has updated wrong.
            shard_groups = [(SHARDS, ranks) for ranks in self.replicas.kinds[SHARDS]]
            unequal = [*(of for of in unequal if of[0] != SHARDS), *shard_groups]
            kinds.add(SHARDS)
        everyone = gather_objects({kind: self.replicas.fingerprint_by_name(kind) for kind in kinds})
        copies = [
            TensorCopies(kind, name, {rank: everyone[rank][kind].get(name, 0) for rank in ranks})
            for kind, ranks in unequal
            for name in sorted(everyone[ranks[0]][kind])
        ]
        self._differing = step, [each for each in copies if len(set(each.held.values())) > 1]
        found = defaultdict[Minority, list[str]](list)
        for each in self._differing[1]:
            found[find_minority(each.held)].append(str(each))
        texts = []
        for minority, names in found.items():
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            how = "differs from the other copies"
            if not minority.proven:
                how = "differ, which of them is wrong is not known"
            who = self._faults.name_ranks(minority.ranks)
            texts.append(f"{', '.join(names[:NAMED])}{more}: {who} {how}")
        reason = f"copies that must be equal differ after step {step}: {'; '.join(texts)}"
        minorities = [find_minority(each.held) for each in self._differing[1] if each.kind == SHARDS]
        wrong_shards = {rank for minority in minorities if minority.proven for rank in minority.ranks}
        wrong = {rank for minority in found if minority.proven for rank in minority.ranks}
        last = min(self._equal[kind] for kind in kinds)
        fault = self._faults.make_fault(last, self._drop_gathered(wrong, wrong_shards), reason)
        return self._faults.report_fault(ReplicasDiffer, step, fault, proven=last)

    def forget_differing(self) -> None:
        """It is known why copies differ."""
        self._differing = 0, []

    def look_again(self, step: int) -> None:
        """Before the update of `step`, tell which copies were wrong, now that the step before has been done again: what
        it gives is right, and what a rank held then, but for one bit in 2^64, is right only if it is that. Collective.
        """
        after, differing = self._differing
        if not differing or after != step - 1:
            return
        self.forget_differing()
        now = {kind: self.replicas.fingerprint_by_name(kind) for kind in {each.kind for each in differing}}
        rank = self.replicas.engine.topology.rank
        everyone = gather_objects(
            [now[each.kind].get(each.name) == each.held.get(rank) for each in differing]
        )
        wrong, wrong_shards = dict[int, str](), set[int]()
        for number, each in enumerate(differing):
            others = [r for r in each.held if not everyone[r][number]]
            # Where kernels sum in any order, or the fault has spread to all, nothing is as it was.
            if len(others) < len(each.held):
                wrong |= {r: str(each) for r in others if r not in wrong}
                wrong_shards.update(others if each.kind == SHARDS else ())
        if wrong:
            holders = self._drop_gathered(wrong, wrong_shards)
            sources = self._find_sources(holders, differing)
            who = self._faults.name_ranks(holders)
            reason = f"step {after} done again gives another {wrong[holders[0]]} than {who} held"
            if sources != holders:
                reason += f", made from gradients of {self._faults.name_ranks(sources)}"
            self._faults.report_fault(WrongCopy, after, self._faults.make_fault(after, sources, reason))

    def _find_sources(self, holders: Sequence[int], differing: Sequence[TensorCopies]) -> list[int]:
        """A rank whose copy alone is wrong; if its data ranks were not compared, as of replicas on tensor ranks, each
        of these may have sent the gradient that is wrong in it."""
        source_ranks = set(holders)
        for ranks in self.replicas.engine.topology.layout.list_groups("data"):
            sources_here = source_ranks.intersection(ranks)
            # Every replica adds the same gradients to its shard; only ranks with the same experts have their gradients.
            are_compared = any(each.held.keys() >= {*ranks} for each in differing) or sources_here <= {
                rank for each in differing if each.kind in (SHARDS, EXPERTS) for rank in each.held
            }
            if sources_here and not are_compared:
                source_ranks.update(ranks)
        return sorted(source_ranks)

    def _drop_gathered(self, wrong: Collection[int], wrong_shards: Collection[int]) -> list[int]:
        """The ranks of `wrong`, but for those that have only gathered a wrong shard: all of its replica have."""
        gathered = {
            rank
            for ranks in self.replicas.engine.topology.layout.list_groups("shard")
            for rank in (ranks if not {*wrong_shards}.isdisjoint(ranks) else ())
        }
        return sorted({*wrong} - (gathered - {*wrong_shards}))

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        self._equal = {copy_kind: min(equal_after, step) for copy_kind, equal_after in self._equal.items()}
