"""The loads of routed experts around an incident, from its records of the layers. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.report.postmortem.facts import Evidence, Layers
from megastable.run.records import EXPERT


class LoadLook(NamedTuple):
    """step: of the records; moment: what it was; blocks: with routed experts, in order; loads: tokens over the mean of
    the layer, [blocks, experts], nan where none is recorded."""

    step: int
    moment: str
    blocks: list[int]
    loads: npt.NDArray[np.float64]


def collect_loads(layers: Layers | None) -> list[LoadLook]:
    """Those of the records that have some: before the onset, in the middle of it, when it was over."""
    if layers is None:
        return []
    places = [
        (value, int(expert_match[1]), int(expert_match[2]))
        for value in layers.values
        if value.statistic == "expert_load" and (expert_match := EXPERT.fullmatch(value.name))
    ]
    blocks = sorted({block for _, block, _ in places})
    row_of = {block: row for row, block in enumerate(blocks)}
    looks = []
    for step, key, moment in (
        (layers.before_step, "before", "before the onset"),
        (layers.during_step, "during", "in the middle of it"),
        (layers.after_step, "after", "when it was over"),
    ):
        loads = np.full((len(blocks), max((expert for *_, expert in places), default=-1) + 1), np.nan)
        for value, block, expert in places:
            if (load := getattr(value, key)) is not None:
                loads[row_of[block], expert] = load
        if step is not None and np.isfinite(loads).any():
            looks.append(LoadLook(step, moment, blocks, loads))
    return looks


def describe_loads(looks: list[LoadLook]) -> str:
    """The largest load of every look, and how many experts had no token."""
    look_texts = []
    for look in looks:
        block, expert = np.unravel_index(np.nanargmax(look.loads), look.loads.shape)
        idle, known = int((look.loads == 0).sum()), int(np.isfinite(look.loads).sum())
        idle_text = f", {idle:,} of {known:,} experts without a token" if idle else ""
        look_texts.append(
            f"{look.loads[block, expert]:.3g} at step {look.step:,}, {look.moment} (expert {expert} of block "
            f"{look.blocks[block]}{idle_text})"
        )
    return (
        f"Largest load of an expert, in times the mean of its layer: {'; '.join(look_texts)}."
        if looks
        else ""
    )


def has_routers(e: Evidence) -> bool:
    """Whether the steps around it have records of routers."""
    return any(row.expert_violation is not None for run_pass in e.passes for row in run_pass)
