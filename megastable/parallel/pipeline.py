"""Partition of the layers into contiguous pipeline stages of about equal cost. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def partition(costs: Sequence[float], stages: int, required: Sequence[bool]) -> list[int]:
    """Bounds [0, ..., len(costs)] of `stages` contiguous ranges that minimise the cost of the costliest stage.

    costs: of every layer, any unit, positive. required: layers of which every stage must hold at least one: a
    stage with only tied or replicated parameters has no gradient norm in DeepSpeed, and hangs or dies.
    Among equally good partitions the one that fills later stages wins (the first stages hold more activations in
    1F1B). Dynamic programming, O(stages x layers^2).

    Raises ValueError when there are fewer required layers than stages.
    """
    layers = len(costs)
    if sum(required) < stages:
        raise ValueError(f"{sum(required)} blocks are too few for {stages} stages")
    total, blocks = [0.0], [0]
    for cost, needed in zip(costs, required, strict=True):
        total.append(total[-1] + cost)
        blocks.append(blocks[-1] + needed)
    # best[k][i]: the lowest maximum cost of layers [0, i) in k stages, and where the last stage begins.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for _ in range(stages):
        row: dict[int, tuple[float, int]] = {}
        for end in range(1, layers + 1):
            found = None
            for begin in range(end - 1, -1, -1):
                last = total[end] - total[begin]
                if found is not None and last > found[0]:
                    break  # a longer last range costs even more
                if begin in best[-1] and blocks[end] > blocks[begin]:
                    choice = max(best[-1][begin][0], last), begin
                    found = choice if found is None else min(found, choice)
            if found is not None:
                row[end] = found
        best.append(row)
    bounds = [layers]
    for k in range(stages, 0, -1):
        bounds.append(best[k][bounds[-1]][1])
    return bounds[::-1]
