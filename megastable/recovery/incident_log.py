"""Records incidents in journal, skip ledger and console. Rank 0 writes, all ranks know.

An incident is opened at the first action, extended by further ones, and closed when an action is proven or the run
ends. Each of its events carries the whole incident and the policy's memory, so that both outlive the process
(recovery.py). What a restart depends on must reach the disk, else SpaceError on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.attribution.sample_replay import Trained
from megastable.base.collectives import run_on_first
from megastable.base.errors import DataError
from megastable.base.text import count_noun, show_number, show_ranges
from megastable.checkpoint.store import RunState, step_of
from megastable.data.blends import read_blends
from megastable.data.order import LAST_POSITION
from megastable.data.run_ledgers import Deferral, Deferring, UntoldSamples, append_durably, find_unjournalled
from megastable.data.samples import Document, documents_at
from megastable.data.skip_ledger import (
    AnyEntry,
    Ledger,
    SampleEntry,
    SkipEntry,
    release_entries,
    sample_entries,
)
from megastable.data.skips import Selection, Skips, ranges_of
from megastable.recovery.run_parts import RunParts
from megastable.run.events.event import Event
from megastable.run.events.stability_events import AlertEvent, Handover, IncidentEvent
from megastable.run.events.training_events import Unstable
from megastable_guard.actions import Action, Cause, Decision, Verdict
from megastable_guard.conclusion import Conclusion
from megastable_guard.incident import Breakdown, Incident, LeftOutSamples, Outcome, classify_incident
from megastable_guard.policy import BLAMELESS
from megastable_guard.step_judge import StepJudge

Int64s = npt.NDArray[np.int64]

SHOWN = 16  # suspects per incident whose numbers are kept, besides the bad ones
NAMED = 1000  # documents and suspects named per incident: a swapped corpus would fill the journal
NEXT = 2  # global batches after skipped samples: trouble that begins there is of the same region
NOBODY = Deferral([], *(np.empty(0, np.int64) for _ in range(3)))


class IncidentLog:
    """The current incident, and its records. list_warnings: the slow signals that were warned of, a sentence each."""

    def __init__(
        self, parts: RunParts, guard: StepJudge, list_warnings: Callable[[], list[str]] = list
    ) -> None:
        self.run, self.source, self.log, self.guard = parts.run, parts.source, parts.log, guard
        self.deferring = Deferring(parts.config, parts.run, parts.source, parts.select_unskipped)
        self.list_warnings = list_warnings
        self.incident: Incident | None = None
        self.count = 0
        self.left_out: LeftOutSamples | None = None
        self.closed = dict[int, int]()  # by number, the steps at which incidents were over

    def restore_incident(
        self, incident: Incident | None, count: int, state: RunState, left_out: LeftOutSamples | None = None
    ) -> None:
        """Resume from `state` with what the journal and the checkpoint remember: the open incident, how many there
        were, and what the last one skipped. Raises SpaceError."""
        self.incident, self.count, self.left_out = incident, count, left_out
        if incident is None:
            return

        def read_untold() -> UntoldSamples:
            ledger, lines = Ledger.read_ledger(self.run.skips, []), read_blends(self.run.blends)
            number, skipped, deferred = incident.number, incident.positions, incident.deferred
            return find_unjournalled(
                number, skipped, deferred, ledger, lines, self.source.order, state.cursor
            )

        # As `skip_bad_samples` leaves it: nothing was undone that has to prove itself.
        is_skip_alone = not self.guard.policy.state.watching and set(incident.actions) <= {Action.SKIP}
        if untold_samples := run_on_first(read_untold):
            incident.actions += [Action.SKIP] if is_skip_alone and not incident.actions else []
            self._tell_untold(untold_samples)
        elif is_skip_alone and not incident.actions:
            incident.reasons.append("the process ended before any sample was written down: none is skipped")
        if incident.outcome == "handed over":
            incident.outcome = "open"
            incident.steps_lost += max(0, incident.step - state.step)
            self._tell("restarted", step=state.step)
        elif is_skip_alone:
            self.close_incident(state, "healed")

    def _tell_untold(self, untold: UntoldSamples) -> None:
        """Tell the journal what the ledgers hold of the open incident: the last process ended between the two."""
        incident = self._present()
        before, _, reason = untold.reason.partition(": ")
        if before in [*Cause]:
            incident.cause = Cause(before)
        reason = f"{reason or before} (written down by a process that ended before it told the journal)"
        named = np.concatenate([untold.identified, untold.skipped])
        try:
            bad_documents = documents_at(self.source, untold.identified) if untold.identified.size else []
        except DataError as data_error:  # as in _skip_identities: the samples are skipped all the same
            bad_documents, reason = [], f"{reason}; their documents cannot be named: {data_error}"
        incident.documents += [bad_document.model_dump() for bad_document in bad_documents][:NAMED]
        incident.reasons.append(reason)
        incident.released += untold.freed.size
        kept_positions = Skips.from_ranges(incident.positions).minus(Skips.from_numbers(untold.freed))
        incident.positions = sorted({*kept_positions.ranges, *ranges_of(named)})
        incident.deferred = sorted([*incident.deferred, *untold.deferred])
        incident.returns = sorted([*incident.returns, *untold.returns])
        self._remember(np.concatenate([named, *(np.arange(*some) for some in untold.deferred)]))
        event = IncidentEvent(
            what="attributed", cause=incident.cause, positions=ranges_of(named), reason=reason,
            deferred=untold.deferred, returns=untold.returns, **self._story(),
        )  # fmt: skip
        how = f"{count_noun(named.size, 'sample')} skipped, {count_noun(_count(untold.deferred), 'sample')} deferred"
        freed_text = f", {count_noun(untold.freed.size, 'sample')} released" if untold.freed.size else ""
        self._commit(event, f"incident {incident.number}, from the ledgers: {how}{freed_text}: {reason}")

    def open_incident(
        self, decision: Decision, state: RunState, window: Sequence[Trained], grad_norm: float
    ) -> Incident:
        """The incident that a decision belongs to: the open one, or a new one. window: the steps since its onset."""
        finding = decision.finding
        incident = self._add(state, finding.onset, finding.verdict, window)
        incident.kind = classify_incident(Verdict(incident.verdict), self.guard.policy.state.recurrences)
        incident.norm_peak = _peak(incident.norm_peak, [grad_norm])
        self._tell(
            "opened", f"step {state.step}: incident {incident.number}: {decision.reason}", step=state.step,
            verdict=finding.verdict, onset=finding.onset, action=decision.action, reason=decision.reason,
        )  # fmt: skip
        return incident

    def _add(self, state: RunState, onset: int, verdict: Verdict, window: Sequence[Trained]) -> Incident:
        """These steps to the open incident, or to a new one."""
        if self.incident is None:
            self._number()
            self.incident = Incident(
                number=self.count, step=state.step, onset=onset, verdict=verdict, kind=classify_incident(verdict, 0),
                loss_before=_usual(state), warnings=self.list_warnings(),
            )  # fmt: skip
        self.incident.batches_discarded += sum(not t.applied for t in window)
        self.incident.loss_peak = _peak(self.incident.loss_peak, [float(t.losses.mean()) for t in window])
        return self.incident

    def record_rejected_checkpoints(self, rejected: dict[str, str], step: int) -> None:
        """Checkpoints that could not be used, with the reason: the run resumed from an older one, after `step`."""
        newest = max(step_of(Path(checkpoint_name)) for checkpoint_name in rejected)
        self._number()
        summary = Incident(
            number=self.count, step=newest, onset=newest, verdict=Breakdown.DAMAGE, kind="recoverable",
            cause=Cause.STORAGE, actions=[Action.RESTART], reasons=[f"went on from step {step}, of an older one"],
            steps_lost=newest - step, outcome="healed", failure="; ".join(rejected.values()),
        )  # fmt: skip
        fields = summary.model_dump(mode="json")
        self.log.emit_event(IncidentEvent(what="closed", step=step, number=self.count, summary=fields))

    def _number(self) -> None:
        """The next incident number: the supervisor opens some, too."""
        iterate_events = self.run.iterate_events
        known_numbers = run_on_first(lambda: [event.get("number") for event in iterate_events(IncidentEvent)])
        self.count = max([self.count, *(n for n in known_numbers if isinstance(n, int))]) + 1

    def is_adjacent(self, window: Sequence[Trained]) -> bool:
        """Whether trouble continues where it was: the window begins within `NEXT` global batches of samples that the
        last action skipped or deferred recently. That is presumed to be a region of bad data."""
        if self.left_out is None or not window:
            return False
        first_position, batch_size = int(window[0].positions.min()), window[0].positions.size
        is_soon = abs(window[0].step - self.left_out.step) <= self.deferring.recur_steps
        return is_soon and -batch_size <= first_position - self.left_out.end <= NEXT * batch_size

    def find_returned(self, window: Sequence[Trained]) -> tuple[list[int], list[int]]:
        """The positions of samples that were deferred because of trouble and that trouble has come with again, at the
        start of a stretch of them: those of its first `NEXT` global batches, and the rest of what was read of it, which
        trouble may only have preceded. Empty otherwise."""
        if not window:
            return [], []
        batch_size = window[0].positions.size
        first, last_position = int(window[0].positions.min()), max(int(t.positions.max()) for t in window) + 1
        # A step's damage to the weights shows in the next step.
        early = first - batch_size
        deferred = self.source.order.deferred_positions(max(0, early - batch_size), last_position)
        # Samples of other corpora, or skipped ones, in between end no stretch.
        begins = deferred[np.diff(deferred, prepend=-batch_size - 1) > batch_size]
        begins = begins[(begins >= early) & (begins < first + NEXT * batch_size)]
        if not begins.size:
            return [], []
        deferred = deferred[deferred >= begins[0]]
        near_begin = deferred < begins[0] + NEXT * batch_size
        return deferred[near_begin].tolist(), deferred[~near_begin].tolist()

    def blame_returned(self, found: Conclusion, window: Sequence[Trained]) -> Conclusion:
        """Call samples bad that trouble came with twice, on two good states: nothing else was the same. A conclusion
        that names samples, or a cause other than data, stays."""
        if found.bad or found.cause not in BLAMELESS:
            return found
        again, later_positions = self.find_returned(window)
        if not again:
            return found
        told_reason = (
            f"{count_noun(len(again), 'sample')} came with trouble before and were deferred; now they are read "
            f"again, on another good state, and it begins with them. (Each alone is ordinary: {found.reason})"
        )
        return replace(found, cause=Cause.DATA, bad=again, later=later_positions, reason=told_reason)

    def record_conclusion(
        self, found: Conclusion, window: Sequence[Trained], action: Action, remedy: str, lost: int,
        seconds: float, swap: str | None = None,
    ) -> None:  # fmt: skip
        """Record which samples were bad, and skip them; or defer the window, if the state was damaged but no sample
        is bad.

        Harmless data is not skipped. swap: the corpus to leave out from the first bad sample on. Raises SpaceError.
        """
        open_incident = self._present()
        skipped, deferred = list[tuple[int, int]](), NOBODY
        told_reason = f"{found.cause}: {found.reason}"
        if found.cause is Cause.DATA:
            if found.bad_positions:
                skipped = self._skip_identities(np.array(found.bad_positions, dtype=np.int64), told_reason)
            if found.later:
                deferred, no_room = self._defer(window, told_reason, np.array(found.later, dtype=np.int64))
                open_incident.positions = sorted({*open_incident.positions, *no_room})
                if found.proven:
                    costly_ranges = self.guard.policy.state.costly
                    self.guard.policy.state.costly = [*costly_ranges, *ranges_of(deferred.returns)][-NAMED:]
        elif found.cause is Cause.STATE:
            deferred, skipped = self._defer(window, told_reason)
        if swap is not None:
            swap_reason = f"samples of corpus {swap} were bad again and again"
            self._skip_positions([(min([*found.bad, *found.later]), LAST_POSITION)], swap_reason, swap)
            self.log.say_line(f"  swapped out: corpus {swap}")
        bad_set = set(found.bad_positions)
        told = [s for n, s in enumerate(found.suspects) if n < SHOWN or s.position in bad_set][:NAMED]
        if found.cause is not Cause.NEW_DATA or not self.has_acted:
            open_incident.cause = found.cause
        open_incident.actions.append(action)
        open_incident.reasons.append(f"{found.reason}; {remedy}")
        open_incident.kernels += found.kernels
        open_incident.positions = sorted({*open_incident.positions, *skipped})
        open_incident.steps_lost += lost
        open_incident.seconds = round(open_incident.seconds + seconds, 3)
        journal_event = IncidentEvent(
            what="attributed", cause=found.cause, positions=skipped, reason=found.reason, action=action,
            remedy=remedy, suspects=[asdict(s) for s in told],
            region=None if found.region is None else asdict(found.region),
            deferred=ranges_of(deferred.positions), returns=ranges_of(deferred.returns), lost=deferred.lost.size,
            **self._story(),
        )  # fmt: skip
        self._commit(journal_event, f"  cause: {found.cause}: {found.reason}")
        if skipped:
            of = f" of {len(open_incident.documents)} documents" if open_incident.documents else ""
            how = "in this and every later epoch" if found.cause is Cause.DATA else "in this epoch"
            samples_text = f"{_count(skipped)} samples{of} (positions {show_ranges(skipped, 4)})"
            self.log.say_line(f"  skipped {how}: {samples_text}")

    @property
    def has_acted(self) -> bool:
        """Whether something was done about the present incident already."""
        return self.incident is not None and bool(self.incident.actions)

    def train_through(
        self, found: Conclusion, state: RunState, reason: str, lost: int, seconds: float
    ) -> None:
        """The suspects of the last trip are new, or do no harm, and the run goes on with them: the incident is over,
        unless something else was done about it before, which is yet to be proven. lost: steps undone. Raises
        SpaceError."""
        nothing_done = not self.has_acted
        new = Conclusion(Cause.NEW_DATA, [], found.suspects, reason)
        self.record_conclusion(new, [], Action.APPLY, "nothing is taken away", lost, seconds)
        if nothing_done:
            self.close_incident(state, "healed")

    def release_samples(self, positions: Sequence[int], cursor: int, reason: str) -> None:
        """Skip samples no longer that incidents of this run skip. Skips by a person, or by another tool, stay.
        cursor: the run continues there: earlier samples are read in the next epoch. Raises SpaceError."""
        open_incident, order = self._present(), self.source.order
        chosen_positions = np.array(sorted(positions), dtype=np.int64)

        def make_entries() -> list[SampleEntry]:
            ledger, number, step = (
                Ledger.read_ledger(self.run.skips, []),
                open_incident.number,
                open_incident.step,
            )
            return release_entries(ledger, order, chosen_positions, reason, number, step)

        entries = run_on_first(make_entries)
        append_durably(self.run.skips, entries, f"incident {open_incident.number} wants released")
        mine = Selection(order, Ledger([e.model_copy(update={"released": None}) for e in entries]).exclusions)
        freed = chosen_positions[mine.mask_skipped(chosen_positions)]
        still_skipped = Skips.from_ranges(open_incident.positions).minus(Skips.from_numbers(freed))
        open_incident.positions = still_skipped.ranges
        open_incident.released += freed.size
        again, passed = ranges_of(freed[freed >= cursor]), ranges_of(freed[freed < cursor])
        here_text = f"{_count(again)} are read again from position {again[0][0]} on" if again else ""
        later = f"{_count(passed)} were passed and are read in the next epoch" if passed else ""
        how_read = ", ".join(filter(None, [here_text, later])) or "other lines of the ledger name all of them"
        told = {"positions": again, "next_epoch": passed, **self._story()}
        journal_event = IncidentEvent(what="released", reason=reason, **told)
        self._commit(journal_event, f"  released: {count_noun(freed.size, 'sample')} ({reason}): {how_read}")

    def skip_bad_samples(
        self, found: Conclusion, onset: int, window: Sequence[Trained], verdict: Verdict, seen: str,
        state: RunState, seconds: float,
    ) -> None:  # fmt: skip
        """Skip the bad samples from here on and undo nothing: part of the open incident, else a data incident that
        is closed at once. onset, window: since when, and in which known steps, they were met; seen: what was
        suspicious. Raises SpaceError."""
        is_new_incident = self.incident is None
        if is_new_incident:
            incident = self._add(state, onset, verdict, window)
            incident.loss_after = incident.loss_before
            # The ledger's lines name its number: the journal must know it first. Without an onset nothing is undone.
            self._tell("opened", step=state.step, verdict=verdict, action=Action.SKIP, reason=seen)
            incident.outcome = "healed"  # so that no restart takes it for open once its samples are told
        self.log.say_line(f"step {state.step}: incident {self._present().number}: {seen}")
        remedy = "the bad samples are skipped, nothing is undone"
        self.record_conclusion(found, window, Action.SKIP, remedy, 0, seconds)
        if is_new_incident:
            self._tell("closed", step=state.step)
            self.incident = None

    def record_rewind(self, step: int, cursor: int, seconds: float = 0.0) -> None:
        """The run continues after `step`, from position `cursor`. seconds: since `record_conclusion`."""
        open_incident = self._present()
        open_incident.seconds = round(open_incident.seconds + seconds, 3)
        self.closed = drop_closed_after(step, self.closed)
        self._tell("rewound", to_step=step, cursor=cursor)

    def close_incident(self, state: RunState, outcome: Outcome) -> None:
        """The last action is proven, or the run ends before a proof."""
        if self.incident is None:
            return
        incident = self.incident
        incident.outcome = outcome
        incident.loss_after = _usual(state)
        how = "over: on the trend again" if outcome == "healed" else "not proven to be over"
        text = (
            f"step {state.step}: incident {incident.number} is {how}, loss {show_number(incident.loss_after)}; "
            f"{count_noun(incident.steps_lost, 'step')} lost, {count_noun(incident.batches_discarded, 'update')} "
            "refused"
        )
        self._tell("closed", text, step=state.step)
        self.incident = None

    def record_alert(self, reason: str, state: RunState) -> None:
        """No further remedy for the current incident: training continues, and a person is alerted. Raises
        SpaceError."""
        incident = self._present()
        if Action.ALERT not in incident.actions[-1:]:
            incident.actions.append(Action.ALERT)
            incident.reasons.append(reason)
        incident.kind = "divergent"
        self._commit(
            AlertEvent(what="begun", step=state.step, reason=reason, **self._story()),
            f"ALERT: step {state.step}: incident {incident.number}: {reason}. Nothing more is done automatically: "
            "training goes on, and single updates that stand out are refused. Look at the run, or stop it",
        )

    def give_up(
        self, decision: Decision, state: RunState, window: Sequence[Trained], defer: bool,
        before: int | None = None,
    ) -> Incident:  # fmt: skip
        """Hand over or stop: ledger and journal have all that a restart needs. defer: also the window, whose data may
        be bad: without a good state it can be neither cleared nor called bad. Only for a hand-over, which always goes
        back: a checkpoint from after the window has read what the order no longer has there. before: the step that the
        next process's checkpoint must precede, None = the onset. Raises SpaceError."""
        incident = self._present()
        skipped = list[tuple[int, int]]()
        is_handover = decision.action is Action.HANDOVER
        if defer and is_handover:
            _, skipped = self._defer(window, f"the window of incident {incident.number}: {decision.reason}")
        incident.positions = sorted({*incident.positions, *skipped})
        incident.actions.append(decision.action)
        incident.reasons.append(decision.reason)
        incident.outcome = "handed over" if is_handover else "stopped"
        if not is_handover:
            incident.kind = "divergent"
        # What is handed over is proven, or not, by the next process.
        self._tell("handed over" if is_handover else "closed")
        ending_event = Handover if is_handover else Unstable
        before = decision.finding.onset if before is None else before
        self._commit(ending_event(step=state.step, before=before, reason=decision.reason, **self._story()))
        self.incident = None
        return incident

    def _present(self) -> Incident:
        assert self.incident is not None, "an action belongs to an incident that was opened"
        return self.incident

    def _skip_identities(self, found_bad: Int64s, reason: str) -> list[tuple[int, int]]:
        """Skip the samples at these positions for the rest of the run: they are bad in every epoch. Returns ranges."""
        incident, order = self._present(), self.source.order
        try:
            documents, index_error = documents_at(self.source, found_bad), None
        except DataError as error:  # a damaged index names no documents; the samples are skipped all the same
            documents, index_error = [], error
        number, step = incident.number, incident.step
        self._skip(sample_entries(order, found_bad, reason, documents[:NAMED], number, step))
        self._remember(found_bad)
        if index_error is not None:
            raise index_error
        known = {str(d) for d in incident.documents}
        incident.documents += [d for d in map(Document.model_dump, documents) if str(d) not in known]
        del incident.documents[NAMED:]
        return ranges_of(found_bad)

    def _defer(
        self, window: Sequence[Trained], reason: str, only: Int64s | None = None
    ) -> tuple[Deferral, list[tuple[int, int]]]:
        """Defer the samples of some steps, or `only` some of them. Those without room are skipped in this epoch: the
        second result. For a region right after the last one, twice as many as last time, including samples ahead."""
        if not window:
            return NOBODY, []
        incident, ahead = self._present(), 0
        positions = np.concatenate([t.positions for t in window]) if only is None else only
        if only is None and self.is_adjacent(window) and self.left_out is not None:
            ahead = max(0, 2 * self.left_out.count - positions.size)
        first_step, first_position = window[0].step, int(window[0].positions.min())
        number = incident.number
        found_samples = self.deferring.defer_samples(
            positions, first_step, first_position, reason, number, ahead
        )
        lost_ranges = ranges_of(found_samples.lost)
        self._skip_positions(lost_ranges, f"{reason}; there is no room to read them later")
        self._remember(np.concatenate([found_samples.positions, found_samples.lost]))
        deferred, return_ranges = ranges_of(found_samples.positions), ranges_of(found_samples.returns)
        # The same positions may be deferred twice, with other samples.
        incident.deferred = sorted([*incident.deferred, *deferred])
        incident.returns = sorted([*incident.returns, *return_ranges])
        incident.lost += found_samples.lost.size
        if deferred:
            return_step = self.deferring.step_of(return_ranges[0][0], first_step, first_position)
            self.log.say_line(
                f"  deferred: {count_noun(found_samples.positions.size, 'sample')} (positions "
                f"{show_ranges(deferred, 4)}), read again from position {return_ranges[0][0]} (about step "
                f"{return_step})"
            )
        if lost_ranges:
            self.log.say_line(
                f"  lost in this epoch: {count_noun(found_samples.lost.size, 'sample')}: the run ends before there is "
                "room"
            )
        return found_samples, lost_ranges

    def _remember(self, positions: Int64s) -> None:
        """Samples just skipped or deferred, by position."""
        if positions.size:
            first, last_end = int(positions.min()), int(positions.max()) + 1
            step = self._present().step
            self.left_out = LeftOutSamples(step=step, first=first, end=last_end, count=positions.size)

    def _skip_positions(
        self, ranges: Sequence[tuple[int, int]], reason: str, corpus: str | None = None
    ) -> None:
        """Skip these positions; the samples may be read again in the next epoch."""
        incident = self._present()
        told = {"reason": reason, "incident": incident.number, "step": incident.step, "corpus": corpus}
        self._skip([SkipEntry.model_validate({"first": a, "end": b, **told}) for a, b in ranges])

    def _skip(self, entries: Sequence[AnyEntry]) -> None:
        append_durably(self.run.skips, entries, f"incident {self._present().number} wants skipped")

    def _tell(self, what: str, say: str = "", **fields: Any) -> None:
        if what == "closed" and "step" in fields and self._present().outcome == "healed":
            self.closed[self._present().number] = fields["step"]
        self.log.emit_event(IncidentEvent(what=what, **fields, **self._story()), say=say)

    def _commit(self, event: Event, say: str = "") -> None:
        """Must be on the disk before anything else happens."""
        run_on_first(lambda: self.log.commit_event(event, say=say))

    def _story(self) -> dict[str, Any]:
        """Carried by every event, so that the next process can resume from it."""
        open_incident, guard_policy = self._present(), self.guard.policy.state
        left_out = {"left_out": self.left_out.model_dump()} if self.left_out is not None else {}
        return {
            "number": open_incident.number,
            **left_out,
            "summary": open_incident.model_dump(mode="json"),
            "policy": guard_policy.model_dump(mode="json"),
        }


def drop_closed_after(step: int, closed: Mapping[int, int]) -> dict[int, int]:
    """Of the steps at which incidents were over, by number: those that a way back to `step` does not undo."""
    return {number: over for number, over in closed.items() if over <= step}


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(end - first for first, end in ranges)


def _usual(state: RunState) -> float | None:
    """The loss before, or after, an incident: the median of the last steps, some of which may belong to it."""
    finite_losses = [recent_loss for recent_loss in state.recent_losses if math.isfinite(recent_loss)]
    return float(np.median(finite_losses)) if finite_losses else None


def _peak(old: float | None, values: list[float]) -> float | None:
    known_values = [x for x in [old, *values] if x is not None and math.isfinite(x)]
    return max(known_values, default=None)
