"""Periodic statistics of the model's layers and the optimizer; equal under every parallel layout.

    probe.watch_step()                            # before a step: hooks on block outputs and attention
    ... forward and backward ...
    probe.add_gradients(flat, pieces, scale)     # before the optimizer runs
    ... update ...
    statistics = probe.collect_statistics(flat, applied)    # the only communication

Every statistic is a sum of squares, a count and a maximum that each rank takes over its own part, so two
all-reduces at the end (sums, maxima) give those of the whole model and global batch. A step that is not watched
runs without hooks. Of attention: the largest logit (Dehghani et al., arXiv:2302.05442 section 2) and the
entropy, whose collapse precedes divergence (Zhai et al., arXiv:2303.06296).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megastable.engine.flatstate import CHUNK, FlatState
from megastable.fp8.controller import Fp8
from megastable.fp8.scale_factors import SLOTS
from megastable.model.gpt import Block, open_stream
from megastable.model.kernels import FULL, AttentionScores, softcap
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import TensorParallel, Topology

FATES = ("saturation", "underflow")
SHARES = tuple(f"{slot}_{fate}" for slot in SLOTS for fate in FATES)  # of tensors that FP8 quantizes
KINDS = ("gradient", "weight", "update", "second_moment", "activation", "attention", *SHARES)
SCORES = 1 << 24  # attention scores in memory at a time: 64 MiB in fp32, and their exponentials


@dataclass(frozen=True)
class LayerStatistics:
    """Findings of a probe; the same numbers on every rank. A statistic that was not measured, or does not exist yet,
    has no key.

    overall: "parameter_norm", "second_moment_norm": global L2 norms of the fp32 masters and of Adam's second moments;
    "second_moment_max": the largest of these; "update_ratio": |w after - w before| / |w after| of the step, if its
    update was applied. Of a watched step also "attention_logit", the largest pre-softmax logit q k / sqrt(d) of any
    block, and "attention_entropy", the mean of the block where it is lowest, nats; in FP8 "fp8_saturation" and
    "fp8_underflow", the largest share of any tensor that was cut to the format's largest number, or became zero.
    layers: by parameter and block, the content of `records.LayerRecord`; empty unless the step was watched.
    """

    overall: dict[str, float]
    layers: dict[str, dict[str, float]]


class LayerTally:
    """Sums, counts and maxima by row (a parameter or block) and kind. No host synchronisation until `reduce_cells`."""

    def __init__(self, rows: Sequence[str], device: torch.device, kinds: Sequence[str] = KINDS) -> None:
        self.rows, self.device, self.kinds = {name: i for i, name in enumerate(rows)}, device, kinds
        self.clear_cells()

    def clear_cells(self) -> None:
        self._cells: list[int] = []
        self._counts: list[int] = []
        self._totals: list[Tensor] = []
        self._highest: list[Tensor] = []

    def add_cell(self, row: str, kind: str, total: Tensor, count: int, highest: Tensor) -> None:
        """Add `count` numbers to a cell: their sum or that of their squares, fp64, and maximum, fp32."""
        self._cells.append(self.rows[row] * len(self.kinds) + self.kinds.index(kind))
        self._counts.append(count)
        self._totals.append(total)
        self._highest.append(highest)

    def add_moments(self, row: str, kind: str, x: Tensor, scale: float = 1.0) -> None:
        """Add the squares and the largest magnitude of x / scale to a cell; x of any shape and dtype."""
        for part in x.detach().reshape(-1).split(CHUNK):
            norm = torch.linalg.vector_norm(part, dtype=torch.float64)
            low, high = torch.aminmax(part)
            highest = torch.maximum(high, -low).float() / scale
            self.add_cell(row, kind, (norm / scale).square(), part.numel(), highest)

    def reduce_cells(self) -> Tensor:
        """Totals, counts and maxima over all ranks, fp64 [3, rows, kinds] on the CPU; collective over the world."""
        count = len(self.rows) * len(self.kinds)
        cell_sums = torch.zeros(2, count, dtype=torch.float64, device=self.device)
        cell_maxima = torch.full((count,), -math.inf, dtype=torch.float64, device=self.device)
        if self._cells:
            cell_indices = torch.tensor(self._cells, device=self.device)
            cell_counts = torch.tensor(self._counts, dtype=torch.float64, device=self.device)
            cell_sums.index_add_(1, cell_indices, torch.stack((torch.stack(self._totals), cell_counts)))
            # Libraries differ in the maximum of a NaN and a number.
            highest = torch.stack(self._highest).double().nan_to_num(math.inf, math.inf, -math.inf)
            cell_maxima.scatter_reduce_(0, cell_indices, highest, "amax")
        dist.all_reduce(cell_sums)
        dist.all_reduce(cell_maxima, op=dist.ReduceOp.MAX)
        return torch.cat((cell_sums, cell_maxima[None])).view(3, len(self.rows), len(self.kinds)).cpu()


class BlockHooks:
    """Hooks on `blocks` in the step that is watched, and the `tally` of what they find."""

    def __init__(self, blocks: Sequence[Block], tally: LayerTally) -> None:
        self.blocks, self.tally = blocks, tally
        self.watching = False
        self._hooks: list[RemovableHandle] = []

    def watch_step(self) -> None:
        """Watch the coming step."""
        self._look_away()
        self.tally.clear_cells()
        self.watching = True
        for block in self.blocks:
            self._hooks.append(block.register_forward_pre_hook(self._before))
            self._hooks.append(block.register_forward_hook(self._after))

    def _look_away(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def _after(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        raise NotImplementedError


class Probe(BlockHooks):
    """The probe of this rank's part of the model. Built, and `collect_statistics`ed, on all ranks together.

    outline: the whole model, for its names. parameter_names: of all its parameters, in the model's order.
    """

    def __init__(
        self,
        module: nn.Module,
        outline: nn.Module,
        topology: Topology,
        tp: TensorParallel,
        device: torch.device,
        fp8: Fp8 | None = None,
    ) -> None:
        self._fp8 = fp8
        blocks = [part for part in module.modules() if isinstance(part, Block)]
        # Between the blocks x is the same on all ranks of a tensor group, unless they split the sequence.
        self.counts_activations = topology.tensor_rank == 0 or tp.sequence
        self.parameter_names = list(dict.fromkeys(placement_of(p).name for p in outline.parameters()))
        block_names = [part.name for part in outline.modules() if isinstance(part, Block)]
        super().__init__(blocks, LayerTally([*self.parameter_names, *block_names], device))

    def watch_step(self) -> None:
        """Watch the coming step: the output and the attention of every block."""
        super().watch_step()
        if self._fp8 is not None:
            self._fp8.watch_quantization(self._quantized)

    def _look_away(self) -> None:
        super()._look_away()
        if self._fp8 is not None:
            self._fp8.watch_quantization(None)

    def _before(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        # Before the block, which then saves its own activations: the probe's tensors are freed by then.
        assert isinstance(block, Block)
        (stream,) = args
        _, segments, _ = open_stream(stream)
        queries, keys, at = block.queries_and_keys(stream)
        for entropy, highest, _ in attention_chunks(queries, keys, segments, block.attention.scores, at=at):
            total = entropy.sum(dtype=torch.float64)
            self.tally.add_cell(block.name, "attention", total, entropy.numel(), highest.amax())

    def _after(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert isinstance(block, Block)
        if self.counts_activations:
            self.tally.add_moments(block.name, "activation", open_stream(output)[0])

    def _quantized(self, layer: str, slot: str, saturated: Tensor, lost: Tensor, count: int) -> None:
        no_maximum = torch.zeros((), device=saturated.device)
        for fate, fate_count in zip(FATES, (saturated, lost), strict=True):
            self.tally.add_cell(f"{layer}.weight", f"{slot}_{fate}", fate_count, count, no_maximum)

    def add_gradients(self, flat: FlatState, pieces: Mapping[tuple[int, int], Tensor], scale: float) -> None:
        """Add the gradients of a watched step, before the optimizer runs. Local.

        pieces: by (group, offset) of a fragment, the mean over the global batch times `scale`.
        """
        self._look_away()
        for f in flat.fragments:
            if f.counted:
                piece = pieces[f.group, f.offset].reshape(-1)[: f.numel]
                self.tally.add_moments(f.name, "gradient", piece, scale)

    def collect_statistics(self, flat: FlatState, applied: bool) -> LayerStatistics:
        """Statistics of weights, moments and, if `applied`, the last update; and of the watched step. Collective."""
        was_watched, self.watching = self.watching, False
        if not was_watched:
            self.tally.clear_cells()
        for index, name, piece in flat.view_counted(("weight", "exp_avg_sq")):
            self.tally.add_moments(name, ("weight", "second_moment")[index], piece)
        for size in flat.measure_updates() if applied else ():
            self.tally.add_cell(size.name, "update", size.squares, size.numel, size.highest)
        reduced_cells = self.tally.reduce_cells()
        self.tally.clear_cells()
        return _statistics(reduced_cells, list(self.tally.rows), was_watched)


def _statistics(numbers: Tensor, rows: Sequence[str], watched: bool) -> LayerStatistics:
    """numbers: [3, rows, kinds], see `LayerTally.reduce_cells`."""
    column = {kind: numbers[:, :, i] for i, kind in enumerate(KINDS)}
    total = {kind: float(of[0].sum()) for kind, of in column.items()}
    highest = {kind: float(of[2].max()) for kind, of in column.items() if of[1].any()}
    layers = {
        name: _row({kind: of[:, i].tolist() for kind, of in column.items()})
        for i, name in enumerate(rows if watched else ())
    }
    overall = {"parameter_norm": math.sqrt(total["weight"])}
    if "second_moment" in highest:
        overall["second_moment_norm"] = math.sqrt(total["second_moment"])
        overall["second_moment_max"] = highest["second_moment"]
    if "update" in highest:
        overall["update_ratio"] = _ratio(total["update"], total["weight"])
    if "attention" in highest:
        overall["attention_logit"] = highest["attention"]
        entropies = [row["attention_entropy"] for row in layers.values() if "attention_entropy" in row]
        overall["attention_entropy"] = min(entropies)
    for fate in FATES:
        shares = [r[kind] for r in layers.values() for kind in SHARES if kind.endswith(fate) and kind in r]
        if shares:
            overall[f"fp8_{fate}"] = max(shares)
    return LayerStatistics(overall, layers)


def _row(cells: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The record of a parameter or block, from its (total, count, maximum) by kind."""
    row_numbers: dict[str, float] = {}
    for cell_kind, (total, count, highest) in cells.items():
        if not count:
            continue
        if cell_kind == "attention":
            row_numbers |= {"attention_logit": highest, "attention_entropy": total / count}
        elif cell_kind in SHARES:
            row_numbers[cell_kind] = total / count
        elif cell_kind == "update":
            row_numbers["update_ratio"] = _ratio(total, cells["weight"][0])
        else:
            row_numbers |= {f"{cell_kind}_rms": math.sqrt(total / count), f"{cell_kind}_max": highest}
    return row_numbers


def _ratio(squares: float, of: float) -> float:
    return math.sqrt(squares / of) if of else math.nan


@torch.no_grad()
def attention_chunks(
    q: Tensor,
    k: Tensor,
    segments: Tensor | None,
    scores: AttentionScores = FULL,
    most: int = SCORES,
    at: Sequence[int] | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Entropy (nats) and largest logit (before a cap) of attention, both fp32 [b, k, q / k, c], for c queries at a
    time; and the entropy of uniform attention to the keys that they see, broadcastable to that shape.

    q [b, q, s, d], k [b, k, s, d], after the rotation; segments [b, s]: attention stays inside documents. at: ascending
    positions of the n queries in q [b, q, n, d]; None: all. At most `most` scores, but at
    least those of one query of each head, are in memory at a time; those of keys after a chunk are not computed.
    """
    b, heads, n, _ = q.shape
    s, at = k.shape[2], at or range(n)
    key_heads, group_size = k.shape[1], heads // k.shape[1]
    # An eighth at most: a chunk's first query is compared with the keys of its last.
    at_a_time = max(1, min(most // (b * heads * s), -(-n // 8)))
    q, k = q.unflatten(1, (key_heads, group_size)), k.float().transpose(-2, -1)
    key_positions = torch.arange(s, device=q.device)
    query_positions = key_positions if n == s else torch.tensor(at, device=q.device)
    for first_query in range(0, n, at_a_time):
        end_query = min(first_query + at_a_time, n)
        chunk_queries, key_end = query_positions[first_query:end_query], at[end_query - 1] + 1
        refused_keys = ~scores.make_mask(chunk_queries, key_positions[:key_end])
        if segments is not None:
            refused_keys = refused_keys | (segments[:, chunk_queries, None] != segments[:, None, :key_end])
            refused_keys = refused_keys[:, None, None]
        found = _entropy(q[..., first_query:end_query, :], k[..., :key_end], refused_keys, scores)
        yield *found, (~refused_keys).sum(-1).log()


def _entropy(q: Tensor, k: Tensor, refused: Tensor, scores: AttentionScores) -> tuple[Tensor, Tensor]:
    """One chunk: q [b, k, q / k, c, d], k fp32 [b, k, d, n], refused broadcastable to [b, k, q / k, c, n]. A function,
    so that its scores are freed before the next chunk's."""
    scaled_queries = q.float().flatten(2, 3) * scores.score_factor(q.shape[-1])
    logits = (scaled_queries @ k).unflatten(2, q.shape[2:4])
    # Finite, so that its product with a probability of zero is zero.
    logits.masked_fill_(refused, -1e30)
    highest_logits = highest_capped = logits.amax(-1)
    if scores.cap is not None:
        logits = softcap(logits, scores.cap).masked_fill_(refused, -1e30)
        highest_capped = logits.amax(-1)
    logits -= highest_capped.unsqueeze(-1)
    unnormed_weights = logits.exp()
    weight_sum = unnormed_weights.sum(-1)
    return weight_sum.log() - unnormed_weights.mul_(logits).sum(-1) / weight_sum, highest_logits
