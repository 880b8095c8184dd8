"""optimizer.clipping: a word may stand for it, and impossible settings are refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastable.base.errors import ConfigError
from megastable.config import deepspeed_json
from megastable.config.recipe import load

RECIPE = Path(__file__).parents[2] / "launch/recipes/7b.yaml"


@pytest.mark.parametrize(
    ("said", "kind", "threshold"),
    [
        ([], "norm", None),
        (["optimizer.clipping=adagc"], "adagc", None),
        (["optimizer.clipping=zclip", "optimizer.clipping.threshold=3"], "zclip", 3),
        (["optimizer.clipping.threshold=0.1", "optimizer.clipping=agc"], "agc", 0.1),
        (["optimizer.clipping={kind: value, threshold: 1e-3}"], "value", 1e-3),
        (["optimizer={clipping: worker}"], "worker", None),
    ],
)
def test_a_word_may_stand_for_it(said: list[str], kind: str, threshold: float | None) -> None:
    c = load(RECIPE, said)
    assert (c.optimizer.clipping.kind, c.optimizer.clipping.threshold) == (kind, threshold)
    assert deepspeed_json.build(c, 8)["gradient_clipping"] == (c.optimizer.clip if kind == "norm" else 0)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (["optimizer.clipping=value"], "set optimizer.clipping.threshold"),
        (["optimizer.clipping.threshold=1"], "set it instead"),
        (["optimizer.clipping=off"], "optimizer.clip=0 is what turns clipping off"),
        (["optimizer.clipping=true", "optimizer.clipping.warmup=3"], "only adagc and zclip have it"),
        (["optimizer.clipping=agc", "optimizer.clipping.decay=0.9"], "only adagc and zclip have it"),
        (["optimizer.clipping=adagc", "optimizer.clipping.decay=1"], "the average would never change"),
        (["optimizer.clipping=zclip", "optimizer.clipping.warmup=1"], "a deviation needs at least 2"),
        (["optimizer.clipping=worker", "parallel.zero=2"], "no rank has its own"),
        (["optimizer.clipping=worker", "precision.kind=fp32"], "no rank has its own"),
        (["optimizer.clipping=worker", "model.tied=true", "parallel.pipeline=2"], "spread over two stages"),
        (["optimizer.clipping=worker", "optimizer.clip=0"], "set the norm to clip to"),
    ],
)
def test_refused(said: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(RECIPE, said)
