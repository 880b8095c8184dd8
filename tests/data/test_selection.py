"""What is left out by identity, in every epoch of any blend, against a plain set of positions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.data.order import LAST_POSITION, Order, OrderedCorpus, Phase
from megastable.data.skip_ledger import (
    AnyEntry,
    Ledger,
    SampleEntry,
    SkipEntry,
    append_entries,
    release_entries,
    sample_entries,
)
from megastable.data.skips import Exclusions, Range, Selection
from tests.tiers import examples

NAMES = ("books", "code", "web")
SHOWN = 700  # positions that are looked at: many epochs of corpora of up to 20 sequences


def print_of(name: str) -> str:
    return name * 3


def sample(name: str, *tokens: Range, fingerprint: str | None = None) -> SampleEntry:
    return SampleEntry(
        corpus=name, fingerprint=fingerprint or print_of(name), tokens=[list(t) for t in tokens], reason="x"
    )


def selection(order: Order, entries: Sequence[AnyEntry], more: Sequence[Range] = ()) -> Selection:
    return Selection(order, Ledger(entries).exclusions, more)


def naive(order: Order, entries: Sequence[AnyEntry], more: Sequence[Range], end: int) -> list[int]:
    """The positions below `end` that are trained on, one by one."""
    places, length, kept = order.locate_samples(np.arange(end)), order.sequence_length, []
    for position in range(end):
        corpus = order.corpora[int(places.corpus[position])]
        own = range(int(places.first_token[position]), int(places.first_token[position]) + length)
        for e in entries:
            if isinstance(e, SampleEntry):
                mine = (e.corpus, e.fingerprint) == (corpus.name, corpus.fingerprint)
                if mine and any(first < own.stop and own.start < last for first, last in e.tokens):
                    break
            elif e.first <= position < e.end and e.corpus in (None, corpus.name):
                break
        else:
            if not any(first <= position < last for first, last in more):
                kept.append(position)
    return kept


@st.composite
def orders(draw: st.DrawFn) -> Order:
    names = NAMES[: draw(st.integers(1, 3))]
    corpora = [
        OrderedCorpus(n, draw(st.integers(40, 160)), draw(st.floats(0.2, 1.0)), print_of(n)) for n in names
    ]
    phases = [Phase(0, {c.name: c.weight for c in corpora})]
    if draw(st.booleans()):
        later = draw(st.sets(st.sampled_from(names), min_size=1))
        phases.append(Phase(draw(st.integers(1, 9)), {n: draw(st.floats(0.2, 1.0)) for n in later}))
    return Order(corpora, draw(st.integers(1, 16)), draw(st.integers(0, 99)), block=16, phases=phases)


TOKENS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 30)), min_size=1, max_size=4).map(
    lambda some: [[first, first + length] for first, length in some]
)
LINES = st.lists(
    st.one_of(
        st.builds(
            lambda name, other, tokens: sample(name, *map(tuple, tokens), fingerprint=other),
            st.sampled_from(NAMES), st.sampled_from([None, None, None, "old"]), TOKENS,
        ),
        st.builds(
            lambda first, length, corpus: SkipEntry(
                first=first, end=first + length, reason="x", corpus=corpus
            ),
            st.integers(0, 400), st.integers(1, 60), st.sampled_from([None, None, *NAMES]),
        ),
        st.builds(
            lambda first, corpus: SkipEntry(first=first, end=LAST_POSITION, reason="x", corpus=corpus),
            st.integers(0, 400), st.sampled_from(NAMES),
        ),
    ), max_size=6,
)  # fmt: skip
MORE = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 20)).map(lambda r: (r[0], sum(r))), max_size=2)


@settings(deadline=None, max_examples=examples(120))
@given(orders(), LINES, MORE, st.integers(0, 200), st.lists(st.integers(0, 40), max_size=6))
def test_selection_is_the_naive_walk_in_every_epoch(
    order: Order, entries: list[AnyEntry], more: list[Range], cursor: int, counts: list[int]
) -> None:
    known = {None, *(corpus.name for corpus in order.corpora)}
    entries = [e for e in entries if isinstance(e, SampleEntry) or e.corpus in known]
    kept = naive(order, entries, more, SHOWN)
    try:
        chosen = selection(order, entries, more)
    except DataError:
        # Nothing is left from the last phase on: every sample of every corpus in it is named.
        assert not [p for p in kept if p >= order.block * order.phases[-1].block and p >= 500]
        return
    assert np.flatnonzero(~chosen.mask_skipped(np.arange(SHOWN))).tolist() == kept
    left, walked = [p for p in kept if p >= cursor], 0
    assume(sum(counts) <= len(left))
    for count in counts:
        found, cursor_after = chosen.next_kept(cursor, count)
        assert found.dtype == np.int64 and found.tolist() == left[walked : walked + count]
        assert cursor_after == (found[-1] + 1 if count else cursor)
        walked, cursor = walked + count, cursor_after
    everything = set(np.arange(SHOWN).tolist())
    without = selection(order, [e for e in entries if isinstance(e, SkipEntry)], more)
    by_name = set(chosen.named_between(0, SHOWN).tolist())
    assert set(kept) == set(np.flatnonzero(~without.mask_skipped(np.arange(SHOWN))).tolist()) - by_name
    assert by_name <= everything


@settings(deadline=None, max_examples=examples(60))
@given(orders(), st.lists(st.integers(0, SHOWN - 1), min_size=1, max_size=5, unique=True), st.data())
def test_selection_loses_the_named_samples_and_no_others(
    order: Order, found_bad: list[int], data: st.DataObject
) -> None:
    """Lines as the run writes them: exactly the bad samples are gone, whatever the blend becomes; in sequences of
    another length, those that share a token with them."""
    entries = sample_entries(order, np.array(found_bad), "bad")
    places = order.locate_samples(np.arange(SHOWN))
    identities = list(zip(places.corpus.tolist(), places.sequence.tolist(), strict=True))
    bad = {identities[position] for position in found_bad}
    other = Order(
        order.corpora, order.sequence_length, order.seed + data.draw(st.integers(0, 1)), order.block,
        [Phase(0, {c.name: data.draw(st.floats(0.2, 1)) for c in order.corpora})],
    )  # fmt: skip
    try:
        same, blended = selection(order, entries), selection(other, entries)
    except DataError:
        assume(False)
    assert same.mask_skipped(np.arange(SHOWN)).tolist() == [identity in bad for identity in identities]
    there = other.locate_samples(np.arange(SHOWN))
    expected = [pair in bad for pair in zip(there.corpus.tolist(), there.sequence.tolist(), strict=True)]
    assert blended.mask_skipped(np.arange(SHOWN)).tolist() == expected
    length = data.draw(st.integers(1, 20))
    longer = Order(order.corpora, length, order.seed, order.block, order.phases)
    kept = naive(longer, entries, (), SHOWN)
    try:
        assert np.flatnonzero(~selection(longer, entries).mask_skipped(np.arange(SHOWN))).tolist() == kept
    except DataError:
        assert len(kept) < SHOWN


def everything(name: str, reason: str) -> SampleEntry:
    return sample(name, (0, 500)).model_copy(update={"reason": reason})


OUT_AND_ALL = [
    SkipEntry(first=0, end=LAST_POSITION, reason="out of b", corpus="code"),
    everything("books", "all"),
]


@pytest.mark.parametrize(
    ("wrong", "refused"),
    [
        ([everything("books", "all")], []),
        ([everything("books", "all"), everything("code", "all of b")], ["all of b"]),
        (OUT_AND_ALL, ["all"]),
        ([*OUT_AND_ALL, everything("books", "again")], ["all", "again"]),
        ([SkipEntry(first=9, end=LAST_POSITION, reason="the rest")], ["the rest"]),
        ([SkipEntry(first=9, end=10, reason="web", corpus="web")], ["web"]),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_usable_exclusions_ignore_a_line_that_names_everything(
    tmp_path: Path, wrong: list[AnyEntry], refused: list[str], before: bool
) -> None:
    """What was skipped before it stays out, and so does what is skipped after it."""
    order = Order([OrderedCorpus(name, 500, 1.0, print_of(name)) for name in ("books", "code")], 16, seed=0)
    good = [sample("books", (0, 32)), sample("code", (64, 80)), SkipEntry(first=3, end=5, reason="x")]
    path = tmp_path / "skips.jsonl"
    entries = [*good, *wrong] if before else [*good[:1], *wrong, *good[1:]]
    append_entries(path, entries)
    found, odd = Ledger.read_ledger(path).usable_exclusions(path, order)
    assert len(odd) == len(refused) and all(
        f"{text!r}" in said for text, said in zip(refused, odd, strict=True)
    )
    held = [e for e in entries if e.reason not in refused]
    kept = np.flatnonzero(~Selection(order, found).mask_skipped(np.arange(SHOWN))).tolist()
    assert kept == naive(order, held, (), SHOWN) and kept and found.lines == len(held)


ORDER = Order([OrderedCorpus("a", 161, 2.0, "fa"), OrderedCorpus("b", 81, 1.0, "fb")], 8, seed=3, block=6)
WHOLE = np.arange(30)  # an epoch of both, each sample once
POSITIONS = st.lists(st.integers(0, 29), min_size=1, max_size=12, unique=True).map(sorted)
STEPS = st.lists(st.tuples(st.sampled_from(["skip", "release", "person"]), POSITIONS), min_size=1, max_size=8)


def left_out(exclusions: Exclusions) -> set[int]:
    return set(WHOLE[Selection(ORDER, exclusions).mask_skipped(WHOLE)].tolist())


@settings(max_examples=examples(60), deadline=None)
@given(STEPS)
def test_released_withdraws_what_incidents_said_alone(
    tmp_path_factory: object, steps: list[tuple[str, list[int]]]
) -> None:
    path = Path(tmp_path_factory.mktemp("ledger")) / "skips.jsonl"  # type: ignore[attr-defined]
    own, persons, ever = set[int](), set[int](), set[int]()
    for number, (what, positions) in enumerate(steps):
        chosen = np.array(positions)
        entries: list[AnyEntry]
        if what == "release":
            entries = [
                *release_entries(Ledger.read_ledger(path), ORDER, chosen, "it was the rate", number, number)
            ]
            own -= set(positions) - persons
        else:
            incident = number if what == "skip" else None
            entries = [*sample_entries(ORDER, chosen, what, (), incident, incident)]
            (own if what == "skip" else persons).update(positions)
            ever |= set(positions)
        append_entries(path, entries)
        if len(own | persons) < len(WHOLE):
            assert left_out(Ledger.read_ledger(path).exclusions) == own | persons
        if len(ever) < len(WHOLE):
            assert left_out(Ledger.read_ledger(path).ever.exclusions) == ever
