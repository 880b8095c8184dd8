"""How the tokens of a step were shared out over the experts of every layer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerLoads:
    """Of the routed experts of block `layer` in one step.

    loads: choices of each expert over their mean, [experts]. scores: the same of the sums of its scores. entropy: of a
    token's scores, in the mean over tokens, nats. z: root of the mean squared logsumexp of the router's logits.
    dropped: share of the choices that were beyond a capacity.
    """

    layer: int
    loads: Numbers
    scores: Numbers
    entropy: float
    z: float
    dropped: float

    @property
    def violation(self) -> float:
        """The largest load; 1 if all are even."""
        return float(self.loads.max())

    @property
    def idle(self) -> int:
        """Experts that no token has chosen."""
        return int((self.loads == 0).sum())


def read_choices(choices: Sequence[Sequence[float]] | Numbers, experts: int) -> list[LayerLoads]:
    """The layers with routed experts, in order. choices: [layers, columns], as model/experts.py has the columns, summed
    over all ranks."""
    layer_loads = []
    for layer, layer_row in enumerate(np.asarray(choices, dtype=np.float64)):
        choice_counts, score_sums = layer_row[:experts], layer_row[experts : 2 * experts]
        squared_logsumexp, entropy, dropped_choices, token_count = layer_row[2 * experts :]
        if token_count > 0:
            layer_loads.append(
                LayerLoads(
                    layer, choice_counts / choice_counts.mean(), score_sums / score_sums.mean(),
                    float(entropy / token_count), float(np.sqrt(squared_logsumexp / token_count)),
                    float(dropped_choices / choice_counts.sum()),
                )
            )  # fmt: skip
    return layer_loads


def summarise_loads(layers: Sequence[LayerLoads]) -> dict[str, float]:
    """The columns of a step record: the worst layer of each kind, and the share of all experts that were idle."""
    expert_count = sum(len(layer.loads) for layer in layers)
    return {
        "expert_violation": max(layer.violation for layer in layers),
        "expert_idle": sum(layer.idle for layer in layers) / expert_count,
        "expert_dropped": max(layer.dropped for layer in layers),
        "router_entropy": min(layer.entropy for layer in layers),
        "router_z": max(layer.z for layer in layers),
    }


def list_rows(layers: Sequence[LayerLoads], biases: Numbers) -> dict[str, dict[str, float]]:
    """The layer records of experts and routers, by name. biases: of all layers' experts, [layers, experts]."""
    found_rows: dict[str, dict[str, float]] = {}
    for layer in layers:
        mlp_name = f"blocks.{layer.layer}.mlp"
        found_rows[f"{mlp_name}.router"] = {"router_entropy": layer.entropy, "router_z": layer.z}
        for number, (load, bias) in enumerate(zip(layer.loads, biases[layer.layer], strict=True)):
            found_rows[f"{mlp_name}.experts.{number}"] = {
                "expert_load": float(load),
                "expert_bias": float(bias),
            }
    return found_rows
