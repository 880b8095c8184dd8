"""The small corpora of drills that run through several epochs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from drills.learning import choose
from drills.scenario import GLOBAL_BATCH, Scenario
from drills.stage import RECIPE, SHORT, VOCABULARY, Stage
from megastable.base.errors import DataError
from megastable.config.recipe import load
from megastable.config.tree import CorpusConfig, RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.manifest import Manifest
from megastable_tools.prepare.prepare import prepare_shards
from tests.conftest import write_corpus
from tests.data.texts import documents, sentencepiece_file

PER_STEP = GLOBAL_BATCH * RECIPE["model"]["sequence_length"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "stdlib", tokens=40 * PER_STEP)
    return tmp_path


def train_tokens(part: Path) -> int:
    return sum(segment.tokens for segment in Manifest.load(part).splits["train"])


def test_a_part_has_the_tokens_of_an_epoch_whatever_other_drills_made(folder: Path) -> None:
    for steps, epochs in ((60, 3), (30, 3), (60, 2)):
        wanted = steps * PER_STEP // epochs
        assert wanted - SHORT <= train_tokens(Stage(folder, 1, steps)._part(epochs)) <= wanted


def test_a_part_that_was_interrupted_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(folder, 1, 30)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stage._part(3)
    assert train_tokens(stage._part(3)) <= 10 * PER_STEP < train_tokens(stage.corpus)


def test_a_corpus_that_is_too_small_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=f"{90 * PER_STEP:,} are needed"):
        Stage(folder, 1, 270)._part(3)


def test_the_other_corpus_has_the_first_ones_tokens_at_the_edges_of_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(documents(40)))
    stage = Stage(tmp_path, 1, 30)
    tokenizer = sentencepiece_file(tmp_path)
    prepare_shards(
        [tmp_path / "a.txt"], stage.corpus, tokenizer, eod=7, bos=True, validation=0, progress=False
    )
    stage._descriptions()
    both = [CorpusConfig(path=stage.corpus), CorpusConfig(path=stage.other)]
    assert len(open_corpora(both, 16, 0).manifests) == 2


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Drills on a text of one's own."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my.txt").write_text("\n\n".join(documents(500, 700)))
    stage = Stage(folder / "kept", 3, ranks=1, layers=3, text=folder / "my.txt")
    stage.prepare()
    return stage


def test_any_text_is_a_corpus_of_many_documents(own: Stage) -> None:
    manifest = Manifest.load(own.corpus)
    assert manifest.name == "my" and manifest.tokenizer.vocab_size == VOCABULARY
    assert all(sum(s.documents for s in split) > 3 for split in manifest.splits.values())
    config: RunConfig = load(own.recipe)
    assert (config.model.layers, config.train.micro_batch, config.run.seed) == (3, GLOBAL_BATCH, 3)
    before = (own.corpus / "manifest.json").stat().st_mtime_ns
    own.prepare()
    assert (own.corpus / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("scenario", [s for s in choose(["thin"]) if s.text], ids=lambda s: s.name)
def test_every_text_can_be_planted_there(own: Stage, scenario: Scenario) -> None:
    if scenario.samples > 100:
        scenario = replace(scenario, samples=60)
    scenario = scenario.at(20)
    corpus, planted = own.corpus_of(scenario)
    assert planted is not None and planted.samples == scenario.samples
    assert planted.first // GLOBAL_BATCH == 19
    assert own.corpus_of(scenario) == (corpus, planted)
    other, elsewhere = replace(own, seed=4), None
    other.prepare()
    there, elsewhere = other.corpus_of(scenario)
    assert there != corpus and elsewhere != planted
