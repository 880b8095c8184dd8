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
    load_values = [
        (value, int(expert_match[1]), int(expert_match[2]))
        for value in layers.values
        if value.statistic == "expert_load" and (expert_match := EXPERT.fullmatch(value.name))
    ]
    block_numbers = sorted({block for _, block, _ in load_values})
    row_of = {block: row for row, block in enumerate(block_numbers)}
    expert_count = max((expert for *_, expert in load_values), default=-1) + 1
    load_looks = []
    for look_step, look_name, look_moment in (
        (layers.before_step, "before", "before the onset"),
        (layers.during_step, "during", "in the middle of it"),
        (layers.after_step, "after", "when it was over"),
    ):
        load_table = np.full((len(block_numbers), expert_count), np.nan)
        for value, block, expert in load_values:
            if (expert_load := getattr(value, look_name)) is not None:
                load_table[row_of[block], expert] = expert_load
        if look_step is not None and np.isfinite(load_table).any():
            load_looks.append(LoadLook(look_step, look_moment, block_numbers, load_table))
    return load_looks


def describe_loads(looks: list[LoadLook]) -> str:
    """The largest load of every look, and how many experts had no token."""
    look_texts = []
    for look in looks:
        block_row, expert_number = np.unravel_index(np.nanargmax(look.loads), look.loads.shape)
        idle_count, known_count = int((look.loads == 0).sum()), int(np.isfinite(look.loads).sum())
        idle_text = f", {idle_count:,} of {known_count:,} experts without a token" if idle_count else ""
        look_texts.append(
            f"{look.loads[block_row, expert_number]:.3g} at step {look.step:,}, {look.moment} (expert {expert_number} "
            f"of block {look.blocks[block_row]}{idle_text})"
        )
    return (
        f"Largest load of an expert, in times the mean of its layer: {'; '.join(look_texts)}."
        if looks
        else ""
    )


def has_routers(e: Evidence) -> bool:
    """Whether the steps around it have records of routers."""
    return any(row.expert_violation is not None for run_pass in e.passes for row in run_pass)
