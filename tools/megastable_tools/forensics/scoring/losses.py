"""Per-token losses under a checkpoint, as training computes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from megastable.base.errors import DataError
from megastable.checkpoint.plain import PlainModel, load_plain
from megastable.config.recipe import find
from megastable.data.loader import lengths_at, segments_of
from megastable.data.manifest import Manifest, TokenizerInfo
from megastable.model.loss import cross_entropy
from megastable.report.postmortem.sample_texts import Library

LOGITS = 1 << 26  # bytes of fp32 logits at a time
BATCH = 1 << 13  # tokens of a forward pass

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


def load(checkpoint: Path, exact: bool = False, device: str | None = None) -> PlainModel:
    """The model to measure with: in bf16 if it was trained so, unless `exact`; on a GPU if there is one.

    Raises as `load_plain`, and DataError for a missing device.
    """
    try:
        on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=on)
    except (RuntimeError, AssertionError) as error:
        raise DataError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
    return load_plain(checkpoint, torch.float32 if exact else None, on)


def losses_of(model: PlainModel, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
    """Cross-entropy of each token after the first: int64 [b, s + 1] -> fp32 [b, s], nats; differentiable.

    The logits of only `LOGITS` bytes' worth of tokens are in memory at a time, for any vocabulary.
    """
    x = model.hidden(tokens[:, :-1], segments).flatten(0, 1)
    labels = tokens[:, 1:].t().flatten()
    count = max(1, LOGITS // (4 * model.config.padded_vocab))

    def of(x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model.logits(x), labels, model.vocabulary)[0]

    parts = []
    for some, wanted in zip(x.split(count), labels.split(count), strict=True):
        if torch.is_grad_enabled() and len(x) > count:
            parts.append(recomputed(of, some, wanted, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(of(some, wanted))
    return torch.cat(parts).view(tokens.shape[1] - 1, -1).t()


def token_losses(
    model: PlainModel,
    tokens: Int64s,
    eod: int | None = None,
    batch: int = BATCH,
    lengths: Int64s | None = None,
) -> Float32s:
    """Cross-entropy of each token after the first of its row: int64 [n, L + 1] -> float32 [n, L], nats.

    An id beyond the vocabulary has infinite loss, and is read as 0 by later tokens. eod: if a run kept documents
    apart, attention ends there, as in training. batch: tokens of a forward pass. lengths: of the pieces that the rows
    are cut into, int64 [n]; None: they are whole.
    """
    found = np.empty((len(tokens), tokens.shape[1] - 1), np.float32)
    count = max(1, batch // max(found.shape[1], 1))
    # Not inference_mode: the table of positions that the model keeps is used with gradients, too.
    with torch.no_grad():
        for first in range(0, len(tokens), count):
            rows = tokens[first : first + count]
            cut = None if lengths is None else lengths[first : first + count]
            given, segments, strange = inputs(model, rows, eod, cut)
            losses = losses_of(model, given, segments).cpu().numpy()
            found[first : first + count] = np.where(strange[:, 1:], np.inf, losses)
    return found


def inputs(
    model: PlainModel, tokens: Int64s, eod: int | None, lengths: Int64s | None = None
) -> tuple[Tensor, Tensor | None, npt.NDArray[np.bool_]]:
    """(tokens, segments, which ids are beyond the vocabulary) of rows [b, s + 1], on the model's device. eod, lengths:
    as in `token_losses`."""
    strange = (tokens < 0) | (tokens >= model.vocabulary)
    tokens = np.where(strange, 0, tokens)
    segments, apart = None, eod if model.run.data.keep_documents_apart else None
    if apart is not None or lengths is not None:
        segments = torch.from_numpy(segments_of(tokens[:, :-1], apart, lengths)).to(model.device)
    return torch.from_numpy(tokens).to(model.device), segments, strange


def losses_under(checkpoint: Path) -> Callable[[Library, Int64s], npt.NDArray[np.floating]]:
    """Load a checkpoint; returns a function for the losses of samples, cut as the library's run read them: (library,
    positions int64 [n]) -> float32 [n, L].

    It raises DataError for samples of another tokenizer, or longer than the model's training sequences.
    """
    model = load(checkpoint)

    def losses(library: Library, positions: Int64s) -> npt.NDArray[np.floating]:
        length = library.source.order.sequence_length
        own = None if library.tokenizer is None else library.tokenizer.xxh3
        check_vocabulary(model, "the samples", library.vocabulary, own)
        if length > model.config.sequence_length:
            raise DataError(
                f"{model.checkpoint} was trained on sequences of {model.config.sequence_length} tokens, the samples "
                f"have {length}: give a checkpoint that has read as many"
            )
        lengths = lengths_at(library.pieces, positions)
        cut = lengths if (lengths < length).any() else None
        return token_losses(model, library.source.samples(positions), library.source.eod, lengths=cut)

    return losses


def check_vocabulary(model: PlainModel, what: str, size: int | None, xxh3: str | None) -> None:
    """Raises DataError if `what` was made with another tokenizer than the model, as far as both are known."""
    trained = tokenizer_of(model)
    # A model may have more ids than its tokenizer.
    if size is not None and (size > model.vocabulary or (trained is None and size != model.vocabulary)):
        raise DataError(
            f"{model.checkpoint} has a vocabulary of {model.vocabulary:,} tokens, {what} one of {size:,}: its losses "
            "would say nothing; give a checkpoint that was trained with the same tokenizer"
        )
    if trained is not None and xxh3 and trained.xxh3 != xxh3:
        raise DataError(
            f"{model.checkpoint} was trained with the tokenizer {trained.file} (xxh3 {trained.xxh3[:8]}), {what} were "
            f"made with another (xxh3 {xxh3[:8]}): the same ids mean other texts; give a checkpoint that fits"
        )


def tokenizer_of(model: PlainModel) -> TokenizerInfo | None:
    """The tokenizer that the model was trained with, if its corpus still exists."""
    corpora = model.run.data.corpora
    try:
        return Manifest.load(find(corpora[0].path)).tokenizer if corpora else None
    except DataError:
        return None
