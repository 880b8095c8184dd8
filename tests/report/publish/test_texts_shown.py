"""The texts of samples in a record: those of the run, under public names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megastable.data.append_only import append
from megastable.data.blends import BlendEntry, Share
from megastable.data.manifest import Manifest
from megastable.report.postmortem import write_incidents
from megastable.report.publish import publish
from megastable.report.publish.redaction import Keeping
from megastable_tools.prepare.prepare import prepare_shards
from tests.data.texts import documents, sentencepiece_file
from tests.report.publish.plants import everything
from tests.report.runs import data_incident, make_run

PRIVATE = b"acmemails"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on a corpus with a private name, whose recipe and blend name it by a relative path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for number, text in enumerate(documents(60, 200)):
        (tmp_path / "in" / f"{number:03d}.txt").write_text(text)
    corpus = Path("acmemails")
    prepare_shards([tmp_path / "in"], corpus, sentencepiece_file(tmp_path), progress=False)
    root = make_run(corpus, tmp_path / "run", data_incident(corpus, [(236, 248)]))
    known = Manifest.load(corpus)
    share = Share(
        name=known.name,
        path=str(corpus),
        weight=1.0,
        tokens=known.tokens("train"),
        fingerprint=known.fingerprint(),
    )
    append(root / "blends.jsonl", BlendEntry(position=0, step=0, corpora=[share]))
    return root


def samples(root: Path) -> str:
    return (root / "0001" / "samples.txt").read_text()


@pytest.mark.slow
def test_they_are_those_of_the_run_without_its_names(run: Path, tmp_path: Path) -> None:
    publish(run, tmp_path / "public", Keeping(texts=True))
    publish(run, tmp_path / "named", Keeping(texts=True, names=True))
    write_incidents(run)
    ours, public = samples(run / "incidents"), samples(tmp_path / "public" / "incidents")
    assert samples(tmp_path / "named" / "incidents") == ours and ours.count("acmemails") > 12
    assert "corpus-1" in public and "shard-1" in public
    assert public == re.sub(r"acmemails-train-00000", "shard-1", ours).replace("acmemails", "corpus-1")
    assert [name for name, part in everything(tmp_path / "public") if PRIVATE in part] == []
    both = [
        json.loads((root / "incidents/0001/evidence.json").read_text()) for root in (run, tmp_path / "public")
    ]
    assert both[0]["tokens"] and both[0]["tokens"] == both[1]["tokens"] and both[1]["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: next(folder.glob("*train*.bin")).unlink(),
        lambda folder: next(folder.glob("*train*.idx")).write_bytes(b"x"),
        lambda folder: (folder / "manifest.json").write_text('{"name": "acmemails"}'),
        shutil.rmtree,
    ],
    ids=["a shard is gone", "an index is damaged", "no manifest", "all is gone"],
)
def test_messages_about_a_damaged_corpus_do_not_name_it(
    run: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    damage(tmp_path / "acmemails")
    publish(run, tmp_path / "public", Keeping(texts=True))
    assert [name for name, part in everything(tmp_path / "public") if PRIVATE in part] == []
    evidence = json.loads((tmp_path / "public" / "incidents" / "0001" / "evidence.json").read_text())
    assert evidence["problems"] and all("[withheld]" in problem for problem in evidence["problems"])
