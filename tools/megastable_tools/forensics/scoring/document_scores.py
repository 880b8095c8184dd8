"""Score documents by a checkpoint: the loss of each, its worst window, its gradient; interrupted scorings resume.

    scores = score_shelf(open_shelf([Path("data/mine")]), Path("runs/mine"), Path("scores/mine"))
    for row in rows(Path("scores/mine")): ...

A document is read as in training: in windows of the model's sequence length, each with a fresh context, the first
one after the end of another document. This shows what token statistics do not: text that the model cannot
predict, and text that it has memorised.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from megastable import __version__
from megastable.base.errors import DataError
from megastable.checkpoint.plain import PlainModel
from megastable_tools.forensics import document_map
from megastable_tools.forensics.document_map import keep_rows, map_documents
from megastable_tools.forensics.oddness.lexicon import Lexicon
from megastable_tools.forensics.scanning.rows import coded
from megastable_tools.forensics.scoring.losses import (
    BATCH,
    check_vocabulary,
    inputs,
    load,
    losses_of,
    losses_under,
    token_losses,
    tokenizer_of,
)
from megastable_tools.forensics.scoring.pick import Parcel, Picked, digest, parcels, spread
from megastable_tools.forensics.scoring.scored import (
    ODD,
    SCHEMA,
    SHARES,
    Scores,
    histogram,
    judged,
    likes,
    rows,
)
from megastable_tools.forensics.shard_set import Shelf

__all__ = ["Scorer", "Scores", "losses_under", "rows", "score_shelf", "token_losses"]

FORMAT = 1
PARCEL = 1 << 18  # tokens of a part
MOST_PARTS = 2048  # parts grow if there would be more

Int64s = npt.NDArray[np.int64]
Raw = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]


def score_shelf(
    shelf: Shelf,
    checkpoint: Path,
    folder: Path,
    *,
    documents: Picked | None = None,
    sample: int | None = None,
    gradients: bool = False,
    exact: bool = False,
    device: str | None = None,
    batch: int = BATCH,
    again: bool = False,
    progress: bool = True,
) -> Scores:
    """Score documents of a shelf into `folder` (`scored.rows`); results of an earlier call are reused.

    documents: only these (`pick.py` makes them); sample: this many of them, evenly spread. gradients: also the norm of
    the gradient of each document's mean loss, at three times the cost. exact: in fp32. batch: tokens of a forward pass.
    again: remove any earlier scores from `folder`.

    Raises CheckpointError for a checkpoint that cannot be used; DataError for shards that are damaged or of another
    tokenizer, a folder that is occupied or holds something else, and a full disk.
    """
    if batch < 1:
        raise DataError(f"batches of {batch} tokens: give at least 1")
    model = load(checkpoint, exact, device)
    scorer = Scorer.of(shelf, model, gradients, batch)
    if sample is not None:
        documents = spread(shelf, sample, documents)
    precision = str(next(model.parameters()).dtype).removeprefix("torch.")
    asked = {
        "format": FORMAT, "version": __version__, "scores": shelf.name, "fingerprint": shelf.fingerprint,
        "checkpoint": model.fingerprint, "precision": precision, "gradients": gradients, "documents": digest(documents),
    }  # fmt: skip
    with document_map.occupied(folder, asked, again):
        work = _ScoreWork(scorer, shelf, folder, documents, progress)
        work.measure()
        scores = work.result(precision)
        scores.save(folder)
    return scores


@dataclass(frozen=True)
class Scorer:
    """A model and how it reads documents. eod: read before each, None: the first token of each has no loss.

    bytes_of: UTF-8 bytes of each token and, last, of any other id, int64 [vocabulary + 1]; None if unknown.
    """

    model: PlainModel
    eod: int | None
    bytes_of: Int64s | None
    gradients: bool
    batch: int

    @classmethod
    def of(cls, shelf: Shelf, model: PlainModel, gradients: bool = False, batch: int = BATCH) -> Scorer:
        """Raises DataError if the shelf is of another tokenizer than the model."""
        known = shelf.tokenizer.xxh3 if shelf.tokenizer else None
        if known is None and shelf.manifest is not None:
            known = shelf.manifest.tokenizer.xxh3
        check_vocabulary(model, f"the documents of {shelf.name}", shelf.vocab_size, known)
        trained = tokenizer_of(model)
        eod = shelf.eod if shelf.eod is not None else trained.eod if trained else None
        lexicon = Lexicon.of(shelf.tokenizer, model.vocabulary, eod) if shelf.tokenizer else None
        return cls(model, eod, lexicon.table("bytes") if lexicon else None, gradients, batch)

    @property
    def window(self) -> int:
        return self.model.config.sequence_length

    def measure(self, parcel: Parcel) -> pa.Table:
        """Rows (`SCHEMA`) of the documents of a parcel. Raises DataError when they cannot be read."""
        tokens, edges = _read(parcel)
        lengths, first = np.diff(edges), int(self.eod is None)
        of = windows(lengths, self.window, first)
        sums, fresh = np.zeros(len(of)), np.zeros(len(of))
        for chosen in batches(of, self.batch):
            losses = token_losses(self.model, self._rows(of, chosen, tokens, edges), self.eod, self.batch)
            at = np.arange(losses.shape[1])
            told = at < of.length[chosen, None]
            sums[chosen] = np.where(told, losses, 0.0).sum(1, dtype=np.float64)
            new = told & (at >= of.fresh[chosen, None])
            fresh[chosen] = np.where(new, losses, 0.0).sum(1, dtype=np.float64)
        totals = np.bincount(of.owner, fresh, len(lengths))
        count = np.maximum(lengths - first, 0)
        means = sums / of.length
        worse = worst(of, means, len(lengths))
        there = worse >= 0
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = totals / count
            bits = totals / math.log(2) / self._bytes(tokens, edges, first)
        columns = {
            "shard": coded(np.zeros(len(lengths), np.int8), [parcel.shard.name]),
            "document": parcel.numbers,
            "first_token": parcel.first,
            "tokens": lengths,
            "loss": loss.astype(np.float32),
            "worst_window": np.where(there, np.append(means, np.nan)[worse], np.nan).astype(np.float32),
            "worst_first": parcel.first + np.where(there, np.append(of.begin, 0)[worse], 0),
            "worst_tokens": np.where(there, np.append(of.length, 0)[worse], 0).astype(np.int32),
            "bits_per_byte": np.where(np.isfinite(bits) | np.isinf(totals), bits, np.nan).astype(np.float32),
            "gradient_norm": self._gradient_norms(of, tokens, edges, count),
        }
        return pa.table(columns, schema=SCHEMA)

    def losses(self, parcel: Parcel, begin: int, end: int) -> npt.NDArray[np.float32]:
        """The loss of each of the tokens [begin, end) of a parcel of one document, nats: float32 [end - begin]; nan for
        a first one without a loss."""
        tokens, edges = _read(parcel)
        of = windows(np.diff(edges), self.window, int(self.eod is None))
        found = np.full(len(tokens), np.nan, np.float32)
        for window in np.flatnonzero((of.begin < end) & (of.begin + of.length > begin))[:, None]:
            at, fresh, length = (int(values[window[0]]) for values in (of.begin, of.fresh, of.length))
            losses = token_losses(self.model, self._rows(of, window, tokens, edges), self.eod)[0]
            found[at + fresh : at + length] = losses[fresh:]
        return found[begin:end]

    def _rows(self, of: Windows, chosen: Int64s, tokens: Raw, edges: Int64s) -> Int64s:
        return window_rows(of, chosen, tokens, edges, self.eod or 0)

    def _bytes(self, tokens: Raw, edges: Int64s, first: int) -> npt.NDArray[np.float64]:
        """UTF-8 bytes of the tokens with a loss in each document [d]; nan if unknown."""
        if self.bytes_of is None:
            return np.full(len(edges) - 1, np.nan)
        last = len(self.bytes_of) - 1
        ids = np.where((tokens < 0) | (tokens >= last), last, tokens)
        total = np.append(0, np.cumsum(self.bytes_of[ids]))
        return (total[edges[1:]] - total[np.minimum(edges[:-1] + first, edges[1:])]).astype(np.float64)

    def _gradient_norms(
        self, of: Windows, tokens: Raw, edges: Int64s, count: Int64s
    ) -> npt.NDArray[np.float32]:
        """L2 norm of the gradient of the mean loss of each document [d]; nan without a loss."""
        norms = np.full(len(count), np.nan, np.float32)
        if not self.gradients:
            return norms
        per = max(1, self.batch // self.window)
        bounds = np.searchsorted(of.owner, np.arange(len(count) + 1))
        for document in np.flatnonzero(count).tolist():
            mine = np.arange(bounds[document], bounds[document + 1])
            # The sum is kept in fp32 for any dtype of the weights.
            total: dict[str, torch.Tensor] = {}
            for begin in range(0, len(mine), per):
                chosen = mine[begin : begin + per]
                given, segments, strange = inputs(self.model, self._rows(of, chosen, tokens, edges), self.eod)
                at = np.arange(given.shape[1] - 1)
                new = (at < of.length[chosen, None]) & (at >= of.fresh[chosen, None]) & ~strange[:, 1:]
                losses = losses_of(self.model, given, segments)
                mean = (losses * torch.from_numpy(new).to(losses.device)).sum() / int(count[document])
                found = torch.autograd.grad(mean, list(self.model.parameters()))
                for (name, _), gradient in zip(self.model.named_parameters(), found, strict=True):
                    total[name] = gradient.float() + total[name] if name in total else gradient.float()
            squares = sum(g.square().sum(dtype=torch.float64) for g in total.values())
            norms[document] = math.sqrt(float(squares))
        return norms


@dataclass
class _ScoreWork:
    scorer: Scorer
    shelf: Shelf
    folder: Path
    documents: Picked | None
    progress: bool
    number: int = 0
    measured: int = 0
    seconds: float = 0.0

    def _parcels(self) -> Iterator[Parcel]:
        size = max(PARCEL, -(-self.shelf.tokens // MOST_PARTS))
        return parcels(self.shelf, self.documents, size)

    def measure(self) -> None:
        """Measure every parcel without a part."""
        if not self.shelf.documents:
            raise DataError(f"{self.shelf.name} has no documents: there is nothing to score")
        begin, total = time.monotonic(), self.shelf.tokens
        if self.documents is not None:
            total = sum(parcel.tokens for parcel in self._parcels())
        keep = partial(keep_rows, measure=self.scorer.measure, folder=self.folder)
        labels = ("scoring", "scored")
        self.number, self.measured = map_documents(
            self._parcels(), keep, total, labels=labels, progress=self.progress
        )
        self.seconds = time.monotonic() - begin

    def result(self, precision: str) -> Scores:
        columns = ["tokens", "loss", "worst_window", "worst_tokens", "bits_per_byte"]
        parts = document_map.read_parts(self.folder, self.number, "score again", columns)
        held = [[rows[name].to_numpy() for name in columns] for rows in parts]
        tokens, loss, worse, length, bits = (np.concatenate(values) for values in zip(*held, strict=True))
        model, shelf, first = self.scorer.model, self.shelf, int(self.scorer.eod is None)
        good = np.isfinite(loss)
        told = (tokens - first)[good].astype(np.float64)
        nats = loss[good] * told
        with np.errstate(divide="ignore", invalid="ignore"):
            size = np.where(bits[good] > 0, nats / math.log(2) / bits[good], 0.0)
        edges, counts = histogram(loss)
        by, by_window = likes(tokens, loss), likes(length, worse)
        z = judged(by, tokens, loss)
        high = (np.fmax(z, judged(by_window, length, worse)) >= ODD) | ((length > 0) & ~np.isfinite(worse))
        warnings = [shelf.problem] if shelf.problem else []
        if first:
            warnings.append(
                "the end-of-document token is unknown: the first token of each document has no loss"
            )
        return Scores(
            name=shelf.name, fingerprint=shelf.fingerprint, checkpoint=str(model.checkpoint),
            checkpoint_fingerprint=model.fingerprint, step=model.step, precision=precision, device=str(model.device),
            window=self.scorer.window, gradients=self.scorer.gradients, parts=self.number, documents=len(tokens),
            tokens=int(tokens.sum()), loss=float(nats.sum() / told.sum()) if told.sum() else math.nan,
            bits_per_byte=float(nats[size > 0].sum() / math.log(2) / size.sum()) if size.sum() else None,
            likes=by, window_likes=by_window, high=int(high.sum()), low=int((z <= -ODD).sum()), edges=edges,
            counts=counts, quantiles=np.quantile(loss[good], SHARES).tolist() if good.any() else [],
            seconds=self.seconds, measured_tokens=self.measured, warnings=warnings,
        )  # fmt: skip


@dataclass(frozen=True)
class Windows:
    """Stretches of documents whose tokens get a loss from those before them in the stretch, int64 [w] each.

    owner: index of the document. begin, length: tokens [begin, begin + length) get a loss; the one before is
    also read. fresh: how many of the first ones another window has covered already.
    """

    owner: Int64s
    begin: Int64s
    length: Int64s
    fresh: Int64s

    def __len__(self) -> int:
        return len(self.owner)


def windows(lengths: Int64s, size: int, first: int) -> Windows:
    """The windows of documents of these lengths [d], with losses from token `first` (0 or 1) on.

    Each starts with a fresh context, as a training sample does, `size` tokens after the last. Only a document's last
    window overlaps the previous one, so that its tokens have as much context as others: a short rest would look bad.
    """
    told = np.maximum(lengths - first, 0)
    count = -(-told // size)
    owner = np.repeat(np.arange(len(lengths)), count)
    at = (np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)) * size
    length = np.minimum(told[owner], size)
    begin = np.minimum(at, told[owner] - length)
    return Windows(owner, begin + first, length, at - begin)


def batches(of: Windows, tokens: int) -> Iterator[Int64s]:
    """The indices of windows, in batches of similar length with at most `tokens` tokens when padded to the longest
    (at least one window)."""
    order = np.argsort(-of.length, kind="stable")
    begin = 0
    while begin < len(order):
        count = max(1, tokens // int(of.length[order[begin]]))
        yield order[begin : begin + count]
        begin += count


def window_rows(of: Windows, chosen: Int64s, tokens: Raw, edges: Int64s, before: int) -> Int64s:
    """The tokens of the `chosen` windows, int64 [b, longest + 1], padded with zeros at the end.

    tokens [n], edges int64 [d + 1]: of the documents; before: the token before the first token of each.
    """
    table = np.zeros((len(chosen), int(of.length[chosen].max()) + 1), np.int64)
    for row, window in zip(table, chosen.tolist(), strict=True):
        at, length = int(edges[of.owner[window]] + of.begin[window]), int(of.length[window])
        row[1 : length + 1] = tokens[at : at + length]
        row[0] = tokens[at - 1] if of.begin[window] else before
    return table


def worst(of: Windows, means: Floats, documents: int) -> Int64s:
    """The window with the highest mean [w] of each document, the first of equals: int64 [documents], -1 without any."""
    found = np.full(documents, -1, np.int64)
    # nan, from a broken model, counts as the highest.
    order = np.lexsort((np.arange(len(of)), np.where(np.isnan(means), -np.inf, -means), of.owner))
    firsts = np.flatnonzero(np.append(True, np.diff(of.owner[order]) != 0)) if len(of) else order
    found[of.owner[order[firsts]]] = order[firsts]
    return found


def _read(parcel: Parcel) -> tuple[Raw, Int64s]:
    """The tokens of all documents, one after the other [n], and their edges, int64 [d + 1]."""
    lengths = parcel.end - parcel.first
    if np.array_equal(parcel.end[:-1], parcel.first[1:]):
        tokens = parcel.shard.raw(int(parcel.first[0]), int(lengths.sum()))
    else:
        read = [parcel.shard.raw(a, n) for a, n in zip(parcel.first.tolist(), lengths.tolist(), strict=True)]
        tokens = np.concatenate(read)
    return tokens, np.append(0, np.cumsum(lengths))
