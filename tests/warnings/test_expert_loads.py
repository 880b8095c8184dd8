"""Loads of experts, of choices that a rank may have counted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megastable.run.records import LayerRecord, StepRecord
from megastable.warnings.expert_loads import list_rows, read_choices, summarise_loads

# Two experts: choices, sums of scores; squared logsumexp, entropy, dropped, tokens. A dense layer has no tokens.
CHOICES = [
    [0.0] * 8,
    [30.0, 10.0, 24.0, 16.0, 160.0, 20.0, 4.0, 40.0],
    [40.0, 0.0, 20.0, 20.0, 40.0, 40 * math.log(2), 0.0, 40.0],
]


def test_loads_are_of_the_mean_and_numbers_of_a_token() -> None:
    first, second = read_choices(CHOICES, 2)
    assert (first.layer, second.layer) == (1, 2)
    assert first.loads.tolist() == [1.5, 0.5] and first.scores.tolist() == [1.2, 0.8]
    assert (first.entropy, first.z, first.dropped, first.violation, first.idle) == (0.5, 2.0, 0.1, 1.5, 0)
    assert (second.violation, second.idle) == (2.0, 1)


def test_a_step_has_the_worst_of_its_layers() -> None:
    columns = summarise_loads(read_choices(CHOICES, 2))
    assert columns == {
        "expert_violation": 2.0, "expert_idle": 0.25, "expert_dropped": 0.1, "router_entropy": 0.5, "router_z": 2.0,
    }  # fmt: skip
    assert columns.keys() <= StepRecord.__dataclass_fields__.keys()


def test_every_expert_has_a_row() -> None:
    rows = list_rows(read_choices(CHOICES, 2), np.array([[0, 0], [0.1, -0.1], [0.2, 0.3]]))
    assert rows["blocks.1.mlp.experts.0"] == {"expert_load": 1.5, "expert_bias": 0.1}
    assert rows["blocks.2.mlp.router"] == {"router_entropy": pytest.approx(math.log(2)), "router_z": 1.0}
    assert len(rows) == 6
    for row in rows.values():
        LayerRecord(1, 0.0, "name", **row)
