"""A run's blends: what their ledger says, and what a run reads when they change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megastable.base.errors import DataError
from megastable.config.tree import CorpusConfig
from megastable.data.blends import BlendEntry, blends_in_force, moved_skips, read_blends
from megastable.data.corpora import Corpora, describe_epochs, find_warnings, open_corpora
from megastable.data.order import BLOCK
from megastable.data.skip_ledger import SkipEntry, append_entry
from megastable_tools.prepare.prepare import prepare_shards
from tests.conftest import write_corpus
from tests.data.test_prepare import write_lines
from tests.data.texts import documents, sentencepiece_file

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
    found = order.locate_samples(positions)
    mine = found.corpus == [c.name for c in order.corpora].index(corpus)
    return list(zip(found.epoch[mine].tolist(), found.sequence[mine].tolist(), strict=True))


def test_blend_change_keeps_the_order_of_every_corpus(three: dict[str, Path]) -> None:
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
        where = np.flatnonzero(run.train.order.locate_samples(range(3 * BLOCK)).corpus == index)
        for number, position in list(enumerate(where.tolist()))[::50]:
            assert run.train.read_sample(position).tobytes() == alone.train.read_sample(number).tobytes()
    assert not samples(run, range(2 * BLOCK, 3 * BLOCK), "a")
    # What was read before a change is what it was.
    assert samples(run, range(BLOCK), "b") == samples(first, range(BLOCK), "b")


def test_fingerprint_until_knows_a_checkpoint_of_before(three: dict[str, Path]) -> None:
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


def test_moved_skips_stay_skipped(three: dict[str, Path]) -> None:
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
        places = [order.locate_sample(p) for a, b in ranges for p in range(a, b) if p >= BLOCK]
        return {(order.corpora[p.corpus].name, p.epoch, p.sequence) for p in places}

    wanted = {sample for sample in skipped(first, bad) if sample[0] == "b"}  # no more of a is read
    there = [(e.first, e.end) for e in moved]
    assert len(wanted) > 10 and skipped(run, there) <= wanted <= skipped(run, there + bad)
    assert not moved_skips([*ledger, *moved], first.train.order, run.train.order, BLOCK)


def test_gone_stream_may_leave_the_disk(three: dict[str, Path]) -> None:
    first = opened(three, {"a": 0.5, "b": 0.5})
    second = opened(three, {"b": 1.0}, [entry(first, 0)])
    blends = [entry(first, 0), entry(second, BLOCK)]
    whole = opened(three, {"b": 1.0}, blends)
    (three["a"] / "part-0.bin").unlink()
    run = opened(three, {"b": 1.0}, blends)
    after = range(BLOCK, BLOCK + 50)
    assert [run.train.read_sample(p).tobytes() for p in after] == [
        whole.train.read_sample(p).tobytes() for p in after
    ]
    with pytest.raises(
        DataError, match=r"'a', which was taken out of the blend, is needed again: .*part-0\.bin"
    ):
        [run.train.read_sample(p) for p in range(50)]


def test_in_force_takes_later_lines(three: dict[str, Path], tmp_path: Path) -> None:
    one, two = opened(three, {"a": 1}), opened(three, {"b": 1})
    path = tmp_path / "blends.jsonl"
    for given in (entry(one, 0), entry(two, 3 * BLOCK), entry(one, 5 * BLOCK), entry(two, 2 * BLOCK)):
        append_entry(path, given)
    assert [e.position for e in blends_in_force(read_blends(path))] == [0, 2 * BLOCK]
    append_entry(path, entry(two, 0))
    assert [e.position for e in blends_in_force(read_blends(path))] == [0]
    with pytest.raises(DataError, match="no line for position 0"):
        blends_in_force([entry(one, BLOCK)])
    path.write_text('{"position": 5, "corpora": []}\n')
    with pytest.raises(DataError, match=r"blends\.jsonl line 1: position .*correct or delete line 1"):
        read_blends(path)


LONG = 64


def open_weighted(folder: Path, weights: dict[str, float], length: int = LONG) -> Corpora:
    given = [CorpusConfig(path=folder / name, weight=weight) for name, weight in weights.items()]
    return open_corpora(given, length, 0)


def test_find_warnings_of_epochs_shares_and_validation(tmp_path: Path) -> None:
    tokenizer = sentencepiece_file(tmp_path)
    for number, name in enumerate("abd"):
        text = write_lines(tmp_path / f"{name}.jsonl", [f"{name} {text}" for text in documents(20 + number)])
        held = 0.0 if name == "d" else 0.2
        prepare_shards([text], tmp_path / name, tokenizer, validation=held, progress=False)
    one = open_weighted(tmp_path, {"a": 1})
    (size,) = one.train.order.sequences
    assert describe_epochs(one.train, 39_000 * size) == "epochs of this run: a 39,000"
    assert describe_epochs(one.train, size // 2).startswith("epochs of this run: a 0.")
    assert find_warnings(one, size, True) == []
    (often,) = find_warnings(one, 39_000 * size, True)
    assert often.startswith("the run reads the corpus a 39,000 times")

    # 1 and 3 x 0.00037: shares are rounded to whole slots of a block.
    small = open_weighted(tmp_path, {"a": 1, "b": 0.00037})
    (rounded,) = find_warnings(small, 10, False)
    assert rounded.startswith("the corpus b gets 2 of 4096 samples of the blend") and "(+32 %)" in rounded
    (missing,) = find_warnings(open_weighted(tmp_path, {"a": 1, "d": 1}), 10, True)
    assert missing.startswith("corpora without a validation loss: the validation split of d has none")
    assert find_warnings(open_weighted(tmp_path, {"a": 1, "d": 1}), 10, False) == []
