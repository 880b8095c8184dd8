"""The largest logits of a step are those of the scores of its whole batch, and QK-clip moves those of the next one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from tests import reference
from tests.distributed import run_ranks
from tests.engine.engines import build_engine, take_batch
from tests.parallel.test_layouts import QWEN2, batches, config, plain

THRESHOLD = 1.45
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "tp2-recompute": ({"tensor": 2, "recompute": "full"}, "blocked"),
    "tp2-sequence": ({"tensor": 2, "sequence": True}, "reference"),
    "pp2": ({"pipeline": 2}, "sdpa"),
    "dp2-bf16": ({"precision": "bf16"}, "sdpa"),
    "zero3-selective": ({"zero": 3, "recompute": "selective"}, "sdpa"),
    "context2-documents": ({"context": 2, "apart": True}, "sdpa"),
    "ring2-documents-full": (
        {"context": 2, "context_by": "ring", "apart": True, "recompute": "full"},
        "sdpa",
    ),
}


def recipe(attention: str, **options: Any) -> RunConfig:
    made = config(**{"micro_batch": 2, "model": QWEN2} | options).model_dump(exclude_unset=True)
    kernels = {"attention": attention, "compile": False}
    return RunConfig.model_validate(made | {"optimizer": {"qk_clip": THRESHOLD}, "kernels": kernels})


def watched() -> dict[str, list[torch.Tensor]]:
    """By case the largest logits of: a step, an accepted one, and one more; with an evaluation of other data before the
    last. The learning rate is too small to matter."""
    found = {}
    for name, (options, attention) in CASES.items():
        options = dict(options)
        apart = options.pop("apart", False)
        c = recipe(attention, **options)
        engine = build_engine(c)
        assert engine.kernels.attention == attention
        first, second, *_ = (take_batch(engine, batch) for batch in batches(apart))
        engine.train_step(second, 1e-12, lambda _: False)  # refused: must not be remembered
        logits = []
        for _ in range(2):
            engine.evaluate_samples(second)
            engine.train_step(first, 1e-12, lambda m: m.finite)
            logits.append(engine.qk_clip.gather_highest_logits())
        found[name] = logits
    return found


@cache
def ran() -> list[dict[str, list[torch.Tensor]]]:
    return run_ranks(2, watched)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_qk_clip_gives_the_next_step_the_threshold(name: str) -> None:
    options, _ = CASES[name]
    options = dict(options)
    c = recipe("sdpa", **{key: value for key, value in options.items() if key != "apart"})
    weights, shape = plain(c.model)
    tokens, _, segments = batches("apart" in options)[0]
    highest: dict[tuple[int, int], float] = {}
    reference.logits(weights, shape, tokens, segments, highest)
    wanted = torch.tensor([[highest[layer, head] for head in range(4)] for layer in range(2)])
    assert 0 < int((wanted > THRESHOLD).sum()) < wanted.numel() and (wanted[0] > THRESHOLD).any()
    tolerance = 0.02 if name.endswith("bf16") else 1e-4
    for rank in ran():
        first, second = rank[name]
        assert torch.allclose(first, wanted, rtol=tolerance)
        # The second block gets other inputs now, as the first one attends otherwise.
        assert torch.allclose(second[0], wanted[0].clamp_max(THRESHOLD), rtol=tolerance)
