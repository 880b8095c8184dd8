"""A run that is made of a checkpoint goes on with what people have changed live in the first one."""

from __future__ import annotations

from pathlib import Path

from megastable.checkpoint.whole import next_run_of, run_of
from megastable.convert.branching import branch
from megastable.convert.reshaping import reshape
from megastable.run.changes import changes_of, config_at
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMade, ChangeMeasured
from megastable.run.events.training_events import Imported
from megastable.run.log import RunLog
from tests.checkpoint.states import make_run


def test_what_holds_after_the_checkpoint_is_its_recipe(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path / "run", step=7)
    assert next_run_of(checkpoint) == run_of(checkpoint)
    log, lr = RunLog(RunDirectory(tmp_path / "run")), run_of(checkpoint).optimizer.lr
    for number, step, until, values in (
        (1, 8, None, {"optimizer.lr": lr / 4, "optimizer.clip": 0.25}), (2, 8, 9, {"optimizer.lr": lr / 2}),
        (3, 5, 7, {"model.z_loss": 0.5}), (4, 9, None, {"model.z_loss": 0.25}),
    ):  # fmt: skip
        log.emit(
            ChangeMade(step=step, until=until, change=str(number), who="ann", reason="because", new=values)
        )
    with log.run.journal.open("a") as file:
        file.write("not a line\n")
    assert len(changes_of(log.run.journal)) == 4
    found = next_run_of(checkpoint)
    assert (found.optimizer.lr, found.optimizer.clip) == (lr / 2, 0.25)
    assert found.model == run_of(checkpoint).model


def test_a_reshaped_run_goes_on_with_each_change_as_long_as_its_parent_would(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path / "run", step=7)
    log, lr = RunLog(RunDirectory(tmp_path / "run")), run_of(checkpoint).optimizer.lr
    for step, until, factor in ((5, 7, 8), (6, None, 4), (7, 9, 2)):
        values = {"optimizer.lr": lr / factor}
        log.emit(
            ChangeMade(step=step, until=until, change=str(step), who="ann", reason="because", new=values)
        )
    log.emit(ChangeMeasured(step=7, change="6", steps=2))
    log.emit(ChangeMeasured(step=9, change="7", steps=3))
    parent = changes_of(log.run.journal)
    recipe = run_of(reshape(checkpoint, tmp_path / "reshaped").checkpoint)
    made = changes_of(tmp_path / "reshaped/journal.jsonl")
    rates = [config_at(recipe, made, step).optimizer.lr for step in range(8, 12)]
    assert rates == [lr / 2, lr / 2, lr / 4, lr / 4]
    assert rates == [config_at(run_of(checkpoint), parent, step).optimizer.lr for step in range(8, 12)]
    assert [change.change for change in made] == ["6", "7"]
    first, *others = RunDirectory(tmp_path / "reshaped").events()
    assert isinstance(first, Imported) and isinstance(others[-1], ChangeMeasured)
    assert [event.event for event in others] == ["change_made", "change_made", "change_measured"]


def test_a_branch_has_in_its_recipe_what_holds_and_says_so(tmp_path: Path) -> None:
    checkpoint = make_run(tmp_path / "run", step=7, updates=7)
    log, lr = RunLog(RunDirectory(tmp_path / "run")), run_of(checkpoint).optimizer.lr
    for step, until, values in (
        (6, 20, {"optimizer.lr": lr / 4}),
        (7, None, {"schedule.kind": "constant", "schedule.warmup_steps": 0, "schedule.total_steps": None}),
    ):
        log.emit(
            ChangeMade(step=step, until=until, change=str(step), who="ann", reason="because", new=values)
        )
    made = branch(checkpoint, tmp_path / "branch", 4)
    assert made.rate == run_of(made.made.checkpoint).optimizer.lr == lr / 4
    assert changes_of(tmp_path / "branch/journal.jsonl") == []
    assert f"optimizer.lr={lr / 4}" in made.changes
    assert f"for good in the branch's recipe: optimizer.lr={lr / 4}." in made.text
