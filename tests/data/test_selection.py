"""What is left out by identity, in every epoch of any blend, against a plain set of positions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    SkipLedger,
    append_all,
    sample_entries,
)
from megastable.data.skips import Range, Selection
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
    places, length, kept = order.locate(np.arange(end)), order.sequence_length, []
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
def test_a_selection_is_the_naive_walk_in_every_epoch(
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
    assert np.flatnonzero(~chosen.mask(np.arange(SHOWN))).tolist() == kept
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
    assert set(kept) == set(np.flatnonzero(~without.mask(np.arange(SHOWN))).tolist()) - by_name
    assert by_name <= everything


@settings(deadline=None, max_examples=examples(60))
@given(orders(), st.lists(st.integers(0, SHOWN - 1), min_size=1, max_size=5, unique=True), st.data())
def test_what_was_convicted_comes_in_no_epoch_and_nothing_else_is_lost(
    order: Order, guilty: list[int], data: st.DataObject
) -> None:
    """Lines as the run writes them: exactly the convicted samples are gone, whatever the blend becomes; in sequences of
    another length, those that share a token with them."""
    entries = sample_entries(order, np.array(guilty), "bad")
    places = order.locate(np.arange(SHOWN))
    identities = list(zip(places.corpus.tolist(), places.sequence.tolist(), strict=True))
    bad = {identities[position] for position in guilty}
    other = Order(
        order.corpora, order.sequence_length, order.seed + data.draw(st.integers(0, 1)), order.block,
        [Phase(0, {c.name: data.draw(st.floats(0.2, 1)) for c in order.corpora})],
    )  # fmt: skip
    try:
        same, blended = selection(order, entries), selection(other, entries)
    except DataError:
        assume(False)
    assert same.mask(np.arange(SHOWN)).tolist() == [identity in bad for identity in identities]
    there = other.locate(np.arange(SHOWN))
    expected = [pair in bad for pair in zip(there.corpus.tolist(), there.sequence.tolist(), strict=True)]
    assert blended.mask(np.arange(SHOWN)).tolist() == expected
    length = data.draw(st.integers(1, 20))
    longer = Order(order.corpora, length, order.seed, order.block, order.phases)
    kept = naive(longer, entries, (), SHOWN)
    try:
        assert np.flatnonzero(~selection(longer, entries).mask(np.arange(SHOWN))).tolist() == kept
    except DataError:
        assert len(kept) < SHOWN


def test_a_corpus_of_which_all_is_named_is_gone() -> None:
    """The search for a sample of it would not end; nor would that for one of 5,000."""
    corpora = [OrderedCorpus(name, 16 * 5000 + 1, 1.0, print_of(name)) for name in NAMES[:2]]
    order = Order(corpora, 16, seed=0, block=16)
    all_of = sample("books", (0, 16 * 5000))
    chosen = selection(order, [all_of])
    assert chosen.corpora_left == 1 and chosen.share_without() == 0.5 == chosen.kept
    assert chosen.mix(100) == {"code": 1.0}
    with pytest.raises(
        DataError, match="names all samples of those that it leaves: delete one of those lines"
    ):
        selection(order, [all_of, SkipEntry(first=9, end=LAST_POSITION, reason="x", corpus="code")])
    with pytest.raises(DataError, match="names all samples"):
        selection(order, [all_of, sample("code", (0, 80_000))])
    nearly = selection(order, [all_of, sample("code", (0, 79_984))])
    looks = 0

    def locate(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return Order.locate(order, *given)

    order.locate = locate  # type: ignore[method-assign]
    kept, _ = nearly.next_kept(0, 3)
    assert looks < 40  # where one of 10,000 is left, not one by one
    assert {(p.corpus, p.sequence) for p in map(order.locate_one, kept.tolist())} == {(1, 4999)}
    assert nearly.corpora_left == 1 and nearly.kept == pytest.approx(0.5 / 5000)


def test_a_corpus_with_other_content_is_another_one() -> None:
    """Pruned into a new one, or of another run: the lines do not hold, and are no error."""
    order = Order([OrderedCorpus("books", 500, 1.0, "new")], 16, seed=0)
    chosen = selection(order, [sample("books", (0, 400), fingerprint="old"), sample("web", (0, 10))])
    assert not chosen.mask(np.arange(200)).any() and chosen.lines == 2 and chosen.text == ""


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
def test_a_live_run_goes_on_without_the_line_that_names_everything_and_with_all_others(
    tmp_path: Path, wrong: list[AnyEntry], refused: list[str], before: bool
) -> None:
    """What was convicted before it stays out, and so does what is convicted after it."""
    order = Order([OrderedCorpus(name, 500, 1.0, print_of(name)) for name in ("books", "code")], 16, seed=0)
    good = [sample("books", (0, 32)), sample("code", (64, 80)), SkipEntry(first=3, end=5, reason="x")]
    path = tmp_path / "skips.jsonl"
    entries = [*good, *wrong] if before else [*good[:1], *wrong, *good[1:]]
    append_all(path, entries)
    found, odd = SkipLedger(path).usable(order)
    assert len(odd) == len(refused) and all(
        f"{text!r}" in said for text, said in zip(refused, odd, strict=True)
    )
    held = [e for e in entries if e.reason not in refused]
    kept = np.flatnonzero(~Selection(order, found).mask(np.arange(SHOWN))).tolist()
    assert kept == naive(order, held, (), SHOWN) and kept and found.lines == len(held)
    again, problems = Ledger.read(path).usable(path, order)
    assert problems == odd and np.flatnonzero(~again.mask(np.arange(SHOWN))).tolist() == kept


def test_what_is_said_of_it() -> None:
    order = Order([OrderedCorpus("books", 16 * 100 + 1, 1.0, print_of("books"))], 16, seed=0)
    chosen = selection(
        order, [sample("books", (0, 17)), SkipEntry(first=0, end=5000, reason="x")], [(4000, 6000)]
    )
    assert chosen.text == "6,000 positions, 2 of 100 samples of corpus books in every epoch"
