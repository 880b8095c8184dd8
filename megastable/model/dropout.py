"""Dropout whose mask is a hash of sample, token, channel and place in the model (Hinton et al., arXiv:1207.0580).

No random state: a layout, a resume, a rewind or a recomputation has no influence on which elements are dropped. A
sample's key comes from its absolute position in the order of samples, so a later epoch drops others. The idea of
counting in place of drawing: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Odd, with bits everywhere; products of int64 wrap. The last two and the shifts are those of MurmurHash3's finalizer.
OF_SAMPLE, OF_TOKEN, OF_CHANNEL, OF_PLACE = (
    0x5851F42D4C957F2D, 0x14057B7EF767814F, 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D,
)  # fmt: skip
MIXING = 0x7F51AFD7ED558CCD, 0x44CEB9FE1A85EC53
FINE = 24  # bits of the comparison with the share to drop


def _mixed(x: Tensor) -> Tensor:
    """Every bit depends on every bit of x, int64."""
    for factor in MIXING:
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * factor
    return x ^ ((x >> 33) & 0x7FFFFFFF)


def keys_of(positions: Tensor, seed: int) -> Tensor:
    """Keys, int64 [b], of the samples at these absolute positions of a run."""
    return _mixed(positions * OF_SAMPLE + seed)


def at_places(keys: Tensor, *places: int) -> Tensor:
    """Keys, int64 [places, b], of samples at places in the model, numbers from 0 on. Not for compiled code, which would
    be compiled again for every place."""
    return torch.stack([keys + _wrapped(place * OF_PLACE) for place in places])


def _wrapped(number: int) -> int:
    """As a product of int64 would be."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def dropped(x: Tensor, keys: Tensor, share: float, first: int) -> Tensor:
    """x [s, b, h] without a random `share` of its elements, the others divided by 1 - share. keys: int64 [b], of
    `at_places`; first: position in the sample of this rank's first token."""
    s, h = x.shape[0], x.shape[2]
    tokens = torch.arange(first, first + s, device=x.device)
    channels = torch.arange(h, device=x.device)
    rows = _mixed(keys + tokens[:, None] * OF_TOKEN)
    bits = (_mixed(rows[..., None] + channels * OF_CHANNEL) >> (64 - FINE)) & ((1 << FINE) - 1)
    return x.masked_fill(bits < round(share * (1 << FINE)), 0.0) * (1 / (1 - share))
