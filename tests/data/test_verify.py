"""Any change to any file of a corpus is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastable.base.errors import DataError
from megastable_tools.prepare.prepare import prepare_shards
from megastable_tools.prepare.verify import verify_corpus
from tests.data.texts import documents, sentencepiece_file


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(30)))
    prepare_shards([lines], tmp_path / "out", sentencepiece_file(tmp_path), name="n", validation=0.2)
    return tmp_path / "out"


FILES = [
    "n-train-00000.bin",
    "n-train-00000.idx",
    "n-validation-00000.bin",
    "n-validation-00000.idx",
    "tokenizer.model",
]


def test_a_whole_corpus_passes(corpus: Path) -> None:
    made = verify_corpus(corpus)
    assert made.action == "verified"
    assert sum(made.documents.values()) == 30


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_every_damage_is_found(corpus: Path, name: str, damage: str) -> None:
    path = corpus / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[-1 if name.endswith(".bin") else len(content) // 2] ^= 1
        path.write_bytes(content if damage == "flip" else content[:-2])
    with pytest.raises(DataError, match=name.split(".")[0]):
        verify_corpus(corpus)


def test_splits_that_cut_documents_are_found(corpus: Path) -> None:
    manifest = json.loads((corpus / "manifest.json").read_text())
    manifest["splits"]["train"][0]["tokens"] -= 1
    (corpus / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="split 'train'"):
        verify_corpus(corpus)
