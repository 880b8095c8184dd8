"""What a guarded run leaves behind: the counts of `Guard.report`, incidents, and the events of its journal.

Every rank folds the same decisions into the same record; the first one also writes it, in the format of megastable's
own runs, so that `megastable watch`, `status` and the post-mortem pages read it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from megastable_guard.actions import Action, Cause, Decision, Finding, Signals, Verdict
from megastable_guard.incident import Incident, Outcome, classify_incident
from megastable_guard.policy_state import PolicyState

if TYPE_CHECKING:
    from megastable_guard.run_files import RunFiles

USUAL = 20  # steps whose median is the loss before, or after, an incident
REMEMBERED = 100  # incidents in a report and in a checkpoint


class RecordState(BaseModel):
    """The counts of a run, for a checkpoint. refused, rewinds, alerts: so far; steps_lost: undone and done again;
    deferred: steps whose data was left for later; skipped_ids: of bad samples that were named, [first, end); count: of
    incidents; incidents: the newest ones; number: of the last one in the run directory; open: of the one that is not
    over, 0 = none; losses: the last applied steps, with their loss."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="constants")

    refused: int = 0
    rewinds: int = 0
    steps_lost: int = 0
    deferred: int = 0
    skipped_ids: list[tuple[int, int]] = []
    alerts: int = 0
    count: int = 0
    number: int = 0
    incidents: list[Incident] = []
    open: int = 0
    losses: list[tuple[int, float]] = []


class GuardRecord:
    """Of one run. run_dir: None: only the counts are kept."""

    def __init__(self, run_dir: str | Path | None) -> None:
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.state = RecordState()
        self.files: RunFiles | None = None  # of the first rank
        self.has_begun, self._is_resumed = False, False
        self._losses = deque[tuple[int, float]](maxlen=USUAL)
        self._stepped = time.monotonic()

    def begin_run(self, step: int, world: int, torch_version: str) -> list[dict[str, Any]]:
        """On the first rank, before the first step of this process: the incidents that the journal has. step: that the
        run has done. Raises RuntimeError as `RunFiles`, and OSError."""
        if self.run_dir is None:
            return []
        from megastable_guard.run_files import (
            RunFiles,
        )  # where there are no POSIX locks, only a run_dir fails

        try:
            self.files = RunFiles(self.run_dir, world)
        except OSError as error:
            raise OSError(
                f"run_dir={self.run_dir}: the first rank cannot write there ({error}): make it writable for it, or use "
                "another run_dir"
            ) from error
        told_incidents = {summary["number"]: summary for summary in self.files.read_incidents()}
        for number, summary in told_incidents.items():
            if summary.get("outcome") == "open" and number != self.state.open:
                reasons = [*summary.get("reasons", ()), "its process ended before it was proven to be over"]
                closed_summary = {**summary, "outcome": "stopped", "reasons": reasons}
                told_incidents[number] = closed_summary
                self._tell("incident", what="closed", step=step, number=number, summary=closed_summary)
                if Action.ALERT in summary.get("actions", ()):
                    self._tell("alert", what="over", step=step)
        if self._is_resumed:
            self._tell("resumed", step=step)
        self._tell("training", step=step, world=world, software={"torch": torch_version}, guarded=True)
        self.files.flush_steps(step)
        return list(told_incidents.values())

    def take_up(self, told_incidents: Sequence[Mapping[str, Any]]) -> None:
        """On every rank, behind `begin_run`, with what it returned. A run that is resumed counts what happened to its
        incidents after the checkpoint, too: that it was undone by the end of the process is no reason to hide it."""
        self.has_begun = True
        last_number, self.state.number = (
            self.state.number,
            max([self.state.number, *(summary["number"] for summary in told_incidents)]),
        )
        for summary in told_incidents if self._is_resumed else ():
            with suppress(ValidationError):  # of megastable's own run, or damaged
                told_incident = Incident.model_validate(summary)
                if told_incident.number > last_number or told_incident.number == self.state.open:
                    self._count_incident(told_incident)

    def _count_incident(self, told_incident: Incident) -> None:
        """As the journal has it. The one that is open in the checkpoint goes on with what happened since."""
        s, known_incident = self.state, self._find_open()
        if known_incident is None or known_incident.number != told_incident.number:
            known_incident = None
            s.count += 1
            s.incidents = [*s.incidents, told_incident][-REMEMBERED:]
        else:
            told_incident.outcome = "open"
            s.incidents[s.incidents.index(known_incident)] = told_incident
        for sign, incident in ((1, told_incident), (-1, known_incident)):
            if incident is not None:
                s.refused += sign * incident.batches_discarded
                s.rewinds += sign * incident.actions.count(Action.REWIND)
                s.steps_lost += sign * incident.steps_lost
                s.alerts += sign * (Action.ALERT in incident.actions)

    @property
    def has_rewound(self) -> bool:
        """Whether the run was rewound for the open incident."""
        open_incident = self._find_open()
        return open_incident is not None and any(action.rewinds for action in open_incident.actions)

    def note_step(
        self,
        decision: Decision,
        signals: Signals,
        is_applied: bool,
        policy: PolicyState,
        is_examined: bool = False,
    ) -> None:
        """A step was judged. is_examined: an incident was looked at, also if nothing was undone."""
        finding, now, loss = decision.finding, time.monotonic(), signals.loss
        grad_norm, lr = signals.grad_norm or 0.0, signals.lr or 0.0
        step_seconds, self._stepped = now - self._stepped, now
        if self.files is not None:
            from megastable_guard.step_files import GuardedStep

            is_finite = finding.verdict is not Verdict.NON_FINITE
            self.files.add_step(
                GuardedStep(
                    finding.step, time.time(), is_applied, is_finite, loss, grad_norm, lr, step_seconds
                )
            )
        if is_applied and isfinite(loss):
            self._losses.append((finding.step, loss))
        if decision.action is Action.APPLY and not is_examined:
            is_quiet = finding.verdict is Verdict.HEALTHY and finding.on_trend
            if decision.healed or (is_quiet and not policy.refused and not policy.watching):
                self.close_incident(finding.step, "healed")
            return
        if not is_applied:
            self.state.refused += 1
            self._tell(
                "discarded", step=finding.step, verdict=finding.verdict, reason=decision.reason, loss=loss,
                grad_norm=grad_norm,
            )  # fmt: skip
        self._extend_incident(decision, loss, grad_norm, is_applied, policy)
        if self.files is not None:
            self.files.flush_steps(finding.step)

    def _extend_incident(
        self, decision: Decision, loss: float, grad_norm: float, is_applied: bool, policy: PolicyState
    ) -> None:
        """The open incident, or a new one, of an action."""
        finding, action = decision.finding, decision.action
        if not action.rewinds and action not in (Action.DISCARD, Action.APPLY):
            action = Action.ALERT  # nobody ends the loop of somebody else
        open_incident = self._find_open()
        is_new = open_incident is None
        if open_incident is None:
            self.state.count, self.state.number = self.state.count + 1, self.state.number + 1
            losses_before = [told for step, told in self._losses if step < finding.onset]
            open_incident = Incident(
                number=self.state.number, step=finding.step, onset=finding.onset, verdict=finding.verdict,
                kind=classify_incident(finding.verdict, policy.recurrences),
                loss_before=statistics.median(losses_before) if losses_before else None,
            )  # fmt: skip
            self.state.incidents = [*self.state.incidents, open_incident][-REMEMBERED:]
            self.state.open = open_incident.number
        open_incident.step, open_incident.onset = finding.step, min(open_incident.onset, finding.onset)
        open_incident.verdict = finding.verdict
        open_incident.kind = classify_incident(finding.verdict, policy.recurrences)
        open_incident.batches_discarded += not is_applied
        open_incident.loss_peak = _find_peak(open_incident.loss_peak, loss)
        open_incident.norm_peak = _find_peak(open_incident.norm_peak, grad_norm)
        is_first_alert = action is Action.ALERT and action not in open_incident.actions
        if action.rewinds or open_incident.actions[-1:] != [action]:
            open_incident.actions.append(action)
            open_incident.reasons.append(decision.reason)
        if Action.ALERT in open_incident.actions:
            open_incident.kind = "divergent"
        # So the journal has all of it, whenever the process dies.
        if is_new or is_first_alert or not is_applied:
            self._tell_incident(
                "opened", step=finding.step, verdict=finding.verdict, onset=finding.onset, action=action,
                reason=decision.reason,
            )  # fmt: skip
        if is_first_alert:
            self.state.alerts += 1
            self._tell("alert", what="begun", step=finding.step, reason=decision.reason, **self._story())

    def note_rewind(self, finding: Finding, to_step: int, deferred: int, seconds: float) -> None:
        """The run goes on after `to_step`. deferred: steps whose data is left for later; seconds: that it took."""
        steps_lost = finding.step - to_step
        self.state.rewinds += 1
        self.state.steps_lost += steps_lost
        self.state.deferred += deferred
        for step, loss in [*self._losses]:
            if step > to_step:
                self._losses.remove((step, loss))
        open_incident = self._find_open()
        if open_incident is not None:
            open_incident.steps_lost += steps_lost
            open_incident.seconds = round(open_incident.seconds + seconds, 3)
            self._tell_incident("rewound", step=finding.step, to_step=to_step)
        if self.files is not None:
            self.files.flush_steps(to_step, "rewind")
        self._stepped = time.monotonic()

    def note_cause(
        self, cause: Cause, reason: str, skipped: Sequence[int] = (), action: Action | None = None
    ) -> None:
        """The samples of the open incident were examined. skipped: indices of bad ones, which are not read again;
        action: what is done beside the rewind."""
        open_incident = self._find_open()
        if open_incident is None:
            return
        open_incident.cause = cause
        open_incident.reasons.append(reason)
        open_incident.actions += [action] if action is not None else []
        self.state.skipped_ids = _find_ranges(_list_ids(self.state.skipped_ids) | {*skipped})
        open_incident.positions = _find_ranges(_list_ids(open_incident.positions) | {*skipped})
        self._tell_incident(
            "attributed", cause=cause, reason=reason, positions=_find_ranges({*skipped}), action=action
        )

    def note_cleared(self, ids: Sequence[int]) -> None:
        """Samples that were named, and are read again: another look has shown that they are not bad."""
        self.state.skipped_ids = _find_ranges(_list_ids(self.state.skipped_ids) - {*ids})
        for incident in self.state.incidents:
            named_ids = _list_ids(incident.positions)
            if not named_ids.isdisjoint(ids):
                incident.positions = _find_ranges(named_ids - {*ids})

    def note_trial(self, step: int, snapshot: int, facts: Mapping[str, Any], reason: str) -> None:
        """What branches from the state after `snapshot` have shown about the samples."""
        self._tell("branches_tried", step=step, snapshot=snapshot, reason=reason, **facts)

    def note_lifted(self, step: int, reason: str) -> None:
        """A limit of the learning rate was lifted."""
        self._tell("rate_lifted", step=step, reason=reason)

    def close_incident(self, step: int, outcome: Outcome) -> None:
        """The open one, if there is one."""
        open_incident = self._find_open()
        if open_incident is not None:
            open_incident.outcome = outcome
            last_losses = [loss for _, loss in self._losses]
            open_incident.loss_after = statistics.median(last_losses) if last_losses else None
            self._tell_incident("closed", step=step)
            if Action.ALERT in open_incident.actions and outcome == "healed":
                self._tell("alert", what="over", step=step)
        self.state.open = 0

    def finish_run(self, step: int, report: GuardReport) -> None:
        """The run is complete, and the directory free for the next one."""
        if self.files is not None:
            self._tell("finished", steps=step)
            self.files.flush_steps(step, "ended")
            self.files.write_summary(report)
            self.files.release_run()
        self.has_begun, self.files = False, None

    def report_counts(
        self, step: int, updates: int, left_out: Mapping[str, Sequence[int]] | None
    ) -> GuardReport:
        """step, updates: that the run has done; left_out: ids of samples by what became of them; None: only the named
        ones are known."""
        s, sample_ids = self.state, {name: {*ids} for name, ids in (left_out or {}).items()}
        skipped_ids = sample_ids.get("skipped", _list_ids(s.skipped_ids))
        return GuardReport(
            steps=step, updates=updates, refused=s.refused, rewinds=s.rewinds, steps_lost=s.steps_lost,
            deferred_steps=s.deferred, deferred_samples=len(sample_ids["deferred"]) if left_out else None,
            skipped_samples=len(skipped_ids), skipped_ids=[*map(list, _find_ranges(skipped_ids))],
            dropped_ids=[*map(list, _find_ranges(sample_ids.get("dropped", set())))], alerts=s.alerts,
            incident_count=s.count, incidents=[incident.model_dump(mode="json") for incident in s.incidents],
        )  # fmt: skip

    def read_state(self) -> dict[str, Any]:
        """For a checkpoint."""
        self.state.losses = [*self._losses]
        return self.state.model_dump(mode="json")

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Of a checkpoint. A process that has trained before goes on in the same directory."""
        self.state = RecordState.model_validate(state)
        self._losses = deque(self.state.losses, maxlen=USUAL)
        self.has_begun, self._is_resumed, self.files = False, True, None

    def _find_open(self) -> Incident | None:
        return next((case for case in self.state.incidents if case.number == self.state.open), None)

    def _story(self) -> dict[str, Any]:
        open_incident = self._find_open()
        assert open_incident is not None, "an action belongs to an incident that was opened"
        return {"number": open_incident.number, "summary": open_incident.model_dump(mode="json")}

    def _tell_incident(self, what: str, **fields: Any) -> None:
        self._tell("incident", what=what, **fields, **self._story())

    def _tell(self, event: str, **fields: Any) -> None:
        if self.files is not None:
            self.files.write_event(event, fields)


def _find_ranges(indices: Set[int]) -> list[tuple[int, int]]:
    """[first, end) of neighbours."""
    found_ranges = list[tuple[int, int]]()
    for index in sorted(indices):
        if found_ranges and found_ranges[-1][1] == index:
            found_ranges[-1] = found_ranges[-1][0], index + 1
        else:
            found_ranges.append((index, index + 1))
    return found_ranges


def _list_ids(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {index for first, end in ranges for index in range(first, end)}


def _find_peak(old: float | None, value: float) -> float | None:
    known_values = [known for known in (old, value) if known is not None and isfinite(known)]
    return max(known_values, default=None)


class GuardReport(dict[str, Any]):
    """What `Guard.report` gives: JSON as a dict, for people as text."""

    def __str__(self) -> str:
        report_lines = [
            f"{self['steps']:,} steps, {self['updates']:,} updates applied, {self['refused']:,} refused; "
            f"{self['rewinds']:,} rewinds, {self['steps_lost']:,} steps lost; {self['alerts']:,} alerts",
            f"data of {self['deferred_steps']:,} steps left for later"
            + "".join(
                f"; {self[f'{kind}_samples']:,} samples {kind}" for kind in ("deferred", "skipped")
                if self[f"{kind}_samples"] is not None
            ),
        ]  # fmt: skip
        for case in self["incidents"]:
            actions = ", ".join(case["actions"])
            report_lines.append(
                f"incident {case['number']}, step {case['onset']:,}: {case['verdict']}, {actions}, {case['outcome']}: "
                f"{'; '.join(case['reasons'])}"
            )
        hidden_count = self["incident_count"] - len(self["incidents"])
        if hidden_count:
            report_lines.insert(2, f"{hidden_count:,} earlier incidents are in the journal only")
        return "\n".join(report_lines)
