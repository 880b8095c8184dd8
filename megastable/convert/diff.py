"""Compare two checkpoints tensor by tensor and field by field, for any layouts. Pure.

Tensors are first compared byte by byte, so that "identical" is exact, and only measured if they differ. Memory: one
tensor of each side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from megastable.checkpoint.pieces import CHUNK

Shape = tuple[int, ...]
Outcome = Literal["identical", "differs", "shapes differ", "only in A", "only in B"]


class Tensors(Protocol):
    """The interface of `checkpoint.whole.WholeState`: whole fp32 tensors by name and kind."""

    @property
    def names(self) -> list[str]: ...

    @property
    def kinds(self) -> tuple[str, ...]: ...

    def kinds_of(self, name: str) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str, kind: str) -> Tensor: ...


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


def differences(a: Tensors, b: Tensors, watch: Callable[[int], None] = lambda _: None) -> list[Difference]:
    """Every tensor of A or B, the largest difference first. watch: called with the number of elements just compared."""
    found = []
    for name, kind, shape_a, shape_b in pairs(a, b):
        far, outcome = None, "identical"
        if shape_a is None or shape_b is None:
            outcome = "only in A" if shape_b is None else "only in B"
        elif shape_a != shape_b:
            outcome = "shapes differ"
        elif far := distance(a.tensor(name, kind), b.tensor(name, kind)):
            outcome = "differs"
        found.append(Difference(name, kind, cast(Outcome, outcome), shape_a, shape_b, far))
        watch(math.prod(shape_a or shape_b or ()))
    return sorted(found, key=Difference.order)


def pairs(a: Tensors, b: Tensors) -> Iterator[tuple[str, str, Shape | None, Shape | None]]:
    """(name, kind, shape in A, shape in B) of everything that A or B holds, the kinds of a tensor together."""
    names_a, names_b = set(a.names), set(b.names)
    kinds = [*a.kinds, *(kind for kind in b.kinds if kind not in a.kinds)]
    for name in sorted(names_a | names_b):
        shapes = a.shape(name) if name in names_a else None, b.shape(name) if name in names_b else None
        for kind in kinds:
            in_a, in_b = (s is not None and kind in side.kinds_of(name) for s, side in zip(shapes, (a, b)))
            if in_a or in_b:
                yield name, kind, shapes[0] if in_a else None, shapes[1] if in_b else None


def elements(a: Tensors, b: Tensors) -> int:
    """Number of elements to compare, for a progress bar."""
    return sum(math.prod(shape_a or shape_b or ()) for _, _, shape_a, shape_b in pairs(a, b))


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
