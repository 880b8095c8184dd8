"""Events of the data: order, blend, skips, look-ahead scan."""

from __future__ import annotations

from megastable.base.text import show_ranges
from megastable.run.events.event import Event, Items, Ranges, Text, Tree, Whole, read_pairs


class OrderChanged(Event):
    """old, new: fingerprints of the order."""

    NAME = "order_changed"
    TOLD = "the order of the data changed: positions mean other samples from here on"
    old: Text
    new: Text


class ExchangesUndone(Event):
    """lines: of blends.jsonl."""

    NAME = "exchanges_undone"
    TOLD = "samples that were put off are not after all{because}"
    step: Whole
    lines: Whole
    reason: Text


class BlendChanged(Event):
    """From `position` on. old, new: weights by corpus; skips_moved: skipped samples that have moved."""

    NAME = "blend_changed"
    TOLD = "the corpora are blended by other weights from position {position} on"
    step: Whole
    position: Whole
    old: Tree
    new: Tree
    skips_moved: Whole


class MixChanged(Event):
    """The data mix changes at `step`: a new blend, or a corpus that ended. old, new: shares by corpus."""

    NAME = "mix_changed"
    TOLD = "data mix changed; another level of the loss is no incident"
    step: Whole
    old: Tree
    new: Tree


class BatchChanged(Event):
    """The global batch of the step that begins at a position is another one than before: a batch warm-up, or another
    recipe. old, new: samples."""

    NAME = "batch_changed"
    TOLD = "global batch of {new} samples from here on, {old} before"
    step: Whole
    position: Whole
    old: Whole
    new: Whole


class LengthChanged(Event):
    """Samples are cut into pieces of another length from `step` on. old, new: tokens."""

    NAME = "length_changed"
    TOLD = "sequences of {new} tokens from here on, {old} before"
    step: Whole
    position: Whole
    old: Whole
    new: Whole


class LookedAhead(Event):
    """positions: of the skipped samples; kinds: how many of each; looked: the position scanned up to; documents: that
    they are part of; evidence: of the worst; budget_left: samples that may still be skipped."""

    NAME = "looked_ahead"
    positions: Ranges
    samples: Whole
    kinds: Tree
    looked: Whole
    documents: Items
    evidence: Items
    budget_left: Whole

    def describe_event(self) -> str:
        kinds = self.get("kinds")
        kind_text = ", ".join(f"{n} {kind}" for kind, n in kinds.items()) if isinstance(kinds, dict) else "?"
        where = show_ranges(read_pairs(self.get("positions")), 4) or "?"
        return f"{self.get('samples')} samples to come are skipped, they look corrupt: positions {where} ({kind_text})"


class LookAheadSpent(Event):
    """found: samples that look corrupt; left: of the budget before them; used: samples skipped so far."""

    NAME = "look_ahead_spent"
    TOLD = (
        "{found} samples to come look corrupt, and the budget of data.look_ahead.most is spent: "
        "they are not skipped"
    )
    found: Whole
    left: Whole
    used: Whole
    looked: Whole
    evidence: Items


class LookAheadFailed(Event):
    NAME = "look_ahead_failed"
    TOLD = "what looks ahead in the data has failed{because_problem}"
    problem: Text


class SkipsAdded(Event):
    """Added by a person, `who`, for a reason. documents: how many, 0 for the whole corpus; samples: newly skipped;
    lines: of the skip ledger; already: samples that were skipped before."""

    NAME = "skips_added"
    corpus: Text
    documents: Whole
    samples: Whole
    lines: Whole
    already: Whole
    who: Text = None
    reason: Text = None

    def describe_event(self) -> str:
        asked = f"as {self.get('who') or 'a person'} asked{self.format_reason()}"
        if not self.get("documents"):
            return f"corpus {self.get('corpus')} is swapped out, {asked}"
        if not self.get("samples"):
            return f"{self['documents']} documents are named, whose samples were skipped already, {asked}"
        return f"{self['samples']} samples of {self['documents']} documents are skipped, {asked}"


class SkipsGivenBack(Event):
    """Samples that an incident skips were tried again on a checkpoint, after `step`, and are to be read from the next
    start on. samples: how many; lines: of the skip ledger."""

    NAME = "skips_given_back"
    TOLD = "{samples} samples of incident {incident} are given back{because}"
    step: Whole
    incident: Whole
    samples: Whole
    lines: Whole
    reason: Text


class SkipsRead(Event):
    """entries: new lines of the skip ledger, valid from `cursor` on."""

    NAME = "skips_read"
    TOLD = "{entries} new lines of the skip ledger hold from position {cursor} on"
    step: Whole
    cursor: Whole
    entries: Whole


class SkipsForeign(Event):
    """fingerprint: of the corpus as the ledger has it; tokens: how many of it the ledger names."""

    NAME = "skips_foreign"
    step: Whole
    corpus: Text
    fingerprint: Text
    tokens: Whole

    def describe_event(self) -> str:
        return (
            f"the skip ledger names samples of corpus {self.get('corpus')} with fingerprint "
            f"{str(self.get('fingerprint'))[:12]}, which is none of this run's: they are not skipped"
        )


class SkipsRefused(Event):
    NAME = "skips_refused"
    TOLD = "a line of the skip ledger is left out{because_problem}"
    step: Whole = None
    problem: Text
