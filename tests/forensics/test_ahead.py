"""What looks ahead of a run: finds what was planted where it will be read, and puts that, no more, on the ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml

from megastable.config.tree import Corruption, RunConfig
from megastable.data.blends import BlendEntry
from megastable.data.corpora import open_corpora
from megastable.data.manifest import TokenizerInfo, adopt_shards
from megastable.data.plant import Kind, plant_corruption
from megastable.data.shards import ShardWriter
from megastable.data.skip_ledger import Ledger, SkipEntry, append_entries, append_entry, read_ledger
from megastable.data.skips import Selection, Skips
from megastable.report.postmortem.sample_texts import Library
from megastable.run.directory import RunDirectory, make_directory
from megastable.run.events.data_events import LookAheadSpent, LookedAhead
from megastable.run.records import Recorder
from megastable_tools.forensics.history import History
from megastable_tools.forensics.oddness.judgement import KINDS
from megastable_tools.forensics.prescan import FREE, REASON, Lookout, Scout, ahead_sheet
from tests.conftest import tiny
from tests.journal import note
from tests.report.run_page.run_files import record

VOCABULARY, LENGTH = 250, 128


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 300 to 900 tokens, a random walk each: the next token says something of the one after it."""
    folder = tmp_path_factory.mktemp("walks")
    random = np.random.default_rng(0)
    with ShardWriter(folder / "part-0", VOCABULARY) as writer:
        while writer.tokens < 1_200_000:
            steps = random.integers(-3, 4, random.integers(300, 900))
            writer.add_document(
                np.append((random.integers(1, VOCABULARY) + steps.cumsum()) % (VOCABULARY - 1) + 1, 0)
            )
    info = TokenizerInfo(
        file="tokenizer.model", kind="sentencepiece", xxh3="0" * 32, vocab_size=VOCABULARY, eod=0
    )
    (folder / "tokenizer.model").write_bytes(b"none")
    adopt_shards(folder, info, 0.0).save_manifest(folder)
    return folder


def planted(
    clean: Path, tmp_path: Path, kind: Kind, samples: int, **look_ahead: Any
) -> tuple[RunConfig, Skips]:
    """A run on a copy with corruption from step 20 on, and the positions of that."""
    settings = {"steps": 40, **look_ahead}

    def config(corpus: Path) -> RunConfig:
        data = {"corpora": [{"path": corpus}], "look_ahead": settings}
        model = {
            "layers": 1,
            "hidden": 32,
            "heads": 2,
            "ffn": 64,
            "sequence_length": LENGTH,
            "vocab_multiple": 64,
        }
        return tiny(corpus, tmp_path / "run", data=data, model=model, train={"steps": 60, "global_batch": 16})

    other = clean if kind == "shuffled" else None
    found, _ = plant_corruption(
        clean, tmp_path / "bad", config(clean), step=20, samples=samples, kind=kind, other=other
    )
    return config(tmp_path / "bad"), Skips.from_ranges(found.positions)


def left_out(config: RunConfig, run: RunDirectory) -> Skips:
    """The positions of the first epoch whose samples the ledger names by identity."""
    order = Library(config).source.order
    named = Selection(order, Ledger.read_ledger(run.skips, []).exclusions).named_between(
        0, order.sequences[0]
    )
    return Skips.from_numbers(named)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "repeated", "shuffled"])
def test_lookout_finds_what_was_planted_and_nothing_else(kind: Kind, clean: Path, tmp_path: Path) -> None:
    config, bad = planted(clean, tmp_path, kind, 20)
    found = Lookout(Library(config)).find_suspects(np.arange(800), config.data.look_ahead.score)
    positions = {f.position for f in found}
    assert not {p for p in positions if not bad.contains(p)}
    assert len(positions) >= 18
    # Where all tokens are as frequent as any other, shuffled ones are random ones.
    named = {"repetition"} if kind == "repeated" else {"random tokens", "shuffled text"}
    assert sum(f.kind in named for f in found) >= 0.9 * len(found)


@pytest.mark.slow
def test_scout_writes_what_is_clear_with_its_evidence_once(clean: Path, tmp_path: Path) -> None:
    config, bad = planted(clean, tmp_path, "random", 20)
    run = make_directory(config, Path("recipe.yaml"))
    scout = Scout(config, run)
    while scout.look_ahead():
        assert scout.looked <= 40 * 16 + 20
    skipped = left_out(config, run)
    assert skipped.count() >= 18 and all(bad.contains(p) for a, b in skipped.ranges for p in range(a, b))
    assert all(e.reason.startswith(REASON) for e in read_ledger(run.skips))
    told = list(run.iterate_events(LookedAhead))
    assert sum(e["samples"] for e in told) == skipped.count()
    assert Skips.from_ranges((a, b) for e in told for a, b in e["positions"]).ranges == skipped.ranges
    evidence = told[0]["evidence"][0]
    assert evidence["why"] and evidence["text"] and evidence["score"] >= 5
    assert evidence["kind"] in config.data.look_ahead.kinds
    again = Scout(config, run)
    while again.look_ahead():
        pass
    assert len(list(run.iterate_events(LookedAhead))) == len(told)
    # It goes on with the run, and no further than it was told to.
    run.progress.write_text(json.dumps({"step": 3, "cursor": 48}))
    assert (
        again.look_ahead()
        and not again.look_ahead()
        and again.looked == 48 + 40 * 16 + sum(b - a for a, b in skipped.ranges)
    )


@pytest.mark.slow
def test_scout_has_a_budget_of_what_it_looked_at(clean: Path, tmp_path: Path) -> None:
    """Not of how far the run is, where it is switched on late; nor is it spent by what was skipped long ago."""
    config, _ = planted(clean, tmp_path, "random", 90, most=0.05)
    run = make_directory(config, Path("recipe.yaml"))
    append_entries(run.skips, [SkipEntry(first=0, end=60, reason=f"{REASON}60 random tokens")])
    note(run, "looked_ahead", positions=[[0, 60]], samples=60)
    run.progress.write_text(json.dumps({"phase": "step", "step": 19, "cursor": 304}))
    scout = Scout(config, run)
    while scout.look_ahead():
        pass
    found = left_out(config, run).count()
    assert FREE < found <= FREE + 0.05 * scout.seen < 304


@pytest.mark.slow
def test_scout_keeps_to_its_budget(clean: Path, tmp_path: Path) -> None:
    config, _ = planted(clean, tmp_path, "random", 90, most=0.0)
    run = make_directory(config, Path("recipe.yaml"))
    for _ in range(2):  # another process has no budget of its own
        scout = Scout(config, run)
        while scout.look_ahead():
            pass
        assert left_out(config, run).count() == FREE
    spent = next(iter(run.iterate_events(LookAheadSpent)))
    assert spent["left"] < spent["found"] and spent["evidence"]


@pytest.mark.slow
def test_scout_looks_again_when_a_run_goes_back(clean: Path, tmp_path: Path) -> None:
    """What the process of before said of its place is no longer so: it begins at its checkpoint."""
    config, bad = planted(clean, tmp_path, "random", 20)
    run = make_directory(config, Path("recipe.yaml"))
    run.progress.write_text(json.dumps({"phase": "step", "step": 30, "cursor": 480}))
    run.skips.write_text("what somebody got wrong\n")  # it ends no run, nor this
    scout = Scout(config, run)
    assert scout.look_ahead() and not read_ledger(run.skips, [])
    state = run.checkpoints / "step-10/state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"cursor": 160}))
    run.progress.write_text(json.dumps({"phase": "starting", "step": None, "cursor": None}))
    while scout.look_ahead():
        pass
    assert scout.begin == 160
    skipped = left_out(config, run)
    assert skipped.count() >= 18 and all(bad.contains(p) for a, b in skipped.ranges for p in range(a, b))


@pytest.mark.slow
def test_ahead_sheet_shows_the_worst_first(clean: Path, tmp_path: Path) -> None:
    config, bad = planted(clean, tmp_path, "random", 20)
    run = make_directory(config, Path("recipe.yaml"))
    run.recipe.write_text(yaml.safe_dump({"config": config.model_dump(mode="json"), "manifests": []}))
    run.journal.write_text("")
    opened = open_corpora(config.data.corpora, LENGTH, config.run.seed)
    append_entry(run.blends, BlendEntry(position=0, corpora=opened.shares))
    recorder = Recorder(run.steps, flush_steps=1)
    recorder.add_records(record(1, 1.7e9, loss=2.0, next_position=16))
    history = History(run.root)
    sheet = ahead_sheet(history, 30, texts=3)
    assert {r["position"] for r in sheet.rows} <= {p for a, b in bad.ranges for p in range(a, b)}
    assert len(sheet.rows) >= 18 and sorted(sheet.passages) == [0, 1, 2]
    scores = [row["score"] for row in sheet.rows]
    assert scores == sorted(scores, reverse=True)
    assert all(row["step"] == 1 + 1 + (row["position"] - 16) // 16 for row in sheet.rows)


def test_kinds_of_the_recipe_are_those_of_the_judgement() -> None:
    assert set(get_args(Corruption)) == set(KINDS) - {"usual", "odd"}
