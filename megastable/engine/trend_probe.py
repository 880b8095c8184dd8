"""Measures what the slow signals are judged by (warnings/trends.py): a light look at one step, on all ranks.

    probe.watch_step()                            # before a step: hooks on the blocks, for one sample of this rank
    ... forward and backward ...
    probe.add_gradients(flat, pieces, scale)     # before the optimizer runs
    ... update ...
    look = probe.collect_look(flat, kept)         # the only communication: two all-reduces of a few scalars per tensor

`Probe` (layer_stats.py) measures every sample of a step, for the records. A trend needs far less: the first sample of
each data rank's first micro-batch. The cost of a look, per rank:

- attention: of that sample the projection to q and k, and the scores of at most 512 evenly spaced queries, without
  gradients: less than a sixth of the sample's share of the step. Entropy and largest logit of a longer sample are those
  of these queries;
- outputs of qkv, attention and MLP: the block once more for the first 64 tokens of that sample, without gradients,
  as code that is compiled whole runs no hooks within; for all of them where ranks share a sample. That is a third of
  these tokens' share of the step;
- memory passes over this rank's part of gradients and weights (8 bytes a parameter in fp32), over the second moments of
  embedding and head, and, for the update, over weights and both moments once more (12 bytes); 4 bytes for each row of
  embedding and head are kept until the update is done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megastable.engine.flatstate import CACHED, CHUNK, FlatState
from megastable.engine.layer_stats import BlockHooks, LayerTally, Probe, attention_chunks
from megastable.model.gpt import Block, open_stream
from megastable.model.sizes import space_evenly
from megastable.parallel.sharding import Fragment, split_in_rectangles

OUTPUTS = ("qkv", "projection", "ffn")
KINDS = ("attention", "focus", *OUTPUTS, "added", "stream", "gradient", "weight", "update", "table", "stale")
QUERIES = 512  # of a sample whose attention is examined
PREFIX = 64  # tokens of a sample whose outputs are
TABLES = ("embedding.weight", "head.weight")  # a row for every token
# From here on a row moves by a full learning rate in one step, whatever came before: Adam's first moment takes up a
# tenth of a fresh gradient g, and 0.1 g / sqrt(v) = 1 at g^2 / v = 100. Only beta2 > 0.99 lets it get this far.
STALE = 100.0
YOUNGEST = 1e-6  # share of a branch's full size, at least: it is 0 before the first update

Look = dict[str, dict[str, float]]


class TrendProbe(BlockHooks):
    """probe: the layer probe of the same rank, which knows the rows of the model. Built, and `collect_look`ed, on all
    ranks together."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe.blocks, LayerTally(list(probe.tally.rows), probe.tally.device, KINDS))
        self._counts_activations = probe.counts_activations
        self._chunk = CHUNK if probe.tally.device.type == "cuda" else CACHED
        self._seen: set[tuple[str, str]] = set()
        self._rows: dict[tuple[int, int], list[Tensor]] = {}

    def watch_step(self) -> None:
        """Watch the coming step."""
        super().watch_step()
        self._seen.clear()
        self._rows.clear()

    def drop_step(self) -> None:
        """Forget the watched step: its update was refused."""
        self._look_away()
        self.tally.clear_cells()
        self._rows.clear()
        self.watching = False

    def _first(self, block: str, when: str) -> bool:
        """Whether this is the step's first micro-batch."""
        is_first = (block, when) not in self._seen
        self._seen.add((block, when))
        return is_first

    def _before(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(block, Block)
        if not self._first(block.name, "before"):
            return
        (stream,) = args
        x, segments, _ = open_stream(stream)
        one, apart = x[:, :1], None if segments is None else segments[:1]
        queries, keys, positions = block.queries_and_keys(one if apart is None else (one, apart))
        examined = set(space_evenly(keys.shape[2], QUERIES))  # of all ranks that share the sample
        at = [position for position in positions if position in examined]
        if len(at) < len(positions):
            chosen = [number for number, position in enumerate(positions) if position in examined]
            queries = queries[:, :, torch.tensor(chosen, device=queries.device)]
        chunks = attention_chunks(queries, keys, apart, block.attention.scores, at=at)
        parts = [
            (entropy.sum(dtype=torch.float64), (uniform - entropy).sum(dtype=torch.float64), highest.amax())
            for entropy, highest, uniform in chunks
        ]
        total, short, most = (torch.stack(of) for of in zip(*parts, strict=True))
        count = queries.shape[:3].numel()
        self.tally.add_cell(block.name, "attention", total.sum(), count, most.amax())
        self._sum(block.name, "focus", short.sum(), count)
        for kind, output in zip(OUTPUTS, block.compute_outputs(one, apart, PREFIX), strict=True):
            # Those of qkv are split over a tensor group, the others whole on each of its ranks.
            if kind == "qkv" or self._counts_activations:
                self._add(block.name, kind, output)

    @torch.no_grad()
    def _after(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert isinstance(block, Block)
        if not self._first(block.name, "after") or not self._counts_activations:
            return
        x, y = (open_stream(given_stream)[0] for given_stream in (args[0], output))
        stream_before, stream_after = x[:, :1].float(), y[:, :1].float()
        self._add(block.name, "stream", stream_before)
        # A branch that still grows in (norms=branch) is measured at its full size: it does not fade.
        branch_share = 1.0 if block.grown is None else block.grown.clamp_min(YOUNGEST)
        self._add(block.name, "added", stream_after - stream_before, branch_share)

    def _add(self, row: str, kind: str, x: Tensor, scale: float | Tensor = 1.0) -> None:
        """Add the squares of x / scale to a cell."""
        for part in x.detach().reshape(-1).split(self._chunk):
            norm = torch.linalg.vector_norm(part, dtype=torch.float32).double()
            self._sum(row, kind, (norm / scale).square(), part.numel())

    def _sum(self, row: str, kind: str, total: Tensor, count: int) -> None:
        self.tally.add_cell(row, kind, total.double(), count, torch.zeros((), device=total.device))

    def add_gradients(self, flat: FlatState, pieces: Mapping[tuple[int, int], Tensor], scale: float) -> None:
        """Add the gradients of a watched step, before the optimizer runs. Local; pieces: as in
        `Probe.add_gradients`."""
        self._look_away()
        for f in flat.fragments:
            if not f.counted:
                continue
            piece = pieces[f.group, f.offset].reshape(-1)[: f.numel]
            self._add(f.name, "gradient", piece, scale)
            if f.name in TABLES:
                # Rows that two ranks share are judged in their parts.
                self._rows[f.group, f.offset] = [
                    (torch.linalg.vector_norm(r.view_of(piece), dim=1, dtype=torch.float32) / scale).square()
                    for r in split_in_rectangles(f)
                ]

    @torch.no_grad()
    def collect_look(self, flat: FlatState, kept: float) -> Look:
        """The numbers of the watched step, whose update was applied, by block and parameter; collective.

        kept: what clipping left of the gradient's norm. Of a block: "entropy" (mean of its attention, nats), "focus"
        (by how much that is below the entropy of uniform attention), "logit" (the largest q k / sqrt(d)), "qkv",
        "projection" (of attention) and "ffn" (RMS of what these products give), "added" (RMS of what the block added to
        the residual stream, relative to the stream). Of a parameter: "weight", "gradient", "update" (L2 norms),
        "numel"; of embedding and head "stale": the share of the rows with a gradient that are `STALE`.
        """
        self.watching = False
        for f in flat.fragments:
            weight_piece = flat.view_piece(f, "weight")
            if f.counted and weight_piece is not None:
                self._add(f.name, "weight", weight_piece)
                self._stale(flat, f, kept)
        for size in flat.measure_updates():
            self._sum(size.name, "update", size.squares, size.numel)
        reduced_cells = self.tally.reduce_cells()
        self.tally.clear_cells()
        self._rows.clear()
        return {name: _row(reduced_cells[:, i]) for i, name in enumerate(self.tally.rows)}

    def _stale(self, flat: FlatState, f: Fragment, kept: float) -> None:
        v = flat.view_piece(f, "exp_avg_sq") if f.name in TABLES else None
        state = flat.optimizer.state.get(flat.masters[f.group], {})
        if v is None or "step" not in state:
            return
        # A tensor: it may be on the device, and is not waited for.
        unbias = 1 - flat.settings[f.group]["betas"][1] ** state["step"].double()
        for r, squares in zip(split_in_rectangles(f), self._rows.get((f.group, f.offset), ()), strict=False):
            known = r.view_of(v).sum(1, dtype=torch.float32) / unbias
            # Counted, not weighed: one rare token that fills a document is no trend.
            self._sum(f.name, "table", (squares > 0).sum(), squares.numel())
            self._sum(f.name, "stale", (squares * kept**2 > STALE * known).sum(), squares.numel())


def _row(numbers: Tensor) -> dict[str, float]:
    """The numbers of one row, from its totals, counts and maxima, fp64 [3, kinds]."""
    total, count, highest = (dict(zip(KINDS, number_line.tolist(), strict=True)) for number_line in numbers)
    found: dict[str, float] = {}
    if count["attention"]:
        found |= {"entropy": total["attention"] / count["attention"], "logit": highest["attention"]}
        found["focus"] = total["focus"] / count["focus"]
    found |= {
        output_kind: math.sqrt(total[output_kind] / count[output_kind])
        for output_kind in OUTPUTS
        if count[output_kind]
    }
    if count["stream"] and total["stream"] > 0:
        found["added"] = math.sqrt(total["added"] / total["stream"])
    for kind in ("weight", "gradient", "update"):
        if count[kind]:
            found[kind] = math.sqrt(total[kind])
    if count["weight"]:
        found["numel"] = count["weight"]
    if total["table"] > 0:
        found["stale"] = total["stale"] / total["table"]
    return found
