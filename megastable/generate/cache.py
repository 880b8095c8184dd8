"""The forward pass in steps: keys and values of what was read are kept, so a further token costs one token's work.

    cache = KeyValueCache()
    hidden = extend(model, prompt, cache)           # int64 [b, n] -> [n, b, hidden]
    hidden = extend(model, next_tokens, cache)      # [b, 1] -> [1, b, hidden]

The same modules as in training, but for the attention's core: see `Attention.heads` and `Block.around`. Shapes as in
model/attention.py: b rows, q query heads, k key/value heads, d head width, n new tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megastable.checkpoint.plain import PlainModel
from megastable.model.attention import Attention
from megastable.model.gpt import Block, Head
from megastable.model.rope import rope_table, rotate

SMALLEST = 64  # tokens that there is room for at least
AT_ONCE = 2048  # tokens of a long prompt in one pass: what bounds the memory of activations and masks


class KeyValueCache:
    """Rotated keys, and values, of the `length` tokens of every row that were read so far; by block."""

    def __init__(self) -> None:
        self.length = 0
        self._held: dict[str, Tensor] = {}  # [2, b, k, room, d]

    def put(self, block: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v [b, k, n, d] behind what is there; all of both, [b, k, length + n, d]."""
        b, heads, n, d = k.shape
        end = self.length + n
        held = self._held.get(block)
        if held is None or end > held.shape[3]:
            grown = k.new_empty(2, b, heads, _room(end), d)
            if held is not None:
                grown[..., : self.length, :] = held[..., : self.length, :]
            held = self._held[block] = grown
        held[0, :, :, self.length : end] = k
        held[1, :, :, self.length : end] = v
        return held[0, :, :, :end], held[1, :, :, :end]

    def choose(self, rows: Tensor) -> None:
        """Go on with these rows of the batch, int64 [n]; one may come more than once."""
        self._held = {block: held.index_select(1, rows) for block, held in self._held.items()}


def _room(tokens: int) -> int:
    return max(SMALLEST, 1 << (tokens - 1).bit_length()) if tokens else SMALLEST


# Not inference_mode: `rope_table` is kept, and what it gives there could not be used in training any more.
@torch.no_grad()
def extend(model: PlainModel, tokens: Tensor, cache: KeyValueCache) -> Tensor:
    """Read tokens int64 [b, n] behind those in the cache: what the head takes, [n, b, hidden].

    Long inputs are read in parts. Equal to `model.hidden` of all tokens at once but for rounding.
    """
    parts = []
    for part in tokens.split(AT_ONCE, dim=1):
        x: Any = part
        for layer in model.gpt.children():
            if isinstance(layer, Block):
                x = layer.around(x, partial(_attend, layer.attention, layer.name, cache))
            elif not isinstance(layer, Head):
                x = layer(x)
        cache.length += part.shape[1]
        parts.append(x)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(attention: Attention, name: str, cache: KeyValueCache, x: Tensor) -> Tensor:
    """`Attention.forward` of x [n, b, hidden] behind what the cache holds."""
    q, k, v = attention.heads(x)
    n, b = q.shape[:2]
    before = cache.length
    table = rope_table(_room(before + n), attention.rope, x.device)
    cos, sin = (t[before : before + n, None, None] for t in table)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
    keys, values = cache.put(name, k, v)
    y = attention.core.run(q, k, v, None) if before == 0 else _core(q, keys, values)
    return attention.out(y.permute(2, 0, 1, 3).reshape(n, b, -1))


def _core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for the last n of L positions: q [b, q, n, d], k and v [b, k, L, d].

    The queries that share a key/value head are laid behind each other: the cache is read as it is, not repeated.
    """
    (b, heads, n, d), (kv, length) = q.shape, k.shape[1:3]
    groups = heads // kv
    mask = None
    if n > 1:
        index = torch.arange(length, device=q.device)
        mask = (index <= index[length - n :, None]).repeat(groups, 1)
    grouped = q.unflatten(1, (kv, groups)).flatten(2, 3)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(b, heads, n, d)
