"""Trouble that a branch without any change goes through is waited for: nothing is undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import BranchesTried
from tests.conftest import write_corpus
from tests.distributed import run_ranks
from tests.recovery.test_recovery import LAYOUTS, incidents, recipe, train_spoilt


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that is learnt quickly; by its name, which decides the order, a trial finds the window harmless."""
    folder = tmp_path_factory.mktemp("waiting") / "easy0"
    write_corpus(folder, ids=20)
    return folder


def run(easy: Path, folder: Path, layout: str, always: bool, wait: int) -> dict[str, Any]:
    """The first incident."""
    world, parts = LAYOUTS[layout]
    train = {**parts.get("train", {}), "steps": 110, "eval_samples": 0}
    stability = {"policy": {"wait": wait, "verify_steps": 10}}
    config = recipe(easy, folder, **{**parts, "train": train}, stability=stability)
    # The last norm is larger at once, which is unlearnt in some steps.
    ends = run_ranks(world, train_spoilt, config, 66, "final_norm.weight", 3.0, "weight", always)
    assert [code for code, _ in ends] == [0] * world
    return incidents(folder)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "pp2"])
def test_what_heals_in_a_branch_is_waited_for(layout: str, easy: Path, tmp_path: Path) -> None:
    waited = run(easy, tmp_path / "run", layout, True, 30)
    assert waited["actions"][0] == "wait" and "rewind" not in waited["actions"]
    assert (waited["outcome"], waited["steps_lost"]) == ("healed", 0)
    assert not waited["positions"] and not waited["deferred"] and "heals by itself" in waited["reasons"][0]
    tried = [e for e in RunDirectory(tmp_path / "run").events(BranchesTried) if e.get("chosen") == "nothing"]
    assert "make it again" in tried[0]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(("always", "wait"), [(False, 30), (True, 0)], ids=["once", "without"])
def test_what_the_same_steps_do_not_make_again_is_undone(
    always: bool, wait: int, easy: Path, tmp_path: Path
) -> None:
    """They would not heal it, either. Without `policy.wait` nothing is waited for."""
    assert run(easy, tmp_path / "run", "one", always, wait)["actions"][0] == "rewind"
