"""Continues a prompt token by token: key/value cache, sampling, streaming decoder.

    cache = KeyValueCache()
    hidden = extend(model, prompt, cache)           # int64 [b, n] -> [n, b, hidden]
    hidden = extend(model, next_tokens, cache)      # [b, 1] -> [1, b, hidden]

The same modules as in training, but for the attention's core: see `Attention.heads` and `Block.around`. Shapes as in
model/attention.py: b rows, q query heads, k key/value heads, d head width, n new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megastable.base.errors import CheckpointError, DataError
from megastable.checkpoint.plain import PlainModel
from megastable.data.tokenizer import Tokenizer
from megastable.model.attention import Attention, rope_table, rotate_pairs
from megastable.model.gpt import Block, Head
from megastable.model.kernels import AttentionScores, softcap

SMALLEST = 64  # tokens that there is room for at least
AT_ONCE = 2048  # tokens of a long prompt in one pass: what bounds the memory of activations and masks


class KeyValueCache:
    """Rotated keys, and values, of the `length` tokens of every row that were read so far; by block."""

    def __init__(self) -> None:
        self.length = 0
        self._held: dict[str, Tensor] = {}  # [2, b, k, room, d]

    def put_tokens(self, block: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v [b, k, n, d] behind what is there; all of both, [b, k, length + n, d]."""
        b, heads, n, d = k.shape
        end = self.length + n
        held_cache = self._held.get(block)
        if held_cache is None or end > held_cache.shape[3]:
            grown_cache = k.new_empty(2, b, heads, _room(end), d)
            if held_cache is not None:
                grown_cache[..., : self.length, :] = held_cache[..., : self.length, :]
            held_cache = self._held[block] = grown_cache
        held_cache[0, :, :, self.length : end] = k
        held_cache[1, :, :, self.length : end] = v
        return held_cache[0, :, :, :end], held_cache[1, :, :, :end]

    def choose_rows(self, rows: Tensor) -> None:
        """Go on with these rows of the batch, int64 [n]; one may come more than once."""
        self._held = {block: held.index_select(1, rows) for block, held in self._held.items()}


def _room(tokens: int) -> int:
    return max(SMALLEST, 1 << (tokens - 1).bit_length()) if tokens else SMALLEST


# Not inference_mode: `rope_table` is kept, and what it gives there could not be used in training any more.
@torch.no_grad()
def read_tokens(model: PlainModel, tokens: Tensor, cache: KeyValueCache) -> Tensor:
    """Read tokens int64 [b, n] behind those in the cache: what the head takes, [n, b, hidden].

    Long inputs are read in parts. Equal to `model.hidden` of all tokens at once but for rounding.
    """
    hidden_parts = []
    for token_part in tokens.split(AT_ONCE, dim=1):
        x: Any = token_part
        for layer in model.gpt.children():
            if isinstance(layer, Block):
                x = layer.run_around(x, partial(_attend, layer.attention, layer.name, cache))
            elif not isinstance(layer, Head):
                x = layer(x)
        cache.length += token_part.shape[1]
        hidden_parts.append(x)
    return hidden_parts[0] if len(hidden_parts) == 1 else torch.cat(hidden_parts)


def _attend(attention: Attention, name: str, cache: KeyValueCache, x: Tensor) -> Tensor:
    """`Attention.forward` of x [n, b, hidden] behind what the cache holds."""
    q, k, v = attention.split_heads(attention.qkv(x))
    n, b = q.shape[:2]
    before = cache.length
    table = rope_table(_room(before + n), attention.rope, x.device)
    cos, sin = (t[before : before + n, None, None] for t in table)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin), v))
    keys, values = cache.put_tokens(name, k, v)
    scores = attention.scores
    if before == 0 and scores.cap is None and scores.window is None:
        y = attention.core.run(q, k, v, None, scores)
    else:
        y = _core(q, keys, values, scores)
    return attention.out(y.permute(2, 0, 1, 3).reshape(n, b, -1))


def _core(q: Tensor, k: Tensor, v: Tensor, scores: AttentionScores) -> Tensor:
    """Attention of the last n of L positions: q [b, q, n, d], k and v [b, k, L, d]. Only the keys that a window reaches
    are read.

    The queries that share a key/value head are laid behind each other: the cache is read as it is, not repeated.
    """
    (b, heads, n, d), (kv, key_length) = q.shape, k.shape[1:3]
    groups = heads // kv
    first_key = 0 if scores.window is None else max(0, key_length - n + 1 - scores.window)
    k, v = k[:, :, first_key:], v[:, :, first_key:]
    mask = None
    if n > 1:
        key_index = torch.arange(first_key, key_length, device=q.device)
        mask = scores.make_mask(key_index[-n:], key_index).repeat(groups, 1)
    grouped_queries = q.unflatten(1, (kv, groups)).flatten(2, 3)
    if scores.cap is None:
        y = F.scaled_dot_product_attention(grouped_queries, k, v, attn_mask=mask, scale=scores.scale)
    else:
        # Written out: torch's kernels do not cap logits. In fp32, as in training.
        products = grouped_queries.float() @ k.float().transpose(-2, -1)
        z = softcap(products * scores.score_factor(d), scores.cap)
        z = z if mask is None else z.masked_fill(~mask, -torch.inf)
        y = (z.softmax(-1) @ v.float()).to(q.dtype)
    return y.reshape(b, heads, n, d)


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the most likely token always; 1 is what the model says. top_k: only of so many most likely
    ones; 0 = of all. top_p: only of the fewest most likely ones that have at least this share of the probability.

    Raises DataError for what cannot be.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise DataError(f"temperature {self.temperature}: give 0 (the most likely token always) or more")
        if self.top_k < 0:
            raise DataError(f"top-k {self.top_k}: give how many tokens to choose from, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise DataError(f"top-p {self.top_p}: give a share above 0, at most 1")


def pick_tokens(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> Tensor:
    """The next token of each row, int64 [n]: logits [n, v], uniforms fp64 [n] in [0, 1).

    First the temperature, then top-k, then top-p of what is left. One uniform number decides by the inverse of the
    distribution function, so that rounding in the logits hardly ever changes a choice.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores, ids = logits.double(), None
    if 0 < sampling.top_k < logits.shape[-1]:
        scores, ids = scores.topk(sampling.top_k)
    elif sampling.top_p < 1:
        scores, ids = scores.sort(descending=True)
    # The largest first taken away: a small temperature must not overflow.
    share = ((scores - scores.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        share = share.masked_fill(share.cumsum(-1) - share >= sampling.top_p, 0.0)
    share_below = share.cumsum(-1)
    chosen_index = (share_below <= uniforms[:, None] * share_below[:, -1:]).sum(-1, keepdim=True)
    return (chosen_index if ids is None else ids.gather(-1, chosen_index)).squeeze(-1)


CONTEXT = 4  # tokens before one that its text may depend on: a space that the first of a text loses
# Bytes of a character that can be there without the last, each a token at most, shown as U+FFFD.
UNFINISHED = 3


class StreamDecoder:
    """What `feed_token` and at last `end_text` return is, joined, what the tokens say behind `before`."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._begin(list(before[-CONTEXT:]))

    def _begin(self, ids: list[int]) -> None:
        self._ids, self._given = ids, len(self._tokenizer.decode(ids))

    def feed_token(self, token: int) -> str:
        """The text that is certain now; "" while a character is unfinished."""
        self._ids.append(token)
        whole_text = self._tokenizer.decode(self._ids)
        held_characters = len(whole_text) - len(whole_text.rstrip("\ufffd"))
        new_text = whole_text[self._given : len(whole_text) - min(held_characters, UNFINISHED)]
        self._given += len(new_text)
        if not held_characters:
            self._begin(self._ids[-CONTEXT:])
        return new_text

    def end_text(self) -> str:
        """What was held back: a character that stays unfinished shows as U+FFFD."""
        text = self._tokenizer.decode(self._ids)[self._given :]
        self._given += len(text)
        return text


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str, bool]:
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


@torch.no_grad()
def choose_tokens(
    model: PlainModel, hidden: Tensor, sampling: Sampling, uniforms: Sequence[float], known: int
) -> tuple[Tensor, list[float]]:
    """The next token of each row, int64 [n], and its log-probability: hidden [n, hidden], uniforms as for
    `pick_tokens`. known: only ids below it are chosen. Raises CheckpointError when the model says nothing."""
    logits = model.compute_logits(hidden)[:, : model.vocabulary].float()
    if not bool(logits.isfinite().all()):
        raise CheckpointError(
            f"{model.checkpoint}: the model's logits are not finite: its weights are of a run that had diverged, or "
            "their precision is too low for them (try --dtype fp32)"
        )
    on_device = torch.tensor(uniforms, dtype=torch.float64).to(logits.device)
    chosen = pick_tokens(logits[:, :known], sampling, on_device)
    return chosen, logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()


def write_continuations(
    model: PlainModel, tokenizer: Tokenizer, prompt: Sequence[int], sampling: Sampling, *, number: int, most: int,
    seed: Sequence[int], ends: Collection[int], stops: Sequence[str] = (),
) -> Iterator[TextPiece]:  # fmt: skip
    """Continue `prompt`, at least one id: pieces of all samples in turn, each sample's last one with its `end_text`.

    most: tokens of a sample, at least one. seed: any numbers; sample i depends on them and on i alone, not on `number`
    (but for rounding, which may turn a choice that was close). ends: tokens that end a sample; stops: texts that do,
    and are no part of it. Raises CheckpointError, and what torch raises where memory does not suffice.
    """
    known_ids = min(model.vocabulary, tokenizer.vocab_size)
    dice = [np.random.default_rng([*seed, sample]) for sample in range(number)]
    decoders = [StreamDecoder(tokenizer, prompt) for _ in range(number)]
    held_texts = [""] * number
    cache = KeyValueCache()
    going = list(range(number))  # samples that need more tokens: the rows of the batch
    prompt_ids = torch.tensor([list(prompt)], device=model.device)
    hidden = read_tokens(model, prompt_ids, cache)[-1].expand(number, -1)
    cache.choose_rows(torch.zeros(number, dtype=torch.int64, device=model.device))
    for token_count in range(1, most + 1):
        uniforms = [dice[sample].random() for sample in going]
        chosen, logprobs = choose_tokens(model, hidden, sampling, uniforms, known_ids)
        kept_rows = []
        for row, (sample, token) in enumerate(zip(going, chosen.tolist(), strict=True)):
            end: End | None = "length" if token_count == most else None
            if token in ends:
                end, new_text = "eod", ""
            else:
                new_text = decoders[sample].feed_token(token)
            if end is not None:
                new_text += decoders[sample].end_text()
            shown_text, held_texts[sample], met_stop = cut_at_stop(held_texts[sample] + new_text, stops)
            if met_stop:
                end = "stop"
            elif end is not None:
                shown_text += held_texts[sample]
            if end is None:
                kept_rows.append(row)
            yield TextPiece(sample, shown_text, token, logprobs[row], end)
        if not kept_rows:
            return
        if len(kept_rows) < len(going):
            row_index = torch.tensor(kept_rows, dtype=torch.int64, device=chosen.device)
            chosen, going = chosen[row_index], [going[kept_row] for kept_row in kept_rows]
            cache.choose_rows(row_index)
        hidden = read_tokens(model, chosen[:, None], cache)[-1]
