"""Split a text at its tokens, so that each can be coloured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megastable.data.tokenizer import Tokenizer
from megastable.report.sheet import Span

HOT = 12.0  # nats: the loss with the strongest colour; a vocabulary of 160,000 has ln = 12
CONTEXT = 4  # preceding tokens that a token's text may depend on: the first of a text loses its space
LONGEST = 8  # maximum tokens per character


def spans(
    ids: Sequence[int], tokenizer: Tokenizer | None, losses: Sequence[float] | None = None
) -> list[Span]:
    """The text of `ids`, split at tokens; joined it equals `tokenizer.decode`. losses: nats, one per token.

    Tokens that form a character only together are one piece, with the highest of their losses. Without a tokenizer, or
    for ids beyond its vocabulary, the ids themselves are shown.
    """
    if tokenizer is None or max(ids, default=0) >= tokenizer.vocab_size:
        hints = _hints(ids, losses)
        return [Span(f"{token} ", heat, hint) for token, (heat, hint) in zip(ids, hints)]
    if losses is None:
        return [Span(tokenizer.decode(ids))] if ids else []
    found, at = [], 0
    for text, count in _pieces(ids, tokenizer):
        inside = losses[at : at + count]
        hottest = max(inside, key=lambda loss: -math.inf if math.isnan(loss) else loss)
        found.append(Span(text, _heat(hottest), f"{hottest:.2f} nats"))
        at += count
    return found


def _hints(ids: Sequence[int], losses: Sequence[float] | None) -> list[tuple[float | None, str]]:
    return [(None, "")] * len(ids) if losses is None else [(_heat(x), f"{x:.2f} nats") for x in losses]


def _heat(loss: float) -> float | None:
    return None if math.isnan(loss) else min(1.0, max(0.0, loss / HOT))


def _pieces(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """Texts and the number of tokens of each."""
    begin = 0
    for end in range(1, len(ids) + 1):
        before = ids[max(0, begin - CONTEXT) : begin]
        known = tokenizer.decode(before)
        text = tokenizer.decode([*before, *ids[begin:end]])[len(known) :]
        # An incomplete character shows as U+FFFD.
        if text.endswith("\ufffd") and end - begin < LONGEST and end < len(ids):
            continue
        yield text, end - begin
        begin = end
