"""Computes samples again, and finds out from all results which ranks computed a wrong gradient, and how; at an interval
of a micro-batch, with products whose answers are known. Finds chips that are wrong now and then, or always.

Every rank has computed its own samples twice, then those of the data rank after it, and of the one after that. On sound
hardware all results for the same samples are the same, whatever the samples are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base.collectives import gather_objects
from megastable.base.reproducible import is_exact
from megastable.config.tree import RunConfig
from megastable.data.loader import Loader, MicroBatch, Step
from megastable.engine.engine import Engine
from megastable.engine.patches import Hop
from megastable.engine.rank_checks import Digest, GradientDigest, digest_gradient, find_wrong_product
from megastable.engine.watch import Watch
from megastable.hardware.hardware_fault import FaultCounts, FaultLog, HardwareFault
from megastable.model.kernels import DTYPES
from megastable.run.events.stability_events import ReplayDiffers

TURNS = 2  # other ranks that compute the same samples: with a third result it is known which one is wrong
WATCHED = 10  # steps after one, which are all checked
WHAT = "a micro-batch computed again gives another gradient"


class GradientFault(NamedTuple):
    """Ranks whose gradient was wrong. proven: else it is one of them, and not known which; lasting: the first time and
    when repeated, so not by chance; what: of the first of them, beside the right gradient: "negated"; product: it is
    not a gradient but a product with a known answer."""

    ranks: tuple[int, ...]
    proven: bool
    lasting: bool
    what: str
    product: bool = False


def find_fault(
    results: Mapping[int, Sequence[Sequence[Digest]]],
    groups: Sequence[Sequence[int]],
    shift: int,
    exact: bool,
) -> GradientFault | None:
    """What the results of all ranks show; None if all are as they should be.

    results: by rank, for its own samples, for those of the data rank `shift` further, of the one 2 * `shift` further,
    and so on; of some it has computed several. groups: the ranks of each data group, in order.
    """
    turns = range(len(next(iter(results.values()))))
    for turn in turns:
        changed_digests = {
            result_rank: again_digest
            for result_rank, own in results.items()
            for again_digest in own[turn][1:]
            if not own[turn][0].is_like(again_digest, exact)
        }
        if changed_digests:
            rank = min(changed_digests)
            what_differs = results[rank][turn][0].describe_difference(changed_digests[rank])
            return GradientFault(tuple(sorted(changed_digests)), True, False, what_differs)
    wrong: dict[int, str] = {}
    doubtful_ranks: set[int] = set()
    for group_ranks in groups:
        for group_place in range(len(group_ranks)):
            computed_by = [group_ranks[(group_place - turn * shift) % len(group_ranks)] for turn in turns]
            held = {rank: results[rank][turn][0] for turn, rank in enumerate(computed_by)}
            agreeing_ranks = ({r for r in held if one.is_like(held[r], exact)} for one in held.values())
            most_agreeing = max(agreeing_ranks, key=len)
            other_ranks = held.keys() - most_agreeing
            if other_ranks and 2 * len(most_agreeing) > len(held):
                right_digest = held[min(most_agreeing)]
                wrong |= {r: held[r].describe_difference(right_digest) for r in other_ranks if r not in wrong}
            elif other_ranks:
                doubtful_ranks |= held.keys()
    if wrong:
        return GradientFault(tuple(sorted(wrong)), True, True, wrong[min(wrong)])
    return GradientFault(tuple(sorted(doubtful_ranks)), False, True, "") if doubtful_ranks else None


def find_causes(
    changed: Sequence[int], pipelines: Sequence[Sequence[int]], moved: Sequence[AbstractSet[Hop]], tied: bool
) -> tuple[int, ...]:
    """The ranks that may have computed wrong, of those of whose gradients the repetition gives another one.

    A wrong result of one stage changes the gradients of others. What each has received is what was sent, so the first
    stage that sent something else on has computed it; if none has, the last one that sent something else back, and
    those after it whose gradient alone is another. With several chunks of the model on a stage the same is true of
    chunks, which go round the stages.

    pipelines: ranks, in the order of their stages. moved: by rank, the hops on which it sent something else. tied:
    whether the first and the last stage add up gradients.
    """
    found_ranks: set[int] = set()
    for ranks in pipelines:
        moved_hops = {hop for rank in ranks for hop in moved[rank]}
        on = [sender for sender, receiver in moved_hops if receiver > sender]
        sent_back = [sender for sender, receiver in moved_hops if receiver < sender]
        changed_stages = {s for s, rank in enumerate(ranks) if rank in changed}
        if sent_back and tied and 0 in changed_stages:
            changed_stages.discard(len(ranks) - 1)  # its gradient has in it what that of the first stage is
        if on:
            stages = {min(on)}
        elif sent_back:
            stages = {max(sent_back)} | {
                changed_stage for changed_stage in changed_stages if changed_stage > max(sent_back)
            }
        else:
            stages = changed_stages
        found_ranks |= {ranks[s % len(ranks)] for s in stages}
    return tuple(sorted(found_ranks)) or tuple(changed)


class Recomputation:
    """Computes the samples of this rank and of others once more, and says what the results of all ranks show.

    others: how many other ranks compute the samples of one.
    """

    def __init__(self, config: RunConfig, engine: Engine, loader: Loader, faults: FaultLog) -> None:
        self.faults, self._loader = faults, loader
        self._layout = engine.topology.layout
        self._shape = -1, self._layout.samples, config.train.micro_batch
        self._team_samples = self._layout.team // self._layout.context
        self.others = min(TURNS, self._layout.data // self._layout.team - 1)
        self._exact = is_exact(config.run.deterministic, engine.device)
        dtype, tensor = DTYPES[config.precision.kind], self._layout.tensor
        self._find_wrong_product = partial(find_wrong_product, config.model, tensor, dtype, engine.device)

    def read_turned(self, positions: npt.NDArray[np.int64], turn: int) -> Sequence[MicroBatch]:
        """The micro-batches of the data rank `turn` further, or of that in the same place of the team `turn` further.
        positions: of one or more micro-batches of all of them."""
        turned_positions = np.roll(positions.reshape(self._shape), -turn * self._team_samples, 1)
        return self._loader.read_micro_batches(turned_positions.ravel())

    def compare_results(
        self, results: Sequence[Sequence[Digest]], note: Any = None
    ) -> tuple[GradientFault | None, Sequence[Any]]:
        """What the results of all ranks show, or their products with known answers; and the note of every rank.
        Collective. results: this rank's, as of `find_fault`."""
        every_result = gather_objects((results, self._find_wrong_product(), note))
        of_ranks, wrong_products, rank_notes = zip(*every_result, strict=True)
        if ranks := tuple(rank for rank, product_text in enumerate(wrong_products) if product_text):
            return GradientFault(ranks, True, True, wrong_products[ranks[0]], product=True), rank_notes
        rank_layout, by_rank = self._layout, dict(enumerate(of_ranks))
        return find_fault(by_rank, rank_layout.list_groups("data"), rank_layout.team, self._exact), rank_notes

    def make_fault(self, proof: GradientFault, after: int, why: str = "") -> HardwareFault:
        """What is proven, as a fault since the step after `after`. why: begins the reason."""
        what_differs = self.faults.name_ranks(proof.ranks)
        if proof.product:
            what_differs += f": {proof.what}"
        elif not proof.lasting:
            what_differs += f" got {proof.what}, not when repeated"
        elif proof.proven:
            what_differs += f" gets {proof.what} every time, other ranks do not"
        else:
            what_differs += " get different results for the same samples, every time"
        ranks, reason = proof.ranks if proof.proven else (), f"{why}: {what_differs}" if why else what_differs
        return self.faults.make_fault(after, ranks, reason, proof.lasting)


class ReplayCheck(Watch):
    """Of one process, which resumes after `step` steps. every: steps from one replay to the next, 0: none. counts: of
    what earlier replays found."""

    name = "replays"

    def __init__(
        self, every: int, engine: Engine, recomputation: Recomputation, step: int, counts: FaultCounts
    ) -> None:
        self.every, self.engine, self._recomputation, self._counts = every, engine, recomputation, counts
        self._right = self._again = step  # after which all was right; until which it is due at every step

    def is_due(self, step: int) -> bool:
        return bool(self.every) and (step % self.every == 0 or step <= self._again)

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        self._right = min(self._right, step)

    def check_batch(self, batch: Step, step: int) -> HardwareFault | None:
        """Of the samples of `step`, on the current state."""
        own, other = self._compute(batch, 0), self._compute(batch, 1)
        recomputation, results = self._recomputation, [own.total, other.total]
        proof, _ = recomputation.compare_results(
            [[one] for one in results] if recomputation.others else [results]
        )
        if proof is None:
            self._right = step
            return None
        replay_fault = (
            recomputation.make_fault(proof, self._right) if proof.product else self._prove(batch, own, other)
        )
        replay_fault = self._counts.count_fault(replay_fault, step)
        self._again = step + WATCHED
        return recomputation.faults.report_fault(
            ReplayDiffers, step, replay_fault, verdict=replay_fault.verdict
        )

    def _compute(self, batch: Step, turn: int) -> GradientDigest:
        """Of the first micro-batch of the data rank that is `turn` further; of its own, if there is no other one."""
        if not turn or not self._recomputation.others:
            return digest_gradient(self.engine, batch.micro_batches[:1])
        size = batch.positions.size // len(batch.micro_batches)
        return digest_gradient(self.engine, self._recomputation.read_turned(batch.positions[:size], turn))

    def _prove(self, batch: Step, own: GradientDigest, other: GradientDigest) -> HardwareFault:
        """What computing both once more shows, and computing them on a third rank."""
        recomputation, after = self._recomputation, self._right
        further_totals = [[self._compute(batch, turn).total] for turn in range(2, 1 + recomputation.others)]
        own_again, other_again = self._compute(batch, 0), self._compute(batch, 1)
        all_totals = [[own.total, own_again.total], [other.total, other_again.total], *further_totals]
        proof, unlike_names = recomputation.compare_results(all_totals, _name_unlike(own, own_again))
        if proof is None:
            fault_reason = f"{WHAT}, not once more: which rank was wrong is not known"
            return recomputation.faults.make_fault(after, (), fault_reason)
        if proof.product:
            return recomputation.make_fault(proof, after)
        # What one of a replica computes wrong changes the gradients of others.
        ranks = self.engine.topology.layout.find_replicas(proof.ranks)
        return recomputation.make_fault(
            proof._replace(ranks=ranks), after, WHAT + unlike_names[proof.ranks[0]]
        )


def _name_unlike(one: GradientDigest, two: GradientDigest) -> str:
    """The last parameter, the first that the backward pass comes to, whose gradients differ: the end of a phrase."""
    unlike = (one.bits != two.bits).nonzero().flatten().tolist()
    return f" ({one.names[unlike[-1]]} and {len(unlike) - 1} more parameters)" if unlike else ""
