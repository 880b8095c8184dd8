"""What an evaluation has written, and which checkpoint is next: tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megastable.base.errors import DataError
from megastable.config.downstream import LM_EVAL, EvalConfig
from megastable.downstream.evaluator import MOST, SavedCheckpoint, next_due, read_scores, scores_of

HARNESS = {
    "results": {
        "arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1, "sample_len": 9}
    },
    "config": {"model": "hf", "limit": 3},
}


@pytest.mark.parametrize(
    ("content", "scores"),
    [
        (HARNESS, {"arc/acc": 0.5, "arc/em,strict": 1.0}),
        ({"a": 1, "b": 0.5}, {"a": 1.0, "b": 0.5}),
        ({"a": {"x": 1}, "b": "no", "c": True, "d": float("nan"), "e": None}, {"a/x": 1.0}),
        ({"results": 5}, {"results": 5.0}),
        ([1, 2], {}), (None, {}), ({}, {}), ({"results": {}}, {}),
    ],
)  # fmt: skip
def test_scores(content: Any, scores: dict[str, float]) -> None:
    assert scores_of(content) == scores


def test_the_newest_file_below_a_folder_counts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no results"):
        read_scores(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/results_2026.json").write_text(json.dumps(HARNESS))
    (tmp_path / "samples.json").write_text("{")
    assert read_scores(tmp_path) == {"arc/acc": 0.5, "arc/em,strict": 1.0}
    (tmp_path / "results.json").write_text(json.dumps({str(n): n for n in range(MOST + 1)}))
    with pytest.raises(DataError, match="1,001 numbers"):
        read_scores(tmp_path)
    for text, problem in (("{", "is no JSON"), ("[1]", "has no numbers"), ("[" * 100_000, "is no JSON")):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(DataError, match=problem):
            read_scores(tmp_path)


def at(*steps: int, manifest: str = "a") -> list[SavedCheckpoint]:
    return [SavedCheckpoint(f"step-{step}", step, manifest) for step in steps]


@pytest.mark.parametrize(
    ("there", "settled", "due", "passed"),
    [
        ([], [], None, []),
        (at(25, 50, 75), [], None, []),  # before the first multiple of 100
        (at(50, 120, 150), [], 120, []),  # the first one after it
        (at(100, 200, 300), [], 300, [100, 200]),
        (at(100, 200, 300), [(300, "a")], 200, [100]),
        (at(100, 200), [(100, "a"), (200, "a")], None, []),
        (at(150), [(100, "a")], None, []),  # 100 was deleted
        (at(200, manifest="b"), [(100, "a"), (200, "a")], 200, []),  # after a rewind
        (at(950, 1000), [(900, "a")], 1000, []),  # the last one
        (at(930, 1000), [(900, "a"), (1000, "a")], None, []),
        (at(1000, 1010), [(1000, "a")], 1010, []),
    ],
)  # fmt: skip
def test_the_next_checkpoint(
    there: list[SavedCheckpoint], settled: list[tuple[int, str]], due: int | None, passed: list[int]
) -> None:
    found, older = next_due(there, settled, 100, 1000)
    assert (found.step if found else None, [one.step for one in older]) == (due, passed)


def test_places_in_a_command() -> None:
    words = EvalConfig(command=LM_EVAL).words(Path("/a b"), Path("/r/results.json"), 7)
    assert words[:6] == ["lm_eval", "run", "--model", "hf", "--model_args", "pretrained=/a b"]
    assert words[-2:] == ["--output_path", "/r/results.json"]
    for command in ("x", "x {model}", "x '{model} {results}", " "):
        with pytest.raises(ValidationError):
            EvalConfig(command=command)
