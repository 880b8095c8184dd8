"""Skips by identity in real runs: what is quarantined in one epoch is trained on in none of the later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.base.errors import DataError
from megastable.base.process import login_name
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.order import BLOCK, Order
from megastable.data.plant import Planted, plant_corruption
from megastable.data.shards import Shard
from megastable.data.skip_ledger import SampleEntry, read_ledger, sample_entries
from megastable.run.events.data_events import SkipsAdded
from megastable_tools.forensics.consumption import document_sheet, run_sheet
from megastable_tools.forensics.history import History
from megastable_tools.forensics.shard_set import open_shelf
from megastable_tools.forensics.skip import skip_documents, skip_plan
from tests.conftest import LENGTH, write_corpus
from tests.distributed import run_ranks
from tests.recovery.test_recovery import incidents, recipe, train
from tests.training.test_live_skips import events, positions, small, train_and_skip

FIRST_BAD = 24  # step
BATCH = 9
SHORT = 1_500  # tokens of a corpus of a few steps


def order_of(config: RunConfig) -> Order:
    from megastable.data.blends import read_blends

    assert config.run.dir is not None
    blends = read_blends(config.run.dir / "blends.jsonl")
    return open_corpora(
        config.data.corpora, config.model.sequence_length, config.run.seed, blends
    ).train.order


def three_epochs(corpus: Path, run: Path, steps: int) -> RunConfig:
    train = {"steps": steps, "global_batch": BATCH, "micro_batch": 3, "eval_samples": 0, "eval_interval": 0}
    return recipe(corpus, run, train=train, schedule={"warmup_steps": 10, "total_steps": 90})


@pytest.fixture(scope="module")
def region(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Planted]:
    """A corpus of 30 steps, with 20 samples of noise in the steps 24 to 26 of the first epoch."""
    folder = tmp_path_factory.mktemp("region")
    write_corpus(folder / "clean", tokens=9_000, ids=20)
    (folder / "clean/tokenizer.model").write_bytes(b"")  # copied along, never read
    config = three_epochs(folder / "clean", folder / "run", 90)
    what, _ = plant_corruption(folder / "clean", folder / "bad", config, step=FIRST_BAD, samples=20)
    return folder / "bad", what


@pytest.mark.slow
def test_three_epochs_of_twenty_bad_samples_have_one_incident(
    region: tuple[Path, Planted], tmp_path: Path
) -> None:
    """On three data-parallel ranks and then on one; resumed twice, and made longer after its end."""
    corpus, what = region
    run = tmp_path / "run"
    for world, steps in ((3, 40), (3, 64), (1, 92)):
        assert run_ranks(world, train, three_epochs(corpus, run, steps)) == [(0, "")] * world
    (incident,) = incidents(run)
    order = order_of(three_epochs(corpus, run, 92))
    found_bad = [p for first, end in incident["positions"] for p in range(first, end)]
    planted = {p for first, end in what.positions for p in range(first, end)}
    assert incident["cause"] == "data" and planted <= set(found_bad) and len(found_bad) <= 21
    bad = set(order.locate_samples(np.array(found_bad)).sequence.tolist())
    (entry,) = read_ledger(run / "skips.jsonl")
    assert isinstance(entry, SampleEntry) and entry.documents
    # Neither these nor fewer of the others, in any of the epochs.
    trained = [p for some in positions(run).values() for p in some]
    places = order.locate_samples(np.arange(trained[-1] + 1))
    assert places.epoch[-1] == 3
    kept = [p for p, sequence in enumerate(places.sequence.tolist()) if sequence not in bad]
    assert trained == kept and len(trained) == BATCH * 92


def identities(config: RunConfig, given: dict[int, list[int]]) -> list[list[tuple[str, int, int]]]:
    """(corpus, epoch, sequence) of what every step trained on."""
    order, found = order_of(config), []
    for step in sorted(given):
        places = order.locate_samples(np.array(given[step]))
        names = [order.corpora[index].name for index in places.corpus]
        found.append(list(zip(names, places.epoch.tolist(), places.sequence.tolist(), strict=True)))
    return found


@pytest.mark.slow
def test_samples_stay_out_when_the_blend_changes_and_when_a_corpus_goes_and_comes_back(
    tmp_path: Path,
) -> None:
    for seed, name in enumerate("ab"):
        write_corpus(tmp_path / name, tokens=SHORT, seed=seed, validation=0)

    def config(steps: int, weights: tuple[float, float]) -> RunConfig:
        given = [{"path": str(tmp_path / n), "weight": w} for n, w in zip("ab", weights, strict=True) if w]
        # Over the edges of the blocks without 1,000 steps.
        skip = [[120, BLOCK - 24], [BLOCK + 120, 2 * BLOCK - 24], [2 * BLOCK + 120, 3 * BLOCK - 24]]
        parts: dict[str, Any] = {"data": {"corpora": given, "skip": skip}, "checkpoint": {"interval": 0}}
        return small(tmp_path / "a", tmp_path / "run", steps=steps, **parts)

    first = config(16, (0.5, 0.5))
    order = open_corpora(first.data.corpora, LENGTH, first.run.seed).train.order
    found_bad = [5, 7, 11, 30, 33]  # quarantined in step 6, when the first of them were trained on
    lines = [
        line.model_dump_json(exclude_none=True) for line in sample_entries(order, np.array(found_bad), "bad")
    ]
    bad = {(order.corpora[p.corpus].name, p.sequence) for p in map(order.locate_sample, found_bad)}
    assert {name for name, _ in bad} == {"a", "b"}
    assert run_ranks(2, train_and_skip, first, [(6, "\n".join(lines))]) == [0, 0]
    for steps, weights in ((32, (0.3, 0.7)), (48, (0.0, 1.0)), (64, (0.6, 0.4))):
        assert run_ranks(1, train, config(steps, weights)) == [(0, "")]
    trained = identities(config(64, (0.6, 0.4)), positions(tmp_path / "run"))
    assert sum((name, s) in bad for some in trained[:6] for name, _, s in some) == len(found_bad)
    assert not [s for some in trained[6:] for s in some if (s[0], s[2]) in bad]
    assert [e["skips_moved"] for e in events(tmp_path / "run", "blend_changed")] == [0, 0, 0]
    last = max(epoch for some in trained for name, epoch, _ in some if name == "a")
    assert last >= 3 and {name for some in trained[56:] for name, _, _ in some} == {"a", "b"}


def test_of_a_span_only_its_samples_are_skipped(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", tokens=SHORT, validation=0)
    assert run_ranks(1, train, small(tmp_path / "a", tmp_path / "run", steps=1)) == [(0, "")]
    shard, history = Shard(tmp_path / "a/part-0"), History(tmp_path / "run")
    number = next(n for n in range(shard.documents) if np.diff(shard.document_bounds(n))[0] > 3 * LENGTH)
    first, end = shard.document_bounds(number)
    plan = tmp_path / "plan.txt"
    fingerprint = history.blends[0].corpora[0].fingerprint
    plan.write_text(
        f"fingerprint: {fingerprint}\npart-0 {number} 5:7\npart-0 {number} {LENGTH + 5}:{LENGTH + 6}\n"
    )
    done = skip_plan(history, plan, "mojibake")
    [told] = history.run.iterate_events(SkipsAdded)
    assert told.who == login_name() and str(told.reason).startswith("mojibake (plan plan.txt, ")
    assert told.format_sentence().endswith(f"as {told.who} asked: {told.reason}")
    (entry,) = read_ledger(tmp_path / "run/skips.jsonl")
    wanted = [[first + 5, first + 7], [first + LENGTH + 5, first + LENGTH + 6]]
    assert isinstance(entry, SampleEntry) and entry.tokens == wanted
    assert entry.documents[0].documents == [number]
    assert (
        done.samples == len({token // LENGTH for a, b in wanted for token in range(a, b)})
        and done.documents == 1
    )
    plan.write_text(f"fingerprint: {fingerprint}\npart-0 {number} 5:{end - first + 1}\n")
    with pytest.raises(DataError, match="the plan names a span of it up to"):
        skip_plan(History(tmp_path / "run"), plan)


@pytest.mark.slow
def test_documents_stay_out_however_long_the_run_becomes(tmp_path: Path) -> None:
    """Two epochs and more beyond the end that the recipe said when a person had them skipped."""
    write_corpus(tmp_path / "a", tokens=SHORT, validation=0)

    def config(steps: int) -> RunConfig:
        return small(tmp_path / "a", tmp_path / "run", steps=steps)

    assert run_ranks(1, train, config(2)) == [(0, "")]
    history = History(tmp_path / "run")
    order, shard = order_of(config(2)), Shard(tmp_path / "a/part-0")
    numbers = np.array([1, 4])
    done = skip_documents(history, history.blends[0].corpora[0].fingerprint, {"part-0": numbers}, "bad")
    bounds = [shard.document_bounds(n) for n in numbers.tolist()]
    bad = {s for first, end in bounds for s in range(first // LENGTH, -(-end // LENGTH))}
    assert (done.samples, done.already, done.lines, done.taken_up) == (len(bad), 0, 1, None)
    assert done.text.startswith(f"2 documents of corpus a: {len(bad)} samples are skipped in every epoch")
    (entry,) = read_ledger(tmp_path / "run/skips.jsonl")
    assert isinstance(entry, SampleEntry) and entry.tokens == [list(pair) for pair in bounds]
    assert run_ranks(1, train, config(20)) == [(0, "")]
    trained = identities(config(20), positions(tmp_path / "run"))
    assert not [s for some in trained[2:] for s in some if s[2] in bad] and trained[-1][-1][1] >= 3
    assert {s for some in trained[2:] for _, _, s in some} == set(range(order.sequences[0])) - bad
    (row,) = run_sheet(History(tmp_path / "run")).rows
    count = sum(map(len, trained))
    assert (row["samples"], row["skipped"]) == (count, History(tmp_path / "run").cursor - count)
    rows = document_sheet(open_shelf([tmp_path / "a"]), "part-0", 4, [History(tmp_path / "run")]).rows
    assert {r["state"] for r in rows if r.get("epoch", 0) > 0} == {"skipped"}
    again = skip_documents(History(tmp_path / "run"), entry.fingerprint, {"part-0": numbers[:1]}, "bad")
    assert (again.samples, again.lines) == (0, 0) and again.text.startswith("nothing to do: the 1 documents")
