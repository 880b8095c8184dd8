"""A final decay from any checkpoint of the constant phase: the parent's run in all but the rate."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest

from megastable.base.errors import ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.whole import next_run_of, run_of
from megastable.config import recipe
from megastable.config.lint import lint
from megastable.config.tree import RunConfig
from megastable.optim.schedule import rate
from megastable.recovery.persisted_state import PersistedState
from megastable.run import records
from megastable.run.changes import changes_of, config_at
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMade, ChangeMeasured
from megastable.run.events.training_events import Imported
from megastable.run.log import RunLog
from megastable_guard.guard import GuardState
from megastable_guard.learning_rate_limits import Limit
from megastable_guard.policy_state import PolicyState
from megastable_tools.convert.branching import branch, decaying, limits_of
from megastable_tools.convert.reshaping import reshape
from tests.checkpoint.states import make_run, state_of
from tests.conftest import tiny
from tests.distributed import run_ranks, train
from tests.training.test_resume import identical

PEAK, AT, STEPS = 3e-3, 6, 12  # of the parent: it is branched at step AT
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero1-dp2": (2, {}),
    "zero3-dp2": (2, {"parallel": {"zero": 3}}),
    "pp2-fp16": (2, {"parallel": {"pipeline": 2}, "precision": {"kind": "fp16", "initial_scale_power": 8}}),
}


def parent_of(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    """Constant after 3 updates, with checkpoints every 3 steps; some data is skipped after step AT."""
    defaults: dict[str, Any] = {
        "schedule": {"kind": "constant", "warmup_steps": 3, "total_steps": None},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 2, "eval_samples": 0, "eval_interval": 0},
        "checkpoint": {"interval": 3, "keep": 9},
        "data": {"skip": [[60, 70]]},
    }
    return tiny(corpus, run, **{**defaults, **parts})


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*")) if p.is_file()
    }  # fmt: skip


def told(run: Path, first: int = AT + 1) -> list[dict[str, Any]]:
    """What steps recorded, without the time that they took."""
    columns = ("step", "loss", "grad_norm", "lr", "first_position", "next_position", "applied")
    rows = records.read(run / "steps").to_pylist()
    return [{c: row[c] for c in columns} for row in rows if row["step"] >= first]


@pytest.fixture(scope="module")
def parent(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("parent") / "run"
    assert run_ranks(1, train, parent_of(corpus, run)) == [0]
    return run


def constant(run: Path, *overrides: str) -> RunConfig:
    return recipe.load(run / "recipe.yaml", ["schedule.kind=constant", *overrides])


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_but_for_its_schedule_a_branch_is_its_parent(name: str, corpus: Path, tmp_path: Path) -> None:
    """With a constant rate it ends with the parent's bytes, and the parent stays as it is."""
    world, parts = LAYOUTS[name]
    run, out = tmp_path / "run", tmp_path / "out"
    assert run_ranks(world, train, parent_of(corpus, run, **parts)) == [0] * world
    before = files_of(run)
    made = branch(run / f"checkpoints/step-{AT}", out, STEPS - AT)
    assert made.made.layout == store.read_state(run / f"checkpoints/step-{AT}").layout
    assert run_ranks(world, train, constant(out)) == [0] * world
    assert identical(run / f"checkpoints/step-{STEPS}", out / f"checkpoints/step-{STEPS}") >= 3
    assert told(out) == told(run) and len(told(out)) == STEPS - AT
    assert files_of(run) == before


SHAPES = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "sqrt": lambda done: 1 - math.sqrt(done),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
def test_the_rate_goes_on_and_decays_to_the_floor(kind: Any, parent: Path, tmp_path: Path) -> None:
    made = branch(parent / f"checkpoints/step-{AT}", tmp_path / "out", 4, kind, 0.2)
    assert (made.rate, made.floor, made.steps, made.limits) == (PEAK, 0.2 * PEAK, AT + 4, ())
    run = recipe.load(tmp_path / "out/recipe.yaml")
    assert run_ranks(1, train, run) == [0]
    rows = told(tmp_path / "out")
    wanted = [PEAK * (0.2 + 0.8 * SHAPES[kind](n / 4)) for n in range(4)]
    assert [row["step"] for row in rows] == [7, 8, 9, 10]
    assert [row["lr"] for row in rows] == pytest.approx(wanted, rel=1e-6)
    assert rate(run.schedule, PEAK, AT + 4, AT + 4) == pytest.approx(0.2 * PEAK)
    # The first update is the parent's next one.
    assert rows[0] == told(parent)[0] | {"lr": pytest.approx(PEAK)}


# The recipe of a branch


def at(step: int, updates: int | None = None, **schedule: Any) -> tuple[RunConfig, store.RunState]:
    given = {"warmup_steps": 10, "kind": "constant"} | schedule
    run = RunConfig.model_validate({"schedule": given, "train": {"steps": 100}, "optimizer": {"lr": PEAK}})
    return run, state_of((1, 1, 1, 1)).model_copy(
        update={"step": step, "updates": step if updates is None else updates}
    )


def test_only_schedule_and_length_differ() -> None:
    run, state = at(50)
    made = decaying(run, state, 20, "cosine")
    assert made.schedule.model_dump() == run.schedule.model_dump() | {
        "kind": "wsd", "decay": "cosine", "decay_steps": 20, "total_steps": 70
    }  # fmt: skip
    assert made.train.steps == 70
    same = {"schedule": run.schedule, "train": run.train}
    assert made.model_copy(update=same) == run
    assert lint(made) == lint(run)


@pytest.mark.parametrize("updates", [10, 11, 37, 50])
def test_refused_updates_do_not_count(updates: int) -> None:
    """The schedule counts applied updates, the run its steps."""
    run, state = at(50, updates)
    made = decaying(run, state, 20)
    rates = [rate(made.schedule, PEAK, made.schedule.total_steps or 0, updates + n) for n in range(21)]
    assert rates == pytest.approx([PEAK * (1 - 0.9 * n / 20) for n in range(21)])
    assert made.train.steps == 70 and (lint(made) == lint(run)) == (updates == 50)


@pytest.mark.parametrize(
    ("step", "schedule", "problem"),
    [
        (9, {}, "in the warm-up, of 10 updates"),
        (11, {"kind": "cosine"}, "past the constant phase of schedule.kind=cosine"),
        (50, {"kind": "linear"}, "the rate is 0.0018, the peak 0.003"),
        (91, {"kind": "wsd"}, "past the constant phase"),
        (61, {"kind": "wsd", "decay_steps": 40}, "past the constant phase"),
        (100, {"kind": "wsd", "total_steps": 90}, "past the constant phase"),
    ],
)
def test_where_the_rate_would_jump_it_is_refused(step: int, schedule: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        decaying(*at(step, **schedule), 20)
    assert f"step {step} ({step} updates)" in str(error.value) and "Branch at" in str(error.value)


@pytest.mark.parametrize(
    ("step", "schedule"),
    [
        (10, {}),
        (90, {"kind": "wsd"}),
        (60, {"kind": "wsd", "decay_steps": 40}),
        (500, {}),
        (95, {"kind": "wsd", "total_steps": 900}),
    ],
)
def test_the_ends_of_the_constant_phase_count(step: int, schedule: dict[str, Any]) -> None:
    made = decaying(*at(step, **schedule), 20)
    assert rate(made.schedule, PEAK, step + 20, step) == pytest.approx(PEAK)
    assert rate(made.schedule, PEAK, step + 20, step + 1) == pytest.approx(PEAK * (1 - 0.9 / 20))


def test_nothing_to_decay_over() -> None:
    with pytest.raises(ConfigError, match="at least one update"):
        decaying(*at(50), 0)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({}, ()),
        ({"limits": [Limit(kind="cut", value=0.5, updates=5, clock=5)]},
         ("the learning rate is multiplied by 0.5",)),
        ({"limits": [Limit(kind="cut", value=0.5, updates=5, clock=5, lifted=8)]}, ()),
        ({"limits": [Limit(kind="cut", value=0.5, updates=5, clock=5, lifted=8, lifted_updates=25)]},
         ("the learning rate warms up: 0.75 times the scheduled one at first",)),
        ({"rewound": 49}, ("the learning rate warms up: 0.19 times the scheduled one at first",)),
    ],
)  # fmt: skip
def test_limits_in_force_are_told(policy: dict[str, Any], words: tuple[str, ...]) -> None:
    run, state = at(50)
    tree = run.model_dump(mode="json")
    tree["stability"]["policy"]["rewind_warmup"] = 10
    memory = PersistedState(guard=GuardState(policy=PolicyState(**policy)))
    state = state.model_copy(update={"stability": memory.model_dump()})
    assert limits_of(RunConfig.model_validate(tree), state) == words
    tree["stability"]["dry_run"] = True
    assert limits_of(RunConfig.model_validate(tree), state) == ()
    assert limits_of(run, state.model_copy(update={"stability": {"guard": {"of": "another version"}}})) == ()


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
