"""What the configuration calls valid can be started: every key at its ends, as far as that needs no engine."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from megastable.base.errors import ConfigError
from megastable.config import deepspeed_json, recipe
from megastable.config.lint import lint_recipe
from megastable.config.tree import RunConfig
from megastable.optim.next_update import RunPosition, compare_next_update
from megastable_guard.step_judge import StepJudge
from tests.config.ends import cases

BASE: dict[str, Any] = {"model": {"layers": 2, "hidden": 32, "heads": 4, "sequence_length": 32}}


def with_value(key: str, value: Any) -> dict[str, Any]:
    tree = json.loads(json.dumps(BASE))
    section = tree
    *path, last = key.split(".")
    for part in path:
        section = section.setdefault(part, {})
    section[last] = value
    return tree


def begin(config: RunConfig) -> None:
    """What a start computes of a configuration before there is an engine."""
    for seconds in (
        config.run.timeout,
        config.run.rendezvous,
        config.eval.timeout,
        config.supervise.hang_unknown,
    ):
        timedelta(seconds=seconds)
    np.random.default_rng(config.run.seed)
    for seed in (random.seed, torch.manual_seed):
        seed(config.run.seed + 1)
    np.random.seed((config.run.seed + 1) % 2**32)
    assert all(isinstance(str(hint), str) for hint in lint_recipe(config))
    compare_next_update(config, config, RunPosition(100, 100 * 64 * 32, 6400))
    StepJudge(config.stability)
    deepspeed_json.build_deepspeed_json(config, 1)


def test_every_key_at_its_ends_is_refused_or_begins() -> None:
    refused, begun, fallen = 0, 0, {}
    for key, value in cases():
        try:
            config = recipe.validate_tree(with_value(key, value), "recipe")
        except ConfigError:
            refused += 1
            continue
        try:
            begin(config)
            begun += 1
        except ConfigError:
            refused += 1
        except Exception as error:  # each is one key that is called valid and cannot be started
            fallen[f"{key}={value}"] = f"{type(error).__name__}: {error}"
    assert fallen == {}
    assert begun > 400 and refused > 30  # the ends are found
