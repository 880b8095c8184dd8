"""The small corpora of drills that run through several epochs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastable.data.manifest import Manifest
from megastable.drills.stage import RECIPE, SHORT, Stage
from megastable.errors import DataError
from tests.conftest import write_corpus

PER_STEP = RECIPE["train"]["global_batch"] * RECIPE["model"]["sequence_length"]


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
