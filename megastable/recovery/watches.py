"""All that watches a run, in one list, and the watches that recovery acts upon itself. Collective: every rank decides
alike.

`SampleWatch`: samples of whole batches, those that are elevated together, and every refused one. Suspects of the
running test in attribution/sample_history.py, and updates refused without an incident, become cases. A case is examined
as soon as the current state can judge samples: no incident is open and the loss is on trend. Bad samples are skipped by
identity; nothing is undone.

`ProbeWatch` and `TensorWatch`: damage to the model that no batch shows, at every snapshot and once in a while. The
probe is the losses of the same few samples, which are never trained on; the other looks at the norms of every tensor
and of its second moments.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import ValidationError

from megastable.attribution.examination import examine_window
from megastable.attribution.sample_history import Rest, SampleTest, Waiting, WatchState
from megastable.attribution.sample_replay import Laboratory, Trained
from megastable.base.collectives import mark_collective, run_on_first
from megastable.base.errors import DataError
from megastable.checkpoint import store
from megastable.checkpoint.store import RunState
from megastable.data.loader import Loader, MicroBatch, Step
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.hardware.hardware_watch import HardwareWatch
from megastable.recovery.incident_log import IncidentLog
from megastable.recovery.run_parts import RunParts
from megastable.run.events.stability_events import (
    DiscardExamined,
    Probed,
    SamplesDropped,
    SamplesExamined,
    Would,
)
from megastable.run.log import RunLog
from megastable.warnings.noise_scale import NoiseScaleWatch
from megastable.warnings.routing import RoutingWatch
from megastable.warnings.signs import StartSigns
from megastable.warnings.trends import TrendWatch
from megastable_guard.actions import Action, Cause, Decision, Verdict
from megastable_guard.conclusion import Conclusion
from megastable_guard.damage import ProbeTrend, Rise, TensorJump, TensorLook, TensorNorms, TensorPaces
from megastable_guard.policy import Policy

# What is to be skipped, or deferred, of the suspects of some steps; or why nothing is, as a sentence.
ChooseSkips = Callable[[Conclusion, Sequence[Trained], RunState], tuple[Conclusion, str]]

# Most waiting cases: more batches are refused only if the state is bad, and then no sample is bad.
CASES = 8

UNKNOWN = "this process does not know the samples of its steps"
LEFT_OUT = "its samples are left out already"


class SampleWatch(Watch):
    name = "samples"

    def __init__(self, parts: RunParts, incident_log: IncidentLog) -> None:
        self.parts, self.config, self.log = parts, parts.config.stability, parts.log
        self.incident_log = incident_log
        self._names = [corpus.name for corpus in parts.source.order.corpora]
        self._kept = Rest()  # after suspects that were trained on all the same
        self._rest = Rest()
        self.load_state_dict({})
        self.before = self.state_dict()  # before the last step with a refused update

    def state_dict(self) -> dict[str, Any]:
        state = WatchState(test=self._test.state, waiting=self._waiting, quiet=self._quiet, rest=self._rest)
        return state.model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved_state = WatchState.model_validate(state)
        self._test = SampleTest(self.config.samples, saved_state.test)
        self._waiting, self._quiet = saved_state.waiting, saved_state.quiet
        # Only from a checkpoint: time already spent on searches stays spent.
        self._rest = max(self._rest, saved_state.rest, key=lambda rest: rest.until)

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:
            self.load_state_dict(saved)

    def observe_batch(self, batch: Step, measured: Measured, applied: bool, step: int) -> None:
        """Judge the samples of a step; suspects wait."""
        if not self.config.enabled:
            return
        if not applied:
            # Of a step that may leave a snapshot; a copy costs as much as the test.
            self.before = self.state_dict()
        corpora, losses = (
            self.parts.source.order.locate_samples(batch.positions).corpus,
            measured.losses.numpy(),
        )
        alarm = self._test.observe_batch(step, losses, corpora, self._names, applied, measured.grad_norm)
        if alarm is None or step < self._rest.until:
            return
        if self.config.dry_run:
            journal_event = Would(step=step, action=Action.SKIP, reason=alarm.reason)
            self.log.emit_event(journal_event, say=f"step {step}: would examine samples: {alarm.reason}")
            return
        first = min([alarm.onset, *(case.first for case in self._waiting if case.kind == "batch")])
        self._waiting = [case for case in self._waiting if case.kind != "batch"]
        self._wait(Waiting(kind="batch", first=first, last=step, verdict=Verdict.SHIFT, reason=alarm.reason))

    def begin_again(self) -> None:
        self._test, self._quiet = SampleTest(self.config.samples), 0
        while self._waiting:
            case = self._waiting.pop(0)
            self.drop_case(case, case.last, "what comes now is new, and so may this have been")

    def note_refused(
        self, batch: Step, measured: Measured, step: int, decision: Decision, located: str = ""
    ) -> None:
        """An update was refused, and nothing more is done about it now. located: the origin of its first non-finite
        number, if it was replayed."""
        positions, losses = batch.positions.tolist(), measured.losses.tolist()
        verdict, reason = decision.finding.verdict, decision.reason
        self._wait(
            Waiting(kind="discard", first=step, last=step, verdict=verdict, reason=reason, positions=positions,
                    losses=losses, located=located)
        )  # fmt: skip

    def take_waiting_batches(self, policy: Policy, step: int, oldest: int | None) -> Waiting | None:
        """A case of whole batches that need not wait any longer, as a state from before it is available. oldest: step
        of the oldest snapshot."""
        case = next((case for case in self._waiting if case.kind == "batch"), None)
        if case is None or not policy.may_look_back(step, case.first, oldest):
            return None
        self._waiting.remove(case)
        return case

    def record_nobody_bad(self, case: Waiting, found: Conclusion, step: int, seconds: float) -> None:
        """Journal that no sample of a case is bad. Whole batches then rest before the next examination, twice as
        long if they recur soon."""
        if case.kind == "batch":
            self._rest = self._rest.begin_rest(step)
        examined_event = DiscardExamined if case.kind == "discard" else SamplesExamined
        reason = "; ".join(filter(None, [found.reason, case.located]))
        event = examined_event(**describe_case(case, step, reason), seconds=round(seconds, 3))
        self.log.emit_event(event, say=f"step {step}: {case.reason}; examined: {reason}: nothing is skipped")

    def shorten_rest(self, case: Waiting) -> None:
        """A sample of a case is bad: the next rest of its kind is short."""
        if case.kind == "batch":
            self._rest = Rest(until=self._rest.until)

    def skip_bad_samples(
        self, case: Waiting, found: Conclusion, window: Sequence[Trained], state: RunState, seconds: float
    ) -> None:
        """Skip the bad samples of a case; nothing is undone. Raises SpaceError."""
        self.shorten_rest(case)
        verdict, seen = case.verdict, case.reason
        self.incident_log.skip_bad_samples(found, case.first, window, verdict, seen, state, seconds)
        self.parts.loader.go_to(state.cursor, self.parts.select_unskipped())

    def examine_cases(
        self, state: RunState, trained: Sequence[Trained], laboratory: Laboratory, quiet: bool,
        choose_skips: ChooseSkips,
    ) -> list[Conclusion]:  # fmt: skip
        """Examine waiting cases, if possible now: skip bad samples, and go on. Returns what was skipped. Raises
        SpaceError.

        trained: the latest steps. quiet: no incident is open, no action awaits proof, and the update was applied and is
        on trend.
        """
        self._quiet = self._quiet + 1 if quiet else 0
        skipped_samples = list[Conclusion]()
        is_ready = self._quiet >= self.config.samples.quiet_steps and state.step >= self._kept.until
        while is_ready and self._waiting:
            found = self._examine(self._waiting.pop(0), state, trained, laboratory, choose_skips)
            skipped_samples += [found] if found is not None else []
        return skipped_samples

    def _wait(self, case: Waiting) -> None:
        every_case = [*self._waiting, case]
        self._waiting = every_case[-CASES:]
        for dropped_case in every_case[:-CASES]:
            self.drop_case(dropped_case, case.last, f"{CASES} later ones wait")

    def drop_case(self, case: Waiting, step: int, reason: str) -> None:
        """Journal that a case is not examined, and why."""
        self.log.emit_event(
            SamplesDropped(**describe_case(case, step, reason)),
            say=f"step {step}: {case.reason}; not examined: {reason}",
        )

    def _examine(
        self, case: Waiting, state: RunState, trained: Sequence[Trained], laboratory: Laboratory,
        choose_skips: ChooseSkips,
    ) -> Conclusion | None:  # fmt: skip
        begin_time = time.perf_counter()
        self.parts.phase("examine samples")
        left_out = self.parts.select_unskipped()
        harmless_history = [t for t in trained if t.applied and t.step < case.first]
        if case.kind == "discard":
            batch_positions, losses = np.array(case.positions), np.array(case.losses)
            suspect_window = [Trained(case.first, batch_positions, losses, applied=False)]
        else:
            suspect_window = [t for t in trained if case.first <= t.step <= case.last]
        if not suspect_window or left_out.mask_skipped(suspect_window[-1].positions).all():
            self.drop_case(case, state.step, LEFT_OUT if suspect_window else UNKNOWN)
            return None
        try:
            found = examine_window(laboratory, suspect_window, harmless_history, state.cursor, left_out)
        except DataError as error:
            # On every rank. If it is yet to be trained on, training will report it.
            self.drop_case(case, state.step, str(error))
            return None
        spent_seconds = time.perf_counter() - begin_time
        if found.cause is not Cause.DATA or not found.bad:
            self.record_nobody_bad(case, found, state.step, spent_seconds)
            return None
        found, why_kept = choose_skips(found, suspect_window, state)
        spent_seconds = time.perf_counter() - begin_time
        if why_kept:
            self._kept = self._kept.begin_rest(state.step)
            self.record_nobody_bad(case, replace(found, reason=why_kept), state.step, spent_seconds)
            return None
        if case.verdict is Verdict.NON_FINITE:
            found = replace(found, proven=True)
        self._kept = Rest(until=self._kept.until)
        self.skip_bad_samples(case, found, suspect_window, state, spent_seconds)
        return found


def describe_case(case: Waiting, step: int, reason: str) -> dict[str, Any]:
    """For the journal: what became of a case at `step`, and why."""
    case_place = {"first": case.first, "last": case.last, "positions": case.positions}
    return {"step": step, "suspected": case.reason, "reason": reason, **case_place}


EVERY = 25  # steps between two looks, at most
MOST = 64  # samples
SHARE = 0.2  # of a global batch: a look is a forward pass of so much, 0.3 % of the time of its steps
FORGETFUL = "spam", "stable_spam"  # whose moments begin again every so many updates


class ProbeWatch(Watch):
    """held_out: this rank's part of the validation samples; without any there is no probe. sets: of which the first
    samples hold one each, and the probe at least that. Rank 0 has the trend."""

    name = "probe"
    state: ProbeTrend

    def __init__(
        self, engine: Engine, loader: Loader, held_out: Sequence[MicroBatch], log: RunLog, sets: int = 1
    ) -> None:
        self.engine, self.log = engine, log
        wanted_samples = min(MOST, int(SHARE * loader.batch))
        self._batches = list(held_out[: max(wanted_samples // loader.unit, -(-sets // loader.unit))])
        batch_digests = [zlib.crc32(probe_batch.tokens.numpy().tobytes()) for probe_batch in self._batches]
        self.state = ProbeTrend(samples=f"{batch_digests} {loader.unit}")
        self._losses = np.empty(0)

    def look_at_probe(self, step: int) -> Rise | None:
        """After `step`: whether the probe has risen."""
        if not self._batches:
            return None
        self._losses = self.engine.evaluate_samples(self._batches).numpy()
        self.log.emit_event(Probed(step=step, loss=float(self._losses.mean()), samples=self._losses.size))
        return run_on_first(lambda: self.state.judge_look(step, self._losses))

    def accept_rise(self, step: int) -> None:
        """The rise of the last look was no damage."""
        run_on_first(lambda: self.state.accept_rise(step, self._losses))

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        self.state.forget_after(step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("samples") == self.state.samples:  # else other validation data, or another batch
            super().load_state_dict(state)


class TensorWatch(Watch):
    name = "tensors"
    state: TensorPaces

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._names = sorted(engine.probe.parameter_names)
        self.state = TensorPaces()
        self._look: TensorLook | None = None

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        self.state.rates += rate

    def measure_norms(self) -> dict[str, TensorNorms]:
        """The norms of the state that the engine holds, by tensor."""
        weights, moment_norms = self.engine.flat_state().tensor_norms(self._names)
        return dict(zip(self._names, map(TensorNorms, weights, moment_norms), strict=True))

    def look_at_tensors(self, state: RunState) -> TensorJump | None:
        """After a step: whether a tensor has jumped since the last look."""
        betas = [group["betas"][1] for group in self.engine.optimizer.param_groups if "betas" in group]
        moments_restart = self.engine.config.optimizer.name in FORGETFUL
        self._look = TensorLook(state.step, self.state.rates, state.updates, self.measure_norms())
        return self.state.judge_look(self._look, None if moments_restart else min(betas, default=None))

    def accept_jump(self) -> None:
        """The jump of the last look is the run's own work."""
        if self._look is not None:
            self.state.accept_jump(self._look)

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        self.state.forget_after(step)
        if saved is not None:
            self.state.rates = TensorPaces.model_validate(saved).rates


@dataclass(frozen=True)
class Watches:
    """In the order in which their hooks are called."""

    hardware: HardwareWatch
    samples: SampleWatch
    trends: TrendWatch
    routing: RoutingWatch
    signs: StartSigns
    probe: ProbeWatch
    tensors: TensorWatch
    noise: NoiseScaleWatch

    def __iter__(self) -> Iterator[Watch]:
        yield from self.hardware.watches
        yield from (self.samples, self.trends, self.routing, self.signs, self.probe, self.tensors, self.noise)

    def collect_ballot(self, step: int) -> dict[str, Sequence[float]]:
        return {watch.name: watch.ballot(step) for watch in self}

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        for watch in self:
            watch.after_update(measured, step, rate)

    def begin_again(self) -> None:
        for watch in self:
            watch.begin_again()

    def note_rewind(self, step: int, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """The run is back on the snapshot of `step`, which has `state_dicts`."""
        for watch in self:
            watch.rewound(step, saved.get(watch.name, {}))

    def repeat_step(self, step: int) -> None:
        """The step after `step` is done again, from the state that its refused update has left alone."""
        for watch in self:
            watch.rewound(step, None)

    def state_dicts(self) -> dict[str, dict[str, Any]]:
        return {watch.name: watch_state for watch in self if (watch_state := watch.state_dict())}

    def load_state_dicts(self, saved: Mapping[str, Any]) -> None:
        """Continue from `state_dicts`. Raises CheckpointError, on all ranks, for what cannot be read."""
        for watch in self:
            try:
                watch.load_state_dict(saved.get(watch.name, {}))
            except ValidationError as error:
                refusal = store.refuse_stability(f"the checkpoint's {watch.name}", error)
                raise mark_collective(refusal) from None
