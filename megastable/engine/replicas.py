"""What several ranks hold and must hold alike, bit for bit: named tensors by axis of the layout, their fingerprints;
and whether these are equal, found out in one sum over all ranks.

Every group of ranks has its own columns in the sum: of the four quarters x of a fingerprint, the sums of x and of x^2.
By the inequality of Cauchy and Schwarz n * sum(x^2) = sum(x)^2 only if all x are equal; the sums are integers below
2^53, so fp64 holds them exactly for up to 2^21 ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megastable.base.fingerprint import Marks, fingerprint
from megastable.engine.engine import Engine
from megastable.engine.flatstate import KINDS
from megastable.parallel.layout import Layout
from megastable.parallel.sharding import placement_of

Named = dict[str, Tensor]
COPIES = "copies"
QUARTERS = 4
COLUMNS = 2 * QUARTERS  # of a group
MOST = 1 << 21  # ranks of a group


def split_fingerprint(fingerprint: int) -> list[float]:
    """What a rank adds to the columns of its group. fingerprint: 64 bits, signed or not."""
    quarters = [(fingerprint >> 16 * i) & 0xFFFF for i in range(QUARTERS)]
    return [float(value) for q in quarters for value in (q, q * q)]


def are_equal(sums: Sequence[float], ranks: int) -> bool:
    """Whether all `ranks` fingerprints of a group are equal. sums: its columns, summed."""
    pairs = zip(sums[::2], sums[1::2], strict=True)
    # As integers: the products are beyond fp64.
    return all(ranks * int(squares) == int(total) ** 2 for total, squares in pairs)


class Replicas:
    """Of this rank. kinds: what is held alike, by kind, with the groups of ranks that hold it; the same on every
    rank. The weights in compute precision are COPIES: the next update overwrites them, with what is wrong in them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        layout, p = engine.topology.layout, engine.config.parallel
        self._held: dict[str, Callable[[], Named]] = {}
        self.kinds: dict[str, list[list[int]]] = {}
        if p.zero < 3 or engine.zero.copied():  # ZeRO 3 leaves small ones whole
            self._add(COPIES, "data", layout, self._weights)
        self._add("replicas", "tensor", layout, self._replicated)
        if engine.config.model.tied and layout.pipeline > 1:
            self._add("tied", "tied", layout, self._tied)
        self._add("shared state", "world", layout, lambda: dict(engine.shared_state))

    def _add(self, kind: str, axis: str, layout: Layout, held: Callable[[], Named]) -> None:
        groups = [list(range(layout.world))] if axis == "world" else layout.groups(axis)
        if len(groups[0]) > 1:
            self.kinds[kind], self._held[kind] = groups, held

    def _weights(self) -> Named:
        return {placement_of(p).name: p.data for p in self.engine.zero.copied()}

    def _replicated(self) -> Named:
        flat = self.engine.flat_state()
        found: Named = {}
        if self.engine.config.parallel.zero < 3:
            parameters: list[Any] = list(self.engine.ds.module.parameters())
            found = {placement_of(p).name: p.data for p in parameters if not p.tensor_model_parallel}
        for f in flat.fragments:
            for kind in KINDS if f.dim is None else ():
                if (piece := flat.piece(f, kind)) is not None:
                    found[f"{kind} of {f.name}"] = piece
        return found

    def _tied(self) -> Named:
        module = self.engine.ds.module
        return {placement_of(p).name: p.data for p in module.tied_modules.parameters()}

    def group(self, kind: str) -> int | None:
        """The number of this rank's group; None if it holds nothing of the kind."""
        rank = self.engine.topology.rank
        return next((i for i, ranks in enumerate(self.kinds[kind]) if rank in ranks), None)

    def fingerprint(self, kind: str, weights: Marks | None = None) -> Tensor:
        """int64 []: of all that this rank holds of the kind, which must be something. weights: marks of flat weights,
        if there are any."""
        # Hundreds of small tensors take longer than a few large ones.
        flat = kind == COPIES and self.engine.config.parallel.zero < 3
        if flat and weights is not None:
            return fingerprint([torch.stack([mark.value for mark in weights.values()])])
        return fingerprint(self.engine.zero.flat_weights if flat else self._held[kind]().values())

    def by_name(self, kind: str) -> dict[str, int]:
        """The fingerprint of every tensor of the kind that this rank holds."""
        if self.group(kind) is None:
            return {}
        return {name: int(fingerprint([t])) for name, t in self._held[kind]().items()}

    def columns(self, kinds: Iterable[str], weights: Marks | None = None) -> list[float]:
        """What this rank adds to the sum that compares these kinds. weights: as of `fingerprint`."""
        groups = {kind: self.group(kind) for kind in kinds}
        held = [self.fingerprint(kind, weights) for kind, group in groups.items() if group is not None]
        values = iter(torch.stack(held).tolist() if held else [])
        columns: list[float] = []
        for kind, own in groups.items():
            for group in range(len(self.kinds[kind])):
                columns += split_fingerprint(next(values)) if group == own else [0.0] * COLUMNS
        return columns

    def find_unequal(self, kinds: Iterable[str], sums: Sequence[float]) -> list[tuple[str, list[int]]]:
        """The kinds and groups of ranks that do not all hold the same. sums: of the `columns` of all ranks."""
        groups = [(kind, ranks) for kind in kinds for ranks in self.kinds[kind]]
        parts = (sums[i : i + COLUMNS] for i in range(0, len(sums), COLUMNS))
        return [of for of, part in zip(groups, parts, strict=True) if not are_equal(part, len(of[1]))]
