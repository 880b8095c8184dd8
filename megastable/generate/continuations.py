"""The loop: several continuations of a prompt, token by token, as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megastable.base.errors import CheckpointError
from megastable.checkpoint.plain import PlainModel
from megastable.data.tokenizer import Tokenizer
from megastable.generate.cache import KeyValueCache, extend
from megastable.generate.decoding import StreamDecoder, cut
from megastable.generate.sampling import Sampling, pick

End = Literal["eod", "stop", "length"]


@dataclass(frozen=True)
class TextPiece:
    """What a token adds to sample number `sample`.

    text: what can be shown now; a character of several tokens comes with the last of them. logprob: of the token by the
    model itself (temperature 1, nothing left out), nats. end: why the sample ends here: the end-of-document token, a
    stop text, or it is long enough.
    """

    sample: int
    text: str
    token: int
    logprob: float
    end: End | None = None


class Continuations:
    """`number` samples that go on from one prompt, int64 ids; it is read when this is built.

    known: only ids below it are chosen. seed: any numbers; sample i depends on them and on i alone, not on `number`
    (but for rounding, which may turn a choice that was close). Raises CheckpointError when the model says nothing.
    """

    def __init__(
        self,
        model: PlainModel,
        prompt: Sequence[int],
        sampling: Sampling,
        number: int,
        seed: Sequence[int],
        known: int,
    ) -> None:
        self._model, self._sampling, self._known = model, sampling, known
        self._uniforms = [np.random.default_rng([*seed, sample]) for sample in range(number)]
        self._cache = KeyValueCache()
        self.going = list(range(number))
        hidden = extend(model, torch.tensor([list(prompt)], device=model.device), self._cache)
        self._hidden = hidden[-1].expand(number, -1)
        self._cache.choose(torch.zeros(number, dtype=torch.int64, device=model.device))
        self._chosen: Tensor | None = None

    @torch.no_grad()
    def step(self) -> list[tuple[int, int, float]]:
        """(sample, its next token, the token's log-probability) of every sample that goes on."""
        if self._chosen is not None:
            self._hidden = extend(self._model, self._chosen[:, None], self._cache)[-1]
        logits = self._model.logits(self._hidden)[:, : self._model.vocabulary].float()
        if not bool(logits.isfinite().all()):
            raise CheckpointError(
                f"{self._model.checkpoint}: the model's logits are not finite: its weights are of a run that had "
                "diverged, or their precision is too low for them (try --dtype fp32)"
            )
        uniforms = torch.tensor(
            [self._uniforms[sample].random() for sample in self.going], dtype=torch.float64
        )
        self._chosen = pick(logits[:, : self._known], self._sampling, uniforms.to(logits.device))
        logprobs = logits.log_softmax(-1).gather(-1, self._chosen[:, None])[:, 0]
        return list(zip(self.going, self._chosen.tolist(), logprobs.tolist(), strict=True))

    def finish(self, samples: Sequence[int]) -> None:
        """These need no more tokens."""
        rows = [row for row, sample in enumerate(self.going) if sample not in samples]
        if len(rows) < len(self.going) and self._chosen is not None:
            index = torch.tensor(rows, dtype=torch.int64, device=self._chosen.device)
            self._chosen = self._chosen[index]
            self._cache.choose(index)
            self.going = [self.going[row] for row in rows]


def write(
    model: PlainModel, tokenizer: Tokenizer, prompt: Sequence[int], sampling: Sampling, *, number: int, most: int,
    seed: Sequence[int], ends: Collection[int], stops: Sequence[str] = (),
) -> Iterator[TextPiece]:  # fmt: skip
    """Continue `prompt`, at least one id: pieces of all samples in turn, each sample's last one with its `end`.

    most: tokens of a sample, at least one. seed: any numbers. ends: tokens that end a sample; stops: texts that do, and
    are no part of it. Raises CheckpointError, and what torch raises where memory does not suffice.
    """
    known = min(model.vocabulary, tokenizer.vocab_size)
    samples = Continuations(model, prompt, sampling, number, seed, known)
    decoders = [StreamDecoder(tokenizer, prompt) for _ in range(number)]
    held = [""] * number
    for count in range(1, most + 1):
        ended = []
        for sample, token, logprob in samples.step():
            end: End | None = "length" if count == most else None
            if token in ends:
                end, new = "eod", ""
            else:
                new = decoders[sample].feed(token)
            if end is not None:
                new += decoders[sample].end()
            text, held[sample], met = cut(held[sample] + new, stops)
            if met:
                end = "stop"
            elif end is not None:
                text += held[sample]
            if end is not None:
                ended.append(sample)
            yield TextPiece(sample, text, token, logprob, end)
        samples.finish(ended)
        if not samples.going:
            return
