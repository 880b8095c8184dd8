"""Checks at the gate that the sum of the gradients is right, that no rank's gradient stands out, and that pipeline
stages received what was sent to them. Collective, except `Consistency`, which is pure.

A wrong sum is certain. That a gradient stands out is a doubt, which repeating the step proves or removes: data may do
that, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base.collectives import gather_objects
from megastable.base.hardware import kind_of
from megastable.data.loader import Step
from megastable.engine.engine import Engine
from megastable.engine.local_gradients import RankGradient, bound_rounding, read_columns
from megastable.engine.measured import Measured
from megastable.engine.patches import Hop
from megastable.engine.rank_checks import Digest
from megastable.engine.watch import Watch
from megastable.hardware.hardware_fault import FaultLog, HardwareFault
from megastable.hardware.recomputation import GradientFault, Recomputation, find_causes
from megastable.run.events.stability_events import GradientsDoubted, MessagesDiffer

Floats = npt.NDArray[np.float64]

# Most and fewest accepted steps that say what is usual, and the newest of them, where it drifts.
WINDOW, FEW, NEWEST = 64, 16, 8
FAR = 8.0  # sigma of a norm's ratio
APART = 5.0  # sigma between the usual cosine and that of a negated gradient, to distinguish them
RATIO = 0.69  # the least change of the log of a norm that counts: a factor of 2
QUIET, LONGEST = 100, 6400  # accepted steps without a doubt of what was cleared; a doubt costs about four
RATIO_SCATTER, COSINE_SCATTER = 0.05, 0.02  # the least that the scatter of each is taken to be
# The scatter of few steps, at the start and after every resume, is often too small: it counts for this much more, over
# the number of steps. Of normal numbers a sound rank is then doubted as rarely with 16 steps as with 64: 0.4 times in
# 1,000 steps at most, instead of 1.4.
FEWNESS = 6.0


def find_wrong_sums(found: Sequence[RankGradient]) -> list[int]:
    """The data ranks that received what is not the sum of what was sent. Gradients that are not finite themselves are
    left to the guard."""
    return [
        data_rank
        for data_rank, rank_row in enumerate(found)
        if math.isfinite(rank_row.slices)
        and not abs(rank_row.excess) <= bound_rounding(rank_row.slices, len(found))
    ]


class Kind(StrEnum):
    ZERO = "zero"
    STALE = "stale"
    SCALED = "scaled"
    NEGATED = "negated"


class Doubt(NamedTuple):
    """A data rank whose gradient stands out, and why: a phrase. size: in sigma; 0 if there is no more or less."""

    rank: int
    kind: Kind
    reason: str
    size: float = 0.0


class _Bar(NamedTuple):
    """What was cleared: of this kind, less than `size` is no doubt until so many steps are accepted; quiet: how many
    that were from when it was set."""

    size: float
    until: int
    quiet: int


class Consistency:
    """Compares each rank's gradient with the others', as that usually is.

    The usual is the median of the last accepted steps, with the median absolute deviation as its scatter: of the log
    of a rank's norm over the median norm of the others, and of its cosine to their sum. Both depend on how alike the
    ranks' samples are, which differs between runs, and changes slowly in one. A negated gradient has the usual cosine
    with the other sign: where these two are not far apart, because each rank has few samples, it cannot be told in one
    step, and changes the sum no more than other samples would.

    What a repetition has cleared is no doubt again soon: that this rank's gradient is zero, or that of the step before;
    and of any rank a norm or a cosine that is no further away. Among thousands of ranks chance makes one stand out
    every few steps, but ever more rarely further than ever before; and what is wrong by much is still seen.

    mutual: whether rows are of data ranks; else a rank's gradient is compared with its own first moments, and its norm,
    as a multiple of theirs, with that of other ranks.
    """

    def __init__(self, mutual: bool = True) -> None:
        self._mutual, self._reference = mutual, "the others' sum" if mutual else "its first moments"
        self._ratios = deque[Floats](maxlen=WINDOW)  # of accepted steps, [data ranks]
        self._cosines = deque[Floats](maxlen=WINDOW)
        self._accepted = 0
        self._bars: dict[tuple[Kind, int | None], _Bar] = {}

    def find_doubts(self, found: Sequence[RankGradient]) -> list[Doubt]:
        """Before the update; norms that are not finite are left to the guard."""
        return [rank_doubt for rank_doubt in self._all(found) if rank_doubt.size > self._cleared(rank_doubt)]

    def clear_doubts(self, doubts: Iterable[Doubt]) -> None:
        """It was the data, or chance."""
        for doubt in doubts:
            bar_before = self._bars.get(_key(doubt))
            quiet_steps = (
                LONGEST if doubt.size else QUIET if bar_before is None else min(2 * bar_before.quiet, LONGEST)
            )
            cleared_size = max(doubt.size, self._cleared(doubt))
            self._bars[_key(doubt)] = _Bar(cleared_size, self._accepted + quiet_steps, quiet_steps)

    def _cleared(self, doubt: Doubt) -> float:
        """The size up to which the like of it is cleared now; -1: none is."""
        kept_bar = self._bars.get(_key(doubt))
        return kept_bar.size if kept_bar is not None and self._accepted < kept_bar.until else -1.0

    def _all(self, found: Sequence[RankGradient]) -> list[Doubt]:
        if not np.isfinite(np.asarray(found, dtype=np.float64)).all():
            return []
        zero_ranks = [d for d, rank_row in enumerate(found) if rank_row.zero]
        if zero_ranks and len(zero_ranks) < len(found):
            return [Doubt(zero_rank, Kind.ZERO, "is zero") for zero_rank in zero_ranks]
        stale_ranks = [d for d, rank_row in enumerate(found) if rank_row.stale and not rank_row.zero]
        if stale_ranks and len(stale_ranks) < len(found):  # all of them: the same batch on the same weights
            return [Doubt(d, Kind.STALE, "is that of the step before, bit for bit") for d in stale_ranks]
        if len(self._ratios) < FEW:
            return []
        rank_ratios, rank_cosines = self._compare(found)
        return [*self._scaled(rank_ratios), *self._negated(rank_cosines)]

    def accept_step(self, found: Sequence[RankGradient]) -> None:
        """The update was applied."""
        self._accepted += 1
        rank_ratios, rank_cosines = self._compare(found)
        self._ratios.append(rank_ratios)
        self._cosines.append(rank_cosines)

    def _compare(self, found: Sequence[RankGradient]) -> tuple[Floats, Floats]:
        """Of every rank: log of its norm over the others', and its gradient's cosine to what it is compared with, 0 if
        one is zero."""
        sum_columns: Any = RankGradient(*np.asarray(found, dtype=np.float64).T)
        own_squares, others = sum_columns.own, sum_columns.others
        norm_products = np.sqrt(own_squares) * np.sqrt(others)
        rank_cosines = np.divide(
            sum_columns.dot, norm_products, out=np.zeros_like(norm_products), where=norm_products > 0
        )
        if not self._mutual:
            # Layers' norms drift apart in training; their moments follow.
            relative_squares = np.divide(
                own_squares, others, out=np.ones_like(own_squares), where=(own_squares > 0) & (others > 0)
            )
            return _ratios(relative_squares), rank_cosines
        if len(found) == 2:  # two measurements of one number
            rank_cosines[:] = rank_cosines.mean()
        return _ratios(sum_columns.square), rank_cosines

    def _scaled(self, ratios: Floats) -> list[Doubt]:
        usual, scatter = _baseline(self._ratios, RATIO_SCATTER, drifts=not self._mutual)
        apart, times = np.abs(ratios - usual), np.exp(ratios - usual)
        far, sizes = np.flatnonzero(apart > np.maximum(RATIO, FAR * scatter)), apart / scatter
        reason = "has {:.3g} times its usual norm beside the others'"
        return [Doubt(int(d), Kind.SCALED, reason.format(times[d]), float(sizes[d])) for d in far]

    def _negated(self, cosines: Floats) -> list[Doubt]:
        usual, cosine_scatter = _baseline(self._cosines, COSINE_SCATTER)
        sizes = (usual - cosines) / cosine_scatter
        far = np.flatnonzero((2 * usual >= APART * cosine_scatter) & (cosines < -usual / 2))
        reason = f"has a cosine of {{:.2f}} to {self._reference}, usually {{:.2f}}"
        return [
            Doubt(
                int(data_rank),
                Kind.NEGATED,
                reason.format(cosines[data_rank], usual[data_rank]),
                float(sizes[data_rank]),
            )
            for data_rank in far
        ]


def _key(doubt: Doubt) -> tuple[Kind, int | None]:
    return doubt.kind, None if doubt.size else doubt.rank


def _ratios(squares: Floats) -> Floats:
    """Of every rank: log of its norm over the median of the others'."""
    log_norms = np.log(np.where(squares > 0, squares, 1.0)) / 2
    rank_order = np.argsort(np.argsort(log_norms, kind="stable"), kind="stable")
    ordered_logs, half_count = np.sort(log_norms), (len(log_norms) - 1) // 2
    # Without itself: what is behind its place moves up by one.
    upper = ordered_logs[half_count + (half_count >= rank_order)]
    lower_median = (
        upper if len(log_norms) % 2 == 0 else ordered_logs[half_count - 1 + (half_count - 1 >= rank_order)]
    )
    log_ratios: Floats = log_norms - (lower_median + upper) / 2
    return log_ratios


def _baseline(before: Sequence[Floats], least: float, drifts: bool = False) -> tuple[Floats, Floats]:
    """Of every rank: median, and scatter, at least `least`. drifts: the median of the newest, and the scatter of the
    differences of successive ones."""
    value_window = np.stack(before)
    median_values = np.median(value_window[-NEWEST:] if drifts else value_window, 0)
    deviations_apart = (
        np.diff(value_window, axis=0) / math.sqrt(2) if drifts else value_window - median_values
    )
    scatter = 1.4826 * np.median(np.abs(deviations_apart), 0)
    return median_values, np.maximum(least, scatter * (1 + FEWNESS * (1 / len(value_window) - 1 / WINDOW)))


class Suspicion(NamedTuple):
    """Why an update was refused: a sentence. sums: data ranks that received a wrong sum; doubts: about gradients;
    messages: whether one between stages was wrong."""

    reason: str
    sums: Sequence[int] = ()
    doubts: Sequence[Doubt] = ()
    messages: bool = False


class MessageWatch(Watch):
    """Of one process. Without pipeline parallelism it does nothing."""

    name = "messages"

    def __init__(self, engine: Engine, faults: FaultLog) -> None:
        self.engine, self._faults, self.messages = engine, faults, engine.zero.messages

    def ballot(self, step: int) -> Sequence[float]:
        """What was sent less what has arrived."""
        return () if self.messages is None else (self.messages.left,)

    def judge_messages(self, measured: Measured) -> Suspicion | None:
        """Whether a message was changed on its way."""
        fault_reason = "a message between stages did not arrive as it was sent"
        return Suspicion(fault_reason, messages=True) if any(measured.ballot.get(self.name, ())) else None

    def prove_doubts(self, suspicion: Suspicion, batch: Step, step: int) -> HardwareFault:
        """Which one. Collective."""
        assert self.messages is not None
        everyone, found = gather_objects(self.messages.by_hop()), dict[int, int]()  # sender, by receiver
        for group_ranks in self.engine.topology.layout.list_groups("pipeline"):
            for rank in group_ranks:
                for (chunk, other_chunk), arrived_mark in everyone[rank][1].items():
                    sender_rank = group_ranks[other_chunk % len(group_ranks)]
                    if everyone[sender_rank][0].get((other_chunk, chunk)) != arrived_mark:
                        found[rank] = sender_rank
        name = self._faults.name_ranks
        pairs = [f"{name([to])} received from {name([sender_rank])}" for to, sender_rank in found.items()]
        what_differs = ", and what ".join(pairs) or "a stage received from another one"
        fault_reason = f"what {what_differs} is not what was sent: a link or a chip lies"
        fault = self._faults.make_fault(step - 1, sorted(found), fault_reason, link=True)
        return self._faults.report_fault(MessagesDiffer, step, fault)


class GradientWatch(Watch):
    """Of one process. Where nothing measures gradients it does nothing. Every process begins without a baseline.
    Its numbers are not in the ballot but in `Measured.gradients`."""

    name = "gradients"

    def __init__(self, engine: Engine, recomputation: Recomputation) -> None:
        self.engine, self._recomputation, self._faults = engine, recomputation, recomputation.faults
        self.local = engine.zero.local
        are_mutual = engine.topology.layout.data > 1
        self.baseline, self._of = Consistency(are_mutual), "data rank" if are_mutual else "rank"
        self._cleared = -1  # a step that a repetition has cleared

    def judge_gradients(self, measured: Measured, step: int) -> Suspicion | None:
        """What the columns of a step show, before its update."""
        if self.local is None:
            return None
        self.local.keep_digest()
        is_cleared, self._cleared = self._cleared == step, -1
        if is_cleared:
            return None
        rank_rows = read_columns(measured.gradients)
        wrong_sums, rank_doubts = find_wrong_sums(rank_rows), self.baseline.find_doubts(rank_rows)
        reasons = [
            f"data rank {wrong_sum} received what is not the sum of the gradients" for wrong_sum in wrong_sums
        ]
        reasons += [f"the gradient of {self._of} {doubt.rank} {doubt.reason}" for doubt in rank_doubts]
        return Suspicion("; ".join(reasons), wrong_sums, rank_doubts) if reasons else None

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        if self.local is not None and measured.finite:
            self.baseline.accept_step(read_columns(measured.gradients))

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        if self.local is not None:
            self.local.forget_digest()  # the next step may be the last one once more

    def prove_doubts(self, suspicion: Suspicion, batch: Step, step: int) -> HardwareFault | None:
        """Whether hardware is the cause of a refused update; if not, the same step is not refused again. The state must
        be that before the step."""
        kinds = sorted({str(rank_doubt.kind) for rank_doubt in suspicion.doubts})
        find_fault = self._find_receivers if suspicion.sums else self._repeat
        fault = find_fault(suspicion, batch, step)
        if fault is not None:
            return self._faults.report_fault(
                GradientsDoubted, step, fault, verdict=fault.verdict, kinds=kinds
            )
        cleared_fault = self._faults.make_fault(step, (), self._explain_cleared(suspicion))
        self._faults.report_fault(GradientsDoubted, step, cleared_fault, verdict="data", kinds=kinds)
        self._cleared = step
        self.baseline.clear_doubts(suspicion.doubts)
        return None

    def _explain_cleared(self, suspicion: Suspicion) -> str:
        if suspicion.sums:
            return "the checksums of all groups together are off by more than rounding, those of none alone"
        why = "and on another rank, so it is the data, or chance"
        if not self._recomputation.others:
            why = "so it is the data, chance, or a chip that does so every time, which nobody else can tell"
        return f"{suspicion.reason}: the same when repeated, {why}; the step is done again"

    def _find_receivers(self, suspicion: Suspicion, batch: Step, step: int) -> HardwareFault | None:
        """The ranks that hold a wrong sum."""
        assert self.local is not None
        every_digest, receiver_texts = (
            gather_objects((self._digest(), float(self.local.total))),
            dict[int, str](),
        )
        for ranks in self.engine.topology.layout.list_groups("data"):
            for d in suspicion.sums:
                digests = [every_digest[rank][0] for rank in ranks]
                sum_excess = abs(
                    sum(rank_digest.checks[d] for rank_digest in digests) - every_digest[ranks[d]][1]
                )
                most = bound_rounding(sum(rank_digest.squares[d] for rank_digest in digests), len(ranks))
                if not sum_excess <= most:
                    rank_names = self._faults.name_ranks([ranks[d]])
                    off_text = f"off by {sum_excess:.3g}, where rounding explains {most:.2g}"
                    receiver_texts[ranks[d]] = f"what {rank_names} received is {off_text}"
        if not receiver_texts:
            return None
        texts = "; ".join(text for _, text in sorted(receiver_texts.items()))
        fault_reason = f"the sum of the gradients is not that of its parts, a link or a chip lies: {texts}"
        return self._faults.make_fault(step - 1, sorted(receiver_texts), fault_reason, link=True)

    def _repeat(self, suspicion: Suspicion, batch: Step, step: int) -> HardwareFault | None:
        """What repeating the step shows."""
        recomputation, first_digest, sent = self._recomputation, self._digest(), self._sent()
        self.engine.measure_step(batch.micro_batches)
        computed_digests, sent_again = [[first_digest, self._digest()]], self._sent()
        changed_hops = {hop for hop, sent_mark in sent.items() if sent_again.get(hop) != sent_mark}
        for turn in range(1, 1 + recomputation.others):
            self.engine.measure_step(recomputation.read_turned(batch.positions, turn))
            computed_digests.append([self._digest()])
        proof, moved_hops = recomputation.compare_results(computed_digests, changed_hops)
        if proof is None:
            return None
        return recomputation.make_fault(self._find_origin(proof, moved_hops), step - 1, suspicion.reason)

    def _sent(self) -> dict[Hop, int]:
        """Fingerprints of what was sent in the last pass, by hop."""
        stage_messages = self.engine.zero.messages
        return {} if stage_messages is None else stage_messages.by_hop()[0]

    def _find_origin(self, proof: GradientFault, moved: Sequence[set[Hop]]) -> GradientFault:
        """Those that may have caused it, in place of all whose gradient was another one. moved: by rank, hops on
        which it sent something else."""
        rank_layout = self.engine.topology.layout
        if proof.product or (rank_layout.pipeline == 1 and not proof.lasting):
            return proof
        if proof.lasting or self.engine.zero.messages is None:
            return proof._replace(ranks=rank_layout.find_replicas(proof.ranks))
        is_tied = self.engine.tied is not None
        return proof._replace(
            ranks=find_causes(proof.ranks, rank_layout.list_groups("pipeline"), moved, is_tied)
        )

    def _digest(self) -> Digest:
        """Of the last backward pass."""
        assert self.local is not None
        checks, squares = self.local.digest.tolist()
        return Digest(tuple(checks), tuple(squares), maker=kind_of(self.engine.device))
