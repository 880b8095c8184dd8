"""Locates the layer in which a numerical cascade began: the first one whose activations, or gradients, are many times
as large as on a good state, for the same samples.

now = measure_sizes(engine, micro_batches)         # on the state in question
good = measure_sizes(engine, micro_batches)        # on a good one, which the engine has restored
growth = find_first_growth(good, now)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megastable.base.collectives import gathered
from megastable.data.loader import MicroBatch
from megastable.engine.engine import Engine
from megastable.engine.flatstate import CACHED, CHUNK
from megastable.engine.layer_hooks import LayerHooks, watching
from megastable.engine.layer_names import depth_of

# Times as large. Chosen, not measured: planted noise on a good state stays below it (tests/recovery/test_recovery.py).
GROWN = 4.0


class TensorPlace(NamedTuple):
    """In the order of computing. depth: of the layer, negative in backward; tick: the place within the layers of a
    rank."""

    backward: bool
    depth: int
    tick: int
    layer: str
    tensor: str


Sizes = Mapping[TensorPlace, float]
"""The root mean square of every tensor, the largest of all micro-batches and ranks."""


class Growth(NamedTuple):
    """first: where it began, there `times` as large as `usual`. last: the place of the largest ratio, which is
    `most`."""

    first: TensorPlace
    usual: float
    times: float
    last: TensorPlace
    most: float

    @property
    def sentence(self) -> str:
        f = self.first
        text = f"the {f.tensor} of {f.layer} is the first to grow: {_times(self.times)} its RMS of {self.usual:.2g}"
        if self.last != f:
            text += f", up to {_times(self.most)} in the {self.last.tensor} of {self.last.layer}"
        return f"{text}, for the same samples on the good state"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if math.isfinite(ratio) else "more than any number of times"


class _SizeHooks(LayerHooks):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self._blocks, self._squares = blocks, dict[TensorPlace, Tensor]()
        self._ticks = dict[tuple[bool, str, str], int]()

    def see(self, x: Tensor, micro_batch: int, backward: bool, layer: str, tensor: str) -> None:
        tick = self._ticks.setdefault((backward, layer, tensor), len(self._ticks))
        place = TensorPlace(
            backward, depth_of(layer, self._blocks) * (-1 if backward else 1), tick, layer, tensor
        )
        # In parts, as a whole gradient of the embedding in fp32 may not fit.
        parts = x.detach().reshape(-1).split(CHUNK if x.is_cuda else CACHED)
        norms = torch.stack([torch.linalg.vector_norm(part.float()) for part in parts])
        square = norms.double().square().sum() / max(1, x.numel())
        known = self._squares.get(place)
        self._squares[place] = square if known is None else torch.maximum(known, square)

    def sizes(self, loss_scale: float) -> dict[TensorPlace, float]:
        """loss_scale: of the gradients."""
        if not self._squares:
            return {}
        roots = torch.stack([*self._squares.values()]).sqrt().tolist()
        return {
            place: root / loss_scale if place.backward else root
            for place, root in zip(self._squares, roots, strict=True)
        }


def measure_sizes(engine: Engine, micro_batches: Sequence[MicroBatch]) -> dict[TensorPlace, float]:
    """By a forward and backward of these samples on the state that the engine holds, which stays as it is. Collective;
    every rank gets the same. Costs about a step."""
    with watching(engine, _SizeHooks(engine.config.model.layers)) as hooks:
        scale = float(getattr(engine.optimizer, "loss_scale", 1.0))
        engine.measure(micro_batches)
    found = dict[TensorPlace, float]()
    for sizes in gathered(hooks.sizes(scale)):
        for place, size in sizes.items():
            found[place] = max(size if math.isfinite(size) else math.inf, found.get(place, 0.0))
    return found


def find_first_growth(good: Sizes, now: Sizes) -> Growth | None:
    """Where the tensors of `now` are first `GROWN` times as large as in `good`, in the order of computing: forward,
    then backward. None: nowhere."""
    ratios = {place: _ratio(now.get(place, 0.0), usual) for place, usual in good.items()}
    grown = sorted(place for place, ratio in ratios.items() if ratio >= GROWN)
    if not grown:
        return None
    first, last = grown[0], max(grown, key=lambda place: ratios[place])
    return Growth(first, good[first], ratios[first], last, ratios[last])


def _ratio(now: float, usual: float) -> float:
    return now / usual if 0 < usual < math.inf else 0.0
