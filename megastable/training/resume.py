"""Resumes a rank, or starts it: engine, data order, newest good checkpoint. Collective."""

from __future__ import annotations

import platform
import random
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import megastable
from megastable.base.collectives import combine_answers, mark_collective, run_on_first
from megastable.base.errors import CheckpointError, ConfigError, MegastableError
from megastable.checkpoint import store
from megastable.checkpoint.held_points import RECORDS, PointKey
from megastable.checkpoint.memory_hosts import open_memory
from megastable.checkpoint.whole import policy_of, run_of
from megastable.config import deepspeed_json
from megastable.config.lint import lint_recipe
from megastable.config.tree import RunConfig
from megastable.config.warmups import Stages
from megastable.data.corpora import Corpora
from megastable.data.loader import Loader, RankPart
from megastable.data.samples import Source
from megastable.data.skips import Selection, Skips
from megastable.engine.engine import Engine
from megastable.model.kernels import Timing
from megastable.optim.next_update import RunPosition, compare_next_update, describe_next_update
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology
from megastable.recovery.recovery import TELLING, recall_state
from megastable.run import directory
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.training_events import (
    NEXT_UPDATE,
    ConfigChanged,
    Finished,
    MemoryOff,
    Resumed,
    Training,
    Warned,
)
from megastable.run.log import RunLog
from megastable.training.checkpoints import Checkpoints
from megastable.training.data_order import DataOrder
from megastable.training.evaluation import ProbeSamples
from megastable.training.heartbeat import Heartbeat
from megastable.training.live_changes import LiveChanges
from megastable.training.memory_copies import Restoring
from megastable.training.startup import verify_held_out

# A folder, its state, what it is ("checkpoint", or a point in "memory"), and how far its state was rounded.
ResumedFrom = tuple[Path, store.RunState, str, dict[str, float]]


def list_timings(run: RunDirectory) -> list[Timing]:
    """What the starts of the run have measured of own kernels, the newest last."""
    return [Timing(*fields) for event in run.iterate_events(Training) for fields in event.elementwise]


class Start:
    """The start of a rank's training, complete when built.

    state: of the newest good checkpoint, which the engine holds, or of a new run. changed: differences of the recipe
    from the run's last start, or from when its checkpoint was written. restored: the point in the hosts' memories that
    it resumed from; unwritten: the file in it with step records that no disk has.
    """

    def __init__(self, config: RunConfig, run: RunDirectory, corpora: Corpora, heart: Heartbeat) -> None:
        world, rank, p = dist.get_world_size(), dist.get_rank(), config.parallel
        self.config, self.run, self.heart = config, run, heart
        self.log = RunLog(run, partial(print, flush=True), active=rank == 0)
        with combine_answers():
            self.order = DataOrder(config, run, corpora, self.log, heart.strict)
            verify_held_out(run, corpora.held_out)
            changed = run_on_first(lambda: run.compare_recipe(config))
            self.lineage = run_on_first(lambda: secrets.token_hex(8))
            timings = run_on_first(lambda: list_timings(run))
        data = deepspeed_json.size_of_data_parallel(config, world)
        self.layout = Layout(p.tensor, p.pipeline, data, p.context, p.replicas, p.expert)
        self.topology = Topology(self.layout, rank, config.run.timeout)
        self.ds_config = deepspeed_json.build_deepspeed_json(config, world)
        random.seed(config.run.seed + rank)
        np.random.seed((config.run.seed + rank) % 2**32)
        torch.manual_seed(config.run.seed + rank)
        self.engine = Engine(config, self.ds_config, self.topology, timings)
        if set(timings) & set(self.engine.kernels.measured):
            self.log.say_line("kernels.elementwise=auto: as an earlier start of this run has measured")
        batch = config.train.micro_batch * self.layout.samples
        self.probes = ProbeSamples(
            self.engine, lambda corpora: self.make_whole_loader(corpora.train, batch), config.checkpoint.vitals.probes,
            self.log,
        )  # fmt: skip
        self.checkpoints = Checkpoints(
            config, self.engine, run, self.log, heart.enter_phase, self.freeze_recipe,
            lambda step: self.probes.measure_vitals(self.order.corpora, step), self.lineage,
        )  # fmt: skip
        self.memory, problem = open_memory(
            config.stability.snapshots.copies, run.root, supervised=heart.attempt is not None
        )
        if problem:
            text = f"no copies in the hosts' memory: {problem}"
            self.log.emit_event(MemoryOff(step=0, reason=problem), say=f"WARNING: {text}")
        self.restored: PointKey | None = None
        self.unwritten: Path | None = None
        self.changed: list[str] = changed
        self.state = store.RunState(
            order_fingerprint=corpora.order_fingerprint,
            layout=store.LayoutState(**vars(self.layout), zero=p.zero, precision=config.precision.kind),
            versions={
                "megastable": megastable.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        )
        resumed_from = self._resume()
        with combine_answers():
            if resumed_from is not None:
                self._resumed(*resumed_from)
            self.changes = LiveChanges(config, run, self.engine, self.log, heart.changes)
            self.changes.follow_recipe(changed, self.state.step)
            self.order.follow_blend(self.state)
            self.skips = self.order.select_samples()
            run_on_first(lambda: run.freeze_recipe(config, self.order.corpora.fingerprints, self.ds_config))
            self._say(changed)

    def _resume(self) -> ResumedFrom | None:
        """Resume from the newest point in the hosts' memories, or from the newest good checkpoint of the run directory,
        if there is one."""
        data_order, run_checkpoints = self.order, self.checkpoints
        memory_restore = None
        if self.memory is not None:
            parts = (self.memory, self.engine, self.run, self.log, run_checkpoints, data_order)
            memory_restore = Restoring(*parts)
            run_checkpoints.settle_leftovers()
            newest_step, bad_steps = run_checkpoints.list_standing()
            if (restored_point := self._from_memory(memory_restore, newest_step, bad_steps)) is not None:
                return restored_point
        while True:
            newest_good = run_checkpoints.find_newest_good(
                lambda saved: bool(data_order.exchanged_since(saved))
            )
            if memory_restore is not None and newest_good is not None and run_checkpoints.rejected:
                # A point may be newer than the checkpoint before one that is no good.
                older_step, (_, bad_steps) = store.step_of(newest_good), run_checkpoints.list_standing()
                if (restored_point := self._from_memory(memory_restore, older_step, bad_steps)) is not None:
                    return restored_point
            if newest_good is None and memory_restore is not None and memory_restore.spoilt:
                raise mark_collective(
                    CheckpointError(
                        "the copy in the hosts' memory could not be loaded, and there is no checkpoint: start again"
                    )
                )
            if newest_good is None:
                stability = self.config.stability
                for text in lint_recipe(self.config) if stability.enabled and stability.signs.enabled else ():
                    self.log.emit_event(Warned(step=0, text=text, sign="recipe"), say=f"WARNING: {text}")
                return None
            with combine_answers():
                saved_state = run_on_first(lambda found=newest_good: store.read_state(found))  # type: ignore[misc]
                if (later_exchanges := data_order.exchanged_since(saved_state)) is None:
                    data_order.accept_another(saved_state, newest_good)
                self._compute_as_saved(saved_state)
            run_checkpoints.load_into_engine(newest_good, saved_state, self.state.layout)
            if run_checkpoints.prove_loaded_state(newest_good, saved_state):
                break
        if later_exchanges:
            data_order.undo_exchanges(later_exchanges, saved_state, newest_good)
        return newest_good, saved_state, "checkpoint", run_checkpoints.changes

    def _compute_as_saved(self, saved: store.RunState) -> None:
        """Compute without the kernels that the run has left, and with the changes that the checkpoint was trained with:
        otherwise a good one would look bad. The changes hold for the rest of the run, also without stability: exports
        have them."""
        stability_config, engine_numerics = self.config.stability, self.engine.numerics
        policy_adjustments, possible_adjustments = policy_of(saved).adjusted, self.engine.adjustments.possible
        self.engine.adjustments.switch_to(policy_adjustments)
        if lost := [
            adjustment_name
            for adjustment_name in policy_adjustments
            if adjustment_name not in possible_adjustments
        ]:
            warning_text = (
                f"the run goes on without {', '.join(lost)}, with which a remedy has trained it until here: this "
                "recipe cannot have it"
            )
            self.log.emit_event(Warned(step=saved.step, text=warning_text), say=f"WARNING: {warning_text}")
        if not stability_config.enabled or stability_config.dry_run:
            return
        guard_memory = run_on_first(lambda: recall_state(saved.stability, self.run.iterate_events(*TELLING)))
        left_kinds = engine_numerics.kinds_of(guard_memory.guard.policy.kernels)
        engine_numerics.switch_to(replace(engine_numerics.now, plain=left_kinds))

    def _from_memory(self, memory: Restoring, newer_than: int, quarantined: list[int]) -> ResumedFrom | None:
        """Resume from a point in the hosts' memories, newer than all checkpoints, if there is one."""
        restored_point = memory.restore_newest(newer_than, quarantined, self.state.layout)
        if restored_point is None:
            return None
        self.restored, self.unwritten = memory.restored, restored_point[0] / RECORDS
        for rejected_name in self.checkpoints.rejected if dist.get_rank() == 0 else ():
            store.set_aside(self.run.checkpoints / rejected_name)
        self._compute_as_saved(restored_point[1])
        return *restored_point, "memory", {}

    def _resumed(self, found: Path, saved: store.RunState, origin: str, changes: dict[str, float]) -> None:
        # A start with another recipe freezes it, even if it died before its first checkpoint.
        changed = run_on_first(lambda: self._list_changed(found))
        self.changed = sorted({*self.changed, *changed})
        # Every snapshot copies the state, and the engine holds FP8's history from here on.
        known_here = {"layout": self.state.layout, "versions": self.state.versions, "fp8": {}}
        self.state = saved.model_copy(update=known_here)
        self.log.emit_event(
            Resumed(
                step=saved.step, checkpoint=found.name, cursor=saved.cursor, changes=changes, origin=origin
            ),
            say=f"resumed from {'the memory of the hosts' if origin == 'memory' else found} at step {saved.step}",
        )
        if update_warning := run_on_first(lambda: self._compare_next_update(found, saved)):
            self.log.emit_event(update_warning, say=f"WARNING: {update_warning.text}")

    def _compare_next_update(self, found: Path, saved: store.RunState) -> Warned | None:
        """A warning if the recipe of `found` would make another next update."""
        try:
            old = run_of(found)
        except MegastableError as error:
            text = f"whether the recipe makes another update than the checkpoint's cannot be said: {error}"
            return Warned(step=saved.step, text=text)
        at = RunPosition(saved.updates, saved.trained_tokens, saved.cursor)
        changes = compare_next_update(old, self.config, at)
        if not changes:
            return None
        return Warned(
            step=saved.step, text=describe_next_update(old, self.config, at, changes), sign=NEXT_UPDATE,
            numbers={update_change.name: [update_change.old, update_change.new] for update_change in changes},
        )  # fmt: skip

    def _list_changed(self, found: Path) -> list[str]:
        """Differences of the recipe from when `found` was written, if that can be read."""
        try:
            return self.run.compare_recipe(self.config, found / store.RECIPE)
        except ConfigError:
            return []

    def _say(self, changed: list[str]) -> None:
        if changed:
            told = f"changed since this run was started: {'; '.join(changed)}"
            self.log.emit_event(ConfigChanged(changes=changed), say=told)
        if self.skips.text:
            self.log.say_line(f"skipped: {self.skips.text} (data.skip, {self.run.skips.name})")
            ahead = int(self.skips.next_kept(self.state.cursor, 1)[0][0]) - self.state.cursor
            if ahead > sum(self.order.source.order.sequences):
                text = f"the next position is {ahead:,} further on: whole epochs are skipped"
                self.log.say_line(f"WARNING: {text}")
        self.order.warn_of_foreign(self.state.step)
        self.order.tell_of_coverage()
        if self.config.train.eval_samples:
            self.order.tell_of_validation(self.state.step)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to train. Collective."""
        return self.state.step >= self.config.train.steps and run_on_first(self.run.summary.exists)

    def end_complete(self) -> None:
        """Say that nothing is left to do, also to the journal, in which this process has resumed the run; then end what
        was begun."""
        done, wanted_steps = self.state.step, self.config.train.steps
        asked = f"; train.steps={wanted_steps} asks for fewer" if wanted_steps < done else ""
        val_loss = run_on_first(lambda: read_object(self.run.summary)).get("val_loss")
        self.log.emit_event(
            Finished(steps=done, val_loss=val_loss),
            say=f"nothing to do: all {done} steps are already done in {self.run.root}{asked} (to train on: a larger "
            "train.steps; from scratch: another run.dir)",
        )
        if self.memory is not None:
            self.memory.close(remove=True)
        self.checkpoints.finish_uploads()

    @property
    def suspects(self) -> list[str]:
        """Changes that may explain trouble right after the start."""
        return [*self.changed, *(["data"] if self.order.changed else [])]

    def make_loader(self, source: Source, skips: Skips | Selection, cursor: int) -> Loader:
        """A loader of this rank's part of the global batches to train on."""
        return self._loader(source, skips, cursor, self.config.batches, self.config.pieces)

    def make_whole_loader(self, source: Source, batch: int) -> Loader:
        """A loader from the first sample of `source` on, all of them whole, in global batches of size `batch`."""
        return self._loader(source, Skips.from_ranges([]), 0, batch, None)

    def _loader(
        self,
        source: Source,
        skips: Skips | Selection,
        cursor: int,
        batches: Stages | int,
        pieces: Stages | None,
    ) -> Loader:
        c, t, on_gpu = self.config, self.topology, self.engine.device.type == "cuda"
        own_tokens = self.engine.cp.find_own_tokens(c.model.sequence_length)
        part = RankPart(c.train.micro_batch, t.sample_rank, self.layout.samples, own_tokens)
        return Loader(source, skips, cursor, batches, part, c.data, pin_memory=on_gpu, pieces=pieces)

    def freeze_recipe(self) -> bytes:
        """The recipe as frozen in the run directory."""
        return directory.encode_recipe(self.config, self.order.corpora.fingerprints, self.ds_config)
