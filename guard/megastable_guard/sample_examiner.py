"""Which samples of an incident are bad, and whether they harm, in a training loop of any stack. Collective; leaves no
trace. Needs torch.

Samples are named by the loop's own ids, and measured by its own function (`Replay`). What is bad is decided by
scores.py: the samples of the steps since the onset against harmless ones from before it, both on the good state that is
rewound to. Harmless samples between that state and the onset are the better reference, as it was not trained on them;
what it puts above them, that ordinary samples of the window share, is taken off (`scores.shared_shift`). Whether bad
samples harm is decided by trials.py: two branches from that state, with them and with harmless samples in their places.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megastable_guard import scores
from megastable_guard.actions import Cause
from megastable_guard.conclusion import Conclusion, Suspect, blame_samples, blame_state, is_worse
from megastable_guard.host_copies import (
    HostCopies,
    StateCopy,
    local_part,
    read_forward_state,
    restore_buffers,
)
from megastable_guard.policy import Offer, Policy
from megastable_guard.random_states import restore_random_states
from megastable_guard.rate_limits import set_rate
from megastable_guard.trials import (
    NOTHING,
    OTHER_DATA,
    BranchLosses,
    HarmTrial,
    RemedyTrial,
    TrialVerdict,
    choose_held_out,
    choose_remedy,
    harms_anyway,
    is_clear,
    is_harmless,
    judge_trial,
    mean_difference,
    replace_samples,
)

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
# The loop's own function: the mean loss of each of some samples, [n], nats per token, of the model as it stands.
Replay = Callable[[Sequence[int]], Tensor]
T = TypeVar("T")

REMEMBERED = 1024  # steps at most, as where no new copy is taken for long
THRESHOLD = 6.0  # robust deviations of a loss, beyond which a sample may be bad by itself
SIGNIFICANCE = 0.001  # how often a window of harmless samples passes for a bad crowd
WINDOW = 16  # steps since the onset whose samples are suspects
HARMLESS = 256  # harmless samples that are compared with: the latest
COMING = 64  # samples that a trial is measured on, and neither branch is trained on
FARTHEST = 64  # steps ahead that are looked at; bad samples that go on for longer are no region
CLEAN = 3  # steps without a bad sample that end a region
# Times the gradient norm of a step, computed again, from which on something else than its data has made it. Where a
# loop weighs or scales its losses they differ, too: then no incident is over without a rewind.
REPEATED = 2.0
STEPS = 16  # of a branch; half of them if few are suspected, each far out by itself


@dataclass(frozen=True)
class ReadStep:
    """What was read in a step: the ids [n], and their losses in its forward pass, nats, [n] or none; of this rank, or
    of all, one after another. norm: of the gradient; rate: the scheduled learning rate."""

    step: int
    ids: tuple[int, ...]
    losses: tuple[float, ...]
    applied: bool
    norm: float
    rate: float = math.nan


def count_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def read_rank() -> int:
    """This rank, of `count_ranks`."""
    return dist.get_rank() if count_ranks() > 1 else 0


def gather_objects(own_object: T) -> list[T]:
    """Those of all ranks."""
    if count_ranks() == 1:
        return [own_object]
    gathered: list[Any] = [None] * count_ranks()
    dist.all_gather_object(gathered, own_object)
    return gathered


def gather_steps(own_steps: Sequence[ReadStep]) -> list[ReadStep]:
    """The steps that all ranks remember, with the samples of all. How far back a rank remembers depends on how many
    samples it read."""
    steps_by_rank = [{kept.step: kept for kept in steps} for steps in gather_objects(list(own_steps))]
    common_steps = sorted(set[int].intersection(*map(set, steps_by_rank)))
    return [
        replace(
            steps_by_rank[0][step],
            ids=tuple(sample_id for steps in steps_by_rank for sample_id in steps[step].ids),
            losses=tuple(loss for steps in steps_by_rank for loss in steps[step].losses),
        )
        for step in common_steps
    ]


def share_first(work: Callable[[], T]) -> T:
    """The result of `work` on the first rank, on all: CPUs of another kind round a logarithm differently. What it
    raises there is raised on all: the others would wait for it."""
    if count_ranks() == 1:
        return work()
    shared_answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            shared_answer[0] = work()
        except Exception as error:
            shared_answer[1] = error
    dist.broadcast_object_list(shared_answer, src=0)
    if shared_answer[1] is not None:
        raise shared_answer[1]
    return shared_answer[0]


def guess_vocabulary(model: torch.nn.Module) -> float:
    """Rows of the largest embedding; infinite without one, and then no loss counts as guessed."""
    return max(
        (float(part.num_embeddings) for part in model.modules() if isinstance(part, torch.nn.Embedding)),
        default=math.inf,
    )


@dataclass(frozen=True)
class WindowRemedy:
    """What becomes of the steps since an onset. skipped: ids; deferred: steps; proven: a trial has shown that what is
    skipped does harm; is_harmless: one has shown that it does none."""

    cause: Cause
    skipped: tuple[int, ...] = ()
    deferred: tuple[int, ...] = ()
    proven: bool = False
    is_harmless: bool = False


class SampleEvidence(NamedTuple):
    """Steps of all ranks: since an onset; behind the state that was rewound to; and harmless ones from before."""

    window: list[ReadStep]
    coming: list[ReadStep]
    harmless: list[ReadStep]


def judge_losses(ids: Int64s, losses: Floats, known: Floats) -> Conclusion:
    """Which samples are bad by their losses [n] against `known` ones of harmless samples [m], oldest first: nats, of
    the same state or from before each was trained on. Fewer than `2 * scores.ENOUGH` known ones name none. Pure."""
    corpora, known_corpora = np.zeros(losses.shape, np.int64), np.zeros(known.shape, np.int64)
    usual_losses, shift = scores.UsualLosses(known, known_corpora), 0.0
    are_known = np.isfinite(usual_losses.z)

    def without_tokens(z: Floats) -> scores.ScoredSamples:
        """All alike: losses alone tell."""
        return scores.ScoredSamples(np.zeros((z.size, 2), np.int64), z, np.zeros(z.shape, np.int64))

    loss_scale = scores.Scale(without_tokens(usual_losses.z[are_known]))
    while True:
        z, p_values = usual_losses.compare_losses(losses, corpora, shift)
        bad_alone = scores.bad_by_loss(z, p_values, THRESHOLD)
        window_judgement = scores.judge_suspects(
            loss_scale, without_tokens(np.nan_to_num(z, nan=0.0, posinf=1e9)), bad_alone, usual_losses.shared_error(),
            SIGNIFICANCE, scores.FALSE,
        )  # fmt: skip
        shared_shift = (
            scores.shared_shift(z, window_judgement.bad) if window_judgement.bad.any() and not shift else 0.0
        )
        if not shared_shift:
            break
        shift = shared_shift
    every_suspect = [
        Suspect(*suspect_fields)
        for suspect_fields in zip(ids.tolist(), losses.tolist(), z.tolist(), strict=True)
    ]
    if not window_judgement.bad.any():
        return blame_state(every_suspect, "the steps since the onset")
    found = blame_samples(
        every_suspect, np.unique(ids[window_judgement.bad]).tolist(), int(are_known.sum()), window_judgement.p
    )
    return replace(found, alone=np.unique(ids[window_judgement.bad & bad_alone]).tolist())


def choose_sample_remedy(
    found: Conclusion, trial: HarmTrial | None, window: Sequence[ReadStep], may_skip: bool
) -> WindowRemedy:
    """What becomes of the samples that a conclusion names. Pure.

    Args:
        found: on the good state.
        trial: of them; None: there was none.
        window: the steps since the onset.
        may_skip: whether as many may be skipped without a clear trial.
    """
    bad_ids = found.bad_positions
    if not bad_ids:
        return WindowRemedy(found.cause, deferred=tuple(read_step.step for read_step in window))
    if trial is not None and is_harmless(trial, found.few):
        return WindowRemedy(Cause.NEW_DATA, is_harmless=True)
    is_proven = trial is not None and is_clear(trial)
    is_mixed = trial is not None and trial.verdict is TrialVerdict.MIXED and not found.few
    if is_mixed or not (is_proven or may_skip):
        deferred_steps = tuple(read_step.step for read_step in window if set(bad_ids) & set(read_step.ids))
        return WindowRemedy(found.cause, deferred=deferred_steps, proven=is_proven)
    return WindowRemedy(found.cause, tuple(bad_ids), proven=is_proven)


def can_train(start: StateCopy) -> bool:
    """Whether branches from a copy can be trained: not at a rate of 0, as of the first step of a warm-up; nor where the
    optimizer keeps copies of the weights, which only its owner can step. Pure."""
    return not start.masters and any(float(group["lr"]) > 0 for group in start.groups)


def choose_outlook(
    coming: Sequence[ReadStep], harmless: Sequence[ReadStep], trained: Int64s, start: int
) -> tuple[Int64s, Int64s]:
    """Samples of the data to come, evenly spread, and none of those `trained` on in a trial; if too few are known,
    harmless ones from after step `start`, where it begins, or before. And other harmless ones, to stand in for
    suspects. Pure."""
    known_ids, outlook_ids = _ids_of(harmless), _ids_of(coming)
    outlook_ids = outlook_ids[~np.isin(outlook_ids, trained)]
    if outlook_ids.size < COMING // 2:
        outlook_ids = _ids_of([read_step for read_step in harmless if read_step.step > start])
    if outlook_ids.size < COMING // 2:
        outlook_ids = known_ids
    chosen_ids = spread_evenly(outlook_ids)
    return chosen_ids, known_ids[~np.isin(known_ids, chosen_ids)]


def spread_evenly(ids: Int64s) -> Int64s:
    """At most `COMING` of them. Pure."""
    return ids[np.linspace(0, ids.size - 1, min(COMING, ids.size)).round().astype(np.int64)]


def compare_states(
    present: Floats, good: Floats, coming: int, norms: tuple[float, float]
) -> tuple[bool, str]:
    """Whether the present state is worse than a good one, or its gradient wrong, and a sentence. Pure.

    Both kinds of data must tell: data to come, if it is of a new kind, may become harder by all other training; and a
    run forgets what it has read, if it does not come any more.

    Args:
        present, good: losses of the same samples on both states, [n] nats.
        coming: how many of these, the first ones, are of the data to come, and the others were read before both states.
            Too few show nothing; if all are too few the state counts as worse.
        norms: of the gradient of the present step, as it was and as it is when it is computed again.
    """
    told_rises, is_worse_by = list[str](), list[bool]()
    for kind, part in (("to come", slice(0, coming)), ("of before", slice(coming, None))):
        if present[part].size >= COMING // 2:
            mean_rise, rise_error = mean_difference(present[part], good[part])
            told_rises.append(f"{mean_rise:+.3f} ± {rise_error:.3f} nats on the data {kind}")
            is_worse_by.append(harms_anyway(present[part], good[part]))
    if not told_rises:
        return True, "too few samples are known that could show whether the state is as good as before"
    reason = f"the present state differs from that before by {', '.join(told_rises)}"
    given_norm, repeated_norm = norms
    if not given_norm < REPEATED * repeated_norm:
        reason += (
            f"; its gradient norm was {given_norm:.3g}, and is {repeated_norm:.3g} when it is computed again"
        )
        return True, reason
    return all(is_worse_by), reason


class SampleExaminer:
    """Remembers what was read, measures samples, and trains branches.

    Args:
        model: of this rank.
        copies: None: only updates that are refused can be examined.
    """

    def __init__(self, model: torch.nn.Module, copies: HostCopies | None) -> None:
        self.model, self.copies = model, copies
        self.replay: Replay | None = None
        self.at_once = 1
        self.ahead: Callable[[int], Sequence[int]] | None = None
        self.bad_by_step: dict[int, list[int]] = {}  # named so far, and skipped
        self.refused_ids = set[int]()  # of updates that were refused alone
        self._read_steps = deque[ReadStep]()  # of this rank, ascending
        self._sample_count = 0  # of them

    def remember_step(self, read_step: ReadStep) -> None:
        """From the oldest copy on, and before it as many as are compared with."""
        self._read_steps.append(read_step)
        self._sample_count += len(read_step.ids)
        oldest_copy = (
            self.copies.steps[0] if self.copies is not None and self.copies.steps else read_step.step
        )
        while len(self._read_steps) > REMEMBERED or (
            self._read_steps[0].step <= oldest_copy
            and self._sample_count - len(self._read_steps[0].ids) >= HARMLESS
        ):
            self._sample_count -= len(self._read_steps.popleft().ids)

    @property
    def knows_ids(self) -> bool:
        return bool(self._read_steps)

    def has_named(self, window: Sequence[ReadStep]) -> bool:
        """Whether bad samples of single updates in a window were named."""
        named_ids = set[int]().union(*self.bad_by_step.values())
        return any(named_ids.intersection(read_step.ids) for read_step in window)

    def forget_after(self, step: int) -> None:
        """Steps that are undone."""
        while self._read_steps and self._read_steps[-1].step > step:
            self._sample_count -= len(self._read_steps.pop().ids)

    def name_again(self, step: int, onset: int | None, skipped: Sequence[int]) -> tuple[list[int], list[int]]:
        """The steps after `step` are undone; of those from `onset` on, if they were examined, only `skipped` is bad.
        What else of the undone ones is, and what of them is not any more."""
        undone_steps = [named_step for named_step in self.bad_by_step if named_step > step]
        undone_names = {undone_step: self.bad_by_step.pop(undone_step) for undone_step in undone_steps}
        still_bad, cleared = list[int](), list[int]()
        for undone_step, bad_ids in undone_names.items():
            is_examined = onset is not None and undone_step >= onset
            (cleared if is_examined else still_bad).extend(bad_ids)
        self.bad_by_step[step] = [*self.bad_by_step.get(step, []), *still_bad, *skipped]
        return still_bad, sorted({*cleared} - {*skipped})

    def read_since(self, onset: int) -> tuple[list[ReadStep], list[ReadStep]]:
        """The samples of all ranks: the first `WINDOW` steps since the onset; and harmless steps from before it, for
        `HARMLESS` samples, without those of the window and those named so far. Collective."""
        recent_steps = [kept for kept in self._read_steps if onset - HARMLESS <= kept.step < onset + WINDOW]
        all_steps = gather_steps(recent_steps)
        window = [read_step for read_step in all_steps if read_step.step >= onset][:WINDOW]
        left_out = set[int]().union(*self.bad_by_step.values(), *(read_step.ids for read_step in window))
        harmless_steps, harmless_count = list[ReadStep](), 0
        for read_step in reversed(all_steps):
            if read_step.step < onset and read_step.applied and harmless_count < HARMLESS:
                chosen_numbers = [
                    sample_number
                    for sample_number, sample_id in enumerate(read_step.ids)
                    if sample_id not in left_out
                ]
                chosen_numbers = chosen_numbers[-(HARMLESS - harmless_count) :]
                kept_losses = (
                    tuple(read_step.losses[sample_number] for sample_number in chosen_numbers)
                    if read_step.losses
                    else ()
                )
                harmless_steps.append(
                    replace(
                        read_step,
                        ids=tuple(read_step.ids[sample_number] for sample_number in chosen_numbers),
                        losses=kept_losses,
                    )
                )
                harmless_count += len(chosen_numbers)
        return window, harmless_steps[::-1]

    def choose_compared(self, evidence: SampleEvidence, start: int) -> tuple[Int64s, int]:
        """Samples that tell whether the present state is worse than that after step `start`: of the data to come, and,
        behind so many of these, such that both states have read. Collective."""
        window_ids, coming_ids = _ids_of(evidence.window), _ids_of(evidence.coming)
        coming_ids = spread_evenly(coming_ids[~np.isin(coming_ids, window_ids)])
        _, known_steps = self.read_since(start + 1)
        return np.concatenate([coming_ids, _ids_of(known_steps)[-COMING:]]), coming_ids.size

    def examine_refused(self, step: int) -> Conclusion | None:
        """Which samples of a refused update are bad: by the losses of the forward passes, if all are known, else
        measured on the present state. None: there are no ids, or nothing to measure by. Collective."""
        window, harmless = self.read_since(step)
        refused_ids, known_ids = _ids_of(window), _ids_of(harmless)
        refused_losses = np.array([loss for read_step in window for loss in read_step.losses])
        known_losses = np.array([loss for read_step in harmless for loss in read_step.losses])
        if not refused_ids.size:
            return None
        if refused_losses.size != refused_ids.size or known_losses.size != known_ids.size:
            if self.replay is None:
                return None
            measured_losses = self.measure_losses(np.concatenate([known_ids, refused_ids]))
            known_losses, refused_losses = (
                measured_losses[: known_ids.size],
                measured_losses[known_ids.size :],
            )
        return share_first(lambda: judge_losses(refused_ids, refused_losses, known_losses))

    def restore_good(self, harmless: Sequence[ReadStep]) -> None:
        """From the newest copy, which is restored, to the newest that is no worse on harmless samples than the one
        before it; later ones are dropped. Collective."""
        assert self.copies is not None
        known_ids = _ids_of(harmless)
        while len(self.copies.steps) > 1:
            newest_copy, older_copy = self.copies.newest[:2]
            newest_losses = self.measure_losses(known_ids)
            self.copies.restore_weights(older_copy)
            older_losses = self.measure_losses(known_ids)
            if not share_first(partial(is_worse, newest_losses, older_losses)):
                self.copies.restore_weights(newest_copy)
                return
            self.copies.restore_before(newest_copy.step)

    def read_ahead(self, step: int) -> list[ReadStep]:
        """The `FARTHEST` steps behind `step`, if the loop tells them. Collective."""
        batch_size = max(gather_objects(len(self._read_steps[-1].ids)))
        next_ids = list(self.ahead(FARTHEST * batch_size)) if self.ahead is not None else []
        batch_starts = range(0, len(next_ids) - batch_size + 1, max(1, batch_size))
        return gather_steps(
            [
                ReadStep(
                    step + number,
                    tuple(next_ids[batch_start : batch_start + batch_size]),
                    (),
                    False,
                    math.nan,
                )
                for number, batch_start in enumerate(batch_starts, 1)
            ]
        )

    def examine_window(
        self, window: Sequence[ReadStep], coming: Sequence[ReadStep], harmless: Sequence[ReadStep]
    ) -> tuple[Conclusion, list[ReadStep]]:
        """Which samples of some steps are bad on the present state, which is good, and of the steps `coming` behind
        them, up to `CLEAN` ones without any; and the steps that were looked at. What goes on for `FARTHEST` steps is no
        region: then only those of the window are told. Collective."""
        known_ids, reach = _ids_of(harmless), 0
        known_losses = self.measure_losses(known_ids)
        examined_ids = _ids_of(window)
        examined_losses = self.measure_losses(examined_ids)
        found = found_in_window = share_first(
            partial(judge_losses, examined_ids, examined_losses, known_losses)
        )
        region, last_ids = list(window), examined_ids
        while np.isin(last_ids, found.bad_positions).any() and coming:
            if reach == len(coming):
                return found_in_window, list(window)
            further_ids = _ids_of(coming[reach : 2 * reach + CLEAN])
            reach = min(len(coming), 2 * reach + CLEAN)
            examined_ids = np.concatenate([examined_ids, further_ids])
            examined_losses = np.concatenate([examined_losses, self.measure_losses(further_ids)])
            found_further = share_first(partial(judge_losses, examined_ids, examined_losses, known_losses))
            if (
                not found_further.bad_positions
            ):  # what is lost among so many harmless ones was a crowd all the same
                break
            found, region = found_further, [*window, *coming[:reach]]
            last_ids = _ids_of(region[-CLEAN:])
        return found, region

    def try_suspects(
        self, found: Conclusion, region: Sequence[ReadStep], coming: Sequence[ReadStep],
        harmless: Sequence[ReadStep], measure_norm: Callable[[], float],
    ) -> HarmTrial | None:  # fmt: skip
        """Whether the bad samples of a conclusion harm: two branches from the newest copy, which is restored then.

        The steps of `region` with bad samples are trained on, again and again if they are few. Both are measured on
        the data to come: of the steps `coming`; if unknown, harmless samples, best those that the copy was not trained
        on. Gradients are clipped to the usual norm, as the loop's own clipping is not known. None: too few harmless
        samples are known, or the copy cannot be trained (`can_train`). Collective.
        """
        assert self.copies is not None
        start_copy, suspects = self.copies.newest[0], np.array(found.bad_positions, np.int64)
        batches = [
            np.array(read_step.ids, np.int64)
            for read_step in region
            if np.isin(read_step.ids, suspects).any()
        ]
        steps = STEPS // 2 if found.few else STEPS
        batches = [batches[step % len(batches)] for step in range(steps)]
        held_out = choose_held_out(suspects)
        coming_ids, fillers = choose_outlook(
            coming, harmless, np.concatenate([held_out, *batches]), start_copy.step
        )
        if not fillers.size or not coming_ids.size or not can_train(start_copy):
            return None
        usual_norm = float(np.median([read_step.norm for read_step in harmless]))
        measured_ids = np.concatenate([coming_ids, held_out])
        before_losses = self.measure_losses(coming_ids)
        with_them, control_losses = (
            self.train_branch(
                replace_samples(batches, replaced_ids, fillers), start_copy, usual_norm, measured_ids, measure_norm
            )
            for replaced_ids in (held_out, suspects)
        )  # fmt: skip
        if not np.isfinite(control_losses).all():  # not even harmless samples can be trained on
            return None
        coming_count = coming_ids.size
        # Where the run stood is gone: it goes on from `start` in any case.
        coming_losses = BranchLosses(
            with_them[:coming_count], control_losses[:coming_count], before_losses, before_losses
        )
        held_losses, vocabulary = (
            (with_them[coming_count:], control_losses[coming_count:]),
            guess_vocabulary(self.model),
        )
        return share_first(
            lambda: judge_trial(coming_losses, held_losses, vocabulary, suspects.size, steps)  # type: ignore[arg-type]
        )

    def try_rates(
        self, offers: Sequence[Offer], policy: Policy, updates: int, evidence: SampleEvidence,
        measure_norm: Callable[[], float],
    ) -> RemedyTrial | None:  # fmt: skip
        """Which limit of the learning rate helps: branches from the newest copy, which is restored then, at the highest
        rate since the onset; with the data as it was and no limit, with harmless samples in its place, and with each
        limit. None: training on harmless samples is no worse than not training, so it is not the rate; or there is
        nothing to try with. Collective.

        Args:
            offers: limits of the rate.
            policy: as it is without them.
            updates: applied ones of the copy.
            evidence: of the window.
            measure_norm: of the gradients.
        """
        assert self.copies is not None
        start_copy = self.copies.newest[0]
        read_steps = [*evidence.window, *evidence.coming][:STEPS]
        batches = [np.array(read_step.ids, np.int64) for read_step in read_steps]
        trained_ids = np.concatenate(batches)
        coming_ids, fillers = choose_outlook(
            evidence.coming[STEPS:], evidence.harmless, trained_ids, start_copy.step
        )
        if not fillers.size or not coming_ids.size or not can_train(start_copy):
            return None
        usual_norm = float(np.median([read_step.norm for read_step in evidence.harmless]))
        scheduled_rate = max(read_step.rate for read_step in evidence.window)
        before_losses = self.measure_losses(coming_ids)

        def train_limited(branch_batches: Sequence[Int64s], limits: Policy) -> Floats:
            rates = [
                limits.limit_rate(updates + number, scheduled_rate) for number in range(len(branch_batches))
            ]
            return self.train_branch(branch_batches, start_copy, usual_norm, coming_ids, measure_norm, rates)

        control_losses = train_limited(replace_samples(batches, trained_ids, fillers), policy)
        if not share_first(partial(harms_anyway, control_losses, before_losses)):
            return None
        branches = {NOTHING: train_limited(batches, policy), OTHER_DATA: control_losses}
        branches |= {offer.name: train_limited(batches, offer.policy) for offer in offers}
        return share_first(partial(choose_remedy, branches, len(batches)))

    def train_branch(
        self, batches: Sequence[Int64s], start: StateCopy, usual_norm: float, measured: Int64s,
        measure_norm: Callable[[], float], rates: Sequence[float] = (),
    ) -> Floats:  # fmt: skip
        """Losses of the samples `measured` after some steps from `start`, which is restored then. rates: the largest of
        all groups, by step, to which the others are in proportion as on the copy; without them the copy's."""
        assert self.copies is not None and self.replay is not None
        groups = [group for optimizer in self.copies.optimizers for group in optimizer.param_groups]
        copied_rates = [float(group["lr"]) for group in groups]
        try:
            for number, batch in enumerate(batches):
                for group, copied_rate in zip(groups, copied_rates, strict=True) if rates else ():
                    set_rate(group, copied_rate * rates[number] / max(copied_rates))
                gradient_norm = self._compute_gradient(batch, measure_norm)
                if math.isfinite(gradient_norm):
                    self._shrink_gradients(min(1.0, usual_norm / max(gradient_norm, 1e-12)))
                    for optimizer in self.copies.optimizers:
                        optimizer.step()
                self.copies.clear_gradients()
            return self.measure_losses(measured)
        finally:
            self.copies.restore_copy(start)

    def measure_gradient(self, measure_norm: Callable[[], float]) -> float:
        """The norm of the gradient of the last step, computed again; gradients are cleared. Collective."""
        assert self.copies is not None
        read_ids = _ids_of(gather_steps([self._read_steps[-1]]))
        gradient_norm = self._compute_gradient(read_ids, measure_norm)
        self.copies.clear_gradients()
        return gradient_norm

    def _compute_gradient(self, ids: Int64s, measure_norm: Callable[[], float]) -> float:
        """Add the gradient of the mean loss of samples; the norm of all."""
        own_ids = self._own_part(ids)
        with torch.enable_grad():
            for id_part in own_ids:
                (self._ask_replay(id_part).sum() / own_ids.size).backward()
        return measure_norm()

    def measure_losses(self, ids: Int64s) -> Floats:
        """Of samples on the present state, fp64 [n], nats; every rank measures as many. Collective."""
        own_ids = self._own_part(ids)
        losses = torch.zeros(
            count_ranks(), own_ids.size, dtype=torch.float64, device=local_part(next(self.model.parameters())).device
        )  # fmt: skip
        rank = read_rank()
        with torch.no_grad(), self._in_evaluation():
            for part_number, id_part in enumerate(own_ids):
                part_first = part_number * self.at_once
                losses[rank, part_first : part_first + self.at_once] = self._ask_replay(id_part).double()
        if count_ranks() > 1:
            dist.all_reduce(losses)
        return losses.flatten().cpu().numpy()[: ids.size]

    def _own_part(self, ids: Int64s) -> Int64s:
        """This rank's part, [calls, at_once]: as many calls, of as many samples, on every rank, as sharded weights are
        gathered in each. The last ones are filled up with the first."""
        call_count = -(-ids.size // (count_ranks() * self.at_once))
        whole_ids = np.resize(ids, (count_ranks(), call_count, self.at_once))
        return np.asarray(whole_ids[read_rank()])

    def _ask_replay(self, ids: Int64s) -> Tensor:
        assert self.replay is not None
        # Where the loop's own autocast spans the step, it keeps casts of weights that are others now.
        torch.clear_autocast_cache()
        losses = self.replay(ids.tolist())
        if losses.shape != (ids.size,):
            raise ValueError(
                f"replay returned losses of shape {list(losses.shape)} for {ids.size} ids: expected the mean loss of "
                f"each sample, [{ids.size}]"
            )
        return losses

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        """Without dropout; modes, buffers and random states are as before in the end."""
        forward, modes = read_forward_state(self.model), [part.training for part in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for part, mode in zip(self.model.modules(), modes, strict=True):
                part.training = mode
                # FSDP2 keeps the root's weights whole for a backward pass.
                getattr(part, "reshard", lambda: None)()
            restore_buffers(self.model, forward)
            restore_random_states(forward.random)

    def _shrink_gradients(self, factor: float) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _ids_of(steps: Sequence[ReadStep]) -> Int64s:
    return np.array([sample_id for read_step in steps for sample_id in read_step.ids], np.int64)
