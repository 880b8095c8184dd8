"""Recipe lint: silent on what is shipped, and on what small models are known to bear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drills.stage import RECIPE
from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.training.lint import lint

SMALL = {"layers": 3, "hidden": 128, "heads": 4, "sequence_length": 128}


def found(lr: float, warmup: int, beta2: float = 0.95, **model: Any) -> list[str]:
    tree = {
        "model": {**SMALL, **model},
        "optimizer": {"lr": lr, "betas": [0.9, beta2]},
        "schedule": {"warmup_steps": warmup},
    }
    return lint(RunConfig.model_validate(tree))


@pytest.mark.parametrize(
    "path", sorted((recipe.ROOT / "launch/recipes").glob("*.yaml")), ids=lambda p: p.stem
)
def test_shipped_recipes_are_clean(path: Path) -> None:
    assert lint(recipe.load(path)) == []


def test_the_recipe_of_the_drills_is_clean() -> None:
    assert lint(RunConfig.model_validate(RECIPE)) == []


@pytest.mark.parametrize(
    ("lr", "warmup", "told"),
    [(1e-3, 0, 0), (3e-3, 20, 0), (6e-3, 50, 0), (3e-3, 0, 1), (2e-2, 0, 1), (3e-2, 20, 1), (3e-3, 1, 1)],
)
def test_first_updates(lr: float, warmup: int, told: int) -> None:
    said = found(lr, warmup)
    assert len(said) == told
    assert all(f"schedule.warmup_steps (now {warmup};" in text and "optimizer.lr" in text for text in said)


def test_a_wider_model_bears_less() -> None:
    """Public runs of 774M parameters without warm-up: 1e-4 is healthy, 1e-3 diverges."""
    big: dict[str, Any] = {"hidden": 1280, "heads": 20, "layers": 36}
    assert found(1e-4, 0, **big) == [] != found(1e-3, 0, **big)


def test_without_qk_norm() -> None:
    assert found(3e-3, 50, qk_norm=False) == [] == found(1e-2, 100, qk_norm="full")
    (text,) = found(1e-2, 100, qk_norm=False)
    assert "model.qk_norm=true" in text


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"optimizer": {"lr": 30, "weight_decay": 0}}, "optimizer.lr=30 is above 0.3"),
        ({"optimizer": {"lr": 0.25, "weight_decay": 4.0}}, "optimizer.weight_decay = 1: "),
        ({"schedule": {"warmup_steps": 5000}, "train": {"steps": 220}}, "is not below train.steps=220"),
        ({"optimizer": {"lr": 0.3}, "schedule": {"warmup_steps": 999}}, None),
        ({"optimizer": {"lr": 0.25, "weight_decay": 3.9}}, None),
    ],
)
def test_what_leads_nowhere_is_told(parts: dict[str, Any], told: str | None) -> None:
    tree = {"model": SMALL, "train": {"steps": 10**6}, "schedule": {"warmup_steps": 10**5}} | parts
    tree = {"train": {"steps": 1000}} | tree if "schedule" in parts else tree
    said = lint(RunConfig.model_validate(tree))
    assert said == [] if told is None else len(said) == 1 and told in said[0]


def test_the_rule_of_thumb_knows_beta2() -> None:
    assert "= 40 is" in found(3e-3, 0)[0] and "= 2000 is" in found(3e-3, 0, 0.999)[0]
