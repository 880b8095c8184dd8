"""Settings that a person changes while a run trains: from which step, on all ranks, and after whatever happens then."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megastable.base import durable
from megastable.base.errors import DataError, SpaceError
from megastable.checkpoint.vitals import bound_moment_ratio
from megastable.checkpoint.whole import run_of
from megastable.config.tree import RunConfig
from megastable.data.plant import Planted
from megastable.run import changes, records
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMade, ChangeMeasured, ChangeRefused
from megastable.run.events.stability_events import (
    Discarded,
    IncidentEvent,
    IncidentLater,
)
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog
from megastable.training.checkpoints import Checkpoints
from megastable.training.heartbeat import WatchedFile
from megastable.training.live_changes import Effects, Level, LiveChanges
from tests.checkpoint.states import make_run
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.recovery.test_recovery import FIRST_BAD, hit_and_told, incidents, planted, recipe
from tests.training.test_resume import identical

__all__ = ["planted"]

Row = tuple[int, float, float, float, float]


def small(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    return tiny(
        corpus, run,
        **{"train": {"steps": 12, "eval_samples": 0}, "model": {"layers": 1}, "checkpoint": {"interval": 4},
           "optimizer": {"lr": 3e-3}} | parts,
    )  # fmt: skip


def train_with(config: RunConfig, at: dict[int, Callable[[RunDirectory], None]]) -> list[Row]:
    """Train; before the update of a step, rank 0 calls a function. What the engine of this rank was given at every
    step: step, rate, weight decay, clipping, factor of z-loss."""
    import torch.distributed as dist

    from megastable.engine.engine import Engine
    from megastable.recovery.recovery import Recovery
    from megastable.train import train

    real, begin, seen = Engine.train_step, Recovery.prepare_step, list[Row]()
    now = 0

    def begins(self: Recovery, state: Any, *args: Any) -> None:
        nonlocal now
        now = state.step + 1
        begin(self, state, *args)

    def step(self: Engine, batches: Any, lr: float, *args: Any) -> Any:
        decay = max(group["weight_decay"] for group in self.optimizer.param_groups)
        seen.append((now, lr, decay, self.optimizer.clip_grad, self.loss.z_loss))
        if now in at and dist.get_rank() == 0:
            at[now](RunDirectory(config.run.dir))
        return real(self, batches, lr, *args)

    Engine.train_step, Recovery.prepare_step = step, begins  # type: ignore[method-assign, assignment]
    try:
        train(config, Path("recipe.yaml"))
        return seen
    finally:
        Engine.train_step, Recovery.prepare_step = real, begin  # type: ignore[method-assign]


def asks(run: RunDirectory, values: dict[str, Any], until: int | None = None) -> None:
    """As the command does; and wait until the heartbeat has seen it."""
    changes.ask_change(run.changes, values, "because", "ann", until)
    time.sleep(0.4)


def ask_twice(run: RunDirectory) -> None:
    asks(run, {"optimizer.lr": 1e-3, "model.z_loss": 1e-3})
    asks(run, {"optimizer.clip": 0.25, "optimizer.weight_decay": 0.2}, until=9)


def ask_wrongly(run: RunDirectory) -> None:
    asks(run, {"train.steps": 5})


def held(config: RunConfig, first: int, last: int) -> list[Row]:
    """Rate (of the recipe, and a third of it from step `first` on), ..."""
    from megastable.optim.schedule import list_rates

    peak = config.optimizer.lr
    found = list[Row]()
    for step, rate in enumerate(list_rates(config), start=1):
        late, both = step >= first, first <= step <= last
        found.append((
            step, rate * (1e-3 / peak if late else 1), 0.2 if both else 0.1, 0.25 if both else 1.0,
            1e-3 if late else 1e-4,
        ))  # fmt: skip
    return found


def close(rows: list[Row], wanted: list[Row]) -> bool:
    return len(rows) == len(wanted) and all(a == pytest.approx(b) for a, b in zip(rows, wanted, strict=True))


def test_a_change_holds_from_the_next_step_on_and_is_undone_at_its_end(corpus: Path, tmp_path: Path) -> None:
    config = small(corpus, tmp_path / "run")
    [seen] = run_ranks(1, train_with, config, {5: ask_twice, 7: ask_wrongly})
    assert close(seen, held(config, 6, 9))
    run = RunDirectory(tmp_path / "run")
    first, second = run.iterate_events(ChangeMade)
    assert (first.step, first.until, first.who, first.reason) == (6, None, "ann", "because")
    assert first.old == {"optimizer.lr": 3e-3, "model.z_loss": 1e-4} and (second.step, second.until) == (6, 9)
    assert first.loss is not None and first.grad_norm is not None and first.asked is not None
    [refused] = run.iterate_events(ChangeRefused)
    assert refused.step == 7 and "train.steps" in str(refused.problem)
    # The record says what held; and what became of it: at its end, and at that of the run.
    rows = records.read_newest_records(run.steps).to_pylist()
    assert [row["lr"] for row in rows] == pytest.approx([row[1] for row in seen])
    assert [row["z_loss"] / row["z"] ** 2 for row in rows] == pytest.approx([row[4] for row in seen])
    told = list(run.iterate_events(ChangeMeasured))
    assert [(e.step, e.steps, e.change) for e in told] == [(9, 4, second.change), (12, 7, first.change)]
    assert all(e.loss_before and e.loss_after and e.norm_before and e.norm_after for e in told)


def make_live(run: RunDirectory, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> LiveChanges:
    """Of rank 0, without an engine."""
    monkeypatch.setattr("megastable.training.live_changes.run_on_first", lambda action: action())
    run.root.mkdir(exist_ok=True)
    engine: Any = SimpleNamespace(follow_config=lambda config: None)
    return LiveChanges(config, run, engine, RunLog(run), WatchedFile(run.changes, denials=True))


def test_a_change_that_the_journal_does_not_take_is_not_made_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would train the same steps without it."""
    run = RunDirectory(tmp_path / "run")
    live = make_live(run, small(tmp_path, run.root), monkeypatch)
    for rate in (1e-3, 1e-4):
        changes.ask_change(run.changes, {"optimizer.lr": rate}, "why", "ann", None)
    real, full = durable.append_line, True

    def append(path: Path, line: str) -> None:
        if full:
            raise DataError(f"{path} could not be written: no space")
        real(path, line)

    monkeypatch.setattr(durable, "append_line", append)
    for step in (3, 4):
        live.file.has_news = False
        live.read_requests(step)
        assert live.made == [] and live.file.has_news
    full = False
    live.read_requests(5)
    assert [event.step for event in live.made] == [6, 6] and not live.file.has_news
    assert [event.change for event in run.iterate_events(ChangeMade)] == [event.change for event in live.made]
    [warned] = run.iterate_events(Warned)
    assert warned.step == 3 and "wait until it can" in str(warned.text)
    full = True
    with pytest.raises(SpaceError):
        make_live(run, small(tmp_path, run.root), monkeypatch).follow_recipe(["optimizer.lr: 1 -> 2"], 6)


def test_a_checkpoint_is_judged_by_all_betas_that_its_moments_may_be_of(tmp_path: Path) -> None:
    """Moments made under live betas look inconsistent under the recipe's, and a good one would be quarantined."""
    found, run = make_run(tmp_path / "run", step=7), RunDirectory(tmp_path / "run")
    recipe = run_of(found).optimizer.betas
    values = {"optimizer.betas": [0.5, 0.6]}
    RunLog(run).emit_event(ChangeMade(step=3, until=6, change="1", reason="because", new=values,
                                old={"optimizer.betas": list(recipe)}))  # fmt: skip
    RunLog(run).emit_event(ChangeMade(step=4, change="2", reason="because", new={"optimizer.lr": 1e-3}))
    of_run: Any = SimpleNamespace(run=run)
    betas = Checkpoints._betas(of_run, found)
    assert set(betas) == {recipe, (0.5, 0.6)}
    # The bound that the live ones need is another one.
    strange = 0.5, 0.2501
    RunLog(run).emit_event(
        ChangeMade(step=8, change="3", reason="because", new={"optimizer.betas": list(strange)})
    )
    assert (
        bound_moment_ratio(*Checkpoints._betas(of_run, found))
        == bound_moment_ratio(strange)
        > bound_moment_ratio(*betas)
    )
    assert set(Checkpoints._betas(of_run, tmp_path / "none")) == {recipe, (0.5, 0.6), strange}


def kill(run: RunDirectory) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("ended", [6, 7, 11])
def test_after_a_kill_all_ranks_hold_at_every_step_what_they_held_before(
    ended: int, corpus: Path, tmp_path: Path
) -> None:
    """Four ranks, two stages. Killed in the step of the change itself, later, and after its end; resumed from the
    checkpoint of step 4, before the change, or of step 8. The run ends with the bytes of one that was not killed."""
    layout = {"parallel": {"pipeline": 2}, "model": {"layers": 2}}
    config = small(corpus, tmp_path / "killed", **layout)
    with pytest.raises(AssertionError, match="ended"):
        run_ranks(4, train_with, config, {5: ask_twice, ended: kill})
    run = RunDirectory(tmp_path / "killed")
    made = list(run.iterate_events(ChangeMade))
    assert [(e.step, e.until) for e in made] == [(6, None), (6, 9)]
    ranks = run_ranks(4, train_with, config, {})
    begin = ranks[0][0][0]
    assert begin in ((5, 9) if ended > 8 else (1, 5))  # the newest checkpoint may not be complete yet
    assert all(close(seen, held(config, 6, 9)[begin - 1 :]) for seen in ranks)
    assert list(run.iterate_events(ChangeMade)) == made
    rows = {row["step"]: row for row in records.read_newest_records(run.steps).to_pylist()}
    assert [rows[step]["lr"] for step in range(begin, 13)] == pytest.approx([row[1] for row in ranks[0]])
    # A run whose journal says so from the start.
    other = RunDirectory(tmp_path / "other")
    other.root.mkdir()
    other.journal.write_text("".join(json.dumps(dict(e.fields)) + "\n" for e in made))
    whole = small(corpus, other.root, **layout)
    assert all(close(seen, held(config, 6, 9)) for seen in run_ranks(4, train_with, whole, {}))
    assert identical(*(r.checkpoints / "step-12" for r in (run, other))) >= 4


@pytest.mark.slow
def test_a_rewind_over_a_change_trains_each_step_with_what_held_there(
    planted: tuple[Path, Planted], tmp_path: Path
) -> None:
    """A run that meets bad data while a change holds, and goes back to before it, ends with the bytes of one that was
    told to leave that data out."""
    layout = {"model": {"layers": 2}, "train": {"micro_batch": 2}, "optimizer": {"lr": 1e-2}}
    configs = [recipe(planted[0], tmp_path / name, **layout) for name in ("hit", "told")]
    values = {
        "optimizer.lr": 4e-3,
        "optimizer.clip": 0.5,
        "optimizer.betas": [0.9, 0.9],
        "model.z_loss": 1e-3,
    }
    for config in configs:
        assert config.run.dir is not None
        config.run.dir.mkdir()
        request = changes.ChangeRequest(id="1", time=0.0, reason="because", values=values, until=33)
        RunLog(RunDirectory(config.run.dir)).emit_event(
            changes.answer_request(request, config, [], FIRST_BAD - 1, None)
        )
    assert run_ranks(2, hit_and_told, *configs) == [((0, ""), (0, ""))] * 2
    [later] = RunDirectory(tmp_path / "hit").iterate_events(IncidentLater)
    assert later.number == 1 and later.step == 50 and later.at_end and later.loss is not None
    [back] = incidents(tmp_path / "hit", "rewound")
    assert back["to_step"] < FIRST_BAD and incidents(tmp_path / "told") == []
    assert identical(*(tmp_path / name / "checkpoints/step-50" for name in ("hit", "told"))) >= 3
    again = records.read_newest_records(tmp_path / "hit/steps").to_pylist()
    at = {step: [row["lr"] for row in again if row["step"] == step] for step in (30, 31, 33, 34)}
    assert at[31][0] < 0.5 * at[30][0] and at[34][0] > 2 * at[33][0]
    assert all(len(set(rates)) == 1 for rates in at.values())
    assert FIRST_BAD in [e.step for e in RunDirectory(tmp_path / "hit").iterate_events(Discarded)]


def done(step: int, loss: float, applied: bool = True) -> Any:
    measured = SimpleNamespace(loss=loss, grad_norm=1.0)
    return SimpleNamespace(state=SimpleNamespace(step=step), measured=measured, applied=applied)


def test_effects_are_told_once_over_restarts_and_rewinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megastable.training.live_changes.run_on_first", lambda action: action())
    run = RunDirectory(tmp_path)
    log = RunLog(run)

    def closes(number: int, step: int, outcome: str = "healed", verdict: str = "spike") -> None:
        summary = {"number": number, "outcome": outcome, "verdict": verdict}
        log.emit_event(IncidentEvent(what="closed", step=step, number=number, summary=summary))

    def process(first: int, last: int, closed: dict[int, int], ends: bool = False) -> None:
        incidents: Any = SimpleNamespace(closed={})
        changes: Any = SimpleNamespace(level=Level(), made=list(run.iterate_events(ChangeMade)))
        effects = Effects(run, changes, incidents, log)
        for step in range(first, last + 1):
            incidents.closed |= {number: at for number, at in closed.items() if at == step}
            effects.note_step(done(step, 1000.0 - step))
        if ends:
            effects.finish_run(last)

    for change, until in (("a", {}), ("b", {"until": 70}), ("c", {})):
        log.emit_event(
            ChangeMade(step=699 if change == "c" else 61, change=change, loss=2.0, new={"k": 1}, **until)
        )
    closes(1, 50)
    closes(2, 60, outcome="open")
    closes(3, 61, verdict="crash")
    process(51, 149, {})
    process(120, 400, {4: 130})  # from an older checkpoint
    closes(4, 130)
    process(380, 700, {}, ends=True)
    process(690, 700, {}, ends=True)
    changed = [(e.change, e.step, e.steps, e.loss_after) for e in run.iterate_events(ChangeMeasured)]
    assert changed == [("b", 70, 10, 1000 - 65.5), ("a", 160, 100, 1000 - 150.5), ("c", 700, 2, 1000 - 699.5)]
    told = [(e.number, e.step, e.after, bool(e.at_end)) for e in run.iterate_events(IncidentLater)]
    assert told == [
        (1, 150, 100, False), (4, 230, 100, False), (1, 550, 500, False), (4, 630, 500, False),
        (1, 700, 650, True), (4, 700, 570, True),
    ]  # fmt: skip
    assert next(e.loss for e in run.iterate_events(IncidentLater)) == 1000 - 140.5
