"""The supervisor's look ahead: a real run on a corpus with noise in it, which it never meets."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megastable.cluster.child_process import ChildProcess
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.supervise import beside_process
from megastable.supervise.beside_process import look_ahead
from tests.forensics.test_ahead import clean, left_out, planted
from tests.forensics.test_history import events_of, positions_of
from tests.patience import PATIENCE
from tests.supervise.test_supervisor import Supervised

__all__ = ["clean"]  # the fixture


@pytest.mark.slow
def test_a_supervised_run_never_meets_what_was_planted(clean: Path, tmp_path: Path) -> None:
    config, bad = planted(clean, tmp_path, "random", 20)
    given = Supervised(config, tmp_path, steps=32)
    given.start()
    assert given.finish() == 0, given.output.read_text()
    run = given.run
    skipped = left_out(config, run)
    assert skipped.count() >= 18 and all(bad.contains(p) for a, b in skipped.ranges for p in range(a, b))
    trained = positions_of(run.root)
    assert not [p for p in trained if skipped.contains(p)] and max(trained) > 19 * 16 + 20
    told = events_of(run.root)
    assert {"looked_ahead"} <= {e["event"] for e in told} and not [
        e for e in told if e["event"] == "incident"
    ]
    assert "ahead of the run: " in given.output.read_text()
    assert not json.loads(run.summary.read_text())["incidents"]


@pytest.mark.slow
def test_one_that_fails_is_started_again_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_process, "AGAIN", 0.0)
    monkeypatch.setattr(beside_process, "TRIES", 2)
    said: list[str] = []
    config = RunConfig.model_validate({"data": {"look_ahead": {"steps": 5}}})
    process = look_ahead(config, RunDirectory(tmp_path), "no-such-recipe.yaml", [], said.append)
    until = time.monotonic() + PATIENCE
    while sum("ended with 2" in line for line in said) < 2 and time.monotonic() < until:
        process.poll()
        time.sleep(0.05)
    process.poll()
    process.close()
    assert [line.rpartition("; ")[2] for line in said if "ended with 2" in line] == [
        "again in a minute", "not again: what comes is trained on unseen",
    ]  # fmt: skip
    assert any("no such recipe" in line for line in said)


@pytest.mark.slow
def test_one_that_fails_while_it_is_waited_for_is_started_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_process, "TRIES", 2)
    said: list[str] = []
    config = RunConfig.model_validate({"data": {"look_ahead": {"steps": 5}}})
    process, looks = (
        look_ahead(config, RunDirectory(tmp_path), "no-such-recipe.yaml", [], said.append),
        list[int](),
    )
    process.finish(lambda: looks.append(1), lambda: False)
    assert not process.unfinished and looks
    told = [line.rpartition("; ")[2] for line in said if "ended with 2" in line]
    assert told == [*["again"] * (beside_process.TRIES - 1), "not again: what comes is trained on unseen"]


@pytest.mark.slow
def test_failures_that_are_far_apart_do_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_process, "LONG", -1.0)
    config = RunConfig.model_validate({"data": {"look_ahead": {"steps": 5}}})
    process = look_ahead(config, RunDirectory(tmp_path), "no-such-recipe.yaml", [], lambda text: None)
    polls = 0

    def enough() -> bool:
        nonlocal polls
        polls += 1
        return polls > 2 * beside_process.TRIES

    monkeypatch.setattr(beside_process, "background", _refuse)
    process.finish(lambda: None, enough)
    assert process.unfinished


def _refuse(*arguments: object) -> ChildProcess:
    raise OSError("no more processes")


def test_one_that_cannot_be_started_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_process, "background", _refuse)
    said: list[str] = []
    config = RunConfig.model_validate({"data": {"look_ahead": {"steps": 5}}})
    process = look_ahead(config, RunDirectory(tmp_path), "x", [], said.append)
    process.finish(lambda: None, lambda: False)
    assert len(said) == beside_process.TRIES and "cannot be started: no more processes" in said[0]


@pytest.mark.slow
def test_one_whose_supervisor_died_while_it_started_ends(clean: Path, tmp_path: Path) -> None:
    config, _ = planted(clean, tmp_path, "random", 20)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-m", "megastable_tools.forensics.prescan", "--parent", str(gone.pid)]
    assert not subprocess.run([*command, str(tmp_path / "run"), str(recipe)], timeout=PATIENCE).returncode


def test_a_recipe_that_wants_none_starts_none(tmp_path: Path) -> None:
    process = look_ahead(RunConfig(), RunDirectory(tmp_path), "x", [], print)
    process.poll()
    process.close()
    assert not (tmp_path / "logs").exists()
