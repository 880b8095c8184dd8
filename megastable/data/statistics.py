"""Token counts and unigram entropy of a corpus: the loss of the best model without context."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.data.manifest import Stream
from megastable.data.source import Source

CHUNK = 1 << 20  # tokens read at a time


def token_counts(stream: Stream, vocab_size: int, limit: int | None = None) -> npt.NDArray[np.int64]:
    """Counts of each token in a stream, or in its first `limit` tokens: int64 [vocab_size]. Reads in chunks."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    end = min(stream.tokens, stream.tokens if limit is None else limit)
    for first in range(0, end, CHUNK):
        tokens = stream.read(first, min(CHUNK, end - first))
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def sample_entropy(source: Source, tokens: int, vocab_size: int) -> float:
    """The unigram entropy, nats per token, of about `tokens` tokens from the beginning of a run's order, drawn from its
    corpora as blended. Ids outside the vocabulary are left out; nan if a shard cannot be read.
    """
    try:
        ids = source.raw_samples(np.arange(max(1, tokens // source.order.sequence_length)))[:, :-1].ravel()
    except DataError:
        return float("nan")
    return unigram_entropy(np.bincount(ids[(ids >= 0) & (ids < vocab_size)], minlength=vocab_size))


def unigram_entropy(counts: npt.NDArray[np.integer]) -> float:
    """Entropy in nats per token of the distribution that `counts` [vocab_size] describe; 0.0 for no tokens.

    It is the loss of the best model without context on the counted text itself: a lower loss on that text
    proves use of the context.
    """
    seen = counts[counts > 0].astype(np.float64)
    shares = seen / seen.sum()
    return float(abs(-(shares * np.log(shares)).sum()))
