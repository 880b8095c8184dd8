"""The drill of judgement: places of texts, faults of updates, and what is read of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drills import court_scenarios
from drills.court import list_cases
from drills.court_scenarios import (
    LENGTH,
    Places,
    cut_samples,
    move_tokens,
    write_corpus,
)  # fmt: skip
from drills.learning import list_scenarios
from megastable.base.errors import DataError
from megastable.config.tree import CorpusConfig
from megastable.data.corpora import open_corpora
from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece
from tests.drills.refusals import refusal


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    text = "".join(f"{n * n} is a number, and {n} is its root.\n" for n in range(3000))
    tokenizer = train_sentencepiece([text], folder / "tokenizer.model", 300)
    samples = cut_samples(text, tokenizer)
    np.save(folder / "prose.npy", samples[::2])
    np.save(folder / "code.npy", samples[1::2])
    return folder


def test_write_corpus_lays_what_a_run_reads(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(court_scenarios, "POSITIONS", 100)
    monkeypatch.setattr(court_scenarios, "HELD_OUT", 10)
    sources = np.arange(100)
    sources[60:] = 7
    places = Places(["prose"] * 50 + ["code"] * 50, (3,), (3,), sources)
    write_corpus(texts, tmp_path / "court", 5, places, ("prose", "code"))
    opened = open_corpora([CorpusConfig(path=tmp_path / "court")], LENGTH, 5)
    assert opened.train.order.sequences == (100,)
    read = opened.train.read_samples(np.arange(100))[:, :-1]
    prose, code = (
        np.random.default_rng(5).permutation(np.load(texts / f"{kind}.npy"))[10:]
        for kind in ("prose", "code")
    )
    tokenizer = court_scenarios.load_tokenizer(texts / "tokenizer.model")
    assert (read[0] == prose[0]).all() and (read[49] == prose[49]).all() and (read[50] == code[50]).all()
    assert (read[60:] == code[7]).all()
    assert (read[3] != prose[3]).sum() == LENGTH - 1
    assert (read[3, :-1] == move_tokens(prose[3, :-1], tokenizer)).all()
    places = Places(["prose"], sources=np.array([10**6]))
    with pytest.raises(DataError, match="samples of prose"):
        write_corpus(texts, tmp_path / "court", 5, places, ("prose",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["court", "--text", "file"], "--text: drill court has its own models and texts: leave it out"),
        (["court", "--quick"], "--quick: drill court has its own models"),
        (["court", "--only", "switch,thin"], "thin: there is no such scenario: clean, switch"),
        (["thin", "--only", "switch"], "--only is of drill court: leave it out"),
        (["sdc", "--set", "train.steps=9"], "--set: drill sdc has its own models and layouts: leave it out"),
    ],
)
def test_drill_court_refuses_bad_input(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message in refusal(arguments, tmp_path, monkeypatch)


def test_what_is_listed_is_what_is_asked_for() -> None:
    assert list_cases(["switch"]) == ["switch: prose, then code"] and len(list_cases([])) > 10
    assert [line.split(":")[0] for line in list_scenarios(["nan-expert", "experts-burst"])] == [
        "nan-expert",
        "experts-burst",
    ]
    assert len(list_scenarios(["experts"])) == 8 < len(list_scenarios([]))
