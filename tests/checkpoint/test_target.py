"""What is made of a checkpoint never lies over something else, nor in a checkpoint, which it would damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastable.base.errors import CheckpointError
from megastable.checkpoint.new_run import refuse_existing


def test_where_something_new_may_be(tmp_path: Path) -> None:
    step = tmp_path / "run/checkpoints/step-5"
    step.mkdir(parents=True)
    for path in (tmp_path / "run/recipe.yaml", step / "manifest.json", step / "state.json"):
        path.touch()
    copied = tmp_path / "copied"
    step.rename(copied)
    (tmp_path / "dangling").symlink_to("nowhere")
    for good in ("new", "run/exported", "checkpoints/new", "a/b/c"):
        refuse_existing(tmp_path / good)
    for bad, why in (
        ("run", "exists already"),
        ("dangling", "exists already"),
        ("run/checkpoints/new", "would lie in .*run/checkpoints"),
        ("run/checkpoints/step-9/a/b", "would lie in .*run/checkpoints"),
        ("copied/new", "would lie in .*copied"),
        ("x" * 300, "cannot be made: File name too long"),
    ):
        with pytest.raises(CheckpointError, match=why):
            refuse_existing(tmp_path / bad)


def test_a_path_from_here_is_looked_at_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("manifest.json", "state.json"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="would lie in"):
        refuse_existing(Path("new"))
