"""Locate the first non-finite number of a refused step: in the state, or in a layer's forward or backward.

    found = locate(engine, micro_batches)   # right after the refused step, on every rank
    log.emit(Located(step=step, **asdict(found)), say=True)

The state is checked first. If it is finite, the same micro-batches run again on the same weights, with hooks on every
layer that check values and gradients; the result is the earliest finding over all ranks. The replay does not change
the state. If the replay is finite, that is all it reports: recovery/ finds the cause with several replays.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megastable.base.collectives import gathered
from megastable.data.loader import MicroBatch
from megastable.engine.engine import Engine
from megastable.engine.flatstate import KINDS
from megastable.engine.layer_hooks import LayerHooks, watching
from megastable.engine.layer_names import depth_of
from megastable.parallel.sharding import placement_of

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
    "state", as `poisoned` returns them. positions, losses: the samples of that micro-batch, absolute, and their losses
    in the replay (nats). sentence: all of this in one line.
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


def poisoned(engine: Engine) -> list[str]:
    """The parameters with a non-finite master, moment or computing copy, e.g. "first moment of
    blocks.0.mlp.down.weight on rank 1"; empty if the state is sound. Collective; reads the state once.
    """
    return _described(gathered(_poison(engine)))


def locate(engine: Engine, micro_batches: Sequence[MicroBatch]) -> Diagnosis:
    """Locate the fault of the step that was just refused. Collective; costs about a step, and does not change the
    state.

    micro_batches: those of the refused step; weights and moments must be unchanged since.
    """
    hosts = gathered(socket.gethostname())
    poison = gathered(_poison(engine))
    if any(poison):
        parameters = _described(poison)
        rank = next(rank for rank, found in enumerate(poison) if found)
        return Diagnosis(
            kind="state",
            sentence=f"the state is not finite before the step begins: {', '.join(parameters)}",
            **_place(engine, rank, hosts[rank]),
            layer=poison[rank][0][1].rpartition(".")[0],
            parameters=tuple(parameters),
        )
    # Replay the step with hooks
    with _loss_scale_kept(engine), watching(engine, _FirstBad(engine.config.model.layers)) as watch:
        if engine.measured is not None:
            engine.set_loss_scale(engine.measured.loss_scale)  # DeepSpeed may have lowered it since
        measured = engine.measure(micro_batches)
    if measured.finite:
        return Diagnosis(
            kind="not reproduced",
            sentence="not reproduced: a replay of the same samples on the same weights is finite, with a loss of "
            f"{measured.loss:.4f} and a gradient norm of {measured.grad_norm:.4f}",
        )
    seen = [(rank, found) for rank, found in enumerate(gathered(watch.first)) if found is not None]
    if not seen:
        return Diagnosis(
            kind="sum",
            sentence=f"every output and gradient of every layer was finite on every rank (loss {measured.loss:.4f}), "
            "but not the sum of the gradients over micro-batches and ranks, or its norm",
        )
    rank, found = min(seen, key=lambda s: (s[1].order, s[0]))
    seen_by = tuple(r for r, other in seen if other.order == found.order)
    place = _place(engine, rank, hosts[rank])
    # Every rank has another part of the batch; the losses cover the whole.
    positions = gathered(micro_batches[found.micro_batch].positions.tolist())[rank]
    layout = engine.topology.layout
    shape = (len(micro_batches), layout.samples, len(positions))
    losses = measured.losses.view(shape)[found.micro_batch, place["data_rank"] // layout.context].tolist()
    bad = [p for p, loss in zip(positions, losses, strict=True) if not math.isfinite(loss)]
    direction: Kind = "backward" if found.backward else "forward"
    sentence = (
        f"first non-finite number: {found.value} in the {found.tensor} of {found.layer}, {direction} pass of "
        f"micro-batch {found.micro_batch} (from 0), rank {rank} (host {place['host']}, stage {place['stage']}, data "
        f"rank {place['data_rank']}, tensor rank {place['tensor_rank']}); positions {_listed(positions)}"
    )
    if bad:
        sentence += f", without a finite loss: {_listed(bad)}"
    if len(seen_by) > 1:
        sentence += f"; seen at the same place on ranks {_listed(seen_by)}"
    return Diagnosis(
        kind=direction,
        sentence=sentence,
        **place,
        seen_by=seen_by,
        layer=found.layer,
        tensor=found.tensor,
        value=found.value,
        micro_batch=found.micro_batch,
        positions=tuple(positions),
        losses=tuple(losses),
    )


def _place(engine: Engine, rank: int, host: str) -> dict[str, Any]:
    stage, data_rank, tensor_rank = engine.topology.layout.coordinates(rank)
    return {"rank": rank, "host": host, "stage": stage, "data_rank": data_rank, "tensor_rank": tensor_rank}


def _listed(items: Sequence[Any]) -> str:
    rest = len(items) - NAMED
    return ", ".join(str(i) for i in items[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


# The state


@torch.no_grad()
def _poison(engine: Engine) -> list[tuple[str, str]]:
    """(key of `STATE`, parameter) of non-finite state on this rank. Waits once for the device."""
    flat = engine.flat_state()
    tensors = [
        ((k, f.name), piece) for k in KINDS for f in flat.fragments if (piece := flat.piece(f, k)) is not None
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
    held = {fragment.name: fragment.numel for fragment in engine.flat_state().fragments}
    for parameter in engine.ds.module.parameters():
        name, whole = placement_of(parameter).name, parameter.detach()
        if whole.numel():
            yield name, whole, False
        # After the fragment's elements comes padding, which is never written.
        if hasattr(parameter, "ds_tensor") and held.get(name):
            yield name, parameter.ds_tensor.flatten()[: held[name]], True


def _described(poison: list[list[tuple[str, str]]]) -> list[str]:
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, found in enumerate(poison):
        for key in found:
            ranks.setdefault(key, []).append(rank)
    lines = [
        f"{STATE[kind]} {name} on {'ranks' if len(on) > 1 else 'rank'} {_listed(on)}"
        for (kind, name), on in ranks.items()
    ]
    rest = len(lines) - NAMED
    return [*lines[:NAMED], f"{rest} more"] if rest > 0 else lines


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

    def see(self, x: Tensor, micro_batch: int, backward: bool, layer: str, tensor: str) -> None:
        self._tick += 1
        extremes = torch.stack(x.detach().aminmax()).tolist()
        if all(map(math.isfinite, extremes)):
            return
        depth = depth_of(layer, self.blocks) * (-1 if backward else 1)
        value = "nan" if any(map(math.isnan, extremes)) else "inf"
        seen = _Sighting(micro_batch, backward, depth, self._tick, layer, tensor, value)
        if self.first is None or seen.order < self.first.order:
            self.first = seen


@contextlib.contextmanager
def _loss_scale_kept(engine: Engine) -> Iterator[None]:
    counters = engine.counters()
    try:
        yield
    finally:
        engine.restore_counters(counters)
