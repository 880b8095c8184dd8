"""`diff`: compare two checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from megastable.base.progress_bar import bar
from megastable.base.text import plural
from megastable.checkpoint import store
from megastable.checkpoint.whole import WholeState
from megastable.convert.diff import Difference, differences, elements, field_differences
from megastable.convert.tool.verifying import good
from megastable.report.sheet import Column, Sheet

# State fields that count as a difference; the others say how and when it was computed, and are only shown.
WHERE = ("step", "updates", "cursor", "tokens", "trained_tokens", "optimizer", "adam_step")

COLUMNS = (
    Column("name", "tensor"),
    Column("kind", "of"),
    Column("outcome", "outcome"),
    Column("max_abs", "max |B - A|", "number"),
    Column("relative", "||B - A|| / ||A||", "number"),
    Column("one_minus_cosine", "1 - cosine", "number"),
    Column("differing", "differing", "count"),
    Column("elements", "elements", "count"),
    Column("shape_a", "shape in A", wide=True),
    Column("shape_b", "shape in B", wide=True),
)


class _Only:
    """Some kinds of another's tensors."""

    def __init__(self, whole: WholeState, kinds: tuple[str, ...]) -> None:
        self._whole = whole
        self.names, self.shape, self.tensor = whole.names, whole.shape, whole.tensor
        self.kinds = tuple(kind for kind in whole.kinds if kind in kinds)

    def kinds_of(self, name: str) -> tuple[str, ...]:
        return tuple(kind for kind in self._whole.kinds_of(name) if kind in self.kinds)


class _Shared:
    """The optimizer's shared state as tensors of one kind, in fp64, which holds every number of it exactly."""

    kinds = ("shared",)

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors, self.names = tensors, sorted(tensors)

    def kinds_of(self, name: str) -> tuple[str, ...]:
        return self.kinds

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str, kind: str) -> Tensor:
        return self._tensors[name].double()


def compare(a: Path, b: Path, weights_only: bool, everything: bool, silent: bool) -> tuple[Sheet, bool]:
    """The differences, and whether there are none. Both are verified first. everything: also list identical tensors.

    Raises CheckpointError.
    """
    folders = good(a, silent), good(b, silent)
    wholes = [WholeState(folder) for folder in folders]
    kinds = ("weight",) if weights_only else tuple(dict.fromkeys(k for whole in wholes for k in whole.kinds))
    left, right = (_Only(whole, kinds) for whole in wholes)
    with bar("comparing", 4 * elements(left, right), silent) as watch:
        found = differences(left, right, lambda count: watch(4 * count))
    if not weights_only:
        in_a, in_b = (_Shared(whole.shared) for whole in wholes)
        found = sorted([*found, *differences(in_a, in_b)], key=Difference.order)
    states = [store.read_state(folder).model_dump() for folder in folders]
    fields = field_differences(*states)
    counted = [] if weights_only else [f for f in fields if f[0] in WHERE]
    same = not counted and all(one.outcome == "identical" for one in found)
    return _sheet(folders, found, fields, same, everything), same


def _sheet(
    folders: tuple[Path, Path],
    found: list[Difference],
    fields: list[tuple[str, Any, Any]],
    same: bool,
    everything: bool,
) -> Sheet:
    alike = sum(1 for one in found if one.outcome == "identical")
    lead = f"{alike:,} of {plural(len(found), 'tensor')} hold the same bytes" if found else "no tensors"
    facts = [("A", str(folders[0])), ("B", str(folders[1])), ("identical", "yes" if same else "no")]
    facts += [(key, f"{_told(a)} -> {_told(b)}") for key, a, b in fields if not key.startswith("stability.")]
    if memory := sum(key.startswith("stability.") for key, *_ in fields):
        facts.append(("stability", f"state of detector and policy differs in {plural(memory, 'number')}"))
    rows = [_row(one) for one in found if everything or one.outcome != "identical"]
    data = {
        "a": str(folders[0]), "b": str(folders[1]), "identical": same, "tensors": len(found),
        "tensors_identical": alike, "fields": {key: {"a": a, "b": b} for key, a, b in fields},
    }  # fmt: skip
    return Sheet("differences", lead=[lead], facts=facts, columns=COLUMNS, rows=rows, data=data)


def _told(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def _row(one: Difference) -> dict[str, Any]:
    far = one.distance
    row: dict[str, Any] = {
        "name": one.name, "kind": one.kind, "outcome": one.outcome, "differing": None,
        "elements": math.prod(one.shape_a or one.shape_b or ()),
        "shape_a": one.shape_a and list(one.shape_a), "shape_b": one.shape_b and list(one.shape_b),
    }  # fmt: skip
    if far is not None:
        row |= {"max_abs": far.max_abs, "relative": far.relative, "cosine": far.cosine}
        row |= {"one_minus_cosine": 1 - far.cosine, "differing": far.differing}
    return row
