"""Weights that fit into no memory are refused before they are made; a share of them that fits is not."""

from __future__ import annotations

import pytest
import torch

from megastable.base.errors import ConfigError
from megastable.base.free_memory import total
from megastable.config.tree import RunConfig
from megastable.engine.build import check_weights_fit
from megastable.parallel.layout import Layout


def check(layers: int, layout: Layout, zero: int = 1) -> None:
    model = {"layers": layers, "hidden": 64, "heads": 4, "vocab_size": 250}
    config = RunConfig.model_validate({"model": model, "parallel": {"zero": zero}})
    check_weights_fit(config, layout, torch.device("cpu"))


def test_weights_beyond_memory_are_refused_unless_ranks_share_them() -> None:
    of_block = 2 * (4 * 64 * 64 + 3 * 64 * 256)  # bytes in bf16
    layers = total() // of_block + 1
    one, tensor, data = Layout(1, 1, 1), Layout(2, 1, 1), Layout(1, 1, 2)
    check(layers - 100, one)
    check(layers, tensor)
    check(layers, data, zero=3)
    for layout in (one, data):
        with pytest.raises(ConfigError, match=f"lower model.layers={layers}, .* parallel.tensor"):
            check(layers, layout)
