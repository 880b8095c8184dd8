"""The quickstart's closing words: what became of the planted noise, from summary.json."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megastable.config.recipe import load
from megastable.data.plant import Planted, plant
from megastable_tools.prepare.prepare import prepare_shards
from tests.conftest import tiny
from tests.data.texts import documents, sentencepiece_file

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (ROOT / "launch/quickstart.sh").read_text()
SUMMARY = {
    "parameters": 5_245_696,
    "steps": 20,
    "tokens": 5120,
    "tokens_per_second": 9000.0,
    "world_size": 2,
    "zero_stage": 1,
    "first_loss": 8.347,
    "final_loss": 3.93,
    "val_loss": 3.79,
    "val_unigram_entropy": 6.21,
    "cursor": 160,
    "incidents": [],
}


def test_what_is_planted_is_what_the_recipe_trains_on() -> None:
    (corpus,) = load("launch/recipes/quickstart.yaml").data.corpora
    (line,) = re.findall(r"megastable prepare plant .*", SCRIPT)
    assert line.split()[3:5] == ["data/stdlib", str(corpus.path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Planted]:
    """Where the quickstart was called: data/stdlib, data/stdlib-planted and the recipe of a run on it."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "in").mkdir()
    for number, text in enumerate(documents(60)):
        (folder / "in" / f"{number:03d}.txt").write_text(text)
    clean, noisy = folder / "data/stdlib", folder / "data/stdlib-planted"
    prepare_shards([folder / "in"], clean, sentencepiece_file(folder), progress=False)
    config = tiny(Path("data/stdlib-planted"), folder / "run")
    planted, _ = plant(clean, noisy, config, step=10, samples=12)
    (folder / "run").mkdir()
    (folder / "run/recipe.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return folder, planted


def closing_words(folder: Path, **summary: Any) -> list[str]:
    (folder / "run/summary.json").write_text(json.dumps(SUMMARY | summary))
    done = subprocess.run(
        [sys.executable, "-m", "megastable.report.story", "run"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def incident(planted: Planted, **change: Any) -> dict[str, Any]:
    found = [document.model_dump() for document in planted.documents]
    known = {
        "class": "recoverable",
        "cause": "data",
        "action": "rewind",
        "positions": planted.positions,
        "documents": found,
        "steps_lost": 3,
        "batches_discarded": 1,
        "planted_documents": found,
        "seconds": 1.234,
        "step": 11,
        "outcome": "healed",
        "loss_before": 4.1,
        "loss_peak": 9.5,
    }
    return known | change


def test_the_story_of_an_incident_in_five_lines(folder: tuple[Path, Planted]) -> None:
    place, planted = folder
    ((first, end),) = planted.positions
    lines = closing_words(place, incidents=[incident(planted)])
    begin = lines.index(f"data/stdlib-planted has {planted}.") + 1
    seen, guilty, example, done, cost, after = lines[begin : begin + 6]
    assert seen == "step 11      the loss went from 4.10 to 9.50; recoverable, cause: data"
    assert f"samples {first}-{end - 1}: documents {planted.documents[0].document}, " in guilty
    assert guilty.endswith(", exactly the planted ones")
    noise, text = re.fullmatch(r"for example  (.+) instead of (.+)", example).groups()  # type: ignore[union-attr]
    shard = "".join(" ".join(text.split()) for text in documents(60))
    assert noise != text and text[3:20] in shard
    assert "skipped those samples" in done and done.endswith(": healed")
    assert cost == "cost         steps lost: 3, updates refused: 1"
    assert after == "" and lines[begin + 6].startswith("training loss    8.347 -> 3.930")
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.slow
def test_other_incidents_and_none(folder: tuple[Path, Planted]) -> None:
    place, planted = folder
    lines = closing_words(place, cursor=40)
    assert f"data/stdlib-planted has {planted}; the run ended before them." in lines
    assert "No incident." in lines

    foreign = planted.documents[0].model_copy(update={"document": 999}).model_dump()
    found = [*(document.model_dump() for document in planted.documents[1:]), foreign]
    nobody = incident(planted, cause="state", action="discard", positions=[], documents=[], loss_peak=None)
    lines = closing_words(
        place,
        val_loss=None,
        incidents=[
            incident(planted, documents=found),
            incident(planted, positions=[[n, n + 1] for n in range(1, 20, 2)], planted_documents=[]),
            nobody,
            nobody | {"action": None, "outcome": "open"},
        ],
    )
    count = len(planted.documents)
    guilty = [line for line in lines if line.startswith("guilty")]
    assert guilty[0].endswith(f"; {count - 1} of the {count} planted ones, 1 others")
    assert "samples 1, 3, 5, 7 and 6 more ranges: " in guilty[1] and "planted" not in guilty[1]
    assert len(guilty) == 2
    assert "step 11      something stood out; recoverable, cause: state" in lines
    assert "done         the updates were refused; the weights never saw them: healed" in lines
    assert "done         nothing: open" in lines
