"""Plan silent corruption: kinds of faults, layouts, and three positions of each, drawn from a seed. Pure.

A kind is "where/what", e.g. "master/sign". Each fault has a run of its own, so that what was found belongs to it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from megastable.base.errors import ConfigError

POSITIONS = 3
BITS = ("sign", "exponent", "mantissa")
# By where it strikes: what it does there.
WHERE: dict[str, tuple[str, ...]] = {
    "gradients": ("negated", "scaled-3", "zero", "stale"),
    "weight": BITS,
    "master": BITS,
    "moment": BITS,
    "activation": BITS,
    "product": BITS,
    "message": BITS,
    "column": ("zero",),
    "norm": ("scaled",),
    "replica": ("misplaced",),
}
KINDS = tuple(f"{where}/{what}" for where, whats in WHERE.items() for what in whats)
# Steps that a fault strikes before: within an interval of the detectors, which is 10. Of the step before the first of
# them it is already counted what can be struck.
STEPS = range(22, 30)
RESUMED = 20  # the step of the checkpoint that the run of a wrong replica resumes from


@dataclass(frozen=True)
class Layout:
    """How the ranks of a run share the work."""

    name: str
    ranks: int
    tensor: int = 1
    pipeline: int = 1
    zero: int = 1

    @property
    def data(self) -> int:
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def parallel(self) -> dict[str, Any]:
        """As the recipe has it."""
        return {"tensor": self.tensor, "pipeline": self.pipeline, "zero": self.zero}


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("dp2", 2), Layout("dp3", 3), Layout("tp2", 2, tensor=2), Layout("pp2", 2, pipeline=2),
        Layout("zero2", 2, zero=2), Layout("zero3", 2, zero=3), Layout("tp2-dp2", 4, tensor=2),
    )
}  # fmt: skip


class Planned(BaseModel):
    """A fault of a run in `layout`: of which kind, on which rank, before or in which step. position: of the layer or
    tensor, of the element in it and of the bit: 0 first, 1 middle, 2 last."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: str
    kind: str
    position: int
    seed: int
    step: int
    rank: int

    @property
    def where(self) -> str:
        return self.kind.partition("/")[0]

    @property
    def what(self) -> str:
        return self.kind.partition("/")[2]

    @property
    def begin(self) -> int:
        """The step that its run resumes after."""
        return RESUMED if self.where == "replica" else 0

    @property
    def lasts(self) -> bool:
        """Whether it is there in every later step, too: nothing can be undone then."""
        return self.where == "column"

    def __str__(self) -> str:
        return f"{self.layout}, {self.kind}, {self.position + 1} of {POSITIONS}, seed {self.seed}"


class Change(BaseModel):
    """What a fault did. element: its index in the flat tensor, None if it was done to many."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    tensor: str
    element: int | None = None
    before: float | None = None
    after: float | None = None


# What `--quick` plants: these are found by comparing ranks, and their rank is known from the numbers alone.
QUICK = {
    ("dp2", "gradients/negated"): 1, ("dp2", "gradients/stale"): 2, ("dp2", "message/exponent"): 0,
    ("dp3", "gradients/zero"): 1, ("dp3", "weight/sign"): 2, ("dp3", "replica/misplaced"): 0,
}  # fmt: skip


def fits_layout(kind: str, layout: Layout) -> bool:
    """Whether a kind makes sense in a layout."""
    fault_place = kind.partition("/")[0]
    if fault_place == "norm":
        # Norms are the weights that tensor ranks hold alike; elsewhere it is a master like any other.
        return layout.tensor > 1
    if fault_place == "replica":
        # Without data parallelism a computing copy has no replica, with ZeRO 3 neither: that is "weight" again.
        return layout.data > 1 and layout.zero < 3
    # Messages are whatever the layout sends: sums of gradients and gathered weights of data ranks, sums of activations
    # of tensor ranks, activations and their gradients between stages. There are no others to strike.
    return True


def must_be_found(kind: str) -> bool:
    """Whether a fault must be found. What is left out is planted and told as well: it shows what nothing looks at."""
    # One micro-batch of one step is a little wrong: only a replay of that very micro-batch would show it.
    return kind.partition("/")[0] not in ("activation", "product")


def plan_faults(layouts: Sequence[str], kinds: Sequence[str], seed: int) -> list[Planned]:
    """Three faults of every kind that fits, by layout. The same ones for a seed, whatever else is planned."""
    planned_faults = []
    for name in layouts:
        layout = LAYOUTS[name]
        for kind in kinds:
            if fits_layout(kind, layout):
                planned_faults += _of_kind(layout, kind, seed)
    return planned_faults


def _of_kind(layout: Layout, kind: str, seed: int) -> list[Planned]:
    chance = random.Random(f"{seed} {layout.name} {kind}")
    steps = chance.sample(STEPS, POSITIONS)
    # Every rank once before any twice.
    ranks = [
        rank
        for _ in range(-(-POSITIONS // layout.ranks))
        for rank in chance.sample(range(layout.ranks), layout.ranks)
    ]
    if kind.startswith("replica/"):
        steps = [RESUMED + 1] * POSITIONS
    return [
        Planned(layout=layout.name, kind=kind, position=i, seed=seed, step=steps[i], rank=ranks[i])
        for i in range(POSITIONS)
    ]


def plan_quick(seed: int) -> list[Planned]:
    """Six faults of different kinds, in two layouts."""
    all_faults = plan_faults(list(dict.fromkeys(layout for layout, _ in QUICK)), KINDS, seed)
    return [fault for fault in all_faults if QUICK.get((fault.layout, fault.kind)) == fault.position]


def choose_faults(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Layouts and kinds among `names`, in the table's order; all layouts, or all kinds, where none is named. "master"
    stands for all kinds of it. Raises ConfigError."""
    known_names = (*LAYOUTS, *WHERE, *KINDS)
    if unknown := [name for name in names if name not in known_names]:
        raise ConfigError(f"{unknown[0]}: there is no such layout or kind of fault: {', '.join(known_names)}")
    layouts = [name for name in LAYOUTS if name in names] or list(LAYOUTS)
    kinds = [kind for kind in KINDS if kind in names or kind.partition("/")[0] in names] or list(KINDS)
    if not any(fits_layout(kind, LAYOUTS[layout]) for kind in kinds for layout in layouts):
        raise ConfigError(f"{', '.join(kinds)}: makes no sense in {', '.join(layouts)}; see --list")
    return layouts, kinds
