"""What incidents skip, tried again: new text is given back and read, noise stays away, and nothing is deleted."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.manifest import TokenizerInfo, adopt_shards
from megastable.data.shard_format import ShardWriter
from megastable.data.skip_ledger import append_entries, read_ledger, sample_entries
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import SkipsGivenBack
from megastable_tools.forensics.history import History
from tests.conftest import VOCABULARY
from tests.distributed import run_ranks
from tests.forensics.court.commands import hash_files, megastable
from tests.recovery.test_recovery import recipe, train

STEPS, SKIPPED = 40, 560  # positions before the latter are not read where they are of the new language
NOISE, NEW = 1, 2  # incidents


def write_language(folder: Path, kind: str) -> None:
    """A corpus of a language of its own: random walks over token ids, or noise."""
    folder.mkdir()
    random, first = np.random.default_rng(1), {"known": 1, "new": 40, "noise": 1}[kind]
    with ShardWriter(folder / "part-0", VOCABULARY) as writer:
        while writer.tokens < 20_000:
            steps = random.integers(-3, 4, 100)
            walk = (random.integers(0, 20) + steps.cumsum()) % 20 + first
            noise = random.integers(1, 21, 100)  # words that are known, in no order
            writer.add_document(np.append(noise if kind == "noise" else walk, 0))
    tokenizer = TokenizerInfo(
        file="tokenizer.model", kind="sentencepiece", xxh3="0" * 32, vocab_size=VOCABULARY, eod=0
    )
    adopt_shards(folder, tokenizer, 0.05).save_manifest(folder)


def blended(folder: Path, steps: int) -> RunConfig:
    weights = {"known": 0.6, "new": 0.25, "noise": 0.15}
    corpora = [{"path": folder / kind, "weight": weight} for kind, weight in weights.items()]
    parts: dict[str, Any] = {"checkpoint": {"interval": STEPS}, "train": {"steps": steps}}
    parts |= {"data": {"corpora": corpora}, "schedule": {"warmup_steps": 10, "total_steps": 100}}
    return recipe(folder / "known", folder / "run", stability={"enabled": False}, **parts)


def train_without(folder: Path) -> Path:
    """A run that has not read the new language and the noise so far, as incidents have skipped them."""
    for kind in ("known", "new", "noise"):
        write_language(folder / kind, kind)
    config = blended(folder, STEPS)
    order = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed).train.order
    positions = np.arange(4 * SKIPPED)
    corpora = np.array([order.corpora[index].name for index in order.locate_samples(positions).corpus])
    (folder / "run").mkdir()
    for number, chosen in (
        (NEW, positions[:SKIPPED][corpora[:SKIPPED] == "new"]),
        (NOISE, positions[corpora == "noise"]),
    ):
        lines = sample_entries(order, chosen, "data: bad", (), number, 20 + number)
        append_entries(folder / "run/skips.jsonl", lines)
    append_entries(
        folder / "run/skips.jsonl", sample_entries(order, positions[corpora == "noise"][:1], "by a person")
    )
    assert run_ranks(1, train, config) == [(0, "")]
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_without(tmp_path_factory.mktemp("review"))


def test_skip_review_gives_back_what_is_new_and_the_next_start_reads_it(run: Path) -> None:
    before, lines = hash_files(run), read_ledger(run / "skips.jsonl")
    done = megastable("skips", "review", "run", "--json", folder=run.parent)
    assert done.returncode == 0, done.stderr
    noise, new = json.loads(done.stdout)["groups"]
    assert (noise["incident"], noise["verdict"], noise["harmless"]) == (NOISE, noise["verdict"], False)
    assert noise["verdict"] in ("bad", "mixed") and noise["cost"] > 0.01
    assert (new["incident"], new["verdict"], new["harmless"]) == (NEW, "new", True)
    assert new["learnt"] > 0.1 and not new["given_back"] and new["documents"] > 10
    assert hash_files(run) == before

    given = megastable("skips", "review", "run", "--give-back", folder=run.parent)
    assert given.returncode == 0 and "given back" in given.stdout and "stays skipped" in given.stdout
    after = read_ledger(run / "skips.jsonl")
    assert after[: len(lines)] == lines and {line.released for line in after[len(lines) :]} == {True}
    (told,) = RunDirectory(run).iterate_events(SkipsGivenBack)
    assert (told.incident, told.samples, told.step) == (NEW, new["samples"], STEPS)

    history = History(run)
    order, cursor = history.library_at().source.order, history.cursor
    ahead = np.arange(cursor, SKIPPED)
    names = np.array([order.corpora[index].name for index in order.locate_samples(ahead).corpus])
    assert (names == "new").any() and (names == "noise").any()
    assert run_ranks(1, train, blended(run.parent, STEPS + 6)) == [(0, "")]
    history = History(run)
    read = np.concatenate([history.positions_of(step) for step in history.list_steps(STEPS + 1, STEPS + 6)])
    assert np.isin(ahead[names == "new"], read).all() and not np.isin(ahead[names == "noise"], read).any()

    gone = megastable("skips", "review", "run", "--incident", NEW, folder=run.parent)
    assert (
        gone.returncode == 2 and f"incident {NEW} skips no samples for good; these do: {NOISE}" in gone.stderr
    )


def test_skip_review_only_looks_at_a_run_at_work(run: Path) -> None:
    from megastable.commands.root import app
    from tests.tools.cli import call

    with (run / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = hash_files(run)
        done = call(app, "skips", "review", "run", "--give-back", cwd=run.parent)
    assert (done.returncode, done.stdout) == (2, "") and "its training is at work" in done.stderr
    locks = {str(run / ".lock"), str(run / ".supervisor.lock")}
    after = {name: value for name, value in hash_files(run).items() if name not in locks}
    assert done.stderr.count("\n") == 1 and after.items() <= before.items()
