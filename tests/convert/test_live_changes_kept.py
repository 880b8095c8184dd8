"""A run that is made of a checkpoint goes on with what people have changed live in the first one."""

from __future__ import annotations

from pathlib import Path

from megastable.checkpoint.whole import next_run_of, run_of
from megastable.run.changes import changes_of
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMade
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
