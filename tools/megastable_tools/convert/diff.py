"""Compare two checkpoints tensor by tensor and field by field, for any layouts.

Tensors are first compared byte by byte, so that "identical" is exact, and only measured if they differ. Memory: one
tensor of each side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megastable.base.progress_bar import bar
from megastable.base.text import plural
from megastable.checkpoint import store
from megastable.checkpoint.pieces import CHUNK
from megastable.checkpoint.whole import WholeState
from megastable.report.sheet import Column, Sheet
from megastable_tools.convert.verifying import good

Shape = tuple[int, ...]
Outcome = Literal["identical", "differs", "shapes differ", "only in A", "only in B"]
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


@dataclass(frozen=True, slots=True)
class Distance:
    """How far B is from A. differing: elements whose bytes differ; max_abs: of B - A; relative: ||B - A|| / ||A||;
    cosine: of the angle between them. Non-finite values make these nan, tensors of zeros their ratios.
    """

    differing: int
    max_abs: float
    relative: float
    cosine: float


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of both. shape_a, shape_b: None if it is missing; distance: if measured."""

    name: str
    kind: str
    outcome: Outcome
    shape_a: Shape | None
    shape_b: Shape | None
    distance: Distance | None = None

    @property
    def size(self) -> float:
        """Sort key: incomparable tensors first, then nan, then numbers."""
        if self.distance is None:
            return 0.0 if self.outcome == "identical" else math.inf
        relative = self.distance.relative
        return math.inf if math.isnan(relative) else relative

    def order(self) -> tuple[float, str, str]:
        """Sort key of a list, the largest difference first."""
        return -self.size, self.name, self.kind


def distance(a: Tensor, b: Tensor) -> Distance | None:
    """The distance of two tensors of one shape, both fp32 or both fp64; None if all bytes are equal. Sums are in fp64,
    chunk by chunk."""
    a, b = a.flatten(), b.flatten()
    bits = torch.int32 if a.dtype == torch.float32 else torch.int64
    if torch.equal(a.view(bits), b.view(bits)):
        return None
    differing, largest = 0, 0.0
    squares = torch.zeros(4, dtype=torch.float64)  # of A, of B, their product, of B - A
    for x, y in zip(a.split(CHUNK), b.split(CHUNK)):
        other = x.view(bits) != y.view(bits)
        differing += int(other.sum())
        x, y = x.double(), y.double()
        # Elements with equal bytes do not differ, not even infinities or NaNs.
        apart = torch.where(other, y - x, 0.0)
        squares += torch.stack([x.dot(x), y.dot(y), x.dot(y), apart.dot(apart)])
        step = float(apart.abs().max()) if len(apart) else 0.0
        largest = step if math.isnan(step) else max(step, largest) if not math.isnan(largest) else largest
    of_a, of_b, product, of_apart = squares.tolist()
    lengths = math.sqrt(of_a) * math.sqrt(of_b)
    relative = _ratio(math.sqrt(of_apart), math.sqrt(of_a))
    cosine = product / lengths if lengths else math.nan
    return Distance(differing, largest, relative, min(1.0, max(-1.0, cosine)) if cosine == cosine else cosine)


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.inf if part else 0.0


def differences(
    a: WholeState, b: WholeState, watch: Callable[[int], None] = lambda _: None, weights_only: bool = False
) -> list[Difference]:
    """Every tensor of A or B, the largest difference first. watch: called with the number of elements just compared."""
    found = []
    for name, kind, shape_a, shape_b in pairs(a, b, weights_only):
        both = shape_a == shape_b
        far = distance(a.tensor(name, kind), b.tensor(name, kind)) if both else None
        found.append(Difference(name, kind, name_outcome(shape_a, shape_b, far), shape_a, shape_b, far))
        watch(math.prod(shape_a or shape_b or ()))
    return sorted(found, key=Difference.order)


def compare_shared_state(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[Difference]:
    """Those of the optimizer's shared state, in fp64, which holds every number of it exactly."""
    found = []
    for name in sorted(a.keys() | b.keys()):
        shape_a, shape_b = (tuple(side[name].shape) if name in side else None for side in (a, b))
        far = distance(a[name].double(), b[name].double()) if shape_a == shape_b else None
        found.append(Difference(name, "shared", name_outcome(shape_a, shape_b, far), shape_a, shape_b, far))
    return found


def name_outcome(shape_a: Shape | None, shape_b: Shape | None, far: Distance | None) -> Outcome:
    if shape_a is None or shape_b is None:
        return "only in A" if shape_b is None else "only in B"
    if shape_a != shape_b:
        return "shapes differ"
    return "identical" if far is None else "differs"


def pairs(
    a: WholeState, b: WholeState, weights_only: bool = False
) -> Iterator[tuple[str, str, Shape | None, Shape | None]]:
    """(name, kind, shape in A, shape in B) of everything that A or B holds, the kinds of a tensor together."""
    names_a, names_b = set(a.names), set(b.names)
    kinds = ["weight"] if weights_only else [*a.kinds, *(kind for kind in b.kinds if kind not in a.kinds)]
    for name in sorted(names_a | names_b):
        shapes = a.shape(name) if name in names_a else None, b.shape(name) if name in names_b else None
        for kind in kinds:
            in_a, in_b = (s is not None and kind in side.kinds_of(name) for s, side in zip(shapes, (a, b)))
            if in_a or in_b:
                yield name, kind, shapes[0] if in_a else None, shapes[1] if in_b else None


def elements(a: WholeState, b: WholeState, weights_only: bool = False) -> int:
    """Number of elements to compare, for a progress bar."""
    return sum(math.prod(shape_a or shape_b or ()) for _, _, shape_a, shape_b in pairs(a, b, weights_only))


def field_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value in A, value in B) of the differences of two trees, keys with dots; None for a missing key."""
    before, after = dict(_leaves(a)), dict(_leaves(b))
    keys = [*before, *(key for key in after if key not in before)]
    return [
        (key, before.get(key), after.get(key))
        for key in keys
        if (key in before) != (key in after) or not _same(before.get(key), after.get(key))
    ]


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# Two checkpoints


def compare(a: Path, b: Path, weights_only: bool, everything: bool, silent: bool) -> tuple[Sheet, bool]:
    """The differences, and whether there are none. Both are verified first. everything: also list identical tensors.

    Raises CheckpointError.
    """
    folders = good(a, silent), good(b, silent)
    left, right = WholeState(folders[0]), WholeState(folders[1])
    with bar("comparing", 4 * elements(left, right, weights_only), silent) as watch:
        found = differences(left, right, lambda count: watch(4 * count), weights_only)
    if not weights_only:
        shared = compare_shared_state(left.shared, right.shared)
        found = sorted([*found, *shared], key=Difference.order)
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
