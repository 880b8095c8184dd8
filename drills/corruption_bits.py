"""Flip one bit of a tensor: of an element that matters, as a bit of nothing changes nothing."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

AMONG = 64  # elements of which the largest is struck
# By position, how far into the tensor they are. At its very beginning is a sample's first token, which attends only to
# itself, whatever its query is; at its very end the padding of the vocabulary.
NEAR = (1 / 8, 1 / 2, 7 / 8)
# Numbers of bits in fp32, by position. bf16 is the upper half of fp32. An exponent changes by 16, 8 or 4, so that the
# number is far off without being infinite.
BITS = {"sign": (31, 31, 31), "exponent": (27, 26, 25), "mantissa": (22, 21, 20)}
WHOLE = {torch.float32: torch.int32, torch.bfloat16: torch.int16}  # floats that can be struck, and their bits


class Change(BaseModel):
    """What was done. element: its index in the flat tensor, None if it was done to many."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    tensor: str
    element: int | None = None
    before: float | None = None
    after: float | None = None


@torch.no_grad()
def flip(tensor: Tensor, what: str, position: int, name: str) -> Change:
    """In place. tensor: fp32 or bf16, of any strides. what: a key of BITS. position: 0, 1 or 2, of the bit, and of the
    element: in its first part, its middle or its last part. name: of the tensor, for people."""
    held = tensor.detach()
    index = _chosen(held.flatten(), position)
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), held.shape))
    bit = BITS[what][position] - (32 - 8 * held.element_size())
    element = held[at].reshape(1).clone()
    before = float(element)
    # int64, as the highest bit is no int32; it wraps to the negative number with these bits.
    element.view(WHOLE[held.dtype]).bitwise_xor_(torch.tensor(1 << bit).to(WHOLE[held.dtype]))
    held[at] = element[0]
    return Change(tensor=name, element=index, before=before, after=float(element))


def _chosen(flat: Tensor, position: int) -> int:
    """The largest of a few elements; of all if those are zero, as padding is."""
    first = int((flat.numel() - min(AMONG, flat.numel())) * NEAR[position])
    among = flat[first : first + AMONG].float().abs()
    if among.max() > 0:
        return first + int(among.argmax())
    return int(flat.float().abs().argmax())
