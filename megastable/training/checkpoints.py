"""Manages the checkpoints of a training process: chooses the one to start from, saves, marks healthy, sets aside.

The layer between the trainer and checkpoint/ that journals, prints and raises. All methods are collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from megastable.base import activity
from megastable.base.collectives import (
    combine_answers,
    gather_objects,
    mark_collective,
    run_on_all,
    run_on_first,
)
from megastable.base.errors import CheckpointError, MegastableError, SpaceError, UnstableError
from megastable.checkpoint import markers, store
from megastable.checkpoint.files import random_name
from megastable.checkpoint.held_points import PartFolder, find_interrupted_rewind
from megastable.checkpoint.markers import StepsOnTrend
from megastable.checkpoint.parts import recover_staged
from megastable.checkpoint.saving import SaveOutcome, Saver
from megastable.checkpoint.shared_reading import HeldFiles, load_shared, read_newest_good
from megastable.checkpoint.store import LayoutState, RunState
from megastable.checkpoint.uploads import LAST_SECONDS, Uploader, look_at_run
from megastable.checkpoint.vitals import (
    Vitals,
    bound_moment_ratio,
    explain_doubt,
    explain_unclear_proof,
    judge_loaded_state,
    loss_change,
    size_change,
)
from megastable.checkpoint.whole import load_into, run_of
from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.optim.build import AVERAGES
from megastable.run.changes import changes_of
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.training_events import (
    CheckpointFailed,
    CheckpointHealthy,
    CheckpointRecovered,
    CheckpointRejected,
    CheckpointSaved,
    CheckpointSuspect,
    ClippingReset,
    MomentsReset,
    Reshaped,
    RolledBack,
    Training,
    Unstable,
    Warned,
)
from megastable.run.log import RunLog
from megastable.run.rank_ipc import host_name


class Checkpoints:
    """The checkpoints of one run, on this rank. phase: the trainer's heartbeat. recipe: the frozen one. vitals:
    measures those of the engine's state, after a step. lineage: of these processes.

    last: the step of the newest one that counts, -1 if none. rejected: damaged ones passed over at the start, with the
    reason; passed: good ones that have read samples deferred since. nonfinite_step: of a state that could
    not be saved because it is not finite.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        run: RunDirectory,
        log: RunLog,
        phase: Callable[[str], None],
        recipe: Callable[[], bytes],
        vitals: Callable[[int], Vitals],
        lineage: str,
    ) -> None:
        self.config, self.engine, self.run, self.folder = config.checkpoint, engine, run, run.checkpoints
        self.log, self.phase, self.vitals = log, phase, vitals
        self.saver = Saver(self.folder, engine, self.config, config.model, recipe, lineage)
        self.uploader: Uploader | None = None
        if self.config.upload is not None:
            hosts, rank = gather_objects(host_name()), dist.get_rank()
            if hosts.index(hosts[rank]) == rank:  # one rank of every host uploads what its ranks have written
                self.uploader = Uploader(self.config.upload, run, hosts, rank)
        # The others wait for the ranks that upload.
        self._last_seconds = min(LAST_SECONDS, config.run.timeout / 2)
        self.trend = StepsOnTrend(self.config.healthy_after)
        self._model = config.model
        self.last = -1
        self.rejected: dict[str, str] = {}
        self.passed: set[str] = set()
        self.nonfinite_step: int | None = None
        self.changes: dict[str, float] = {}  # rounding of the loaded state since it was saved
        self._last_begun = time.monotonic()  # the last save, or these processes' training from one
        self._moved: dict[str, str] = {}  # as saved, but with other losses here: passed over, with the reason
        self._held: HeldFiles | None = (
            None  # what the ranks hold of the one that was found, until it is loaded
        )
        self._doubted: set[int] = set()  # steps of those that cannot prove healthy

    # Starting

    @combine_answers()
    def find_newest_good(self, has_read: Callable[[RunState], bool] = lambda _: False) -> Path | None:
        """The newest good one that the run may resume from; None in a new run. has_read: whether one has read samples
        deferred since then: such a one is taken only if there is no other good one."""
        self.settle_leftovers()
        bad_names = run_on_first(self._quarantined)
        unfit_names = bad_names | self._moved
        behind_names = run_on_first(lambda: self._of_which(has_read)) - unfit_names.keys()
        passed_names = unfit_names | dict.fromkeys(behind_names, "")
        self._held, rejected_names = read_newest_good(self.folder, passed_names)
        self.passed = behind_names & rejected_names.keys()
        if self._held is None and behind_names:
            self._held, damaged_names = read_newest_good(self.folder, unfit_names)
            rejected_names, self.passed = rejected_names | damaged_names, set()
        told_before = self.rejected
        self.rejected = {rejected_name: reason for rejected_name, reason in rejected_names.items() if reason}
        for name, reason in self.rejected.items() - told_before.items():
            rejected_event = CheckpointRejected(name=name, problem=reason)
            self.log.emit_event(rejected_event, say=f"passed over a damaged checkpoint: {reason}")
        if self._held is None and self.rejected:
            raise mark_collective(CheckpointError(self._nothing_left(bad_names)))
        return None if self._held is None else self._held.folder

    def settle_leftovers(self) -> None:
        """Finish what the last process left undone: saves, and rewinds."""
        run_on_first(self._clean)
        if self.config.staging is not None:
            self._recover(PartFolder(self.config.staging, self.run.root))
        handover_step = run_on_first(self.run.find_handover)
        rolled_back = run_on_first(self.run.find_rollback)
        if rolled_back is not None:
            run_on_first(lambda: self._go_behind(*rolled_back))
        elif handover_step is not None:
            self.log.say_line(f"the last process asked for a checkpoint from before step {handover_step}")
            run_on_first(lambda: self._only_before(handover_step))
        elif cut_short := run_on_first(
            lambda: find_interrupted_rewind(self.run.iterate_events(Training, IncidentEvent, CheckpointSaved))
        ):
            run_on_first(lambda: self._leave_behind(*cut_short))

    def list_standing(self) -> tuple[int, list[int]]:
        """By their names and markers: the step of the newest not quarantined, -1 if there is none, and the steps
        of those that were. Collective."""

        def look() -> tuple[int, list[int]]:
            bad_steps = {int(name.removeprefix("step-")) for name in self._quarantined()}
            return max(set(self._steps()) - bad_steps, default=-1), sorted(bad_steps)

        return run_on_first(look)

    def _of_which(self, true: Callable[[RunState], bool]) -> set[str]:
        """Names of those whose state meets the condition; not of unreadable ones, which are damaged."""
        found_names = set[str]()
        for checkpoint_path in store.newest_first(self.folder):
            with suppress(CheckpointError):
                if true(store.read_state(checkpoint_path)):
                    found_names.add(checkpoint_path.name)
        return found_names

    def _nothing_left(self, quarantined: Collection[str]) -> str:
        """The reason why the run cannot begin."""
        rejected_count = len(self.rejected)
        told = f"{self.folder}: none of its {rejected_count} checkpoints can be used; see the lines above."
        if self._moved:
            return (
                f"{told} Weights and moments of {len(self._moved)} of them are as large as when they were saved, but "
                f"compute other losses here: {self._look()}"
            )
        accept_advice = f", or accept one: {self._accept(quarantined)}" if quarantined else ""
        return f"{told} Restore one{accept_advice}, or start again with another run.dir"

    def _look(self) -> str:
        """Advice for a person whose checkpoint, or machine, computes other losses."""
        return (
            "look at kernels, versions and hardware. Where they were changed on purpose, accept one: "
            f"{self._accept(self._moved)}; checkpoint.vitals.probes=0 goes on without asking"
        )

    def _accept(self, names: Collection[str]) -> str:
        newest_path = max((self.folder / name for name in names), key=store.step_of)
        return f"megastable checkpoint accept {newest_path}"

    def _quarantined(self) -> dict[str, str]:
        """Names of those that a run has quarantined, with the reason."""
        rulings = {path.name: markers.read_bad_ruling(path) for path in store.newest_first(self.folder)}
        return {ruling_name: ruling.reason for ruling_name, ruling in rulings.items() if ruling is not None}

    def load_into_engine(self, found: Path, saved: RunState, layout: LayoutState) -> None:
        """Load weights, moments and random states of `found` into the engine, whatever layout wrote it."""
        held_files, self._held = self._held, None
        if held_files is None or held_files.folder != found:
            random_states = None
            run_on_all(lambda: load_into(self.engine, found, saved))
        else:
            random_states = held_files.find_bytes(random_name(dist.get_rank()))
            load_shared(self.engine, held_files, saved)
        self.engine.refresh_weights()
        run_on_all(lambda: store.restore_rng(found, random_states))
        if saved.layout != layout:
            self.log.emit_event(
                Reshaped(old=vars(saved.layout), new=vars(layout)),
                say=f"{found.name} was written by another layout ({saved.layout}): reshaped",
            )
        if saved.updates and not saved.adam_step:
            self.log.emit_event(
                MomentsReset(step=saved.step),
                say=f"{found.name} holds no optimizer state: the optimizer begins again",
            )
        if saved.updates and (kind := self.engine.clipping_reset):
            self.log.emit_event(
                ClippingReset(step=saved.step, kind=kind),
                say=f"{found.name} holds no averages of optimizer.clipping={kind}: they begin again",
            )
        self.last = saved.step

    def prove_loaded_state(self, found: Path, saved: RunState) -> bool:
        """Whether the state that the engine holds is the one that `found` was saved from.

        If so, those passed over are put aside. Otherwise it is quarantined, and `find_newest_good` finds another one.
        Raises CheckpointError if an earlier one has other losses here, and it cannot be told whether that checkpoint or
        this machine is to blame.
        """
        current_vitals = self.vitals(saved.step)
        bf16_moments = self.engine.flat_state().moments is torch.bfloat16
        saved_vitals = saved.vitals
        optimizer_config = self.engine.config.optimizer
        all_betas = optimizer_config.betas, *run_on_first(lambda: self._betas(found))
        moment_ratio = bound_moment_ratio(*all_betas) if optimizer_config.name in AVERAGES else math.inf
        vitals_verdict = judge_loaded_state(
            saved_vitals, current_vitals, bf16_moments, self.config.vitals, moment_ratio
        )
        self.changes = {}
        if saved_vitals is not None:
            self.changes["sizes"] = size_change(saved_vitals.sizes, current_vitals.sizes)
            self.changes["losses"] = loss_change(saved_vitals, current_vitals)
        asks_person = bool(vitals_verdict.problem or self._moved)
        acceptance_ruling = run_on_first(lambda: markers.read_acceptance(found)) if asks_person else None
        if vitals_verdict.problem and acceptance_ruling is not None:
            accept_reason = acceptance_ruling.reason or "no reason given"
            self.log.emit_event(
                Warned(step=saved.step, text=f"{found.name}: {vitals_verdict.problem}; accepted by a person"),
                say=f"WARNING: {found}: {vitals_verdict.problem}; a person accepts it: {accept_reason}",
            )
        elif vitals_verdict.content:
            problem = f"{found}: its checksums are right, its content is not: {vitals_verdict.problem}"
            run_on_first(lambda: markers.mark_bad(found, problem))
            return False
        elif vitals_verdict.problem:  # of the checkpoint or of this machine: the previous one decides
            kind = "its content is as large as it was, what it computes is not as it was"
            self._moved[found.name] = f"{found}: {kind}: {vitals_verdict.problem}"
            return False
        doubtful = ""
        if self._moved:
            doubtful = explain_unclear_proof(saved_vitals, current_vitals, self.config.vitals)
        if doubtful and acceptance_ruling is None:
            names = ", ".join(self._moved)
            raise mark_collective(
                CheckpointError(
                    f"{self.folder}: {names}: weights and moments are as large as when they were saved, but compute "
                    f"other losses here, and {found.name} does not prove that this is right: {doubtful}. So nothing is "
                    f"quarantined: {self._look()}"
                )
            )
        # One that a person accepted may be wrong itself, and quarantines no other by being loaded.
        for name, problem in self._moved.items() if not doubtful else ():
            checkpoint_path = self.folder / name
            run_on_first(lambda path=checkpoint_path, problem=problem: markers.mark_bad(path, problem))  # type: ignore[misc]
        for name in self.rejected if dist.get_rank() == 0 else ():
            store.set_aside(self.folder / name)
        if self.passed:
            passed_reason = f"it has read samples that {self.run.blends.name} puts off since then"
            for name in run_on_first(lambda: store.set_aside_newer(self.folder, saved.step, forget=False)):
                suspect_event = CheckpointSuspect(name=name, reason=passed_reason)
                self.log.emit_event(suspect_event, say=f"passed over {name}: {passed_reason}")
        return True

    def _betas(self, found: Path) -> list[tuple[float, float]]:
        """Adam's betas when `found` was saved, and all that people have set live, which moments forget slowly; none of
        what cannot be read, which nothing else here needs."""
        all_betas = list[tuple[float, float]]()
        with suppress(MegastableError):
            all_betas.append(run_of(found).optimizer.betas)
        with suppress(MegastableError, TypeError, ValueError):
            for live_change in changes_of(self.run.journal):
                for change_values in (live_change.old, live_change.new):
                    if "optimizer.betas" in change_values:
                        beta1, beta2 = map(float, change_values["optimizer.betas"])
                        all_betas.append((beta1, beta2))
        return all_betas

    def begin_training(self, state: RunState, saved: bool = True) -> None:
        """Training continues from `state`; saved: of which there is a checkpoint, or nothing to save."""
        step = state.step
        self.last = max(self.last, step) if saved else run_on_first(lambda: max(self._steps(), default=-1))
        # Without this, a run that is often resumed from memory would never be due by time.
        unsaved_seconds = 0.0 if saved else run_on_first(lambda: self._count_unsaved(state))
        self._last_begun = time.monotonic() - unsaved_seconds
        self.trend.resume_at(step, run_on_first(self._unproven))
        self._offer_view(step)

    def _count_unsaved(self, state: RunState) -> float:
        """Seconds of training up to `state` since the newest checkpoint that can be read; all without one."""
        for checkpoint_path in store.newest_first(self.folder):
            with suppress(CheckpointError):
                return max(0.0, state.seconds - store.read_state(checkpoint_path).seconds)
        return state.seconds

    def prepare_saves(self) -> None:
        """To be called once the snapshots have their share of the memory."""
        if self.config.interval:
            self.saver.prepare_memory()
            self._say_note()

    def _say_note(self) -> None:
        if saver_note := self.saver.take_note():
            self.log.say_line(saver_note)

    def _clean(self) -> None:
        try:
            self.saver.remove_leftovers()
        except OSError as error:
            raise SpaceError(f"{self.folder} cannot be written to: {error}") from None

    def _recover(self, staging: PartFolder) -> None:
        recovered_save = recover_staged(staging, self.folder, self._model, run_on_first(self._lineages))
        if recovered_save is None:
            return
        step, problem = recovered_save
        recovery_text = problem or f"brought over from the local disks to {self.folder}"
        self.log.emit_event(
            CheckpointRecovered(step=step, problem=problem),
            say=f"the checkpoint of step {step}, which was not uploaded yet: {recovery_text}",
        )

    def _lineages(self) -> list[str]:
        """Of the processes whose checkpoints count: those of this run that a person has not rolled back."""
        found = list[str]()
        for event in self.run.iterate_events(Training, RolledBack):
            found = [*found, event.lineage or ""] if isinstance(event, Training) else []
        return found

    def _only_before(self, before: int) -> None:
        """Keep only those before a step, if there are any; of them only up to the newest healthy one."""
        steps = self._steps()
        if steps and min(steps) >= before:
            raise CheckpointError(
                f"{self.folder}: the last process asked for a checkpoint from before step {before}, and all "
                f"are later (from step {min(steps)} on): restore one, or accept the oldest by removing the line with "
                f'"event": "handover" at the end of {self.run.journal}'
            )
        healthy_steps = [step for step in steps if step < before and self._is_healthy(step)]
        if steps and not healthy_steps:
            self.log.say_line(
                "none of the checkpoints from before it has proved healthy yet: the newest of them is taken"
            )
        store.set_aside_newer(self.folder, max(healthy_steps, default=before - 1))

    def _go_behind(self, number: int, step: int, moment: float) -> None:
        """Put aside what a rollback that was killed had not put aside yet, but nothing that a person has accepted
        since, which undoes it."""
        rulings = {path.name: markers.read_acceptance(path) for path in store.newest_first(self.folder)}
        back = [
            ruling_name
            for ruling_name, ruling in rulings.items()
            if ruling is not None and ruling.time > moment
        ]
        for name in store.set_aside_newer(self.folder, step, back, forget=False, why=f"rollback{number}"):
            reason = f"a person rolled the run back to step {step}"
            self.log.emit_event(
                CheckpointSuspect(name=name, reason=reason), say=f"passed over {name}: {reason}"
            )

    def _leave_behind(self, undone: int, since: set[str]) -> None:
        """Put aside checkpoints that a rewind had undone when the process died, if others remain."""
        if any(step < undone or store.name_of(step) in since for step in self._steps()):
            for name in store.set_aside_newer(self.folder, undone - 1, since):
                undo_reason = f"an incident undid step {undone} and what came after"
                self.log.emit_event(CheckpointSuspect(name=name, reason=undo_reason))

    def _steps(self) -> list[int]:
        return [store.step_of(checkpoint_path) for checkpoint_path in store.newest_first(self.folder)]

    def _is_healthy(self, step: int) -> bool:
        return markers.read_health(self.folder / store.name_of(step)) is not None

    def _unproven(self) -> list[int]:
        """Steps of those that may still prove healthy."""
        return [step for step in self._steps() if not self._is_healthy(step) and not self._is_doubted(step)]

    def _is_doubted(self, step: int) -> bool:
        try:
            saved_vitals = store.read_state(self.folder / store.name_of(step)).vitals
        except CheckpointError:
            return False  # damaged: passed over anyway
        return saved_vitals is not None and bool(saved_vitals.doubt)

    # During training

    def collect_ballot(self) -> tuple[float]:
        """For the step's sum over the ranks: whether it is time for a checkpoint, by the clock of rank 0."""
        seconds = self.config.seconds_between
        waited = time.monotonic() - self._last_begun
        return (float(seconds is not None and waited >= seconds and dist.get_rank() == 0),)

    def is_due(self, step: int, sums: Sequence[float]) -> bool:
        """Whether a checkpoint of `step` follows, on all ranks alike. sums: of `collect_ballot`."""
        step_interval = self.config.steps_between
        return bool(sums[0]) or (step_interval > 0 and step % step_interval == 0)

    def save_state(self, state: RunState, wait: bool = False) -> bool:
        """Begin to save; wait: until it is committed. False if there will be no checkpoint of this state. Leaving a
        state that is not finite is up to the caller (`nonfinite_step`); with `wait`, UnstableError is raised."""
        self.settle_save()
        self._last_begun = time.monotonic()
        if self.nonfinite_step is None:
            self._examine(state)
            self.saver.begin_save(state)
            self._say_note()
            if wait or not self.saver.asynchronous:
                self.settle_save()
        if wait and self.nonfinite_step is not None:
            raise self.make_unstable_error()
        return self.saver.pending == state.step or self.last == state.step

    def _examine(self, state: RunState) -> None:
        """Measure the vitals that the checkpoint of `state` remembers. The steps wait for this: taken before the copy,
        they reveal a bad copy."""
        vitals_before, current_vitals = state.vitals, self.vitals(state.step)
        if vitals_before is not None and vitals_before.doubt:
            vitals_before = None  # no baseline
        doubt_reason = explain_doubt(current_vitals, vitals_before, state.recent_losses, self.config.vitals)
        self._doubted.discard(state.step)
        if doubt_reason:
            self._doubted.add(state.step)
            warning_text = f"the checkpoint of step {state.step} will not count as healthy: {doubt_reason}"
            self.log.emit_event(Warned(step=state.step, text=warning_text), say=True)
        state.vitals = current_vitals.model_copy(update={"doubt": doubt_reason})

    def finish_save(self) -> None:
        """Wait for a save in progress. Raises SpaceError, UnstableError."""
        self.settle_save()
        if self.nonfinite_step is not None:
            raise self.make_unstable_error()

    def settle_save(self) -> None:
        """As `finish_save`, but a state that is not finite is handled elsewhere. Raises SpaceError."""
        self.phase("checkpoint")
        self._stands(self.saver.finish_save())

    def note_step(self, step: int, on_trend: bool, sums: Sequence[float]) -> None:
        """After every step: has a save been committed, has one proved healthy? on_trend: the step was on trend;
        sums: of `saver.collect_ballot`. Afterwards `nonfinite_step` says whether a state was not finite."""
        self.hear_ballot(sums)
        self._mark(self.trend.add_step(step, on_trend), step)
        if self.uploader is not None:
            for note in self.uploader.take_notes():
                self.log.emit_event(Warned(step=step, text=note), say=f"WARNING: {note}")
            if self.uploader.outdated:
                self._offer_view(step)

    def _offer_view(self, step: int) -> None:
        """Have uploaded what the run directory holds now."""
        if self.uploader is None:
            return
        try:
            self.uploader.offer_view(look_at_run(self.run))
        except (OSError, CheckpointError) as error:  # the next checkpoint brings another one
            self.log.emit_event(
                Warned(step=step, text=f"not uploaded: {error}"), say=f"WARNING: not uploaded: {error}"
            )

    def finish_uploads(self) -> None:
        """At the end of the run: wait until the store has all of it, if it comes to that."""
        if self.config.upload is None:
            return
        # The supervisor waits with it. That ends by itself.
        self.phase("upload" if self.uploader is None else activity.STORE)
        self._offer_view(self.last)
        finished = self.uploader is None or self.uploader.finish(self._last_seconds)
        for note in self.uploader.take_notes() if self.uploader is not None else ():
            self.log.say_line(f"WARNING: {note}")
        if not all(gather_objects(finished)):
            self.log.say_line(
                f"WARNING: {self.config.upload} does not have the end of this run, which waits at most "
                f"{self._last_seconds:.0f} s for it; {self.run.resuming} uploads it"
            )

    def hear_ballot(self, sums: Sequence[float]) -> None:
        """After a step that is repeated: the sums of `saver.collect_ballot`."""
        self._stands(self.saver.hear_ballot(sums))

    def rewind_to(self, state: RunState) -> None:
        """The run was rewound: later ones no longer count; if there are no others, the current state is saved first."""
        self.phase("checkpoint")
        step, save_outcome = state.step, self.saver.finish_save()
        self.trend.rewind_to(step)
        if save_outcome is not None and save_outcome.step <= step:
            # One of a later step is put aside below, not counted.
            self._stands(save_outcome)
        self.nonfinite_step = None
        saved_steps = run_on_first(self._steps)
        kept_step = max((saved_step for saved_step in saved_steps if saved_step <= step), default=None)
        if kept_step is None and saved_steps:
            if not self.save_state(state, wait=True):
                self.last = -1
                return  # a suspect one is better than none
            kept_step = step
        for name in run_on_first(lambda: store.set_aside_newer(self.folder, step)):
            suspect_reason = f"written after step {step}, which was returned to"
            self.log.emit_event(CheckpointSuspect(name=name, reason=suspect_reason))
        self.last = -1 if kept_step is None else kept_step
        self._offer_view(step)  # so that the store no longer offers those either

    def make_unstable_error(self) -> MegastableError:
        """The error to raise if a non-finite state cannot be left. A checkpoint of it would push out a good one, and
        every later update is refused anyway."""
        self.log.emit_event(Unstable(step=self.nonfinite_step))
        return mark_collective(
            UnstableError(
                f"step {self.nonfinite_step}: weights or moments are not finite, so there is no checkpoint of it. "
                f"Those in {self.folder} are from before: start again to go on from the newest; if it recurs, lower "
                "optimizer.lr or skip the data"
            )
        )

    def make_unsaved_error(self, step: int) -> MegastableError:
        """The error to raise if the run is over after `step` and that step's checkpoint could not be written."""
        return mark_collective(
            SpaceError(
                f"step {step} is done, but its checkpoint could not be written (see above): make room and start again; "
                f"the run goes on from the newest one in {self.folder}"
            )
        )

    def _stands(self, outcome: SaveOutcome | None) -> None:
        """Journal the outcome of a save. A full disk ends the run, if the recipe says so."""
        if outcome is None:
            return
        step = outcome.step
        if outcome.path is not None:
            self.last = max(self.last, step)
            self.log.emit_event(CheckpointSaved(
                step=step, name=outcome.path.name, bytes=outcome.size, seconds=round(outcome.seconds, 3),
                blocked=round(outcome.blocked, 3),
            ))  # fmt: skip
            if step not in self._doubted:
                self._mark(self.trend.add_checkpoint(step), step)
            self._offer_view(step)
            return
        message = (
            f"the checkpoint of step {step} could not be written: {outcome.problem}. Earlier ones are intact"
        )
        goes_on = outcome.finite and self.config.on_failure != "stop"
        self.log.emit_event(
            CheckpointFailed(step=step, problem=outcome.problem),
            say=goes_on and f"WARNING: {message}; training goes on (checkpoint.on_failure=continue)",
        )
        if not outcome.finite:
            self.nonfinite_step = step
        elif not goes_on:
            raise mark_collective(
                SpaceError(f"{message}. Make room and start again, or set checkpoint.on_failure=continue")
            )

    def _mark(self, steps: list[int], now: int) -> None:
        """Mark those of `steps` as healthy."""
        for step in steps if dist.get_rank() == 0 else ():
            checkpoint_path = self.folder / store.name_of(step)
            if not checkpoint_path.exists():
                continue  # it made room for newer ones before
            try:
                markers.mark_healthy(checkpoint_path, now, self.trend.after)
            except CheckpointError as error:
                self.log.say_line(f"WARNING: {error}")
            else:
                self.log.emit_event(CheckpointHealthy(step=now, name=checkpoint_path.name))
                self._offer_view(now)
