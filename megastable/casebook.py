"""The incidents of a run as they are written down: in journal, skip ledger and console. Rank 0 writes, all ranks know.

Opened when something is acted on, added to with every action against it, closed when an action is proven or the run
ends. What the journal says of an incident carries the policy's memory along: budgets outlive the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megastable.checkpoint.store import RunState
from megastable.data.documents import documents_at
from megastable.data.loader import Source
from megastable.data.order import LAST_POSITION
from megastable.data.skips import SkipEntry, append
from megastable.evidence import Trained
from megastable.ranks import first
from megastable.rundir import RunDirectory
from megastable.stability import attribution
from megastable.stability.attribution import Conclusion
from megastable.stability.incident import Incident, Outcome, kind_of
from megastable.stability.policy import Action, Cause, Decision, PolicyState

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

    def restore(self, incident: Incident | None, count: int) -> None:
        """Go on from a checkpoint; incidents that the journal knows and the checkpoint does not count, too."""
        journaled = first(lambda: max((e["number"] for e in self.run.events("incident")), default=0))
        self.incident, self.count = incident, max(count, journaled)

    def open(
        self, decision: Decision, state: RunState, window: Sequence[Trained], grad_norm: float
    ) -> Incident:
        """The incident that a decision belongs to: the present one, or a new one. window: the steps since its onset."""
        finding = decision.finding
        if self.incident is None:
            self.count += 1
            before = [x for x in state.recent_losses if math.isfinite(x)]
            self.incident = Incident(
                number=self.count, step=state.step, onset=finding.onset, verdict=finding.verdict,
                kind=kind_of(finding.verdict, 0), loss_before=float(np.median(before)) if before else None,
            )  # fmt: skip
        incident = self.incident
        incident.kind = kind_of(incident.verdict, self.memory().recurrences)
        incident.batches_discarded += sum(not t.applied for t in window)
        incident.loss_peak = _peak(incident.loss_peak, [float(t.losses.mean()) for t in window])
        incident.norm_peak = _peak(incident.norm_peak, [grad_norm])
        self.say(f"step {state.step}: incident {incident.number}: {decision.reason}")
        self._journal(
            "opened", step=state.step, verdict=finding.verdict, onset=finding.onset, action=decision.action,
            reason=decision.reason,
        )  # fmt: skip
        return incident

    def attribute(
        self,
        found: Conclusion,
        window: Sequence[Trained],
        action: Action,
        remedy: str,
        lost: int,
        seconds: float,
    ) -> None:
        """Write down who was guilty, and skip them; or the window, if nobody in particular was."""
        incident = self._present()
        if found.cause is Cause.DATA:
            skipped = attribution.ranges(found.guilty)
        elif found.cause is Cause.HARDWARE:
            skipped = []
        else:
            skipped = _positions(window)
        self._skip(skipped, f"{found.cause}: {found.reason}")
        if action is Action.SWAP_CORPUS:
            self._swap_out(found)
        if found.cause is Cause.DATA:
            known = {str(d) for d in incident.documents}
            named = [d.model_dump() for d in documents_at(self.source, np.array(found.guilty))[:NAMED]]
            incident.documents += [d for d in named if str(d) not in known]
        incident.cause = found.cause
        incident.actions.append(action)
        incident.reasons.append(f"{found.reason}; {remedy}")
        incident.positions = sorted({*incident.positions, *skipped})
        incident.steps_lost += lost
        incident.seconds = round(incident.seconds + seconds, 3)
        self._journal(
            "attributed", cause=found.cause, positions=skipped, reason=found.reason, action=action, remedy=remedy,
            suspects=[asdict(s) for s in found.suspects[:SHOWN]],
        )  # fmt: skip
        self.say(f"  cause: {found.cause}: {found.reason}")
        if skipped:
            count = sum(b - a for a, b in skipped)
            documents = f" of {len(incident.documents)} documents" if incident.documents else ""
            self.say(f"  skipped from now on: {count} samples{documents} (positions {_readable(skipped)})")

    def rewound(self, step: int, cursor: int) -> None:
        """The run goes on after `step`, from the position `cursor`."""
        self._journal("rewound", to_step=step, cursor=cursor)

    def close(self, state: RunState, outcome: Outcome) -> None:
        """The last action is proven, or the run ends without a proof."""
        if self.incident is None:
            return
        incident = self.incident
        incident.outcome = outcome
        incident.loss_after = float(np.mean(state.recent_losses))
        self._journal("closed", summary=incident.model_dump(mode="json"))
        self.incident = None
        how = "over: on the trend again" if outcome == "healed" else "not proven to be over"
        self.say(
            f"step {state.step}: incident {incident.number} is {how}, loss {incident.loss_after:.3f}; "
            f"{incident.steps_lost} steps done again, {incident.batches_discarded} batches refused"
        )

    def give_up(self, decision: Decision, state: RunState, window: Sequence[Trained]) -> Incident:
        """Hand over or stop: the ledger and the journal have all that a restart needs."""
        incident = self._present()
        self._skip(_positions(window), f"the window of incident {incident.number}: {decision.reason}")
        incident.actions.append(decision.action)
        incident.reasons.append(decision.reason)
        incident.kind = "divergent"
        handover = decision.action is Action.HANDOVER
        incident.outcome = "handed over" if handover else "stopped"
        self._journal("closed", summary=incident.model_dump(mode="json"))
        self.note(
            "handover" if handover else "unstable", step=state.step, before=decision.finding.onset,
            reason=decision.reason, incident=incident.number, policy=self.memory().model_dump(mode="json"),
        )  # fmt: skip
        self.incident = None
        return incident

    def _present(self) -> Incident:
        assert self.incident is not None, "an action belongs to an incident that was opened"
        return self.incident

    def _skip(self, ranges: Sequence[tuple[int, int]], reason: str, corpus: str | None = None) -> None:
        incident = self._present()

        def write() -> None:
            for begin, end in ranges:
                entry = SkipEntry(
                    first=begin,
                    end=end,
                    reason=reason,
                    incident=incident.number,
                    step=incident.step,
                    corpus=corpus,
                )
                append(self.run.skips, entry)

        first(write)

    def _swap_out(self, found: Conclusion) -> None:
        """The corpus that most of the guilty samples come from, from the first of them on."""
        corpora = self.source.order.locate(np.array(found.guilty)).corpus
        name = self.source.order.corpora[int(np.bincount(corpora).argmax())].name
        self._skip([(min(found.guilty), LAST_POSITION)], f"corpus {name} was guilty again and again", name)
        self.say(f"  swapped out: corpus {name}")

    def _journal(self, what: str, **fields: Any) -> None:
        policy = self.memory().model_dump(mode="json")
        self.note("incident", number=self._present().number, what=what, **fields, policy=policy)


def _positions(window: Sequence[Trained]) -> list[tuple[int, int]]:
    return attribution.ranges(sorted(p for t in window for p in t.positions.tolist()))


def _peak(old: float | None, values: list[float]) -> float | None:
    known = [x for x in [old, *values] if x is not None and math.isfinite(x)]
    return max(known, default=None)


def _readable(ranges: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in ranges[:4])
    return shown + (", ..." if len(ranges) > 4 else "")
