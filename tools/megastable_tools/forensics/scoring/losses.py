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
from megastable.config.recipe import find_recipe
from megastable.data.loader import lengths_at, segments_of
from megastable.data.manifest import Manifest, TokenizerInfo
from megastable.model.loss import cross_entropy
from megastable.report.postmortem.sample_texts import Library

LOGITS = 1 << 26  # bytes of fp32 logits at a time
BATCH = 1 << 13  # tokens of a forward pass

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]


def load_model(checkpoint: Path, exact: bool = False, device: str | None = None) -> PlainModel:
    """The model to measure with: in bf16 if it was trained so, unless `exact`; on a GPU if there is one.

    Raises as `load_plain`, and DataError for a missing device.
    """
    try:
        torch_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=torch_device)
    except (RuntimeError, AssertionError) as error:
        raise DataError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
    return load_plain(checkpoint, torch.float32 if exact else None, torch_device)


def losses_of(model: PlainModel, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
    """Cross-entropy of each token after the first: int64 [b, s + 1] -> fp32 [b, s], nats; differentiable.

    The logits of only `LOGITS` bytes' worth of tokens are in memory at a time, for any vocabulary.
    """
    x = model.compute_hidden(tokens[:, :-1], segments).flatten(0, 1)
    labels = tokens[:, 1:].t().flatten()
    chunk_size = max(1, LOGITS // (4 * model.config.padded_vocab))

    def of(x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model.compute_logits(x), labels, model.vocabulary)[0]

    loss_parts = []
    for hidden_part, label_part in zip(x.split(chunk_size), labels.split(chunk_size), strict=True):
        if torch.is_grad_enabled() and len(x) > chunk_size:
            loss_parts.append(
                recomputed(of, hidden_part, label_part, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            loss_parts.append(of(hidden_part, label_part))
    return torch.cat(loss_parts).view(tokens.shape[1] - 1, -1).t()


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
    losses_found = np.empty((len(tokens), tokens.shape[1] - 1), np.float32)
    row_count = max(1, batch // max(losses_found.shape[1], 1))
    # Not inference_mode: the table of positions that the model keeps is used with gradients, too.
    with torch.no_grad():
        for first_row in range(0, len(tokens), row_count):
            rows = tokens[first_row : first_row + row_count]
            cut_lengths = None if lengths is None else lengths[first_row : first_row + row_count]
            given_tokens, segments, is_strange = make_inputs(model, rows, eod, cut_lengths)
            batch_losses = losses_of(model, given_tokens, segments).cpu().numpy()
            batch_losses[is_strange[:, 1:]] = np.inf
            losses_found[first_row : first_row + row_count] = batch_losses
    return losses_found


def make_inputs(
    model: PlainModel, tokens: Int64s, eod: int | None, lengths: Int64s | None = None
) -> tuple[Tensor, Tensor | None, npt.NDArray[np.bool_]]:
    """(tokens, segments, which ids are beyond the vocabulary) of rows [b, s + 1], on the model's device. eod, lengths:
    as in `token_losses`."""
    is_strange = (tokens < 0) | (tokens >= model.vocabulary)
    tokens = np.where(is_strange, 0, tokens)
    segments, apart_eod = None, eod if model.run.data.keep_documents_apart else None
    if apart_eod is not None or lengths is not None:
        segments = torch.from_numpy(segments_of(tokens[:, :-1], apart_eod, lengths)).to(model.device)
    return torch.from_numpy(tokens).to(model.device), segments, is_strange


def losses_under(checkpoint: Path) -> Callable[[Library, Int64s], npt.NDArray[np.floating]]:
    """Load a checkpoint; returns a function for the losses of samples, cut as the library's run read them: (library,
    positions int64 [n]) -> float32 [n, L].

    It raises DataError for samples of another tokenizer, or longer than the model's training sequences.
    """
    model = load_model(checkpoint)

    def losses(library: Library, positions: Int64s) -> npt.NDArray[np.floating]:
        sequence_length = library.source.order.sequence_length
        own_xxh3 = None if library.tokenizer is None else library.tokenizer.xxh3
        check_vocabulary(model, "the samples", library.vocabulary, own_xxh3)
        if sequence_length > model.config.sequence_length:
            raise DataError(
                f"{model.checkpoint} was trained on sequences of {model.config.sequence_length} tokens, the samples "
                f"have {sequence_length}: give a checkpoint that has read as many"
            )
        piece_lengths = lengths_at(library.pieces, positions)
        cut = piece_lengths if (piece_lengths < sequence_length).any() else None
        return token_losses(model, library.source.read_samples(positions), library.source.eod, lengths=cut)

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
        return Manifest.load_manifest(find_recipe(corpora[0].path)).tokenizer if corpora else None
    except DataError:
        return None
