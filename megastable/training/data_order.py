"""Settles the order of the training data at the start of a run: blends, exchanges, skips. Collective."""

from __future__ import annotations

from pathlib import Path

from megastable.base.collectives import agree, first, shared
from megastable.base.errors import CheckpointError
from megastable.base.text import plural
from megastable.checkpoint.store import RunState
from megastable.config.tree import RunConfig
from megastable.data.blends import BlendEntry, ExchangeEntry, Line, moved_skips
from megastable.data.corpora import Corpora, open_corpora
from megastable.data.coverage import describe_epochs, find_warnings
from megastable.data.order import BLOCK
from megastable.data.skip_ledger import Ledger, append, append_all
from megastable.data.skipping import Skipping
from megastable.data.skips import Selection
from megastable.data.source import Source
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import (
    BlendChanged,
    ExchangesUndone,
    OrderChanged,
    SkipsForeign,
    SkipsRefused,
)
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog


class DataOrder:
    """The data order of one run. strict: a malformed line of the skip ledger ends the start (`Skipping`).

    corpora: as read from now on. anew: whether they differ from those of the checkpoint.
    """

    def __init__(
        self, config: RunConfig, run: RunDirectory, corpora: Corpora, log: RunLog, strict: bool
    ) -> None:
        """Raises DataError if nothing is left to train on."""
        self.config, self.run, self.corpora, self.log, self.strict = config, run, corpora, log, strict
        self.anew = False
        self.skipping = Skipping(config, run)
        self._told_foreign: set[str] | None = None  # fingerprints, once read from the journal
        # Checked first, before anything slow; a new blend may be what leaves something to train on.
        if corpora.reblended:
            self.skipping.check(strict)
        else:
            self.selection()

    @property
    def source(self) -> Source:
        """The source of the training samples."""
        return self.corpora.train

    def selection(self) -> Selection:
        """The samples left in the order, by the current skip ledger."""
        return self.skipping.selection(self.source.order, self.strict)

    def _open(self, lines: list[Line]) -> Corpora:
        c = self.config
        return open_corpora(c.data.corpora, c.model.sequence_length, c.run.seed, lines, c.data.validation)

    # Against the checkpoint's order

    def exchanged_since(self, saved: RunState) -> list[ExchangeEntry] | None:
        """The exchanges since a checkpoint that deferred samples it has read; None if it knew a different order.

        There are some if a process rewound past it and died before it was put aside, or a person restored it. A
        checkpoint without any is preferred; if there is none, they are undone.
        """
        if not saved.cursor:
            return []
        known = self.corpora.known_by(saved.order_fingerprint, saved.cursor)
        return None if known is None else self.corpora.exchanges[known:]

    def undo(self, later: list[ExchangeEntry], saved: RunState, found: Path) -> None:
        """Continue in the order that the checkpoint `found` knew."""
        corpora, name = self.corpora, self.run.blends.name
        reason = f"{found.name} has read these samples already, and no good checkpoint has not"
        undone = [entry.undone(reason, saved.step) for entry in reversed(later)]
        first(lambda: append_all(self.run.blends, undone))
        lines: list[Line] = [*corpora.blends, *corpora.exchanges, *undone]
        self.corpora = agree(lambda: self._open(lines))
        self.log.emit(
            ExchangesUndone(step=saved.step, lines=len(undone), reason=reason),
            say=f"note: {reason}: {plural(len(undone), 'line')} of {name} that put them off are undone",
        )

    def accept_another(self, saved: RunState, found: Path) -> None:
        """The checkpoint `found` knew a different order. Raises CheckpointError unless the recipe accepts that."""
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
        self.anew = True
        old, new = saved.order_fingerprint, self.corpora.order_fingerprint
        self.log.emit(OrderChanged(old=old, new=new), say=f"note: {message}")

    # Ledgers and journal

    def follow_blend(self, state: RunState) -> None:
        """Write down the blend, from the first block that has not been read yet."""
        corpora = self.corpora
        begins = self.anew or not corpora.blends
        # Before the first step, the corpora may have changed, too.
        others = not state.step and corpora.blends and corpora.blends[-1].corpora != corpora.shares
        if not begins and not others and not corpora.reblended:
            return
        position = 0 if begins else -(-state.cursor // BLOCK) * BLOCK
        entry = BlendEntry(position=position, corpora=corpora.shares, step=state.step)
        blends: list[Line] = [*corpora.blends, *corpora.exchanges, entry]
        self.corpora = agree(lambda: self._open(blends))
        # The blend last: after a crash in between, a restart repeats both.
        moved = 0 if begins else first(lambda: self._move_skips(corpora, position))
        first(lambda: append(self.run.blends, entry))
        if begins or not corpora.reblended:
            return
        old, new = corpora.blends[-1].weights, entry.weights
        self.log.emit(
            BlendChanged(step=state.step, position=position, old=old, new=new, skips_moved=moved),
            say=f"the blend changes at position {position:,}, this is {state.cursor:,}: {old} -> {new}",
        )
        if moved:
            self.log.say(
                f"{plural(moved, 'sample')} that the skip ledger names behind it: named where they are now"
            )

    def _move_skips(self, before: Corpora, position: int) -> int:
        """Also skip the ledger's samples at their positions in the new blend; returns how many."""
        entries = self._ledger().by_position.entries
        new, since = self.source.order, before.blends[-1].time
        moved = moved_skips(entries, before.train.order, new, position, since)
        append_all(self.run.skips, moved)
        return sum(entry.end - entry.first for entry in moved)

    def _ledger(self) -> Ledger:
        return Ledger.read(self.run.skips, None if self.strict else [])

    def warn_of_foreign(self, step: int) -> None:
        """Warn, once per run, about corpora in the skip ledger that do not match any of this run: their content has
        changed, or the ledger is another run's."""
        foreign, length = self.skipping.foreign(self.source.order), self.config.model.sequence_length
        if foreign and self._told_foreign is None:
            events = first(lambda: [e.get("fingerprint") for e in self.run.events(SkipsForeign)])
            self._told_foreign = set(map(str, events))
        for (corpus, fingerprint), tokens in foreign.items():
            if fingerprint in (told := self._told_foreign or set()):
                continue
            told.add(fingerprint)
            self.log.emit(
                SkipsForeign(step=step, corpus=corpus, fingerprint=fingerprint, tokens=tokens),
                say=f"WARNING: {self.run.skips.name} names {tokens:,} tokens "
                f"({plural(-(-tokens // length), 'sample')}) of corpus {corpus} with fingerprint "
                f"{fingerprint[:12]}..., which this run does not use: they are not skipped",
            )

    def tell_of_coverage(self) -> None:
        """Say how often the run reads each corpus, and what of that is probably not meant."""
        c = self.config
        samples = c.batches.reach(0, c.train.steps)
        self.log.say(describe_epochs(self.source, samples))
        for text in find_warnings(self.corpora, samples, bool(c.train.eval_samples)):
            self.log.say(f"WARNING: {text}")

    def tell_of_validation(self, step: int) -> None:
        """Warn about corpora that were taken out, and whose validation loss is missing from here on."""
        held_out = self.corpora.held_out
        for name, why in held_out.gone.items():
            text = f"no validation loss of the corpus {name}, which was taken out of the blend: {why}"
            if name in held_out.at_first:
                text += "; the overall validation loss is without it from here on, too: do not compare it with before"
            self.log.emit(Warned(step=step, text=text), say=f"WARNING: {text}")

    def usable(self, step: int) -> Selection:
        """As `selection`, but during a run, which a malformed line does not end."""
        wanted, odd = self.skipping.usable(self.source.order)
        for problem in odd:
            self.log.emit(
                SkipsRefused(step=step, problem=problem),
                say=f"WARNING: {problem}. Training goes on without that line",
            )
        return wanted
