"""Convicted, released, convicted again, and what a person names meanwhile: whichever way the ledger is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.data.order import Order, OrderedCorpus
from megastable.data.skip_ledger import AnyEntry, Ledger, SkipLedger, append_all, released, sample_entries
from megastable.data.skips import Exclusions, Selection
from tests.tiers import examples

ORDER = Order([OrderedCorpus("a", 161, 2.0, "fa"), OrderedCorpus("b", 81, 1.0, "fb")], 8, seed=3, block=6)
WHOLE = np.arange(30)  # an epoch of both, each sample once
POSITIONS = st.lists(st.integers(0, 29), min_size=1, max_size=12, unique=True).map(sorted)
STEPS = st.lists(
    st.tuples(st.sampled_from(["convict", "release", "person"]), POSITIONS), min_size=1, max_size=8
)


def left_out(exclusions: Exclusions) -> set[int]:
    return set(WHOLE[Selection(ORDER, exclusions).mask(WHOLE)].tolist())


@settings(max_examples=examples(60), deadline=None)
@given(STEPS)
def test_what_incidents_said_is_withdrawn_and_what_others_say_stays(
    tmp_path_factory: object, steps: list[tuple[str, list[int]]]
) -> None:
    path = Path(tmp_path_factory.mktemp("ledger")) / "skips.jsonl"  # type: ignore[attr-defined]
    again_and_again = SkipLedger(path)
    own, persons, ever = set[int](), set[int](), set[int]()
    for number, (what, positions) in enumerate(steps):
        chosen = np.array(positions)
        entries: list[AnyEntry]
        if what == "release":
            entries = [*released(Ledger.read(path), ORDER, chosen, "it was the rate", number, number)]
            own -= set(positions) - persons
        else:
            incident = number if what == "convict" else None
            entries = [*sample_entries(ORDER, chosen, what, (), incident, incident)]
            (own if what == "convict" else persons).update(positions)
            ever |= set(positions)
        append_all(path, entries)
        if len(own | persons) < len(WHOLE):
            assert left_out(Ledger.read(path).exclusions) == own | persons
            assert left_out(again_and_again.read()[0]) == own | persons  # only the new lines are parsed
            assert left_out(Ledger(Ledger.read(path).entries).exclusions) == own | persons
        if len(ever) < len(WHOLE):
            assert left_out(Ledger.read(path).ever.exclusions) == ever
