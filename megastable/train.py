"""Pretraining, from the first step to the last. Started by the deepspeed launcher on every rank:

    deepspeed --num_gpus 2 --module megastable.train launch/recipes/quickstart.yaml train.steps=100

Each step: the next global batch by absolute position, forward and backward, the gate, the update, the record.
Once in a while: norms, evaluation, a checkpoint. Everything needed to go on is in the run directory.
Exit codes are those of errors.py: 0 done, 2 bad input, 75 stopped by a signal with a checkpoint, 76 unstable, 77 no
space for checkpoints, 78 to be started again from an older checkpoint.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megastable
from megastable.base import durable, errors
from megastable.base.collectives import agree, first, shared
from megastable.base.deterministic import exact
from megastable.base.errors import CheckpointError, DataError, SpaceError, UnstableError
from megastable.base.hardware import peak_tflops
from megastable.base.text import plural
from megastable.checkpoint import store
from megastable.checkpoint.measuring import NONE, Probes, measure, read_probes
from megastable.checkpoint.vitals import Vitals
from megastable.config import deepspeed_json, recipe
from megastable.config.rules import LINEARS
from megastable.config.tree import RunConfig
from megastable.data.blends import BlendEntry, ExchangeEntry, Line, moved_skips, named_skips
from megastable.data.corpora import Corpora, open_corpora
from megastable.data.loader import Loader, Step
from megastable.data.order import BLOCK
from megastable.data.skip_ledger import Ledger, append, append_all
from megastable.data.skips import Selection, Skips
from megastable.data.source import Source
from megastable.data.statistics import token_counts, unigram_entropy
from megastable.engine.distributed import start_distributed, stop_distributed
from megastable.engine.engine import Engine, Judge, Measured
from megastable.model.flops import parameters
from megastable.model.kernels import DTYPES
from megastable.model.sizes import in_fp8
from megastable.optim.schedule import rate
from megastable.parallel.layout import Layout
from megastable.parallel.topology import Topology
from megastable.recovery.recovery import Recovery
from megastable.recovery.skipping import Skipping
from megastable.run import directory
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import (
    BlendChanged,
    ExchangesUndone,
    OrderChanged,
    SkipsForeign,
    SkipsNamed,
    SkipsRead,
    SkipsRefused,
)
from megastable.run.events.stability_events import Discarded
from megastable.run.events.training_events import (
    ConfigChanged,
    Evaluated,
    Finished,
    RecordsLost,
    Resumed,
    Stopped,
    Training,
    Unstable,
    Warned,
)
from megastable.run.log import RunLog
from megastable.run.membership import membership, tasks
from megastable.run.rank_ipc import attempt_of
from megastable.training.checkpoints import Checkpoints
from megastable.training.heartbeat import Heartbeat, parting
from megastable.training.lint import lint
from megastable.training.observer import Observer
from megastable.training.startup import StopRequest, open_data, open_run
from megastable.training.summary import incidents, summarise

COLLECT = 100  # steps between two collections of garbage, by all ranks at once: one alone makes all wait
ENTROPY_TOKENS = 50_000_000  # of the validation text: more would not change its unigram entropy


class Trainer:
    """One run on this rank: what it is made of, and where it stands."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        skipping: Skipping,
        corpora: Corpora,
        stop: StopRequest,
        heart: Heartbeat,
    ) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.config, self.run, self.corpora, self.stop, self.heart = config, run, corpora, stop, heart
        self.skipping = skipping
        self._told_foreign: set[str] | None = None  # fingerprints, once the journal was read for them
        self.first = rank == 0
        self.log = RunLog(run, partial(print, flush=True), active=self.first)
        p = config.parallel
        data = deepspeed_json.data_parallel(config, world)
        self.layout = Layout(p.tensor, p.pipeline, data, p.context)
        self.topology = Topology(self.layout, rank, config.run.timeout)
        self.ds_config = deepspeed_json.build(config, world)
        random.seed(config.run.seed + rank)
        np.random.seed(config.run.seed + rank)
        torch.manual_seed(config.run.seed + rank)
        self.engine = Engine(config, self.ds_config, self.topology)
        self.state = store.RunState(
            order_fingerprint=corpora.order_fingerprint,
            layout=store.LayoutState(**vars(self.layout), zero=p.zero, precision=config.precision.kind),
            versions={
                "megastable": megastable.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        )
        self.checkpoints = Checkpoints(
            config, self.engine, run, self.log, heart.phase, self.frozen, self._vitals
        )
        self._probes: tuple[Corpora, Probes] | None = None
        self.validation: tuple[Any, int] | None = None
        self.changed: list[str] = []  # since the run was started before, or its checkpoint was written
        self._anew = False  # the corpora are others than those that the checkpoint knew

    # Starting

    def resume(self) -> None:
        """Continue from the newest good checkpoint of the run directory, if there is one."""
        while True:
            found = self.checkpoints.find(lambda saved: bool(self._later(saved)))
            if found is None:
                stability = self.config.stability
                for text in lint(self.config) if stability.enabled and stability.signs.enabled else ():
                    self.log.emit(Warned(step=0, text=text, sign="recipe"), say=f"WARNING: {text}")
                return
            saved = agree(lambda found=found: store.read_state(found))  # type: ignore[misc]
            if (later := self._later(saved)) is None:
                self._check_order(saved, found)
            self.checkpoints.load(found, saved, self.state.layout)
            if self.checkpoints.proved(found, saved):
                break
        if later:
            self._undo(later, saved, found)
        # Who was started with another recipe and died before a checkpoint of his has frozen it all the same.
        self.changed = sorted({*self.changed, *first(lambda: self._changed_since(found))})
        versions = self.state.versions
        # Every rewind point copies the state, and what FP8 remembers is the engine's from here on.
        known = {"layout": self.state.layout, "versions": versions, "fp8": {}}
        self.state = saved.model_copy(update=known)
        changes = self.checkpoints.changes
        self.log.emit(
            Resumed(step=saved.step, checkpoint=found.name, cursor=saved.cursor, changes=changes),
            say=f"resumed from {found} at step {saved.step}",
        )

    def follow_blend(self) -> None:
        """Write down how the corpora are blended, from the first block on that nothing was read of yet."""
        corpora, s, c = self.corpora, self.state, self.config
        begins = self._anew or not corpora.blends
        # Where nothing was done yet, the corpora may also have become others.
        others = not s.step and corpora.blends and corpora.blends[-1].corpora != corpora.shares
        if not begins and not others and not corpora.reblended:
            return
        position = 0 if begins else -(-s.cursor // BLOCK) * BLOCK
        entry = BlendEntry(position=position, corpora=corpora.shares, step=s.step)
        blends: list[Line] = [*corpora.blends, *corpora.exchanges, entry]
        self.corpora = agree(
            lambda: open_corpora(c.data.corpora, c.model.sequence_length, c.run.seed, blends)
        )
        # The blend last: a start that dies in between does both again.
        moved = 0 if begins else first(lambda: self._move_skips(corpora, position))
        first(lambda: append(self.run.blends, entry))
        if not begins and corpora.reblended:
            old, new = corpora.blends[-1].weights, entry.weights
            self.log.emit(
                BlendChanged(step=s.step, position=position, old=old, new=new, skips_moved=moved),
                say=f"the blend changes at position {position:,}, this is {s.cursor:,}: {old} -> {new}",
            )
            if moved:
                self.log.say(
                    f"{plural(moved, 'sample')} that the skip ledger names behind it: named where they are now"
                )

    def _move_skips(self, before: Corpora, position: int) -> int:
        """Skip the samples that the ledger names also where the new blend puts them; how many."""
        entries = Ledger.read(self.run.skips, None if self.heart.strict else []).by_position.entries
        new, since = self.corpora.train.order, before.blends[-1].time
        moved = moved_skips(entries, before.train.order, new, position, since)
        append_all(self.run.skips, moved)
        return sum(entry.end - entry.first for entry in moved)

    def name_convicted(self) -> None:
        """Skip in every epoch what an earlier version of this program convicted for one."""
        if not self.state.step or not self.skipping.by_position:
            return

        def write() -> int:
            ledger = Ledger.read(self.run.skips, None if self.heart.strict else [])
            entries = named_skips(ledger, self.corpora.blends, self.corpora.train.order)
            append_all(self.run.skips, entries)
            return len(entries)

        if lines := first(write):
            self.log.emit(
                SkipsNamed(step=self.state.step, lines=lines),
                say="samples that an earlier version convicted for one epoch are skipped in every epoch from now on: "
                f"{plural(lines, 'new line')} in {self.run.skips.name}",
            )

    def tell_foreign(self) -> None:
        """Say, once in the life of a run, which corpora the skip ledger names samples of that it does not have: their
        content was another one then, or the run was."""
        foreign, length = self.skipping.foreign(self.corpora.train.order), self.config.model.sequence_length
        if foreign and self._told_foreign is None:
            events = first(lambda: [e.get("fingerprint") for e in self.run.events(SkipsForeign)])
            self._told_foreign = set(map(str, events))
        for (corpus, fingerprint), tokens in foreign.items():
            if fingerprint in (told := self._told_foreign or set()):
                continue
            told.add(fingerprint)
            self.log.emit(
                SkipsForeign(step=self.state.step, corpus=corpus, fingerprint=fingerprint, tokens=tokens),
                say=f"WARNING: {self.run.skips.name} names {tokens:,} tokens "
                f"({plural(-(-tokens // length), 'sample')}) of corpus {corpus} with fingerprint "
                f"{fingerprint[:12]}..., which this run does not use: they are not skipped",
            )

    def _changed_since(self, found: Path) -> list[str]:
        """What the recipe says otherwise than when `found` was written, where that can be read."""
        try:
            return self.run.compare(self.config, found / store.RECIPE)
        except errors.ConfigError:
            return []

    def _later(self, saved: store.RunState) -> list[ExchangeEntry] | None:
        """The exchanges since a checkpoint that put off what it has read; None where it knew another order altogether.

        There are some where a process went back behind it, and died before it was put aside; or a person brought it
        back. Such a one is passed over for one that has none; where there is no such one, they are undone.
        """
        if not saved.cursor:
            return []
        known = self.corpora.known_by(saved.order_fingerprint, saved.cursor)
        return None if known is None else self.corpora.exchanges[known:]

    def _undo(self, later: list[ExchangeEntry], saved: store.RunState, found: Path) -> None:
        """Go on in the order that the checkpoint `found` knew. Collective."""
        c, corpora, name = self.config, self.corpora, self.run.blends.name
        reason = f"{found.name} has read these samples already, and no good checkpoint has not"
        undone = [entry.undone(reason, saved.step) for entry in reversed(later)]
        first(lambda: append_all(self.run.blends, undone))
        lines: list[Line] = [*corpora.blends, *corpora.exchanges, *undone]
        self.corpora = agree(lambda: open_corpora(c.data.corpora, c.model.sequence_length, c.run.seed, lines))
        self.log.emit(
            ExchangesUndone(step=saved.step, lines=len(undone), reason=reason),
            say=f"note: {reason}: {plural(len(undone), 'line')} of {name} that put them off are undone",
        )

    def _check_order(self, saved: store.RunState, found: Path) -> None:
        """The order is another one altogether: may it be?"""
        message = (
            f"{found}: the data is not what it was when this checkpoint was written: a manifest, seed or sequence "
            "length of data.corpora changed, so positions mean other samples now"
        )
        if not self.config.data.accept_changed_manifest:
            raise shared(
                CheckpointError(
                    f"{message}. Restore the old corpora, or say data.accept_changed_manifest=true to go on "
                    "with the new order"
                )
            )
        self._anew = True
        old, new = saved.order_fingerprint, self.corpora.order_fingerprint
        self.log.emit(OrderChanged(old=old, new=new), say=f"note: {message}")

    # The loop

    def train(self) -> int:
        """Run to the last step, or until asked to stop. The exit code."""
        c, s = self.config, self.state
        if s.step >= c.train.steps and first(self.run.summary.exists):
            self.log.say(
                f"nothing to do: step {s.step} of {c.train.steps} is already done in {self.run.root}"
            )
            return errors.OK
        first(lambda: self.run.summary.unlink(missing_ok=True))  # of a shorter run in this directory
        peak, peak_source = (c.logging.peak_tflops, "given") if c.logging.peak_tflops else self._peak()
        self.log.say(self._introduction(peak, peak_source))
        for text in self.engine.kernels.notes:
            self.log.emit(Warned(step=s.step, text=text), say=f"WARNING: {text}")
        observer = None
        if self.first:
            observer = Observer(c, self.run, self.layout, self.engine.device, peak, s.step)
        self.validation = agree(self._validation_batches)
        source = self.corpora.train
        self.recovery = Recovery(
            c, self.engine, source, self.run, self.skipping, self.log, self.heart.phase,
            self.checkpoints.settle, [*self.changed, *(["data"] if self._anew else [])],
        )  # fmt: skip
        first(self.heart.skips_read)
        loader = self._loader(source, self.skipping.selection(source.order, self.heart.strict), s.cursor)
        total = c.schedule.total_steps or c.train.steps
        tokens = c.train.global_batch * c.model.sequence_length
        stopping = False
        self.log.emit(Training(step=s.step, cursor=s.cursor, world=self.layout.world))
        self.checkpoints.begin(s.step)
        try:
            self.recovery.begin(s, loader)
            signs = self.recovery.signs
            self.checkpoints.prepare()
            if self.checkpoints.rejected:
                self.recovery.casebook.damaged(self.checkpoints.rejected, s.step)
            gc.disable()
            while s.step < c.train.steps and not stopping:
                self.heart.at(s)
                begin = time.perf_counter()
                batch = next(loader)
                waited = time.perf_counter() - begin
                self._mix(loader, batch)

                # Forward, backward, gate, update
                self.recovery.choose_precision(s)
                lr = self.recovery.rate(s.updates, rate(c.schedule, c.optimizer.lr, total, s.updates))
                # The second refused update, too: what the trouble looks like inside.
                look = due(c.logging.layers_interval, s.step + 1) or s.discards_in_a_row == 1
                if look or signs.looks(s.step + 1):
                    self.engine.probe.watch()
                measured, applied = self.engine.train_step(
                    batch.micro_batches, lr, self._gate(lr), self._votes
                )
                stop_votes, skip_votes, written, settled = measured.votes
                stopping, more_skips = stop_votes > 0, skip_votes > 0
                seconds = time.perf_counter() - begin
                self.heart.stepped(
                    loss=measured.loss, grad_norm=measured.grad_norm, lr=lr, applied=applied, seconds=seconds,
                    tokens_per_second=tokens / seconds,
                )  # fmt: skip

                # Where the run stands now
                before = s.model_copy()
                s.step += 1
                s.cursor = batch.next
                s.tokens += tokens
                s.seconds += seconds
                s.updates += applied
                s.discards_in_a_row = 0 if applied else s.discards_in_a_row + 1
                if s.first_loss is None:
                    s.first_loss = measured.loss
                s.recent_losses = [*s.recent_losses, measured.loss][-20:]

                # The record
                statistics = None
                regular = look or due(c.logging.norms_interval, s.step)
                if regular or signs.measures(s.step):
                    statistics = self.engine.statistics()
                    if regular and not s.discards_in_a_row:
                        self.recovery.indicators = statistics.indicators
                signs.after(s, statistics, self.recovery.casebook.incident is not None)
                if observer is not None:
                    observer.step(s, batch, measured, applied, lr, seconds, waited, statistics)
                if not applied:
                    self._discarded(measured, batch)

                # What the guard decided: mostly nothing, sometimes back to an earlier step
                incident = self.recovery.casebook.incident
                after = self.recovery.settle(batch, measured, applied, before, s, loader)
                if after is s:
                    self._patience(measured)
                    self.checkpoints.stepped(s.step, applied and self.recovery.calm, written, settled)
                    if self.checkpoints.ill is not None:
                        after = self._leave(batch, measured, loader)
                if observer is not None and self.recovery.casebook.incident is not incident:
                    observer.flush()  # one was opened or closed: its report is written now
                if more_skips:
                    self._skip_more(loader, after.cursor)
                if after is not s:
                    s = self.state = after
                    self._remember()
                    self.checkpoints.back_to(s)
                    continue

                # Once in a while
                if due(COLLECT, s.step):
                    gc.collect()  # of all generations: what lives through one of fewer would stay for good
                if due(c.train.eval_interval, s.step) and s.step < c.train.steps and not stopping:
                    self._evaluate(observer)
                if due(c.checkpoint.interval, s.step):
                    self._checkpoint(observer)

            self.heart.at(s)
            self.checkpoints.finish()
            wanted = s.step > self.checkpoints.last and (stopping or c.checkpoint.at_end)
            if wanted and not self._checkpoint(observer, wait=True):
                raise shared(
                    SpaceError(
                        f"step {s.step} is done, but its checkpoint could not be written (see above): make room and "
                        f"start again; the run goes on from the newest one in {self.run.checkpoints}"
                    )
                )
            self.checkpoints.saver.close()
            if stopping and s.step < c.train.steps:
                self.log.emit(
                    Stopped(step=s.step, cursor=s.cursor),
                    say=f"stopped at step {s.step} as asked; the same command goes on from {self.run.root}",
                )
                return errors.STOPPED
            self.recovery.finish(s)
            self._finish(self._evaluate(observer), observer)
            return errors.OK
        except errors.MegastableError as error:
            if error.collective:  # all ranks are here: what they have begun to write is good
                self.checkpoints.saver.finish()
            raise
        finally:
            gc.enable()
            loader.close()
            if observer is not None:
                observer.close()

    def _mix(self, loader: Loader, batch: Step) -> None:
        """Notice where a blend changes or a corpus goes."""
        s, skips = self.state, loader.skips
        mix = skips.mix(batch.next - 1) if isinstance(skips, Selection) else {}
        if s.mix and mix != s.mix:
            self.recovery.mix_changed(s.step + 1, s.mix, mix)
        s.mix = mix

    def _gate(self, lr: float) -> Judge:
        step = self.state.step + 1
        return lambda measured: self.recovery.judge(measured, step, lr)

    def _votes(self) -> tuple[float, ...]:
        """What this rank wants all of them to do after the step: stop, read the skip ledger again; and how far its part
        of a checkpoint is."""
        return (
            float(self.stop.signal is not None),
            float(self.heart.more_skips),
            *self.checkpoints.saver.votes(),
        )

    def _skip_more(self, loader: Loader, cursor: int) -> None:
        """Somebody added to the skip ledger: go on at `cursor` without what it names."""
        first(self.heart.skips_read)
        wanted, odd = self.skipping.usable(self.corpora.train.order)
        for problem in odd:
            self.log.emit(
                SkipsRefused(step=self.state.step, problem=problem),
                say=f"WARNING: {problem}. Training goes on without that line",
            )
        before = loader.skips.lines if isinstance(loader.skips, Selection) else 0
        loader.go_to(cursor, wanted)
        self.tell_foreign()
        if (more := wanted.lines - before) > 0:
            step, name = self.state.step, self.run.skips.name
            self.log.emit(
                SkipsRead(step=step, cursor=cursor, entries=more),
                say=f"step {step}: {plural(more, 'new line')} in {name}: skipped from now on",
            )

    def _discarded(self, measured: Measured, batch: Step) -> None:
        """Journal a refused update."""
        s = self.state
        verdict, reason = self.recovery.refusal(measured)
        self.log.emit(Discarded(
            step=s.step, verdict=verdict, reason=reason, first_position=batch.first,
            next_position=batch.next, loss=measured.loss, grad_norm=measured.grad_norm,
            loss_scale=measured.loss_scale,
        ))  # fmt: skip

    def _patience(self, measured: Measured) -> None:
        """Stop when updates are refused on and on and nothing else is done about it."""
        s = self.state
        if s.discards_in_a_row >= self.config.stability.max_discards:
            self.log.emit(Unstable(step=s.step, discards=s.discards_in_a_row))
            _, reason = self.recovery.refusal(measured)
            raise shared(
                UnstableError(
                    f"{s.discards_in_a_row} updates in a row were refused ({reason}), up to step {s.step}: the weights "
                    "or the optimizer's state are damaged, or the data is. Look at journal.jsonl; the checkpoints in "
                    f"{self.run.checkpoints} are finite: lower optimizer.lr, or skip the data (data.skip)"
                )
            )

    def _leave(self, batch: Step, measured: Measured, loader: Loader) -> store.RunState:
        """Go back from a state that was found not to be finite when it was to be saved."""
        if not self.recovery.acts:
            raise self.checkpoints.unstable()
        damage = f"weights or Adam's moments were not finite after step {self.checkpoints.ill}"
        return self.recovery.rescue(batch, measured, self.state, loader, damage)

    # Once in a while

    def _evaluate(self, observer: Observer | None) -> float | None:
        """Mean cross-entropy over the evaluation samples, nats per token; always the same samples."""
        if self.validation is None:
            return None
        micro_batches, samples = self.validation
        self.heart.phase("evaluate")
        losses = self.engine.evaluate(micro_batches)[:samples]
        loss = float(losses.mean())
        self.log.emit(Evaluated(step=self.state.step, loss=loss, samples=samples))
        if observer is not None:
            observer.live.validation(self.state.step, loss)
        return loss

    def _checkpoint(self, observer: Observer | None, wait: bool = False) -> bool:
        """Begin to save, and wait for it where that is said; False when there is no checkpoint then."""
        if observer is not None:
            observer.flush()
        self._remember()
        return self.checkpoints.save(self.state, wait)

    def _vitals(self) -> Vitals:
        """Of the state that the engine holds."""
        if self._probes is None or self._probes[0] is not self.corpora:
            source = self.corpora.train
            unit = self.config.train.micro_batch * self.layout.samples
            with self._loader(source, Skips.of([]), 0, unit) as loader:
                try:
                    probes = read_probes(loader, self.config.checkpoint.vitals.probes)
                except DataError as error:
                    self.log.emit(
                        Warned(step=self.state.step, text=f"there are no probe samples: {error}"),
                        say=f"WARNING: the probe samples of checkpoints cannot be read: {error}",
                    )
                    probes = NONE
            self._probes = self.corpora, probes
        return measure(self.engine, self._probes[1])

    def _remember(self) -> None:
        """Into the state what a checkpoint is to know."""
        self.state.stability = self.recovery.memory()
        self.state.order_fingerprint = self.corpora.fingerprint_until(self.state.cursor)

    def _finish(self, validation: float | None, observer: Observer | None) -> None:
        """The last records, summary.json and the last word."""
        first(lambda: self._write_summary(validation, observer))
        self.log.say(f"finished: {self.run.summary}")

    def _write_summary(self, validation: float | None, observer: Observer | None) -> None:
        c, s = self.config, self.state
        assert observer is not None
        observer.flush()
        if pending := observer.steps.pending:
            lost = len(pending)
            self.log.emit(RecordsLost(steps=lost, from_step=pending[0].step))
            raise SpaceError(
                f"{self.run.steps}: the last {lost} step records could not be written and are lost"
            )
        entropy = None
        if self.corpora.validation is not None:
            streams, size = self.corpora.validation.streams, self.corpora.vocab_size
            counts = sum(token_counts(stream, size, ENTROPY_TOKENS) for stream in streams)
            entropy = unigram_entropy(np.asarray(counts))
        summary = summarise(c, s, validation, entropy, incidents(self.run, c))
        try:
            durable.write_file(self.run.summary, (directory.as_json(summary, indent=1) + "\n").encode())
        except OSError as error:
            raise SpaceError(
                f"{self.run.summary} could not be written: {error}: make room, start again"
            ) from None
        self.log.emit(Finished(**summary))

    # Parts

    def _loader(
        self, source: Source, skips: Skips | Selection, cursor: int, batch: int | None = None
    ) -> Loader:
        c, t, on_gpu = self.config, self.topology, self.engine.device.type == "cuda"
        return Loader(
            source, skips, cursor, batch or c.train.global_batch, c.train.micro_batch, t.sample_rank,
            self.layout.samples, c.data.keep_documents_apart, c.data.prefetch, pin_memory=on_gpu,
            part=(t.context_rank, self.layout.context),
        )  # fmt: skip

    def _validation_batches(self) -> tuple[Any, int] | None:
        """This rank's part of the evaluation samples, and how many of the padded batch count."""
        samples, source = self.config.train.eval_samples, self.corpora.validation
        if not samples or source is None:
            return None
        # Rounded up to whole micro-batches on every rank; what is too much is cut off again.
        unit = self.config.train.micro_batch * self.layout.samples
        with self._loader(source, Skips.of([]), 0, -(-samples // unit) * unit) as loader:
            return next(loader).micro_batches, samples

    def _peak(self) -> tuple[float, str]:
        """The device's peak, as rank 0 sees it, so that all ranks report the same MFU."""
        return first(lambda: peak_tflops(self.engine.device, DTYPES[self.config.precision.kind]))

    def _introduction(self, peak: float, peak_source: str) -> str:
        c, layout = self.config, self.layout
        context = f" (context {layout.context})" if layout.context > 1 else ""
        fp8 = ""
        if c.precision.fp8 is not None:
            count, of = len(in_fp8(c)), c.model.layers * len(LINEARS)
            emulated = ", emulated: its rounding is real, its speed is not"
            fp8 = (
                f"\nFP8 with {c.precision.fp8.recipe} scales in {count} of {of} linear layers"
                f"{emulated if self.engine.kernels.fp8 == 'emulated' else ''}"
            )
        details = fp8 + self._repeatable()
        return (
            f"{parameters(c.model) / 1e6:,.1f}M parameters, {layout.world} ranks: tensor {layout.tensor} x pipeline "
            f"{layout.pipeline} x data {layout.data}{context}, ZeRO {c.parallel.zero}, {c.precision.kind} on "
            f"{self.engine.device.type}\n"
            f"optimizer wrapper {type(self.engine.optimizer).__name__}, kernels: {self.engine.kernels}\n"
            f"recomputation {c.parallel.recompute}, peak {peak:.3g} TFLOP/s a device ({peak_source}){details}\n"
            f"{c.train.global_batch} samples of {c.model.sequence_length} tokens a step, run directory {self.run.root}"
        )

    def _repeatable(self) -> str:
        """What the console says of a repeated step."""
        if exact(self.config.run.deterministic, self.engine.device):
            return "\na repeated step gives the same bits"
        return "\na repeated step may differ in the last bits (run.deterministic=true: the same bits)"

    def frozen(self) -> bytes:
        """The recipe as it is kept."""
        return directory.frozen(self.config, self.corpora.fingerprints, self.ds_config)


def due(interval: int, step: int) -> bool:
    """Whether something that happens every `interval` steps (0 = never) happens at this one."""
    return interval > 0 and step % interval == 0


def train(config: RunConfig, recipe_path: Path, attempt: int | None = None) -> int:
    """A whole run on this rank; the process group exists already. attempt: of the supervisor. The exit code."""
    stop = StopRequest()
    config, corpora = open_data(config)
    config, run = open_run(config, recipe_path)
    with Heartbeat(run, dist.get_rank(), dist.get_world_size(), config.train.steps, stop, attempt) as heart:
        return _train(config, corpora, run, stop, heart)


def _train(
    config: RunConfig, corpora: Corpora, run: RunDirectory, stop: StopRequest, heart: Heartbeat
) -> int:
    # Before anything long begins; another blend may be what leaves something to train on.
    skipping = Skipping(config, run)
    if corpora.reblended:
        skipping.check(heart.strict)
    else:
        skipping.selection(corpora.train.order, heart.strict)
    changed = first(lambda: run.compare(config))
    trainer = Trainer(config, run, skipping, corpora, stop, heart)
    trainer.changed = changed
    trainer.resume()
    trainer.follow_blend()
    trainer.name_convicted()
    source = trainer.corpora.train
    left_out = skipping.selection(source.order, heart.strict)
    first(lambda: run.freeze(config, corpora.fingerprints, trainer.ds_config))
    if changed:
        told = f"changed since this run was started: {'; '.join(changed)}"
        trainer.log.emit(ConfigChanged(changes=changed), say=told)
    if left_out.text:
        trainer.log.say(f"skipped: {left_out.text} (data.skip, {run.skips.name})")
        ahead = int(left_out.next_kept(trainer.state.cursor, 1)[0][0]) - trainer.state.cursor
        if ahead > sum(source.order.sequences):
            trainer.log.say(f"WARNING: the next position is {ahead:,} further on: whole epochs are skipped")
    trainer.tell_foreign()
    return trainer.train()


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of every rank."""
    parser = argparse.ArgumentParser(
        prog="deepspeed --module megastable.train",
        description="Train a GPT as a recipe says; resume when run.dir holds a run already.",
        epilog="example: deepspeed --num_gpus 4 --module megastable.train launch/recipes/quickstart.yaml "
        "parallel.tensor=2 parallel.pipeline=2 train.steps=20",
    )
    parser.add_argument("recipe", help="a YAML file, e.g. launch/recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", help="dotted overrides, e.g. train.steps=20 run.dir=runs/x")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher adds it
    parser.add_argument("--supervised", help=argparse.SUPPRESS)  # the supervisor's mark (rank_ipc.py)
    args = parser.parse_intermixed_args(arguments)
    try:
        os.environ.update(membership(os.environ))
    except errors.ConfigError as error:
        together = tasks(os.environ)
        if together is None or together.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.code) from None
    rank = int(os.environ["RANK"])
    try:
        config = recipe.load(args.recipe, args.overrides)
        deepspeed_json.build(config, int(os.environ.get("WORLD_SIZE", "1")))
    except errors.MegastableError as error:
        # The same on every rank: one message is enough. The launcher ends all when the first one ends: not before it.
        if rank:
            time.sleep(30)
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.code) from None
    try:
        start_distributed(config.run.timeout, config.run.deterministic)
        code = train(config, recipe.find(args.recipe), attempt_of(args.supervised))
    except errors.MegastableError as error:
        # The supervisor chose the port, and chooses another one for its next attempt.
        retried = isinstance(error, errors.RendezvousError) and args.supervised is not None
        code = errors.FAILED if retried else error.code
        if rank == 0 or not error.collective:
            print(f"error: {error}", file=sys.stderr, flush=True)
        if not error.collective:
            # The others wait in a collective that this rank will not reach: leave at once, the launcher ends them.
            sys.stdout.flush()
            os._exit(code)
    except (Exception, KeyboardInterrupt) as error:
        # The end of the interpreter would wait for the thread that writes this rank's part of a checkpoint, which
        # nobody will commit.
        sys.stdout.flush()
        print(
            parting(error, rank, int(os.environ.get("WORLD_SIZE", "1"))), end="", file=sys.stderr, flush=True
        )
        os._exit(130 if isinstance(error, KeyboardInterrupt) else errors.FAILED)
    stop_distributed()
    # Everything is on the disk. What C++ libraries destroy when a process ends sometimes aborts, once in hundreds of
    # runs ("terminate called without an active exception"): a run that is complete would end with -6.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
