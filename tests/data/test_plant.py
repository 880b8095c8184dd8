"""Noise at known positions: exactly there, the same every time, and never over something else."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError, DataError
from megastable.config.tree import CorpusConfig, DataConfig, RunConfig
from megastable.config.warmups import Stages
from megastable.data.corpora import open_corpora
from megastable.data.loader import Loader, RankPart
from megastable.data.manifest import Manifest
from megastable.data.plant import plant_corruption, positions_of, read_planted
from megastable.data.samples import documents_at
from megastable.data.skips import Skips
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.prepare.adopt import verify_corpus
from megastable_tools.prepare.prepare import prepare_shards
from tests.conftest import tiny
from tests.data.texts import documents, sentencepiece_file
from tests.tiers import examples

WHERE = {"step": 10, "samples": 12, "seed": 3}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of real text in several shards; not to be changed."""
    folder = tmp_path_factory.mktemp("clean")
    (folder / "in").mkdir()
    for number, text in enumerate(documents(80)):
        (folder / "in" / f"{number:03d}.txt").write_text(text)
    prepare_shards(
        [folder / "in"],
        folder / "texts",
        sentencepiece_file(folder),
        validation=0.1,
        shard_tokens=3000,
        progress=False,
    )
    assert len(Manifest.load_manifest(folder / "texts").shards) > 3
    return folder / "texts"


@pytest.fixture
def config(clean: Path, tmp_path: Path) -> RunConfig:
    return tiny(clean, tmp_path / "run")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_plant_changes_what_the_run_reads_there_alone(clean: Path, tmp_path: Path, config: RunConfig) -> None:
    before = content(clean)
    planted, reused = plant_corruption(clean, tmp_path / "planted", config, **WHERE)
    assert not reused
    assert content(clean) == before
    assert verify_corpus(tmp_path / "planted").tokens == verify_corpus(clean).tokens
    assert read_planted(tmp_path / "planted") == planted
    assert read_planted(clean) is None

    length, size = config.model.sequence_length, config.train.global_batch
    folders = clean, tmp_path / "planted"
    corpora = [open_corpora([CorpusConfig(path=path)], length, config.run.seed) for path in folders]
    assert corpora[0].order_fingerprint == planted.order != corpora[1].order_fingerprint
    texts = [samples(path, config) for path in folders]
    changed = np.flatnonzero(np.any(texts[0] != texts[1], axis=1))
    ((first, end),) = planted.positions
    assert changed.tolist() == list(range(first, end))
    assert first // size == WHERE["step"] - 1 and first % size and end % size

    old, new = (text[first:end] for text in texts)
    eod = corpora[0].train.eod
    assert np.array_equal(old == eod, new == eod) and (old == eod).any()
    assert new[old != new].min() > 0 and new.max() < corpora[0].vocab_size
    assert (old[:, 1:-1] == new[:, 1:-1])[old[:, 1:-1] != eod].mean() < 0.05  # one in 600 by chance
    assert planted.documents == documents_at(corpora[0].train, range(first, end))
    assert planted.documents == documents_at(corpora[1].train, range(first, end))

    here, there = content(clean), content(tmp_path / "planted")
    shards = {name for name in here if here[name] != there[name]} - {"manifest.json"}
    assert shards == {f"{document.shard}.bin" for document in planted.documents}


def samples(corpus: Path, config: RunConfig) -> np.ndarray:
    """All samples of a run before any comes again, int64 [samples, length + 1]."""
    opened = open_corpora([CorpusConfig(path=corpus)], config.model.sequence_length, config.run.seed)
    size = config.train.global_batch
    with Loader(opened.train, Skips.from_ranges([]), 0, size, RankPart(size), DataConfig()) as loader:
        steps = opened.train.order.sequences[0] // size
        batches = [step.micro_batches[0] for step in islice(loader, steps)]
    return np.concatenate([np.c_[b.tokens.numpy(), b.labels.numpy()[:, -1]] for b in batches])


def test_plant_shuffles_tokens_of_another_corpus(clean: Path, tmp_path: Path, config: RunConfig) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/one.txt").write_text("zebra " * 500)
    tokenizer = clean / Manifest.load_manifest(clean).tokenizer.file
    other = tmp_path / "other"
    prepare_shards([tmp_path / "in"], other, tokenizer, validation=0, progress=False)
    where = {**WHERE, "kind": "shuffled", "other": other}
    planted, _ = plant_corruption(clean, tmp_path / "planted", config, **where)
    assert planted.other == Manifest.load_manifest(other).fingerprint()
    assert plant_corruption(clean, tmp_path / "planted", config, **where) == (planted, True)
    tokens = open_corpora([CorpusConfig(path=other)], 8, 1).train.streams[0].read_tokens(0, 400)
    after = samples(tmp_path / "planted", config)[slice(*planted.positions[0]), 1:-1]
    eod = open_corpora([CorpusConfig(path=clean)], 8, 1).train.eod
    drawn = after[after != eod]
    assert set(drawn.tolist()) <= set(tokens.tolist()) - {0, eod} and len(set(drawn.tolist())) > 1

    with pytest.raises(DataError, match=r"tokens are too few to replace [\d,]+: choose fewer samples"):
        plant_corruption(clean, tmp_path / "more", config, **{**where, "samples": 150})
    with pytest.raises(DataError, match="shuffled tokens need the corpus they are from"):
        plant_corruption(clean, tmp_path / "none", config, **WHERE, kind="shuffled")


@given(st.integers(1, 1000), st.integers(1, 500), st.integers(3, 200))
def test_positions_of_a_region_are_inside_of_batches(step: int, samples: int, batch: int) -> None:
    ((first, end),) = positions_of(step, samples, Stages.of_constant(batch))
    assert end - first == samples
    assert first // batch == step - 1
    assert first % batch and end % batch


@given(
    st.integers(1, 1000), st.integers(1, 500), st.integers(1, 64), st.integers(0, 9),
    st.data(),
)  # fmt: skip
def test_positions_of_so_many_samples_of_each_step(
    step: int, samples: int, batch: int, seed: int, data: st.DataObject
) -> None:
    of_each = data.draw(st.integers(1, batch))
    ranges = positions_of(step, samples, Stages.of_constant(batch), of_each, seed)
    assert ranges == positions_of(step, samples, Stages.of_constant(batch), of_each, seed)
    assert all(before[1] < after[0] for before, after in pairwise(ranges))
    found = [position for first, end in ranges for position in range(first, end)]
    assert len(found) == len(set(found)) == samples
    steps = np.bincount(np.array(found) // batch, minlength=step)
    last = samples % of_each or of_each
    assert not steps[: step - 1].any() and set(steps[step - 1 : -1]) <= {of_each} and steps[-1] == last
    assert len(steps) == step - 1 + -(-samples // of_each)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300)


@pytest.mark.slow
@settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    text=TEXTS, step=st.integers(1, 12), samples_=st.integers(1, 20), seed=st.integers(0, 3),
    of_each=st.none() | st.integers(1, 4),
)  # fmt: skip
def test_plant_continues_any_text_from_sample_to_sample(
    clean: Path, tmp_path_factory: pytest.TempPathFactory, text: str, step: int, samples_: int, seed: int,
    of_each: int | None,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("text")
    config = tiny(clean, folder / "run")
    where = {"step": step, "samples": samples_, "seed": seed, "of_each": of_each}
    planted, _ = plant_corruption(clean, folder / "planted", config, **where, kind="text", text=text)
    positions = [position for first, end in planted.positions for position in range(first, end)]
    assert len(positions) == planted.samples == samples_
    assert planted.positions == positions_of(step, samples_, config.batches, of_each, seed)
    assert read_planted(folder / "planted") == planted
    assert plant_corruption(clean, folder / "planted", config, **where, kind="text", text=text) == (
        planted,
        True,
    )
    verify_corpus(folder / "planted")

    before, after = samples(clean, config), samples(folder / "planted", config)
    others = np.setdiff1d(np.arange(len(before)), positions)
    assert np.array_equal(before[others], after[others])
    tokenizer = load_tokenizer(clean / Manifest.load_manifest(clean).tokenizer.file)
    ids, eod = tokenizer.encode(text), tokenizer.eod
    inner, old = after[positions, 1:-1], before[positions, 1:-1]
    wanted = np.resize(ids, inner.size).reshape(inner.shape)
    assert np.array_equal(inner, np.where(old == eod, eod, wanted))
    assert planted.documents == documents_at(open_corpora([CorpusConfig(path=clean)],
        config.model.sequence_length, config.run.seed).train, positions)  # fmt: skip


def test_plant_replaces_only_its_like(clean: Path, tmp_path: Path, config: RunConfig) -> None:
    output = tmp_path / "planted"
    made, _ = plant_corruption(clean, output, config, **WHERE)
    files, times = content(output), {path: path.stat().st_mtime_ns for path in output.iterdir()}
    assert plant_corruption(clean, output, config, **WHERE) == (made, True)
    # Neither the corpora nor the skips of the run say what stands where.
    other = config.model_copy(
        update={"data": config.data.model_copy(update={"skip": [(0, 50)], "corpora": []})}
    )
    assert plant_corruption(clean, output, other, **WHERE, overwrite=True) == (made, True)
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == times

    reseeded = config.model_copy(update={"run": config.run.model_copy(update={"seed": 5})})
    for change in ((config, {**WHERE, "seed": 4}), (reseeded, WHERE)):
        with pytest.raises(DataError, match=r"for another run or corpus .*--overwrite"):
            plant_corruption(clean, output, change[0], **change[1])
    assert content(output) == files
    replaced, reused = plant_corruption(clean, output, reseeded, **WHERE, overwrite=True)
    assert not reused and replaced.positions == made.positions and replaced.documents != made.documents
    verify_corpus(output)

    (output / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"will not be replaced: notes\.txt"):
        plant_corruption(clean, output, config, **WHERE, overwrite=True)


def test_plant_refuses(clean: Path, tmp_path: Path, config: RunConfig) -> None:
    output = tmp_path / "planted"
    with pytest.raises(DataError, match=r"positions \d+ to \d+ cannot be planted: .* before any repeats"):
        plant_corruption(clean, output, config, step=10_000)
    with pytest.raises(ConfigError, match="at least 1, 1 and 0"):
        plant_corruption(clean, output, config, step=0)
    with pytest.raises(DataError, match="not a prepared corpus"):
        plant_corruption(tmp_path, output, config)
    two = tiny(clean, tmp_path / "run", data={"corpora": [{"path": clean}, {"path": "other"}]})
    with pytest.raises(ConfigError, match="names 2 corpora"):
        plant_corruption(clean, output, two, **WHERE)
    for inside in (clean, clean / "planted"):
        with pytest.raises(DataError, match="is inside of the corpus"):
            plant_corruption(clean, inside, config, **WHERE)
    assert not output.exists()
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    for occupied in (output, output / "thesis.txt"):
        with pytest.raises(DataError, match="is not a planted corpus"):
            plant_corruption(clean, occupied, config, **WHERE, overwrite=True)
    (output / "thesis.txt").unlink()
    plant_corruption(clean, output, config, **WHERE)  # an empty directory is free
    with pytest.raises(DataError, match="planted already"):
        plant_corruption(output, tmp_path / "twice", config, **WHERE)
