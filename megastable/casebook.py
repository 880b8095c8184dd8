"""The incidents of a run as they are written down: in journal, skip ledger and console. Rank 0 writes, all ranks know.

Opened when something is acted on, added to with every action against it, closed when an action is proven or the run
ends. What the journal says of an incident carries all of it and the policy's memory along: both outlive the process
(recall.py). What a restart depends on must reach the disk: SpaceError where it does not, on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.checkpoint.store import RunState, step_of
from megastable.data.documents import Document, documents_at
from megastable.data.order import LAST_POSITION
from megastable.data.skip_ledger import AnyEntry, SkipEntry, append_all, sample_entries
from megastable.data.source import Source
from megastable.errors import DataError, SpaceError
from megastable.evidence import Trained
from megastable.ranks import first
from megastable.rundir import RunDirectory
from megastable.stability import attribution
from megastable.stability.attribution import Conclusion
from megastable.stability.incident import Breakdown, Incident, Outcome, kind_of
from megastable.stability.policy import Action, Cause, Decision, PolicyState
from megastable.stability.signals import Verdict

Int64s = npt.NDArray[np.int64]

NAMED = 1000  # documents of an incident that are named; a swapped corpus would fill the journal
SHOWN = 16  # suspects of an incident whose numbers are kept


class Casebook:
    """The present incident, and how they are told. memory: the policy's, as it is now."""

    def __init__(
        self,
        run: RunDirectory,
        source: Source,
        memory: Callable[[], PolicyState],
        note: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self.run, self.source, self.memory, self.note, self.say = run, source, memory, note, say
        self.incident: Incident | None = None
        self.count = 0

    def restore(self, incident: Incident | None, count: int, step: int) -> None:
        """Go on after `step` with what is remembered: the open incident, and how many there were."""
        self.incident, self.count = incident, count
        if incident is not None and incident.outcome == "handed over":
            incident.outcome = "open"
            incident.steps_lost += max(0, incident.step - step)
            self._note("restarted", step=step)

    def open(
        self, decision: Decision, state: RunState, window: Sequence[Trained], grad_norm: float
    ) -> Incident:
        """The incident that a decision belongs to: the present one, or a new one. window: the steps since its onset."""
        finding = decision.finding
        if self.incident is None:
            self._number()
            before = [x for x in state.recent_losses if math.isfinite(x)]
            self.incident = Incident(
                number=self.count, step=state.step, onset=finding.onset, verdict=finding.verdict,
                kind=kind_of(finding.verdict, 0), loss_before=float(np.median(before)) if before else None,
            )  # fmt: skip
        incident = self.incident
        incident.kind = kind_of(Verdict(incident.verdict), self.memory().recurrences)
        incident.batches_discarded += sum(not t.applied for t in window)
        incident.loss_peak = _peak(incident.loss_peak, [float(t.losses.mean()) for t in window])
        incident.norm_peak = _peak(incident.norm_peak, [grad_norm])
        self.say(f"step {state.step}: incident {incident.number}: {decision.reason}")
        self._note(
            "opened", step=state.step, verdict=finding.verdict, onset=finding.onset, action=decision.action,
            reason=decision.reason,
        )  # fmt: skip
        return incident

    def damaged(self, rejected: dict[str, str], step: int) -> None:
        """Checkpoints that could not be used, with the reason: the run went on from an older one, after `step`."""
        newest = max(step_of(Path(name)) for name in rejected)
        self._number()
        summary = Incident(
            number=self.count, step=newest, onset=newest, verdict=Breakdown.DAMAGE, kind="recoverable",
            cause=Cause.STORAGE, actions=[Action.RESTART], reasons=[f"went on from step {step}, of an older one"],
            steps_lost=newest - step, outcome="healed", failure="; ".join(rejected.values()),
        )  # fmt: skip
        told = {"number": self.count, "summary": summary.model_dump(mode="json")}
        self.note("incident", what="closed", step=step, **told)

    def _number(self) -> None:
        """Of a new incident: the supervisor has some of its own."""
        events = first(lambda: [event.get("number") for event in self.run.events("incident")])
        self.count = max([self.count, *(n for n in events if isinstance(n, int))]) + 1

    def attribute(
        self,
        found: Conclusion,
        window: Sequence[Trained],
        action: Action,
        remedy: str,
        lost: int,
        seconds: float,
        swap: str | None = None,
    ) -> None:
        """Write down who was guilty, and skip them; or the window, where the state was spoilt by nobody in particular.

        Data that is innocent is not skipped. swap: the corpus to leave out from the first guilty sample on. Raises
        SpaceError.
        """
        incident = self._present()
        skipped: list[tuple[int, int]] = []
        reason = f"{found.cause}: {found.reason}"
        if found.cause is Cause.DATA:
            skipped = attribution.ranges(found.guilty)
            guilty = np.array(found.guilty)
            documents = self._convict(guilty, reason)
            known = {str(d) for d in incident.documents}
            incident.documents += [d for d in map(Document.model_dump, documents) if str(d) not in known]
            del incident.documents[NAMED:]
        elif found.cause is Cause.STATE:
            skipped = _positions(window)
            self._skip_positions(skipped, reason)
        if swap is not None:
            because = f"corpus {swap} was guilty again and again"
            self._skip_positions([(min(found.guilty), LAST_POSITION)], because, swap)
            self.say(f"  swapped out: corpus {swap}")
        incident.cause = found.cause
        incident.actions.append(action)
        incident.reasons.append(f"{found.reason}; {remedy}")
        incident.positions = sorted({*incident.positions, *skipped})
        incident.steps_lost += lost
        incident.seconds = round(incident.seconds + seconds, 3)
        self._commit(
            "incident", what="attributed", cause=found.cause, positions=skipped, reason=found.reason, action=action,
            remedy=remedy, suspects=[asdict(s) for s in found.suspects[:SHOWN]],
        )  # fmt: skip
        self.say(f"  cause: {found.cause}: {found.reason}")
        if skipped:
            count = sum(b - a for a, b in skipped)
            of = f" of {len(incident.documents)} documents" if incident.documents else ""
            how = "in this and every later epoch" if found.cause is Cause.DATA else "in this epoch"
            self.say(f"  skipped {how}: {count} samples{of} (positions {_readable(skipped)})")

    def rewound(self, step: int, cursor: int) -> None:
        """The run goes on after `step`, from the position `cursor`."""
        self._note("rewound", to_step=step, cursor=cursor)

    def close(self, state: RunState, outcome: Outcome) -> None:
        """The last action is proven, or the run ends without a proof."""
        if self.incident is None:
            return
        incident = self.incident
        incident.outcome = outcome
        incident.loss_after = float(np.mean(state.recent_losses))
        self._note("closed", step=state.step)
        self.incident = None
        how = "over: on the trend again" if outcome == "healed" else "not proven to be over"
        self.say(
            f"step {state.step}: incident {incident.number} is {how}, loss {incident.loss_after:.3f}; "
            f"{incident.steps_lost} steps done again, {incident.batches_discarded} batches refused"
        )

    def give_up(self, decision: Decision, state: RunState, window: Sequence[Trained], skip: bool) -> Incident:
        """Hand over or stop: the ledger and the journal have all that a restart needs. skip: the window, too, as its
        data was not found to be innocent. Raises SpaceError."""
        incident = self._present()
        skipped = _positions(window) if skip else []
        self._skip_positions(skipped, f"the window of incident {incident.number}: {decision.reason}")
        incident.positions = sorted({*incident.positions, *skipped})
        incident.actions.append(decision.action)
        incident.reasons.append(decision.reason)
        handover = decision.action is Action.HANDOVER
        incident.outcome = "handed over" if handover else "stopped"
        if not handover:
            incident.kind = "divergent"
        # What is handed over is proven, or not, by the next process.
        self._note("handed over" if handover else "closed")
        self._commit(
            "handover" if handover else "unstable", step=state.step, before=decision.finding.onset,
            reason=decision.reason,
        )  # fmt: skip
        self.incident = None
        return incident

    def _present(self) -> Incident:
        assert self.incident is not None, "an action belongs to an incident that was opened"
        return self.incident

    def _convict(self, guilty: Int64s, reason: str) -> list[Document]:
        """Leave out the samples at these positions, for as long as the run goes: they are bad in every epoch. Their
        documents."""
        incident, order = self._present(), self.source.order
        try:
            documents, problem = documents_at(self.source, guilty), None
        except DataError as error:  # a damaged index names no documents; the samples are bad all the same
            documents, problem = [], error
        self._skip(sample_entries(order, guilty, reason, documents[:NAMED], incident.number, incident.step))
        if problem is not None:
            raise problem
        return documents

    def _skip_positions(
        self, ranges: Sequence[tuple[int, int]], reason: str, corpus: str | None = None
    ) -> None:
        """Leave out these positions; the samples may be read again in the next epoch."""
        incident = self._present()
        told = {"reason": reason, "incident": incident.number, "step": incident.step, "corpus": corpus}
        self._skip([SkipEntry.model_validate({"first": a, "end": b, **told}) for a, b in ranges])

    def _skip(self, entries: Sequence[AnyEntry]) -> None:
        def write() -> None:
            try:
                append_all(self.run.skips, entries)
            except DataError as error:
                raise SpaceError(
                    f"{error}. What incident {self._present().number} wants skipped is not written down: make room and "
                    "start again; the run goes on from its newest checkpoint, and meets it again"
                ) from None

        first(write)

    def _note(self, what: str, **fields: Any) -> None:
        self.note("incident", what=what, **fields, **self._story())

    def _commit(self, event: str, **fields: Any) -> None:
        """As `_note`, but it must be on the disk before anything else happens."""
        first(lambda: self.run.commit(event, **fields, **self._story()))

    def _story(self) -> dict[str, Any]:
        """What every event carries, so that the next process can go on from it."""
        incident, policy = self._present(), self.memory()
        return {
            "number": incident.number,
            "summary": incident.model_dump(mode="json"),
            "policy": policy.model_dump(mode="json"),
        }


def _positions(window: Sequence[Trained]) -> list[tuple[int, int]]:
    return attribution.ranges(sorted(p for t in window for p in t.positions.tolist()))


def _peak(old: float | None, values: list[float]) -> float | None:
    known = [x for x in [old, *values] if x is not None and math.isfinite(x)]
    return max(known, default=None)


def _readable(ranges: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in ranges[:4])
    return shown + (", ..." if len(ranges) > 4 else "")
