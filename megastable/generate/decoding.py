"""Text out of tokens that come one by one: never half a character, never the beginning of what ends the text."""

from __future__ import annotations

from collections.abc import Sequence

from megastable.data.tokenizer import Tokenizer

CONTEXT = 4  # tokens before one that its text may depend on: a space that the first of a text loses
UNFINISHED = (
    3  # bytes of a character that can be there without the last, each a token at most, shown as U+FFFD
)


class StreamDecoder:
    """What `feed` and at last `end` return is, joined, what the tokens say behind `before`."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._begin(list(before[-CONTEXT:]))

    def _begin(self, ids: list[int]) -> None:
        self._ids, self._given = ids, len(self._tokenizer.decode(ids))

    def feed(self, token: int) -> str:
        """The text that is certain now; "" while a character is unfinished."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        held = len(text) - len(text.rstrip("\ufffd"))
        new = text[self._given : len(text) - min(held, UNFINISHED)]
        self._given += len(new)
        if not held:
            self._begin(self._ids[-CONTEXT:])
        return new

    def end(self) -> str:
        """What was held back: a character that stays unfinished shows as U+FFFD."""
        text = self._tokenizer.decode(self._ids)[self._given :]
        self._given += len(text)
        return text


def cut(text: str, stops: Sequence[str]) -> tuple[str, str, bool]:
    """(what may be shown, what may be the beginning of a stop, whether one was met) of text that goes on.

    What may be shown ends before the first stop that is in there.
    """
    at = min((found for stop in stops if (found := text.find(stop)) >= 0), default=None)
    if at is not None:
        return text[:at], "", True
    longest = max((len(stop) for stop in stops), default=1) - 1
    for begin in range(max(0, len(text) - longest), len(text)):
        if any(stop.startswith(text[begin:]) for stop in stops):
            return text[:begin], text[begin:], False
    return text, "", False
