"""Score documents by a checkpoint: the loss of each, its worst window, its gradient; interrupted scorings resume.

    scores = score_shelf(open_shelf([Path("data/mine")]), Path("runs/mine"), Path("scores/mine"))
    for row in rows(Path("scores/mine")): ...

A document is read as in training: in windows of the model's sequence length, each with a fresh context, the first
one after the end of another document. This shows what token statistics do not: text that the model cannot
predict, and text that it has memorised. Documents are selected before that: all, some evenly spread, or those of
a list; they are read in runs of a bounded size, parcels.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping
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
from megastable.data.shards import Shard
from megastable_tools.forensics import resumable_map
from megastable_tools.forensics.oddness.features import Lexicon
from megastable_tools.forensics.pruning.prune_plan import read_plan
from megastable_tools.forensics.resumable_map import keep_rows, map_documents
from megastable_tools.forensics.scanning.rows import encode_names
from megastable_tools.forensics.scanning.units import split_into_units
from megastable_tools.forensics.scoring.losses import (
    BATCH,
    check_vocabulary,
    load_model,
    losses_of,
    make_inputs,
    token_losses,
    tokenizer_of,
)
from megastable_tools.forensics.scoring.scored import (
    ODD,
    SCHEMA,
    SHARES,
    Scores,
    find_baselines,
    judge_losses,
    loss_histogram,
)
from megastable_tools.forensics.shard_set import Shelf

Int64s = npt.NDArray[np.int64]
Picked = Mapping[str, Int64s]  # by shard, the numbers of its documents, ascending


@dataclass(frozen=True)
class Parcel:
    """Documents of one shard processed together: their numbers [d], and tokens [first, end) of each."""

    number: int
    shard: Shard
    numbers: Int64s
    first: Int64s
    end: Int64s

    @property
    def tokens(self) -> int:
        return int((self.end - self.first).sum())


def pick_listed(shelf: Shelf, path: Path) -> dict[str, Int64s]:
    """The documents that a plan or a list by hand names. Raises DataError for one that is not in `shelf`."""
    list_plan = read_plan(path)
    if shelf.manifest is not None and shelf.directory is not None:
        shard_removals = list_plan.check_removals(shelf.directory, shelf.manifest, twice=True)
        return {shard: document_numbers.touched for shard, document_numbers in shard_removals.items()}
    named_documents = {
        shard: np.array([plan_line.document for plan_line in lines], np.int64)
        for shard, lines in list_plan.lines.items()
    }
    return check_picked(shelf, named_documents)


def pick_between(shelf: Shelf, first: int, end: int) -> dict[str, Int64s]:
    """The documents [first, end), counted over all shards. Raises DataError when there are none."""
    if not 0 <= first < min(end, shelf.documents):
        raise DataError(
            f"{shelf.name} has the documents 0 to {shelf.documents - 1}, none of {first} to {end - 1}"
        )
    return _by_shard(shelf, np.arange(first, min(end, shelf.documents)))


def pick_spread(shelf: Shelf, count: int, among: Picked | None = None) -> dict[str, Int64s]:
    """`count` documents evenly spread over all, or over those of `among`; all of them if there are no more."""
    if count < 1:
        raise DataError(f"a sample of {count} documents: give at least 1")
    total = shelf.documents if among is None else sum(map(len, among.values()))
    wanted = (np.arange(min(count, total)) * total + total // 2) // max(min(count, total), 1)
    return _by_shard(shelf, wanted, among)


def check_picked(shelf: Shelf, picked: Picked) -> dict[str, Int64s]:
    """Each once, ascending. Raises DataError for documents that are not in `shelf`, and for an empty selection."""
    documents_by_shard = {}
    for shard_name, documents in picked.items():
        shard = shelf.find_shard(shard_name)
        documents = np.unique(documents)
        if documents.size and not 0 <= documents[0] <= documents[-1] < shard.documents:
            wrong_document = documents[0] if documents[0] < 0 else documents[-1]
            raise DataError(
                f"there is no document {wrong_document} in {shard_name}, which has {shard.documents:,}, counted from 0"
            )
        if documents.size:
            documents_by_shard[shard_name] = documents
    if not documents_by_shard:
        raise DataError(f"no document of {shelf.name} is named: nothing to do")
    return documents_by_shard


def digest_picked(picked: Picked | None) -> str:
    """A digest to compare two selections; "" for all."""
    if picked is None:
        return ""
    digest_parts = [(shard_name, picked[shard_name].tobytes()) for shard_name in sorted(picked)]
    return hashlib.sha256(repr(digest_parts).encode()).hexdigest()


def split_into_parcels(shelf: Shelf, picked: Picked | None, size: int) -> Iterator[Parcel]:
    """The documents in the order of the shards, in runs of about `size` tokens; a longer one is alone."""
    if picked is None:
        for unit in split_into_units(shelf.shards, size):
            shard = shelf.shards[unit.shard]
            unit_edges = shard.document_edges(unit.first_document, unit.documents)
            yield Parcel(unit.number, shard, unit.numbers, unit_edges[:-1], unit_edges[1:])
        return
    parcel_number = 0
    for shard in shelf.shards:
        documents = picked.get(shard.name, np.empty(0, np.int64))
        own_bounds = [shard.document_bounds(document) for document in documents.tolist()]
        bounds = np.array(own_bounds, np.int64).reshape(-1, 2)
        total = np.cumsum(bounds[:, 1] - bounds[:, 0])
        first_index = 0
        while first_index < len(documents):
            tokens_done = int(total[first_index - 1]) if first_index else 0
            end_index = max(first_index + 1, int(np.searchsorted(total, tokens_done + size, side="right")))
            some = slice(first_index, end_index)
            yield Parcel(parcel_number, shard, documents[some], bounds[some, 0], bounds[some, 1])
            parcel_number, first_index = parcel_number + 1, end_index


def _by_shard(shelf: Shelf, wanted: Int64s, among: Picked | None = None) -> dict[str, Int64s]:
    """Documents counted over all shards, or over those of `among`, ascending, by shard."""
    documents_by_shard, before = {}, 0
    for shard in shelf.shards:
        own_documents = None if among is None else among.get(shard.name, np.empty(0, np.int64))
        count = shard.documents if own_documents is None else len(own_documents)
        inside = wanted[(wanted >= before) & (wanted < before + count)] - before
        if inside.size:
            documents_by_shard[shard.name] = inside if own_documents is None else own_documents[inside]
        before += count
    return documents_by_shard


FORMAT = 1
PARCEL = 1 << 18  # tokens of a part
MOST_PARTS = 2048  # parts grow if there would be more

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

    documents: only these, as `pick_between` or `pick_listed` give them; sample: this many of them, evenly spread.
    gradients: also the norm of the gradient of each document's mean loss, at three times the cost. exact: in fp32.
    batch: tokens of a forward pass.
    again: remove any earlier scores from `folder`.

    Raises CheckpointError for a checkpoint that cannot be used; DataError for shards that are damaged or of another
    tokenizer, a folder that is occupied or holds something else, and a full disk.
    """
    if batch < 1:
        raise DataError(f"batches of {batch} tokens: give at least 1")
    model = load_model(checkpoint, exact, device)
    scorer = Scorer.of_shelf(shelf, model, gradients, batch)
    if sample is not None:
        documents = pick_spread(shelf, sample, documents)
    precision = str(next(model.parameters()).dtype).removeprefix("torch.")
    asked_settings = {
        "format": FORMAT, "version": __version__, "scores": shelf.name, "fingerprint": shelf.fingerprint,
        "checkpoint": model.fingerprint, "precision": precision, "gradients": gradients,
        "documents": digest_picked(documents),
    }  # fmt: skip
    with resumable_map.occupy_folder(folder, asked_settings, again):
        if not shelf.documents:
            raise DataError(f"{shelf.name} has no documents: there is nothing to score")
        begin_time, total_tokens = time.monotonic(), shelf.tokens
        parcel_size = max(PARCEL, -(-shelf.tokens // MOST_PARTS))
        split_shelf = partial(split_into_parcels, shelf, documents, parcel_size)
        if documents is not None:
            total_tokens = sum(parcel.tokens for parcel in split_shelf())
        keep_parcel = partial(keep_rows, measure=scorer.measure_parcel, folder=folder)
        labels = ("scoring", "scored")
        part_count, measured_tokens = map_documents(
            split_shelf(), keep_parcel, total_tokens, labels=labels, progress=progress
        )
        seconds = time.monotonic() - begin_time
        score_result = _sum_up(scorer, shelf, folder, part_count, precision, seconds, measured_tokens)
        score_result.save_result(folder)
    return score_result


def _sum_up(
    scorer: Scorer, shelf: Shelf, folder: Path, parts: int, precision: str, seconds: float, measured: int
) -> Scores:
    """What is said of all documents together, from the rows of all parts. seconds, measured: of this call, and the
    tokens that it measured."""
    column_names = ["tokens", "loss", "worst_window", "worst_tokens", "bits_per_byte"]
    row_parts = resumable_map.read_parts(folder, parts, "score again", column_names)
    held = [[part_rows[column_name].to_numpy() for column_name in column_names] for part_rows in row_parts]
    tokens, loss, worse, length, bits = (np.concatenate(values) for values in zip(*held, strict=True))
    model, first_loss = scorer.model, int(scorer.eod is None)
    is_finite = np.isfinite(loss)
    loss_counts = (tokens - first_loss)[is_finite].astype(np.float64)
    total_nats = loss[is_finite] * loss_counts
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.where(bits[is_finite] > 0, total_nats / math.log(2) / bits[is_finite], 0.0)
    bar_edges, bar_counts = loss_histogram(loss)
    by, by_window = find_baselines(tokens, loss), find_baselines(length, worse)
    z = judge_losses(by, tokens, loss)
    is_high = np.fmax(z, judge_losses(by_window, length, worse)) >= ODD
    is_high |= (length > 0) & ~np.isfinite(worse)
    warnings = [shelf.problem] if shelf.problem else []
    if first_loss:
        warnings.append("the end-of-document token is unknown: the first token of each document has no loss")
    return Scores(
        name=shelf.name, fingerprint=shelf.fingerprint, checkpoint=str(model.checkpoint),
        checkpoint_fingerprint=model.fingerprint, step=model.step, precision=precision, device=str(model.device),
        window=scorer.window, gradients=scorer.gradients, parts=parts, documents=len(tokens), tokens=int(tokens.sum()),
        loss=float(total_nats.sum() / loss_counts.sum()) if loss_counts.sum() else math.nan,
        bits_per_byte=float(total_nats[size > 0].sum() / math.log(2) / size.sum()) if size.sum() else None,
        likes=by, window_likes=by_window, high=int(is_high.sum()), low=int((z <= -ODD).sum()), edges=bar_edges,
        counts=bar_counts, quantiles=np.quantile(loss[is_finite], SHARES).tolist() if is_finite.any() else [],
        seconds=seconds, measured_tokens=measured, warnings=warnings,
    )  # fmt: skip


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
    def of_shelf(cls, shelf: Shelf, model: PlainModel, gradients: bool = False, batch: int = BATCH) -> Scorer:
        """Raises DataError if the shelf is of another tokenizer than the model."""
        known_xxh3 = shelf.tokenizer.xxh3 if shelf.tokenizer else None
        if known_xxh3 is None and shelf.manifest is not None:
            known_xxh3 = shelf.manifest.tokenizer.xxh3
        check_vocabulary(model, f"the documents of {shelf.name}", shelf.vocab_size, known_xxh3)
        trained_tokenizer = tokenizer_of(model)
        eod = shelf.eod if shelf.eod is not None else trained_tokenizer.eod if trained_tokenizer else None
        lexicon = Lexicon.of_tokenizer(shelf.tokenizer, model.vocabulary, eod) if shelf.tokenizer else None
        return cls(model, eod, lexicon.counts_of("bytes") if lexicon else None, gradients, batch)

    @property
    def window(self) -> int:
        return self.model.config.sequence_length

    def measure_parcel(self, parcel: Parcel) -> pa.Table:
        """Rows (`SCHEMA`) of the documents of a parcel. Raises DataError when they cannot be read."""
        tokens, edges = _read(parcel)
        document_lengths, first_loss = np.diff(edges), int(self.eod is None)
        of = cut_windows(document_lengths, self.window, first_loss)
        window_sums, fresh_sums = np.zeros(len(of)), np.zeros(len(of))
        for chosen in batch_windows(of, self.batch):
            losses = token_losses(self.model, self._rows(of, chosen, tokens, edges), self.eod, self.batch)
            token_places = np.arange(losses.shape[1])
            has_loss = token_places < of.length[chosen, None]
            window_sums[chosen] = np.where(has_loss, losses, 0.0).sum(1, dtype=np.float64)
            is_new = has_loss & (token_places >= of.fresh[chosen, None])
            fresh_sums[chosen] = np.where(is_new, losses, 0.0).sum(1, dtype=np.float64)
        totals = np.bincount(of.owner, fresh_sums, len(document_lengths))
        loss_counts = np.maximum(document_lengths - first_loss, 0)
        means = window_sums / of.length
        worse = find_worst_windows(of, means, len(document_lengths))
        has_window = worse >= 0
        with np.errstate(divide="ignore", invalid="ignore"):
            document_loss = totals / loss_counts
            bits = totals / math.log(2) / self._bytes(tokens, edges, first_loss)
        row_columns = {
            "shard": encode_names(np.zeros(len(document_lengths), np.int8), [parcel.shard.name]),
            "document": parcel.numbers,
            "first_token": parcel.first,
            "tokens": document_lengths,
            "loss": document_loss.astype(np.float32),
            "worst_window": np.where(has_window, np.append(means, np.nan)[worse], np.nan).astype(np.float32),
            "worst_first": parcel.first + np.where(has_window, np.append(of.begin, 0)[worse], 0),
            "worst_tokens": np.where(has_window, np.append(of.length, 0)[worse], 0).astype(np.int32),
            "bits_per_byte": np.where(np.isfinite(bits) | np.isinf(totals), bits, np.nan).astype(np.float32),
            "gradient_norm": self._gradient_norms(of, tokens, edges, loss_counts),
        }
        return pa.table(row_columns, schema=SCHEMA)

    def losses_between(self, parcel: Parcel, begin: int, end: int) -> npt.NDArray[np.float32]:
        """The loss of each of the tokens [begin, end) of a parcel of one document, nats: float32 [end - begin]; nan for
        a first one without a loss."""
        tokens, edges = _read(parcel)
        of = cut_windows(np.diff(edges), self.window, int(self.eod is None))
        losses_found = np.full(len(tokens), np.nan, np.float32)
        for window in np.flatnonzero((of.begin < end) & (of.begin + of.length > begin))[:, None]:
            window_begin, fresh_count, length = (int(v[window[0]]) for v in (of.begin, of.fresh, of.length))
            window_losses = token_losses(self.model, self._rows(of, window, tokens, edges), self.eod)[0]
            losses_found[window_begin + fresh_count : window_begin + length] = window_losses[fresh_count:]
        return losses_found[begin:end]

    def _rows(self, of: Windows, chosen: Int64s, tokens: Raw, edges: Int64s) -> Int64s:
        """The tokens of the `chosen` windows, int64 [b, longest + 1], padded with zeros at the end."""
        token_table = np.zeros((len(chosen), int(of.length[chosen].max()) + 1), np.int64)
        for table_row, window in zip(token_table, chosen.tolist(), strict=True):
            at, window_length = int(edges[of.owner[window]] + of.begin[window]), int(of.length[window])
            table_row[1 : window_length + 1] = tokens[at : at + window_length]
            table_row[0] = tokens[at - 1] if of.begin[window] else self.eod or 0
        return token_table

    def _bytes(self, tokens: Raw, edges: Int64s, first: int) -> npt.NDArray[np.float64]:
        """UTF-8 bytes of the tokens with a loss in each document [d]; nan if unknown."""
        if self.bytes_of is None:
            return np.full(len(edges) - 1, np.nan)
        last_id = len(self.bytes_of) - 1
        known_ids = np.where((tokens < 0) | (tokens >= last_id), last_id, tokens)
        total = np.append(0, np.cumsum(self.bytes_of[known_ids]))
        return (total[edges[1:]] - total[np.minimum(edges[:-1] + first, edges[1:])]).astype(np.float64)

    def _gradient_norms(
        self, of: Windows, tokens: Raw, edges: Int64s, count: Int64s
    ) -> npt.NDArray[np.float32]:
        """L2 norm of the gradient of the mean loss of each document [d]; nan without a loss."""
        gradient_norms = np.full(len(count), np.nan, np.float32)
        if not self.gradients:
            return gradient_norms
        windows_per_batch = max(1, self.batch // self.window)
        window_bounds = np.searchsorted(of.owner, np.arange(len(count) + 1))
        for document in np.flatnonzero(count).tolist():
            own_windows = np.arange(window_bounds[document], window_bounds[document + 1])
            # The sum is kept in fp32 for any dtype of the weights.
            total: dict[str, torch.Tensor] = {}
            for batch_begin in range(0, len(own_windows), windows_per_batch):
                chosen = own_windows[batch_begin : batch_begin + windows_per_batch]
                rows = self._rows(of, chosen, tokens, edges)
                given_tokens, segments, strange = make_inputs(self.model, rows, self.eod)
                at = np.arange(given_tokens.shape[1] - 1)
                is_new = (at < of.length[chosen, None]) & (at >= of.fresh[chosen, None]) & ~strange[:, 1:]
                losses = losses_of(self.model, given_tokens, segments)
                mean_loss = (losses * torch.from_numpy(is_new).to(losses.device)).sum() / int(count[document])
                gradients_found = torch.autograd.grad(mean_loss, list(self.model.parameters()))
                for (name, _), gradient in zip(self.model.named_parameters(), gradients_found, strict=True):
                    total[name] = gradient.float() + total[name] if name in total else gradient.float()
            square_sum = sum(g.square().sum(dtype=torch.float64) for g in total.values())
            gradient_norms[document] = math.sqrt(float(square_sum))
        return gradient_norms


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


def cut_windows(lengths: Int64s, size: int, first: int) -> Windows:
    """The windows of documents of these lengths [d], with losses from token `first` (0 or 1) on.

    Each starts with a fresh context, as a training sample does, `size` tokens after the last. Only a document's last
    window overlaps the previous one, so that its tokens have as much context as others: a short rest would look bad.
    """
    loss_counts = np.maximum(lengths - first, 0)
    count = -(-loss_counts // size)
    window_owner = np.repeat(np.arange(len(lengths)), count)
    window_places = (np.arange(len(window_owner)) - np.repeat(np.cumsum(count) - count, count)) * size
    window_lengths = np.minimum(loss_counts[window_owner], size)
    window_begins = np.minimum(window_places, loss_counts[window_owner] - window_lengths)
    return Windows(window_owner, window_begins + first, window_lengths, window_places - window_begins)


def batch_windows(of: Windows, tokens: int) -> Iterator[Int64s]:
    """The indices of windows, in batches of similar length with at most `tokens` tokens when padded to the longest
    (at least one window)."""
    length_order = np.argsort(-of.length, kind="stable")
    batch_begin = 0
    while batch_begin < len(length_order):
        batch_count = max(1, tokens // int(of.length[length_order[batch_begin]]))
        yield length_order[batch_begin : batch_begin + batch_count]
        batch_begin += batch_count


def find_worst_windows(of: Windows, means: Floats, documents: int) -> Int64s:
    """The window with the highest mean [w] of each document, the first of equals: int64 [documents], -1 without any."""
    windows_found = np.full(documents, -1, np.int64)
    # nan, from a broken model, counts as the highest.
    loss_order = np.lexsort((np.arange(len(of)), np.where(np.isnan(means), -np.inf, -means), of.owner))
    firsts = np.flatnonzero(np.append(True, np.diff(of.owner[loss_order]) != 0)) if len(of) else loss_order
    windows_found[of.owner[loss_order[firsts]]] = loss_order[firsts]
    return windows_found


def _read(parcel: Parcel) -> tuple[Raw, Int64s]:
    """The tokens of all documents, one after the other [n], and their edges, int64 [d + 1]."""
    lengths = parcel.end - parcel.first
    if np.array_equal(parcel.end[:-1], parcel.first[1:]):
        all_tokens = parcel.shard.read_raw(int(parcel.first[0]), int(lengths.sum()))
    else:
        bounds = zip(parcel.first.tolist(), lengths.tolist(), strict=True)
        all_tokens = np.concatenate([parcel.shard.read_raw(first, length) for first, length in bounds])
    return all_tokens, np.append(0, np.cumsum(lengths))
