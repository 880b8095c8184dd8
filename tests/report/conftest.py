from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from megastable_tools.prepare.prepare import prepare_shards
from tests.data.texts import documents, sentencepiece_file
from tests.report.runs import NASTY, Make, data_incident, make_run


@pytest.fixture(scope="session")
def hostile_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with a real tokenizer; every third document is hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "in").mkdir()
    for number, text in enumerate(documents(60, 200)):
        (folder / "in" / f"{number:03d}.txt").write_text(text if number % 3 else f"{number}{NASTY * 3}")
    prepare_shards([folder / "in"], folder / "corpus", sentencepiece_file(folder), progress=False)
    return folder / "corpus"


@pytest.fixture
def make(hostile_corpus: Path, tmp_path: Path) -> Make:
    """`make_run` on a corpus that is hostile."""
    return partial(make_run, hostile_corpus, tmp_path / "run")


@pytest.fixture
def spike(make: Make, hostile_corpus: Path) -> Path:
    return make(data_incident(hostile_corpus, [(236, 248)]))
