"""Locates where numbers went wrong: the first non-finite one of a refused step, or the first that grew.

    found = locate(engine, micro_batches)   # right after the refused step, on every rank
    log.emit(Located(step=step, **asdict(found)), say=True)

The state is checked first. If it is finite, the same micro-batches run again on the same weights, with hooks on every
layer that check values and gradients; the result is the earliest finding over all ranks. The replay does not change
the state. If the replay is finite, that is all it reports: recovery/ finds the cause with several replays.

    now = measure_sizes(engine, micro_batches)         # on the state in question
    good = measure_sizes(engine, micro_batches)        # on a good one, which the engine has restored
    growth = find_first_growth(good, now)              # activations, or gradients, many times as large as before
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megastable.base.collectives import gather_objects
from megastable.data.loader import MicroBatch
from megastable.engine.engine import Engine
from megastable.engine.flatstate import CACHED, CHUNK, KINDS
from megastable.engine.layer_hooks import LayerHooks, depth_of, watch_layers
from megastable.parallel.sharding import placement_of

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
        where = f"the {self.first.tensor} of {self.first.layer}"
        text = f"{where} is the first to grow: {_times(self.times)} its RMS of {self.usual:.2g}"
        if self.last != self.first:
            text += f", up to {_times(self.most)} in the {self.last.tensor} of {self.last.layer}"
        return f"{text}, for the same samples on the good state"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if math.isfinite(ratio) else "more than any number of times"


class _SizeHooks(LayerHooks):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self._blocks, self._squares = blocks, dict[TensorPlace, Tensor]()
        self._ticks = dict[tuple[bool, str, str], int]()

    def see_tensor(self, x: Tensor, micro_batch: int, backward: bool, layer: str, tensor: str) -> None:
        place_tick = self._ticks.setdefault((backward, layer, tensor), len(self._ticks))
        depth = depth_of(layer, self._blocks) * (-1 if backward else 1)
        place = TensorPlace(backward, depth, place_tick, layer, tensor)
        # In parts, as a whole gradient of the embedding in fp32 may not fit.
        flat_parts = x.detach().reshape(-1).split(CHUNK if x.is_cuda else CACHED)
        part_norms = torch.stack([torch.linalg.vector_norm(flat_part.float()) for flat_part in flat_parts])
        mean_square = part_norms.double().square().sum() / max(1, x.numel())
        known_square = self._squares.get(place, mean_square)
        self._squares[place] = torch.maximum(known_square, mean_square)

    def sizes(self, loss_scale: float) -> dict[TensorPlace, float]:
        """loss_scale: of the gradients."""
        if not self._squares:
            return {}
        sizes = zip(self._squares, torch.stack([*self._squares.values()]).sqrt().tolist(), strict=True)
        return {place: size / loss_scale if place.backward else size for place, size in sizes}


def measure_sizes(engine: Engine, micro_batches: Sequence[MicroBatch]) -> dict[TensorPlace, float]:
    """By a forward and backward of these samples on the state that the engine holds, which stays as it is. Collective;
    every rank gets the same. Costs about a step."""
    with watch_layers(engine, _SizeHooks(engine.config.model.layers)) as size_hooks:
        scale = float(getattr(engine.optimizer, "loss_scale", 1.0))
        engine.measure_step(micro_batches)
    size_by_place = dict[TensorPlace, float]()
    for rank_sizes in gather_objects(size_hooks.sizes(scale)):
        for place, tensor_size in rank_sizes.items():
            known_size = size_by_place.get(place, 0.0)
            size_by_place[place] = max(tensor_size, known_size) if math.isfinite(tensor_size) else math.inf
    return size_by_place


def find_first_growth(good: Sizes, now: Sizes) -> Growth | None:
    """Where the tensors of `now` are first `GROWN` times as large as in `good`, in the order of computing: forward,
    then backward. Not of the gradients of a routed expert's weights, which are sums over as many tokens as have chosen
    it. None: nowhere."""
    sizes = {
        place: size
        for place, size in good.items()
        if 0 < size < math.inf and not (".mlp.experts." in place.layer and place.tensor == "weight gradient")
    }
    ratios = {place: now.get(place, 0.0) / size for place, size in sizes.items()}
    grown_places = sorted(place for place, ratio in ratios.items() if ratio >= GROWN)
    if not grown_places:
        return None
    first, worst = grown_places[0], max(grown_places, key=lambda place: ratios[place])
    return Growth(first, good[first], ratios[first], worst, ratios[worst])


Kind = Literal["state", "forward", "backward", "sum", "not reproduced"]
STATE = dict(zip(KINDS, ("fp32 master of", "first moment of", "second moment of"), strict=True)) | {
    "computing": "computing copy of"  # used by forward and backward, in the run's precision
}
NAMED = 8  # parameters, ranks or positions named in a message; the rest is counted


@dataclass(frozen=True)
class Diagnosis:
    """Where the non-finite number arose; the same on every rank. Fields that do not apply are None or empty.

    kind: "state": a weight or moment is already non-finite. "forward", "backward": a layer's output, or a gradient.
    "sum": every tensor was finite, but not the gradients' sum over micro-batches and ranks, or its norm. "not
    reproduced": the replay was finite. rank ... tensor_rank: the rank that saw it first. seen_by: all ranks that saw it
    at the same place: more than one after a sum over the tensor group, or an exchange in the context group, which hides
    whose part was bad. layer: its name in the whole model, e.g. "blocks.7.mlp.down". tensor: which of its tensors
    ("output", "weight gradient", ...). value: "nan" or "inf". micro_batch: from 0, within the step. parameters: for
    "state", as `find_nonfinite_state` returns them. positions, losses: the samples of that micro-batch, absolute, and
    their losses in the replay (nats). sentence: all of this in one line.
    """

    kind: Kind
    sentence: str
    rank: int | None = None
    host: str | None = None
    stage: int | None = None
    data_rank: int | None = None
    tensor_rank: int | None = None
    seen_by: tuple[int, ...] = ()
    layer: str | None = None
    tensor: str | None = None
    value: str | None = None
    micro_batch: int | None = None
    parameters: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def reproduced(self) -> bool:
        return self.kind != "not reproduced"


def find_nonfinite_state(engine: Engine) -> list[str]:
    """The parameters with a non-finite master, moment or computing copy, e.g. "first moment of
    blocks.0.mlp.down.weight on rank 1"; empty if the state is sound. Collective; reads the state once.
    """
    return _described(gather_objects(_poison(engine)))


def locate_first_nonfinite(engine: Engine, micro_batches: Sequence[MicroBatch]) -> Diagnosis:
    """Locate the fault of the step that was just refused. Collective; costs about a step, and does not change the
    state.

    micro_batches: those of the refused step; weights and moments must be unchanged since.
    """
    host_names = engine.topology.hosts
    poison_by_rank = gather_objects(_poison(engine))
    if any(poison_by_rank):
        poisoned_parameters = _described(poison_by_rank)
        rank = next(rank for rank, first in enumerate(poison_by_rank) if first)
        return Diagnosis(
            kind="state",
            sentence=f"the state is not finite before the step begins: {', '.join(poisoned_parameters)}",
            **_place(engine, rank, host_names[rank]),
            layer=poison_by_rank[rank][0][1].rpartition(".")[0],
            parameters=tuple(poisoned_parameters),
        )
    # Replay the step with hooks
    saved_counters = engine.read_counters()
    try:
        with watch_layers(engine, _FirstBad(engine.config.model.layers)) as first_bad:
            if engine.measured is not None:  # DeepSpeed may have lowered the loss scale since
                engine.restore_scaler({"cur_scale": engine.measured.loss_scale})
            measured = engine.measure_step(micro_batches)
    finally:
        engine.restore_counters(saved_counters)
    if measured.finite:
        return Diagnosis(
            kind="not reproduced",
            sentence="not reproduced: a replay of the same samples on the same weights is finite, with a loss of "
            f"{measured.loss:.4f} and a gradient norm of {measured.grad_norm:.4f}",
        )
    first_by_rank = gather_objects(first_bad.first)
    sightings = [(rank, first) for rank, first in enumerate(first_by_rank) if first is not None]
    if not sightings:
        return Diagnosis(
            kind="sum",
            sentence=f"every output and gradient of every layer was finite on every rank (loss {measured.loss:.4f}), "
            "but not the sum of the gradients over micro-batches and ranks, or its norm",
        )
    rank, first = min(sightings, key=lambda s: (s[1].order, s[0]))
    seen_by = tuple(seeing_rank for seeing_rank, sighting in sightings if sighting.order == first.order)
    rank_place = _place(engine, rank, host_names[rank])
    # Every rank has another part of the batch; the losses cover the whole.
    rank_positions = gather_objects(micro_batches[first.micro_batch].positions.tolist())
    layout = engine.topology.layout
    batch_shape = (len(micro_batches), layout.samples, len(rank_positions[rank]))
    # An expert computes tokens of all ranks that send it some.
    sender_count = layout.expert if ".mlp.experts." in first.layer else 1
    first_sender = rank_place["data_rank"] // sender_count * sender_count
    sample_ranks = sorted({d // layout.context for d in range(first_sender, first_sender + sender_count)})
    senders = (layout.rank_at(0, sample_rank * layout.context, 0) for sample_rank in sample_ranks)
    positions = [position for sender in senders for position in rank_positions[sender]]
    losses = measured.losses.view(batch_shape)[first.micro_batch, sample_ranks].flatten().tolist()
    bad_positions = [at for at, loss in zip(positions, losses, strict=True) if not math.isfinite(loss)]
    pass_direction: Kind = "backward" if first.backward else "forward"
    sentence = (
        f"first non-finite number: {first.value} in the {first.tensor} of {first.layer}, {pass_direction} pass of "
        f"micro-batch {first.micro_batch} (from 0), rank {rank} (host {rank_place['host']}, stage "
        f"{rank_place['stage']}, data rank {rank_place['data_rank']}, tensor rank {rank_place['tensor_rank']}); "
        f"positions {_listed(positions)}"
    )
    if bad_positions:
        sentence += f", without a finite loss: {_listed(bad_positions)}"
    if len(seen_by) > 1:
        sentence += f"; seen at the same place on ranks {_listed(seen_by)}"
    return Diagnosis(
        kind=pass_direction,
        sentence=sentence,
        **rank_place,
        seen_by=seen_by,
        layer=first.layer,
        tensor=first.tensor,
        value=first.value,
        micro_batch=first.micro_batch,
        positions=tuple(positions),
        losses=tuple(losses),
    )


def _place(engine: Engine, rank: int, host: str) -> dict[str, Any]:
    stage, data_rank, tensor_rank = engine.topology.layout.coordinates_of(rank)
    return {"rank": rank, "host": host, "stage": stage, "data_rank": data_rank, "tensor_rank": tensor_rank}


def _listed(items: Sequence[Any]) -> str:
    rest_count = len(items) - NAMED
    return ", ".join(str(i) for i in items[:NAMED]) + (f" and {rest_count} more" if rest_count > 0 else "")


# The state


@torch.no_grad()
def _poison(engine: Engine) -> list[tuple[str, str]]:
    """(key of `STATE`, parameter) of non-finite state on this rank. Waits once for the device."""
    flat = engine.flat_state()
    tensors = [
        ((k, f.name), piece)
        for k in KINDS
        for f in flat.fragments
        if (piece := flat.view_piece(f, k)) is not None
    ]
    tensors += [(("computing", name), copy) for name, copy, _ in computing_copies(engine)]
    # An offloaded optimizer keeps its partition on the CPU.
    extremes = torch.stack([torch.stack(t.aminmax()).to(engine.device, torch.float32) for _, t in tensors])
    finite = extremes.isfinite().all(1).tolist()
    # A dict: each once, and in the order above.
    return list(dict.fromkeys(key for (key, _), fine in zip(tensors, finite, strict=True) if not fine))


def computing_copies(engine: Engine) -> Iterator[tuple[str, Tensor, bool]]:
    """The weights in compute precision that this rank holds: the parameter's name, the tensor, and whether that is its
    partition of ZeRO 3, beside which small ones are kept whole by every rank."""
    held_elements = {f.name: f.numel for f in engine.flat_state().fragments}
    engine.zero.wait_for_weights()
    for p in engine.ds.module.parameters():
        name, whole_weight = placement_of(p).name, p.detach()
        if whole_weight.numel():
            yield name, whole_weight, False
        # After the fragment's elements comes padding, which is never written.
        if hasattr(p, "ds_tensor") and held_elements.get(name):
            yield name, p.ds_tensor.flatten()[: held_elements[name]], True


def _described(poison: list[list[tuple[str, str]]]) -> list[str]:
    ranks_by_key: dict[tuple[str, str], list[int]] = {}
    for rank, rank_poison in enumerate(poison):
        for state_key in rank_poison:
            ranks_by_key.setdefault(state_key, []).append(rank)
    described_lines = [
        f"{STATE[kind]} {name} on {'ranks' if len(poisoned_ranks) > 1 else 'rank'} {_listed(poisoned_ranks)}"
        for (kind, name), poisoned_ranks in ranks_by_key.items()
    ]
    rest_count = len(described_lines) - NAMED
    return [*described_lines[:NAMED], f"{rest_count} more"] if rest_count > 0 else described_lines


# The replay


class _Sighting(NamedTuple):
    """A non-finite tensor. tick: number of tensors that this rank had checked."""

    micro_batch: int
    backward: bool
    depth: int  # of the layer; negative in backward, so that less is earlier
    tick: int
    layer: str
    tensor: str
    value: str

    @property
    def order(self) -> tuple[int, bool, int, int]:
        return self[:4]


class _FirstBad(LayerHooks):
    """Keeps the earliest non-finite tensor."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.first: _Sighting | None = None
        self._tick = 0

    def see_tensor(self, x: Tensor, micro_batch: int, backward: bool, layer: str, tensor: str) -> None:
        self._tick += 1
        if not x.numel():  # of an expert without tokens
            return
        tensor_extremes = torch.stack(x.detach().aminmax()).tolist()
        if all(map(math.isfinite, tensor_extremes)):
            return
        layer_depth = depth_of(layer, self.blocks) * (-1 if backward else 1)
        value_kind = "nan" if any(map(math.isnan, tensor_extremes)) else "inf"
        new_sighting = _Sighting(micro_batch, backward, layer_depth, self._tick, layer, tensor, value_kind)
        if self.first is None or new_sighting.order < self.first.order:
            self.first = new_sighting
