"""Where the text goes: to a terminal or a pipe as it comes, or as JSON when it is complete."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from megastable.base.text import plural, visible
from megastable.generate.continuations import TextPiece

KEPT = "\n\t"
BOLD, DIM, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


@dataclass
class Continuation:
    """A continuation. logprobs: nats, of each token; end: see `TextPiece`, "" while it goes on."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: str = ""

    def add(self, piece: TextPiece) -> None:
        self.text += piece.text
        self.tokens.append(piece.token)
        self.logprobs.append(piece.logprob)
        self.end = piece.end or ""


class Printer:
    """Prints `number` samples as they are written: the first one live, the others when it is their turn.

    On a terminal the prompt comes first, and characters that do not show are made visible; elsewhere the text comes as
    it is. Several samples have a line between them. `samples`: what was written so far.
    """

    def __init__(self, console: Console, number: int) -> None:
        self.samples = [Continuation() for _ in range(number)]
        self._console = console
        self._ended = True  # the line

    def print(self, prompt: str, pieces: Iterable[TextPiece]) -> None:
        """All of it; interrupted, the line is ended."""
        at = 0
        try:
            self._begin(at, prompt)
            for piece in pieces:
                self.samples[piece.sample].add(piece)
                if piece.sample == at:
                    self._out(piece.text)
                while at < len(self.samples) and self.samples[at].end:
                    self._end_line()
                    at += 1
                    if at < len(self.samples):
                        self._begin(at, prompt)
                        self._out(self.samples[at].text)
        finally:
            self._end_line()

    def _begin(self, sample: int, prompt: str) -> None:
        if len(self.samples) > 1:
            self._out(f"--- {sample + 1} of {len(self.samples)} ---\n", DIM)
        if self._console.is_terminal:
            self._out(prompt, BOLD)

    def _end_line(self) -> None:
        if not self._ended:
            self._out("\n")

    def _out(self, text: str, style: str = "") -> None:
        if not text:
            return
        if self._console.is_terminal:
            # Not by rich: it would count the columns of a tab from the beginning of the piece.
            shown = visible(text, keep=KEPT)
            styled = style and self._console.color_system is not None
            self._console.file.write(f"{style}{shown}{PLAIN}" if styled else shown)
        else:
            self._console.file.write(text)
        self._console.file.flush()
        self._ended = text.endswith("\n")


def as_json(prompt: str, samples: Iterable[Continuation], about: dict[str, Any]) -> str:
    """One object: what it was made with and how fast, the prompt, the samples."""
    told = [
        {"text": s.text, "end": s.end, "tokens": s.tokens, "logprobs": [round(x, 6) for x in s.logprobs]}
        for s in samples
    ]
    return json.dumps(about | {"prompt": prompt, "samples": told})


class SpeedWatch:
    """How fast pieces come. prompt: its tokens; number: of samples."""

    def __init__(self, prompt: int, number: int) -> None:
        self._prompt, self._number = prompt, number
        self._tokens = 0
        self._begin = self._first = self._last = time.perf_counter()

    def of(self, pieces: Iterable[TextPiece]) -> Iterator[TextPiece]:
        self._begin = self._first = self._last = time.perf_counter()
        for piece in pieces:
            self._last = time.perf_counter()
            if not self._tokens:
                self._first = self._last
            self._tokens += 1
            yield piece

    @property
    def rate(self) -> float:
        """Tokens a second of all samples together, after the first of each; 0 when there are no more."""
        seconds = self._last - self._first
        return max(0, self._tokens - self._number) / seconds if seconds > 0 else 0.0

    @property
    def told(self) -> str:
        rate = f"{plural(self._tokens, 'token')}, {self.rate:,.1f} tokens/s"
        return f"{rate} (prompt of {plural(self._prompt, 'token')}: {self._first - self._begin:.2f} s)"


def note(text: str) -> None:
    """A line on stderr for whoever sits there."""
    print(visible(text, keep="\n"), file=sys.stderr, flush=True)
