"""A run's blends: what their ledger says, and what a run reads when they change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megastable.base.errors import ConfigError, DataError
from megastable.config.tree import CorpusConfig
from megastable.data.append_only import append
from megastable.data.blends import BlendEntry, in_force, moved_skips, read_blends
from megastable.data.corpora import Corpora, open_corpora
from megastable.data.order import BLOCK
from megastable.data.skip_ledger import Ledger, SkipEntry
from megastable.data.skips import Selection
from tests.conftest import write_corpus

LENGTH = 32


@pytest.fixture
def three(tmp_path: Path) -> dict[str, Path]:
    for seed, name in enumerate(("a", "b", "c")):
        write_corpus(tmp_path / name, tokens=60_000, seed=seed)
    return {name: tmp_path / name for name in ("a", "b", "c")}


def opened(paths: dict[str, Path], weights: dict[str, float], blends: list[BlendEntry] = []) -> Corpora:  # noqa: B006
    given = [CorpusConfig(path=paths[name], weight=weight) for name, weight in weights.items()]
    return open_corpora(given, LENGTH, 1, blends)


def entry(corpora: Corpora, position: int) -> BlendEntry:
    return BlendEntry(position=position, corpora=corpora.shares)


def samples(corpora: Corpora, positions: range, corpus: str) -> list[tuple[int, int]]:
    """The epoch and the sequence of every sample that the run reads of one corpus, in its order."""
    order = corpora.train.order
    found = order.locate(positions)
    mine = found.corpus == [c.name for c in order.corpora].index(corpus)
    return list(zip(found.epoch[mine].tolist(), found.sequence[mine].tolist(), strict=True))


def test_the_remaining_corpora_keep_their_order(three: dict[str, Path]) -> None:
    """Weights change, then one is taken out and another comes in: each goes through the same samples, none is left out
    and none comes twice."""
    first = opened(three, {"a": 0.5, "b": 0.5})
    second = opened(three, {"a": 0.2, "b": 0.8}, [entry(first, 0)])
    assert second.reblended and not opened(three, {"a": 1, "b": 1}, [entry(first, 0)]).reblended
    third = opened(three, {"b": 0.5, "c": 0.5}, [entry(first, 0), entry(second, BLOCK)])
    blends = [entry(first, 0), entry(second, BLOCK), entry(third, 2 * BLOCK)]
    run = opened(three, {"b": 0.5, "c": 0.5}, blends)
    assert not run.reblended
    for name in ("a", "b", "c"):
        alone = opened(three, {name: 1.0})
        found = samples(run, range(3 * BLOCK), name)
        assert found == samples(alone, range(len(found)), name)
        index = [c.name for c in run.train.order.corpora].index(name)
        where = np.flatnonzero(run.train.order.locate(range(3 * BLOCK)).corpus == index)
        for number, position in list(enumerate(where.tolist()))[::50]:
            assert run.train.sample(position).tobytes() == alone.train.sample(number).tobytes()
    assert not samples(run, range(2 * BLOCK, 3 * BLOCK), "a")
    # What was read before a change is what it was.
    assert samples(run, range(BLOCK), "b") == samples(first, range(BLOCK), "b")


def test_a_checkpoint_of_before_a_change_is_known(three: dict[str, Path]) -> None:
    first = opened(three, {"a": 0.5, "b": 0.5})
    second = opened(three, {"a": 0.2, "b": 0.8}, [entry(first, 0)])
    run = opened(three, {"a": 0.2, "b": 0.8}, [entry(first, 0), entry(second, BLOCK)])
    assert first.order_fingerprint == run.fingerprint_until(BLOCK)
    assert run.order_fingerprint == run.fingerprint_until(BLOCK + 1) != first.order_fingerprint
    other = opened(three, {"a": 0.5, "c": 0.5})
    assert other.order_fingerprint != run.fingerprint_until(0)
    # A blend that nothing was read of yet becomes another one, and so may the checkpoint's.
    third = opened(three, {"a": 0.7, "b": 0.3}, [entry(first, 0), entry(second, BLOCK)])
    again = opened(three, {"a": 0.7, "b": 0.3}, [entry(first, 0), entry(second, BLOCK), entry(third, BLOCK)])
    assert again.fingerprint_until(BLOCK) == run.fingerprint_until(BLOCK)
    assert again.order_fingerprint != run.order_fingerprint


def test_what_is_skipped_stays_so_where_the_blend_changes(three: dict[str, Path]) -> None:
    """A skip is a position: behind the change the same samples stand at others."""
    first = opened(three, {"a": 0.5, "b": 0.5})
    second = opened(three, {"b": 0.2, "c": 0.8}, [entry(first, 0)])
    run = opened(three, {"b": 0.2, "c": 0.8}, [entry(first, 0), entry(second, BLOCK)])
    bad = [(5, 8), (BLOCK - 1, BLOCK + 3), (BLOCK + 900, BLOCK + 901), (2 * BLOCK + 1, 2 * BLOCK + 40)]
    ledger = [SkipEntry(first=a, end=b, reason="bad") for a, b in bad]
    ledger.append(SkipEntry(first=0, end=2**62, reason="out", corpus="c"))
    moved = moved_skips(ledger, first.train.order, run.train.order, BLOCK)
    assert {e.reason for e in moved} == {"bad"} and all(e.first >= BLOCK for e in moved)

    def skipped(corpora: Corpora, ranges: list[tuple[int, int]]) -> set[tuple[str, int, int]]:
        order = corpora.train.order
        places = [order.locate_one(p) for a, b in ranges for p in range(a, b) if p >= BLOCK]
        return {(order.corpora[p.corpus].name, p.epoch, p.sequence) for p in places}

    wanted = {sample for sample in skipped(first, bad) if sample[0] == "b"}  # no more of a is read
    there = [(e.first, e.end) for e in moved]
    assert len(wanted) > 10 and skipped(run, there) <= wanted <= skipped(run, there + bad)
    assert not moved_skips([*ledger, *moved], first.train.order, run.train.order, BLOCK)


def test_a_corpus_twice_is_refused(three: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="two corpora are named 'a'"):
        opened(three | {"d": three["a"]}, {"a": 1, "d": 1})


def test_a_corpus_that_was_taken_out_may_leave_the_disk(three: dict[str, Path]) -> None:
    first = opened(three, {"a": 0.5, "b": 0.5})
    second = opened(three, {"b": 1.0}, [entry(first, 0)])
    blends = [entry(first, 0), entry(second, BLOCK)]
    whole = opened(three, {"b": 1.0}, blends)
    (three["a"] / "part-0.bin").unlink()
    run = opened(three, {"b": 1.0}, blends)
    after = range(BLOCK, BLOCK + 50)
    assert [run.train.sample(p).tobytes() for p in after] == [whole.train.sample(p).tobytes() for p in after]
    with pytest.raises(
        DataError, match=r"'a', which was taken out of the blend, is needed again: .*part-0\.bin"
    ):
        [run.train.sample(p) for p in range(50)]


def test_swapping_out_the_only_corpus_of_a_phase_is_refused(three: dict[str, Path]) -> None:
    first = opened(three, {"a": 0.5, "b": 0.5})
    second = opened(three, {"b": 1.0}, [entry(first, 0)])
    run = opened(three, {"b": 1.0}, [entry(first, 0), entry(second, BLOCK)])
    out = SkipEntry(first=BLOCK, end=2**62, reason="bad", corpus="b")
    with pytest.raises(DataError, match="swaps out every corpus"):
        Selection(run.train.order, Ledger([out]).exclusions)
    kept, _ = Selection(run.train.order).next_kept(BLOCK - 5, 10)
    assert kept.tolist() == list(range(BLOCK - 5, BLOCK + 5))


def test_later_lines_take_the_place_of_those_behind_them(three: dict[str, Path], tmp_path: Path) -> None:
    one, two = opened(three, {"a": 1}), opened(three, {"b": 1})
    path = tmp_path / "blends.jsonl"
    for given in (entry(one, 0), entry(two, 3 * BLOCK), entry(one, 5 * BLOCK), entry(two, 2 * BLOCK)):
        append(path, given)
    assert [e.position for e in in_force(read_blends(path))] == [0, 2 * BLOCK]
    append(path, entry(two, 0))
    assert [e.position for e in in_force(read_blends(path))] == [0]
    with pytest.raises(DataError, match="no line for position 0"):
        in_force([entry(one, BLOCK)])
    path.write_text('{"position": 5, "corpora": []}\n')
    with pytest.raises(DataError, match=r"blends\.jsonl line 1: position .*correct or delete line 1"):
        read_blends(path)
