"""A router that something else than its updates changes: named by layer and expert, and undone to the byte."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from drills.scenario import Fault, Plan
from megastable.base.collectives import gather_objects
from megastable.checkpoint import store
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import BranchesTried, SettingsAdjusted, TrendEvent
from megastable.run.events.training_events import Warned
from tests.distributed import run_ranks
from tests.engine.test_gate import trainer_of
from tests.recovery.test_recovery import STEPS, easy, incidents, recipe
from tests.training.test_resume import identical

__all__ = ["easy"]

AT, LAYER, EXPERT = 34, 1, 2
EXPERTS = {"count": 4, "top_k": 2, "ffn": 24, "bias_rate": 0.001}
LARGE = 1.0
PLACE = f"blocks.{LAYER}.mlp.experts.{EXPERT}"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "zero2-dp2": (2, {"parallel": {"zero": 2}}),
}


def experts_recipe(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    defaults: dict[str, Any] = {
        "train": {"eval_samples": 0, "micro_batch": 4}, "model": {"layers": 2, "experts": EXPERTS},
        "stability": {"trends": {"start": 8}},
    }  # fmt: skip
    return recipe(corpus, run, **defaults | parts)


def train_pushed(
    config: RunConfig, at: int | None, amount: float, always: bool = False, only_rank: int | None = None
) -> tuple[int, int]:
    """Train; after the update of step `at` a bias moves: once, or also where it is repeated; on all ranks, or on one.
    The exit code, and how often."""
    trainer = trainer_of(config)
    engine, real, done = trainer.engine, trainer.engine._apply_update, 0

    def apply_update(*given: Any) -> None:
        nonlocal done
        real(*given)
        if engine.ds.global_steps == at and (always or not done):
            done += 1
            if only_rank in (None, engine.topology.rank):
                engine.routing.bias[LAYER, EXPERT] += amount

    engine._apply_update = apply_update
    return trainer.train(), done


@pytest.mark.quick("one-None")
@pytest.mark.parametrize(("name", "only_rank"), [*((name, None) for name in LAYOUTS), ("zero2-dp2", 1)])
def test_a_bias_that_no_update_moved_is_undone(
    name: str, only_rank: int | None, easy: Path, tmp_path: Path
) -> None:
    world, parts = LAYOUTS[name]
    hit, same = tmp_path / "hit", tmp_path / "same"
    for run, step in ((hit, AT), (same, None)):
        config = experts_recipe(easy, run, **parts)
        ends = run_ranks(world, train_pushed, config, step, -5.0, False, only_rank)
        assert all(code == 0 for code, _ in ends)
    (incident,) = incidents(hit)
    assert (incident["verdict"], incident["cause"], incident["outcome"]) == ("damage", "state", "healed")
    assert PLACE in incident["reasons"][0] and incident["positions"] == [] and not incident["deferred"]
    (told,) = RunDirectory(hit).iterate_events(TrendEvent)
    assert told["signal"] == "expert_bias" and PLACE in told["text"] and not incidents(same)
    assert identical(hit / f"checkpoints/step-{STEPS}", same / f"checkpoints/step-{STEPS}") >= 3


def test_a_bias_that_the_steps_move_again_is_the_runs_own(easy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ((code, times),) = run_ranks(1, train_pushed, experts_recipe(easy, run), AT, -5.0, True)
    assert code == 0 and times > 2  # in the run, when it was repeated, and in branches
    told = [event["text"] for event in RunDirectory(run).iterate_events(Warned)]
    assert any(PLACE in text and "the same steps make it again" in text for text in told)
    assert not incidents(run)


def train_gamed(config: RunConfig) -> int:
    """Train; from step `AT` on a balance loss moves a bias once, and makes the head larger in every update."""
    trainer = trainer_of(config)
    engine, real = trainer.engine, trainer.engine._apply_update
    mlp = engine.routing._mlps[LAYER]

    def apply_update(*given: Any) -> None:
        real(*given)
        if engine.ds.global_steps < AT or not mlp.balance_weight:
            return
        engine.routing.bias[LAYER, EXPERT] = -5.0
        flat = engine.flat_state()
        for f in flat.fragments:
            if f.name == "head.weight" and (piece := flat.view_piece(f, "weight")) is not None:
                piece.mul_(1.1)
        engine.refresh_weights()

    engine._apply_update = apply_update
    return trainer.train()


def test_what_the_steps_make_again_is_mended_by_the_remedy_that_wins(easy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = experts_recipe(easy, run, train={"steps": 80, "eval_samples": 0, "micro_batch": 4},
                            model={"layers": 2, "experts": EXPERTS | {"balance_loss": 0.01}})  # fmt: skip
    assert run_ranks(1, train_gamed, config) == [0]
    (trial,) = RunDirectory(run).iterate_events(BranchesTried)
    assert trial["chosen"] == "no_balance_loss" and trial["healed"] == ["no_balance_loss"]
    (incident,) = incidents(run)
    assert (incident["verdict"], incident["cause"], incident["outcome"]) == ("damage", "state", "healed")
    assert PLACE in incident["reasons"][0] and not incident["positions"] and not incident["deferred"]
    (adjusted,) = RunDirectory(run).iterate_events(SettingsAdjusted)
    assert adjusted["settings"] == ["no_balance_loss"]


def train_hacked(config: RunConfig) -> int:
    """Train; from step `AT` on the balance loss falls if all scores of the sigmoid gate do."""
    from drills import faults

    assert config.run.dir is not None
    fault = Fault(kind="gamed_balance", step=AT, steps=STEPS)
    faults.install_fault(Plan(run=config.run.dir, fault=fault))
    return trainer_of(config).train()


@pytest.mark.slow
def test_harmless_data_with_gradients_that_grow_in_a_router_first_has_its_remedies_tried(
    easy: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    hacked = EXPERTS | {"gate": "sigmoid", "normalize": False, "balance_loss": 1.0}
    config = experts_recipe(
        easy, run, train={"steps": 80, "micro_batch": 4}, model={"layers": 2, "experts": hacked}
    )
    assert run_ranks(1, train_hacked, config) == [0]
    suspects, remedies = RunDirectory(run).iterate_events(BranchesTried)
    assert suspects["verdict"] in ("new", "noise") and remedies["chosen"] == "no_balance_loss"
    (incident,) = incidents(run)
    assert (incident["cause"], incident["outcome"], incident["positions"]) == ("state", "healed", [])
    assert not incident["deferred"] and ".mlp.router is the first to grow" in incident["reasons"][0]


def train_grown(config: RunConfig, remedy: str) -> int:
    """Train; from step `AT` on something moves a bias and makes the head larger, unless older routers choose; or it
    makes routers larger before every update, and does that once the norm of one's piece is above `LARGE`."""
    trainer = trainer_of(config)
    engine, real = trainer.engine, trainer.engine._apply_update

    def grow(ending: str, factor: float) -> float:
        """The largest norm, after it."""
        flat = engine.flat_state()
        pieces = [flat.view_piece(f, "weight") for f in flat.fragments if f.name.endswith(ending)]
        norms = [float(piece.mul_(factor).norm()) for piece in pieces if piece is not None]
        return max(gather_objects(max(norms, default=0.0)))

    def apply_update(*given: Any) -> None:
        is_late = engine.updates + 1 >= AT
        grow("router.weight", 1.3 if is_late and remedy == "hold_router" else 1.0)
        real(*given)
        largest_norm, is_past = grow("router.weight", 1.0), engine.routing.past is not None
        if is_late and (largest_norm > LARGE if remedy == "hold_router" else not is_past):
            engine.routing.bias[LAYER, EXPERT] = -5.0
            grow("head.weight", 1.1)
        engine.refresh_weights()

    engine._apply_update = apply_update
    return trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("remedy", ["hold_router", "past_routing"])
def test_a_remedy_in_the_state_of_routers_wins_and_a_resumed_run_goes_on_with_it(
    remedy: str, easy: Path, tmp_path: Path
) -> None:
    def at(run: str, steps: int) -> RunConfig:
        """With a watch over the memory: what a remedy changes is no fault of it."""
        made = experts_recipe(
            easy, tmp_path / run, train={"steps": steps, "eval_samples": 0, "micro_batch": 4},
            parallel={"zero": 2}, stability={"trends": {"start": 8}, "policy": {"remedies": [remedy, "router_rate"]}},
            checkpoint={"interval": 20, "keep": 9},
        )  # fmt: skip
        tree = made.model_dump(exclude_unset=True)
        tree["stability"]["hardware"] = {"state": True}
        return RunConfig.model_validate(tree)

    assert run_ranks(2, train_grown, at("straight", 80), remedy) == [0, 0]
    for steps in (60, 80):
        assert run_ranks(2, train_grown, at("stopped", steps), remedy) == [0, 0]
    for run in (tmp_path / "straight", tmp_path / "stopped"):
        (adjusted,) = RunDirectory(run).iterate_events(SettingsAdjusted)
        assert adjusted["settings"] == [remedy]
        (incident,) = incidents(run)
        assert (incident["cause"], incident["outcome"]) == ("state", "healed")
    ends = [tmp_path / run / "checkpoints/step-80" for run in ("straight", "stopped")]
    assert identical(*ends) >= 3
    shared, other_shared = ((end / store.SHARED).read_bytes() for end in ends)
    kept = {"hold_router": b"experts/caps", "past_routing": b"experts/past"}[remedy]
    assert shared == other_shared and kept in shared
    if remedy == "past_routing":
        return
    # From before the remedy, which the journal tells of.
    run = tmp_path / "stopped"
    for step in (40, 60, 80):
        shutil.rmtree(run / f"checkpoints/step-{step}")
    assert run_ranks(2, train_grown, at("stopped", 80), remedy) == [0, 0]
    assert len(incidents(run)) == 1 and kept in (ends[1] / store.SHARED).read_bytes()
