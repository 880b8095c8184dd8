"""Settles the order of the training data at the start of a run (blends, exchanges, skips), and feeds the loop with its
global batches. Collective."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from megastable.base import activity
from megastable.base.collectives import mark_collective, run_on_all, run_on_first
from megastable.base.errors import CheckpointError
from megastable.base.object_store import describe_wait
from megastable.base.text import count_noun
from megastable.checkpoint.store import RunState
from megastable.config.tree import RunConfig
from megastable.data.blends import BlendEntry, ExchangeEntry, Line, moved_skips
from megastable.data.corpora import Corpora, describe_epochs, find_warnings, open_corpora
from megastable.data.loader import Loader, Step
from megastable.data.order import BLOCK
from megastable.data.run_ledgers import Skipping
from megastable.data.samples import Source
from megastable.data.skip_ledger import Ledger, append_entries, append_entry
from megastable.data.skips import Selection
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import (
    BatchChanged,
    BlendChanged,
    ExchangesUndone,
    LengthChanged,
    MixChanged,
    OrderChanged,
    SkipsForeign,
    SkipsRead,
    SkipsRefused,
)
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog
from megastable.training.heartbeat import Heartbeat


class DataOrder:
    """The data order of one run. strict: a malformed line of the skip ledger ends the start (`Skipping`).

    corpora: as read from now on. changed: whether they differ from those of the checkpoint.
    """

    def __init__(
        self, config: RunConfig, run: RunDirectory, corpora: Corpora, log: RunLog, strict: bool
    ) -> None:
        """Raises DataError if nothing is left to train on."""
        self.config, self.run, self.corpora, self.log, self.strict = config, run, corpora, log, strict
        self.changed = False
        self.skipping = Skipping(config, run)
        self._told_foreign: set[str] | None = None  # fingerprints, once read from the journal
        # Checked first, before anything slow; a new blend may be what leaves something to train on.
        if corpora.reblended:
            self.skipping.check_ledger(strict)
        else:
            self.select_samples()

    @property
    def source(self) -> Source:
        """The source of the training samples."""
        return self.corpora.train

    def select_samples(self) -> Selection:
        """The samples left in the order, by the current skip ledger."""
        return self.skipping.select_samples(self.source.order, self.strict)

    def _open(self, lines: list[Line]) -> Corpora:
        c, known_manifests = self.config, self.corpora.known
        return open_corpora(
            c.data.corpora, c.model.sequence_length, c.run.seed, lines, c.data.validation, known_manifests
        )

    # Against the checkpoint's order

    def exchanged_since(self, saved: RunState) -> list[ExchangeEntry] | None:
        """The exchanges since a checkpoint that deferred samples it has read; None if it knew a different order.

        There are some if a process rewound past it and died before it was put aside, or a person restored it. A
        checkpoint without any is preferred; if there is none, they are undone.
        """
        if not saved.cursor:
            return []
        known_lines = self.corpora.known_by(saved.order_fingerprint, saved.cursor)
        return None if known_lines is None else self.corpora.exchanges[known_lines:]

    def undo_exchanges(self, later: list[ExchangeEntry], saved: RunState, found: Path) -> None:
        """Continue in the order that the checkpoint `found` knew."""
        corpora, ledger_name = self.corpora, self.run.blends.name
        reason = f"{found.name} has read these samples already, and no good checkpoint has not"
        undone = [entry.make_undoing(reason, saved.step) for entry in reversed(later)]
        run_on_first(lambda: append_entries(self.run.blends, undone))
        lines: list[Line] = [*corpora.blends, *corpora.exchanges, *undone]
        self.corpora = run_on_all(lambda: self._open(lines))
        self.log.emit_event(
            ExchangesUndone(step=saved.step, lines=len(undone), reason=reason),
            say=f"note: {reason}: {count_noun(len(undone), 'line')} of {ledger_name} that put them off are undone",
        )

    def accept_another(self, saved: RunState, found: Path) -> None:
        """The checkpoint `found` knew a different order. Raises CheckpointError unless the recipe accepts that."""
        change_message = (
            f"{found}: the data is not what it was when this checkpoint was written: a manifest, seed or sequence "
            "length of data.corpora changed, so positions mean other samples now"
        )
        if not self.config.data.accept_changed_manifest:
            raise mark_collective(
                CheckpointError(
                    f"{change_message}. Restore the old corpora, or say data.accept_changed_manifest=true to go on "
                    "with the new order"
                )
            )
        self.changed = True
        old_order, new_order = saved.order_fingerprint, self.corpora.order_fingerprint
        self.log.emit_event(OrderChanged(old=old_order, new=new_order), say=f"note: {change_message}")

    # Ledgers and journal

    def follow_blend(self, state: RunState) -> None:
        """Write down the blend, from the first block that has not been read yet."""
        corpora = self.corpora
        is_first = self.changed or not corpora.blends
        # Before the first step, the corpora may have changed, too.
        has_changed = not state.step and corpora.blends and corpora.blends[-1].corpora != corpora.shares
        if not is_first and not has_changed and not corpora.reblended:
            return
        position = 0 if is_first else -(-state.cursor // BLOCK) * BLOCK
        entry = BlendEntry(position=position, corpora=corpora.shares, step=state.step)
        blends: list[Line] = [*corpora.blends, *corpora.exchanges, entry]
        self.corpora = run_on_all(lambda: self._open(blends))
        # The blend last: after a crash in between, a restart repeats both.
        moved_samples = 0 if is_first else run_on_first(lambda: self._move_skips(corpora, position))
        run_on_first(lambda: append_entry(self.run.blends, entry))
        if is_first or not corpora.reblended:
            return
        old_weights, new_weights = corpora.blends[-1].weights, entry.weights
        event = BlendChanged(
            step=state.step, position=position, old=old_weights, new=new_weights, skips_moved=moved_samples
        )
        place = f"position {position:,}, this is {state.cursor:,}"
        self.log.emit_event(event, say=f"the blend changes at {place}: {old_weights} -> {new_weights}")
        if moved_samples:
            self.log.say_line(
                f"{count_noun(moved_samples, 'sample')} that the skip ledger names behind it: named where they are now"
            )

    def _move_skips(self, before: Corpora, position: int) -> int:
        """Also skip the ledger's samples at their positions in the new blend; returns how many."""
        ledger = Ledger.read_ledger(self.run.skips, None if self.strict else [])
        old_order, new_order, blend_time = before.train.order, self.source.order, before.blends[-1].time
        moved_entries = moved_skips(ledger.by_position.entries, old_order, new_order, position, blend_time)
        append_entries(self.run.skips, moved_entries)
        return sum(moved_entry.end - moved_entry.first for moved_entry in moved_entries)

    def warn_of_foreign(self, step: int) -> None:
        """Warn, once per run, about corpora in the skip ledger that do not match any of this run: their content has
        changed, or the ledger is another run's."""
        foreign_tokens = self.skipping.find_foreign(self.source.order)
        sequence_length = self.config.model.sequence_length
        if foreign_tokens and self._told_foreign is None:
            self._told_foreign = run_on_first(
                lambda: {str(event.get("fingerprint")) for event in self.run.iterate_events(SkipsForeign)}
            )
        for (corpus, fingerprint), tokens in foreign_tokens.items():
            if fingerprint in (told_foreign := self._told_foreign or set()):
                continue
            told_foreign.add(fingerprint)
            self.log.emit_event(
                SkipsForeign(step=step, corpus=corpus, fingerprint=fingerprint, tokens=tokens),
                say=f"WARNING: {self.run.skips.name} names {tokens:,} tokens "
                f"({count_noun(-(-tokens // sequence_length), 'sample')}) of corpus {corpus} with fingerprint "
                f"{fingerprint[:12]}..., which this run does not use: they are not skipped",
            )

    def tell_of_coverage(self) -> None:
        """Say how often the run reads each corpus, and what of that is probably not meant."""
        train_config = self.config.train
        sample_count = self.config.batches.reach_after(0, train_config.steps)
        self.log.say_line(describe_epochs(self.source, sample_count))
        for text in find_warnings(self.corpora, sample_count, bool(train_config.eval_samples)):
            self.log.say_line(f"WARNING: {text}")

    def tell_of_validation(self, step: int) -> None:
        """Warn about corpora that were taken out, and whose validation loss is missing from here on."""
        held_out = self.corpora.held_out
        for name, why in held_out.gone.items():
            text = f"no validation loss of the corpus {name}, which was taken out of the blend: {why}"
            if name in held_out.at_first:
                text += "; the overall validation loss is without it from here on, too: do not compare it with before"
            self.log.emit_event(Warned(step=step, text=text), say=f"WARNING: {text}")


STORE_SECONDS = (
    1.0  # a wait for data that takes longer may be one for an object store, which is a phase of its own
)


class Feed:
    """loader: of the order's samples, from the run's cursor on. waited: seconds for the last batch."""

    def __init__(self, order: DataOrder, loader: Loader, heart: Heartbeat) -> None:
        self.order, self.loader, self.heart = order, loader, heart
        self.waited = 0.0

    def next_batch(self) -> Step:
        """The next global batch, with this rank's part of it."""
        activity.enter_activity(activity.DATA)
        begin_time = time.perf_counter()
        while not self.loader.wait_ready(STORE_SECONDS):
            if describe_wait() and activity.current_activity()[0] != activity.STORE:
                self.heart.enter_phase(activity.STORE)
        if activity.current_activity()[0] == activity.STORE:
            self.heart.enter_phase(activity.REST)
            activity.enter_activity(activity.DATA)
        global_batch = next(self.loader)
        self.waited = time.perf_counter() - begin_time
        return global_batch

    def mix_of(self, batch: Step) -> dict[str, float]:
        """The share of each corpus in the last sample's block; empty if unknown."""
        sample_selection = self.loader.skips
        return sample_selection.mix_at(batch.next - 1) if isinstance(sample_selection, Selection) else {}

    def tell_changes(self, state: RunState, batch: Step, mix: Mapping[str, float]) -> bool:
        """Journal what changes on purpose at the step after `state`. Whether losses have another level from there on:
        with another mix, or with the same text in other pieces."""
        step, size, log = state.step + 1, batch.positions.size, self.order.log
        mixed, cut = bool(state.mix) and mix != state.mix, bool(state.piece) and batch.piece != state.piece
        if mixed:
            log.emit_event(MixChanged(step=step, old=state.mix, new=mix), say=True)
        if cut:
            event = LengthChanged(step=step, position=batch.first, old=state.piece, new=batch.piece)
            log.emit_event(event, say=True)
        if state.batch and size != state.batch:
            log.emit_event(BatchChanged(step=step, position=batch.first, old=state.batch, new=size), say=True)
        return mixed or cut

    def read_ledger(self, step: int, cursor: int) -> None:
        """The skip ledger has new lines: continue at `cursor` without the samples they name. Collective."""
        run_on_first(self.heart.skips.begin_to_read)
        # As `select_samples`, but a malformed line does not end a run.
        wanted_samples, malformed_lines = self.order.skipping.select_usable(self.order.source.order)
        for malformed_line in malformed_lines:
            text = f"WARNING: {malformed_line}. Training goes on without that line"
            self.order.log.emit_event(SkipsRefused(step=step, problem=malformed_line), say=text)
        lines_before = self.loader.skips.lines if isinstance(self.loader.skips, Selection) else 0
        self.loader.go_to(cursor, wanted_samples)
        self.order.warn_of_foreign(step)
        if (new_lines := wanted_samples.lines - lines_before) > 0:
            lines_text = f"{count_noun(new_lines, 'new line')} in {self.order.run.skips.name}"
            self.order.log.emit_event(
                SkipsRead(step=step, cursor=cursor, entries=new_lines),
                say=f"step {step}: {lines_text}: skipped from now on",
            )
