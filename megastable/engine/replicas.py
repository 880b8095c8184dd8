"""What several ranks hold and must hold alike, bit for bit: named tensors by axis of the layout, their fingerprints."""

from __future__ import annotations

from collections.abc import Callable
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
